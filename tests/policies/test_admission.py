"""Policies around a policy: fair shares, priorities and rate limits."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import symbiosis
from symbiosis.core.policy import Decision, Policy, View, Wait
from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.scheduler import Scheduler, WaitUntil
from symbiosis.core.terms import NO_TERMS, Kind, Terms, effective, kind_of, tenant_of
from symbiosis.errors import PolicyError, UsageError
from symbiosis.policies import (
    CoServing,
    Fair,
    Lockstep,
    NoLockstep,
    Opportunistic,
    Priority,
    RateLimit,
    fair,
    rate_limit,
)
from symbiosis.policies.admission import Admission
from symbiosis.testing import World, tiny_model
from tests.helpers import IDS, Conformance, examples, world_of

F0 = Key((0,), Pass.FORWARD)
WEIGHTS = {Kind.DECODE: 2.0, Kind.PREFILL: 1.0, Kind.FINETUNE: 1.0}


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


# ---------------------------------------------------------------------------------------------------------------- fair


def _run(world: World) -> Batch:
    action = world.decide()
    while isinstance(action, WaitUntil):
        world.clock.advance(action.time - world.clock.now)
        action = world.decide()
    assert isinstance(action, Batch), action
    world.clock.advance(1e-3)
    return action


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
        batch = _run(world)
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
            world.complete(_run(world))
    world.submit("late", F0, 8, Kind.PREFILL)
    world.complete(_run(world))
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
    world.complete(_run(world))
    assert policy.service() == {"sly": pytest.approx(expected)}


def test_one_huge_request_raises_no_credit() -> None:
    """A tenant that returns is no further behind than before, for any earlier service of other tenants."""
    policy = Fair(NoLockstep(), quantum=4)
    world = world_of(policy, "huge", "busy", "late")
    world.submit("huge", F0, 4000)
    world.submit("busy", F0, 8)
    for _ in range(2000):
        for request in world.complete(_run(world)):
            if request.client == "busy":
                world.submit("busy", F0, 8)
    world.submit("late", F0, 8)
    assert policy.served("busy") - policy.served("late") <= 4 + 2 * 8 / 4


def test_admitted_rows_of_a_tenant_take_no_room_from_others() -> None:
    """While a prompt of 40 batches is read, a row of another tenant runs in the next batch."""
    world = world_of(Fair(CoServing(), quantum=64), "prompt", "polite")
    world.submit("prompt", F0, 40 * 8, Kind.PREFILL)
    world.complete(_run(world))
    world.submit("polite", F0, 1)
    assert [request.client for request in world.complete(_run(world))] == ["polite"]


def test_a_tenant_has_at_most_a_batch_of_admitted_requests() -> None:
    """A later request does not wait behind all requests of one tenant, even if the inner policy serves in order. That
    tenant's requests are admitted as it is served."""
    flood = [f"flood/{number}" for number in range(100)]
    world = world_of(Fair(NoLockstep(), quantum=64), *flood, "polite")
    for name in flood:
        world.submit(name, F0, 4)
    answered = [request.client for request in world.complete(_run(world))]
    world.submit("polite", F0, 1)
    while "polite" not in answered:
        answered += [request.client for request in world.complete(_run(world))]
    assert len(answered) <= 4
    while world.queued:
        answered += [request.client for request in world.complete(_run(world))]
    assert len(answered) == 101


def test_a_flood_and_a_polite_tenant_get_equal_shares() -> None:
    flood = [f"flood/{number}" for number in range(20)]
    world = world_of(Fair(NoLockstep(), quantum=4), *flood, "polite")
    for name in [*flood, "polite", "polite"]:
        world.submit(name, F0, 4)
    served: Counter[str] = Counter()
    for _ in range(400):
        batch = _run(world)
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
        world.complete(_run(world))
    world.submit("late", F0, 8)
    bound = 4 + 2 * 8 / 4
    assert policy.served("late") == policy.served("busy") - bound
    rows = Counter({"late": 8})
    world.submit("late", F0, 8)
    world.submit("busy", F0, 8)
    for _ in range(40):
        batch = _run(world)
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
        for request in world.complete(_run(world)):
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
        world.complete(_run(world))
        world.leave(f"tenant-{number}")
    assert len(policy._tenants) <= 4096


