"""CoServing conforms, and keeps inference within its SLO while fine-tuning gets the remaining time."""

from __future__ import annotations

from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import pytest

import symbiosis
from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key, Pass, Request, Slice
from symbiosis.core.scheduler import WaitUntil
from symbiosis.core.terms import NO_TERMS, Kind, Terms, kind_of
from symbiosis.errors import UsageError
from symbiosis.policies import CoServing, NoLockstep, Opportunistic
from symbiosis.simulation import Cost, Done, Simulation, finetune, generate
from symbiosis.simulation.clock import Clock
from symbiosis.simulation.executor import SimulatedExecutor
from symbiosis.simulation.simulation import Ask, Cluster, Hop, InWalk, Route, Think
from symbiosis.testing import World, tiny_model
from tests.helpers import Conformance, loaded, world_of

LAYERS = 16
COST = Cost(1e-3, 2e-5)
F0, F1, B1 = Key((0,), Pass.FORWARD), Key((1,), Pass.FORWARD), Key((1,), Pass.BACKWARD)


class TestConforms(Conformance):
    patience_s = 0.5

    def make_policy(self) -> Policy:
        return CoServing(slo_ms=50, ttft_ms=200, max_wait_ms=400)


class TestDefaultsConform(Conformance):
    patience_s = 10.0

    def make_policy(self) -> Policy:
        return CoServing()


class Outcome(NamedTuple):
    slow_s: float
    """99th percentile of the time per token, in seconds."""
    steps: int


def simulate(policy: Policy, decoding: int, tuning: int, seconds: float = 10.0) -> Outcome:
    texts, jobs = loaded(policy, decoding, tuning, seconds)
    gaps = [gap for done in texts for gap in done.per_token[5:]]  # the policy learns from the first tokens
    return Outcome(quantiles(gaps, n=100)[98] if gaps else 0.0, sum(len(done.steps) for done in jobs))


@pytest.mark.parametrize("slo_ms", [60.0, 100.0, 200.0])
@pytest.mark.parametrize("decoding", [1, 8, 16])
def test_inference_keeps_its_slo_and_tuning_goes_on(decoding: int, slo_ms: float) -> None:
    alone = simulate(CoServing(slo_ms=slo_ms), decoding, 0)
    peak = simulate(CoServing(slo_ms=slo_ms), 0, 2)
    both = simulate(CoServing(slo_ms=slo_ms), decoding, 2)
    assert alone.slow_s < slo_ms / 1e3
    assert both.slow_s <= 1.02 * slo_ms / 1e3
    spare = 1 - alone.slow_s * 1e3 / slo_ms  # tokens leave part of the time to fine-tuning
    assert both.steps >= 0.5 * spare * peak.steps


def test_other_policies_do_not_keep_the_slo() -> None:
    """Policies without SLOs do not keep them on this load."""
    for policy in (NoLockstep(), Opportunistic()):
        assert simulate(policy, 8, 2).slow_s > 0.3


def test_a_client_may_have_a_tighter_slo() -> None:
    loose = simulate(CoServing(slo_ms=200), 2, 2)
    tight = simulate(CoServing(slo_ms=200, clients={"text-1": (60.0, 1000.0)}), 2, 2)
    assert loose.slow_s > 0.1
    assert tight.slow_s <= 0.0612


def test_finished_tokens_are_forgotten() -> None:
    """A client with a short SLO stays at the top of the heaps; finished tokens below it are removed."""
    policy = CoServing(slo_ms=200, clients={"text-0": (50.0, 1000.0)})
    simulate(policy, 4, 0, seconds=60)
    assert len(policy.walks._by_text) <= 2 * 4 + 65


def test_without_inference_no_request_is_delayed() -> None:
    best = simulate(Opportunistic(), 0, 2)
    assert simulate(CoServing(slo_ms=60), 0, 2).steps >= 0.95 * best.steps


# ----------------------------------------------------------------------------------------------------------- decisions


def world(policy: Policy | None = None, *, local: bool = False) -> World:
    return world_of(policy or CoServing(slo_ms=50), "text", "prompt", "job", layers=4, max_rows=256, local=local)


def run(made: World, seconds: float = 1e-3) -> Batch:
    batch = made.decide()
    while isinstance(batch, WaitUntil):
        made.clock.advance(batch.time - made.clock.now)
        batch = made.decide()
    assert isinstance(batch, Batch)
    made.clock.advance(seconds)
    made.complete(batch)
    return batch


