"""What goes between the shards of an executor: orders, and answers with results (:mod:`symbiosis.executor.shards`).

An order is a header of 64 numbers, which names a key and the rows of its call. An answer is a number, which tells
whether the shard has computed its part. Matrices lie in memory that both shards have mapped, if they fit there, and
otherwise follow as messages. gloo sends nothing before the other side receives, so each shard awaits the next order
while it computes.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed

from symbiosis.core.requests import Columns, Expected, Key, Pass, Results
from symbiosis.process_groups import gloo, nccl

dist: Any = distributed  # its types leave the stores out

MEET_WITHIN_S = 600.0
"""Seconds within which all shards must have loaded their parts."""
WITHIN_S = 600.0
"""Seconds that one send or receive may take. Tenants choose the experts, so one shard may compute a whole batch while
the others wait. A shard that has ended is noticed at once."""
_TOLD, _ROWS, _ANSWER = range(3)
"""Tags of orders and what is told at the start, of matrices, and of answers. NCCL knows no tags, and has a group for
matrices alone."""
HEADER = 64
"""Numbers of a header."""
MOST_LAYERS = 32
"""Layers that a header names."""
_SHARED_BYTES = 64 << 20
"""Size of the memory that the first shard shares with another one. Two shards need 24 MiB of it for 2,048 rows of a
layer of 4096 × 4096 in bf16. Pages that were never written take no memory."""
_ALIGNED = 64
"""Bytes: where matrices begin in this memory."""
_FOREVER = timedelta(days=10_000)
RUN, END = 1, 0


class Places(NamedTuple):
    """Where the matrices of a call and of its answer lie in memory that two shards share."""

    call: Results
    answer: Results


class ShardGroup:
    """The process group of all shards.

    Args:
        store: where the shards meet.
        rank, count: this shard and the number of all.
        local: IP address of this shard, for gloo.
        device: where its tensors are.
        memory: what this process shares with other shards, by their ranks; see :func:`map_memory`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        count: int,
        local: str,
        device: torch.device,
        memory: Mapping[int, torch.Tensor],
    ) -> None:
        self.rank, self.count, self.device = rank, count, device
        self._memory = memory
        self._coming: tuple[torch.Tensor, Any] | None = None
        self._told = gloo(dist.PrefixStore("told", store), rank, count, local, MEET_WITHIN_S)
        cuda = device.type == "cuda"
        self._rows = nccl(dist.PrefixStore("rows", store), rank, count, WITHIN_S) if cuda else self._told
        for other in [0] if rank else range(1, count):  # NCCL connects two shards at their first message, by the store
            one = torch.zeros(1, device=device)
            self.finish(self.receive(0, one) if rank else self._rows.send([one], other, _ROWS))

    def tell(self, rank: int, value: Any) -> None:
        """Send plain data as JSON."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self._told.send([torch.tensor([len(data)], device="cpu")], rank, 0).wait(timedelta(seconds=WITHIN_S))
        self._told.send([data], rank, 0).wait(timedelta(seconds=WITHIN_S))

    def hear(self, rank: int) -> Any:
        """Return what a shard tells, within the time for loading."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self._told.recv([length], rank, 0).wait(timedelta(seconds=MEET_WITHIN_S))
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self._told.recv([data], rank, 0).wait(timedelta(seconds=WITHIN_S))
        return json.loads(bytes(data.numpy()))

    def places(self, rank: int, rows: int, shapes: Expected) -> Places | None:
        """Return where the matrices of a call and of its answer lie in the memory shared with a shard. Return None if
        they do not fit, or no memory is shared: then they are messages."""
        memory = self._memory.get(rank)
        if memory is None:
            return None
        found, start = [], 0
        for width, dtype in (*shapes.call, *shapes.answer):
            end = start + rows * width * dtype.itemsize
            if end > len(memory):
                return None
            found.append(memory[start:end].view(dtype).view(rows, width))
            start = -(-end // _ALIGNED) * _ALIGNED
        calls = len(shapes.call)
        return Places(tuple(found[:calls]), tuple(found[calls:]))

    def order(self, rank: int, header: Sequence[int], messages: Results = ()) -> list[Any]:
        """Begin to send a header, and matrices of its call as messages. Return what to :meth:`finish`."""
        return self._send(rank, _TOLD, header, messages)

    def answer(self, ok: bool, messages: Results) -> list[Any]:
        """Begin to send the first shard whether this one has computed its part, and matrices of the answer as messages.
        Return what to :meth:`finish`."""
        return self._send(0, _ANSWER, [ok], messages)

    def _send(self, rank: int, tag: int, numbers: Sequence[int], messages: Results) -> list[Any]:
        sent = [self._told.send([torch.tensor(numbers, dtype=torch.int64, device="cpu")], rank, tag)]
        return sent + [self._rows.send([message], rank, _ROWS) for message in messages]

    def _await(self, rank: int, tag: int, numbers: int) -> tuple[torch.Tensor, Any]:
        message = torch.empty(numbers, dtype=torch.int64, device="cpu")
        return message, self._told.recv([message], rank, tag)

    def next_order(self) -> list[int]:
        """Return the next header of the first shard, whenever it comes.

        gloo sends nothing before the other side receives, so the one after it is awaited from now on.
        """
        message, coming = self._coming or self._await(0, _TOLD, HEADER)
        coming.wait(_FOREVER)
        self._coming = self._await(0, _TOLD, HEADER)
        return message.tolist()

    def await_answer(self, rank: int) -> Answer:
        """Begin to receive whether a shard has computed its part."""
        return Answer(*self._await(rank, _ANSWER, 1))

    def receive(self, rank: int, tensor: torch.Tensor) -> Any:
        """Begin to receive a matrix."""
        return self._rows.recv([tensor], rank, _ROWS)

    def finish(self, work: Any) -> None:
        """Wait until an operation is over; on a GPU, have its stream wait."""
        if self.device.type == "cuda":
            work.wait()
        else:
            work.wait(timedelta(seconds=WITHIN_S))


@dataclass(frozen=True)
class Answer:
    """An answer that is under way: its number, and what to wait for."""

    message: torch.Tensor
    coming: Any

    def wait(self) -> bool:
        """Wait for the message, and return whether the shard has computed its part."""
        self.coming.wait(timedelta(seconds=WITHIN_S))
        return bool(self.message.item())


def make_memory() -> int | None:
    """Return the descriptor of memory for two shards to map; None on systems without memfd."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("symbiosis-shards", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _SHARED_BYTES)
    return descriptor


def map_memory(descriptor: int) -> torch.Tensor:
    """Return this memory as bytes, and close the descriptor."""
    memory = mmap.mmap(descriptor, _SHARED_BYTES)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def messages_of(tensors: Results, places: Results | None) -> Results:
    """Copy matrices to their places in shared memory, and return no message. Without places, return the matrices, each
    contiguous, as messages."""
    if places is None:
        return tuple([tensor.contiguous() for tensor in tensors])
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)
    return ()


def header_of(key: Key, rows: int) -> list[int]:
    """Return HEADER numbers that tell a shard what to run."""
    layers, pass_, fp32, choices = key
    numbers = [RUN, pass_, fp32, choices, rows, len(layers), *layers]
    return numbers + [0] * (HEADER - len(numbers))


def key_of(header: Sequence[int]) -> tuple[Key, int]:
    """Return what a header tells a shard to run, and the number of rows."""
    _, pass_, fp32, choices, rows, count, *layers = header
    return Key(tuple(layers[:count]), Pass(pass_), bool(fp32), choices), rows


def empty(rows: int, columns: Sequence[Columns], device: torch.device) -> Results:
    """Return matrices (rows × width) whose numbers are still to be received."""
    return tuple([torch.empty(rows, width, dtype=dtype, device=device) for width, dtype in columns])
