"""Tests of the policy: the conformance kit, and its purpose in simulation. Run ``pytest test_patient_tuning.py``."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from patient_tuning import PatientTuning

from symbiosis.errors import UsageError
from symbiosis.policies import NoLockstep, Policy
from symbiosis.simulation import Cost, Done, Simulation, finetune, generate
from symbiosis.testing import PolicyConformance

LAYERS = 16


class TestConforms(PolicyConformance):
    def make_policy(self) -> PatientTuning:
        return PatientTuning()


def seconds_a_token(policy: Policy) -> float:
    """Simulate four clients that generate text and two that fine-tune for ten seconds; return the median time a token
    takes."""
    simulation = Simulation(policy, layers=LAYERS, cost=Cost(start=1e-3, row=2e-5).of)
    texts = [Done() for _ in range(4)]
    for number, done in enumerate(texts):
        simulation.add(f"text-{number}", generate(LAYERS, prompt=64, tokens=10_000, think=5e-3, done=done))
    for number in range(2):
        simulation.add(f"job-{number}", finetune(LAYERS, rows=512, think=20e-3, done=Done()))
    simulation.run(until=10.0)
    return median(gap for done in texts for gap in done.per_token)


def test_tokens_take_less_than_half_as_long() -> None:
    assert seconds_a_token(PatientTuning()) < 0.5 * seconds_a_token(NoLockstep())


@pytest.mark.parametrize("options", [{"patience_ms": 0}, {"patience_ms": "long"}, {"rows": 0}, {"rows": 1.5}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} is "):
        PatientTuning(**options)