@pytest.mark.parametrize("waits", [True, False])
def test_many_clients_of_one_tenant_displace_no_other(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    monkeypatch.setattr(fair, "_MAX_CLIENTS", 8)
    policy = Fair(NoLockstep())
    world = world_of(policy, "alice", "bob", "erin/first")
    for name in ("alice", "bob"):
        world.submit(name, F0, 8)
        world.complete(_run(world))
    if waits:  # one of erin's requests is always queued
        world.submit("erin/first", F0, 8)
    for number in range(30):
        world.join(f"erin/{number}")
        world.submit(f"erin/{number}", F0, 8)
        world.complete(_run(world))
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
        world.complete(_run(world))
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
            world.complete(_run(world))
        for tenant in policy._tenants.values():
            assert (tenant.queued, tenant.inside, len(tenant.held)) == (0, 0, 0)
    assert policy.service() == {"alice": 2 * 2 / 4, "bob": 2 * (8 + 8 + 3) / 4}


# ------------------------------------------------------------------------------------------------------------ priority


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
        order += [request.client for request in world.complete(_run(world))]
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
        (answered,) = world.complete(_run(world))
        if answered.client == "low":
            assert 45 <= batches <= 55  # of a millisecond each
            return
        world.submit("high", F0, 1)
    raise AssertionError("it waits for ever")


def test_tenants_have_priorities() -> None:
    world = _with_priorities(Priority(NoLockstep(), tenants={"gold": 2}), plain_1=0, gold_1=0, gold_2=1)
    order = []
    for _ in range(3):
        order += [request.client for request in world.complete(_run(world))]
    assert order == ["gold/2", "gold/1", "plain/1"]


class _Notes(NoLockstep):
    """Record the terms and kinds of each client."""

    lone_at_once = False

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[Terms, Kind]]] = {}

    def submitted(self, request: Request) -> None:
        self.seen.setdefault(request.client, set()).add((request.terms, request.kind))


async def test_a_policy_receives_the_terms(base: Any) -> None:
    terms = {"priority": 3, "slo_ms": 50.0, "ttft_ms": 900.0, "kind": Kind.PREFILL}
    async with symbiosis.Executor(base, policy=(notes := _Notes())) as executor:
        async with executor.client(name="a", **terms) as a, executor.client(name="b") as b:
            await a.forward(input_ids=IDS)
            await b.forward(input_ids=IDS)
    assert notes.seen["a"] == {(Terms(3, 50.0, 900.0, Kind.PREFILL), Kind.PREFILL)}
    assert notes.seen["b"] == {(NO_TERMS, Kind.FINETUNE)}  # with gradients


@pytest.mark.parametrize("scheme", ["shm", "tcp", "dist"])
async def test_terms_from_another_process(base: Any, scheme: str, tmp_path: Path) -> None:
    """The client sends its terms when it joins, and again after the connection was lost."""
    terms = {"priority": -3, "slo_ms": 500.0, "ttft_ms": 900.0, "kind": Kind.PREFILL}
    asked = {(Terms(**terms), Kind.FINETUNE)}  # requests with gradients are fine-tuning, for any stated kind

    def synchronous(address: str) -> None:
        with symbiosis.open_model(address, name="blocking", **terms) as model:
            model(input_ids=IDS)

    options = {"insecure": True} if scheme == "dist" else {}
    async with symbiosis.Executor(base, policy=(notes := _Notes())) as executor:
        address = f"shm://{tmp_path}/s" if scheme == "shm" else f"{scheme}://127.0.0.1:0"
        listener = await executor.listen(address, **options)
        address = listener.address
        async with symbiosis.connect(address) as there, there.client(name="coroutine", **terms) as client:
            await client.forward(input_ids=IDS)
            await asyncio.to_thread(synchronous, address)
            assert notes.seen == {"coroutine": asked, "blocking": asked}
            notes.seen.clear()
            await listener.close()
            waits = asyncio.create_task(client.forward(input_ids=IDS))
            await asyncio.sleep(0.1)
            await executor.listen(address, **options)
            await asyncio.wait_for(waits, 30)
            assert notes.seen == {"coroutine": asked}


