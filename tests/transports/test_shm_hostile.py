"""Tests of ``shm://`` with limits and with clients that break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import ConnectionLostError, RefusedError, WireError
from symbiosis.transports import wire
from symbiosis.transports.arena import Arena
from symbiosis.transports.limits import Limits
from symbiosis.transports.stream import ByteStream, frame
from tests.helpers import IDS, in_thread, open_descriptors, until


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"shm://{tmp_path}/s.sock"


class Raw:
    """A hand-written client that can send messages that a real client would not send."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(address.removeprefix("shm://"))
        self.frames = ByteStream(wire.MAX_TO_CLIENT)

    def __del__(self) -> None:
        self.socket.close()

    def send(self, *messages: bytes) -> None:
        self.socket.sendall(b"".join(frame(message) for message in messages))

    def hello(self, name: str) -> dict[str, Any]:
        self.send(wire.pack_hello(wire.Hello(name)))
        _, descriptors, _, _ = socket.recv_fds(self.socket, 1, 2)
        type_, content = self.next()
        assert type_ is wire.Type.WELCOME
        self.arena = Arena(descriptors[0], content[0]["arena_bytes"])
        for descriptor in descriptors:
            os.close(descriptor)
        return content[0]  # type: ignore[no-any-return]

    def next(self) -> tuple[wire.Type, Any]:
        while (found := self.frames.next()) is None:
            count = self.socket.recv_into(self.frames.room())
            if not count:
                raise EOFError
            self.frames.filled(count)
        return wire.unpack_answer(found[0])


def a_call(id_: int, rows: int = 1, place: int = 0, answer: int = 1 << 16, layer: int = 0) -> bytes:
    return wire.pack_call(wire.CallMessage(id_, Key((layer,), Pass.FORWARD), Kind.DECODE, rows, place, answer))


