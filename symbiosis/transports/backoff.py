"""How long to wait between attempts to reach an executor that was lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from symbiosis.errors import BusyError, ConnectionLostError, ExecutorClosedError

__all__ = ["MAY_RETURN", "backoff"]

FIRST_S, LONGEST_S = 0.05, 2.0
MAY_RETURN = (ConnectionLostError, ExecutorClosedError, BusyError)
"""What an attempt to come back may meet and still be worth another. Busy: it may not have noticed yet that we had
gone."""


def backoff(patience_s: float) -> Iterator[float]:
    """Delays in seconds before each attempt, doubling and jittered (so that tenants do not come back all at once),
    until ``patience_s`` has passed since the first."""
    end = time.monotonic() + patience_s
    delay = FIRST_S
    while (left := end - time.monotonic()) > 0:
        yield min(delay * random.uniform(0.5, 1.5), left)
        delay = min(2 * delay, LONGEST_S)
