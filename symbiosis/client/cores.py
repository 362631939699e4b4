"""The threads of OpenMP that operators of one thread use (docs/decisions/0012-cores-of-backward-threads.md)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_SOFT = 1
"""``omp_pause_soft``: a later operator starts the threads again."""


def use_cores(count: int) -> None:
    """Have CPU operators of this thread use ``count`` threads in all from now on.

    ``torch.set_num_threads`` would affect threads that start later, too. Without OpenMP this function has no effect,
    and MKL ignores it after ``torch.set_num_threads`` was called.
    """
    torch.get_num_threads()  # torch sets a thread's number of threads when it is first read
    set_num_threads = _function("omp_set_num_threads")
    if set_num_threads is not None:
        set_num_threads(count)


def end_helpers() -> None:
    """End the OpenMP threads that help this thread with its operators. Its next large operator starts them again.

    Each thread that runs large operators has helpers of its own. While a process has more OpenMP threads than cores,
    helpers sleep at once after an operator, and the next operator has to wake them. Otherwise they spin for about a
    millisecond, and the next operator begins sooner. Without OpenMP 5 this function has no effect. It takes about
    0.1 ms.
    """
    pause = _function("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)


@cache
def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
