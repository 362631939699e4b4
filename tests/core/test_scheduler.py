"""Tests of the scheduler: queues, slices, cancellation, thinking clients, and refused calls. Random scripts against it
are in ``test_policies.py``, decisions that it must refuse in ``test_policy_kit.py``.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from symbiosis.core.clients import STOPPED_S
from symbiosis.core.policy import Decision, Policy, Run, View, Wait
from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.scheduler import ALONE, ELSEWHERE, LONE, PASSED_OVER, THINKING, TURN_S, Scheduler, WaitUntil
from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.errors import UsageError
from symbiosis.policies import Lockstep, NoLockstep, Opportunistic
from tests.helpers import world_of

F0, F1, B0 = Key((0,), Pass.FORWARD), Key((1,), Pass.FORWARD), Key((0,), Pass.BACKWARD)


class Told(Policy):
    """A policy that returns a preset decision."""

    name = "told"

    def __init__(self) -> None:
        self.decision: Decision = Wait(None)

    def decide(self, view: View, now: float) -> Decision:
        return self.decision


def make(*clients: str, max_rows: int = 8) -> tuple[Scheduler, Told]:
    policy = Told()
    scheduler = Scheduler(policy, layers=2, max_rows=max_rows)
    for client in clients:
        scheduler.client_joined(client)
        scheduler.walk_began(client, 0.0)
    return scheduler, policy


def request(id_: int, client: str, key: Key = F0, rows: int = 3) -> Request:
    return Request(id_, client, key, rows, Kind.DECODE, 0.0)


def run(scheduler: Scheduler, policy: Told, *takes: tuple[Request, int]) -> Batch:
    policy.decision = Run(takes[0][0].key, takes, "told")
    batch = scheduler.next_action(0.0)
    scheduler.validate()
    assert not scheduler.policy_errors
    assert isinstance(batch, Batch)
    return batch


def test_a_policys_own_reason_may_be_that_of_lone_requests() -> None:
    """The policy has decided about this batch, so it is told how long it took."""
    scheduler, policy = make("a")
    told: list[float] = []
    policy.ran = lambda batch, seconds: told.append(seconds)  # type: ignore[method-assign]
    mine = request(1, "a")
    scheduler.submit(mine)
    policy.decision = Run(F0, [(mine, 3)], "lone")
    batch = scheduler.next_action(0.0)
    assert isinstance(batch, Batch)
    assert batch.reason == LONE
    scheduler.completed(batch, 0.5, 1.0)
    assert told == [0.5]


def test_idle_when_nothing_is_queued() -> None:
    scheduler, _ = make("a")
    assert scheduler.next_action(0.0) == WaitUntil(math.inf)


def test_slices_run_in_order_and_give_one_answer() -> None:
    scheduler, policy = make("a")
    r = request(0, "a", rows=10)
    scheduler.submit(r)
    batches = [run(scheduler, policy, (r, count)) for count in (4, 1, 5)]
    assert [(b.slices[0].start, b.slices[0].stop) for b in batches] == [(0, 4), (4, 5), (5, 10)]
    # The slices may end in any order; the last one answers.
    assert scheduler.completed(batches[2], 1e-3, 0.0) == []
    assert scheduler.completed(batches[0], 1e-3, 0.0) == []
    assert scheduler.completed(batches[1], 1e-3, 0.0) == [r]
    assert scheduler.outstanding == 0
    assert scheduler.next_action(0.0) == WaitUntil(math.inf)


def test_rows_left_stay_queued() -> None:
    scheduler, policy = make("a", "b")
    first, second = request(0, "a", rows=6), request(1, "b", rows=6)
    scheduler.submit(first)
    scheduler.submit(second)
    run(scheduler, policy, (first, 6), (second, 2))
    assert scheduler.queues[F0].rows == 4
    assert list(scheduler.queues[F0]) == [second]
    assert scheduler.oldest is second


@pytest.mark.parametrize(
    ("other", "beside"), [(None, THINKING), (F1, ELSEWHERE), (B0, ELSEWHERE), (F0, PASSED_OVER), ("idle", ALONE)]
)
def test_what_other_clients_do_beside_a_batch(other: Key | str | None, beside: str) -> None:
    scheduler, policy = make("a", "b")
    mine, next_ = request(0, "a", rows=4), request(1, "a")
    for each in (mine, next_):  # a further request of the same client says nothing about the other one
        scheduler.submit(each)
    if other == "idle":
        scheduler.walk_ended("b")
    elif isinstance(other, Key):
        scheduler.submit(request(2, "b", other))
    batch = run(scheduler, policy, (mine, 2))
    assert scheduler.beside(batch) == beside
    scheduler.client_left("a", 0.0)
    assert scheduler.beside(batch), "a client may leave while its batch runs"


def test_take() -> None:
    scheduler, _ = make("a", "b")
    requests = [request(n, "ab"[n % 2], rows=3) for n in range(4)]
    for r in requests:
        scheduler.submit(r)
    queue = scheduler.queues[F0]
    assert (len(queue), queue.rows, queue.oldest) == (4, 12, requests[0])
    assert queue.take(7) == [(requests[0], 3), (requests[1], 3), (requests[2], 1)]
    assert queue.take(3) == [(requests[0], 3)]
    assert queue.take(5, first=requests[1]) == [(requests[1], 3), (requests[0], 2)]
    assert queue.take(2, first=requests[1]) == [(requests[1], 2)]
    # b's second request cannot run before its first.
    assert queue.take(5, first=requests[3]) == [(requests[0], 3), (requests[1], 2)]
    assert queue.take(100) == [(r, 3) for r in requests]


@pytest.mark.parametrize("moment", ["queued", "partly-taken", "running", "answered", "never"])
def test_cancel(moment: str) -> None:
    scheduler, policy = make("a", "b")
    r, other = request(0, "a", rows=5), request(1, "b", rows=2)
    batches = []
    if moment != "never":
        scheduler.submit(r)
    scheduler.submit(other)
    if moment == "partly-taken":
        batches.append(run(scheduler, policy, (r, 2), (other, 1)))
    elif moment in ("running", "answered"):
        batches.append(run(scheduler, policy, (r, 5), (other, 1)))
    if moment == "answered":
        assert scheduler.completed(batches.pop(), 1e-3, 0.0) == [r]
    scheduler.cancel(0, 0.0)
    scheduler.cancel(0, 0.0)  # cancelling twice has no effect
    scheduler.validate()
    assert scheduler.outstanding == 1
    assert scheduler.thinking == 1  # the cancelled request no longer blocks a
    for batch in batches:
        assert scheduler.completed(batch, 1e-3, 0.0) == []
    assert scheduler.completed(run(scheduler, policy, (other, other.remaining)), 1e-3, 0.0) == [other]
    assert scheduler.next_action(0.0) == WaitUntil(math.inf)
    scheduler.validate()


def test_a_client_leaves_with_rows_queued_and_running() -> None:
    scheduler, policy = make("a", "b")
    mine = [request(0, "a", F0, 4), request(1, "a", F1, 4), request(2, "a", B0, 4)]
    other = request(3, "b", F0, 4)
    for r in [*mine, other]:
        scheduler.submit(r)
    running = run(scheduler, policy, (mine[0], 4), (other, 1))
    run(scheduler, policy, (mine[1], 2))
    assert scheduler.client_left("a", 0.0) == mine
    assert all(r.cancelled for r in mine)
    scheduler.validate()
    assert scheduler.completed(running, 1e-3, 0.0) == []
    scheduler.client_joined("a")  # the name can be used again at once
    scheduler.submit(request(4, "a"))
    scheduler.validate()
    assert scheduler.outstanding == 2


def test_thinking() -> None:
    scheduler, policy = make()
    assert scheduler.thinking == 0
    scheduler.client_joined("a")
    assert scheduler.thinking == 0  # idle
    scheduler.walk_began("a", 0.0)
    scheduler.walk_began("a", 0.0)
    assert scheduler.thinking == 1
    first, second = request(0, "a"), request(1, "a", F1)
    scheduler.submit(first)
    scheduler.submit(second)
    assert scheduler.thinking == 0  # a is blocked
    scheduler.completed(run(scheduler, policy, (first, 3)), 1e-3, 0.0)
    assert scheduler.thinking == 0  # a is blocked by the second request
    scheduler.walk_ended("a")
    scheduler.walk_ended("a")
    scheduler.completed(run(scheduler, policy, (second, 3)), 1e-3, 0.0)
    assert scheduler.thinking == 0  # a has ended its walk
    scheduler.walk_began("a", 0.0)
    assert scheduler.thinking == 1
    scheduler.client_left("a", 0.0)
    assert scheduler.thinking == 0


def test_waits() -> None:
    scheduler, policy = make("a", "thinker")
    scheduler.submit(request(0, "a"))
    policy.decision = Wait(None)
    assert scheduler.next_action(0.2) == WaitUntil(STOPPED_S)  # when the thinking client will have stopped
    policy.decision = Wait(0.7)
    assert scheduler.next_action(0.2) == WaitUntil(0.7)
    assert not scheduler.policy_errors
    scheduler.client_left("thinker", 0.0)
    policy.decision = Wait(math.inf)
    assert isinstance(scheduler.next_action(0.2), Batch)  # no client is thinking, so an endless wait is refused
    assert "waits" in str(scheduler.policy_errors[0])


def test_a_client_without_requests_counts_as_stopped() -> None:
    """It counts as thinking for a limited time, and again after its next request."""
    scheduler, policy = make("a", "stopped")
    scheduler.submit(request(0, "a"))
    policy.decision = Wait(None)
    assert scheduler.next_action(0.5) == WaitUntil(STOPPED_S)
    assert scheduler.thinking == 1
    again = request(1, "stopped")
    assert isinstance(scheduler.next_action(STOPPED_S), Batch)
    assert scheduler.thinking == 0
    assert "waits" in str(scheduler.policy_errors.pop())
    scheduler.submit(again)
    scheduler.completed(run(scheduler, policy, (again, 3)), 1e-3, 5.0)
    assert scheduler.thinking == 1
    scheduler.validate()


@pytest.mark.parametrize("ends", [True, False])
def test_walks_without_requests_delay_others_once(ends: bool) -> None:
    """A client that begins walk after walk and sends no request counts as thinking for one second in all."""
    world = world_of(Lockstep(), "polite", "other")
    for layer in range(4):
        world.submit("polite", Key((layer,), Pass.FORWARD), 1)
        while isinstance(action := world.decide(), WaitUntil):
            assert world.clock.now < STOPPED_S
            world.clock.advance(min(action.time - world.clock.now, 0.3))
            if ends:
                world.end_walk("other")
            world.begin_walk("other")
        world.complete(action)
        world.begin_walk("other")


def test_a_client_that_returns_after_minutes_counts_as_thinking() -> None:
    scheduler, policy = make("a")
    scheduler.client_joined("b")
    for minute in range(1, 4):
        scheduler.walk_began("b", 60.0 * minute)
        assert scheduler.thinking == 2
        mine = request(minute, "b")
        scheduler.submit(mine)
        scheduler.completed(run(scheduler, policy, (mine, 3)), 1e-3, 60.0 * minute)
        scheduler.walk_ended("b")


def test_a_client_in_the_executors_process_thinks_between_joint_walks() -> None:
    """It ends its walk while it waits for a joint walk, begins again afterwards, and sends no request meanwhile."""
    scheduler, _ = make()
    scheduler.client_joined("a", local=True)
    for second in range(3):
        scheduler.walk_began("a", float(second))
        assert scheduler.thinking == 1
        scheduler.walk_ended("a")


def test_a_request_that_finds_the_executor_idle_runs_at_once() -> None:
    scheduler = Scheduler(NoLockstep(), layers=2, max_rows=8)
    for client in ("a", "b"):
        scheduler.client_joined(client)
    scheduler.walk_began("a", 0.0)
    scheduler.turned(0.0)
    first = request(0, "a")
    batch = scheduler.offer(first, 0.0)
    assert batch is not None
    assert (batch.rows, batch.reason) == (3, LONE)
    scheduler.validate()
    assert scheduler.offer(request(1, "b"), 0.0) is None  # the first is running
    assert scheduler.completed(batch, 1e-3, 0.0) == [first]
    assert scheduler.offer_alone(request(2, "a"), 0.0) is None  # one is queued
    scheduler.cancel(1, 0.0)
    scheduler.walk_began("b", 0.0)
    assert scheduler.offer_alone(request(3, "a"), 0.0) is None  # another client is thinking
    scheduler.walk_ended("b")
    assert scheduler.offer_alone(request(4, "a", rows=9), 0.0) is None  # more rows than a batch may have
    assert scheduler.offer_alone(request(5, "b"), 0.0) is None  # a is thinking
    assert scheduler.client_left("a", 0.0) == []
    assert scheduler.offer_alone(request(6, "a"), 0.0) is None  # its thread may still send after it left
    scheduler.validate()


def test_other_work_of_the_driver_runs_between_batches() -> None:
    scheduler = Scheduler(NoLockstep(), layers=2, max_rows=8)
    for client in ("a", "b"):
        scheduler.client_joined(client)
    scheduler.turned(1.0)
    scheduler.walk_began("a", 1.0)
    assert scheduler.offer(request(0, "a"), 1.0) is None  # another client may begin a walk
    assert not scheduler.hurries(1.0)
    scheduler.turned(1.0)
    assert scheduler.hurries(1.0)
    batch = scheduler.next_action(1.0)
    assert isinstance(batch, Batch)
    scheduler.completed(batch, 1e-3, 1.0)
    assert not scheduler.hurries(1.0)  # a is thinking
    late = 1.0 + 1.5 * TURN_S
    assert scheduler.offer(request(1, "a"), late) is None
    assert not scheduler.hurries(late)
    scheduler.cancel(1, late)
    scheduler.turned(late)
    assert scheduler.offer(request(2, "a"), late) is not None
    scheduler.validate()


def test_takes_that_can_be_read_once() -> None:
    """A generator for ``takes`` must not lead to an empty batch."""
    scheduler, policy = make("a")
    r = request(0, "a")
    scheduler.submit(r)
    policy.decision = Run(F0, iter([(r, 3)]), "told")  # type: ignore[arg-type]
    batch = scheduler.next_action(0.0)
    assert isinstance(batch, Batch)
    assert scheduler.completed(batch, 1e-3, 0.0) == [r]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (request(7, "a", rows=0), "must bring 1 or more rows"),
        (request(7, "a", rows=-1), "must bring 1 or more rows"),
        (request(0, "a"), "request 0 of 'a' was submitted already"),
        (request(7, "stranger"), "'stranger', which has not joined"),
    ],
    ids=["no rows", "negative rows", "twice", "stranger"],
)
def test_refused_submissions_change_nothing(bad: Request, complaint: str) -> None:
    scheduler, _ = make("a")
    scheduler.submit(request(0, "a"))
    with pytest.raises(UsageError, match=complaint):
        scheduler.submit(bad)
    scheduler.validate()
    assert scheduler.outstanding == 1


def test_names_are_unique() -> None:
    scheduler, _ = make("a")
    with pytest.raises(UsageError, match="'a' is connected already"):
        scheduler.client_joined("a")


@pytest.mark.parametrize("max_rows", [0, -3])
def test_max_rows(max_rows: int) -> None:
    with pytest.raises(UsageError, match=f"max_rows is {max_rows}"):
        Scheduler(NoLockstep(), layers=2, max_rows=max_rows)


def test_view_is_read_only() -> None:
    scheduler, _ = make("a")
    scheduler.submit(request(0, "a"))
    with pytest.raises(TypeError):
        scheduler.queues[F1] = scheduler.queues[F0]  # type: ignore[index]


def test_validate_detects_an_error() -> None:
    scheduler, _ = make("a")
    scheduler.submit(request(0, "a"))
    scheduler.queues[F0].rows += 1
    with pytest.raises(AssertionError, match="row count"):
        scheduler.validate()


@pytest.mark.parametrize("policy", [NoLockstep, Lockstep, Opportunistic])
def test_cost_does_not_grow_with_the_number_of_clients(policy: type[NoLockstep]) -> None:
    """A request takes about as much processor time with 1000 clients as with 10, within a factor of 8."""

    def seconds_a_request(clients: int) -> float:
        scheduler = Scheduler(policy(), layers=32, max_rows=4096)
        names = [f"client-{n}" for n in range(clients)]
        for name in names:
            scheduler.client_joined(name)
            scheduler.walk_began(name, 0.0)
        ids = iter(range(10**9))
        best = math.inf
        for layer in range(12):
            started = time.thread_time()
            for name in names:
                scheduler.submit(Request(next(ids), name, Key((layer,), Pass.FORWARD), 1, Kind.DECODE, 0.0))
            while isinstance(batch := scheduler.next_action(0.0), Batch):
                assert isinstance(batch, Batch)
                scheduler.completed(batch, 1e-3, 0.0)
            best = min(best, (time.thread_time() - started) / clients)
        return best

    assert seconds_a_request(1000) < 8 * seconds_a_request(10)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit(), SystemExit(1), BaseException("base")])
def test_requests_are_served_after_any_error_of_a_policy(error: BaseException) -> None:
    class Raises(NoLockstep):
        def decide(self, view: View, now: float) -> Decision:
            raise error

        def started(self, batch: Batch) -> None:
            raise error

        def submitted(self, request: Request) -> None:
            raise error

    scheduler = Scheduler(Raises(), layers=1, max_rows=8)
    scheduler.client_joined("a")
    request = Request(0, "a", Key((0,), Pass.FORWARD), 1, Kind.DECODE, 0.0)
    scheduler.submit(request)
    batch = scheduler.next_action(0.0)
    assert isinstance(batch, Batch)
    assert [piece.request for piece in batch.slices] == [request]
    for name in ("submitted", "decide", "started"):
        assert f"policy 'no-lockstep' raised in {name}(): {error!r}" in "".join(map(str, scheduler.policy_errors))


def test_an_interrupt_is_not_an_error_of_the_policy() -> None:
    class Interrupted(NoLockstep):
        def decide(self, view: View, now: float) -> Decision:
            raise KeyboardInterrupt

    world = world_of(Interrupted(), "a")
    world.submit("a", Key((0,), Pass.FORWARD), 1)
    with pytest.raises(KeyboardInterrupt):
        world.scheduler.next_action(0.0)


def test_an_error_without_a_message_is_reported() -> None:
    class UnspeakableError(Exception):
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    class Raises(NoLockstep):
        def decide(self, view: View, now: float) -> Decision:
            raise UnspeakableError

    world = world_of(Raises(), "a")
    request = world.submit("a", Key((0,), Pass.FORWARD), 1)
    batch = world.scheduler.next_action(0.0)
    assert isinstance(batch, Batch)
    assert [piece.request for piece in batch.slices] == [request]
    (error,) = world.scheduler.policy_errors
    assert "raised in decide(): <UnspeakableError>" in str(error)


def test_a_policy_that_raises_when_it_is_asked_costs_its_answers_only() -> None:
    class Silent(NoLockstep):
        def default_terms(self, client: str) -> Terms:
            raise KeyError(client)

        def slo(self) -> dict[str, tuple[int, int]]:
            raise RuntimeError("no targets")

        def service(self) -> dict[str, float]:
            return {"a": 1.0}

    scheduler = Scheduler(Silent(), layers=1, max_rows=8)
    assert scheduler.client_joined("a") == NO_TERMS
    assert scheduler.accounts() == ({}, {"a": 1.0})
    first, second = map(str, scheduler.policy_errors)
    assert "raised in default_terms(): KeyError('a'); the client joins without terms of the policy" in first
    assert "raised in slo(): RuntimeError('no targets')" in second


def test_a_walk_of_many_tokens_counts_anew_after_two_requests_a_layer() -> None:
    """As the text of a coroutine does, whose tokens are one walk."""
    scheduler, policy = make("text", "other")
    passed = []
    for number in range(6):
        requests = [
            Request(2 * number + last, client, F0, 1, Kind.DECODE, 0.0) for last, client in enumerate(("other", "text"))
        ]
        for request in requests:
            scheduler.submit(request)
        passed.append(requests[1].passed)
        for request in requests:
            policy.decision = Run(F0, [(request, 1)], "told")
            batch = scheduler.next_action(0.0)
            assert isinstance(batch, Batch)
            scheduler.completed(batch, 1e-3, 0.0)
    assert passed == [0, 1, 2, 3, 0, 1]


def test_terms_of_a_policy_are_checked() -> None:
    class Texts(NoLockstep):
        def default_terms(self, client: str) -> Terms:
            return Terms(slo_ms="75ms")  # type: ignore[arg-type]

    scheduler = Scheduler(Texts(), layers=1, max_rows=8)
    assert scheduler.client_joined("a") == NO_TERMS
    (error,) = map(str, scheduler.policy_errors)
    assert "slo_ms is '75ms'; it must be a number of milliseconds greater than 0" in error


@pytest.mark.parametrize("wrong", [None, "x", {"a": "x"}, {"a": (1, "x")}, {"a": (1,)}, {1: (1, 1)}, {1: 1.0}])
def test_a_policy_that_returns_wrong_types_costs_its_answers_only(wrong: Any) -> None:
    class Wrong(NoLockstep):
        def default_terms(self, client: str) -> Any:
            return wrong

        def slo(self) -> Any:
            return wrong

        def service(self) -> Any:
            return wrong

    scheduler = Scheduler(Wrong(), layers=1, max_rows=8)
    assert scheduler.client_joined("a") == NO_TERMS
    assert scheduler.accounts() == ({}, {})
    first, second, third = map(str, scheduler.policy_errors)
    assert f"returned {wrong!r} in default_terms(); the client joins without terms of the policy" in first
    assert f"returned {wrong!r} in slo(); the statistics have none of it" in second
    assert f"returned {wrong!r} in service(); the statistics have none of it" in third