def rows_of(batch: Batch) -> dict[str, int]:
    return {request.client: stop - start for request, start, stop in batch.slices}


def learned(w: World, *keys: Key, start: float = 1e-3, row: float = 1e-4) -> None:
    """Let the policy know what batches of some keys cost, in seconds."""
    for key in keys:
        for rows in (1, 100):
            w.policy.latency[key].learn(rows, start + row * rows)  # type: ignore[attr-defined]


def test_prompts_run_before_fine_tuning_and_both_beside_decode_rows() -> None:
    w = world()
    learned(w, F0, row=1e-5)
    w.submit("job", F0, 400, Kind.FINETUNE)
    w.submit("prompt", F0, 30, Kind.PREFILL)
    w.submit("text", F0, 1, Kind.DECODE)
    batch = run(w)
    assert batch.reason == "slack"
    assert rows_of(batch) == {"text": 1, "prompt": 30}
    w.submit("text", F1, 1, Kind.DECODE)
    assert rows_of(run(w)) == {"job": 256}  # cut to the largest batch
    w.submit("prompt", F1, 30, Kind.PREFILL)
    assert rows_of(run(w)) == {"text": 1, "prompt": 30}


def test_rows_are_limited_by_the_slack() -> None:
    w = world(CoServing(slo_ms=10))
    learned(w, F0)
    w.submit("job", F0, 400, Kind.FINETUNE)
    w.submit("text", F0, 1, Kind.DECODE)
    batch = run(w, seconds=4.3e-3)
    # The token counts as taking half of the SLO, and is scheduled for 9.2 ms. So 4.2 ms are left, of which 1 ms is for
    # a batch of any size.
    assert rows_of(batch)["job"] == pytest.approx(32, abs=1)
    w.submit("text", F1, 1, Kind.DECODE)
    batch = run(w, seconds=20e-3)
    assert (batch.reason, rows_of(batch)) == ("inference", {"text": 1})
    w.submit("text", Key((2,), Pass.FORWARD), 1, Kind.DECODE)  # late, so it runs alone
    assert rows_of(run(w)) == {"text": 1}


def _token(w: World, seconds: float) -> None:
    """Let the text's client walk through all four layers, within ``seconds``."""
    for layer in range(4):
        request = w.submit("text", Key((layer,), Pass.FORWARD), 1, Kind.DECODE)
        while request.remaining:
            run(w, seconds=seconds / 4)


def _due(w: World, client: str) -> float:
    """Return the time from now to the end that is due of a client's walk, in seconds."""
    walk = w.policy.walks._clients[client].walk  # type: ignore[attr-defined]
    return float(walk.due - w.clock.now)


def test_a_text_compensates_for_late_tokens() -> None:
    """The SLO is a mean over a text: early tokens leave time for later ones, and late tokens reduce it."""
    due = {}
    for name, seconds in (("early", 0.02), ("on time", 0.092), ("late", 0.098), ("hopeless", 0.35)):
        w = world(CoServing(slo_ms=100, wait_ms=1e-6))
        w.end_walk("job")
        for _ in range(3):
            _token(w, seconds)
        w.submit("text", F0, 1, Kind.DECODE)
        due[name] = _due(w, "text")
    assert due["early"] == pytest.approx(4 * 0.092 - 3 * 0.02, abs=2e-3)
    assert due["on time"] == pytest.approx(0.092, abs=2e-3)
    assert due["late"] == pytest.approx(4 * 0.092 - 3 * 0.098, abs=2e-3)
    assert due["hopeless"] == pytest.approx(0.35 + 0.092, abs=2e-3)  # others may delay it by the time of a token


def test_fine_tuning_spends_no_slack_that_a_text_has_gained() -> None:
    w = world(CoServing(slo_ms=100, wait_ms=1e-6))
    w.end_walk("job")
    for _ in range(15):  # the first one counted as taking half of the SLO
        _token(w, 0.02)
    w.submit("text", F0, 1, Kind.DECODE)
    walks = w.policy.walks  # type: ignore[attr-defined]
    assert walks.slack(Kind.PREFILL, w.clock.now) == pytest.approx(16 * 0.072, abs=0.01)
    assert walks.slack(Kind.FINETUNE, w.clock.now) == pytest.approx(0.072, abs=0.01)


