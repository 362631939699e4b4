"""What every benchmark that runs an executor is told."""

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
    """Where, with what model, how often.

    Args:
        preset: the model and the work that suits it.
        device: of the base model and the clients.
        policy: as ``--policy`` takes it; empty where a benchmark has a choice of its own to make.
        base_layers: what is served.
        rounds: measurements of each kind.
        progress: told what is going on.
    """

    preset: Preset
    device: torch.device
    policy: str
    base_layers: str
    rounds: int
    progress: Callable[[str], None]

    def base(self) -> LlamaForCausalLM:
        """The preset's model."""
        return build(self.preset, self.device)

    def executor(self, base: torch.nn.Module, policy: str | Policy = "") -> Executor:
        """An executor of a model; with the policy of the settings, if no other is given, or with the default one."""
        return Executor(base, policy=policy or self.policy or "opportunistic", base_layers=self.base_layers)

    def says(self, turn: int, what: str) -> str:
        """Tell that a round begins, of which the first, -1, is a warm-up; what was told."""
        text = f"{what}: " + (f"round {turn + 1} of {self.rounds}" if turn >= 0 else "warm-up")
        self.progress(text)
        return text

    def says_part(self, what: str, part: float) -> None:
        """Tell how much of something is done."""
        self.progress(f"{what}, {part:.0%}")
