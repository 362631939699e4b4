"""Peak memory of a function, measured in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from symbiosis.errors import UsageError
from symbiosis.terminal.child import end_with_parent

T = TypeVar("T")


def in_process(fn: Callable[..., T], *args: Any) -> T:
    """Run a function in a new process and return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        return pool.submit(fn, *args).result()


class PeakMemory:
    """Peak memory from its creation on, beyond the memory in use then.

    Raises:
        UsageError: the device is a CPU, and this system has no ``/proc``, where Linux reports memory.
    """

    def __init__(self, device: torch.device) -> None:
        check(device)
        gc.collect()
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before = float(torch.cuda.memory_allocated(device))
        else:
            _CLEAR.write_text("5")  # the peak counts from here
            self._before = _resident("VmRSS")

    def peak(self) -> float:
        """Return the peak in bytes."""
        cuda = self._device.type == "cuda"
        peak = float(torch.cuda.max_memory_allocated(self._device)) if cuda else _resident("VmHWM")
        return peak - self._before


_CLEAR = Path("/proc/self/clear_refs")


def check(device: torch.device) -> None:
    """Raise UsageError if peak memory cannot be measured on this system."""
    if device.type != "cuda" and not _CLEAR.exists():
        raise UsageError("peak memory on CPUs is read from Linux's /proc/self, which this system has not")


def _resident(field: str) -> float:
    """Return a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
