"""Batch latencies, learned: latency ≈ a + b · rows for each key.

The line is fitted by least squares to the batches that have run, where older batches count less. ``a`` is the time that
one row takes already, mostly to read the weights; ``b`` is the time that each further row adds. A policy with a time
budget asks for the number of rows that fit (FlexLLM, section 6: s = argmax f(c, s) ≤ SLO).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from statistics import median

from symbiosis.core.requests import Key

_KEEP = 0.98
"""Factor of a measurement's weight after the next one."""
_ENOUGH = 8
"""Measurements after which outliers are recognised."""
_OUTLIER = 8.0
"""Latencies of more than so many times the expected one, or less than that part of it, are clipped to this bound."""
_LEAST_SPREAD = 1e-3
"""Variance of the row counts, relative to the square of their mean, below which no slope is fitted."""
LONGEST_S = 3600.0
"""Upper bound for the latency of a batch. A longer time is an error of measurement."""
_MAX_KEYS = 20_000


@dataclass(slots=True)
class Fit:
    """Latency against rows, for one key."""

    count: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _first: list[tuple[int, float]] = field(default_factory=list)
    """The first measurements, until there are enough to recognise outliers."""

    def learn(self, rows: int, seconds: float) -> None:
        """Learn that a batch of ``rows`` took ``seconds``. Impossible values are ignored."""
        if rows < 1 or not 0 < seconds < LONGEST_S:  # NaN is neither
            return
        if self.count >= _ENOUGH:
            expected = self.predict(rows)
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        self.count += 1
        self._add(rows, seconds)
        if self.count <= _ENOUGH:
            self._first.append((rows, seconds))
            if self.count == _ENOUGH:
                self._restart()

    def _restart(self) -> None:
        """Fit the first measurements again, without those that are far from the line with the median slope of all pairs
        (Theil and Sen)."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        slopes = [(t - s) / (n - m) for (m, s), (n, t) in itertools.combinations(self._first, 2) if n != m]
        slope = max(median(slopes), 0.0) if slopes else 0.0
        start = median(seconds - slope * rows for rows, seconds in self._first)
        for rows, seconds in self._first:
            expected = start + slope * rows
            if expected <= 0 or expected / _OUTLIER <= seconds <= expected * _OUTLIER:
                self._add(rows, seconds)
        self._first.clear()

    def _add(self, rows: int, seconds: float) -> None:
        self._weight = _KEEP * self._weight + 1
        self._x = _KEEP * self._x + rows
        self._y = _KEEP * self._y + seconds
        self._xx = _KEEP * self._xx + rows * rows
        self._xy = _KEEP * self._xy + rows * seconds

    @property
    def _spread(self) -> float:
        """Weighted variance of the row counts, or 0 while all batches had about the same size."""
        spread = self._weight * self._xx - self._x * self._x
        return spread if spread > _LEAST_SPREAD * self._x * self._x else 0.0

    @property
    def start(self) -> float | None:
        """Seconds that a batch of any size takes (``a``), or None while too few batches were measured. While all
        batches had about the same size, this is an upper bound: the whole of their latency."""
        if self.count < _ENOUGH:
            return None
        return self.coefficients[0] if self._spread else self._y / self._weight

    @property
    def coefficients(self) -> tuple[float, float]:
        """(a, b) in seconds and seconds per row, neither negative; (0, 0) before the first measurement.

        While all batches had about the same size, no slope can be fitted. Then the latency counts as proportional to
        the rows, which is the cautious estimate for a larger batch.
        """
        if not self.count:
            return 0.0, 0.0
        weight, x, y, spread = self._weight, self._x, self._y, self._spread
        if not spread:
            return 0.0, y / x
        slope = (weight * self._xy - x * y) / spread
        start = (y - slope * x) / weight
        if slope < 0:
            return y / weight, 0.0
        if start < 0:
            return 0.0, self._xy / self._xx
        return start, slope

    def predict(self, rows: int) -> float:
        """Return the expected seconds of a batch of ``rows``; 0 before the first measurement."""
        start, slope = self.coefficients
        return start + slope * rows

    def rows_within(self, seconds: float, most: int) -> int:
        """Return the size of the largest batch, up to ``most`` rows, that takes no longer than ``seconds``; 0 if one
        row takes longer."""
        start, slope = self.coefficients
        if start + slope > seconds:
            return 0
        if start + slope * most <= seconds:
            return most
        return int((seconds - start) / slope * (1 + 1e-9))


class LatencyModel:
    """A line for each key. Beyond 20,000 keys, the half with the fewest measurements is forgotten."""

    def __init__(self) -> None:
        self._lines: dict[Key, Fit] = {}

    def __getitem__(self, key: Key) -> Fit:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _MAX_KEYS:
                known = sorted(self._lines, key=lambda key: self._lines[key].count)
                for least in known[: _MAX_KEYS // 2]:
                    del self._lines[least]
            line = self._lines[key] = Fit()
        return line
