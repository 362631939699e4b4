"""The executor's side of the wire protocol without I/O: joining, calls, limits, cancelling and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.core.requests import Call, Key, LayerSpec, Pass, expected
from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.core.transport import Identity
from symbiosis.errors import BusyError, ExecutorClosedError, LayerError, RefusedError, RequestError, UsageError
from symbiosis.transports import wire
from symbiosis.transports.limits import Limits
from symbiosis.transports.peer import Peer
from symbiosis.transports.wire import CallMessage, Hello, Type

LAYERS = [LayerSpec(0, "q", 4, 8, torch.float32, False, True)]


class Session:
    """A session whose calls are answered by the test."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.replies: list[asyncio.Future[Any]] = []
        self.cancelled: list[Call] = []
        self.closed = False

    def expects(self, key: Key) -> Any:
        return expected(LAYERS, key)

    def submit(self, call: Call) -> asyncio.Future[Any]:
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]

    def cancel(self, call: Call) -> None:
        self.cancelled.append(call)

    def begin_walk(self) -> None: ...
    def end_walk(self) -> None: ...

    def close(self, error: BaseException | None = None) -> None:
        self.closed = True


class Share:
    description: dict[str, Any] = {}  # noqa: RUF012
    tokenizer: dict[str, bytes] = {}  # noqa: RUF012


