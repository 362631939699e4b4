"""Comparisons with plain transformers + PEFT: what counts as a difference."""

from __future__ import annotations

import math

import pytest
import torch
from peft import CPTConfig

from symbiosis.testing import Comparison, Job, Outcome, compare, tiny_model
from tests.helpers import CAUSAL

NAN = math.nan


@pytest.mark.parametrize(
    ("found", "expected", "difference"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([NAN], [NAN], 0.0),
        ([1.0, NAN], [2.0, NAN], 0.5),
        ([1.0, NAN], [NAN, 1.0], math.inf),
        ([1.0, 2.0], [1.0, NAN], math.inf),
        ([1.0, NAN], [1.0, 2.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_nan_in_the_same_places_is_equal(found: list[float], expected: list[float], difference: float) -> None:
    comparison = Comparison.of(Outcome(logits=torch.tensor(found)), Outcome(logits=torch.tensor(expected)))
    assert comparison.differences == {"logits": difference}
    assert comparison.bit_equal == (difference == 0)


async def test_a_method_whose_loss_is_nan_in_plain_peft() -> None:
    config = CPTConfig(task_type=CAUSAL, cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3])
    comparison = await compare(tiny_model(), config, Job(steps=2, new_tokens=0))
    assert comparison.bit_equal, comparison
