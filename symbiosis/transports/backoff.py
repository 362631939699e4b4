"""Delays between attempts to reach an executor that was lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

__all__ = ["backoff"]

FIRST_S, LONGEST_S = 0.05, 2.0
"""Seconds of the first and of the longest delay. A local executor restarts in about a second."""


def backoff(patience_s: float) -> Iterator[float]:
    """Yield the delay in seconds before each attempt, until ``patience_s`` seconds have passed.

    Delays double, with a random factor so that tenants do not all reconnect at the same moment.
    """
    end = time.monotonic() + patience_s
    delay = FIRST_S
    while (left := end - time.monotonic()) > 0:
        yield min(delay * random.uniform(0.5, 1.5), left)
        delay = min(2 * delay, LONGEST_S)
