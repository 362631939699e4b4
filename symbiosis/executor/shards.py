"""An executor's base model in several processes, its *shards*, each with a part of every base layer.

The first shard has the event loop, the scheduler and the clients. For each batch it tells the others the key and the
number of rows, sends them the rows, computes its own part meanwhile, and puts the results together
(:mod:`symbiosis.executor.parts`). The others execute these orders in sequence, so no collective operation can meet
another one. Orders and answers travel by gloo. Matrices lie in memory that two shards share, or travel by gloo between
CPUs and by NCCL between GPUs.

The first shard starts the others as processes, or finds itself among processes that ``torchrun`` has started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers

from symbiosis.core.requests import Key, Results
from symbiosis.errors import ShardLostError, SplitError
from symbiosis.executor.launch import Launch, ShardSettings, dist, ended
from symbiosis.executor.layers import BaseLayer
from symbiosis.executor.parts import Cut
from symbiosis.executor.shard_group import (
    END,
    HEADER,
    MOST_LAYERS,
    ShardGroup,
    empty,
    header_of,
    key_of,
    map_memory,
    messages_of,
)
from symbiosis.executor.splitting import SplitModel

log = logging.getLogger(__name__)


class Shards:
    """All shards, as the first of them sees them. An instance runs batches in place of a table of base layers.

    Args:
        split: the split model, with this shard's parts.
        launch: the shards, which meet now.

    Attributes:
        error: what :meth:`run` raises since another shard has ended; None before.
        lost: called once, on any thread, with that error.
    """

    def __init__(self, split: SplitModel, launch: Launch) -> None:
        self._launch = launch
        self._parts, self._processes = split.parts, launch.processes
        self._cut = Cut(split.specs, launch.count)
        self._lock = threading.Lock()
        self.error: ShardLostError | None = None
        self.lost: Callable[[ShardLostError], object] = lambda error: None
        self._group = launch.meet(partial(_agree, split))
        launch.forget()
        self._watching = [
            threading.Thread(target=self._watch, args=each, name="symbiosis-shard", daemon=True)
            for each in self._processes.items()
        ]
        for thread in self._watching:
            thread.start()

    def run(self, key: Key, tensors: Results) -> Results:
        """Return the results of base layers on rows; see :meth:`BaseLayer.run`.

        Raises:
            ShardLostError: a shard has ended.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            several = range(0, len(key.layers), MOST_LAYERS)
            parts = [key._replace(layers=key.layers[first : first + MOST_LAYERS]) for first in several]
            return tuple([result for part in parts for result in self._run(part, tensors)])

    def _run(self, key: Key, tensors: Results) -> Results:
        group, cut, rows = self._group, self._cut, len(tensors[0])
        others = range(1, group.count)
        messages, parts, to_receive = [], [], []
        for rank in others:  # memory that is lacking here fails this batch alone
            shapes = cut.shapes(key, rank)
            places = group.places(rank, rows, shapes)
            messages.append(messages_of(cut.call(key, tensors, rank), places and places.call))
            parts.append(places.answer if places else empty(rows, shapes.answer, group.device))
            to_receive += [] if places else [(rank, tensor) for tensor in parts[-1]]
        own: Results | Exception
        try:
            answers = [group.await_answer(rank) for rank in others]
            under_way = []
            for rank, call in zip(others, messages, strict=True):
                under_way += group.order(rank, header_of(key, rows), call)
            under_way += [group.receive(*one) for one in to_receive]  # NCCL's operations run in this order
        except RuntimeError as error:
            raise self._lose(self._reason(error, None)) from error
        try:
            own = run_parts(self._parts, key, cut.call(key, tensors, 0))
        except Exception as error:  # noqa: BLE001 (raised when the others have answered)
            own = error
        failed: list[int] = []
        waits_for: int | None = None
        try:
            for waits_for, answer in zip(others, answers, strict=True):
                if not answer.wait():
                    failed.append(waits_for)
            waits_for = None
            for work in under_way:
                group.finish(work)
        except RuntimeError as error:
            raise self._lose(self._reason(error, waits_for)) from error
        if isinstance(own, Exception):
            raise own
        if failed:
            raise RuntimeError(f"shard {failed[0]} of {group.count} did not compute its part; its log says why")
        return cut.together(key, [own, *parts])

    def _reason(self, error: RuntimeError, waited_for: int | None) -> str:
        """Return why a batch has no results, given the shard that was waited for."""
        for rank, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
                return ended(rank, self._group.count, process)
        which = "a shard" if waited_for is None else f"shard {waited_for} of {self._group.count}"
        return f"{which} cannot be reached any more: {str(error).partition(chr(10))[0][:200]}"

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._launch.closed:
            self._lose(ended(rank, self._group.count, process))

    def _lose(self, reason: str) -> ShardLostError:
        first = self.error is None
        error = self.error = self.error or ShardLostError(reason)
        if first and not self._launch.closed:
            log.error("%s", reason)
            self.lost(error)
        return error

    def close(self) -> None:
        """End the other shards."""
        if self._launch.closed:
            return
        self._launch.closed = True
        with contextlib.suppress(RuntimeError), self._lock:  # those that have ended cannot be told
            if self.error is None:
                for rank in range(1, self._group.count):
                    for work in self._group.order(rank, [END] * HEADER):
                        self._group.finish(work)
        self._launch.close(at_once=self.error is not None)
        for thread in self._watching:
            thread.join()  # its process has ended


