"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import asyncio
import ctypes


def return_freed() -> None:
    """Return free memory to the operating system in the event loop's next turn, where the C library is glibc.

    glibc keeps freed blocks of up to 32 MiB for later allocations. After an attack the process held 270 MiB although
    all connections had ended (docs/decisions/0024-memory-of-all-connections.md).
    """
    if _trim is not None:
        asyncio.get_running_loop().call_soon(_trim, 0)  # the caller may still refer to what it frees


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