def test_a_prompt_waits_while_a_token_has_no_slack() -> None:
    w = world(CoServing(slo_ms=10, ttft_ms=1000, wait_ms=1e-6))
    w.end_walk("job")
    learned(w, F0, start=4e-3)
    for _ in range(3):
        _token(w, 9.2e-3)
    w.submit("prompt", F0, 100, Kind.PREFILL)
    for layer in range(4):
        w.submit("text", Key((layer,), Pass.FORWARD), 1, Kind.DECODE)
        assert rows_of(run(w, seconds=2.3e-3)) == {"text": 1}
    w.clock.advance(0.1)  # the text has missed its SLO, and does not let the prompt miss its own too
    w.submit("text", F1, 1, Kind.DECODE)
    assert list(rows_of(run(w))) == ["prompt"]


def test_prompts_run_one_after_another_the_earliest_target_first() -> None:
    """If prompts shared all their batches, all would end late."""
    w = world(CoServing(slo_ms=100, clients={"prompt": (100.0, 500.0)}))
    learned(w, F0)
    w.end_walk("job")
    w.submit("text", F0, 130, Kind.PREFILL)
    w.submit("prompt", F0, 120, Kind.PREFILL)
    assert rows_of(run(w)) == {"prompt": 120}
    assert rows_of(run(w)) == {"text": 130}


def _prefill(w: World) -> None:
    """Let client a prefill three prompts through two layers, so that the policy learns that a row costs 1 ms."""
    for rows in (10, 20, 30):
        for layer in range(2):
            w.submit("a", Key((layer,), Pass.FORWARD), rows, Kind.PREFILL)
            run(w, seconds=1e-3 * rows / 2)
    w.end_walk("a")


def test_if_not_all_prompts_can_be_in_time_the_longest_is_left_out() -> None:
    """Moore and Hodgson's rule: one long prompt would make two short ones late."""
    w = world_of(CoServing(slo_ms=1000, ttft_ms=100), "a", "long", "short", "brief", layers=2, max_rows=1000)
    _prefill(w)
    w.submit("long", F0, 90, Kind.PREFILL)
    w.submit("short", F0, 30, Kind.PREFILL)
    w.submit("brief", F0, 40, Kind.PREFILL)
    order = [next(iter(rows_of(run(w, seconds=0.03)))) for _ in range(3)]
    assert order == ["short", "brief", "long"]


@pytest.mark.parametrize(
    ("ttft_ms", "what", "order"),
    [
        (2000, "", [{"two": 30}, {"one": 1}, {"late": 50}, {"two": 1}]),
        (2000, "two is silent", [{"one": 1}, {"late": 50}]),
        (2000, "a text decodes", [{"one": 1}, {"two": 30}, {"two": 1}, {"late": 50}]),
        (2000, "tokens take no time", [{"one": 1}, {"two": 30}, {"two": 1}, {"late": 50}]),
        (1000, "", [{"one": 1}, {"two": 30}, {"two": 1}, {"late": 50}]),  # less than half of this would be left
        (120, "", [{"one": 1}]),  # the other two cannot be in time
    ],
)
def test_the_last_request_of_a_prompt_waits_for_prompts_that_came_before_it(
    ttft_ms: float, what: str, order: list[dict[str, int]]
) -> None:
    """The next tokens of its text would keep them waiting."""
    policy = CoServing(slo_ms=500, ttft_ms=ttft_ms)
    w = world_of(policy, "a", "one", "two", "late", layers=2, max_rows=1000)
    _prefill(w)
    policy.walks._usual_s = 0.0 if what == "tokens take no time" else 0.4
    w.submit("one", F0, 40, Kind.PREFILL)
    two = w.submit("two", F0, 30, Kind.PREFILL)
    assert rows_of(run(w, seconds=0.04)) == {"one": 40}
    if what == "two is silent":
        w.cancel(two)
        w.clock.advance(0.6)
    policy.walks._until = w.clock.now + 9.0 if what == "a text decodes" else 0.0
    w.submit("one", F1, 1, Kind.PREFILL)
    w.submit("late", F0, 50, Kind.PREFILL)
    ran = []
    for _ in order:
        ran.append(rows_of(run(w, seconds=0.03)))
        if ran[-1] == {"two": 30}:
            w.submit("two", F1, 1, Kind.PREFILL)
    assert ran == order


