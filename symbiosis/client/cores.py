"""The number of cores that operators of one thread use."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


def use_cores(count: int) -> None:
    """Have CPU operators of this thread use ``count`` threads in all from now on.

    ``torch.set_num_threads`` would affect threads that start later, too. Without OpenMP this function has no effect,
    and MKL ignores it after ``torch.set_num_threads`` was called.
    """
    torch.get_num_threads()  # torch sets a thread's number of threads when it is first read
    set_num_threads = _omp_set_num_threads()
    if set_num_threads is not None:
        set_num_threads(count)


@cache
def _omp_set_num_threads() -> Any:
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
