"""Policies around a policy: what fair shares, priorities and rate limits have in common."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import symbiosis
from symbiosis.core.policy import Decision, Policy, View, Wait
from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.scheduler import Scheduler, WaitUntil
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import PolicyError, UsageError
from symbiosis.policies import CoServing, Fair, Lockstep, NoLockstep, Priority, RateLimit
from symbiosis.policies.admission import Admission
from symbiosis.testing import tiny_model
from tests.helpers import F0, Conformance, examples


class _Patient(Conformance):
    """A wrapper holds requests back on purpose, until the other clients have caught up."""

    max_examples = examples(50)

    def patience_batches(self, layers: int) -> int:
        return 400


class _Rude(Policy):
    """Wait, for any queued requests."""

    name = "rude"

    def __init__(self, until: float | None) -> None:
        self.until = until

    def decide(self, view: View, now: float) -> Decision:
        return Wait(self.until)

    def unloaded(self, seconds: float) -> None:
        raise RuntimeError("boom")


@pytest.mark.parametrize("until", [None, math.inf, math.nan, 1e300, -1.0])
@pytest.mark.parametrize("wrapper", [Fair, Priority, RateLimit])
def test_waits_that_must_be_refused_are_passed_on(wrapper: type[Admission], until: float | None) -> None:
    """No client is thinking, and requests of another tenant are held back."""
    scheduler = Scheduler(wrapper(_Rude(until)), layers=2, max_rows=8)
    for number, client in enumerate(["a", "b"]):
        scheduler.client_joined(client, Terms(priority=number))
        scheduler.submit(Request(number, client, F0, 10_000, Kind.DECODE, 0.0))
    batch = scheduler.next_action(0.0)
    assert isinstance(batch, Batch)
    assert batch.reason == "policy-error"
    assert "rude" in str(scheduler.policy_errors[0])


def test_a_policy_that_raises_at_its_first_measurement_is_named() -> None:
    with pytest.raises(PolicyError, match=r"policy 'fair\+rude' raised in unloaded\(\): RuntimeError\('boom'\)"):
        symbiosis.Executor(tiny_model(), policy=Fair(_Rude(None)))


@pytest.mark.parametrize("make", [lambda: Fair(quantum=10**400), lambda: CoServing(slo_ms=10**400)])
def test_numbers_that_are_too_large(make: Callable[[], Policy]) -> None:
    with pytest.raises(UsageError, match="must be a number"):
        make()


@pytest.mark.parametrize("make", [Fair, lambda: RateLimit(Fair(), tokens_per_s=1.0, burst_s=1.0)])
def test_a_row_costs_what_its_layers_weigh(make: Callable[[], Admission]) -> None:
    """The second layer has nine times the weights of the first one, so as many rows of it cost nine times as much. In a
    bank, a row pays for each expert that it chooses."""
    policy = make()
    scheduler = Scheduler(policy, layers=2, max_rows=64, parts=[0.1, 0.9])
    keys = {"small": Key((0,), Pass.FORWARD), "large": Key((1,), Pass.FORWARD), "both": Key((0, 1), Pass.FORWARD)}
    keys["two experts"] = keys["small"]._replace(choices=2)
    for number, (client, key) in enumerate(keys.items()):
        scheduler.client_joined(client, local=True)
        scheduler.submit(Request(number, client, key, 10, Kind.PREFILL, 0.0))
        scheduler.next_action(0.0)
    assert policy.service() == pytest.approx({"small": 1.0, "large": 9.0, "both": 10.0, "two experts": 2.0})
    if isinstance(policy, RateLimit):
        assert [policy._bucket(client, 0.0).level for client in keys] == pytest.approx([0.0, -8.0, -9.0, -1.0])


class TestFairConforms(_Patient):
    def make_policy(self) -> Policy:
        return Fair(quantum=16)


class TestFairCoServingConforms(_Patient):
    patience_s = 20.0

    def make_policy(self) -> Policy:
        return Fair(CoServing(slo_ms=50), quantum=16, weights={"tenant-1": 3.0})


class TestFairLockstepConforms(_Patient):
    def make_policy(self) -> Policy:
        return Fair(Lockstep(), quantum=16)


class TestPriorityConforms(_Patient):
    patience_s = 2.0

    def make_policy(self) -> Policy:
        return Priority(max_wait_ms=500)


class TestPriorityOfTenantsConforms(_Patient):
    patience_s = 2.0

    def make_policy(self) -> Policy:
        return Priority(CoServing(max_wait_ms=500), max_wait_ms=500, tenants={"tenant-1": 1})


class TestRateLimitConforms(_Patient):
    patience_s = 60.0

    def make_policy(self) -> Policy:
        return RateLimit(tokens_per_s=500)


class TestAllAtOnceConforms(_Patient):
    patience_s = 60.0

    def make_policy(self) -> Policy:
        return RateLimit(Fair(Priority(CoServing()), quantum=16), tokens_per_s=500)


class Unreliable(NoLockstep):
    """A policy that raises an error in some calls. It has no records, so errors in records are the wrapper's."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.calls = 0

    def _perhaps(self, error: BaseException) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            raise error

    def submitted(self, request: Request) -> None:
        self._perhaps(ValueError("faulty"))

    def started(self, batch: Batch) -> None:
        self._perhaps(ValueError("faulty"))

    def ran(self, batch: Batch, seconds: float) -> None:
        self._perhaps(ValueError("faulty"))

    def cancelled(self, request: Request) -> None:
        self._perhaps(ValueError("faulty"))

    def decide(self, view: View, now: float) -> Decision:
        self._perhaps(asyncio.CancelledError("faulty"))
        return super().decide(view, now)


