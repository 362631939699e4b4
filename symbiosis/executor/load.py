"""The load of an executor: the part of its recent time that it has spent on rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOAD_S = 5.0
"""Seconds over which the load is measured: at least so many, and at most twice as many."""
FEW_ROWS = 64
"""Rows from which on most of a batch's time grows with its rows. It depends on the device; see decision 0038."""


@dataclass(slots=True)
class RecentLoad:
    """Part of the recent time that an executor has spent on rows of its batches, from 0 to 1.

    The time that a batch takes whatever its rows, mostly to read the weights, is not counted: the rows of one more
    client share it. So clients that decode add little, and those that fine-tune add much.
    """

    seconds: float = 0.0
    """Seconds that batches have taken for their rows so far."""
    _last: float = -math.inf
    """When the latest batch has ended."""
    _marks: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    """Two pairs of a time and the seconds counted by then, the later one first: at least LOAD_S apart,
    or both from the first batch after a pause of that length."""

    def ran(self, rows: int, seconds: float, now: float) -> None:
        """Count a batch that has ended at time ``now`` (seconds)."""
        if now - self._last >= LOAD_S:
            self._marks = ((now, self.seconds),) * 2
        elif now - self._marks[0][0] >= LOAD_S:
            self._marks = (now, self.seconds), self._marks[0]
        self.seconds += seconds * rows / (rows + FEW_ROWS)
        self._last = now

    def at(self, now: float) -> float:
        """Return the load at a time."""
        if now - self._last >= LOAD_S:
            return 0.0
        later, earlier = self._marks
        since, seconds = later if now - later[0] >= LOAD_S else earlier
        return min((self.seconds - seconds) / max(now - since, LOAD_S), 1.0)
