"""A hand-written client of ``tcp://`` that can send messages that a real client would not send."""

from __future__ import annotations

import select
import socket
import ssl
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.transports import wire
from symbiosis.transports.keys import load_key
from symbiosis.transports.sockets import resolve
from symbiosis.transports.stream import ByteStream, TlsByteStream
from symbiosis.transports.wire import CallMessage, Type
from tests.helpers import in_thread

__all__ = ["Raw", "a_call", "hello", "key_updates", "raw", "receive", "rows", "tls_of", "violate"]


class Raw:
    """The connection of a raw client. Its TLS secrets are written to the file ``log``."""

    def __init__(self, address: str, key: Path | None, log: Path | None = None) -> None:
        self.socket = socket.create_connection(resolve(address), 20)
        if key is None:
            self._stream = ByteStream(wire.MAX_TO_CLIENT)
        else:
            self._stream = TlsByteStream(wire.MAX_TO_CLIENT, tls_of(key, log), server=False)
            while not self._stream.ready:
                self.socket.sendall(self._stream.unsent())
                self._fill()
            self.socket.sendall(self._stream.unsent())

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: bytes, *parts: bytes) -> None:
        """Send a message and the parts of its payload."""
        for part in self._stream.encode(message, sum(map(len, parts)), parts):
            self.socket.sendall(part)

    def poll(self) -> bool:
        """Return whether bytes have arrived."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def _fill(self) -> None:
        count = self.socket.recv_into(self._stream.room())
        if not count:
            raise EOFError("the executor has closed the connection")
        self._stream.filled(count)

    def receive(self) -> tuple[Type, Any]:
        """Return the type and content of the next message."""
        while (found := self._stream.next()) is None:
            self._fill()
        return wire.unpack_answer(found[0])


def tls_of(key: Path, log: Path | None = None) -> ssl.SSLContext:
    context = load_key(key).context
    assert context is not None
    if log is not None:
        context.keylog_filename = str(log)
    return context


def key_updates(log: Path, sender: str, count: int) -> bytes:
    """Return records in which one end of a TLS connection, ``CLIENT`` or ``SERVER``, asks for new keys so many times.
    It must have sent nothing since the handshake.

    Args:
        log: the file with the connection's secrets.
    """
    found = [line.split() for line in log.read_text().splitlines() if line.startswith(f"{sender}_TRAFFIC_SECRET_0 ")]
    secret = bytes.fromhex(found[-1][2])
    assert len(secret) == 48, "the cipher is not TLS_AES_256_GCM_SHA384"

    def expanded(label: bytes, length: int) -> bytes:
        label = b"tls13 " + label
        info = length.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
        return HKDFExpand(SHA384(), length, info).derive(secret)

    records = b""
    for _ in range(count):
        header = b"\x17\x03\x03\x00\x16"
        records += header + AESGCM(expanded(b"key", 32)).encrypt(expanded(b"iv", 12), b"\x18\0\0\1\1\x16", header)
        secret = expanded(b"traffic upd", 48)
    return records


def raw(address: str, key: Path | None = None, log: Path | None = None) -> Raw:
    return Raw(address, key, log)


def hello(name: str | None) -> bytes:
    return wire.pack_hello(wire.Hello(name))


def a_call(id_: int, n: int = 1, layer: int = 0) -> bytes:
    return wire.pack_call(CallMessage(id_, Key((layer,), Pass.FORWARD), Kind.DECODE, n, 0, 0))


def rows(n: int = 1, width: int = 32) -> bytes:
    return bytes(4 * n * width)


async def violate(address: str, *parts: bytes) -> None:
    """Join, send a message that breaks the protocol, and check that the executor ends the connection for it."""
    with raw(address) as mallory:
        mallory.send(hello("mallory"))
        assert (await in_thread(receive, mallory))[0] is Type.WELCOME
        mallory.send(*parts)
        type_, content = await in_thread(receive, mallory)
        assert type_ is Type.ENDED
        assert content[0] == "WireError"


def receive(connection: Raw) -> tuple[Type, Any]:
    return connection.receive()
