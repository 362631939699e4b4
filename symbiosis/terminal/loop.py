"""The event loop of commands, and threads that sleep while they wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like ``asyncio.run``, on uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


MAYBE_ON_THIS_HOST = re.compile(r"shm://|file://|https?://|\w+://(localhost|127\.|\[::1\])")
"""Beginnings of addresses that only processes of this host can reach, and of lists
(``core.registry.LISTS``), which may have such addresses."""


def wait_passively(*addresses: str) -> None:
    """Have OpenMP's idle threads sleep, in this process and in processes that it starts. With addresses, do so only if
    the other ends of some of them are on this host, or may be.

    By default they spin for about a millisecond, on cores where another process computes. Two processes then run at
    half their speed (docs/decisions/0011-idle-threads.md). Must be called before torch is imported.
    """
    if not addresses or any(map(MAYBE_ON_THIS_HOST.match, ",".join(addresses).split(","))):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def allow_descriptors() -> None:
    """Let this process open as many files and connections as the system allows it."""
    import resource  # not on Windows

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # macOS allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
