"""What simulated clients do: generate text, fine-tune."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.simulation.engine import Ask, Client, Think, Walk

__all__ = ["Done", "Thinking", "backward", "finetune", "forward", "generate"]

Thinking = Callable[[Kind, int], float]
"""Seconds of a client's own work before each request: of its kind, and the rows it brings."""


@dataclass(slots=True)
class Done:
    """When a client was done with what, in seconds."""

    began: float = 0.0
    tokens: list[float] = field(default_factory=list)
    """Of a generating client: when each token was there."""
    steps: list[float] = field(default_factory=list)
    """Of a fine-tuning client: when each step was over."""
    tuned: float = 0.0
    """Of a fine-tuning client: tokens that have been through; of a step that is under way, as much as is done of it."""

    @property
    def per_token(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def first_token_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.tokens[0] - self.began


def forward(layers: int) -> list[Key]:
    """The keys of a walk through so many layers."""
    return [Key((layer,), Pass.FORWARD) for layer in range(layers)]


def backward(keys: Sequence[Key]) -> list[Key]:
    """The keys of the walk back: siblings are asked for one by one."""
    return [Key((layer,), Pass.BACKWARD) for key in reversed(keys) for layer in reversed(key.layers)]


def _walk(
    keys: Sequence[Key], rows: int, kind: Kind, thinking: Thinking, last: Container[Key] = ()
) -> Iterator[Think | Ask]:
    """Through the model, with the client's own work before each layer."""
    seconds = thinking(kind, rows)
    for key in keys:
        yield Think(seconds)
        yield Ask(key, 1 if key in last else rows, kind)


def _spread(think: float | Thinking, walk: Sequence[Key]) -> Thinking:
    """A client's own work of a walk, in seconds, is spread over its requests."""
    return think if callable(think) else (lambda _kind, _rows: think / len(walk))


def generate(
    layers: int | Sequence[Key],
    prompt: int,
    tokens: int,
    think: float | Thinking,
    done: Done,
    arrives: float = 0.0,
    last: Container[Key] = (),
) -> Client:
    """Read a prompt, then make tokens one by one.

    Args:
        layers: the keys of a walk, or how many.
        prompt, tokens: how many.
        think: seconds of the client's own work for one token, and for the prompt; or a function that says what it does
            before each request.
        done: filled in.
        arrives: when it arrives, in seconds; the same as is given to :meth:`~symbiosis.simulation.Simulation.add`.
        last: keys that are asked for the prompt's last token alone, as language models do at their head.
    """
    keys = forward(layers) if isinstance(layers, int) else layers
    thinking = _spread(think, keys)
    done.began = arrives
    yield Walk(True)
    for token in range(tokens):
        now = arrives
        for action in _walk(keys, 1 if token else prompt, Kind.DECODE if token else Kind.PREFILL, thinking, last):
            now = yield action
        done.tokens.append(now)
    yield Walk(False)


def finetune(
    layers: int | Sequence[Key],
    rows: int,
    think: float | Thinking,
    done: Done,
    steps: int | None = None,
    back: Sequence[Key] | None = None,
) -> Client:
    """Forward and backward, step after step; without ``steps`` for ever. Arguments as for :func:`generate`; ``rows`` of
    one step; ``back``, the keys of the walk back, are those of the walk by default."""
    keys = forward(layers) if isinstance(layers, int) else layers
    walk = [*keys, *(backward(keys) if back is None else back)]
    thinking = _spread(think, walk)
    while steps is None or len(done.steps) < steps:
        now = 0.0
        yield Walk(True)
        for action in _walk(walk, rows, Kind.FINETUNE, thinking):
            now = yield action
            if isinstance(action, Ask):
                done.tuned += rows / len(walk)
        yield Walk(False)
        done.steps.append(now)
