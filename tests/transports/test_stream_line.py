"""Large answers go out in pieces, between which the event loop does other work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.transports.stream import ByteStream, frame
from symbiosis.transports.stream_line import WRITTEN_AT_ONCE, StreamLine

SIZE = 5 * WRITTEN_AT_ONCE + 7
ANSWER = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)


class Transport:
    """A transport whose client reads when the test says so."""

    def __init__(self, line: StreamLine) -> None:
        self.sent = bytearray()
        self.most = self.waits = self.high = 0
        self.turn: list[int] = []
        self.ended = False
        self.full = False
        """Whether the client does not read."""
        self._line = line

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.waits

    def set_write_buffer_limits(self, high: int = 64 << 10) -> None:
        self.high = high
        self._check()

    def write(self, part: Any) -> None:
        assert not self.ended
        self.sent += part
        self.turn[-1] += len(part)
        if self.full:
            self.waits += len(part)
            self._check()

    def _check(self) -> None:
        if self.waits > self.high:
            self._line.pause_writing()

    def write_eof(self) -> None:
        self.ended = True

    def get_extra_info(self, name: str) -> Any:
        return SimpleNamespace(fileno=lambda: -1)  # of a socket that is closed

    def abort(self) -> None: ...
    def resume_reading(self) -> None: ...
    def pause_reading(self) -> None: ...

    def read(self) -> None:
        """Let the client read everything."""
        self.waits = 0
        self._line.resume_writing()


class Peer:
    gone = False
    received = None

    def leave(self, why: str) -> None:
        self.gone = True


@pytest.fixture
async def line() -> Any:
    line: Any = StreamLine(SimpleNamespace(lines=set()))  # type: ignore[arg-type]
    line._transport = Transport(line)
    line._transport.set_write_buffer_limits()
    line._transport.turn.append(0)
    line.peer = Peer()
    yield line
    line._stop_deadline()


async def turns(line: Any, count: int) -> None:
    for _ in range(count):
        line._transport.turn.append(0)
        await asyncio.sleep(0)


async def test_a_large_answer_is_written_in_several_turns_and_what_follows_after_it(line: Any) -> None:
    line.send(b"result", SIZE, [ANSWER], results=True)
    line.send(b"next")
    read: list[int] = []
    line.when_read(lambda: read.append(len(line._transport.sent)))
    assert not read
    await turns(line, 10)
    transport = line._transport
    everything = frame(b"result", SIZE) + ANSWER + frame(b"next")
    assert transport.sent == everything
    assert read == [len(everything)]
    assert max(transport.turn) < 2 * WRITTEN_AT_ONCE
    assert sum(map(bool, transport.turn)) >= 5


async def test_no_more_is_written_while_the_client_does_not_read(line: Any) -> None:
    transport = line._transport
    transport.full = True
    line.send(b"result", SIZE, [ANSWER], results=True)
    read: list[int] = []
    line.when_read(lambda: read.append(len(transport.sent)))
    await turns(line, 10)
    assert len(transport.sent) < 2 * WRITTEN_AT_ONCE
    line._unread = 1 << 20
    assert line._has_enough_unread()
    for _ in range(10):
        assert not read
        transport.read()
        await turns(line, 3)
        if read:
            break
    assert transport.sent == frame(b"result", SIZE) + ANSWER
    assert read == [len(transport.sent)]
    transport.read()
    assert not line._has_enough_unread()


async def test_answers_of_any_size_wait_for_the_client_to_read(line: Any) -> None:
    line._transport.full = True
    for _ in range(10):
        line.send(b"result", WRITTEN_AT_ONCE // 2, [ANSWER[: WRITTEN_AT_ONCE // 2]], results=True)
        await turns(line, 1)
    assert len(line._transport.sent) < WRITTEN_AT_ONCE
    for _ in range(10):
        line._transport.read()
        await turns(line, 2)
    assert len(line._transport.sent) == 10 * len(frame(b"result", SIZE) + ANSWER[: WRITTEN_AT_ONCE // 2])


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, OSError])
async def test_an_answer_that_cannot_be_encoded_ends_the_connection(line: Any, error: type[Exception]) -> None:
    def pieces(*_: object) -> Any:
        yield bytes(WRITTEN_AT_ONCE)
        raise error("no memory")

    left: list[str] = []
    line.peer.dropped = left.append
    line._stream.encode = pieces
    line.send(b"result", SIZE, [ANSWER], results=True)
    await turns(line, 3)
    assert left == ["an answer cannot be sent: no memory"]


async def test_a_client_that_sends_no_more_still_gets_its_answer(line: Any) -> None:
    line.send(b"result", SIZE, [ANSWER], results=True)
    assert line.eof_received()
    await turns(line, 10)
    assert line._transport.sent == frame(b"result", SIZE) + ANSWER
    assert line._transport.ended
    line.send(b"later")
    assert line._transport.sent == frame(b"result", SIZE) + ANSWER
    assert not line.eof_received()


async def test_an_end_comes_after_what_was_sent(line: Any) -> None:
    line.send(b"result", SIZE, [ANSWER], results=True)
    line.send(b"ended")
    line.peer.gone = True
    line.hang_up()
    assert not line._transport.ended
    await turns(line, 10)
    assert line._transport.ended
    assert line._transport.sent.endswith(frame(b"ended"))


async def test_a_connection_that_is_lost_writes_no_more(line: Any) -> None:
    line.send(b"result", SIZE, [ANSWER], results=True)
    line.peer.closed = lambda: None
    line.connection_lost(None)
    before = len(line._transport.sent)
    await turns(line, 5)
    assert len(line._transport.sent) == before
    assert isinstance(line._stream, ByteStream)


@pytest.mark.parametrize("encrypted", [True, False])
async def test_large_answers_arrive_whole(base: Any, keys: Path, encrypted: bool) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen("tcp://127.0.0.1:0", keys=keys if encrypted else None)
        options = {"key": keys / "alice.secret"} if encrypted else {}
        async with symbiosis.connect(listener.address, **options) as remote, remote.client() as client:
            layer = client.model.model.layers[0].mlp.gate_proj
            x = torch.randn(1 << 15, layer.in_features)

            def run() -> torch.Tensor:
                with torch.no_grad():
                    return layer(x)

            expected = base.model.layers[0].mlp.gate_proj(x)
            assert expected.numel() * 4 > 4 * WRITTEN_AT_ONCE
            torch.testing.assert_close(await client.run(run), expected)
