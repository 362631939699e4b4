"""Temporal sharing: turns of inference and fine-tuning."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.policies import CoServing, DynamicTemporalSharing, TemporalSharing
from tests.helpers import Conformance, loaded, world_of


class TestTemporalConforms(Conformance):
    patience_s = 0.5

    def make_policy(self) -> Policy:
        return TemporalSharing(every=2, max_wait_ms=400)


class TestDynamicConforms(Conformance):
    patience_s = 0.5

    def make_policy(self) -> Policy:
        return DynamicTemporalSharing(max_wait_ms=400)


class TestTemporalDefaultsConform(Conformance):
    patience_s = 10.0

    def make_policy(self) -> Policy:
        return TemporalSharing()


class TestDynamicDefaultsConform(Conformance):
    patience_s = 10.0

    def make_policy(self) -> Policy:
        return DynamicTemporalSharing()


def simulate(policy: Policy, decoding: int, tuning: int, seconds: float = 30.0) -> tuple[list[float], int, int]:
    """Return the seconds per token, the number of tokens, and the number of steps."""
    texts, jobs = loaded(policy, decoding, tuning, seconds)
    return (
        [gap for done in texts for gap in done.per_token],
        sum(len(done.tokens) for done in texts),
        sum(len(done.steps) for done in jobs),
    )


@pytest.mark.parametrize("every", [2, 8, 64])
def test_turns_are_as_frequent_as_stated(every: int) -> None:
    gaps, _, steps = simulate(TemporalSharing(every=every), 1, 1, seconds=60)
    iterations = len(gaps)
    assert steps == pytest.approx(iterations / every, rel=0.25, abs=1)
    slow = sum(gap > 0.1 for gap in gaps)  # a turn fell into this token
    assert slow <= 1.3 * iterations / every + 2


def play(policy: Policy, batches: int, *tuning: str) -> list[str]:
    """Return the reasons of batches. The client "chat" requests the first layer repeatedly, the other clients walk
    through four layers forward and backward, and one client requested four more layers before.
    """
    walk = [Key((layer,), Pass.FORWARD) for layer in range(4)]
    walk += [Key((layer,), Pass.BACKWARD) for layer in reversed(range(4))]
    walks = {name: itertools.cycle(walk) for name in tuning}
    world = world_of(policy, "earlier", layers=8)
    for layer in range(4, 8 if tuning else 4):
        world.submit("earlier", Key((layer,), Pass.FORWARD), 4, Kind.FINETUNE)
        batch = world.decide()
        assert isinstance(batch, Batch)
        world.complete(batch)
    world.leave("earlier")
    for name in ("chat", *tuning):
        world.join(name)
        world.begin_walk(name)
    reasons = []

    def ask(name: str) -> None:
        tunes = name != "chat"
        world.submit(name, next(walks[name]) if tunes else walk[0], 4, Kind.FINETUNE if tunes else Kind.DECODE)

    for name in ("chat", *tuning):
        ask(name)
    for _ in range(batches):
        batch = world.decide()
        assert isinstance(batch, Batch), batch
        reasons.append(batch.reason)
        world.clock.advance(1e-3)
        for request in world.complete(batch):
            ask(request.client)
    return reasons


@pytest.mark.parametrize("tuning", [("job",), ("job", "other")])
def test_a_turn_is_one_walk_after_any_earlier_request(tuning: tuple[str, ...]) -> None:
    reasons = play(TemporalSharing(every=3), 110, *tuning)
    lengths = [(reason, len(list(run))) for reason, run in itertools.groupby(reasons)]
    assert lengths[:2] == [("inference", 3), ("turn", 8)]
    assert set(lengths[2:-1]) == {("inference", 3), ("turn", 8)}


def test_the_iterations_of_an_encoder_decoder_model_are_the_tokens_of_its_decoder() -> None:
    """The prompt goes through layers 0 to 3 once, and each token through layers 4 to 7."""
    world = world_of(TemporalSharing(every=8), "text", "job", layers=8)
    walks = {
        "text": itertools.chain(range(4), itertools.cycle(range(4, 8))),
        "job": itertools.cycle(range(4, 8)),
    }
    kinds = {"text": Kind.DECODE, "job": Kind.FINETUNE}
    for name, walk in walks.items():
        world.submit(name, Key((next(walk),), Pass.FORWARD), 4, kinds[name])
    reasons = []
    for _ in range(400):
        batch = world.decide()
        assert isinstance(batch, Batch), batch
        reasons.append(batch.reason)
        world.clock.advance(1e-3)
        for request in world.complete(batch):
            world.submit(request.client, Key((next(walks[request.client]),), Pass.FORWARD), 4, request.kind)
    lengths = [(reason, len(list(run))) for reason, run in itertools.groupby(reasons)]
    assert lengths[0] == ("inference", 8 + 4 * 6 + 1)  # the prompt, six more tokens, and the first layer of another
    assert set(lengths[1:-1]) == {("turn", 4), ("inference", 4 * 8)}


@pytest.mark.parametrize("make", [lambda: TemporalSharing(every=2), DynamicTemporalSharing])
def test_without_fine_tuning_there_are_no_turns_and_no_state(make: Any) -> None:
    policy = make()
    assert set(play(policy, 2000)) == {"inference"}
    if isinstance(policy, DynamicTemporalSharing):
        assert 0 < len(policy._queued) <= 512


def test_rare_turns_do_not_delay_inference_and_frequent_ones_do() -> None:
    rare = simulate(TemporalSharing(every=512), 8, 2)
    often = simulate(TemporalSharing(every=2), 8, 2)
    assert rare[1] > 1.5 * often[1]
    assert rare[2] < often[2]


def test_without_inference_fine_tuning_has_all_turns() -> None:
    best = simulate(CoServing(), 0, 2)
    assert simulate(TemporalSharing(every=64), 0, 2)[2] >= 0.8 * best[2]


@pytest.mark.thorough
def test_dynamic_follows_the_pressure() -> None:
    calm, busy = DynamicTemporalSharing(), DynamicTemporalSharing()
    calm_gaps, _, calm_steps = simulate(calm, 1, 1, 60)
    busy_gaps, _, busy_steps = simulate(busy, 40, 1, 60)
    assert calm.pace < 90
    assert busy.pace > 1.5 * calm.pace
    assert calm_steps > 0
    assert busy_steps > 0
    assert busy_steps / max(len(busy_gaps) / 40, 1) < calm_steps / len(calm_gaps)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1.5}, {"every": True}, {"max_wait_ms": 0}])
def test_options_are_checked(options: Any) -> None:
    with pytest.raises(UsageError, match="temporal: "):
        TemporalSharing(**options)
