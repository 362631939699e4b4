"""How the asyncio driver of a conversation tells a slow executor from one that has gone, by a clock of its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from symbiosis.errors import ConnectionLostError, WireError
from symbiosis.transports import channel as driver
from symbiosis.transports import stream_client, wire
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.conversation import PING_AFTER_S, UNANSWERED, Conversation
from symbiosis.transports.limits import Limits
from symbiosis.transports.stream import ByteStream, frame
from symbiosis.transports.stream_client import AsyncStreamClient
from symbiosis.transports.tcp_client import PayloadCarrier
from symbiosis.transports.wire import Hello, Type
from tests.transports.test_conversation import a_call, welcome

ROWS = 1000
LIMITS = Limits(rows=ROWS, arena_bytes=1 << 20)


def result(number: int) -> bytes:
    """Return the answer to a call, the first of which has the number 1."""
    return frame(wire.pack(Type.RESULT, number), ROWS * 8 * 4) + bytes(ROWS * 8 * 4)


RESULT = result(1)
LONG = 3 * UNANSWERED
"""Looks, one for each PING, after which a silent executor has long been given up."""


class Transport:
    """A transport that keeps what is written to it until the test takes it."""

    def __init__(self) -> None:
        self.waiting = 0

    def write(self, part: Any) -> None:
        self.waiting += len(part)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return True

    def close(self) -> None: ...


class Connection(AsyncStreamClient):
    def __init__(self) -> None:
        super().__init__("tcp://executor")
        self.carrier = PayloadCarrier()
        self.welcome = welcome(LIMITS)
        self.share = SimpleNamespace()  # type: ignore[assignment]
        self._stream = ByteStream(wire.MAX_TO_CLIENT)
        self._transport = Transport()

    async def attach(self) -> None: ...

    def comes(self, data: bytes) -> None:
        while data:
            room = self.get_buffer(-1)
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self.buffer_updated(count)
            data = data[count:]


class Talk:
    """A channel with one call of :data:`ROWS` rows outstanding, at an executor that sends nothing by itself."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        conversation = Conversation("tcp://executor", Hello("alice"), 0.0)
        self.connection = Connection()
        conversation.joined(self.connection.welcome)
        self.channel: Any = AsyncChannel(conversation, None, self.connection, None)  # type: ignore[arg-type]
        self.transport = self.connection._transport
        self.reply = self.channel.send(a_call(ROWS))

    def look(self) -> None:
        """Let the channel look whether the executor is alive, when the next PING is due."""
        self._clock.now += PING_AFTER_S
        self.channel._timer.cancel()
        self.channel._watch()


@pytest.fixture
async def talk(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(driver, "time", clock)
    talk = Talk(clock)
    await asyncio.sleep(0)
    yield talk
    talk.channel.close()


async def test_a_result_may_take_long_while_its_bytes_come(talk: Talk) -> None:
    talk.transport.waiting = 0
    for number in range(LONG):
        talk.connection.comes(RESULT[number : number + 1])
        talk.look()
    talk.connection.comes(RESULT[LONG:])
    assert torch.equal((await talk.reply)[0], torch.zeros(ROWS, 8))


async def test_a_call_may_take_long_while_its_bytes_go(talk: Talk) -> None:
    assert talk.transport.waiting > LONG * 100
    for _ in range(LONG):
        talk.transport.waiting -= 100
        talk.look()
    talk.transport.waiting = 0
    talk.connection.comes(RESULT)
    assert torch.equal((await talk.reply)[0], torch.zeros(ROWS, 8))


async def test_a_call_whose_results_cannot_be_taken_ends_with_that_error(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent again over another connection, with the same end, again and again."""
    with monkeypatch.context() as patch:
        patch.setattr(talk.connection.carrier, "take", Mock(side_effect=RuntimeError("out of memory")))
        talk.connection.comes(RESULT)
    with pytest.raises(RuntimeError, match="out of memory"):
        await talk.reply
    reply = talk.channel.send(a_call(ROWS))
    talk.connection.comes(result(2))
    assert torch.equal((await reply)[0], torch.zeros(ROWS, 8))


async def test_no_memory_for_a_payload_loses_the_connection(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_client, "block", Mock(side_effect=RuntimeError("out of memory")))
    talk.connection.comes(RESULT)
    with pytest.raises(ConnectionLostError, match="no memory for an answer: out of memory"):
        await talk.reply


async def test_a_call_that_cannot_be_sent_ends_with_that_error(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as sent for ever, and the limits left less for later calls."""
    talk.connection.comes(RESULT)
    with monkeypatch.context() as patch:
        patch.setattr(talk.connection.carrier, "put", Mock(side_effect=RuntimeError("a tensor on meta")))
        reply = talk.channel.send(a_call(1))
    with pytest.raises(RuntimeError, match="a tensor on meta"):
        await reply
    reply = talk.channel.send(a_call(ROWS))
    talk.connection.comes(result(3))
    assert torch.equal((await reply)[0], torch.zeros(ROWS, 8))


@pytest.mark.parametrize("sent", [False, True])
async def test_a_connection_is_given_up_over_which_nothing_moves(sent: bool, talk: Talk) -> None:
    """The client's own PINGs are no sign of life, whether they wait or not."""
    for _ in range(LONG):
        if sent:
            talk.transport.waiting = 0
        talk.look()
    with pytest.raises(ConnectionLostError, match="has not answered for 125 s"):
        await talk.reply


async def test_what_tls_says_of_an_error_is_written_before_the_end() -> None:
    done: list[Any] = []
    connection = Connection()
    connection._transport = Mock(is_closing=lambda: False, write=done.append, write_eof=lambda: done.append("end"))
    connection._stream = Mock(filled=Mock(side_effect=WireError("a damaged record")), unsent=lambda: "alert")
    connection.start(Mock(lost=lambda error: connection.close()))
    connection.buffer_updated(1)
    assert done == ["alert", "end"]
