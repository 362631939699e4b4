"""``pytest test_patient_tuning.py``: the conformance kit, and what the policy is there for, simulated."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from patient_tuning import PatientTuning

from symbiosis.errors import UsageError
from symbiosis.policies import NoLockstep
from symbiosis.simulation import Cost, Done, Simulation, finetune, generate
from symbiosis.testing import PolicyConformance

LAYERS = 16


class TestConforms(PolicyConformance):
    def make_policy(self) -> PatientTuning:
        return PatientTuning()


def seconds_a_token(policy: object) -> float:
    """Four tenants who generate text beside two who fine-tune, for ten pretended seconds."""
    simulation = Simulation(policy, layers=LAYERS, cost=Cost(start=1e-3, row=2e-5).of)
    texts = [Done() for _ in range(4)]
    for number, done in enumerate(texts):
        simulation.add(f"text-{number}", generate(LAYERS, prompt=64, tokens=10_000, think=5e-3, done=done))
    for number in range(2):
        simulation.add(f"job-{number}", finetune(LAYERS, rows=512, think=20e-3, done=Done()))
    simulation.run(until=10.0)
    return median(gap for done in texts for gap in done.per_token)


def test_inference_hardly_notices_the_jobs() -> None:
    assert seconds_a_token(PatientTuning()) < 0.5 * seconds_a_token(NoLockstep())


@pytest.mark.parametrize("options", [{"patience_ms": 0}, {"patience_ms": "long"}, {"rows": 0}, {"rows": 1.5}])
def test_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} is "):
        PatientTuning(**options)
