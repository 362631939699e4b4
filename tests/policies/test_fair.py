"""Fair shares: each tenant gets rows by its weight, whatever the others ask for."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.core.requests import Batch, Key, Pass
from symbiosis.core.terms import Kind, tenant_of
from symbiosis.policies import CoServing, Fair, NoLockstep, Opportunistic, RateLimit, fair
from symbiosis.testing import World
from tests.helpers import F0, examples, run_next, world_of

WEIGHTS = {Kind.DECODE: 2.0, Kind.PREFILL: 1.0, Kind.FINETUNE: 1.0}


@settings(max_examples=examples(60), deadline=None)
@given(
    works=st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from(Kind), st.integers(1, 6)),  # rows, kind, clients
        min_size=2,
        max_size=5,
    ),
    quantum=st.sampled_from([0.5, 4.0, 64.0]),
    inner=st.sampled_from([NoLockstep, Opportunistic, CoServing]),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=5, max_size=5),
    huge=st.sampled_from([0, 40, 400]),
    local=st.booleans(),
)
def test_the_bound(
    works: list[tuple[int, Kind, int]], quantum: float, inner: type, weights: list[float], huge: int, local: bool
) -> None:
    """The counters of two tenants that always have a request queued differ by at most U at any time: the quantum and
    the largest request of the two. Their service by weight differs by at most 2 · U (VTC, lemma 1 and theorem 1).
    Service is counted here by the rows that ran: at most one batch and one request are in progress. A third tenant with
    one huge request does not change this.
    """
    weight_of = WEIGHTS if local else dict.fromkeys(Kind, WEIGHTS[Kind.DECODE])  # no request has more than 64 rows
    shares = {f"tenant-{tenant}": weight for tenant, weight in enumerate(weights)}
    policy = Fair(inner(), quantum=quantum, weights=shares)
    names = [f"tenant-{tenant}/{client}" for tenant, work in enumerate(works) for client in range(work[2])]
    layers, max_rows = 4, 16
    world = world_of(policy, *names, "huge", layers=layers, max_rows=max_rows, local=local)
    served: Counter[str] = Counter()
    history = []
    if huge:
        world.submit("huge", F0, huge, Kind.PREFILL)
        world.decide()
    for name in names:  # each tenant has two requests queued: a new one is made for each answer
        rows, kind, _ = works[int(name[7])]
        for _ in range(2):
            world.submit(name, F0, rows, kind)
    tenants = [f"tenant-{tenant}" for tenant in range(len(works))]
    charge = {
        tenant: weight_of[kind] * rows / layers / shares[tenant]
        for tenant, (rows, kind, _) in zip(tenants, works, strict=True)
    }
    pairs = list(itertools.combinations(tenants, 2))
    for _ in range(150):
        batch = run_next(world)
        for request, start, stop in batch.slices:
            tenant = tenant_of(request.client)
            if tenant != "huge":
                served[tenant] += weight_of[request.kind] * (stop - start) / layers / shares[tenant]
        for request in world.complete(batch):
            if request.client != "huge":
                world.submit(request.client, F0, request.rows, request.kind)
        for a, b in pairs:
            assert abs(policy.served(a) - policy.served(b)) <= quantum + max(charge[a], charge[b]) + 1e-9
        history.append(dict(served))
    under_way = 2 * max(WEIGHTS.values()) * (max_rows + 30) / layers / min(weights)
    for a, b in pairs:
        gaps = [moment.get(a, 0.0) - moment.get(b, 0.0) for moment in history]
        assert max(gaps) - min(gaps) <= 2 * (quantum + max(charge[a], charge[b])) + under_way


def test_service_is_what_a_tenant_was_charged() -> None:
    """A tenant that is raised because it returns late was not served more for that."""
    policy = Fair(NoLockstep(), quantum=4, weights={"late": 2})
    world = world_of(policy, "busy/1", "busy/2", "late", layers=4, local=True)
    for client in ("busy/1", "busy/2"):
        for _ in range(4):
            world.submit(client, F0, 8, Kind.PREFILL)
            world.complete(run_next(world))
    world.submit("late", F0, 8, Kind.PREFILL)
    world.complete(run_next(world))
    assert policy.service() == RateLimit(policy).service() == {"busy": 8 * 8 / 4, "late": 8 / 4 / 2}
    assert policy.served("late") > policy.service()["late"]
    assert NoLockstep().service() == {}


@pytest.mark.parametrize(
    ("kind", "rows", "backward", "local", "expected"),
    [
        (Kind.DECODE, 1, False, False, 2 * 1),
        (Kind.PREFILL, 1, False, False, 2 * 1),
        (Kind.FINETUNE, 64, False, False, 2 * 64),
        (Kind.FINETUNE, 100, False, False, 2 * 64),
        (Kind.PREFILL, 200, False, False, 200),
        (Kind.FINETUNE, 1, True, False, 1),
        (Kind.PREFILL, 1, False, True, 1),
    ],
)
def test_a_client_in_another_process_pays_for_output_whatever_kind_it_states(
    kind: Kind, rows: int, backward: bool, local: bool, expected: float
) -> None:
    policy = Fair(NoLockstep())
    world = world_of(policy, "sly", layers=1, max_rows=512, local=local)
    world.submit("sly", Key((0,), Pass.BACKWARD if backward else Pass.FORWARD), rows, kind)
    world.complete(run_next(world))
    assert policy.service() == {"sly": pytest.approx(expected)}


def test_one_huge_request_raises_no_credit() -> None:
    """A tenant that returns is no further behind than before, for any earlier service of other tenants."""
    policy = Fair(NoLockstep(), quantum=4)
    world = world_of(policy, "huge", "busy", "late")
    world.submit("huge", F0, 4000)
    world.submit("busy", F0, 8)
    for _ in range(2000):
        for request in world.complete(run_next(world)):
            if request.client == "busy":
                world.submit("busy", F0, 8)
    world.submit("late", F0, 8)
    assert policy.served("busy") - policy.served("late") <= 4 + 2 * 8 / 4


def test_admitted_rows_of_a_tenant_take_no_room_from_others() -> None:
    """While a prompt of 40 batches is read, a row of another tenant runs in the next batch."""
    world = world_of(Fair(CoServing(), quantum=64), "prompt", "polite")
    world.submit("prompt", F0, 40 * 8, Kind.PREFILL)
    world.complete(run_next(world))
    world.submit("polite", F0, 1)
    assert [request.client for request in world.complete(run_next(world))] == ["polite"]


def test_a_tenant_has_at_most_a_batch_of_admitted_requests() -> None:
    """A later request does not wait behind all requests of one tenant, even if the inner policy serves in order. That
    tenant's requests are admitted as it is served."""
    flood = [f"flood/{number}" for number in range(100)]
    world = world_of(Fair(NoLockstep(), quantum=64), *flood, "polite")
    for name in flood:
        world.submit(name, F0, 4)
    answered = [request.client for request in world.complete(run_next(world))]
    world.submit("polite", F0, 1)
    while "polite" not in answered:
        answered += [request.client for request in world.complete(run_next(world))]
    assert len(answered) <= 4
    while world.queued:
        answered += [request.client for request in world.complete(run_next(world))]
    assert len(answered) == 101


