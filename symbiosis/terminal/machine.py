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
        self._process = psutil.Process()
        self.part()

    def part(self) -> float:
        """Return the part of the processors' time, since the last call, that was not this process's, from 0 to 1."""
        used: float = psutil.cpu_percent()
        own: float = self._process.cpu_percent() / (psutil.cpu_count() or 1)
        return max(used - own, 0.0) / 100
