"""What the scripts have in common: a served model, a job that runs twice, and the comparison of its results.

Run alone, a script prints the largest difference of each result, and fails with an AssertionError if one is too large.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import symbiosis
from symbiosis.client.virtlayer import VirtLayer
from tests.service import Service, save_model

NUMBERS = 1e-5
"""Tolerance of losses, scores and outputs, relative to the largest of them. The model is in fp32."""
TRAINED = 1e-3
"""Tolerance of weights after a training, relative to the largest of a tensor: Adam divides by the size of the gradient,
which magnifies differences in small elements."""

Job = Callable[[Any, Any, Path], Mapping[str, Any]]
"""Takes a model, a tokenizer and an empty folder. Returns numbers and tensors by name; names of trained weights begin
with ``trained``."""


def compare(package: str, jobs: Mapping[str, Job], *, model: Any = None, auto: Any = AutoModelForCausalLM) -> None:
    """Run each job on a plain model and on the same model opened at an executor, and compare the results.

    Prints one JSON object per job, which :mod:`tests.ecosystem.__main__` reads.

    Args:
        package: the package that is tried.
        jobs: jobs by name.
        model: the model that is served; by default a small Llama.
        auto: the class that loads the plain model.

    Raises:
        AssertionError: a result differs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = save_model(folder / "model", model)
        with Service(checkpoint, f"shm://{folder}/s.sock", fresh=True) as service:
            for job_name, job in jobs.items():
                set_seed(0)
                plain, tokenizer = auto.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
                expected = job(plain, tokenizer, folder / job_name / "plain")
                set_seed(0)
                with symbiosis.open_model(service.address) as opened:
                    assert any(isinstance(layer, VirtLayer) for layer in opened.modules())
                    found = job(opened, opened.symbiosis.tokenizer(), folder / job_name / "opened")
                report(package, job_name, found, expected)


def report(package: str, job: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Print the largest difference of each result as a JSON object. Raise AssertionError if one is too large."""
    assert found.keys() == expected.keys()
    differences = {name: difference(found[name], expected[name]) for name in expected}
    print(json.dumps({"software": f"{package} {version(package)}", "job": job, "differences": differences}), flush=True)
    for name, value in differences.items():
        assert value <= (TRAINED if name.startswith("trained") else NUMBERS), f"{job}: {name} differ by {value}"


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference between two tensors, numbers, or lists or dictionaries of them, relative to the
    largest expected number of a tensor; infinity if names or shapes differ, or a number is not finite."""
    if isinstance(expected, Mapping):
        if not expected or found.keys() != expected.keys():
            return math.inf
        return max(difference(found[name], expected[name]) for name in expected)
    a, b = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    if not b.numel() or a.shape != b.shape or not a.isfinite().all():
        return math.inf
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def without_placeholders(state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return a saved state dict. Raise AssertionError if it has NaN in place of a base layer's weight."""
    for name, tensor in state.items():
        assert not tensor.isnan().any(), f"{name} was saved as NaN"
    return state


def losses(trainer: Any) -> list[float]:
    """Train with a trainer of transformers' kind, and return the loss of each logged step."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