def test_a_flood_and_a_polite_tenant_get_equal_shares() -> None:
    flood = [f"flood/{number}" for number in range(20)]
    world = world_of(Fair(NoLockstep(), quantum=4), *flood, "polite")
    for name in [*flood, "polite", "polite"]:
        world.submit(name, F0, 4)
    served: Counter[str] = Counter()
    for _ in range(400):
        batch = run_next(world)
        for request, start, stop in batch.slices:
            served[tenant_of(request.client)] += stop - start
        for request in world.complete(batch):
            world.submit(request.client, F0, 4)
    assert served["polite"] == pytest.approx(served["flood"], rel=0.05)


def test_an_idle_executor_serves_a_tenant_that_is_ahead() -> None:
    """A tenant that is far ahead runs while no other tenant has a request queued."""
    world = world_of(Fair(NoLockstep(), quantum=1), "busy", "idle")
    for _ in range(100):
        world.submit("busy", F0, 8)
        action = world.decide()
        assert isinstance(action, Batch)
        world.complete(action)


def test_no_credit_is_saved_during_absence() -> None:
    policy = Fair(NoLockstep(), quantum=4)
    world = world_of(policy, "busy", "late")
    for _ in range(1000):
        world.submit("busy", F0, 8)
        world.complete(run_next(world))
    world.submit("late", F0, 8)
    bound = 4 + 2 * 8 / 4
    assert policy.served("late") == policy.served("busy") - bound
    rows = Counter({"late": 8})
    world.submit("late", F0, 8)
    world.submit("busy", F0, 8)
    for _ in range(40):
        batch = run_next(world)
        (answered,) = world.complete(batch)
        rows[answered.client] += 8
        world.submit(answered.client, F0, 8)
    assert 0 < rows["late"] - rows["busy"] <= 2 * bound / 2 * 4 + 16


