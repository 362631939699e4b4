"""Memory of the executor that all connections share: calls that wait for it, and clients that keep it occupied."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import symbiosis
from symbiosis.core.budget import CONNECTION_BYTES
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import BusyError
from symbiosis.transports import peer, stream_line, tcp_listener, wire
from symbiosis.transports.limits import Limits
from symbiosis.transports.stream import frame
from symbiosis.transports.wire import CallMessage, Type
from tests.attack import Tenant
from tests.helpers import IDS, in_thread, until
from tests.transports.raw import a_call, hello, raw, receive, rows

LOCAL = "tcp://127.0.0.1:0"
MIB = 1 << 20
LARGE = 16_000
"""A call of so many rows of layer 0 counts for 8 MiB of the 64 that 104 MiB leave."""
LARGEST = 32_000
"""A call of so many rows is the largest."""


async def join(address: str, name: str) -> Any:
    """Return a connection that has joined."""
    line = raw(address)
    line.send(hello(name))
    await in_thread(receive, line)
    return line


def announce(line: Any) -> None:
    """Send a call without its tensors."""
    line.socket.sendall(frame(a_call(1, LARGE), len(rows(LARGE))))


async def fill(address: str) -> list[Any]:
    """Have eight tenants fill the executor's memory with calls whose tensors do not come."""
    lines = [await join(address, f"mallory-{number}") for number in range(8)]
    for line in lines:
        announce(line)
    return lines


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each connection be that of another tenant, as if it came from another host."""
    numbers = iter(range(1000))
    original = peer.Peer.identified
    monkeypatch.setattr(peer.Peer, "identified", lambda self, tenant: original(self, f"{tenant}-{next(numbers)}"))


@pytest.mark.usefixtures("owners")
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
async def test_a_call_waits_for_room_and_short_calls_do_not(base: Any, scheme: str, tmp_path: Path) -> None:
    address = f"shm://{tmp_path}/s.sock"
    async with symbiosis.Executor(base, max_bytes=104 * MIB, policy="no-lockstep") as executor:
        network: Any = await executor.listen(LOCAL)
        await executor.listen(address)
        stalled = await fill(network.address)
        budget = executor.service.budget
        await until(lambda: budget.held > 49 * MIB)
        where = address if scheme == "shm" else network.address
        channel = await make_transport(where).connect(where, "alice")
        reply = channel.send(Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (torch.ones(LARGEST, 32),)))
        async with symbiosis.connect(where) as remote, remote.client(name="bob") as bob:
            await bob.forward(input_ids=IDS)
        assert not reply.done()
        for line in stalled:
            line.socket.close()
        (result,) = await asyncio.wait_for(asyncio.ensure_future(reply), 20)
        assert result.shape[0] == LARGEST
        channel.close()
        await until(lambda: budget.held == 0)


@pytest.mark.usefixtures("owners")
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
async def test_a_call_without_room_fails_and_the_next_one_is_served(
    base: Any, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "ROOM_WITHIN_S", 0.3)
    async with symbiosis.Executor(base, max_bytes=104 * MIB) as executor:
        listener: Any = await executor.listen(LOCAL)
        await executor.listen(f"shm://{tmp_path}/s.sock")
        where = listener.address if scheme == "tcp" else f"shm://{tmp_path}/s.sock"
        stalled = await fill(listener.address)
        await until(lambda: executor.service.budget.held > 49 * MIB)
        channel = await make_transport(where).connect(where, "alice")
        key = Key((0,), Pass.FORWARD)
        late = channel.send(Call(key, Kind.PREFILL, (torch.ones(LARGEST, 32),)))
        with pytest.raises(BusyError, match="no room"):
            await asyncio.wait_for(asyncio.ensure_future(late), 20)
        await asyncio.wait_for(asyncio.ensure_future(channel.send(Call(key, Kind.DECODE, (torch.ones(1, 32),)))), 20)
        channel.close()
        for line in stalled:
            line.socket.close()


@pytest.mark.parametrize("what", ["send its tensors", "read its answers"])
async def test_a_client_is_disconnected_that_does_not(what: str, base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_line, "LOOK_S", 0.05)
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL)
        line = await join(listener.address, "mallory")
        await asyncio.sleep(1)
        assert len(listener.lines) == 1, "a client is disconnected only if a call or an answer is under way"
        if what == "send its tensors":
            announce(line)
        else:
            for number in range(4):
                await in_thread(line.send, a_call(number, 4 * LARGE), rows(4 * LARGE))
        await until(lambda: not listener.lines)
        assert executor.service.budget.held == 0
        line.socket.close()


@pytest.mark.parametrize("message", [wire.pack(Type.SHARE, 0), wire.pack(Type.STATUS)], ids=["share", "status"])
async def test_questions_of_a_client_that_does_not_read_wait(base: Any, message: bytes) -> None:
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL)
        line = await join(listener.address, "mallory")
        line.socket.setblocking(False)
        (served,) = listener.lines
        with contextlib.suppress(BlockingIOError):
            while True:
                line.send(message)
                await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        assert served._transport.get_write_buffer_size() < CONNECTION_BYTES // 2
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            await alice.forward(input_ids=IDS)
        line.socket.close()


@pytest.mark.parametrize("what", ["pings", "calls", "failing calls"])
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
async def test_small_answers_that_are_not_read_are_few(base: Any, scheme: str, what: str, tmp_path: Path) -> None:
    """Each takes a kilobyte of the executor, however short it is."""
    sent: list[int] = []
    async with symbiosis.Executor(base, policy="no-lockstep") as executor:
        listener: Any = await executor.listen(LOCAL if scheme == "tcp" else f"shm://{tmp_path}/s.sock")
        line = await in_thread(Tenant, listener.address, None)
        (served,) = listener.lines if scheme == "tcp" else listener.connected
        if scheme == "tcp":  # whose kernel buffers take megabytes
            served._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send = served.send

        def counted(*parts: Any, **named: Any) -> None:
            sent.append(served._transport.get_write_buffer_size())
            send(*parts, **named)

        served.send = counted
        number = itertools.count()
        message, payload = wire.PING, b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                while True:
                    if what == "calls":
                        key = Key((0,), Pass.FORWARD)
                        message = wire.pack_call(CallMessage(next(number) % 1000, key, Kind.DECODE, 1, 0, 4096))
                        payload = rows() if scheme == "tcp" else b""
                    elif what == "failing calls":
                        message = a_call(next(number), 1, 99)
                    if line.push():
                        line.waiting = b"".join(
                            line._stream.encode(message, len(payload), [payload] if payload else [])
                        )
                    await asyncio.sleep(0)
        waited = len(sent) - max(index for index, size in enumerate(sent) if not size)
        assert len(sent) > 100
        assert waited < 200
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            await alice.forward(input_ids=IDS)
        line.socket.close()


@pytest.mark.parametrize("how", ["cancelled", "cut off"])
async def test_the_memory_of_a_call_is_freed_when_it_counts_no_more(
    how: str, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not later, when Python looks for cycles."""
    blocks: list[Any] = []

    def block(size: int) -> tuple[torch.Tensor, memoryview]:
        array = numpy.empty(size, numpy.uint8)
        blocks.append(weakref.ref(array))
        return torch.from_numpy(array), array.data

    monkeypatch.setattr(tcp_listener, "block", block)
    async with symbiosis.Executor(base, policy="lockstep") as executor:
        listener: Any = await executor.listen(LOCAL)
        thinking, line = [await join(listener.address, name) for name in ("bob", "mallory")]
        gc.collect()  # before bob begins: after a second without a request he would count as stopped
        gc.disable()
        try:
            thinking.send(wire.pack(Type.BEGIN))
            await until(lambda: executor.engine.scheduler.thinking == 1)
            announce(line)
            await until(lambda: bool(blocks))
            assert blocks[0]() is not None
            if how == "cancelled":
                line.socket.sendall(rows(LARGE))
                await until(lambda: executor.engine.scheduler.outstanding == 1)
                line.send(wire.pack(Type.CANCEL, 1))
                await in_thread(receive, line)
            else:
                line.socket.close()
            await until(lambda: executor.service.budget.held <= 2 * CONNECTION_BYTES)
            await asyncio.sleep(0)
            assert blocks[0]() is None
        finally:
            gc.enable()
        for one in (thinking, line):
            one.socket.close()


