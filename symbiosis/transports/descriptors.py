"""File descriptors of the executor's process: a connection takes one, over ``shm://`` two, over ``dist://`` some more.

The kernel gives each new descriptor the lowest number that is free. So the number of a new one shows how many are left.
"""

from __future__ import annotations

SPARE = 128
"""Descriptors that connections leave to the rest of the process. Half of them serve to tell clients that the executor
is busy."""


def left(descriptor: int) -> int:
    """Return about how many descriptors connections may still take, given the one that was opened last. At -SPARE there
    are none at all."""
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SPARE if limit == resource.RLIM_INFINITY else limit - SPARE - descriptor
