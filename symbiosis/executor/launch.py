"""Starting the shards of an executor: how each loads the model, and where they meet."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from symbiosis.errors import ShardLostError, SymbiosisError, UsageError
from symbiosis.executor.loading import Check, load_model
from symbiosis.executor.shard_group import MEET_WITHIN_S, ShardGroup, make_memory, map_memory
from symbiosis.executor.splitting import SplitModel

dist: Any = distributed  # its types leave the stores out

END_WITHIN_S = 5.0
"""Seconds that a shard has to exit before it is killed."""
PROGRAM = "symbiosis.executor.shards"
"""Module that each started shard runs."""


def ended(rank: int, count: int, process: subprocess.Popen[bytes]) -> str:
    """Return how the process of a shard has ended, for an error."""
    code = process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return f"shard {rank} of {count} (process {process.pid}) {how}; the executor cannot go on without it"


@dataclass(frozen=True)
class ShardSettings:
    """How each shard loads the model. All of it can be written as JSON, for processes that are started."""

    model: str
    model_class: str | None
    """Module and name of the class to load it with."""
    options: dict[str, Any]
    """Arguments of the class's ``from_pretrained``."""
    dtype: str | None
    device: str

    def load(self, check: Check | None = None) -> Any:
        """Return the whole model, mapped from its files where they have this precision."""
        module, _, name = (self.model_class or "").rpartition(".")
        return load_model(self.model, getattr(import_module(module), name) if module else None, check, **self.options)

    def device_of(self, rank: int) -> torch.device:
        """Return a shard's device: the GPU of its number on this host, where none is named."""
        device = torch.device(self.device)
        if device.type != "cuda" or ":" in self.device:
            return device
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))

    def split(self, names: list[str], rank: int, count: int) -> SplitModel:
        """Return the split model with the parts of one shard. Base layers are those of these names."""
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        return SplitModel(self.load(), names, shard=(rank, count), device=self.device_of(rank), dtype=dtype)


class Launch:
    """The shards of one executor, while they start.

    Processes are started unless ``torchrun`` has started as many; see its environment variables RANK and WORLD_SIZE.

    Args:
        count: number of shards.
        settings: how they load the model.

    Raises:
        UsageError: torchrun has started another number of processes, or torch has no torch.distributed.
    """

    def __init__(self, count: int, settings: ShardSettings) -> None:
        if not distributed.is_available():
            raise UsageError("this build of torch has no torch.distributed, which shards need")
        if count < 2:
            raise UsageError(f"shards is {count}; give a whole number: 2 or more, or 1 for an executor without shards")
        self.count, self.settings = count, settings
        self.rank, self._local = 0, "127.0.0.1"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self.closed = False
        self._folder = ""
        self._own_threads = torch.get_num_threads()
        if "RANK" in os.environ:
            if (started := os.environ.get("WORLD_SIZE")) != str(count):
                raise UsageError(f"torchrun has started {started} processes for {count} shards; give both one number")
            self.rank = int(os.environ["RANK"])
            self._local = socket.gethostbyname(socket.gethostname())

    def _start(self, threads: int) -> None:
        """Start the other processes."""
        self._folder = tempfile.mkdtemp(prefix="symbiosis-")
        common = {"count": self.count, "folder": self._folder, "threads": threads}
        for rank in range(1, self.count):
            memory = make_memory() if self.settings.device_of(rank).type == "cpu" else None
            inherited = () if memory is None else (memory,)
            process = subprocess.Popen([sys.executable, "-m", PROGRAM], stdin=subprocess.PIPE, pass_fds=inherited)
            self.processes[rank] = process
            if memory is not None:
                self._memory[rank] = map_memory(memory)
            assert process.stdin is not None
            given = {**asdict(self.settings), **common, "rank": rank, "memory": memory}
            process.stdin.write(json.dumps(given).encode() + b"\n")
            process.stdin.flush()  # and stays open: when it ends, so does the process

    def _threads(self) -> int:
        return max(torch.get_num_threads() // self.count, 1)

    def meet(self, then: Callable[[ShardGroup], object] = lambda group: None) -> ShardGroup:
        """Start the other processes, and return the group when all have come and ``then`` has returned.

        On CPUs each computes with its part of the threads from now on.

        Raises:
            ShardLostError: a shard has ended, or has not come in time.
            SymbiosisError: what ``then`` raises.
        """
        device = self.settings.device_of(self.rank)
        if "RANK" not in os.environ:
            threads = self._threads()
            self._start(threads)
            if device.type == "cpu":
                torch.set_num_threads(threads)
        found: list[ShardGroup] = []
        errors: list[Exception] = []

        def wait() -> None:  # on a thread, because nothing can end it
            try:
                group = ShardGroup(self._store(), self.rank, self.count, self._local, device, self._memory)
                then(group)
                found.append(group)
            except Exception as error:  # noqa: BLE001 (raised below)
                errors.append(error)

        waiting = threading.Thread(target=wait, name="symbiosis-shards", daemon=True)
        waiting.start()
        while waiting.is_alive():
            waiting.join(0.05)
            for rank, process in self.processes.items():
                if process.poll() is not None:
                    raise ShardLostError(ended(rank, self.count, process))
        if errors:
            if isinstance(errors[0], SymbiosisError):
                raise errors[0]
            raise ShardLostError(f"the {self.count} shards did not meet: {errors[0]}")
        return found[0]

    def _store(self) -> Any:
        if self._folder:
            return dist.FileStore(str(Path(self._folder) / "store"), self.count)
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, self.count, False, timedelta(seconds=MEET_WITHIN_S))
        return dist.PrefixStore("symbiosis", store)

    def close(self, at_once: bool = True) -> None:
        """End the processes that were started, and remove what they met at.

        Args:
            at_once: kill the processes, instead of waiting until they end.
        """
        self.closed = True
        if self.processes:
            torch.set_num_threads(self._own_threads)
        for process in self.processes.values():
            assert process.stdin is not None
            if at_once:
                process.kill()
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdin.close()
        self.forget()

    def forget(self) -> None:
        """Remove what the shards have met at, which they do not need any more."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
