"""The client's side of the wire protocol without I/O: joining, calls, losses, rejoining, resending, limits, the end."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Identity
from symbiosis.errors import (
    BusyError,
    ClientClosedError,
    ConnectionLostError,
    ExecutorClosedError,
    LayerError,
    RefusedError,
    RequestError,
    SymbiosisError,
    UsageError,
    WireError,
)
from symbiosis.transports import wire
from symbiosis.transports.conversation import (
    AGAIN_S,
    FIRST_S,
    FRUITLESS,
    LONGEST_S,
    PING_AFTER_S,
    UNANSWERED,
    Conversation,
    Pending,
    State,
)
from symbiosis.transports.limits import Limits
from symbiosis.transports.share import Welcome
from symbiosis.transports.wire import Hello, Type

LAYERS = [[0, "q", 4, 8, "float32", False, True, 0], [1, "k", 4, 8, "float32", False, True, 0]]
LIMITS = Limits(calls=3, rows=10, arena_bytes=4096)


def welcome(limits: Limits = LIMITS, **share: Any) -> Welcome:
    description = {"fingerprint": "model", "weights": "w", "layers": LAYERS, **share}
    return Welcome([{"share": description, "tokenizer": {}, "limits": asdict(limits), "instance": "i"}])


def conversation(retry_s: float = 60.0, limits: Limits = LIMITS) -> Conversation:
    joined = Conversation("shm:///x", Hello("alice"), retry_s)
    joined.joined(welcome(limits))
    return joined


def a_call(rows: int = 1, width: int = 4) -> Call:
    return Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.zeros(rows, width),))


def sendable(talk: Conversation) -> list[Pending]:
    found = []
    while (pending := talk.outstanding.next()) is not None:
        found.append(pending)
    return found


def ended(error: SymbiosisError) -> tuple[Type, list[Any]]:
    return Type.ENDED, [type(error).__name__, str(error)]


# Joining and calling


def test_a_conversation_joins_and_calls() -> None:
    talk = Conversation("shm:///x", Hello("alice"), 60.0)
    assert talk.state is State.JOINING
    talk.joined(welcome())
    assert talk.state is State.JOINED
    assert talk.identity() == Identity("i", "w")
    call = a_call(2)
    pending = talk.call(call)
    assert sendable(talk) == [pending]
    assert talk.receive(Type.PONG, []) is None
    answer = talk.receive(Type.RESULT, [call.id])
    assert answer == (pending, None)
    talk.outstanding.settle(pending)
    assert talk.receive(Type.RESULT, [call.id]) is None  # a second answer is ignored


def test_a_failed_call_has_its_error() -> None:
    talk = conversation()
    pending = talk.call(a_call())
    sendable(talk)
    answer = talk.receive(Type.FAILED, [pending.id, "LayerError", "no"])
    assert answer is not None
    assert (answer[0], type(answer[1]), str(answer[1])) == (pending, LayerError, "no")
    assert talk.state is State.JOINED


@pytest.mark.parametrize(
    "call",
    [a_call(0), a_call(2, width=5), Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.zeros(1, 4).half(),))],
    ids=["no rows", "another width", "another dtype"],
)
def test_wrong_tensors_are_not_sent(call: Call) -> None:
    talk = conversation()
    with pytest.raises(RequestError, match=r"q FORWARD takes \[n, 4\]"):
        talk.call(call)
    assert not sendable(talk)


def test_a_call_beyond_the_limit_of_bytes() -> None:
    talk = conversation(limits=Limits(arena_bytes=4096))
    with pytest.raises(UsageError, match="arena_bytes"):
        talk.call(a_call(1000))


# Limits


@pytest.mark.parametrize(("rows", "sent"), [(1, 3), (4, 2), (10, 1)], ids=["calls", "rows", "all"])
def test_limits_hold(rows: int, sent: int) -> None:
    talk = conversation()
    calls = [talk.call(a_call(rows)) for _ in range(5)]
    found = []
    while batch := sendable(talk):
        assert len(batch) == sent or not talk.outstanding.waiting
        found += batch
        for pending in batch:
            talk.outstanding.settle(pending)
    assert found == calls


def test_a_call_of_more_rows_than_allowed_is_not_sent() -> None:
    talk = conversation()
    with pytest.raises(UsageError, match=r"a call has 11 rows; the executor allows 10;.*a larger rows limit"):
        talk.call(a_call(11))
    assert not sendable(talk)


def test_the_limit_of_bytes_holds() -> None:
    talk = conversation(limits=Limits(arena_bytes=2 * (64 + 64)))
    for _ in range(3):
        talk.call(a_call())
    assert len(sendable(talk)) == 2


def test_a_call_without_room_waits_first() -> None:
    talk = conversation()
    first, second = talk.call(a_call()), talk.call(a_call())
    assert talk.outstanding.next() is first
    talk.outstanding.put_back(first)
    assert sendable(talk) == [first, second]


# Cancelling


def test_a_call_that_was_not_sent_is_cancelled_without_a_message() -> None:
    talk = conversation()
    call = a_call()
    talk.call(call)
    assert talk.cancel(call) is None
    assert not sendable(talk)


def test_a_cancelled_call_counts_until_it_is_answered() -> None:
    talk = conversation(limits=Limits(calls=1))
    call = a_call()
    pending = talk.call(call)
    sendable(talk)
    assert wire.unpack(talk.cancel(call) or b"") == (Type.CANCEL, (call.id,))
    assert talk.cancel(call) is None
    following = talk.call(a_call())
    assert not sendable(talk)
    answer = talk.receive(Type.FAILED, [pending.id, "ClientClosedError", "cancelled"])
    assert answer is not None
    talk.outstanding.settle(answer[0])
    assert sendable(talk) == [following]


# Losing and joining again


def test_each_call_after_the_end_has_an_error_of_its_own() -> None:
    """An error that is raised again keeps the frames of every call alive."""
    talk, errors = Conversation("shm:///x", Hello("alice"), 60.0), []
    talk.end(ExecutorClosedError("shut down"))
    for _ in range(2):
        with pytest.raises(ExecutorClosedError, match="shut down") as caught:
            talk.check_open()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


@pytest.mark.parametrize(
    "lose",
    [
        lambda talk: talk.lost(ConnectionLostError("gone")),
        lambda talk: talk.lost(OSError("gone")),
        lambda talk: talk.receive(*ended(ExecutorClosedError("shut down"))),
        lambda talk: talk.receive(Type.FAILED, [1, "ExecutorClosedError", "shut down"]),
    ],
    ids=["lost", "os error", "ENDED", "FAILED"],
)
def test_lost_calls_are_sent_again_in_order(lose: Any) -> None:
    talk = conversation()
    calls = [a_call() for _ in range(5)]
    pending = [talk.call(call) for call in calls]
    assert sendable(talk) == pending[:3]
    talk.outstanding.settle(pending[0])
    talk.cancel(calls[1])
    lose(talk)
    assert talk.state is State.REJOINING
    late = talk.call(a_call())
    talk.joined(welcome())
    assert talk.state is State.JOINED
    assert sendable(talk) == [pending[2], pending[3], pending[4]]
    assert list(talk.outstanding.waiting) == [late]


def test_without_retries_a_loss_is_the_end() -> None:
    for error in (ConnectionLostError("gone"), ExecutorClosedError("shut down")):
        talk = conversation(retry_s=0.0)
        talk.lost(error)
        assert talk.state is State.ENDED
        with pytest.raises(type(error), match=str(error)):
            talk.call(a_call())


def test_attempts_to_join_again() -> None:
    talk = conversation()
    talk.lost(ConnectionLostError("gone"))
    for error in (ConnectionLostError("absent"), BusyError("the name is in use"), OSError("no route")):
        talk.lost(error)
        assert talk.state is State.REJOINING
    now, delays = 100.0, []
    while (delay := talk.next_attempt(now)) is not None:
        delays.append(delay)
        now += delay
    assert now == pytest.approx(160.0)
    assert 0.5 * FIRST_S <= delays[0] <= 1.5 * FIRST_S
    assert 1.0 < max(delays) <= 1.5 * LONGEST_S
    with pytest.raises(ConnectionLostError, match=r"did not come back within 60 s: .*no route"):
        talk.call(a_call())


def test_time_for_attempts_starts_again_after_each_loss() -> None:
    talk = conversation(retry_s=10.0)
    for start in (0.0, 100.0):
        talk.lost(ConnectionLostError("gone"))
        assert talk.next_attempt(start) is not None
        assert talk.next_attempt(start + 9.0) is not None
        assert talk.joined(welcome()) == []


def test_an_executor_that_admits_the_client_again_and_again_is_given_up() -> None:
    """Time counts from the first loss if connections end without an answer; one answer is enough to begin anew."""
    talk = conversation(retry_s=5.0)
    waiting = talk.call(a_call())
    now, joins = 0.0, 0
    while joins < 1000:
        assert talk.outstanding.next() is waiting
        talk.receive(*ended(ExecutorClosedError("closed")))
        if talk.next_attempt(now) is None:
            break
        now, joins = now + 0.1, joins + 1
        talk.joined(welcome())
    assert talk.state is State.ENDED
    assert FRUITLESS < joins < FRUITLESS + 60
    talk = conversation(retry_s=5.0)
    for turn in range(3 * FRUITLESS):
        waiting = talk.call(a_call())
        assert talk.outstanding.next() is waiting
        assert talk.receive(Type.RESULT, [waiting.id]) == (waiting, None)
        talk.outstanding.settle(waiting)
        talk.receive(*ended(ExecutorClosedError("closed")))
        assert talk.next_attempt(100.0 * turn) is not None
        talk.joined(welcome())


def test_a_client_without_calls_comes_back_as_often_as_its_executor() -> None:
    """A service that is idle for days, and whose executor restarts now and then, is not given up."""
    talk = conversation(retry_s=5.0)
    for turn in range(30):
        talk.receive(*ended(ExecutorClosedError("closed")))
        assert talk.next_attempt(1000.0 * turn) is not None
        talk.joined(welcome())
    for turn in range(200):
        talk.receive(*ended(ExecutorClosedError("closed")))
        if talk.next_attempt(30_000 + 0.1 * turn) is None:
            break
        talk.joined(welcome())
    assert talk.state is State.ENDED


def test_an_interrupted_call_is_worth_some_attempts() -> None:
    talk = conversation(retry_s=0.0)
    talk.interrupted()
    assert talk.next_attempt(100.0) is not None
    assert talk.next_attempt(100.0 + AGAIN_S - 0.1) is not None
    assert talk.next_attempt(100.0 + AGAIN_S) is None
    assert talk.state is State.ENDED


def test_a_client_in_a_walk_says_so_after_rejoining() -> None:
    talk = conversation()
    talk.walk_message(True)
    talk.lost(ConnectionLostError("gone"))
    assert talk.joined(welcome()) == [wire.BEGIN]


def test_an_executor_that_does_not_admit_the_client_is_not_asked_again() -> None:
    talk = conversation()
    talk.lost(ConnectionLostError("gone"))
    talk.lost(RefusedError("unknown key"))
    with pytest.raises(RefusedError, match="unknown key"):
        talk.call(a_call())


def test_another_model_is_not_joined() -> None:
    talk = conversation()
    talk.lost(ConnectionLostError("gone"))
    with pytest.raises(RefusedError, match="another model"):
        talk.joined(welcome(fingerprint="another"))
    assert talk.state is State.ENDED


def test_checks_run_before_an_executor_is_joined_again() -> None:
    talk, seen = conversation(), []

    def check(identity: Identity) -> None:
        seen.append(identity)
        if len(seen) == 2:
            raise UsageError("not this one")

    talk.before_return(check)
    assert not seen
    talk.lost(ConnectionLostError("gone"))
    talk.joined(welcome())
    assert seen == [Identity("i", "w")]
    talk.lost(ConnectionLostError("gone"))
    with pytest.raises(UsageError, match="not this one"):
        talk.joined(welcome())
    assert talk.state is State.ENDED


def test_a_check_that_fails_ends_the_conversation() -> None:
    """An error of another class would be taken for one that may pass, and the executor joined again and again."""
    talk = conversation()

    def check(identity: Identity) -> None:
        raise KeyError(identity.instance)

    talk.before_return(check)
    talk.lost(ConnectionLostError("gone"))
    with pytest.raises(RefusedError, match=r"a check of this client refused the executor: KeyError\('i'\)"):
        talk.joined(welcome())
    assert talk.state is State.ENDED


def test_an_interrupted_call_is_forgotten_and_needs_another_connection() -> None:
    talk = conversation(retry_s=0.0)
    talk.call(a_call())
    sendable(talk)
    talk.interrupted()
    assert talk.state is State.REJOINING
    talk.joined(welcome())
    assert not sendable(talk)


# The end


@pytest.mark.parametrize("error", [RefusedError("key removed"), WireError("rule broken"), BusyError("full")])
def test_an_ending_for_any_other_reason_is_final(error: SymbiosisError) -> None:
    talk = conversation()
    assert talk.receive(*ended(error)) is None
    assert talk.state is State.ENDED
    with pytest.raises(type(error), match=str(error)):
        talk.call(a_call())


def test_the_first_reason_is_kept() -> None:
    talk = conversation()
    talk.end(ClientClosedError("closed"))
    talk.lost(ConnectionLostError("gone"))
    talk.lost(RefusedError("late"))
    talk.interrupted()
    talk.end(WireError("late"))
    with pytest.raises(ClientClosedError, match="closed"):
        talk.check_open()


@pytest.mark.parametrize("type_", [Type.RESULT, Type.FAILED])
@pytest.mark.parametrize("content", [[], ["x"], [-1], [1 << 64], [True]])
def test_an_answer_without_an_id_is_malformed(type_: Type, content: list[Any]) -> None:
    with pytest.raises(WireError):
        conversation().receive(type_, content)


def test_a_silent_executor_is_pinged_and_then_given_up() -> None:
    talk = conversation()
    talk.heard(100.0)
    assert talk.check_alive(100.0 + PING_AFTER_S / 2) is None
    assert talk.check_alive(100.0 + PING_AFTER_S) == wire.PING
    assert talk.check_alive(100.0 + 1.5 * PING_AFTER_S) is None
    for number in range(2, UNANSWERED + 1):
        assert talk.check_alive(100.0 + number * PING_AFTER_S) == wire.PING
    last = 100.0 + UNANSWERED * PING_AFTER_S
    assert talk.check_alive(last + PING_AFTER_S / 2) is None
    with pytest.raises(ConnectionLostError, match="has not answered for 125 s"):
        talk.check_alive(last + PING_AFTER_S)
    talk.heard(300.0)
    assert talk.check_alive(301.0) is None


def test_a_client_that_was_stopped_asks_before_it_gives_up() -> None:
    """Its process was stopped, or its virtual machine; the executor may have answered long ago."""
    talk = conversation()
    talk.heard(100.0)
    assert talk.check_alive(100_000.0) == wire.PING
    assert talk.check_alive(100_001.0) is None


class Conversations(RuleBasedStateMachine):
    """Calls, answers, cancellations, losses and reconnections come in any order. Every call that was neither answered
    nor cancelled is waiting or sent, exactly once. The executor never has more than the limits, and order is kept.
    """

    calls: Bundle[Call] = Bundle("calls")

    @initialize()
    def join(self) -> None:
        self.talk = conversation()
        self.open: list[int] = []
        """Ids of calls that were neither answered nor cancelled, in the order of their creation."""
        self.at_executor: dict[int, int] = {}
        """Rows of the calls that this connection's executor has, by id."""

    @rule(target=calls, rows=st.integers(1, 10))
    def make(self, rows: int) -> Call:
        call = a_call(rows)
        self.open.append(self.talk.call(call).id)
        return call

    @precondition(lambda self: self.talk.state is State.JOINED)
    @rule()
    def send(self) -> None:
        sent = [pending.id for pending in sendable(self.talk)]
        assert sent == sorted(sent)
        self.at_executor |= {pending.id: pending.rows for pending in self.talk.outstanding.sent.values()}

    @precondition(lambda self: self.talk.state is State.JOINED)
    @rule(data=st.data(), fails=st.booleans())
    def answer(self, data: st.DataObject, fails: bool) -> None:
        if self.at_executor:
            id_ = data.draw(st.sampled_from(sorted(self.at_executor)))
            del self.at_executor[id_]
            message = (Type.FAILED, [id_, "LayerError", "no"]) if fails else (Type.RESULT, [id_])
            answer = self.talk.receive(*message)
            assert answer is not None
            assert (answer[0].id, answer[1] is not None) == (id_, fails)
            self.talk.outstanding.settle(answer[0])
            if id_ in self.open:
                self.open.remove(id_)

    @rule(call=consumes(calls))
    def cancel(self, call: Call) -> None:
        message = self.talk.cancel(call)
        assert (message is None) == (call.id not in self.at_executor and call.id not in self.talk.outstanding.sent)
        if call.id in self.open:
            self.open.remove(call.id)

    @precondition(lambda self: self.talk.state is State.JOINED)
    @rule()
    def lose(self) -> None:
        self.talk.lost(ConnectionLostError("gone"))
        self.at_executor.clear()

    @precondition(lambda self: self.talk.state is State.REJOINING)
    @rule()
    def return_(self) -> None:
        self.talk.joined(welcome())

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        outstanding = self.talk.outstanding
        kept = [pending.id for pending in outstanding.sent.values() if not pending.cancelled]
        kept += [pending.id for pending in outstanding.waiting]
        assert sorted(kept) == sorted(self.open)
        assert [pending.id for pending in outstanding.waiting] == sorted(p.id for p in outstanding.waiting)

    @invariant()
    def limits_hold(self) -> None:
        assert len(self.at_executor) <= LIMITS.calls
        assert sum(self.at_executor.values()) <= LIMITS.rows or len(self.at_executor) == 1


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