@pytest.mark.parametrize("unread", [False, True])
async def test_a_client_that_sends_no_more_is_gone_in_a_second(base: Any, unread: bool) -> None:
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL)
        line = await join(listener.address, "mallory")
        (served,) = listener.lines
        while unread and not served._transport.get_write_buffer_size():
            served.send(bytes(4096))  # as STATUS would
        line.socket.shutdown(socket.SHUT_WR)
        await until(lambda: not listener.lines)
        assert executor.service.budget.held == 0
        line.socket.close()


@pytest.mark.usefixtures("owners")
@pytest.mark.parametrize("limits", [Limits(calls=1), Limits(rows=LARGEST)], ids=["calls", "rows"])
async def test_a_client_at_its_limits_is_served_after_its_call_had_no_room(base: Any, limits: Limits) -> None:
    async with symbiosis.Executor(base, max_bytes=104 * MIB) as executor:
        network: Any = await executor.listen(LOCAL)
        stalled = await fill(network.address)
        await until(lambda: executor.service.budget.held > 49 * MIB)
        limited: Any = await executor.listen(LOCAL, limits=limits)
        channel = await make_transport(limited.address).connect(limited.address, "alice")
        reply = channel.send(Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (torch.ones(LARGEST, 32),)))
        await until(lambda: bool(executor.service.budget._waiting))
        for line in stalled:
            line.socket.close()
        (result,) = await asyncio.wait_for(asyncio.ensure_future(reply), 20)
        assert result.shape[0] == LARGEST
        channel.close()


