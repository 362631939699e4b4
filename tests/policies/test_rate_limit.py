"""Each tenant is served up to its number of tokens per second, with a burst."""

from __future__ import annotations

from collections import Counter

import pytest

from symbiosis.core.requests import Batch
from symbiosis.core.scheduler import WaitUntil
from symbiosis.core.terms import Kind
from symbiosis.policies import NoLockstep, RateLimit, rate_limit
from tests.helpers import F0, run_next, world_of


def test_a_rate() -> None:
    """The rate is 100 tokens per second, the burst one second. In 3 s, 400 requests of 4 rows pass one of 4 layers."""
    world = world_of(RateLimit(NoLockstep(), tokens_per_s=100), "a/1", "a/2")
    world.submit("a/1", F0, 4)
    count = 0
    while world.clock.now < 3:
        for request in world.complete(run_next(world)):
            count += 1
            world.submit(request.client, F0, 4)
    assert count == pytest.approx(400, abs=5)


def test_a_debt_of_hours_is_paid() -> None:
    """The policy waits in parts: the scheduler allows an hour at most while no client is thinking."""
    world = world_of(RateLimit(NoLockstep(), tokens_per_s=0.05), "a/1", "a/2", layers=4)
    for name in ("a/1", "a/2"):
        world.end_walk(name)
        world.submit(name, F0, 1000)
    while world.queued:
        action = world.decide()
        if isinstance(action, WaitUntil):
            world.clock.advance(action.time - world.clock.now)
        else:
            assert isinstance(action, Batch)
            world.complete(action)
    assert world.clock.now == pytest.approx(1000 / 4 / 0.05, rel=0.01)
    assert not world.scheduler.policy_errors


def test_other_tenants_have_buckets_of_their_own() -> None:
    world = world_of(RateLimit(NoLockstep(), tokens_per_s=1, tenants={"quick": 1e6}), "slow", "quick")
    for name in ("slow", "quick"):
        world.submit(name, F0, 8)
    served: Counter[str] = Counter()
    for _ in range(200):
        for request in world.complete(run_next(world)):
            served[request.client] += 1
            world.submit(request.client, F0, 8)
    assert served["slow"] < 5 < 190 < served["quick"]


def test_a_new_tenant_is_not_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "_MAX_TENANTS", 1)
    world = world_of(RateLimit(NoLockstep(), tokens_per_s=100), "old", "new")
    for name in ("old", "new"):
        world.cancel(world.submit(name, F0, 4))
        world.submit(name, F0, 4)
        assert [request.client for request in world.complete(run_next(world))] == [name]
    assert not world.scheduler.policy_errors


def test_cancelled_requests_leave_nothing_behind() -> None:
    policy = RateLimit(NoLockstep(), tokens_per_s=1, burst_s=1)
    world = world_of(policy, "a", "b")
    world.submit("a", F0, 8)
    world.complete(run_next(world))  # the tenant is in debt now
    for _ in range(50):
        world.cancel(world.submit("a", F0, 8))
    assert len(policy._due) <= 1


def test_a_joint_walk_does_not_wait_for_the_debt_of_one_of_its_tenants() -> None:
    """Alice's request is ahead of the joint one, and needs 100 s of her rate."""
    policy = RateLimit(NoLockstep(), tokens_per_s=10)
    world = world_of(policy, "joint", "alice/chat", "alice/tune", "bob/chat", max_rows=8192)
    world.submit("bob/chat", F0, 4)
    world.complete(run_next(world))  # bob's bucket is not as full as alice's
    world.submit("alice/tune", F0, 4000, Kind.FINETUNE)
    world.submit("joint", F0, 2, joint=("alice/chat", "bob/chat"))
    answered = [request.client for _ in range(2) for request in world.complete(run_next(world))]
    assert answered == ["alice/tune", "joint"]
    assert world.clock.now < 0.1


def test_tenants_of_a_joint_walk_are_in_debt_until_the_same_time() -> None:
    """The first request puts both tenants in debt; the second is paid for by both, once."""
    policy = RateLimit(NoLockstep(), tokens_per_s=10)
    world = world_of(policy, "joint", "alice/1", "bob/1", "bob/2", max_rows=8192)
    for _ in range(2):
        world.submit("joint", F0, 160, joint=("alice/1", "bob/1"))
    assert [request.client for _ in range(2) for request in world.complete(run_next(world))] == ["joint", "joint"]
    assert world.clock.now == pytest.approx(1.0, abs=0.02)  # 20 of the 10 tokens in each bucket
    assert [bucket.level for bucket in policy._buckets.values()] == pytest.approx([-20.0, -20.0], abs=0.2)
    world.cancel(world.submit("joint", F0, 3, joint=("alice/1", "bob/1", "bob/2")))
    assert not any(bucket.held for bucket in policy._buckets.values())
    assert not world.scheduler.policy_errors
