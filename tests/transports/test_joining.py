"""The first messages of a connection, without I/O."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symbiosis.core.share import Share
from symbiosis.errors import BusyError, ShareError, WireError
from symbiosis.transports import wire
from symbiosis.transports.joining import CHUNKS_UNDER_WAY, Joined, Joining, Message, exchange, joining
from symbiosis.transports.limits import Limits
from symbiosis.transports.share import CHUNK, ServedShare
from symbiosis.transports.wire import Hello, Type

ADDRESS = "tcp://there:1"


class FakeExecutor:
    """A service that answers first messages with a share of three chunks."""

    def __init__(self, fingerprint: str) -> None:
        self.tensors = {"a": torch.randn(int(2.5 * CHUNK) // 4)}
        served = SimpleNamespace(share=lambda: Share({}, self.tensors, {}))
        self.served = ServedShare(served)  # type: ignore[arg-type]
        self.description: dict[str, Any] = {"fingerprint": fingerprint, "weights": "w", "layers": []}
        self.asked: list[tuple[Type, int]] = []
        self.answers: list[Message] = []
        self.most_under_way = 0

    def welcome(self) -> dict[str, Any]:
        return {
            "share": self.description,
            "tokenizer": {},
            "limits": asdict(Limits()),
            "share_bytes": self.served.size(),
        }

    def take(self, message: bytes) -> None:
        type_, content = wire.unpack(message)
        self.asked.append((type_, content[0] if content else 0))
        if type_ is Type.HELLO:
            self.answers.append((Type.WELCOME, [self.welcome()], []))
        elif type_ is Type.STATUS:
            self.answers.append((Type.STATUS, [{"model": "M"}], []))
        else:
            self.answers.append((Type.SHARE, [content[0]], [self.served.chunk(content[0])]))
            self.most_under_way = max(self.most_under_way, len(self.answers))

    def run(self, messages: Joining) -> Joined:
        return exchange(messages, self.take, lambda: self.answers.pop(0))


def test_a_share_comes_in_chunks() -> None:
    executor, seen = FakeExecutor("chunks"), []
    joined = executor.run(joining(ADDRESS, Hello("a"), False, lambda done, size: seen.append((done, size))))
    assert joined.share is not None
    assert joined.look is None
    assert torch.equal(joined.share.tensors["a"], executor.tensors["a"])
    assert [start for type_, start in executor.asked if type_ is Type.SHARE] == [0, CHUNK, 2 * CHUNK]
    assert seen[-1] == (executor.served.size(), executor.served.size())
    assert 1 < executor.most_under_way <= CHUNKS_UNDER_WAY
    # Another client of this process gets the same share and asks for no chunk.
    second = FakeExecutor("chunks")
    assert second.run(joining(ADDRESS, Hello("b"), False)).share is joined.share
    assert len(second.asked) == 1


def test_an_executor_that_states_the_fingerprint_of_another_one_gives_its_clients_nothing() -> None:
    false, honest = FakeExecutor("stated"), FakeExecutor("stated")
    false.description["config"] = {"rope_theta": 1.0}
    given = false.run(joining(ADDRESS, Hello("a"), False)).share
    found = honest.run(joining(ADDRESS, Hello("b"), False)).share
    assert given is not None
    assert found is not None
    assert "config" not in found.description
    assert torch.equal(found.tensors["a"], honest.tensors["a"])


@pytest.mark.parametrize("entry", [b"bytes", {1: 0, "a": 0}])
def test_a_description_that_is_no_plain_data(entry: Any) -> None:
    executor = FakeExecutor("bytes")
    executor.description["config"] = entry
    messages = joining("shm:///x", Hello("a"), False)
    next(messages)
    with pytest.raises(ShareError, match="description of its model cannot be read"):
        messages.send((Type.WELCOME, [executor.welcome()], []))


def test_a_client_that_joins_again_keeps_its_share() -> None:
    executor = FakeExecutor("again")
    assert executor.run(joining(ADDRESS, Hello("a"), True)).share is None
    assert len(executor.asked) == 1


def test_a_descriptor_of_the_share_is_sent_with_the_welcome() -> None:
    executor = FakeExecutor("mapped")
    messages = joining("shm:///x", Hello("a"), False)
    next(messages)
    with pytest.raises(StopIteration) as done:
        messages.send((Type.WELCOME, [executor.welcome()], [-1, executor.served.descriptor()]))
    joined: Joined = done.value.value
    assert joined.share is not None
    assert torch.equal(joined.share.tensors["a"], executor.tensors["a"])


def test_a_status_connection() -> None:
    joined = FakeExecutor("look").run(joining(ADDRESS, Hello(None), False))
    assert joined.look is not None
    assert joined.look.status == {"model": "M"}
    assert joined.share is None


def test_the_executors_reason_is_raised() -> None:
    messages = joining(ADDRESS, Hello("a"), False)
    next(messages)
    with pytest.raises(BusyError, match="64 clients"):
        messages.send((Type.ENDED, ["BusyError", "64 clients"], []))


@pytest.mark.parametrize(
    "answer",
    [
        (Type.RESULT, [1], []),
        (Type.WELCOME, [], []),
        (Type.WELCOME, [{"share": {}}], []),
    ],
)
def test_another_message_instead_of_the_welcome(answer: Message) -> None:
    messages = joining(ADDRESS, Hello("a"), False)
    next(messages)
    with pytest.raises(WireError):
        messages.send(answer)


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: (Type.SHARE, [CHUNK], answer[2]),
        lambda answer: (Type.SHARE, answer[1], []),
        lambda answer: (Type.SHARE, answer[1], [answer[2][0], b""]),
        lambda answer: (Type.SHARE, answer[1], [answer[2][0][:-1]]),
        lambda answer: (Type.SHARE, [], answer[2]),
        lambda answer: (Type.RESULT, answer[1], answer[2]),
    ],
)
def test_a_chunk_that_was_not_requested(change: Any) -> None:
    executor = FakeExecutor(f"wrong chunk {change!r}")

    def receive() -> Message:
        answer = executor.answers.pop(0)
        return change(answer) if answer[0] is Type.SHARE else answer

    with pytest.raises(WireError):
        exchange(joining(ADDRESS, Hello("a"), False), executor.take, receive)


@pytest.mark.parametrize("content", [[], [3], [{}, {}]])
def test_a_malformed_status(content: list[Any]) -> None:
    messages = joining(ADDRESS, Hello(None), False)
    next(messages)
    messages.send((Type.WELCOME, [FakeExecutor("status").welcome()], []))
    with pytest.raises(WireError, match="malformed STATUS"):
        messages.send((Type.STATUS, content, []))