def test_a_last_request_does_not_wait_when_no_client_thinks() -> None:
    """As when a wrapper holds back the other prompt because of this request."""
    policy = CoServing(slo_ms=500)
    w = world_of(policy, "a", "one", "two", layers=2, max_rows=1000)
    _prefill(w)
    policy.walks._usual_s = 0.4
    for client in ("two", "one"):
        w.submit(client, F0, 40, Kind.PREFILL)
        run(w, seconds=0.04)
    w.submit("one", F1, 1, Kind.PREFILL)
    waits = w.decide()
    assert isinstance(waits, WaitUntil)
    assert waits.time <= w.clock.now - 0.04 + 0.5, "the other client has been silent for one SLO then"
    w.end_walk("two")
    assert rows_of(run(w)) == {"one": 1}


def test_fine_tuning_yields_to_a_prompt_before_its_target_is_missed() -> None:
    w = world_of(CoServing(slo_ms=1000, ttft_ms=200), "a", "prompt", "job", layers=2, max_rows=1000)
    _prefill(w)
    w.submit("prompt", F0, 80, Kind.PREFILL)
    walks = w.policy.walks  # type: ignore[attr-defined]
    assert walks.slack(Kind.FINETUNE, w.clock.now) == pytest.approx(0.1 * 0.06), "its share of the time of prompts"
    assert walks._spare == pytest.approx(0.2 - 0.08, abs=0.01)
    w.submit("job", F0, 40, Kind.FINETUNE)
    assert rows_of(run(w, seconds=0.006)) == {"job": 12}
    assert rows_of(run(w, seconds=0.04)) == {"prompt": 80}
    assert walks._spare == pytest.approx(0.2 - 0.08 - 0.006, abs=0.01)


@pytest.mark.parametrize("ttft_ms", [5000.0, 2000.0])
def test_fine_tuning_gets_a_share_of_the_time_of_prompts_that_can_spare_it(ttft_ms: float) -> None:
    """Half of the target that each prompt has counts, and not of the policy's default."""

    def prompts() -> Any:
        yield InWalk(True)
        while True:
            for layer in range(LAYERS):
                yield Think(1e-4)
                yield Ask(Key((layer,), Pass.FORWARD), 16, Kind.PREFILL)

    policy = CoServing(clients={f"prompts-{number}": (100.0, ttft_ms) for number in range(2)})
    simulation, job = Simulation(policy, layers=LAYERS, cost=COST.of), Done()
    for number in range(2):
        simulation.add(f"prompts-{number}", prompts())
    simulation.add("job", finetune(LAYERS, 512, 20e-3, job))
    simulation.run(20.0)
    assert job.tuned > 0.05 * 20 / (2 * LAYERS * COST.of(Batch(F0, (), "", 512)) / 512)


def test_an_abandoned_prompt_does_not_stop_fine_tuning() -> None:
    def quits() -> Any:
        yield InWalk(True)
        yield Ask(F0, 64, Kind.PREFILL)
        yield InWalk(False)

    simulation, job = Simulation(CoServing(), layers=LAYERS, cost=COST.of), Done()
    simulation.add("quits", quits())
    simulation.add("job", finetune(LAYERS, 512, 20e-3, job))
    simulation.run(20.0)
    before = job.tuned
    simulation.run(40.0)
    assert job.tuned - before > 0.9 * before


class Late(SimulatedExecutor):
    """An executor that reports batches one batch later than their requests are answered, as on a GPU."""

    reports: tuple[Batch, float] | None = None

    def _ran(self, batch: Batch, seconds: float) -> None:
        self._busy = False
        if self.reports is not None:
            self.scheduler.measured(*self.reports)
        self.reports = batch, seconds
        for request in self.scheduler.completed(batch, None, self._clock.now):
            self._answers.pop(request.id)()
        self.changed()


