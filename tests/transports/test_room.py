"""Memory of the executor that all connections share: calls that wait for it, and clients that keep it occupied."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import socket
import time
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import symbiosis
from symbiosis.core.budget import CONNECTION_BYTES, Account
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import BusyError, ClientClosedError, UsageError
from symbiosis.testing import run_job, run_job_plain
from symbiosis.transports import peer, stream_line, tcp_listener, wire
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.limits import Limits
from symbiosis.transports.stream import frame
from symbiosis.transports.wire import CallMessage, Type
from tests.attack import Tenant
from tests.helpers import IDS, SHORT, assert_close, in_thread, lora, until
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
    monkeypatch.setattr(stream_line, "CHECK_S", 0.05)
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


@pytest.mark.parametrize("encrypted", [False, True])
async def test_answers_count_until_the_client_has_read_them(base: Any, keys: Path, encrypted: bool) -> None:
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL, keys=keys if encrypted else None)
        line = await in_thread(raw, listener.address, keys / "alice.secret" if encrypted else None)
        await in_thread(line.send, hello("alice"))
        await in_thread(receive, line)
        budget = executor.service.budget
        await until(lambda: budget.held == CONNECTION_BYTES)
        await in_thread(line.send, a_call(1, 8 * LARGE), rows(8 * LARGE))  # 16 MiB, and as many of results
        await until(lambda: executor.statistics().requests == 1)
        await asyncio.sleep(0.2)
        assert budget.held > 32 * MIB
        assert (await in_thread(receive, line))[0] is Type.RESULT
        await in_thread(line.send, wire.PING)
        assert (await in_thread(receive, line))[0] is Type.PONG
        await until(lambda: budget.held == CONNECTION_BYTES)
        line.socket.close()


@pytest.mark.parametrize("message", [wire.pack(Type.SHARE, 0), wire.pack(Type.STATUS)], ids=["share", "status"])
async def test_questions_of_a_client_that_does_not_read_wait(base: Any, message: bytes) -> None:
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL)
        line = await join(listener.address, "mallory")
        line.socket.setblocking(False)
        (served,) = listener.lines
        for end in (line.socket, served._transport.get_extra_info("socket")):  # the kernel's buffers take megabytes
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, buffer, 65536)
        rest, refused = b"", 0
        while refused < 30:  # until the executor has read nothing for 0.3 s
            rest = rest or frame(message)
            try:
                rest = rest[line.socket.send(rest) :]
                refused = 0
                await asyncio.sleep(0)
            except BlockingIOError:
                refused += 1
                await asyncio.sleep(0.01)
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
        (served,) = listener.lines
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
        last, end = 0, time.monotonic() + 20
        quiet_until = end
        while time.monotonic() < min(end, quiet_until):  # until no answer has come for half a second
            if what == "calls":
                key = Key((0,), Pass.FORWARD)
                message = wire.pack_call(CallMessage(next(number) % 1000, key, Kind.DECODE, 1, 0, 4096))
                payload = rows() if scheme == "tcp" else b""
            elif what == "failing calls":
                message = a_call(next(number), 1, 99)
            if line.push():
                line.waiting = b"".join(line._stream.encode(message, len(payload), [payload] if payload else []))
            if len(sent) > last:
                last, quiet_until = len(sent), time.monotonic() + 0.5
            await asyncio.sleep(0)
        assert sent[-1] > 0, "the kernel takes no more"
        waited = len(sent) - max(index for index, size in enumerate(sent) if not size)
        assert len(sent) > 100
        assert waited < 200
        async with symbiosis.connect(listener.address) as remote, remote.client(name="alice") as alice:
            await alice.forward(input_ids=IDS)
        line.socket.close()


@pytest.mark.usefixtures("stops_late")
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
    """The tensors of the call that reaches the limit are still to come when its message is read."""
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(LOCAL, limits=limits)
        channel = await make_transport(listener.address).connect(listener.address, "alice")
        calls = [Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (torch.ones(LARGEST, 32),)) for _ in range(3)]
        replies = [asyncio.ensure_future(channel.send(call)) for call in calls]
        for (result,) in await asyncio.wait_for(asyncio.gather(*replies), 20):
            assert result.shape[0] == LARGEST
        channel.close()


@pytest.mark.parametrize("limits", [Limits(calls=1), Limits(rows=8)], ids=["calls", "rows"])
async def test_a_client_exactly_at_its_limits_hears_that_the_executor_is_alive(
    base: Any, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    """Its call waits for longer than an executor may be silent. When the client leaves, the executor notices."""
    monkeypatch.setattr("symbiosis.transports.conversation.PING_AFTER_S", 0.02)  # so 25 times this is too long
    monkeypatch.setattr("symbiosis.transports.channel.WATCH_S", 0.01)
    call = Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (torch.ones(8, 32),))
    async with symbiosis.Executor(base, policy="rate-limit:tokens_per_s=0.03,burst_s=1") as executor:
        listener = await executor.listen(LOCAL, limits=limits)
        channel = await make_transport(listener.address, retry=0.0).connect(listener.address, "alice")
        await asyncio.ensure_future(channel.send(call))
        reply = asyncio.ensure_future(channel.send(call))
        await asyncio.sleep(1.0)
        assert not reply.done()
        channel.close()
        await until(lambda: not executor.service.clients)
        with contextlib.suppress(ClientClosedError):
            await reply


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_call_that_is_too_large_when_its_executor_has_returned(
    base: Any, tmp_path: Path, scheme: str, blocking: bool
) -> None:
    """It was made before, when the executor's limits were higher. Smaller calls are answered."""
    address = f"shm://{tmp_path}/s" if scheme == "shm" else LOCAL
    large, small = [Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (torch.ones(rows, 32),)) for rows in (LARGE, 2)]
    async with symbiosis.Executor(base) as executor:
        first = await executor.listen(address)
        transport = make_transport(first.address)
        if blocking:
            channel: Any = await asyncio.to_thread(transport.connect_blocking, first.address, "alice")
        else:
            channel = await transport.connect(first.address, "alice")
        await first.close()
        answer = asyncio.ensure_future(asyncio.to_thread(channel.call, large))
        await asyncio.sleep(0.2)
        second = await executor.listen(first.address, limits=Limits(arena_bytes=MIB))
        with pytest.raises(UsageError, match=r"a call of 16000 rows needs \d+ bytes .* the executor allows 1048576"):
            await asyncio.wait_for(answer, 30)
        (result,) = await asyncio.wait_for(asyncio.to_thread(channel.call, small), 30)
        assert result.shape[0] == 2
        await asyncio.to_thread(channel.close) if blocking else channel.close()
        await second.close()


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


