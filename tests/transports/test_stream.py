"""Messages and payloads on a byte stream, with TLS and without."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.core.requests import Columns
from symbiosis.errors import WireError
from symbiosis.transports.arena import spread
from symbiosis.transports.keys import Keyring, new_key
from symbiosis.transports.stream import (
    MAX_HANDSHAKE,
    MAX_OF_TLS,
    ByteStream,
    TlsByteStream,
    frame,
    matrices,
    payload_of,
)
from tests.transports.raw import key_updates, tls_of

Found = tuple[bytes, bytes]


def feed(stream: ByteStream, data: bytes, take: Any = None, found: list[Found] | None = None) -> list[Found]:
    """Give the stream bytes. Append the messages and payloads that are complete to ``found``, and return it."""
    found = [] if found is None else found
    while data:
        room = stream.room()
        count = min(len(room), len(data))
        assert count
        room[:count] = data[:count]
        stream.filled(count)
        data = data[count:]
        while (message := stream.next()) is not None:
            if message[1] == 0:
                found.append((message[0], b""))
            elif take is None or take(message[0]):
                target = bytearray(message[1])
                stream.into(memoryview(target), lambda m=message[0], t=target: found.append((m, bytes(t))))
    return found


MESSAGES = st.lists(st.tuples(st.binary(max_size=60), st.binary(max_size=60) | st.just(bytes(200_000))), max_size=8)


@given(MESSAGES, st.data())
def test_messages_do_not_depend_on_how_bytes_are_divided(messages: list[Found], data: st.DataObject) -> None:
    sent = b"".join(frame(message, len(payload)) + payload for message, payload in messages)
    stream, found = ByteStream(1000), list[Found]()
    while sent:
        size = data.draw(st.integers(1, len(sent)))
        feed(stream, sent[:size], found=found)
        sent = sent[size:]
    assert found == messages


def test_a_payload_that_is_not_taken_is_dropped() -> None:
    stream = ByteStream(1000)
    sent = frame(b"one", 200_000) + bytes(200_000) + frame(b"two", 5) + b"12345"
    assert feed(stream, sent, lambda message: message == b"two") == [(b"two", b"12345")]


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_arrive() -> None:
    with pytest.raises(WireError, match="101 bytes is announced"):
        feed(ByteStream(100), (101).to_bytes(4, "little") + bytes(8))


def test_a_large_message() -> None:
    stream, message = ByteStream(10 << 20), bytes(range(256)) * 20_000
    assert feed(stream, frame(message) + frame(b"small")) == [(message, b""), (b"small", b"")]
    assert len(stream.room()) < 1 << 20  # the memory of the message is freed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_a_payload(dtype: torch.dtype) -> None:
    tensors = (torch.randn(3, 7).to(dtype), torch.randn(7, 3).to(dtype).t()[:, :5])
    size, parts = payload_of(tensors)
    columns = (Columns(7, dtype), Columns(5, dtype))
    assert size == sum(map(len, parts)) == spread(3, columns)
    found = matrices(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), 3, columns)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


# TLS


@pytest.fixture
def ends(tmp_path: Path) -> tuple[TlsByteStream, TlsByteStream]:
    for name in ("server", "alice"):
        new_key(tmp_path, name)
    client = TlsByteStream(1000, tls_of(tmp_path / "alice.secret", tmp_path / "log"), server=False)
    return client, TlsByteStream(1000, Keyring(tmp_path).context(), server=True)


def shake_hands(client: ByteStream, server: ByteStream) -> None:
    for _ in range(3):
        feed(server, client.unsent())
        feed(client, server.unsent())


def test_messages_over_tls(ends: tuple[TlsByteStream, TlsByteStream]) -> None:
    client, server = ends
    assert not client.ready
    shake_hands(client, server)
    assert client.ready
    assert server.ready
    for one, other in ((client, server), (server, client)):
        sent = b"".join([*one.encode(b"hello", 100_000, [bytes(99_999), b"", b"x"]), *one.encode(b"again")])
        assert b"hello" not in sent
        found = feed(other, sent[:1000])
        assert feed(other, sent[1000:], found=found) == [(b"hello", bytes(99_999) + b"x"), (b"again", b"")]


def test_a_changed_byte_ends_tls(ends: tuple[TlsByteStream, TlsByteStream]) -> None:
    client, server = ends
    shake_hands(client, server)
    sent = bytearray(b"".join(client.encode(b"hello")))
    sent[-1] ^= 1
    with pytest.raises(ssl.SSLError):
        feed(server, bytes(sent))


def test_an_endless_handshake_is_refused(ends: tuple[TlsByteStream, TlsByteStream]) -> None:
    _, server = ends
    record = b"\x16\x03\x01\x40\x00\x01\x01\x00\x00" + bytes(0x4000 - 4)  # a ClientHello of 16 MiB
    with pytest.raises((WireError, ssl.SSLError)):
        feed(server, record * (MAX_HANDSHAKE // len(record) + 2))


def test_the_bytes_of_a_handshake_are_counted(ends: tuple[TlsByteStream, TlsByteStream]) -> None:
    """OpenSSL has limits of its own; a peer without a key may send 64 KiB, whatever they are."""
    _, server = ends
    server._before = MAX_HANDSHAKE
    with pytest.raises(WireError, match="no end of the TLS handshake"):
        feed(server, b"\x16\x03")


@pytest.mark.parametrize("sender", ["CLIENT", "SERVER"])
def test_requests_for_new_keys_do_not_fill_the_other_end(
    tmp_path: Path, ends: tuple[TlsByteStream, TlsByteStream], sender: str
) -> None:
    shake_hands(*ends)
    one, other = ends if sender == "CLIENT" else ends[::-1]
    records = key_updates(tmp_path / "log", sender, MAX_OF_TLS // 20)
    feed(other, records[:270])  # ten of them, each of which OpenSSL answers
    assert feed(one, b"".join(other.encode(b"hello"))) == [(b"hello", b"")]
    with pytest.raises(WireError, match="new TLS keys"):
        feed(other, records[270:])


def test_a_tls_version_before_1_3_is_refused(tmp_path: Path, ends: tuple[TlsByteStream, TlsByteStream]) -> None:
    context = tls_of(tmp_path / "alice.secret")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake_hands(TlsByteStream(1000, context, server=False), ends[1])
