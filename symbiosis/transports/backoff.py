"""How long to wait between attempts to reach an executor that was lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

__all__ = ["backoff"]

FIRST_S, LONGEST_S = 0.05, 2.0


def backoff(patience_s: float) -> Iterator[float]:
    """Delays in seconds before each attempt, doubling and jittered (so that tenants do not come back all at once),
    until ``patience_s`` has passed since the first."""
    end = time.monotonic() + patience_s
    delay = FIRST_S
    while (left := end - time.monotonic()) > 0:
        yield min(delay * random.uniform(0.5, 1.5), left)
        delay = min(2 * delay, LONGEST_S)