@pytest.mark.parametrize("kind", [SimulatedExecutor, Late])
@pytest.mark.parametrize("jobs", [2, 8])
@pytest.mark.parametrize("default", [60.0, 200.0])
def test_a_remote_text_keeps_its_slo_beside_many_jobs(kind: type[SimulatedExecutor], jobs: int, default: float) -> None:
    """Also if the SLO is shorter than that of others, and where batches are reported late."""
    policy = CoServing(slo_ms=default, clients={"text": (60.0, 5000.0)})
    clock, text = Clock(), Done()
    executor, cluster = kind(clock, policy, layers=LAYERS, cost=COST.of), Cluster(clock)
    route = Route([Hop(executor)])
    cluster.add("text", generate(LAYERS, 64, 10**6, 5e-3, text), route=route)
    tuned = [Done() for _ in range(jobs)]
    for number, job in enumerate(tuned):
        cluster.add(f"job-{number}", finetune(LAYERS, 512, 20e-3, job), route=route)
    cluster.run(30.0)
    assert kind is SimulatedExecutor or executor.reports is not None
    assert fmean(text.per_token[5:]) <= 0.06
    assert sum(job.tuned for job in tuned) > 3000


def test_a_client_that_joins_again_has_its_new_slo() -> None:
    policy = CoServing(slo_ms=100)
    w = world_of(policy, terms={"a": Terms(slo_ms=2000.0)})
    for slo_ms in (2000.0, 150.0):
        w.join("a", Terms(slo_ms=slo_ms))
        w.begin_walk("a")
        w.submit("a", F0, 1, Kind.DECODE)
        assert policy.walks._clients["a"].slo == pytest.approx(slo_ms / 1e3)
        w.leave("a")


def test_a_client_may_have_several_prompts_queued() -> None:
    w = world(CoServing(slo_ms=100))
    w.submit("prompt", F1, 8, Kind.PREFILL)
    w.submit("prompt", F0, 8, Kind.PREFILL)
    assert sum(run(w).rows for _ in range(2)) == 16
    assert w.clock.now < 0.1


def test_tenants_of_a_joint_walk_have_deadlines_of_their_own() -> None:
    """The walk is due when the first of its texts is, and a text that has missed its SLO makes none of them wait."""
    w = world_of(CoServing(slo_ms=100), "a", "b", "joint", layers=4, local=True)
    keys = [Key((layer,), Pass.FORWARD) for layer in range(4)]
    for at, client in ((0.0, "a"), (0.01, "a"), (0.03, "b")):  # the second prompt shows with which layer walks end
        w.clock.advance(at)
        for key in keys:
            w.submit(client, key, 8, Kind.PREFILL)
            run(w, seconds=1e-3)
    w.end_walk("a")
    w.end_walk("b")
    clients = w.policy.walks._clients  # type: ignore[attr-defined]
    for number in range(1, 4):
        w.submit("joint", F0, 2, Kind.DECODE, joint=("a", "b"))
        assert clients["a"].began < clients["b"].began
        assert clients["joint"].walk.due == pytest.approx(clients["a"].began + number * 0.092)
        run(w)
        for key in keys[1:]:
            w.submit("joint", key, 2, Kind.DECODE, joint=("a", "b"))
            run(w)
    clients["a"].late = True
    w.submit("joint", F0, 2, Kind.DECODE, joint=("a", "b"))
    assert clients["joint"].walk.due == pytest.approx(clients["b"].began + 4 * 0.092)


def test_backward_rows_are_fine_tuning() -> None:
    w = world()
    w.end_walk("text")
    w.end_walk("prompt")
    w.submit("job", B1, 300, Kind.FINETUNE)
    assert rows_of(run(w)) == {"job": 64}  # the latency of this key is unknown
    assert rows_of(run(w)) == {"job": 236}


@pytest.mark.parametrize(
    "options",
    [{"slo_ms": 0}, {"slo_ms": -1}, {"ttft_ms": float("nan")}, {"max_wait_ms": True}, {"clients": {"a": (0, 1)}}],
)
def test_options_are_checked(options: Any) -> None:
    with pytest.raises(UsageError, match=r"co-serving: .* must be a number of milliseconds"):
        CoServing(**options)


@pytest.mark.parametrize("spec", ["co-serving:slo_ms=0.001", "fair+co-serving:slo_ms=0.001"])
def test_an_impossible_slo_is_refused(base: Any, spec: str) -> None:
    """One row through all base layers takes longer than the SLO."""
    with pytest.raises(UsageError, match=r"slo_ms is 0\.001, but one token takes .* ms in base layers alone"):
        symbiosis.Executor(base, policy=spec)
    symbiosis.Executor(base, policy=spec.replace("0.001", "5000"))


