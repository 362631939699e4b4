"""Simulated clients: one that generates text and one that fine-tunes."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.simulation.simulation import Ask, Decode, InWalk, SimulatedClient, Think

Thinking = Callable[[Kind, int], float]
"""Function of a request's kind and rows: seconds of the client's own work before the request."""


@dataclass(slots=True)
class Done:
    """The times at which a client finished its work, in seconds."""

    began: float = 0.0
    tokens: list[float] = field(default_factory=list)
    """Time of each generated token."""
    steps: list[float] = field(default_factory=list)
    """Time at which each fine-tuning step ended."""
    tuned: float = 0.0
    """Fine-tuned tokens. An unfinished step counts by the part that is done."""

    @property
    def per_token(self) -> list[float]:
        """Seconds from each token to the next."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def first_token_s(self) -> float:
        """Seconds from the client's arrival to its first token."""
        return self.tokens[0] - self.began


def forward(layers: int) -> list[Key]:
    """Return the keys of a walk through so many layers."""
    return [Key((layer,), Pass.FORWARD) for layer in range(layers)]


def backward(keys: Sequence[Key]) -> list[Key]:
    """Return the keys of the walk back, where siblings are requested one by one."""
    return [Key((layer,), Pass.BACKWARD) for key in reversed(keys) for layer in reversed(key.layers)]


def _walk(keys: Sequence[Key], rows: int, kind: Kind, thinking: Thinking, last: Container[Key] = ()) -> SimulatedClient:
    """Yield the actions of a walk: the client's own work, and a request, for each key."""
    for key in keys:
        yield Think(thinking(kind, rows))
        yield Ask(key, 1 if key in last else rows, kind)


def _spread(think: float | Thinking, walk: Sequence[Key]) -> Thinking:
    """Return a function that divides the seconds of a walk's own work among its requests."""
    return think if callable(think) else (lambda _kind, _rows: think / len(walk))


def generate(
    layers: int | Sequence[Key],
    prompt: int,
    tokens: int,
    think: float | Thinking,
    done: Done,
    arrives: float = 0.0,
    last: Container[Key] = (),
) -> SimulatedClient:
    """Return a client that reads a prompt and then generates tokens one by one.

    Args:
        layers: keys of a walk, or their number.
        prompt, tokens: numbers of tokens.
        think: seconds of the client's own work for one token, and for the prompt; or a function for each request.
        done: record that is filled in.
        arrives: time of arrival in seconds, as given to :meth:`~symbiosis.simulation.Simulation.add`.
        last: keys that are requested for the last token of the prompt alone, such as the language model head.
    """
    keys = forward(layers) if isinstance(layers, int) else layers
    thinking = _spread(think, keys)
    done.began = arrives
    now = arrives
    yield InWalk(True)
    for action in _walk(keys, prompt, Kind.PREFILL, thinking, last):
        now = yield action
    done.tokens.append(now)
    for _ in range(tokens - 1):
        done.tokens.append((yield Decode(lambda count: _walk(keys, count, Kind.DECODE, thinking))))
    yield InWalk(False)


def finetune(
    layers: int | Sequence[Key],
    rows: int,
    think: float | Thinking,
    done: Done,
    steps: int | None = None,
    back: Sequence[Key] | None = None,
) -> SimulatedClient:
    """Return a client that trains step after step, forward and backward.

    Args:
        layers, think, done: as for :func:`generate`.
        rows: tokens of a step.
        steps: number of steps; None for no end.
        back: keys of the walk back; those of :func:`backward` by default.
    """
    keys = forward(layers) if isinstance(layers, int) else layers
    back = backward(keys) if back is None else back
    walk = [*keys, *back]
    thinking = _spread(think, walk)
    while steps is None or len(done.steps) < steps:
        now = 0.0
        for part in (keys, back):  # two walks, as in a real client
            yield InWalk(True)
            for action in _walk(part, rows, Kind.FINETUNE, thinking):
                now = yield action
                if isinstance(action, Ask):
                    done.tuned += rows / len(walk)
            yield InWalk(False)
        done.steps.append(now)