def _agree(split: SplitModel, group: ShardGroup) -> None:
    """Tell the other shards the names of the base layers, and check that they have loaded the same weights.

    Raises:
        SplitError: one of them has not.
    """
    for rank in range(1, group.count):
        group.tell(rank, {"layers": [spec.name for spec in split.specs]})
    for rank in range(1, group.count):
        answer = group.hear(rank)
        if problem := answer.get("error"):
            raise SplitError(f"shard {rank} of {group.count}: {problem}")
        if answer["layers"] != split.fingerprints:
            raise SplitError(f"shard {rank} of {group.count} has loaded other weights; give all the same checkpoint")


def run_parts(parts: Sequence[BaseLayer], key: Key, tensors: Results) -> Results:
    """Return the results of the layers of a key, one after another."""
    with torch.no_grad():
        return tuple([result.contiguous() for layer in key.layers for result in parts[layer].run(key, tensors)])


def work(group: ShardGroup, settings: ShardSettings) -> None:
    """Be one of the other shards, until the first one says that it ends, or has ended."""
    names = group.hear(0)["layers"]
    try:
        split = settings.split(names, group.rank, group.count)
    except Exception as error:  # noqa: BLE001 (the first shard raises it)
        group.tell(0, {"error": f"{type(error).__name__}: {error}"[:500]})
        return
    group.tell(0, {"layers": split.fingerprints})
    cut, parts = Cut(split.specs, group.count), split.parts
    del split  # and with it what is not mapped of the model
    while (header := group.next_order())[0] != END:
        key, rows = key_of(header)
        shapes = cut.shapes(key, group.rank)
        places = group.places(0, rows, shapes)
        call = places.call if places else empty(rows, shapes.call, group.device)
        if not places:
            for one in [group.receive(0, tensor) for tensor in call]:
                group.finish(one)
        ok = True
        try:
            results = run_parts(parts, key, call)
        except Exception:  # the first shard answers the clients of this batch
            log.exception("a part of a batch of %d rows failed", rows)
            ok = False
            results = tuple([tensor.zero_() for tensor in empty(rows, shapes.answer, group.device)])
        for one in group.answer(ok, messages_of(results, places and places.answer)):
            group.finish(one)


def ignore_signals() -> None:
    """Leave Ctrl-C, SIGTERM and SIGHUP to the first shard, which tells the others when walks have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _end_with_the_first() -> None:
    """End this process when the one that has started it has ended, whatever it waits for."""
    while os.read(0, 1024):  # a buffered read on a thread would abort the process when it ends by itself
        pass
    os._exit(1)


def _main() -> None:
    """Be a shard that :class:`Launch` has started, with the settings on standard input."""
    given = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_first, name="symbiosis-first", daemon=True).start()
    rank, count, folder, threads = (given.pop(name) for name in ("rank", "count", "folder", "threads"))
    descriptor = given.pop("memory")
    memory = {} if descriptor is None else {0: map_memory(descriptor)}
    settings = ShardSettings(**given)
    logging.disable(logging.WARNING)  # the first shard gives the same warnings
    transformers.utils.logging.disable_progress_bar()
    ignore_signals()
    torch.set_num_threads(threads)
    device = settings.device_of(rank)
    store = dist.FileStore(str(Path(folder) / "store"), count)
    try:
        work(ShardGroup(store, rank, count, "127.0.0.1", device, memory), settings)
    except RuntimeError as error:
        sys.exit(f"shard {rank} of {count} ends: {str(error).partition(chr(10))[0][:300]}")


if __name__ == "__main__":
    _main()
