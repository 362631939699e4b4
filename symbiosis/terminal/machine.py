"""A description of this machine, for figures that were measured on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch


def machine() -> dict[str, Any]:
    """Return what figures depend on: processor, cores, memory, versions."""
    described = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


class OtherLoad:
    """How much of this machine's processors other programs use, and other virtual machines on its host, from now on."""

    def __init__(self) -> None:
        self._began = _processor_seconds()

    def part(self) -> float:
        """Return the part of the processors' time that was not this process's, from 0 to 1."""
        total, idle, own = (now - then for now, then in zip(_processor_seconds(), self._began, strict=True))
        return max(0.0, (total - idle - own) / total) if total else 0.0


def _processor_seconds() -> tuple[float, float, float]:
    """Return seconds since the start of the machine, summed over processors: all, idle, and those of this process."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    # Linux counts the time of guests as the user's too.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total, times.idle + getattr(times, "iowait", 0.0), own.user + own.system
