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


@pytest.mark.parametrize("mask", [-math.inf, math.inf, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min])
def test_masked_logits_are_left_out(mask: float) -> None:
    def difference(found: list[float], expected: list[float]) -> float:
        return Comparison.of(Outcome(logits=torch.tensor(found)), Outcome(logits=torch.tensor(expected))).worst()

    assert difference([mask, 5.0], [mask, -5.0]) == 2.0
    assert difference([mask, 1.0], [mask, 1.0000001]) == pytest.approx(1.2e-7, rel=0.1)
    assert difference([mask, 1.0], [1.0, mask]) >= 1
    assert difference([mask, 1.0], [1.0, 1.0]) > 1e30


def trained(initial: list[float], adapter: list[float]) -> Outcome:
    return Outcome(initial={"a": torch.tensor(initial)}, adapter={"a": torch.tensor(adapter)})


@pytest.mark.parametrize(
    ("adapter", "difference"),
    [
        ([5.0, 0.0], 1.0),
        ([8.0, 4.0], 0.0),
        ([8.0, -4.0], 1.6),
        ([6.5, 2.0], 0.5),
        ([NAN, 4.0], math.inf),
        ([8.0], math.inf),
    ],
)
def test_what_training_changed(adapter: list[float], difference: float) -> None:
    comparison = Comparison.of(trained([5.0, 0.0][: len(adapter)], adapter), trained([5.0, 0.0], [8.0, 4.0]))
    assert comparison.trained == pytest.approx(difference)
    assert ("what training changed" in str(comparison)) == (difference > 0)


def test_nan_that_both_trained_is_left_out() -> None:
    found, expected = trained([0.0, 0.0], [NAN, 3.0]), trained([0.0, 0.0], [NAN, 2.0])
    assert Comparison.of(found, expected).trained == 0.5


def test_training_that_changes_nothing() -> None:
    """As in bf16, where ones and small steps give ones."""
    assert Comparison.of(trained([1.0], [1.0]), trained([1.0], [1.0])).trained == 0
    assert Comparison.of(trained([1.0], [1.1]), trained([1.0], [1.0])).trained > 1e9
    assert Comparison.of(Outcome(), Outcome()).trained == 0


def test_another_dtype_is_a_difference() -> None:
    comparison = Comparison.of(Outcome(logits=torch.ones(2, dtype=torch.bfloat16)), Outcome(logits=torch.ones(2)))
    assert comparison.worst() == math.inf


def test_the_worst_of_no_tensors() -> None:
    comparison = Comparison.of(Outcome(logits=torch.ones(2)), Outcome(logits=torch.ones(2)))
    assert comparison.worst("gradient") == 0.0


async def test_a_method_whose_loss_is_nan_in_plain_peft() -> None:
    config = CPTConfig(task_type=CAUSAL, cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3])
    comparison = await compare(tiny_model(), config, Job(steps=2, new_tokens=0))
    assert comparison.bit_equal, comparison
