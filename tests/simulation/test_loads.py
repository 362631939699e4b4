"""Generated loads have the statistics that their shapes state, and bounds are above what policies reach."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from symbiosis.errors import UnknownNameError, UsageError
from symbiosis.policies import CoServing, Opportunistic
from symbiosis.simulation.bound import bound
from symbiosis.simulation.costs import roofline
from symbiosis.simulation.loads import SHAPES, LoadShape, arrivals, drawn, make_shape
from symbiosis.simulation.outcome import SLO
from symbiosis.simulation.replay import ReplayedLoad, replay
from symbiosis.simulation.trace import Arrival, scaled
from tests.simulation.made_up import costs

POISSON = LoadShape(10.0, 100, 0.5, 1000, 50, 0.5, 1000)


def gaps(shape: LoadShape, count: int = 5000) -> list[float]:
    at = [arrival.at for arrival in arrivals(shape, count)]
    return [after - before for before, after in pairwise(at)]


def in_spells(trace: list[Arrival]) -> list[int]:
    """Return the number of arrivals in each spell of 10 s."""
    spells = [0] * (int(trace[-1].at / 10) + 1)
    for arrival in trace:
        spells[int(arrival.at / 10)] += 1
    return spells


@pytest.mark.thorough
def test_chat_resembles_azures_conversations() -> None:
    """Means are those of the original: 1,155 tokens of prompt, 211 generated, 5.53 requests a second, and so is the
    median of 129 generated tokens. The number of arrivals in 10 s has a variance of 4.0 times its mean.
    """
    trace = arrivals(SHAPES["chat"], 20_000)
    assert trace == arrivals(SHAPES["chat"], 20_000)
    assert trace != arrivals(SHAPES["chat"], 20_000, seed=1)
    assert statistics.mean(a.prompt for a in trace) == pytest.approx(1155, rel=0.15)
    assert statistics.mean(a.tokens for a in trace) == pytest.approx(211, rel=0.15)
    assert statistics.median(a.tokens for a in trace) == pytest.approx(140, rel=0.15)
    assert len(trace) / trace[-1].at == pytest.approx(5.53, rel=0.1)
    spells = in_spells(trace)
    assert 2.5 < statistics.pvariance(spells) / statistics.mean(spells) < 6


def test_code_resembles_azures_code_completions() -> None:
    """Means of the original: 2,048 and 28 tokens. More than half of the spells of 10 s are empty."""
    trace = arrivals(SHAPES["code"], 20_000)
    assert statistics.mean(a.prompt for a in trace) == pytest.approx(2048, rel=0.15)
    assert statistics.mean(a.tokens for a in trace) == pytest.approx(28, rel=0.15)
    assert max(a.prompt for a in trace) == 7437
    assert len(trace) / trace[-1].at == pytest.approx(2.6, rel=0.15)
    spells = in_spells(trace)
    assert spells.count(0) > len(spells) / 2


def test_steady_has_the_means_of_sharegpt() -> None:
    trace = arrivals(SHAPES["steady"], 20_000)
    assert statistics.mean(a.prompt for a in trace) == pytest.approx(161, rel=0.1)
    assert statistics.mean(a.tokens for a in trace) == pytest.approx(338, rel=0.1)


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_variation_of_gaps(variation: float) -> None:
    found = gaps(replace(POISSON, variation=variation))
    assert statistics.mean(found) == pytest.approx(0.1, rel=0.01)
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.1)


def test_day_curve() -> None:
    trace = arrivals(replace(POISSON, day=0.8, day_s=500.0), 5000)  # 500 s at the mean rate
    first = sum(arrival.at < 250 for arrival in trace)
    assert first / len(trace) == pytest.approx(0.5 + 0.8 / 3.1416, abs=0.05)


@pytest.mark.parametrize("spec", ["chat", "chat:bursts=1", "steady", "chat:day=0.9,day_s=100"])
def test_the_mean_rate_does_not_depend_on_the_seed(spec: str) -> None:
    shape = make_shape(spec)
    for seed in range(5):
        assert 200 / arrivals(shape, 200, seed)[-1].at == pytest.approx(shape.rate)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("spec", "seed"), [("chat:bursts=2", 0), ("chat:bursts=1", 4)])
def test_a_gap_that_ends_with_a_spell(spec: str, seed: int) -> None:
    """What rounding left of such a gap, 5e-324, was 0 s at this rate, and the loop never ended."""
    trace = arrivals(make_shape(spec), 200, seed)
    assert len(trace) == 200
    assert trace == sorted(trace, key=lambda arrival: arrival.at)


def test_conversations_and_patient_tenants() -> None:
    trace = arrivals(replace(POISSON, turns=4.0, pause_s=2.0, patient=0.25), 8000)
    first = [arrival for arrival in trace if arrival.pause is None]
    assert len(trace) == 8000
    assert len(trace) / len(first) == pytest.approx(4, rel=0.1)
    assert len(trace) / trace[-1].at == pytest.approx(10, rel=0.1)
    pauses = [arrival.pause for arrival in trace if arrival.pause is not None]
    assert statistics.mean(pauses) == pytest.approx(2, rel=0.1)
    assert sum(arrival.slo == 2 for arrival in first) / len(first) == pytest.approx(0.25, abs=0.03)
    assert len(ReplayedLoad(trace).by_client()) == len(first)
    assert scaled(trace, speed=2)[-1].pause == pytest.approx((trace[-1].pause or 0) / 2)


def test_a_load_from_a_command_line() -> None:
    assert make_shape("code") == SHAPES["code"]
    assert make_shape("code:rate=4,variation=5") == replace(SHAPES["code"], rate=4, variation=5)
    for spec, error, why in (
        ("coed", UnknownNameError, "unknown load 'coed'; there are chat, code"),
        ("code:speed=3", UsageError, "load 'code' has no option 'speed=3'; it takes rate, prompt"),
        ("code:rate=fast", UsageError, "a load's rate is 'fast'; it must be a number"),
        ("code:day=2", UsageError, "a load's day is 2; it must be a number from 0 to 1"),
        ("code:turns=0.5", UsageError, "a conversation has at least 1 request"),
    ):
        with pytest.raises(error, match=why):
            make_shape(spec)


# -------------------------------------------------------------------------------------------------------------- bounds


COSTS = costs(think=1e-4, row=1e-4)
"""Costs of 1 ms + 0.1 ms per row for each layer."""


def test_a_load_that_fits_has_no_bound_below_1() -> None:
    load = ReplayedLoad([Arrival(float(at), 100, 5) for at in range(4)], tuning=1, rows=100)
    found = bound(COSTS, load, SLO(100, 1000))
    assert found.slo_attainment == 1
    # Alone, 100 rows take 11 ms in each of 8 requests. Prompts take 44 ms of each second, tokens hardly anything.
    assert found.finetune_per_s == pytest.approx(100 / 0.088 * 0.95, rel=0.02)


def test_prompts_that_cannot_all_be_in_time() -> None:
    """Of five prompts of 0.4 s at once, two end within 1 s."""
    found = bound(COSTS, ReplayedLoad([Arrival(0.0, 1000, 5)] * 5), SLO(100, 1000))
    assert found.slo_attainment == pytest.approx(0.4)


def test_a_patient_tenants_tokens_take_their_own_pace() -> None:
    """The bound of targets twice as long is that of a factor of 2."""
    patient = [Arrival(0.01 * at, 5, 200, at, slo=2.0) for at in range(150)]
    found = bound(COSTS, ReplayedLoad(patient, tuning=1, rows=64), SLO(20, 50))
    plain = ReplayedLoad([arrival._replace(slo=1.0) for arrival in patient], tuning=1, rows=64)
    expected = bound(COSTS, plain, SLO(40, 100))
    assert 0 < expected.slo_attainment < 1
    assert found.slo_attainment == pytest.approx(expected.slo_attainment, abs=0.02)
    assert found.finetune_per_s == pytest.approx(expected.finetune_per_s, rel=0.1)  # other steps


def test_if_no_prompt_can_be_in_time_fine_tuning_has_the_executor() -> None:
    found = bound(COSTS, ReplayedLoad([Arrival(0.0, 1000, 5)] * 5, tuning=1, rows=100), SLO(100, 100))
    assert found == (0.0, pytest.approx(100 / 0.088))


def test_clients_without_a_pace_take_whole_conversations() -> None:
    trace = [Arrival(0.0, 10, 2, 0), Arrival(0.1, 10, 2, 1), *[Arrival(0.0, 10, 2, 0, pause=1.0)] * 3]
    first, second = ReplayedLoad(trace, clients=2, paced=False).by_client()
    assert next(first).conversation == 0
    assert [arrival.conversation for arrival in second] == [1]
    assert [arrival.conversation for arrival in first] == [0, 0, 0]
    found = replay(Opportunistic, COSTS, ReplayedLoad(trace, clients=2, paced=False), SLO(100, 1000))
    assert found.slo_attainment == 1


def test_short_prompts_that_share_batches_are_within_the_bound() -> None:
    load = ReplayedLoad([Arrival(0.0, 16, 3)] * 20)
    slo = SLO(75, 100)
    reached = replay(Opportunistic, roofline("a100", "llama-3.1-8b"), load, slo)
    assert bound(roofline("a100", "llama-3.1-8b"), load, slo).slo_attainment >= reached.slo_attainment == 1


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_is_above_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    shape = replace(drawn(chance), rate=chance.uniform(2, 20), prompt_most=600, answer_most=20)
    load = ReplayedLoad(arrivals(shape, 40, seed), tuning=1, rows=64)
    slo = SLO(40, 400)
    limit = bound(COSTS, load, slo)
    for policy in (Opportunistic, lambda: CoServing(slo_ms=40, ttft_ms=400)):
        found = replay(policy, COSTS, load, slo)
        assert found.slo_attainment <= limit.slo_attainment + 0.026  # one text: later turns arrive at other times
        assert found.finetune_per_s <= 1.02 * limit.finetune_per_s


def test_later_turns_follow_their_answers_and_patient_tenants_have_longer_targets() -> None:
    """A text of 4 tokens takes 8.8 ms and three times 4.8 ms; the second turn begins 1 s after it."""
    trace = [Arrival(0.0, 10, 4, 0), Arrival(0.0, 10, 4, 0, pause=1.0), Arrival(5.0, 10, 4, 1, slo=2.0)]
    found = replay(Opportunistic, COSTS, ReplayedLoad(trace), SLO(4.0, 9.0))
    assert found.finished == 3
    assert found.first_mean == pytest.approx(8.4)
    assert found.slo_attainment == pytest.approx(1 / 3)  # a token takes 4.8 ms