ENDED = wire.Type.ENDED
BAD = {
    "no HELLO": ([wire.pack(wire.Type.BEGIN)], "BEGIN, but has not joined"),
    "another protocol": ([b"GET / HTTP/1.1\r\n\r\n"], "no message"),
    "another version": ([wire.pack(wire.Type.HELLO, wire.MAGIC, 99, "x")], f"speaks {wire.VERSION}"),
    "a name that is none": ([wire.pack_hello(wire.Hello("a\nb"))], "printable"),
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_first_messages_are_refused(base: Any, address: str, what: str) -> None:
    messages, reason = BAD[what]

    def mallory() -> Any:
        raw = Raw(address)
        raw.send(*messages)
        return raw.next()

    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        type_, content = await in_thread(mallory)
        assert type_ is ENDED
        assert reason in content[1]


OUTSIDE = {
    "rows beyond the arena": a_call(1, rows=1 << 40),
    "a place beyond the arena": a_call(1, place=1 << 50),
    "an answer beyond the arena": a_call(1, answer=(1 << 30) - 64),
    "no rows": a_call(1, rows=0),
    "an odd place": wire.pack(wire.Type.CALL, 1, (0,), 0, False, 0, 1, 3, 64),
    "a negative place": wire.pack(wire.Type.CALL, 1, (0,), 0, False, 0, 1, -64, 64),
    "a layer that is text": wire.pack(wire.Type.CALL, 1, ("x",), 0, False, 0, 1, 0, 64),
    "too many layers": wire.pack(wire.Type.CALL, 1, tuple(range(100)), 0, False, 0, 1, 0, 64),
    "an unknown pass": wire.pack(wire.Type.CALL, 1, (0,), 9, False, 0, 1, 0, 64),
    "a number for fp32": wire.pack(wire.Type.CALL, 1, (0,), 0, 2, 0, 1, 0, 64),
    "too few fields": wire.pack(wire.Type.CALL, 1),
    "a bool for a number": wire.pack(wire.Type.CALL, True, (0,), 0, False, 0, 1, 0, 64),
    "a second HELLO": wire.pack_hello(wire.Hello("y")),
    "an executor's message": wire.pack(wire.Type.RESULT, 1),
}


@pytest.mark.parametrize("what", OUTSIDE)
async def test_bad_messages_end_the_connection_of_that_client_only(base: Any, address: str, what: str) -> None:
    expected = base(input_ids=IDS).logits

    def mallory() -> Any:
        raw = Raw(address)
        raw.hello("mallory")
        raw.send(OUTSIDE[what])
        return raw.next()

    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as remote, remote.client(name="alice") as alice:
            type_, content = await in_thread(mallory)
            assert (type_, content[0]) == (ENDED, "WireError")
            assert executor.status()["clients"] == ["alice"]
            assert torch.equal((await alice.forward(input_ids=IDS)).logits, expected)


async def test_an_unknown_layer_fails_that_call_alone(base: Any, address: str) -> None:
    def tenant() -> Any:
        raw = Raw(address)
        raw.hello("curious")
        raw.send(a_call(1, layer=999), a_call(2))
        return raw.next(), raw.next()

    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        first, second = await in_thread(tenant)
        assert first[0] is wire.Type.FAILED
        assert "there are 15" in first[1][2]
        assert second == (wire.Type.RESULT, [2])


async def test_a_client_that_floods_waits_and_other_clients_do_not(base: Any, address: str) -> None:
    limits = Limits(calls=4)
    stop = threading.Event()

    def mallory() -> int:
        raw = Raw(address)
        raw.hello("mallory")
        raw.socket.settimeout(0.2)
        sent = 0
        while not stop.is_set() and sent < 200_000:
            try:
                raw.send(*[a_call(sent + index) for index in range(100)])
                sent += 100
            except TimeoutError:
                continue  # the executor has stopped reading, as required
        raw.socket.close()
        return sent

    async with symbiosis.Executor(base, policy="no-lockstep") as executor:
        await executor.listen(address, limits=limits)
        async with symbiosis.connect(address) as remote, remote.client(name="alice") as alice:
            flood = asyncio.create_task(in_thread(mallory))
            await asyncio.sleep(0.2)
            for _ in range(5):
                await asyncio.wait_for(alice.forward(input_ids=IDS), 20)
                assert executor.status()["outstanding"] <= limits.calls + 1
            stop.set()
            await flood


async def test_a_silent_connection_is_closed(base: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.transports.stream_line.HELLO_WITHIN_S", 0.1)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(address)
        type_, content = await in_thread(lambda: Raw(address).next())
        assert type_ is ENDED
        assert "no HELLO" in content[1]
        await until(lambda: not listener.lines)  # type: ignore[attr-defined]


async def test_cancelled_while_it_opens(base: Any, address: str) -> None:
    """Cancellation at any moment leaves no session and no descriptor."""
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as remote:
            await (await remote.client().open()).close()
            before = open_descriptors()
            for number in range(40):
                client = remote.client(name=f"client-{number}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.open(), 0.0005 * number)
                await client.close()
            await until(lambda: not executor.status()["clients"])
            await until(lambda: open_descriptors() <= before)


async def test_a_frozen_executor_is_given_up(base: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the executor exists, so the kernel reports no end, but it does not answer pings."""
    monkeypatch.setattr("symbiosis.transports.conversation.PING_AFTER_S", 0.2)
    monkeypatch.setattr("symbiosis.transports.conversation.UNANSWERED", 2)
    monkeypatch.setattr("symbiosis.transports.channel.WATCH_S", 0.05)
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address, retry=0.0) as remote, remote.client() as client:
            monkeypatch.setattr("symbiosis.transports.peer.Peer.received", lambda *_: None)
            with pytest.raises(ConnectionLostError):
                await asyncio.wait_for(client.forward(input_ids=IDS), 20)


async def test_another_user_is_refused(base: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.transports.shm.peer_of", lambda _: (1, 1234))
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        with pytest.raises(RefusedError, match="user 1234"):
            await symbiosis.connect(address).__aenter__()


@pytest.mark.parametrize("own", [4711, 0])
def test_another_user_that_listens_is_told_nothing(own: int, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a user could have taken a path in /tmp. Root, who could read its processes' memory, connects to all."""
    monkeypatch.setattr("symbiosis.transports.shm_client.os.geteuid", lambda: own)
    monkeypatch.setattr("symbiosis.transports.shm_client.peer_of", lambda _: (1, 1234))
    monkeypatch.setattr("symbiosis.transports.stream_client.ANSWER_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address.removeprefix("shm://"))
        listening.listen()
        with pytest.raises(RefusedError if own else ConnectionLostError, match="user 1234" if own else "no executor"):
            make_transport(address, retry=0.0).look(address)
        with listening.accept()[0] as connected:
            assert bool(connected.recv(1)) == (own == 0)


@pytest.mark.parametrize("which", ["arena", "share"])
async def test_a_file_that_the_executor_could_truncate_is_refused(
    base: Any, address: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def unsealed(file: Any, what: int, value: int = 0) -> int:
        skipped = what == fcntl.F_ADD_SEALS and bool(value & fcntl.F_SEAL_WRITE) == (which == "share")
        return 0 if skipped else control(file, what, value)

    monkeypatch.setattr(fcntl, "fcntl", unsealed)
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address, retry=0.0) as remote:
            with pytest.raises(WireError, match="could truncate"):
                await remote.client().open()
