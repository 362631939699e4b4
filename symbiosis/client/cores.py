"""How many cores the operators of one thread use."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

__all__ = ["use_cores"]


def use_cores(count: int) -> None:
    """Have operators on the CPU that this thread calls from now on use so many threads in all. (What
    ``torch.set_num_threads`` says is also for threads that are started later.) Without OpenMP nothing happens, nor to
    MKL's products where ``torch.set_num_threads`` was called."""
    torch.get_num_threads()  # torch gives a thread its number when that is first asked for
    set_num_threads = _omp_set_num_threads()
    if set_num_threads is not None:
        set_num_threads(count)


@cache
def _omp_set_num_threads() -> Any:
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
