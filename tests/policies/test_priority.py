"""Clients of a higher priority are served first, and no client is delayed without limit."""

from __future__ import annotations

from typing import Any

from symbiosis.core.policy import Decision, View
from symbiosis.core.requests import Batch, Request
from symbiosis.core.scheduler import Scheduler
from symbiosis.core.terms import Kind, Terms
from symbiosis.policies import NoLockstep, Priority
from symbiosis.testing import World
from tests.helpers import F0, run_next, world_of


def _with_priorities(policy: Priority, **priorities: int) -> World:
    """Return a world of local clients, each with one request, in this order. A name's underscore stands for a slash."""
    terms = {name.replace("_", "/"): Terms(priority=priority) for name, priority in priorities.items()}
    world = world_of(policy, *terms, terms=terms, local=True)
    for name in terms:
        world.submit(name, F0, 1)
    return world


def test_urgent_clients_are_served_first() -> None:
    world = _with_priorities(Priority(NoLockstep()), low=-1, middle=0, high=5)
    order = []
    for _ in range(3):
        order += [request.client for request in world.complete(run_next(world))]
    assert order == ["high", "middle", "low"]


def test_the_oldest_request_is_admitted_in_time_whatever_the_order() -> None:
    """A wrapper around priorities, such as `fair`, may pass on an older request after a newer one."""
    policy = Priority(NoLockstep(), max_wait_ms=1000)
    for number, arrived, priority in (1, 9.5, 1), (2, 9.5, 0), (3, 0.5, 0):
        request = Request(number, f"c{number}", F0, 1, Kind.DECODE, arrived, terms=Terms(priority=priority))
        policy.submitted(request)
    view: Any = None
    assert policy.release(view, 10.0) == 10.5
    assert request in policy.admitted, "the oldest one"
    assert len(policy.admitted) == 2


def test_no_client_is_delayed_without_limit() -> None:
    world = _with_priorities(Priority(NoLockstep(), max_wait_ms=50), low=0, high=1)
    for batches in range(1000):
        (answered,) = world.complete(run_next(world))
        if answered.client == "low":
            assert 45 <= batches <= 55  # of a millisecond each
            return
        world.submit("high", F0, 1)
    raise AssertionError("it waits for ever")


def test_a_request_that_is_held_back_for_long_keeps_no_others() -> None:
    policy = Priority(NoLockstep(), max_wait_ms=1e7)
    world = _with_priorities(policy, low=0, high=1)
    for _ in range(200):
        (answered,) = world.complete(run_next(world))
        world.submit(answered.client, F0, 1)
    assert len(policy._arrivals) < 70


def test_tenants_have_priorities() -> None:
    world = _with_priorities(Priority(NoLockstep(), tenants={"gold": 2}), plain_1=0, gold_1=0, gold_2=1)
    order = []
    for _ in range(3):
        order += [request.client for request in world.complete(run_next(world))]
    assert order == ["gold/2", "gold/1", "plain/1"]


def test_a_request_that_was_served_in_part_is_still_admitted() -> None:
    """The inner policy fails once, and the scheduler serves a part of the oldest request, which is held back."""

    class Moody(NoLockstep):
        moods = 1

        def decide(self, view: View, now: float) -> Decision:
            if self.moods:
                self.moods -= 1
                raise RuntimeError("not now")
            return super().decide(view, now)

    scheduler = Scheduler(Priority(Moody()), layers=4, max_rows=4)
    for number, (name, rows) in enumerate((("low", 10), ("high", 1))):
        scheduler.client_joined(name, Terms(priority=number), local=True)
        scheduler.walk_began(name, 0.0)
        scheduler.submit(Request(number, name, F0, rows, Kind.DECODE, 0.0))
    served = []
    while isinstance(batch := scheduler.next_action(0.0), Batch):
        served.append((batch.slices[0].request.client, batch.rows))
        scheduler.completed(batch, 1e-3, 0.0)
    assert served == [("low", 4), ("high", 1), ("low", 4), ("low", 2)]
    assert len(scheduler.policy_errors) == 1