def test_an_impossible_slo_of_one_client_is_refused(base: Any) -> None:
    with pytest.raises(UsageError, match=r"slo_ms of 'alice' is 0\.001"):
        symbiosis.Executor(base, policy=CoServing(slo_ms=5000, clients={"alice": (0.001, 100.0)}))


@pytest.mark.parametrize("what", ["slo_ms", "ttft_ms"])
def test_impossible_targets_are_refused(what: str) -> None:
    """Targets are checked for all clients, for a client by its name, and for a new client."""
    base = tiny_model()
    with pytest.raises(UsageError, match=rf"co-serving: {what} is 1e-06, but one token takes"):
        symbiosis.Executor(base, policy=CoServing(**{what: 1e-6}))
    pair = (1e-6, 900.0) if what == "slo_ms" else (50.0, 1e-6)
    with pytest.raises(UsageError, match=rf"co-serving: {what} of 'alice' is 1e-06, but one token takes"):
        symbiosis.Executor(base, policy=CoServing(slo_ms=1e4, clients={"alice": pair}))
    executor = symbiosis.Executor(base, policy=CoServing(slo_ms=1e4))
    with pytest.raises(UsageError, match=rf"client 'alice': {what} is 1e-06, but one token takes"):
        executor.client(name="alice", **{what: 1e-6})


def _steps(w: World, own: float) -> CoServing:
    """Let a client fine-tune for ten steps. It computes ``own`` seconds with each answer and pauses after each step."""
    policy = w.policy
    assert isinstance(policy, CoServing)
    keys = [Key((layer,), Pass.FORWARD) for layer in range(4)]
    keys += [Key(key.layers, Pass.BACKWARD) for key in reversed(keys)]
    for _ in range(10):
        for key in keys:
            w.submit("job", key, 64, Kind.FINETUNE)
            while w.waiting:
                run(w, seconds=2e-3)
            w.clock.advance(own)
        w.clock.advance(3.0)
    return policy


def test_own_work_of_local_clients_is_part_of_the_cost_of_their_batches() -> None:
    w = world(CoServing(slo_ms=100), local=True)
    policy = _steps(w, 5e-3)
    request = Request(1, "job", F0, 64, Kind.FINETUNE, 0.0, local=True)
    last = Request(1, "job", Key((0,), Pass.BACKWARD), 64, Kind.FINETUNE, 0.0, local=True)
    assert policy.own_work.seconds(request) == pytest.approx(5e-3)
    assert policy.own_work.seconds(last) == 0  # the time after the last request of a step is a pause
    w.submit("text", F0, 1, Kind.DECODE)
    before = policy.walks.slack(Kind.PREFILL, w.clock.now)
    policy.ran(Batch(F0, [Slice(request, 0, 64)], "", 64), 2e-3)
    assert before - policy.walks.slack(Kind.PREFILL, w.clock.now) == pytest.approx(7e-3)


def test_threads_of_a_client_with_prompts_and_tokens_at_once() -> None:
    """The time between the requests of two threads is no own work."""
    world = world_of(CoServing(), "one", local=True)
    world.submit("one", F0, 8, Kind.PREFILL)
    batch = world.decide()
    assert isinstance(batch, Batch)
    world.submit("one", F0, 1, Kind.DECODE)
    world.complete(batch, 1e-3)
    world.submit("one", F1, 1, Kind.DECODE)


def test_own_work_of_clients_in_other_processes_costs_nothing() -> None:
    policy = _steps(world(CoServing(slo_ms=100)), 5e-3)
    assert policy.own_work.seconds(Request(1, "job", F0, 64, Kind.FINETUNE, 0.0)) == 0


def test_fine_tuning_waits_if_the_own_work_of_its_clients_is_too_long() -> None:
    taken = {}
    for own in (1e-3, 50e-3):
        w = world(CoServing(slo_ms=100, wait_ms=1e-6), local=True)
        _steps(w, own)
        w.submit("text", F1, 1, Kind.DECODE)
        w.submit("job", F0, 64, Kind.FINETUNE)
        taken[own] = rows_of(run(w))
    assert taken == {1e-3: {"job": 64}, 50e-3: {"text": 1}}  # the token counts as leaving 42 ms


