"""A malicious executor answers calls wrongly over ``tcp://``: the client refuses the answer and allocates nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.errors import ConnectionLostError, SymbiosisError, WireError
from symbiosis.transports import stream_client, wire
from symbiosis.transports.stream import frame, payload_of
from symbiosis.transports.tcp_listener import PayloadCourier
from symbiosis.transports.wire import Type
from tests.helpers import IDS, in_thread

Answer = Callable[[Any, int, Any], None]
"""Sends an answer on a line, given the id and the results of a call."""


def fewer_bytes(line: Any, id_: int, results: Any) -> None:
    line.send(wire.pack_result(id_), 64, [bytes(64)])


def another_call(line: Any, id_: int, results: Any) -> None:
    size, parts = payload_of(results)
    line.send(wire.pack_result(id_ + 1000), size, parts)


def after_a_large_message(line: Any, id_: int, results: Any) -> None:
    line.send(wire.pack(Type.PONG, bytes(wire.MAX_TO_JOINED)))
    size, parts = payload_of(results)
    line.send(wire.pack_result(id_), size, parts)


ANSWERS: dict[str, Answer] = {
    "a payload of 1 TiB": lambda line, id_, results: line.send(wire.pack_result(id_), 1 << 40),
    "fewer bytes than are due": fewer_bytes,
    "results of another call": another_call,
    "a large message before the results": after_a_large_message,
    "a chunk of a share": lambda line, id_, results: line.send(wire.pack(Type.SHARE, 0), 4, [b"abcd"]),
    "an error with a payload": lambda line, id_, results: line.send(
        wire.pack(Type.FAILED, id_, "LayerError", "no"), 4, [b"abcd"]
    ),
    "a message to executors": lambda line, id_, results: line.send(wire.pack(Type.CANCEL, id_)),
    "no message": lambda line, id_, results: line.send(b"\xc1"),
}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("what", ANSWERS)
async def test_the_client_ends_the_conversation(
    base: Any, what: str, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: Any, admitted: Any, results: Any, sent: Any) -> None:
        ANSWERS[what](self.line, admitted.message.id, results)
        sent()

    monkeypatch.setattr(PayloadCourier, "answer", answer)

    def synchronous(address: str) -> None:
        with symbiosis.open_model(address, retry=60.0) as model:
            model(IDS)

    async with symbiosis.Executor(base) as executor:
        address = (await executor.listen("tcp://127.0.0.1:0")).address
        before = psutil.Process().memory_info().vms
        if blocking:
            with pytest.raises(WireError):
                await in_thread(synchronous, address)
        else:
            async with symbiosis.connect(address, retry=60.0) as remote, remote.client() as client:
                with pytest.raises(WireError):
                    await client.forward(input_ids=IDS)
        assert psutil.Process().memory_info().vms - before < 4 << 30


@pytest.mark.parametrize("how", ["look", "blocking", "asyncio"])
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
async def test_a_welcome_byte_by_byte_is_given_up(
    how: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_client, "ANSWER_WITHIN_S", 0.5)
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX if scheme == "shm" else socket.AF_INET) as listening:
        listening.bind(str(tmp_path / "s.sock") if scheme == "shm" else ("127.0.0.1", 0))
        listening.listen()

        def serve() -> None:
            with listening.accept()[0] as connected, contextlib.suppress(OSError):
                for byte in frame(wire.pack(Type.WELCOME, {"a": b"x" * 1000})):
                    connected.send(bytes([byte]))
                    if ended.wait(0.05):
                        break

        server = threading.Thread(target=serve)
        server.start()
        address = f"shm://{tmp_path}/s.sock" if scheme == "shm" else f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        transport, begun = make_transport(address, retry=0), time.monotonic()
        ways: dict[str, Callable[[], Any]] = {
            "look": lambda: in_thread(transport.look, address),
            "blocking": lambda: in_thread(transport.connect_blocking, address, "alice"),
            "asyncio": lambda: transport.connect(address, "alice"),
        }
        with pytest.raises(ConnectionLostError):
            await ways[how]()
        took = time.monotonic() - begun
        ended.set()
        server.join(5)
    assert took < 10


@pytest.mark.parametrize("how", ["look", "blocking", "asyncio"])
@pytest.mark.parametrize(
    ("service", "complaint"),
    [
        ("speaks first", "may be the address of another service"),
        ("closes", "closed the connection before it answered as an executor; check the address"),
        ("is silent", "no executor answers on"),
    ],
)
async def test_an_address_of_another_service_is_told(
    how: str, service: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_client, "ANSWER_WITHIN_S", 0.5)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connected:
                if service == "speaks first":
                    connected.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                if service != "closes":
                    ended.wait(10)

        server = threading.Thread(target=serve)
        server.start()
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        transport = make_transport(address, retry=0)
        ways: dict[str, Callable[[], Any]] = {
            "look": lambda: in_thread(transport.look, address),
            "blocking": lambda: in_thread(transport.connect_blocking, address, "alice"),
            "asyncio": lambda: transport.connect(address, "alice"),
        }
        with pytest.raises(SymbiosisError, match=complaint) as caught:
            await ways[how]()
        ended.set()
        server.join(5)
    assert address in str(caught.value)
