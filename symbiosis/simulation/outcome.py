"""What became of a trace: the figures that a simulation and a run on a real executor are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symbiosis.simulation.clients import Done

__all__ = ["SLO", "Outcome", "outcome", "percentile"]


@dataclass(frozen=True)
class SLO:
    """What inference is promised, in milliseconds."""

    token_ms: float
    """From one token to the next, on average over a request."""
    first_ms: float
    """From arrival to the first token."""

    def met_by(self, done: Done) -> bool:
        """Whether a finished request got what it was promised."""
        gaps = done.per_token
        slow = bool(gaps) and sum(gaps) / len(gaps) > self.token_ms / 1e3
        return not slow and done.first_token_s <= self.first_ms / 1e3


@dataclass(frozen=True)
class Outcome:
    """Times are in milliseconds, rates in tokens a second; ``nan`` where there was nothing to count."""

    seconds: float
    tokens_per_s: float
    """Generated."""
    finetune_per_s: float
    """Of fine-tuning; a step that is under way in the end counts for as much as is done of it."""
    token_mean: float
    token_p50: float
    token_p99: float
    first_mean: float
    first_p99: float
    slo_attainment: float
    """Part of the finished requests that were served within their SLO."""
    fairness: float
    """Jain's index of the rates at which finished requests got their tokens: 1 if all were served alike."""
    finished: int
    """Requests."""
    mean_batch: float
    """Requests for a layer in a batch."""


def percentile(values: Sequence[float], part: float) -> float:
    """The value that ``part`` of them do not exceed; ``nan`` of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def outcome(
    texts: Sequence[tuple[Done, int]], jobs: Sequence[Done], seconds: float, mean_batch: float, slo: SLO
) -> Outcome:
    """The figures.

    Args:
        texts: what became of each request for text, and how many tokens it wanted.
        jobs: what became of fine-tuning.
        seconds: how long all of it took.
        mean_batch: requests a batch, of the executors.
        slo: what was promised.
    """
    finished = [done for done, wanted in texts if len(done.tokens) >= wanted]
    gaps = [1e3 * gap for done, _ in texts for gap in done.per_token]
    first = [1e3 * done.first_token_s for done, _ in texts if done.tokens]
    rates = [len(done.tokens) / (done.tokens[-1] - done.began) for done in finished if done.tokens[-1] > done.began]
    return Outcome(
        seconds=seconds,
        tokens_per_s=sum(len(done.tokens) for done, _ in texts) / seconds if seconds else 0.0,
        finetune_per_s=sum(job.tuned for job in jobs) / seconds if seconds else 0.0,
        token_mean=_mean(gaps),
        token_p50=percentile(gaps, 0.5),
        token_p99=percentile(gaps, 0.99),
        first_mean=_mean(first),
        first_p99=percentile(first, 0.99),
        slo_attainment=_mean([float(slo.met_by(done)) for done in finished]),
        fairness=sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates)) if rates else float("nan"),
        finished=len(finished),
        mean_batch=mean_batch,
    )