def test_the_own_work_of_local_clients_that_fine_tune_does_not_break_an_slo() -> None:
    """They compute on the executor's cores."""
    simulation = Simulation(CoServing(slo_ms=100), layers=LAYERS, cost=Cost(5e-4, 2e-5).of, local=True)
    text, job = Done(), Done()
    simulation.add("text", generate(LAYERS, 64, 10**6, 10e-3, text))
    simulation.add("job", finetune(LAYERS, 256, 0.3, job))  # 9 ms of its own for each request
    simulation.run(20.0)
    assert fmean(text.per_token[5:]) <= 0.1
    assert job.tuned > 256


@pytest.mark.parametrize("own", [0.9, 1.2, 1.5])
@pytest.mark.parametrize("others", [0, 4])
def test_a_client_that_misses_its_slo_does_not_stop_tuning(own: float, others: int) -> None:
    """A client in another process computes for longer than its SLO. The SLOs of other clients are kept."""

    def played(policy: Policy) -> tuple[float, float]:
        simulation = Simulation(policy, layers=LAYERS, cost=Cost(5e-4, 2e-5).of)
        texts, job = [Done() for _ in range(others)], Done()
        simulation.add("slow", generate(LAYERS, 64, 10**6, own * 0.1, Done()))
        for number, done in enumerate(texts):
            simulation.add(f"text-{number}", generate(LAYERS, 64, 10**6, 5e-3, done))
        simulation.add("job", finetune(LAYERS, 512, 20e-3, job))
        simulation.run(10.0)
        gaps = [gap for done in texts for gap in done.per_token[5:]]
        return job.tuned, fmean(gaps) if gaps else 0.0

    tuned, token_s = played(CoServing(slo_ms=100))
    assert tuned > 0.5 * played(Opportunistic())[0]
    assert token_s <= 0.1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"slo_ms": 50, "max_wait_ms": 40}, "max_wait_ms is 40, less than an SLO of 50"),
        ({"clients": {"a": (20_000.0, 1e5)}}, "max_wait_ms is 10000, less than an SLO of 20000"),
        ({"slo_ms": 500, "wait_ms": 600}, "wait_ms is 600, more than an SLO of 500"),
        ({"clients": {"a": (80.0, 1e5)}, "wait_ms": 90}, "wait_ms is 90, more than an SLO of 80"),
    ],
)
def test_waits_that_are_longer_than_an_slo(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        symbiosis.Executor(tiny_model(), policy=CoServing(**options))


def test_fine_tuning_gets_its_minimum_share_beside_a_slow_local_client() -> None:
    """A local client computes for longer than its SLO, so there is never any slack."""
    simulation = Simulation(CoServing(slo_ms=20), layers=LAYERS, cost=Cost(5e-4, 2e-5).of, local=True)
    text, job = Done(), Done()
    simulation.add("text", generate(LAYERS, 64, 10**6, 30e-3, text))
    simulation.add("job", finetune(LAYERS, 512, 20e-3, job))
    simulation.run(20.0)
    assert job.tuned > 20 * 64  # without the minimum share, one request of 32 runs every 10 s
    assert fmean(text.per_token) < 2 * 0.04


@pytest.mark.parametrize("together", [True, False], ids=["same layer", "another layer"])
@pytest.mark.parametrize("rows", [200, 2048])
@pytest.mark.parametrize("stated", Kind)
def test_one_row_beside_many_long_calls_is_answered_within_the_slo(stated: Kind, rows: int, together: bool) -> None:
    """Each call is a walk of its own, so the slack of a whole token may go to the long calls before it runs."""
    world = world_of(CoServing(slo_ms=100), "victim", "mallory-0", "mallory-1", max_rows=8192)
    kind = kind_of(NO_TERMS, stated, rows, backward=False, trusted=False)
    waits: list[float] = []

    def send(client: str) -> None:
        if client == "victim":
            world.submit(client, F0, 1, Kind.DECODE)
        else:
            world.submit(client, F0 if together else F1, rows, kind)

    for _ in range(8):
        send("mallory-0")
        send("mallory-1")
    send("victim")
    while len(waits) < 60:
        batch = world.decide()
        if isinstance(batch, Batch):
            world.clock.advance(1e-4 + 1e-5 * batch.rows)
            for request in world.complete(batch):
                if request.client == "victim":
                    waits.append(world.clock.now - request.arrived)
                send(request.client)
        else:
            assert isinstance(batch, WaitUntil)
            world.clock.advance(max(batch.time - world.clock.now, 0.0))
    assert median(waits[10:]) <= 0.1
    assert max(waits[10:]) <= 0.1 + 1e-5 * rows


def test_a_stopped_client_holds_up_prompts_and_fine_tuning_for_two_slos_only() -> None:
    """It sends a row of the first layer now and then, and no other."""
    w = world(CoServing(slo_ms=100, wait_ms=1e-6))
    learned(w, F0, F1)
    began: dict[str, list[float]] = {"prompt": [], "job": []}
    for _ in range(5):
        w.submit("text", F0, 1, Kind.DECODE)
        sent = w.clock.now
        w.submit("prompt", F1, 1500, Kind.PREFILL)
        w.submit("job", F1, 1500, Kind.FINETUNE)
        while w.waiting:
            client = run(w, seconds=0.03).slices[-1].request.client
            if client != "text":
                began[client].append(w.clock.now - sent)
        w.clock.advance(0.5)
    assert max(began["prompt"]) < 0.5
    assert max(began["job"]) < 0.7


def test_a_wait_for_a_client_that_decodes_is_no_series_of_waits() -> None:
    """The tokens before are over, and nothing may run before the client's next request or its stop."""
    w = world(CoServing(slo_ms=100, wait_ms=1e-6))
    learned(w, F0, F1, row=1e-2)
    for _ in range(5):
        _token(w, 0.09)
        w.policy.walks.spent("job", 0.05)  # type: ignore[attr-defined]
    w.submit("text", F0, 1, Kind.DECODE)
    run(w)
    w.policy.walks.spent("job", 0.1)  # type: ignore[attr-defined]
    w.submit("job", F1, 100, Kind.FINETUNE)
    action = w.decide()
    assert isinstance(action, WaitUntil)
    assert action.time >= w.clock.now + 0.1


def test_a_prompt_whose_client_stops_does_not_stop_fine_tuning() -> None:
    """It counts as under way for as long as its target is away, and no longer."""
    w = world_of(CoServing(slo_ms=100, ttft_ms=1000), "a", "prompt", "job", layers=2, max_rows=1000)
    _prefill(w)
    w.submit("prompt", F0, 900, Kind.PREFILL)
    run(w, seconds=0.4)  # and its client sends no second layer
    slack = w.policy.walks.slack  # type: ignore[attr-defined]
    w.clock.advance(0.6)
    assert slack(Kind.FINETUNE, w.clock.now) <= 0
    w.clock.advance(1.0)
    assert slack(Kind.FINETUNE, w.clock.now) == pytest.approx(0.092)


def test_tokens_count_as_kept_or_missed_by_the_mean_over_their_text() -> None:
    policy = CoServing(slo_ms=100, ttft_ms=1000)

    def ask(number: int, kind: Kind, arrived: float) -> None:
        policy.submitted(Request(number, "alice", Key((0,), Pass.FORWARD), 1, kind, arrived))

    ask(0, Kind.PREFILL, 0.0)
    ask(1, Kind.DECODE, 0.5)  # the first token is made, in time
    ask(2, Kind.DECODE, 0.55)
    ask(3, Kind.DECODE, 0.69)  # it took 140 ms, and the two 190 ms
    assert policy.slo()["alice"] == (3, 0)
    ask(4, Kind.DECODE, 0.85)
    assert policy.slo()["alice"] == (3, 1)
    ask(5, Kind.PREFILL, 2.0)
    ask(6, Kind.DECODE, 3.5)  # the first token of this text took 1.5 s
    assert policy.slo()["alice"] == (3, 2)


def test_tokens_of_forgotten_clients_count_for_their_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tenant's counts never fall."""
    monkeypatch.setattr("symbiosis.policies.walks._MAX_CLIENTS", 2)
    policy = CoServing(slo_ms=100, ttft_ms=1000)
    for number, name in enumerate(["alice/1", "alice", "alice/2", "bob/1", "carol/1", "carol/2"]):
        for step, kind in enumerate((Kind.PREFILL, Kind.DECODE, Kind.DECODE)):
            request = Request(3 * number + step, name, F0, 1, kind, number + 0.01 * step)
            policy.submitted(request)
    assert policy.slo() == {"alice/": (6, 0), "bob/": (2, 0), "carol/1": (2, 0), "carol/2": (2, 0)}
