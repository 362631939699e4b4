"""The outcome of a trace: figures that compare policies, and a simulation with a run on a real executor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from symbiosis.simulation.clients import Done
from symbiosis.simulation.trace import Arrival


@dataclass(frozen=True)
class SLO:
    """Latency targets of inference, in milliseconds."""

    token_ms: float
    """Target for the mean time from one token to the next of a request."""
    first_ms: float
    """Target for the time from arrival to the first token."""

    def met_by(self, done: Done, factor: float = 1.0) -> bool:
        """Return whether a finished request met both targets, times ``factor``."""
        gaps = done.per_token
        slow = bool(gaps) and sum(gaps) / len(gaps) > factor * self.token_ms / 1e3
        return not slow and done.first_token_s <= factor * self.first_ms / 1e3


@dataclass(frozen=True)
class LoadOutcome:
    """Figures of one run. Times are in milliseconds, rates in tokens per second; ``nan`` where nothing was counted."""

    seconds: float
    tokens_per_s: float
    """Rate of generated tokens."""
    finetune_per_s: float
    """Rate of fine-tuned tokens. An unfinished step counts by the part that is done."""
    token_mean: float
    token_p50: float
    token_p99: float
    first_mean: float
    first_p99: float
    slo_attainment: float
    """Part of the finished requests that met their targets."""
    fairness: float
    """Jain's index of the token rates of finished requests: 1 if all rates are equal."""
    finished: int
    """Number of finished requests."""
    mean_batch: float
    """Mean number of requests in a batch."""
    sent: int = 0
    """Bytes that were sent over links."""


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least ``part`` (0 to 1) of the values do not exceed; ``nan`` if there are
    none."""
    if not values:
        return float("nan")
    rank = math.ceil(round(part * len(values), 6))
    return sorted(values)[max(rank - 1, 0)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def outcome(
    texts: Sequence[tuple[Done, Arrival]],
    jobs: Sequence[Done],
    seconds: float,
    mean_batch: float,
    slo: SLO,
    sent: int = 0,
) -> LoadOutcome:
    """Return the figures of a run.

    Args:
        texts: record of each request for text, and the request.
        jobs: records of the fine-tuning clients.
        seconds: duration of the run.
        mean_batch: mean number of requests in a batch, over all executors.
        slo: latency targets.
        sent: bytes that were sent over links.
    """
    ended = [(done, arrival) for done, arrival in texts if len(done.tokens) >= arrival.tokens]
    finished = [done for done, _ in ended]
    gaps = [1e3 * gap for done, _ in texts for gap in done.per_token]
    first = [1e3 * done.first_token_s for done, _ in texts if done.tokens]
    rates = [len(done.tokens) / (done.tokens[-1] - done.began) for done in finished if done.tokens[-1] > done.began]
    return LoadOutcome(
        seconds=seconds,
        tokens_per_s=sum(len(done.tokens) for done, _ in texts) / seconds if seconds else 0.0,
        finetune_per_s=sum(job.tuned for job in jobs) / seconds if seconds else 0.0,
        token_mean=_mean(gaps),
        token_p50=percentile(gaps, 0.5),
        token_p99=percentile(gaps, 0.99),
        first_mean=_mean(first),
        first_p99=percentile(first, 0.99),
        slo_attainment=_mean([float(slo.met_by(done, arrival.slo)) for done, arrival in ended]),
        fairness=sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates)) if rates else float("nan"),
        finished=len(finished),
        mean_batch=mean_batch,
        sent=sent,
    )
