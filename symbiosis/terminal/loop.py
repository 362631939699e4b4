"""How commands run: on which event loop, and with threads that sleep while they wait."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run", "wait_passively"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on the fastest event loop at hand."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they have nothing to do, in this process and those that it starts.

    By default they spin for about a millisecond, on the very cores where another process computes: two processes then
    take turns at less than half the speed. Works only before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
