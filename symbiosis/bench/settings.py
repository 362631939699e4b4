"""Settings of every benchmark that runs an executor, and how its jobs are interleaved."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import LlamaForCausalLM

from symbiosis import Executor
from symbiosis.bench.models import Preset, build, sharing
from symbiosis.core.policy import Policy

T = TypeVar("T")


@dataclass
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
    _text: str = ""

    def base(self) -> LlamaForCausalLM:
        """Return the preset's model."""
        return build(self.preset, self.device)

    def executor(
        self, base: torch.nn.Module, policy: str | Policy = "", *, joint: str = "auto", packed: bool = True
    ) -> Executor:
        """Return an executor of a model, with the given policy, that of the settings, or the default.

        As in ``symbiosis serve``, its weights are packed, unless ``packed`` is False. ``base`` stays as it is.
        """
        chosen = policy or self.policy or "opportunistic"
        return Executor(sharing(base), policy=chosen, base_layers=self.base_layers, joint=joint, packed=packed)

    def says(self, turn: int, what: str) -> None:
        """Report that a measurement begins. Round -1 is the warm-up."""
        self._text = f"{what}: " + (f"round {turn + 1} of {self.rounds}" if turn >= 0 else "warm-up")
        self.progress(self._text)

    def says_part(self, part: float) -> None:
        """Report how much of the measurement is done."""
        self.progress(f"{self._text}, {part:.0%}")

    async def interleaved(self, what: str, jobs: Mapping[str, Callable[[], Awaitable[T]]]) -> dict[str, list[T]]:
        """Run all jobs in turn, once to warm up and then ``rounds`` times, and return the results of each.

        Every other round runs them in reverse order, because the first job finds other caches.
        """
        names = list(jobs)
        results: dict[str, list[T]] = {name: [] for name in names}
        for turn in range(-1, self.rounds):
            for name in names[::-1] if turn % 2 else names:
                self.says(turn, f"{what}, {name}")
                result = await jobs[name]()
                if turn >= 0:
                    results[name].append(result)
        return results
