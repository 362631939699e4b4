"""Channels for synchronous code: Ctrl-C in the middle of a call, over each transport, and answers that come slowly."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import ClientClosedError, ConnectionLostError, SymbiosisError, UsageError, WireError
from symbiosis.transports import blocking, shm_client, tcp_client, wire
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.conversation import PING_AFTER_S, UNANSWERED, Conversation, Pending
from symbiosis.transports.limits import Limits
from symbiosis.transports.stream import ByteStream, frame
from symbiosis.transports.stream_client import BlockingStreamClient
from symbiosis.transports.tcp_client import PayloadCarrier
from symbiosis.transports.wire import Hello, Type
from tests.helpers import in_thread, until
from tests.transports.test_conversation import a_call, welcome

ROWS = 1000
MOMENTS = [
    "it waits to be sent",
    "half of it is sent",
    "before it is answered",
    "after it was answered",
    "half a BEGIN is sent",
]


class Interrupted:
    """A connection on which the next operation of one kind is interrupted."""

    def __init__(self, connection: Any, interrupt: Interrupt) -> None:
        self._real = connection
        self._interrupt = interrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, parts: Any) -> None:
        if self._interrupt.take("half"):
            self._real._socket.sendall(frame(wire.PING)[:5])
            raise KeyboardInterrupt
        self._real.send(parts)

    def receive(self) -> Any:
        if self._interrupt.take("before"):
            raise KeyboardInterrupt
        message = self._real.receive()
        if message is not None and self._interrupt.take("after"):
            raise KeyboardInterrupt
        return message


class Interrupt:
    """An interrupt that happens once, at ``moment``."""

    moment = ""

    def take(self, moment: str) -> bool:
        if not self.moment.startswith(moment):
            return False
        self.moment = ""
        return True


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_the_next_call_is_answered(
    base: Any, tmp_path: Path, scheme: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call gets its own answer, and not that of the interrupted call, within seconds. ``retry`` may be 0."""
    address = f"shm://{tmp_path}/s.sock" if scheme == "shm" else "tcp://127.0.0.1:0"
    layer = base.model.layers[0].self_attn.q_proj

    def call(rows: int) -> Call:
        return Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.full((rows, 32), float(rows)),))

    async with symbiosis.Executor(base) as executor:
        address = (await executor.listen(address)).address
        interrupt = Interrupt()
        real = Conversation.call

        def waits(conversation: Conversation, call: Call) -> Pending:
            pending = real(conversation, call)
            if interrupt.take("it waits"):
                raise KeyboardInterrupt
            return pending

        monkeypatch.setattr(Conversation, "call", waits)

        def join(hello: Hello, again: bool) -> Any:
            if scheme == "shm":
                return Interrupted(shm_client.BlockingShmConnection(address, hello, again), interrupt)
            return Interrupted(
                tcp_client.BlockingTcpConnection(address, hello, again, key=None, insecure=False), interrupt
            )

        channel: Any = await in_thread(BlockingChannel, join, address, Hello("client"), 0.0)
        interrupt.moment = moment
        if moment == "half a BEGIN is sent":
            assert await in_thread(interrupts, channel.begin_walk)
        else:
            assert await in_thread(interrupts, channel.call, call(3))
        for rows in (2, 5):
            (result,) = await in_thread(channel.call, call(rows))
            torch.testing.assert_close(result, layer(call(rows).tensors[0]))
        channel.close()
        await until(lambda: not executor.status()["clients"])


def interrupts(fn: Any, *arguments: Any) -> bool:
    """Return whether a call was interrupted. It runs on a thread, and asyncio must not see the interrupt."""
    try:
        fn(*arguments)
    except KeyboardInterrupt:
        return True
    return False


class Slow(BlockingStreamClient):
    """A connection whose executor sends nothing but ``pieces``; before each, and after the last, it is silent for long
    enough that a PING is due."""

    def __init__(self, clock: Any, pieces: list[bytes]) -> None:
        super().__init__("tcp://executor")
        self.carrier = PayloadCarrier()
        self.welcome = welcome(Limits(rows=ROWS, arena_bytes=1 << 20))
        self.share = SimpleNamespace()  # type: ignore[assignment]
        self._stream = ByteStream(wire.MAX_TO_CLIENT)
        self._socket = SimpleNamespace(  # type: ignore[assignment]
            sendall=lambda part: None, shutdown=lambda how: None, close=lambda: None
        )
        self._clock = clock
        self._pieces = pieces
        self._silent = False

    def _read(self, room: memoryview) -> int:
        self._silent = not self._silent
        if self._silent or not self._pieces:
            self._clock.now += PING_AFTER_S
            raise BlockingIOError
        piece = self._pieces.pop(0)
        room[: len(piece)] = piece
        return len(piece)


def ask(pieces: list[bytes], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the result of a call whose answer comes in pieces."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(blocking, "time", clock)
    channel = BlockingChannel(lambda hello, again: Slow(clock, pieces), "tcp://executor", Hello("alice"), 0.0)
    (result,) = channel.call(a_call(ROWS))
    return result


def test_a_result_may_take_long_while_its_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ROWS * 8 * 4
    answer = frame(wire.pack(Type.RESULT, 1), size) + bytes(size)
    pieces = [answer[start : start + 100] for start in range(0, len(answer), 100)]
    assert len(pieces) > 3 * UNANSWERED
    assert torch.equal(ask(pieces, monkeypatch), torch.zeros(ROWS, 8))


@pytest.mark.parametrize("pieces", [0, 3])
def test_a_connection_is_given_up_over_which_nothing_comes(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = frame(wire.pack(Type.RESULT, 1), ROWS * 8 * 4)
    with pytest.raises(ConnectionLostError, match="has not answered for 125 s"):
        ask([answer[number : number + 1] for number in range(pieces)], monkeypatch)


@pytest.mark.parametrize("error", [ConnectionLostError, WireError, UsageError])
def test_an_error_that_is_answered_concerns_one_call(
    error: type[SymbiosisError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class may be one that otherwise means the end of the connection, such as of the executor's storage."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(blocking, "time", clock)
    joined: list[Slow] = []

    def join(hello: Hello, again: bool) -> Slow:
        answers = [frame(wire.pack_error(1, error("of the storage"))), frame(wire.pack(Type.RESULT, 2), 64) + bytes(64)]
        joined.append(Slow(clock, [] if joined else answers))
        return joined[-1]

    channel = BlockingChannel(join, "tcp://executor", Hello("alice"), 60.0)
    with pytest.raises(error, match="of the storage"):
        channel.call(a_call(2))
    (result,) = channel.call(a_call(2))
    assert torch.equal(result, torch.zeros(2, 8))
    assert len(joined) == 1


async def test_closing_does_not_wait_for_a_thread_that_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread closes the connection that it opens meanwhile."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, sleep=lambda delay: None)
    monkeypatch.setattr(blocking, "time", clock)
    joins, may_join, closed = threading.Event(), threading.Event(), []

    def join(hello: Hello, again: bool) -> Slow:
        if again:
            joins.set()
            may_join.wait(60)
        connection = Slow(clock, [])
        connection._socket.close = lambda: closed.append(again)  # type: ignore[method-assign]
        return connection

    channel = BlockingChannel(join, "tcp://executor", Hello("alice"), 60.0)
    call = asyncio.create_task(in_thread(channel.call, a_call()))
    try:
        assert await in_thread(joins.wait, 10)
        assert closed == [False]
        await asyncio.wait_for(in_thread(channel.close), 10)
    finally:
        may_join.set()
    with pytest.raises(ClientClosedError):
        await call
    assert closed == [False, True]