@pytest.mark.parametrize("limits", [Limits(calls=1), Limits(rows=LARGEST)], ids=["calls", "rows"])
async def test_a_client_exactly_at_its_limits_is_served(base: Any, limits: Limits) -> None:
    """The executor stops reading at the limit, and the tensors of the call that reaches it are still to come."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, limits=limits)
        channel = await make_transport(listener.address).connect(listener.address, "alice")
        calls = [Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (torch.ones(LARGEST, 32),)) for _ in range(3)]
        replies = [asyncio.ensure_future(channel.send(call)) for call in calls]
        for (result,) in await asyncio.wait_for(asyncio.gather(*replies), 20):
            assert result.shape[0] == LARGEST
        channel.close()


async def test_clients_of_one_process_do_not_keep_each_other_from_getting_room(base: Any, tmp_path: Path) -> None:
    """Their arenas stay occupied between calls, and all of them are in a walk."""
    address = f"shm://{tmp_path}/s.sock"
    async with symbiosis.Executor(base, max_bytes=104 * MIB, policy="no-lockstep") as executor:
        await executor.listen(address)

        async def walk(name: str) -> None:
            channel = await make_transport(address).connect(address, name)
            channel.begin_walk()
            for _ in range(3):
                call = Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (torch.ones(LARGEST, 32),))
                await asyncio.ensure_future(channel.send(call))
            channels.append(channel)

        channels: list[Any] = []
        await asyncio.wait_for(asyncio.gather(*[walk(f"client-{number}") for number in range(4)]), 20)
        assert executor.service.budget.held > 30 * MIB, "an arena counts until its client leaves"
        for channel in channels:
            channel.end_walk()
            channel.close()
        await until(lambda: executor.service.budget.held == 0)


async def test_a_connection_without_room_ends_at_once(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL)
        budget = executor.service.budget
        assert budget.take("others", budget.total)
        with raw(listener.address) as line, pytest.raises((EOFError, ConnectionError)):
            await in_thread(receive, line)
        await until(lambda: not listener.lines)
        assert budget.held == budget.total
        budget.give_back("others", budget.total)
