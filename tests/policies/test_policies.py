"""The built-in policies: each passes the conformance kit, and each serves its purpose."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.core.clients import STOPPED_S
from symbiosis.core.policy import Policy
from symbiosis.core.registry import make_policy
from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.scheduler import HELD_S, Scheduler, WaitUntil
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.policies import Lockstep, NoLockstep, Opportunistic, arrivals
from symbiosis.policies.order import FurthestBehind
from symbiosis.simulation import Cost, Done, Simulation, finetune, generate
from symbiosis.simulation.simulation import InWalk, Think
from symbiosis.testing import World
from tests.helpers import Conformance, examples, world_of

F0, F1 = Key((0,), Pass.FORWARD), Key((1,), Pass.FORWARD)
B0, B1 = Key((0,), Pass.BACKWARD), Key((1,), Pass.BACKWARD)


class TestNoLockstepConforms(Conformance):
    def make_policy(self) -> Policy:
        return NoLockstep()

    def patience_batches(self, layers: int) -> int:
        return 0


class TestLockstepConforms(Conformance):
    def make_policy(self) -> Policy:
        return Lockstep()


class TestOpportunisticConforms(Conformance):
    def make_policy(self) -> Policy:
        return Opportunistic()

    patience_s = 0.2


class TestImpatientConforms(Conformance):
    def make_policy(self) -> Policy:
        return Opportunistic(wait_ms=0)

    patience_s = 0.05


class TestPatientConforms(Conformance):
    patience_s = 2.5

    def make_policy(self) -> Policy:
        return Opportunistic(wait_ms=100, max_wait_ms=2000)


def run(world: World) -> Batch:
    batch = world.decide()
    assert isinstance(batch, Batch), f"{world.policy} waits: {batch}"
    world.complete(batch)
    return batch


def members(batch: Batch) -> list[tuple[str, int]]:
    return [(request.client, stop - start) for request, start, stop in batch.slices]


class TestNoLockstep:
    def test_alone_and_in_order(self) -> None:
        w = world_of(NoLockstep(), "a", "b", "c")
        for client, key in (("a", F1), ("b", F0), ("c", F1)):
            w.submit(client, key, 2)
        assert [members(run(w)) for _ in range(3)] == [[("a", 2)], [("b", 2)], [("c", 2)]]

    def test_large_request_in_slices(self) -> None:
        w = world_of(NoLockstep(), "a")
        w.submit("a", F0, 20)
        assert [members(run(w)) for _ in range(3)] == [[("a", 8)], [("a", 8)], [("a", 4)]]


class TestLockstep:
    def test_waits_for_all_and_runs_them_together(self) -> None:
        w = world_of(Lockstep(), "a", "b", "c")
        w.submit("a", F0, 1)
        assert w.decide() == WaitUntil(STOPPED_S)
        w.clock.advance(0.9 * STOPPED_S)
        w.submit("b", F0, 1)
        assert w.decide() == WaitUntil(STOPPED_S)
        w.submit("c", F0, 1)
        assert members(run(w)) == [("a", 1), ("b", 1), ("c", 1)]

    def test_does_not_wait_for_idle_clients(self) -> None:
        w = world_of(Lockstep(), "a", "b")
        w.join("idle")
        w.submit("a", F0, 1)
        w.end_walk("b")
        assert members(run(w)) == [("a", 1)]
        w.begin_walk("b")
        w.submit("a", F0, 1)
        w.leave("b")
        assert members(run(w)) == [("a", 1)]

    def test_clients_that_are_behind_catch_up(self) -> None:
        w = world_of(Lockstep(), "ahead", "behind")
        w.submit("ahead", Key((2,), Pass.FORWARD), 1)
        w.submit("behind", F0, 1)
        for layer in range(2):
            assert members(run(w)) == [("behind", 1)], layer
            w.submit("behind", Key((layer + 1,), Pass.FORWARD), 1)
        assert members(run(w)) == [("ahead", 1), ("behind", 1)]

    def test_an_overtaken_request_goes_first(self) -> None:
        w = world_of(Lockstep(), "a", "b", layers=2)
        w.submit("a", F1, 1)
        for _ in range(5):
            w.submit("b", F0, 1)
            if members(run(w)) != [("b", 1)]:
                break
        else:
            pytest.fail("the request is never served")
        assert w.batches == 2 * 2 + 1

    @pytest.mark.parametrize("every_s", [0.05, 0.9])
    def test_occasional_rows_of_layer_0_delay_a_walk_once(self, every_s: float) -> None:
        """When both bounds were for each call, 15 calls took 22 s, and 380 s with longer pauses."""
        w = world_of(Lockstep(), "mallory", "victim", layers=16)
        for layer in range(1, 16):
            request = w.submit("victim", Key((layer,), Pass.FORWARD), 1)
            while request.id in w.waiting:
                action = w.decide()
                if isinstance(action, Batch):
                    w.complete(action)
                else:
                    assert isinstance(action, WaitUntil)
                    w.clock.advance(min(every_s, action.time - w.clock.now))
                    if w.thinking:
                        w.submit("mallory", F0, 1)
        assert w.clock.now <= STOPPED_S + HELD_S
        assert w.batches <= 2 * 16 + 2 * 15

    def test_a_new_walk_has_a_new_bound(self) -> None:
        w = world_of(Lockstep(), "a", "b", layers=2)
        for _ in range(2):
            w.begin_walk("a")
            w.submit("a", F1, 1)
            w.submit("b", F0, 1)
            assert members(run(w)) == [("b", 1)]
            assert w.decide() == WaitUntil(w.clock.now + HELD_S)
            w.clock.advance(HELD_S)
            assert members(run(w)) == [("a", 1)]
            w.submit("a", F1, 1)
            assert members(run(w)) == [("a", 1)]  # at once: the walk was delayed for long enough
            w.end_walk("a")


class TestOpportunistic:
    def test_waits_in_proportion_to_its_rows(self) -> None:
        w = world_of(Opportunistic(wait_ms=2, max_wait_ms=10, adaptive=False), "a", "thinker")
        request = w.submit("a", F0, 3)
        assert w.decide() == WaitUntil(pytest.approx(0.006))
        w.cancel(request)
        w.submit("a", F0, 7)
        assert w.decide() == WaitUntil(pytest.approx(0.010))  # the wait has an upper limit

    def test_a_due_request_runs_with_all_requests_of_its_key(self) -> None:
        w = world_of(Opportunistic(wait_ms=2, adaptive=False), "a", "b", "thinker")
        w.submit("a", F0, 1)
        w.clock.advance(0.001)
        w.submit("b", F0, 3)
        assert isinstance(w.decide(), WaitUntil)
        w.clock.advance(0.001)
        batch = run(w)
        assert (members(batch), batch.reason) == ([("a", 1), ("b", 3)], "deadline")

    def test_runs_at_once_when_no_client_is_thinking(self) -> None:
        w = world_of(Opportunistic(wait_ms=1000, max_wait_ms=1000, adaptive=False), "a", "b")
        w.submit("a", F0, 1)
        assert isinstance(w.decide(), WaitUntil)
        w.submit("b", F1, 1)
        batch = run(w)
        assert (members(batch), batch.reason) == ([("a", 1)], "no-client-thinking")

    def test_runs_a_full_batch_at_once(self) -> None:
        w = world_of(Opportunistic(wait_ms=1000, max_wait_ms=1000, adaptive=False), "a", "b", "thinker")
        w.submit("a", F0, 5)
        assert isinstance(w.decide(), WaitUntil)
        w.submit("b", F0, 5)
        batch = run(w)
        assert (members(batch), batch.reason) == ([("a", 5), ("b", 3)], "full")
        assert isinstance(w.decide(), WaitUntil)  # two rows of b are left

    def test_a_due_request_runs_before_a_fuller_queue(self) -> None:
        """A policy that always runs the longest queue would starve the due request."""
        w = world_of(Opportunistic(wait_ms=2), "small", "a", "b", "thinker", max_rows=64)
        w.submit("small", F1, 1)
        w.submit("a", F0, 20)
        w.submit("b", F0, 20)
        w.clock.advance(0.002)
        assert members(run(w)) == [("small", 1)]

    def test_a_due_request_is_in_the_batch_that_it_causes(self) -> None:
        """Its batch includes it although older, larger requests have the same key."""
        w = world_of(Opportunistic(wait_ms=2), "large", "small", "thinker", max_rows=8)
        w.submit("large", F0, 7)
        w.submit("small", F0, 2)
        # not full: 9 rows fill a batch of 8
        assert members(run(w)) == [("large", 7), ("small", 1)]
        w.clock.advance(0.004)
        assert members(run(w)) == [("small", 1)]

    def test_clients_that_are_behind_catch_up_until_a_request_is_due(self) -> None:
        w = world_of(Opportunistic(wait_ms=10), "ahead", "behind", "thinker", max_rows=64)
        w.submit("ahead", F1, 2)
        w.submit("behind", F0, 2)
        assert members(run(w)) == [("behind", 2)]
        w.submit("behind", F1, 2)
        assert members(run(w)) == [("ahead", 2), ("behind", 2)]

    def test_an_earlier_request_of_the_same_client_lets_no_other_client_overtake(self) -> None:
        w = world_of(Opportunistic(wait_ms={"decode": 0.2, "prefill": 1000}), "a", "b", "thinker", max_rows=16)
        for _ in range(4):
            w.submit("a", F0, 40, Kind.PREFILL)
        w.submit("b", F0, 40, Kind.PREFILL)
        w.submit("b", F0, 1)
        w.clock.advance(0.001)
        served = [members(run(w)) for _ in range(4)]
        assert served == [[("b", 16)], [("b", 16)], [("b", 8), ("a", 8)], [("b", 1), ("a", 15)]]

    def test_a_client_that_uses_other_layers_is_not_waited_for(self) -> None:
        """Two clients stay together while a third one is thinking and uses other layers."""
        w = world_of(Opportunistic(wait_ms=1000, max_wait_ms=1000), "a", "b", "elsewhere", layers=8, max_rows=64)
        for walk in range(30):
            for layer in range(2):
                for client in ("a", "b"):
                    w.submit(client, Key((layer,), Pass.FORWARD), 1 + walk % 3)
                    w.clock.advance(1e-4)
                if walk < 20:
                    w.end_walk("elsewhere")
                batch = w.decide()
                assert isinstance(batch, Batch), (walk, layer)
                w.complete(batch, 0.01)
                if walk < 20:
                    w.begin_walk("elsewhere")

    @pytest.mark.parametrize("other", ["stuck", "slow"])
    def test_clients_that_have_left_are_not_waited_for(self, other: str) -> None:
        """Three clients shared batches and left, or are idle. Another one thinks without end, or for 50 ms."""

        def stuck() -> Iterator[Think | InWalk]:
            yield InWalk(True)
            yield Think(1e6)

        def token_s(make_policy: Callable[[], Policy]) -> float:
            simulation = Simulation(make_policy(), layers=8, cost=Cost(1e-3, 2e-5).of)
            stays = Done()
            simulation.add("stays", generate(8, 1, 1000, 8e-4, stays))
            for number in range(3):
                simulation.add(f"leaves-{number}", generate(8, 1, 100, 8e-4, Done()))
            simulation.add("other", stuck() if other == "stuck" else finetune(8, 8, 0.8, Done()))  # type: ignore[arg-type]
            while len(stays.tokens) < 300:
                simulation.step()
            return fmean(stays.per_token[200:])

        assert token_s(Opportunistic) < 1.1 * token_s(NoLockstep)

    def test_no_request_is_served_before_a_due_one(self) -> None:
        w = world_of(Opportunistic(wait_ms=10), "ahead", "behind", "thinker")
        w.submit("ahead", F1, 1)
        for _ in range(5):
            w.submit("behind", F0, 1)
            assert members(run(w)) == [("behind", 1)]
            w.clock.advance(0.002)
        w.submit("behind", F0, 1)
        batch = run(w)
        assert (members(batch), batch.reason) == ([("ahead", 1)], "deadline")

    @pytest.mark.parametrize("option", ["wait_ms", "max_wait_ms"])
    @pytest.mark.parametrize("value", [-1, math.inf, math.nan, "2", None, True, 10**400])
    def test_bad_options(self, option: str, value: object) -> None:
        with pytest.raises(UsageError, match=rf"opportunistic: {option} is {value!r}; it must be a number"):
            Opportunistic(**{option: value})  # type: ignore[arg-type]

    def test_unknown_kinds(self) -> None:
        with pytest.raises(UsageError, match=r"wait_ms has '?\w+'?; kinds are"):
            Opportunistic(wait_ms={"bogus": 1, 3: 2})  # type: ignore[dict-item]

    def test_cancelled_requests_leave_no_deadline(self) -> None:
        w = world_of(Opportunistic(wait_ms=2, adaptive=False), "a", "b", "thinker")
        first = w.submit("a", F0, 1)
        w.clock.advance(0.001)
        w.submit("b", F0, 1)
        w.cancel(first)
        assert w.decide() == WaitUntil(pytest.approx(0.003))


class TestDeadlines:
    """No deadline is missed by more than the running batch and the requests with earlier deadlines: when the executor
    is free and requests are due, the one with the earliest deadline is served."""

    @settings(max_examples=examples(300), deadline=None)
    @given(st.data())
    def test_any_script(self, data: st.DataObject) -> None:
        wait_ms, max_wait_ms = data.draw(st.sampled_from([(0, 5), (1, 5), (0.2, 50), (20, 10)]))
        policy = Opportunistic(wait_ms, max_wait_ms, adaptive=data.draw(st.booleans()))
        names = ["a", "b", "c", "thinker"]
        w = world_of(policy, *names, max_rows=16)
        for _ in range(data.draw(st.integers(1, 40))):
            if data.draw(st.booleans()):
                client, key = data.draw(st.sampled_from(names[:3])), data.draw(st.sampled_from(w.keys))
                w.submit(client, key, data.draw(st.integers(1, 40)), data.draw(st.sampled_from(Kind)))
            w.clock.advance(data.draw(st.sampled_from([0.0, 1e-4, 1e-3, 3e-3])))
            queued = w.queued
            if not queued:
                continue
            now, due = w.clock.now, min(map(policy.deadline, queued))
            urgent = [request for request in queued if policy.deadline(request) == due]
            action = w.decide()
            if isinstance(action, WaitUntil):
                assert now < action.time <= due
                continue
            assert isinstance(action, Batch)
            if due <= now:  # requests of one client for one layer stay in order
                first = {(request.client, request.key) for request, _, _ in action.slices}
                assert any((request.client, request.key) in first for request in urgent)
                assert action.reason == "deadline"
            w.clock.advance(data.draw(st.sampled_from([1e-4, 2e-3])))
            w.complete(action)

    @settings(max_examples=examples(60), deadline=None)
    @given(st.integers(2, 6), st.integers(0, 10**6))
    def test_one_batch_serves_all_due_requests(self, clients: int, seed: int) -> None:
        """If batches are large enough, no deadline is missed by more than one batch."""
        random = Random(seed)
        policy = Opportunistic({"decode": 3, "prefill": 1000}, max_wait_ms=1000)
        w = world_of(policy, "reader", *(f"client-{n}" for n in range(clients)), "thinker", layers=8, max_rows=64)
        took = 0.002
        for _ in range(60):
            waits = {request.client for request in w.queued}
            if "reader" not in waits:  # a client with prompts that are behind and never due
                w.submit("reader", F0, 1, Kind.PREFILL)
            for n in range(clients):
                if f"client-{n}" not in waits and random.random() < 0.7:
                    w.submit(f"client-{n}", Key((5,), Pass.FORWARD), 1)
            batch = w.decide()
            for request in w.queued:
                assert w.clock.now <= policy.deadline(request) + took
            if isinstance(batch, Batch):
                w.clock.advance(took)
                w.complete(batch, took)
            else:
                w.clock.advance(random.uniform(1e-4, 1e-3))


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("spec", ["co-serving:max_wait_ms=150", "temporal:max_wait_ms=150"])
def test_an_overloaded_executor_keeps_no_answered_requests(spec: str, kind: Kind) -> None:
    """The oldest request has always waited for longer than ``max_wait_ms``. A client has at most a few requests."""
    scheduler, clients, layers = Scheduler(make_policy(spec), layers=8, max_rows=64), 50, 8
    at = {f"overloading-{number}": 0 for number in range(clients)}
    ids, now, answered = itertools.count(), 0.0, 0

    def submit(client: str) -> None:
        scheduler.submit(Request(next(ids), client, Key((at[client],), Pass.FORWARD), 64, kind, now))

    for client in at:
        scheduler.client_joined(client)
        submit(client)
    while answered < 3000:
        action = scheduler.next_action(now)
        if isinstance(action, WaitUntil):
            now = action.time
            continue
        now += 0.01
        for request in scheduler.completed(action, 0.01, now):
            answered += 1
            at[request.client] = (at[request.client] + 1) % layers
            submit(request.client)
    assert not scheduler.policy_errors
    kept = sum(type(each) is Request and each.client in at for each in gc.get_objects())
    assert kept < 10 * clients


@pytest.mark.parametrize(
    "spec", ["opportunistic:adaptive=false", "opportunistic:wait_ms=0,adaptive=false", "lockstep", "temporal"]
)
def test_keys_that_do_not_come_again_are_forgotten(spec: str) -> None:
    """A tenant chooses the layers of its requests. Here the client never thinks, and no key comes last in the order."""
    scheduler, now, steps = Scheduler(make_policy(spec), layers=2000, max_rows=64), 0.0, 500
    scheduler.client_joined("mallory")
    for step in range(steps):
        for n, key in enumerate([Key((0, 1000 + step), Pass.FORWARD), Key((1, 1999 - step), Pass.FORWARD)]):
            scheduler.submit(Request(2 * step + n, "mallory", key, 1, Kind.DECODE, now))
        for _ in range(2):
            batch = scheduler.next_action(now)
            assert isinstance(batch, Batch)
            now += 0.01
            scheduler.completed(batch, 0.01, now)
    assert not scheduler.policy_errors
    gc.collect()
    keys = (each for each in gc.get_objects() if type(each) is Key and each.layers[-1:] >= (1000,))
    assert sum(1 for _ in keys) < steps / 2


class TestFurthestBehind:
    def test_forward_and_backward_are_separate(self) -> None:
        w = world_of(NoLockstep(), "a", layers=4)
        order = FurthestBehind()
        for key in (Key((2,), Pass.FORWARD), F1, B0, B1):
            order.add(w.submit("a", key, 1))
        assert order.candidates({Key((2,), Pass.FORWARD), F1, B0, B1}) == [F1, B1]
        assert order.candidates({Key((2,), Pass.FORWARD), B0}) == [Key((2,), Pass.FORWARD), B0]
        assert order.candidates(set()) == []

    def test_a_key_may_be_added_again(self) -> None:
        w = world_of(NoLockstep(), "a")
        order = FurthestBehind()
        order.add(w.submit("a", F0, 1))
        assert order.candidates(set()) == []
        order.add(w.submit("a", F0, 1, Kind.PREFILL))
        assert order.candidates({F0}) == [F0]


@pytest.mark.parametrize(
    "spec",
    [
        "no-lockstep",
        "opportunistic",
        "opportunistic:wait_ms=3,max_wait_ms=4,adaptive=false",
        "temporal:every=7",
        "dynamic-temporal",
        "priority:tenants.a=2+lockstep",
        "fair:quantum=32,output=3,weights.a.b=0.5+co-serving:slo_ms=50,clients.a=30/900",
        "rate-limit:tokens_per_s=10.5,tenants.a=3+fair+opportunistic",
    ],
)
def test_a_policy_is_shown_as_it_is_written(spec: str) -> None:
    policy = make_policy(spec)
    assert repr(policy) == spec
    assert policy.name == "+".join(part.partition(":")[0] for part in spec.split("+"))


def test_an_option_of_kinds_is_shown_as_it_is_written() -> None:
    shown = repr(make_policy("opportunistic:wait_ms.decode=1"))
    assert shown.startswith("opportunistic:wait_ms.decode=1,wait_ms.")
    assert repr(make_policy(shown)) == shown


class TestAdaptive:
    """Opportunistic batching waits if it expects a gain from waiting."""

    @staticmethod
    def taught(start: float, row: float, together: bool, gap: float) -> tuple[World, Opportunistic]:
        """Return a world with two clients whose requests arrive ``gap`` seconds apart. Batches of several sizes have
        run and took start + row · rows seconds.
        """
        policy = Opportunistic(wait_ms=1000, max_wait_ms=1000)
        w = world_of(policy, "a", "b", "thinks", max_rows=64)
        for rows in [1, 2, 3, 4] * 20:
            for client in ("a", "b") if together else ("a", "thinks", "b"):
                w.submit(client, F0, rows)
                w.clock.advance(gap)
            for client in w.clients:  # otherwise the policy would wait for them
                w.end_walk(client)
            batch = w.decide()
            assert isinstance(batch, Batch)
            w.clock.advance(start + row * batch.rows)
            w.complete(batch)
            for client in w.clients:
                w.begin_walk(client)
        return w, policy

    def test_waits_for_a_request_that_is_expected_soon(self) -> None:
        w, _ = self.taught(start=10e-3, row=1e-5, together=True, gap=1e-3)
        began = w.clock.now
        w.submit("a", F0, 1)
        action = w.decide()
        assert isinstance(action, WaitUntil)
        assert action.time - began < 1.0  # the deadline
        w.clock.advance(1e-3)
        w.submit("b", F0, 1)
        assert isinstance(w.decide(), Batch)  # no other client is on the way to this layer

    def test_gives_up_a_wait_for_a_request_that_does_not_arrive(self) -> None:
        w, _ = self.taught(start=10e-3, row=1e-5, together=True, gap=1e-3)
        w.submit("a", F0, 1)
        action = w.decide()
        assert isinstance(action, WaitUntil)
        w.clock.advance(action.time - w.clock.now)
        batch = w.decide()
        assert isinstance(batch, Batch)
        assert batch.reason == "no-gain"

    def test_does_not_wait_for_a_request_that_is_expected_late(self) -> None:
        w, _ = self.taught(start=1e-4, row=1e-5, together=False, gap=0.1)
        w.submit("a", F0, 1)
        batch = w.decide()
        assert isinstance(batch, Batch)
        assert batch.reason == "no-gain"

    def test_does_not_wait_if_larger_batches_save_no_time(self) -> None:
        w, _ = self.taught(start=0.0, row=0.1, together=True, gap=1e-3)
        w.submit("a", F0, 1)
        assert isinstance(w.decide(), Batch)

    def test_without_adaptive_waits_the_deadline_counts(self) -> None:
        policy = Opportunistic(wait_ms=1000, max_wait_ms=1000, adaptive=False)
        w = world_of(policy, "a")
        for _ in range(30):
            w.submit("a", F0, 1)
            w.clock.advance(1.0)
            w.complete(run_now(w), 1e-9)
        w.join("b")
        w.begin_walk("b")
        w.submit("a", F0, 1)
        action = w.decide()
        assert isinstance(action, WaitUntil)
        assert action.time == w.clock.now + 1

    @pytest.mark.parametrize(
        ("start", "own", "gain"),
        [
            pytest.param(1e-3, [0.36e-3] * 2, 1.2, id="two clients far apart in their walks meet"),
            pytest.param(0.2e-3, [1e-3] * 4, 0.93, id="a wait costs more than it saves"),
            pytest.param(1e-3, [0.3e-3] * 3 + [3e-3], 1.7, id="one is slow"),
        ],
    )
    def test_waits_that_pay(self, start: float, own: list[float], gain: float) -> None:
        """Tokens over those without waits. Batches take ``start`` seconds, and clients compute for random times."""
        tokens = {}
        for policy in (NoLockstep(), Opportunistic()):
            simulation, found = Simulation(policy, layers=28, cost=Cost(start, 1e-5).of), [Done() for _ in own]
            for number, (mean, done) in enumerate(zip(own, found, strict=True)):
                random = Random(number)
                thinking = partial(lambda random, mean, kind, rows: random.expovariate(1 / mean), random, mean)
                client = generate(28, 8, 1000, thinking, done)
                simulation.add(f"client-{number}", client, at=number * 13.7e-3)
            simulation.run(2.0)
            tokens[policy.name] = sum(len(done.tokens) for done in found)
        assert tokens["opportunistic"] >= gain * tokens["no-lockstep"]

    @pytest.mark.parametrize("local", [[False], [True], [True, False]], ids=["remote", "local", "first local"])
    def test_waits_longer_for_a_client_on_the_executors_cores(self, local: list[bool]) -> None:
        w = world_of(Opportunistic(wait_ms=1000, max_wait_ms=1000), "a")
        for each in local:  # a client of another process may have the name of an earlier local one
            w.join("b", local=each)
            w.begin_walk("b")
            for key in [Key((layer,), Pass.FORWARD) for layer in range(4)] * 10:
                w.submit("a", key, 1)
                w.clock.advance(3e-3)
                w.submit("b", key, 1)
                w.complete(run_now(w), 1e-3)
            if each is not local[-1]:
                w.leave("b")
        w.submit("a", F0, 1)
        waits = isinstance(w.decide(), WaitUntil)  # for 2 ms: a shared batch saves 1 ms, and those of a walk 4
        assert waits is local[-1]

    def test_each_kind_has_its_own_wait(self) -> None:
        policy = Opportunistic(wait_ms={"decode": 1, "finetune": 5})
        w = world_of(policy, "a", "b")
        due = [policy.deadline(w.submit("a", F0, 2, kind)) - w.clock.now for kind in Kind]
        assert due == pytest.approx([0.002, 0.004, 0.01])  # the default of prefills

    def test_too_many_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The policy drops what it has learned, and continues."""
        monkeypatch.setattr(arrivals, "_MOST", 2)
        w = world_of(Opportunistic(wait_ms=1000, max_wait_ms=1000), "a", "b", "thinker")
        for layer in range(4):
            for _ in range(20):
                w.submit("a", Key((layer,), Pass.FORWARD), 1)
                while not isinstance(batch := w.decide(), Batch):
                    w.clock.advance(1.0)
                w.complete(batch, 1e-3)
        w.submit("a", F0, 1)
        w.submit("b", Key((3,), Pass.FORWARD), 1)
        w.decide()
        assert not w.scheduler.policy_errors

    def test_clients_with_one_request_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The policy is not told that a client has left."""
        monkeypatch.setattr(arrivals, "_MOST", 5)
        policy = Opportunistic()
        w = world_of(policy, "thinker")
        w.begin_walk("thinker")
        for number in range(30):
            w.join(f"client-{number}")
            w.submit(f"client-{number}", F0, 1)
            w.complete(run_now(w), 1e-3)
            w.leave(f"client-{number}")
        assert policy._arrivals is not None
        assert len(policy._arrivals._served_at) <= 5

    @pytest.mark.parametrize("options", [{"wait_ms": {"decode": -1}}, {"adaptive": 1}])
    def test_bad_options(self, options: dict[str, object]) -> None:
        with pytest.raises(UsageError):
            Opportunistic(**options)  # type: ignore[arg-type]


def run_now(w: World) -> Batch:
    batch = w.decide()
    assert isinstance(batch, Batch)
    return batch