def large_call(rows: int, seed: int = 0) -> Call:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))
    return Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (x,))


def assert_right(base: Any, call: Call, result: torch.Tensor) -> None:
    """Compare with the plain model's first layer."""
    with torch.no_grad():
        expected = base.model.layers[0].self_attn.q_proj(call.tensors[0])
    torch.testing.assert_close(result, expected)


async def answer(channel: Any, call: Call) -> torch.Tensor:
    """Make a call on the channel of either driver."""
    if isinstance(channel, BlockingChannel):
        (result,) = await in_thread(channel.call, call)
    else:
        (result,) = await asyncio.ensure_future(channel.send(call))
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("driver", "seconds"), [pytest.param("asyncio", 10, marks=pytest.mark.thorough), ("asyncio", 1), ("blocking", 1)]
)
async def test_idle_clients_that_keep_large_arenas_make_room_for_a_newcomer(
    base: Any, driver: str, seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seconds == 1:
        monkeypatch.setattr(peer, "MAKE_ROOM_S", 1.0)
    assert seconds == peer.MAKE_ROOM_S
    address = f"shm://{tmp_path}/s.sock"
    async with symbiosis.Executor(base, max_bytes=104 * MIB, policy="no-lockstep") as executor:
        listener: Any = await executor.listen(address)
        budget = executor.service.budget

        async def channel_of(name: str) -> Any:
            if driver == "asyncio":
                return await make_transport(address).connect(address, name)
            return await in_thread(make_transport(address).connect_blocking, address, name)

        idle = []
        for number in range(10):
            idle.append(await channel_of(f"idle-{number}"))
            rows = (budget.total - budget.held - 2 * MIB) // (3 * 256)  # it counts three times
            call = large_call(min(rows, LARGEST), number)
            assert_right(base, call, await asyncio.wait_for(answer(idle[-1], call), 20))
        assert budget.held > 0.9 * budget.total
        newcomer = await channel_of("newcomer")
        before, began = set(listener.lines), time.monotonic()
        call = large_call(LARGEST)
        assert_right(base, call, await asyncio.wait_for(answer(newcomer, call), 30))
        assert time.monotonic() - began > seconds - 0.5
        left = before - listener.lines
        assert 0 < len(left) <= 3, "no more than are needed"
        calls = [large_call(100, number) for number in range(10)]
        for one, result in zip(calls, await asyncio.gather(*map(answer, idle, calls)), strict=True):
            assert_right(base, one, result)
        assert len(listener.lines) == 11
        assert len(left & listener.lines) == 0
        for channel in (*idle, newcomer):
            channel.close()
        await until(lambda: budget.held == 0)


async def test_the_second_attempt_of_a_newcomer_finds_room(base: Any, tmp_path: Path) -> None:
    address = f"shm://{tmp_path}/s.sock"
    async with symbiosis.Executor(base, max_bytes=104 * MIB, policy="no-lockstep") as executor:
        await executor.listen(address)
        budget = executor.service.budget
        channel = await make_transport(address).connect(address, "alice")
        call = large_call(LARGEST)
        await answer(channel, call)
        others = [Account(budget) for _ in range((budget.total - budget.held) // CONNECTION_BYTES)]
        for number, one in enumerate(others):  # each holds no more than the newcomer would
            assert one.open("elsewhere")
            assert one.belong_to(f"other {number}")
        with pytest.raises(BusyError, match="no memory is left"):
            await make_transport(address).connect(address, "bob")
        await asyncio.sleep(0.05)
        bob = await make_transport(address).connect(address, "bob")
        small = large_call(100)
        for one in (bob, channel):
            assert_right(base, small, await asyncio.wait_for(answer(one, small), 20))
        for one in (channel, bob):
            one.close()


@pytest.mark.usefixtures("owners")
async def test_tenants_that_keep_the_memory_occupied_make_room_for_a_smaller_call(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MAKE_ROOM_S", 0.3)
    async with symbiosis.Executor(base, max_bytes=104 * MIB, policy="no-lockstep") as executor:
        listener: Any = await executor.listen(LOCAL)
        stalled = await fill(listener.address)
        await until(lambda: executor.service.budget.held > 49 * MIB)
        channel = await make_transport(listener.address).connect(listener.address, "alice")
        for _ in range(3):
            call = large_call(LARGE - 1000)
            assert_right(base, call, await asyncio.wait_for(answer(channel, call), 20))
        assert len(listener.lines) == 7, "of eight, one for a call that has waited for longer, and one for this one"
        for line in stalled:
            line.socket.close()
        channel.close()


@pytest.mark.thorough
@pytest.mark.usefixtures("owners")
async def test_honest_clients_that_want_more_than_there_is_all_get_on(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They disconnect each other all the time, also in the middle of their calls, and get right results."""
    monkeypatch.setattr(peer, "MAKE_ROOM_S", 0.02)
    cut: list[str] = []
    original = peer.Peer._cut
    monkeypatch.setattr(peer.Peer, "_cut", lambda self: (cut.append(self.tenant), original(self)))
    async with symbiosis.Executor(base, max_bytes=104 * MIB, policy="opportunistic") as executor:
        tcp = await executor.listen(LOCAL)
        shm = await executor.listen(f"shm://{tmp_path}/s.sock")
        budget = executor.service.budget

        async def work(number: int) -> None:
            address = (tcp if number % 3 == 2 else shm).address
            chance = random.Random(number)
            channel = await make_transport(address).connect(address, f"client-{number}")
            for turn in range(20):
                calls = [large_call(chance.choice([100, 1000, LARGE, LARGEST]), 100 * number + turn) for _ in range(2)]
                for call, result in zip(calls, await asyncio.gather(*[answer(channel, c) for c in calls]), strict=True):
                    assert_right(base, call, result)
                await asyncio.sleep(chance.random() / 50)
            channel.close()

        await asyncio.wait_for(asyncio.gather(*map(work, range(14))), 100)
        await until(lambda: budget.held == 0)
    assert len(cut) > 10


@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
async def test_a_client_goes_on_after_it_was_disconnected_for_others(
    base: Any, scheme: str, kind: str, tmp_path: Path
) -> None:
    """It decodes and trains as if nothing had happened, with an empty arena each time."""
    expected = run_job_plain(base, lora(), SHORT)
    cut = 0
    async with symbiosis.Executor(base) as executor:
        listener: Any = await executor.listen(LOCAL if scheme == "tcp" else f"shm://{tmp_path}/s.sock")

        async def tenant() -> Any:
            async with symbiosis.connect(listener.address) as remote, remote.client(lora(), seed=0) as client:
                return await run_job(client, SHORT)

        def synchronous_tenant() -> Any:
            with symbiosis.open_model(listener.address) as model:
                return run_job_plain(model, lora(), SHORT)

        while cut < 4:  # a fast machine ends one job before it was disconnected so often
            job = asyncio.ensure_future(tenant() if kind == "coroutines" else in_thread(synchronous_tenant))
            while not job.done():
                await asyncio.wait([job], timeout=0.03)
                for line in list(listener.lines):
                    if line.peer.session is not None:
                        cut += 1
                        line.peer._cut()
            assert_close(job.result(), expected)