class Service:
    """An executor that admits each name once."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}

    def check_name(self, client: str) -> None:
        if client == "tenant/reserved":
            raise RefusedError("the name is reserved")

    def join(self, client: str, terms: Terms = NO_TERMS, *, local: bool = False) -> Session:
        if client in self.sessions:
            raise UsageError(f"{client} is in use")
        self.sessions[client] = Session(client)
        return self.sessions[client]

    def share(self) -> Share:
        return Share()

    def identity(self) -> Identity:
        return Identity("i", "w")

    def status(self) -> dict[str, Any]:
        return {"clients": sorted(self.sessions)}


class Ends:
    """Line and courier that record the actions of the peer. With ``late``, tensors arrive after their message."""

    def __init__(self, late: bool = False) -> None:
        self.sent: list[tuple[Type, Any]] = []
        self.freed: list[int] = []
        self.messages: list[CallMessage] = []
        self.listening = True
        self.hung_up = self.closed = False
        self._late = late

    def send(self, message: bytes) -> None:
        self.sent.append(wire.unpack_answer(message))  # type: ignore[arg-type]

    def hang_up(self) -> None:
        self.hung_up = True

    def listen(self, wanted: bool) -> None:
        self.listening = wanted

    def show(self, status: dict[str, Any]) -> dict[str, Any]:
        return status

    authenticated = False

    def admit(self, name: str) -> str:
        if name == "full":
            raise BusyError("too many connections")
        return f"tenant/{name}"

    def welcome(self, joined: bool) -> dict[str, Any]:
        return {"joined": joined}

    def tensors(self, message: CallMessage, session: Any, payload: int) -> Any:
        session.expects(message.key)
        self.messages.append(message)
        return None if self._late else matrices(message)

    def free(self, id_: int) -> None:
        self.freed.append(id_)

    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        self.sent.append((Type.RESULT, [message.id]))

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def matrices(message: CallMessage) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(message.rows, 4),)


def a_peer(*, join: bool = True, late: bool = False, service: Service | None = None) -> tuple[Peer, Ends, Service]:
    service, ends = service or Service(), Ends(late)
    peer: Any = Peer(service, Limits(calls=2, rows=10), "alice", ends, ends)  # type: ignore[arg-type]
    if join:
        peer.received(wire.pack_hello(Hello("job")))
        assert ends.sent.pop()[0] is Type.WELCOME
    return peer, ends, service


def a_call(id_: int, rows: int = 1, layer: int = 0) -> bytes:
    return wire.pack_call(CallMessage(id_, Key((layer,), Pass.FORWARD), Kind.DECODE, rows, 0, 0))


async def answered(future: asyncio.Future[Any], outcome: Any) -> None:
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    await asyncio.sleep(0)


async def test_a_client_joins_calls_and_leaves() -> None:
    peer, ends, service = a_peer()
    session = service.sessions["tenant/job"]
    peer.received(a_call(1))
    peer.received(a_call(2))
    await answered(session.replies[1], (torch.zeros(1, 8),))
    await answered(session.replies[0], LayerError("no"))
    assert ends.sent == [(Type.RESULT, [2]), (Type.FAILED, [1, "LayerError", "no"])]
    assert ends.freed == [2, 1]
    assert not peer.busy
    peer.leave("it closed the connection")
    assert session.closed
    assert ends.closed


async def test_a_status_connection_has_no_session() -> None:
    peer, ends, service = a_peer(join=False)
    peer.received(wire.pack_hello(Hello(None)))
    peer.received(wire.pack(Type.STATUS))
    assert ends.sent[0][1][0]["joined"] is False
    assert ends.sent[1] == (Type.STATUS, [{"clients": []}])
    peer.received(a_call(1))
    assert ends.sent[2] == (Type.ENDED, ["WireError", "the client sent CALL before HELLO"])
    assert not service.sessions


@pytest.mark.parametrize("name", ["job", "full"])
async def test_a_client_that_is_not_admitted_gets_the_reason(name: str) -> None:
    _, _, service = a_peer()
    peer, ends, _ = a_peer(join=False, service=service)
    peer.received(wire.pack_hello(Hello(name)))
    assert (ends.sent[0][0], ends.sent[0][1][0]) == (Type.ENDED, "BusyError")
    assert ends.hung_up
    assert peer.gone


async def test_messages_of_a_client_at_its_limits_are_not_read() -> None:
    peer, ends, service = a_peer()
    session = service.sessions["tenant/job"]
    peer.received(a_call(1, rows=9))
    assert ends.listening
    peer.received(a_call(2, rows=1))
    assert not ends.listening
    await answered(session.replies[0], (torch.zeros(9, 8),))
    assert ends.listening


@pytest.mark.parametrize("before", [0, 4])
async def test_more_rows_than_allowed_are_refused_before_their_tensors_are_read(before: int) -> None:
    peer, ends, _ = a_peer(late=True)
    if before:
        peer.received(a_call(1, rows=before))
    peer.received(a_call(2, rows=11 - before))
    assert [message.id for message in ends.messages] == [1] * bool(before)
    type_, (error, text) = ends.sent[-1]
    assert (type_, error) == (Type.ENDED, "WireError")
    assert text == "11 rows are outstanding; at most 10 are allowed"
    assert ends.hung_up


async def test_a_cancelled_call_is_answered_once() -> None:
    peer, ends, service = a_peer()
    session = service.sessions["tenant/job"]
    peer.received(a_call(1))
    peer.received(wire.pack(Type.CANCEL, 1))
    peer.received(wire.pack(Type.CANCEL, 1))
    await answered(session.replies[0], (torch.zeros(1, 8),))
    assert [(type_, content[:2]) for type_, content in ends.sent] == [(Type.FAILED, [1, "ClientClosedError"])]
    assert len(session.cancelled) == 1
    peer.received(a_call(1))  # the id can be used again
    await answered(session.replies[1], (torch.zeros(1, 8),))
    assert ends.sent[1] == (Type.RESULT, [1])


async def test_tensors_that_arrive_after_their_message() -> None:
    peer, ends, service = a_peer(late=True)
    session = service.sessions["tenant/job"]
    peer.received(a_call(1))
    assert peer.busy
    assert not session.replies
    assert peer.arrived(ends.messages[0], matrices(ends.messages[0]))
    assert len(session.replies) == 1
    peer.received(a_call(2))
    peer.received(wire.pack(Type.CANCEL, 2))
    assert not peer.arrived(ends.messages[1], matrices(ends.messages[1]))
    assert len(session.replies) == 1
    assert ends.sent[-1][0] is Type.FAILED


async def test_an_unknown_layer_fails_that_call_alone() -> None:
    peer, ends, service = a_peer()
    peer.received(a_call(1, layer=9))
    assert (ends.sent[0][0], ends.sent[0][1][:2]) == (Type.FAILED, [1, RequestError.__name__])
    peer.received(a_call(2))
    assert len(service.sessions["tenant/job"].replies) == 1


async def test_an_executor_that_closes_says_so() -> None:
    peer, ends, service = a_peer()
    peer.received(a_call(1))
    peer.end(ExecutorClosedError("shut down"))
    assert ends.sent == [(Type.ENDED, ["ExecutorClosedError", "shut down"])]
    await answered(service.sessions["tenant/job"].replies[0], (torch.zeros(1, 8),))
    assert len(ends.sent) == 1


MESSAGES = st.one_of(
    st.binary(max_size=60),
    st.builds(a_call, st.integers(0, 4), st.integers(0, 12), st.integers(0, 2)),
    st.builds(lambda type_, *content: wire.pack(type_, *content), st.sampled_from(Type), st.integers(-1, 4)),
    st.builds(lambda name: wire.pack_hello(Hello(name)), st.none() | st.text(max_size=3)),
)


@given(st.lists(MESSAGES, max_size=20), st.booleans())
def test_any_messages_end_the_conversation_or_keep_its_rules(messages: list[bytes], join: bool) -> None:
    async def play() -> None:
        peer, ends, service = a_peer(join=join)
        for message in messages:
            peer.received(message)
            assert len([type_ for type_, _ in ends.sent if type_ is Type.ENDED]) == peer.gone == ends.hung_up
            if peer.gone:
                break
        peer.leave("over")
        assert all(session.closed for session in service.sessions.values())

    asyncio.run(play())
