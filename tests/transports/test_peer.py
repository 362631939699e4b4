"""The executor's side of the wire protocol without I/O: joining, calls, limits, cancelling and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symbiosis.core.budget import CONNECTION_BYTES, COVERED_BYTES, Budget
from symbiosis.core.requests import Call, Key, LayerSpec, Pass, expected
from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.core.transport import Identity
from symbiosis.errors import BusyError, ExecutorClosedError, LayerError, RefusedError, RequestError, UsageError
from symbiosis.transports import peer as rules
from symbiosis.transports import wire
from symbiosis.transports.courier import Admitted
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
        self.in_use = False
        """Whether a call that is cancelled is in the batch under way."""
        self.closed = False

    def expects(self, key: Key) -> Any:
        return expected(LAYERS, key)

    def submit(self, call: Call) -> asyncio.Future[Any]:
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]

    def cancel(self, call: Call) -> bool:
        self.cancelled.append(call)
        return self.in_use

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
        self.budget = Budget(100 << 20)
        self.sessions: dict[str, Session] = {}
        self.running = False
        self.rejections: list[str] = []
        self.then: list[Callable[[], object]] = []

    def when_idle(self, then: Callable[[], object]) -> None:
        if self.running:
            self.then.append(then)
        else:
            then()

    def ended(self) -> None:
        """End the batch under way."""
        self.running = False
        then, self.then = self.then, []
        for one in then:
            one()

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

    def rejected(self, why: str) -> None:
        self.rejections.append(why)

    def status(self) -> dict[str, Any]:
        return {"clients": sorted(self.sessions)}


class Ends:
    """Line and courier that record the actions of the peer. With ``late``, tensors arrive after their message."""

    def __init__(self, late: bool = False) -> None:
        self.sent: list[tuple[Type, Any]] = []
        self.admitted: list[Admitted] = []
        self.calls_ended: list[tuple[int, int]] = []
        """Calls that have ended, and how many messages had been sent by then."""
        self.listening = True
        self.hung_up = self.closed = self.dropped = False
        self.unread: list[Callable[[], object]] | None = None
        """What to call when the client reads again; None while it reads."""
        self._late = late

    def send(self, message: bytes) -> None:
        self.sent.append(wire.unpack_answer(message))  # type: ignore[arg-type]

    def hang_up(self) -> None:
        self.hung_up = True

    def drop(self, why: object) -> None:
        self.dropped = True

    def listen(self, wanted: bool) -> None:
        self.listening = wanted

    def show(self, status: dict[str, Any]) -> dict[str, Any]:
        return status

    authenticated = False

    def greeted(self, name: str) -> str:
        if name == "full":
            raise BusyError("too many connections")
        return f"tenant/{name}"

    def welcome(self, joined: bool) -> dict[str, Any]:
        return {"joined": joined}

    can_skip = True

    def check(self, admitted: Admitted, payload: int) -> int:
        return 0

    def tensors(self, admitted: Admitted) -> Any:
        self.admitted.append(admitted)
        return None if self._late else matrices(admitted)

    def when_read(self, then: Callable[[], object]) -> None:
        if self.unread is None:
            then()
        else:
            self.unread.append(then)

    def answer(self, admitted: Admitted, results: Sequence[torch.Tensor], sent: Callable[[], object]) -> None:
        self.sent.append((Type.RESULT, [admitted.message.id]))
        self.when_read(sent)

    def ended(self, admitted: Admitted) -> None:
        self.calls_ended.append((admitted.message.id, len(self.sent)))

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def when_ended(self, then: Callable[[], object]) -> None:
        then()


def matrices(admitted: Admitted) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(admitted.message.rows, 4),)


SMALL = Limits(calls=2, rows=10)


def a_peer(
    *,
    join: bool = True,
    late: bool = False,
    service: Service | None = None,
    tenant: str = "alice",
    limits: Limits = SMALL,
) -> tuple[Peer, Ends, Service]:
    service, ends = service or Service(), Ends(late)
    peer: Any = Peer(service, limits, ends, ends)  # type: ignore[arg-type]
    assert peer.account.open("a test")
    peer.identified(tenant)
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
    assert ends.calls_ended == [(2, 0), (1, 1)]
    assert not peer.busy
    peer.leave("it closed the connection")
    assert session.closed
    assert ends.closed
    peer.closed()
    assert service.budget.held == 0


@pytest.mark.parametrize("gone", [False, True])
async def test_a_call_of_the_batch_under_way_counts_until_the_batch_has_ended(gone: bool) -> None:
    peer, ends, service = a_peer(limits=LARGE)
    before = service.budget.held
    session = service.sessions["tenant/job"]
    service.running = session.in_use = True
    peer.received(a_call(1, rows=ROWS))
    held = service.budget.held
    peer.received(wire.pack(Type.CANCEL, 1))
    if gone:
        peer.leave("it closed the connection")
        peer.closed()
    assert service.budget.held == held > before
    assert not ends.sent
    service.ended()
    if gone:
        assert service.budget.held == 0
    else:
        assert ends.sent == [(Type.FAILED, [1, "ClientClosedError", "the call was cancelled"])]


async def test_a_status_connection_has_no_session() -> None:
    peer, ends, service = a_peer(join=False)
    peer.received(wire.pack_hello(Hello(None)))
    peer.received(wire.pack(Type.STATUS))
    assert ends.sent[0][1][0]["joined"] is False
    assert ends.sent[1] == (Type.STATUS, [{"clients": []}])
    peer.received(a_call(1))
    assert ends.sent[2] == (
        Type.ENDED,
        ["WireError", "the client sent CALL, but has not joined with HELLO"],
    )
    assert not service.sessions


@pytest.mark.parametrize("name", ["job", "full"])
async def test_a_client_that_is_not_admitted_gets_the_reason(name: str) -> None:
    _, _, service = a_peer()
    peer, ends, _ = a_peer(join=False, service=service)
    peer.received(wire.pack_hello(Hello(name)))
    assert (ends.sent[0][0], ends.sent[0][1][0]) == (Type.ENDED, "BusyError")
    assert ends.hung_up
    assert peer.gone
    assert service.rejections == ["BusyError"]


async def test_messages_of_a_client_beyond_its_calls_are_not_read() -> None:
    """Those of a client at its limits are: it may ask whether the executor is alive."""
    peer, ends, service = a_peer(limits=Limits(calls=2, rows=10))
    session = service.sessions["tenant/job"]
    peer.received(a_call(1, rows=8))
    peer.received(a_call(2, rows=1))
    assert ends.listening
    peer.received(a_call(3, rows=1))
    assert not ends.listening
    await answered(session.replies[0], (torch.zeros(8, 8),))
    assert ends.listening


@pytest.mark.parametrize("before", [0, 4])
async def test_more_rows_than_allowed_are_refused_before_their_tensors_are_read(before: int) -> None:
    peer, ends, _ = a_peer(late=True)
    if before:
        peer.received(a_call(1, rows=before))
    peer.received(a_call(2, rows=11 - before))
    assert [admitted.message.id for admitted in ends.admitted] == [1] * bool(before)
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
    assert ends.calls_ended == [(1, 0)]
    peer.received(a_call(1))  # the id can be used again
    await answered(session.replies[1], (torch.zeros(1, 8),))
    assert ends.sent[1] == (Type.RESULT, [1])


async def test_tensors_that_arrive_after_their_message() -> None:
    peer, ends, service = a_peer(late=True)
    session = service.sessions["tenant/job"]
    peer.received(a_call(1))
    assert peer.busy
    assert not session.replies
    peer.arrived(ends.admitted[0], matrices(ends.admitted[0]))
    assert len(session.replies) == 1
    peer.received(a_call(2))
    peer.received(wire.pack(Type.CANCEL, 2))
    peer.arrived(ends.admitted[1], matrices(ends.admitted[1]))
    assert len(session.replies) == 1
    assert ends.sent[-1][0] is Type.FAILED


async def test_an_unknown_layer_fails_that_call_alone() -> None:
    peer, ends, service = a_peer()
    peer.received(a_call(1, layer=9))
    assert (ends.sent[0][0], ends.sent[0][1][:2]) == (Type.FAILED, [1, RequestError.__name__])
    peer.received(a_call(2))
    assert len(service.sessions["tenant/job"].replies) == 1


LARGE = Limits(calls=8)
ROWS = 220_000
"""A call of so many rows takes 20 of the 100 MiB."""
SMALLEST = COVERED_BYTES // 100
"""A call of so many rows counts for nothing: the bytes that the connection counts for cover it."""


async def crowd() -> tuple[Service, Peer, Ends]:
    """Return an executor whose memory two tenants have filled, and one of them."""
    service = Service()
    for name, rows in (("bob", ROWS), ("carol", ROWS // 2)):
        peer, ends, _ = a_peer(service=service, tenant=name, limits=LARGE)
        peer.received(a_call(1, rows=ROWS))
        peer.received(a_call(2, rows=rows))
        assert len(ends.admitted) == 2
        service.sessions[name] = service.sessions.pop("tenant/job")
    return service, peer, ends


async def test_a_call_waits_until_there_is_room() -> None:
    service, _, _ = await crowd()
    peer, ends, _ = a_peer(service=service, limits=LARGE)
    peer.received(a_call(1, rows=SMALLEST))
    assert ends.listening
    peer.received(a_call(2, rows=2 * ROWS))
    assert not ends.listening
    assert len(ends.admitted) == 1
    await answered(service.sessions["carol"].replies[0], (torch.zeros(1, 8),))
    await asyncio.sleep(0)
    assert len(ends.admitted) == 2
    assert ends.listening


async def test_a_call_that_waited_may_find_its_transport_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensors(_: Admitted) -> None:
        raise BusyError("no lane is left")

    service, other, _ = await crowd()
    peer, ends, _ = a_peer(service=service, limits=LARGE)
    monkeypatch.setattr(ends, "tensors", tensors)
    peer.received(a_call(1, rows=2 * ROWS))
    assert not ends.sent
    other.leave("it closed the connection")
    other.closed()
    await asyncio.sleep(0)
    assert ends.sent == [(Type.ENDED, ["BusyError", "no lane is left"])]
    assert peer.gone


async def test_a_call_for_which_there_is_no_room_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "ROOM_WITHIN_S", 0.01)
    service, _, _ = await crowd()
    peer, ends, _ = a_peer(service=service, limits=LARGE)
    held = service.budget.held
    peer.received(a_call(1, rows=2 * ROWS))
    await asyncio.sleep(0.05)
    assert (ends.sent[-1][0], ends.sent[-1][1][:2]) == (Type.FAILED, [1, BusyError.__name__])
    assert service.rejections == ["BusyError"]
    assert ends.listening
    peer.received(a_call(1, rows=SMALLEST))
    assert len(ends.admitted) == 1
    assert service.budget.held == held


async def test_a_client_that_leaves_while_its_call_waits() -> None:
    service, other, _ = await crowd()
    peer, ends, _ = a_peer(service=service, limits=LARGE)
    peer.received(a_call(1, rows=2 * ROWS))
    peer.leave("it closed the connection")
    other.leave("it closed the connection")
    other.closed()  # there is room now
    peer.closed()
    await asyncio.sleep(0)
    assert not ends.admitted
    assert service.budget.held < CONNECTION_BYTES + (42 << 20)


async def test_answers_count_until_they_are_read() -> None:
    peer, ends, service = a_peer(limits=LARGE)
    session = service.sessions["tenant/job"]
    ends.unread = []
    for id_ in range(2):
        peer.received(a_call(id_, rows=ROWS // 2))
    for reply in session.replies:
        await answered(reply, (torch.zeros(1, 8),))
    assert not peer.busy
    assert service.budget.held > 18 << 20
    for then in ends.unread:
        then()
    assert service.budget.held == CONNECTION_BYTES


async def test_a_client_for_whose_answer_there_is_no_memory_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: Any) -> None:
        raise RuntimeError("not enough memory")

    peer, ends, service = a_peer()
    monkeypatch.setattr(ends, "answer", answer)
    peer.received(a_call(1))
    await answered(service.sessions["tenant/job"].replies[0], (torch.zeros(1, 8),))
    assert ends.dropped
    peer.closed()
    assert service.budget.held == 0


async def test_a_cancelled_call_counts_until_its_tensors_have_come() -> None:
    peer, ends, service = a_peer(late=True, limits=LARGE)
    peer.received(a_call(1, rows=ROWS))
    peer.received(wire.pack(Type.CANCEL, 1))
    assert service.budget.held > 18 << 20
    assert not ends.sent, "an answer would tell the client that it may send as much again"
    peer.arrived(ends.admitted[0], matrices(ends.admitted[0]))
    assert (ends.sent[0][0], ends.sent[0][1][:2]) == (Type.FAILED, [1, "ClientClosedError"])
    assert service.budget.held == CONNECTION_BYTES


async def test_cancelled_calls_whose_tensors_do_not_come_are_few() -> None:
    """Over ``dist://`` the executor reads messages while tensors are under way."""
    peer, ends, _ = a_peer(late=True, limits=Limits(calls=2))
    for id_ in (1, 2, 3):
        assert ends.listening
        peer.received(a_call(id_))
        peer.received(wire.pack(Type.CANCEL, id_))
    assert not ends.listening
    for admitted in ends.admitted:
        peer.arrived(admitted, matrices(admitted))
    assert ends.listening
    assert [type_ for type_, _ in ends.sent] == [Type.FAILED] * 3


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
