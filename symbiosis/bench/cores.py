"""The cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """Return their numbers: a container or ``taskset`` may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