@pytest.mark.parametrize(
    "around",
    [
        lambda policy: Fair(policy, quantum=1),
        lambda policy: Priority(policy, max_wait_ms=5),
        lambda policy: RateLimit(policy, tokens_per_s=500),
        lambda policy: RateLimit(Fair(Priority(policy))),
        lambda policy: Priority(Fair(policy)),
    ],
)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_records_are_right_after_any_error_of_the_inner_policy(around: Any, data: st.DataObject) -> None:
    """All requests are served, no error is raised but the inner policy's own, and no request stays in the records."""
    wrapper = around(Unreliable(data.draw(st.integers(1, 6), label="every")))
    scheduler = Scheduler(wrapper, layers=3, max_rows=data.draw(st.sampled_from([1, 4, 24]), label="max_rows"))
    for name in "ABC":
        scheduler.client_joined(name, Terms(priority=ord(name) % 3), local=True)
    numbers, now, errors = itertools.count(), 0.0, []
    waiting: set[int] = set()

    def step(until: float) -> float:
        action = scheduler.next_action(now)
        errors.extend(str(error) for error in scheduler.policy_errors)
        if isinstance(action, Batch):
            waiting.difference_update(request.id for request in scheduler.completed(action, 1e-3, now))
        errors.extend(str(error) for error in scheduler.policy_errors)
        scheduler.policy_errors.clear()
        scheduler.validate()
        return min(action.time, now + until) if isinstance(action, WaitUntil) else now

    for _ in range(data.draw(st.integers(1, 30), label="steps")):
        for name in data.draw(st.sets(st.sampled_from("ABC"))):
            key = Key((data.draw(st.integers(0, 2)),), Pass.FORWARD)
            number = next(numbers)
            scheduler.submit(Request(number, name, key, data.draw(st.integers(1, 9)), Kind.DECODE, now))
            waiting.add(number)
        if waiting and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(waiting)))
            scheduler.cancel(gone, now)
            waiting.discard(gone)
        now = step(0.1) + 1e-3
    for _ in range(2000):
        now = step(60.0)
        if not waiting:
            break
    assert not waiting
    assert all("faulty" in error for error in errors), errors
    each: Any = wrapper
    while isinstance(each, Admission):
        assert not len(each.admitted)
        each = each.policy


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Fair(quantum=0), "quantum is 0"),
        (lambda: Fair(quantum=float("nan")), "quantum is nan"),
        (lambda: Fair(output=-1), "output is -1"),
        (lambda: Fair(weights={"a": True}), "weight of 'a' is True"),
        (lambda: Fair("opportunistic"), "instance of a subclass of Policy"),  # type: ignore[arg-type]
        (lambda: Fair(NoLockstep), "instance of a subclass of Policy"),  # type: ignore[arg-type]
        (lambda: Priority(max_wait_ms=-1), "max_wait_ms is -1"),
        (lambda: Priority(tenants={"a": 1.5}), "the priority of 'a' is 1.5"),  # type: ignore[dict-item]
        (lambda: RateLimit(tokens_per_s=0), "tokens_per_s is 0"),
        (lambda: RateLimit(tenants={"a": -1}), "rate of 'a' is -1"),
        (lambda: RateLimit(tenants=5), "tenants is 5; give one entry for each name"),
        (lambda: Fair(RateLimit()), r"write rate-limit\+fair\+"),
        (lambda: Priority(RateLimit(Fair())), r"write rate-limit\+priority\+"),
        (lambda: Fair(weights=3), "weights is 3; give one entry for each name"),
        (lambda: Priority(tenants=3), "tenants is 3; give one entry for each name"),
        (lambda: Fair(weights={"a": 1e-310}), "the weight of 'a' is 1e-310; it must be between 1e-06 and 1e"),
        (lambda: Fair(finetune=1e300), r"finetune is 1e\+300"),
        (lambda: Fair(weights={"alice/notebook": 2}), "which is a client; give its tenant, 'alice'"),
        (lambda: Priority(tenants={"": 1}), "tenants has '', which is not a name"),
        (lambda: Fair(weights={1: 2}), "weights has 1, which is not a name"),  # type: ignore[dict-item]
    ],
)
def test_wrong_use(make: type, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()
