"""Process groups of ``torch.distributed`` that belong to one object, and not to the whole process."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def gloo(store: Any, rank: int, size: int, local: str, within_s: float) -> Any:
    """Return a process group over TCP that listens on the IP address ``local``.

    Args:
        store: where the members meet.
        rank, size: this member, and the number of all.
        within_s: seconds that one attempt to connect may take, and by default one operation.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # A device for each group: gloo numbers the pairs of a device, and all members must number them the same.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local)]
    options._timeout = timedelta(seconds=within_s)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl(store: Any, rank: int, size: int, within_s: float) -> Any:
    """Return a process group between GPUs, whose operations may take ``within_s`` seconds."""
    # By default torch ends the process when an operation takes too long: one dead member would end all others.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=within_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