def test_terms_from_another_process_are_lowered_once() -> None:
    """Untrusted terms may lower the priority and lengthen the targets, never the opposite."""
    granted = Terms(2, 50.0, 900.0)
    assert effective(Terms(9, 10.0, 100.0), granted, trusted=False) == granted
    assert effective(Terms(-3, 80.0, 2000.0), granted, trusted=False) == Terms(-1, 80.0, 2000.0)
    assert effective(Terms(9, 10.0, 100.0), granted, trusted=True) == Terms(11, 10.0, 100.0)
    assert effective(NO_TERMS, granted, trusted=True) == granted
    assert effective(Terms(slo_ms=10.0), NO_TERMS, trusted=False) == Terms(slo_ms=10.0)  # the policy has no default


def test_a_client_in_another_process_cannot_raise_its_priority() -> None:
    terms = {"modest": Terms(priority=-1), "pushy": Terms(priority=1000), "gold": NO_TERMS}
    world = world_of(Priority(NoLockstep(), tenants={"gold": 2}), *terms, terms=terms)
    for name in terms:
        world.submit(name, F0, 1)
    order = []
    for _ in range(3):
        order += [request.client for request in world.complete(_run(world))]
    assert order == ["gold", "pushy", "modest"]


@pytest.mark.parametrize(
    ("backward", "looks", "says", "trusted", "is_"),
    [
        (False, Kind.PREFILL, None, False, Kind.PREFILL),
        (False, Kind.PREFILL, Kind.FINETUNE, False, Kind.FINETUNE),
        (False, Kind.FINETUNE, Kind.DECODE, False, Kind.FINETUNE),
        (False, Kind.PREFILL, Kind.DECODE, True, Kind.DECODE),
        (True, Kind.DECODE, Kind.DECODE, False, Kind.FINETUNE),
    ],
)
def test_stated_kinds_of_rows(backward: bool, looks: Kind, says: Kind | None, trusted: bool, is_: Kind) -> None:
    """The provider may state any kind; a client in another process may only state a more patient one."""
    assert kind_of(Terms(kind=says), looks, 3, backward=backward, trusted=trusted) is is_


@pytest.mark.parametrize(("rows", "local", "is_"), [(64, False, 0), (65, False, 1), (4096, False, 1), (4096, True, 0)])
def test_decode_rows_are_believed_up_to_a_number_of_texts(rows: int, local: bool, is_: int) -> None:
    """Decode rows run first, so a prompt that is stated to be decode rows would delay all other clients."""
    assert kind_of(NO_TERMS, Kind.DECODE, rows, backward=False, trusted=local) is Kind(is_)


def test_a_loose_slo_in_another_process_delays_no_client() -> None:
    """The client stops in the middle of a token. The policy gives this token up as soon as one with the default SLO."""
    policy = CoServing(slo_ms=100)
    world = world_of(policy, "gone", "job", terms={"gone": Terms(slo_ms=20_000.0)})
    world.submit("gone", F0, 1)
    world.complete(_run(world))
    world.clock.advance(0.25)
    assert policy.walks.slack(Kind.PREFILL, world.clock.now) == math.inf


@pytest.mark.parametrize(("asked", "slack"), [(1.0, 0.2), (None, 0.2), (500.0, 0.5)])
def test_a_client_in_another_process_cannot_stop_fine_tuning_with_a_tight_slo(
    asked: float | None, slack: float
) -> None:
    policy = CoServing(slo_ms=200)
    world_of(policy, "a", terms={"a": Terms(slo_ms=asked)}).submit("a", F0, 1)
    assert 0.4 * slack < policy.walks.slack(Kind.PREFILL, 0.0) < slack


