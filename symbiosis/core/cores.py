"""How many cores the operators of one thread use."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["use_cores"]


def use_cores(count: int) -> None:
    """Have operators on the CPU that this thread calls from now on use so many threads in all. (What
    ``torch.set_num_threads`` says is also for threads that are started later.) Without OpenMP, nothing happens."""
    torch.get_num_threads()  # torch gives a thread its number when that is first asked for
    set_num_threads = getattr(_process, "omp_set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(count)


_process = ctypes.CDLL(None)
