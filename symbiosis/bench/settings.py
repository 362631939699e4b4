"""Settings of every benchmark that runs an executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from symbiosis.bench.models import Preset, build
from symbiosis.core.policy import Policy
from symbiosis.host import Executor

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """Model, device, policy and number of measurements.

    Args:
        preset: the model and the work to measure on it.
        device: device of the base model and the clients.
        policy: as for ``--policy``; empty if the benchmark chooses its own.
        base_layers: what is served.
        rounds: number of measurements of each kind.
        progress: called with a text about the current measurement.
    """

    preset: Preset
    device: torch.device
    policy: str
    base_layers: str
    rounds: int
    progress: Callable[[str], None]

    def base(self) -> LlamaForCausalLM:
        """Return the preset's model."""
        return build(self.preset, self.device)

    def executor(self, base: torch.nn.Module, policy: str | Policy = "") -> Executor:
        """Return an executor of a model, with the given policy, that of the settings, or the default."""
        return Executor(base, policy=policy or self.policy or "opportunistic", base_layers=self.base_layers)

    def says(self, turn: int, what: str) -> str:
        """Report that a round begins, and return the report. Round -1 is the warm-up."""
        text = f"{what}: " + (f"round {turn + 1} of {self.rounds}" if turn >= 0 else "warm-up")
        self.progress(text)
        return text

    def says_part(self, what: str, part: float) -> None:
        """Report how much of something is done."""
        self.progress(f"{what}, {part:.0%}")
