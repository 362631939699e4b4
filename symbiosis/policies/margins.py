"""The tuning constants of co-serving. ``docs/decisions/0015-constants-of-co-serving.md`` has the measurements that
decided; each field states its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Margins:
    """How far co-serving stays away from its limits.

    Each field states what was measured without it, in simulation: on *cores* (local clients on 2 cores), on a *GPU*
    (the roofline of an A100), or with a single client. Times are multiples of an SLO where no other unit is given.
    """

    early: float = 0.92
    """Target for the time of a token, as a fraction of its SLO. With 1, the mean time per token exceeds it."""
    most: float = 2.0
    """Longest time for one token of a text that is early, in targets. Without it, the 99th percentile of the time per
    token is 1.2 to 1.3 times as long (cores)."""
    tune: float = 0.2
    """Part of the slack that a batch of fine-tuning may spend; also the time of its minimum share. With 1, first tokens
    take 1.2 times as long (cores)."""
    stretch: float = 1.5
    """Longest time of a prefill beside fine-tuning, in usual times. Without it, first tokens take 1.1 times as long on
    cores, and 1.4 times on a GPU."""
    hurry: float = 0.4
    """Time, in targets for the first token, after which a prefill runs although the slack is too short. With 1, the
    99th percentile of the first token is 1.3 times as long (cores)."""
    starved: float = 20.0
    """Time without slack after which fine-tuning gets its minimum share. Without it, fine-tuning beside a local client
    that computes for longer than its SLO gets 4 % of its tokens."""
    patience: float = 2.0
    """Shortest wait of a fine-tuning request for the minimum share. With 0, tokens take twice as long (cores)."""
    lost: float = 0.8
    """Time that a client elsewhere computes per token, from which it misses its SLO in any case and is disregarded.
    Without it, fine-tuning beside such a client gets 6 % of its tokens."""
    given_up: float = 2.0
    """Time without a request after which a client counts as stopped. With 4, fine-tuning gets half of its tokens, and
    first tokens take six times as long (GPU)."""
    learn: float = 0.2
    """Weight of the newest token in the usual time of a token. A weight of 0.05 makes no difference."""
    unknown: int = 64
    """Rows of a batch with an unknown latency, and of the smallest part of an urgent prefill. With 16, SLO attainment
    is 0.37 instead of 0.82 (GPU, 40 ms)."""


MARGINS = Margins()
"""The margins of :class:`~symbiosis.policies.CoServing`."""
