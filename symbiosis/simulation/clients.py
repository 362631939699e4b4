"""What simulated clients do: generate text, fine-tune."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from symbiosis.core.requests import Key, Kind, Pass
from symbiosis.simulation.engine import Ask, Client, Think, Walk

__all__ = ["Done", "finetune", "generate"]


@dataclass(slots=True)
class Done:
    """When a client was done with what, in seconds."""

    began: float = 0.0
    tokens: list[float] = field(default_factory=list)
    """Of a generating client: when each token was there."""
    steps: list[float] = field(default_factory=list)
    """Of a fine-tuning client: when each step was over."""

    @property
    def per_token(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def first_token_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.tokens[0] - self.began


def _walk(keys: Sequence[Key], rows: int, kind: Kind, think_s: float) -> Iterator[Think | Ask]:
    """Through the model, with the client's own work spread between the layers."""
    for key in keys:
        yield Think(think_s / len(keys))
        yield Ask(key, rows, kind)


def generate(layers: int, prompt: int, tokens: int, think_s: float, done: Done, arrives: float = 0.0) -> Client:
    """Read a prompt, then make tokens one by one.

    Args:
        layers: requests in a walk.
        prompt, tokens: how many.
        think_s: of the client's own work for one token, or for the prompt.
        done: filled in.
        arrives: when it arrives, in seconds; the same as is given to :meth:`~symbiosis.simulation.Simulation.add`.
    """
    keys = [Key((layer,), Pass.FORWARD) for layer in range(layers)]
    done.began = arrives
    yield Walk(True)
    for token in range(tokens):
        now = arrives
        for action in _walk(keys, 1 if token else prompt, Kind.DECODE if token else Kind.PREFILL, think_s):
            now = yield action
        done.tokens.append(now)
    yield Walk(False)


def finetune(layers: int, rows: int, think_s: float, done: Done, steps: int | None = None) -> Client:
    """Forward and backward, step after step; without ``steps`` for ever. Arguments as for :func:`generate`; ``rows`` of
    one step."""
    forward = [Key((layer,), Pass.FORWARD) for layer in range(layers)]
    backward = [Key((layer,), Pass.BACKWARD) for layer in reversed(range(layers))]
    step = 0
    while steps is None or step < steps:
        step += 1
        now = 0.0
        yield Walk(True)
        for action in _walk([*forward, *backward], rows, Kind.FINETUNE, think_s):
            now = yield action
        yield Walk(False)
        done.steps.append(now)