@pytest.mark.parametrize(
    "terms", [{"priority": 1.5}, {"priority": 10**6}, {"slo_ms": 0}, {"ttft_ms": float("nan")}, {"kind": "decode"}]
)
def test_invalid_terms(base: Any, terms: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(terms))):
        symbiosis.Executor(base).client(**terms)


def test_a_client_with_an_slo_of_its_own() -> None:
    """Fine-tuning waits for a client with a tighter SLO."""
    slack = {}
    for slo_ms in (None, 20.0):
        policy = CoServing(slo_ms=200)
        world = world_of(policy, "a", terms={"a": Terms(slo_ms=slo_ms)}, local=True)
        world.submit("a", F0, 1)
        slack[slo_ms] = policy.walks.slack(Kind.PREFILL, 0.0)
    assert slack[20.0] < 0.02 < slack[None]


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


# ---------------------------------------------------------------------------------------------------------- rate limit


def test_a_rate() -> None:
    """The rate is 100 tokens per second, the burst one second. In 3 s, 400 requests of 4 rows pass one of 4 layers."""
    world = world_of(RateLimit(NoLockstep(), tokens_per_s=100), "a/1", "a/2")
    world.submit("a/1", F0, 4)
    count = 0
    while world.clock.now < 3:
        for request in world.complete(_run(world)):
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
        for request in world.complete(_run(world)):
            served[request.client] += 1
            world.submit(request.client, F0, 8)
    assert served["slow"] < 5 < 190 < served["quick"]


def test_a_new_tenant_is_not_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "_MAX_TENANTS", 1)
    world = world_of(RateLimit(NoLockstep(), tokens_per_s=100), "old", "new")
    for name in ("old", "new"):
        world.cancel(world.submit(name, F0, 4))
        world.submit(name, F0, 4)
        assert [request.client for request in world.complete(_run(world))] == [name]
    assert not world.scheduler.policy_errors


def test_cancelled_requests_leave_nothing_behind() -> None:
    policy = RateLimit(NoLockstep(), tokens_per_s=1, burst_s=1)
    world = world_of(policy, "a", "b")
    world.submit("a", F0, 8)
    world.complete(_run(world))  # the tenant is in debt now
    for _ in range(50):
        world.cancel(world.submit("a", F0, 8))
    assert len(policy._due) <= 1


def test_a_joint_walk_does_not_wait_for_the_debt_of_one_of_its_tenants() -> None:
    """Alice's request is ahead of the joint one, and needs 100 s of her rate."""
    policy = RateLimit(NoLockstep(), tokens_per_s=10)
    world = world_of(policy, "joint", "alice/chat", "alice/tune", "bob/chat", max_rows=8192)
    world.submit("bob/chat", F0, 4)
    world.complete(_run(world))  # bob's bucket is not as full as alice's
    world.submit("alice/tune", F0, 4000, Kind.FINETUNE)
    world.submit("joint", F0, 2, joint=("alice/chat", "bob/chat"))
    answered = [request.client for _ in range(2) for request in world.complete(_run(world))]
    assert answered == ["alice/tune", "joint"]
    assert world.clock.now < 0.1


def test_tenants_of_a_joint_walk_are_in_debt_until_the_same_time() -> None:
    """The first request puts both tenants in debt; the second is paid for by both, once."""
    policy = RateLimit(NoLockstep(), tokens_per_s=10)
    world = world_of(policy, "joint", "alice/1", "bob/1", "bob/2", max_rows=8192)
    for _ in range(2):
        world.submit("joint", F0, 160, joint=("alice/1", "bob/1"))
    assert [request.client for _ in range(2) for request in world.complete(_run(world))] == ["joint", "joint"]
    assert world.clock.now == pytest.approx(1.0, abs=0.02)  # 20 of the 10 tokens in each bucket
    assert [bucket.level for bucket in policy._buckets.values()] == pytest.approx([-20.0, -20.0], abs=0.2)
    world.cancel(world.submit("joint", F0, 3, joint=("alice/1", "bob/1", "bob/2")))
    assert not any(bucket.held for bucket in policy._buckets.values())
    assert not world.scheduler.policy_errors


# ----------------------------------------------------------------------------------------------------------- wrong use


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