def test_weights() -> None:
    world = world_of(Fair(NoLockstep(), quantum=2, weights={"gold": 3.0}), "gold", "plain")
    served: Counter[str] = Counter()
    for name in ("gold", "gold", "plain", "plain"):
        world.submit(name, F0, 4)
    for _ in range(200):
        for request in world.complete(run_next(world)):
            served[request.client] += 1
            world.submit(request.client, F0, 4)
    assert served["gold"] / served["plain"] == pytest.approx(3.0, rel=0.1)


def test_many_tenants_join_and_leave() -> None:
    policy = Fair(NoLockstep())
    world = World(policy, layers=4, max_rows=8)
    world.check = lambda: None  # type: ignore[method-assign]
    for number in range(5000):
        world.join(f"tenant-{number}")
        world.submit(f"tenant-{number}", F0, 1)
        world.complete(run_next(world))
        world.leave(f"tenant-{number}")
    assert len(policy._tenants) <= 4096


@pytest.mark.parametrize("waits", [True, False])
def test_many_clients_of_one_tenant_displace_no_other(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    monkeypatch.setattr(fair, "_MAX_CLIENTS", 8)
    policy = Fair(NoLockstep())
    world = world_of(policy, "alice", "bob", "erin/first")
    for name in ("alice", "bob"):
        world.submit(name, F0, 8)
        world.complete(run_next(world))
    if waits:  # one of erin's requests is always queued
        world.submit("erin/first", F0, 8)
    for number in range(30):
        world.join(f"erin/{number}")
        world.submit(f"erin/{number}", F0, 8)
        world.complete(run_next(world))
        world.leave(f"erin/{number}")
    assert policy.service().keys() == {"alice", "bob", "erin"}
    assert policy.service()["alice"] == policy.service()["bob"] == 2 * 8 / 4
    assert len(policy._of) <= 8


def test_a_joint_walk_does_not_wait_behind_a_request_of_one_of_its_tenants() -> None:
    """The fine-tuning request puts alice ahead by more than the quantum, and bob has no request but the joint one."""
    world = world_of(Fair(NoLockstep()), "joint", "alice/chat", "alice/tune", "bob/chat", max_rows=512)
    for name in world.clients:
        world.end_walk(name)
    world.submit("alice/tune", F0, 300, Kind.FINETUNE)
    world.submit("joint", Key((1,), Pass.FORWARD), 2, joint=("alice/chat", "bob/chat"))
    world.submit("alice/tune", F0, 300, Kind.FINETUNE)
    answered = []
    for _ in range(3):
        batch = world.decide()
        assert isinstance(batch, Batch), batch
        answered += [request.client for request in world.complete(batch)]
    assert answered == ["alice/tune", "joint", "alice/tune"]


def test_each_tenant_of_a_joint_walk_is_charged_for_its_own_rows() -> None:
    """Bob's client decodes three sequences, and each of alice's one."""
    clients = ("alice/1", "alice/2", "bob", "bob", "bob")
    fair = Fair(NoLockstep())
    limit = RateLimit(NoLockstep(), tokens_per_s=1000)
    for policy in (fair, limit):
        world = world_of(policy, "joint", *dict.fromkeys(clients))
        world.submit("joint", F0, 40, joint=clients)
        world.complete(run_next(world))
        assert not world.scheduler.policy_errors
    assert fair.service() == pytest.approx({"alice": 2 * 16 / 4, "bob": 2 * 24 / 4})  # one of four layers, weight 2
    spent = {name: bucket.size - bucket.level for name, bucket in limit._buckets.items()}
    assert spent == pytest.approx({"alice": 16 / 4, "bob": 24 / 4}, abs=0.5)


def test_requests_of_joint_walks_leave_nothing_behind() -> None:
    policy = Fair(NoLockstep(), quantum=4)
    world = world_of(policy, "joint", "alice/1", "alice/2", "bob")
    for cancels in (True, False):
        world.submit("bob", F0, 8)
        joint = world.submit("joint", F0, 5, joint=("alice/1", "alice/2", "bob", "bob", "bob"))
        if cancels:
            world.cancel(joint)
        while world.queued:
            world.complete(run_next(world))
        for tenant in policy._tenants.values():
            assert (tenant.queued, tenant.inside, len(tenant.held)) == (0, 0, 0)
    assert policy.service() == {"alice": 2 * 2 / 4, "bob": 2 * (8 + 8 + 3) / 4}
