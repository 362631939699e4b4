"""How long a batch will take: latency ≈ a + b · rows for each key, learned from the batches that have run.

The line is fitted by least squares over what was measured, older batches counting less and less. ``a`` is what one row
costs already (reading the weights), ``b`` what each further row adds. A policy that fills a latency budget asks the
other way round: how many rows fit (FlexLLM, section 6: s = argmax f(c, s) ≤ SLO).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from statistics import median

from symbiosis.core.requests import Key

__all__ = ["LONGEST_S", "LatencyModel", "Line"]

_KEEP = 0.98
"""What a measurement counts for after the next one has come."""
_ENOUGH = 8
"""Measurements after which one is held against those before."""
_OUTLIER = 8.0
"""A batch that took so many times longer, or shorter, than expected counts as if it had taken no more than that."""
LONGEST_S = 3600.0
"""No batch takes an hour."""
_MAX_KEYS = 20_000


@dataclass(slots=True)
class Line:
    """Latency against rows, for one key."""

    count: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _first: list[tuple[int, float]] = field(default_factory=list)
    """Until there are enough to tell which of them are outliers."""

    def learn(self, rows: int, seconds: float) -> None:
        """A batch of ``rows`` took ``seconds``. What cannot be true is ignored."""
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
                self._begin_anew()

    def _begin_anew(self) -> None:
        """Without the outliers among the first ones: by the line with the median slope of all pairs (Theil and Sen)."""
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
    def start(self) -> float | None:
        """Seconds that any batch takes, whatever its size; None until some have been measured. While all had about the
        same size it could be all that they took, and no more."""
        if self.count < _ENOUGH:
            return None
        if self._weight * self._xx - self._x * self._x <= 1e-3 * self._x * self._x:
            return self._y / self._weight
        return self.coefficients[0]

    @property
    def coefficients(self) -> tuple[float, float]:
        """(a, b) in seconds and seconds a row, neither negative; (0, 0) before anything was measured.

        While all batches had about the same size there is no slope to be seen. Then each row is taken to cost as much
        as every other, which is the cautious guess for a larger batch.
        """
        if not self.count:
            return 0.0, 0.0
        weight, x, y = self._weight, self._x, self._y
        spread = weight * self._xx - x * x
        if spread <= 1e-3 * x * x:
            return 0.0, y / x
        slope = (weight * self._xy - x * y) / spread
        start = (y - slope * x) / weight
        if slope < 0:
            return y / weight, 0.0
        if start < 0:
            return 0.0, self._xy / self._xx
        return start, slope

    def predict(self, rows: int) -> float:
        """Seconds that a batch of ``rows`` will take; 0 before anything was measured."""
        start, slope = self.coefficients
        return start + slope * rows

    def rows_within(self, seconds: float, most: int) -> int:
        """The largest batch, up to ``most`` rows, that takes no longer; 0 if not even one row does."""
        start, slope = self.coefficients
        if start + slope > seconds:
            return 0
        if start + slope * most <= seconds:
            return most
        return int((seconds - start) / slope * (1 + 1e-9))


class LatencyModel:
    """A line for each key."""

    def __init__(self) -> None:
        self._lines: dict[Key, Line] = {}

    def __getitem__(self, key: Key) -> Line:
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _MAX_KEYS:  # nobody makes so many groups of siblings in good faith
                known = sorted(self._lines, key=lambda key: self._lines[key].count)
                for least in known[: _MAX_KEYS // 2]:
                    del self._lines[least]
            line = self._lines[key] = Line()
        return line
