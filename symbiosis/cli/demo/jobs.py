"""What each tenant of the demo does, and what came of it. The same jobs run with symbiosis and with plain PEFT."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from symbiosis.cli.data import IGNORED


@dataclass(kw_only=True)
class Tenant:
    """One tenant's job.

    Attributes:
        method: what to call its adapter.
        config: makes its PEFT configuration; None where there is none, or where it is in ``adapter``.
        adapter: folder of an adapter to load.
        seed: of the adapter's initialisation, dropout and sampling.
    """

    name: str
    method: str
    config: Callable[[], Any] | None = None
    adapter: Path | None = None
    seed: int = 0
    tokens: int = 0
    """Trained on, or generated, so far."""
    started: float = math.nan
    ended: float = math.nan
    memory: Footprint | None = None
    """Of this tenant beside the base."""
    plain_memory: Footprint | None = None
    """Of the same job in a process of its own."""

    @property
    def seconds(self) -> float:
        """At work so far."""
        if math.isnan(self.started):
            return 0.0
        return (time.monotonic() if math.isnan(self.ended) else self.ended) - self.started

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.tokens else 0.0


@dataclass(kw_only=True)
class Training(Tenant):
    """Fine-tunes an adapter with AdamW on ``batches``, one a step."""

    learning_rate: float
    text: str
    """Name of what it learns from."""
    batches: list[dict[str, torch.Tensor]]
    prompts: list[str]
    losses: list[float] = field(default_factory=list)
    plain_losses: list[float] = field(default_factory=list)
    plain_seconds: float = 0.0
    before: list[str] = field(default_factory=list)
    """Continuations of the prompts by the base model."""
    after: list[str] = field(default_factory=list)

    def count(self, loss: float, batch: dict[str, torch.Tensor]) -> None:
        """One step is done."""
        self.losses.append(loss)
        self.tokens += int(batch["attention_mask"].sum())

    def trained_tokens(self) -> int:
        """Tokens that the loss is taken of, over all steps."""
        return sum(int((batch["labels"] != IGNORED).sum()) for batch in self.batches)


@dataclass(kw_only=True)
class Generation(Tenant):
    """Continues its prompts, greedily, again and again until the fine-tuning tenants are done."""

    prompts: list[str]
    outputs: dict[int, list[list[int]]] = field(default_factory=dict)
    """New tokens by the number of the prompt: every different continuation, so one unless two tokens tie."""
    rounds: int = 0
    """Prompts continued, repetitions included."""
    current: list[int] = field(default_factory=list)
    """New tokens of the text that is being written."""
    cache_bytes: int = 0
    """Of the largest KV cache."""
    plain_outputs: dict[int, list[int]] = field(default_factory=dict)
    plain_gaps: dict[int, float] = field(default_factory=dict)
    """Where an output differs from plain: how far apart the plain scores of the first two different tokens are."""
    plain_tokens: int = 0
    plain_seconds: float = 0.0

    def finished(self, number: int, tokens: list[int]) -> None:
        """A prompt was continued."""
        self.rounds += 1
        texts = self.outputs.setdefault(number, [])
        if tokens not in texts:
            texts.append(tokens)


@dataclass
class Footprint:
    """Bytes, each storage counted once. ``activations``: what autograd keeps for backward, or the KV cache."""

    base: int = 0
    adapter: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.base + self.adapter + self.gradients + self.optimizer + self.activations

    @property
    def own(self) -> int:
        """All but the base."""
        return self.total - self.base


@dataclass
class Plan:
    """The whole demo: one base model and its tenants."""

    model: str
    label: str
    """What to call the model."""
    tokenizer: Any
    trainings: list[Training]
    generations: list[Generation]
    new_tokens: int
    """Length of every text that is generated."""
    longest_prompt: int
    """Tokens of a prompt that are kept, the last ones."""
    policy: str
    device: torch.device
    dtype: torch.dtype
    notes: list[str] = field(default_factory=list)

    @property
    def tenants(self) -> list[Tenant]:
        return [*self.trainings, *self.generations]

    @property
    def tolerance(self) -> float:
        """Largest relative difference of two losses that counts as agreement, step by step."""
        return {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}.get(self.dtype, 1e-3)

    def encode(self, prompt: str) -> torch.Tensor:
        """[1, tokens] of a prompt."""
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        return torch.as_tensor(ids[:, -self.longest_prompt :]).to(self.device)

    def decode(self, tokens: list[int]) -> str:
        """Text of new tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def generation_options(self) -> dict[str, Any]:
        """For ``generate``: greedy, without going round in circles."""
        pad = next((t for t in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if t is not None), 0)
        return {
            "max_new_tokens": self.new_tokens,
            "do_sample": False,
            "num_beams": 1,
            "repetition_penalty": 1.15,
            "pad_token_id": pad,
        }
