"""Memory that libraries keep after it was used: the C library's free blocks, and oneDNN's products."""

from __future__ import annotations

import asyncio
import ctypes
import os

PRODUCTS = 64
"""Products whose code oneDNN keeps. A product is one layer's shape, one pass and one number of rows; a model with four
shapes has room for eight numbers of rows in both passes. A product whose code is not kept takes 0.2 to 0.4 ms longer
(docs/decisions/0025-kept-products.md)."""


def limit_products() -> None:
    """Limit the products that torch and oneDNN keep, unless the user has set a limit.

    Both read these variables at the process's first product in bf16 or fp16. By default they keep 1,024 of about 1 MiB
    each, and a client chooses how many there are: each number of rows makes new ones.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(PRODUCTS))


def return_freed() -> None:
    """Return free memory to the operating system in the event loop's next turn, where the C library is glibc.

    glibc keeps blocks of up to 32 MiB when they are freed, for the next ones, and memory of other kinds comes on top:
    under attacks the process kept 270 MiB after all connections had ended
    (docs/decisions/0024-memory-of-all-connections.md).
    """
    if _trim is not None:
        asyncio.get_running_loop().call_soon(_trim, 0)  # the caller may still refer to what it frees


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
