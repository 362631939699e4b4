"""What goes between the shards of an executor: orders, rows, reports and results (:mod:`symbiosis.executor.shards`).

An order is a header of 64 numbers, which names a key and the rows of its call. Small matrices go with it. gloo sends
nothing before the other side receives, so each shard awaits the next order while it computes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from symbiosis.core.requests import Columns, Key, Pass, Results
from symbiosis.process_groups import gloo, nccl

dist: Any = distributed  # its types leave the stores out

MEET_WITHIN_S = 600.0
"""Seconds within which all shards must have loaded their parts."""
WITHIN_S = 600.0
"""Seconds that an operation of a batch may take. All of a batch's work may be at one shard, if tenants choose experts
so. A shard that has ended is noticed at once."""
_ROWS, _REPORT = 1, 2
"""Tags of rows and results, and of whether a part was computed; what is told has 0. NCCL knows no tags, and has a group
for rows alone."""
_HEADER_BYTES = 64 * 8
MOST_LAYERS = 32
"""Layers that a header names."""
_INLINE_BYTES = 1 << 16
"""Largest matrices that go with the header, on CPUs: rows of clients that decode."""
_FOREVER = timedelta(days=10_000)
RUN, END = 1, 0


class ShardGroup:
    """The process group of all shards.

    Args:
        store: where the shards meet.
        rank, count: this shard and the number of all.
        local: IP address of this shard, for gloo.
        device: where its tensors are.
    """

    def __init__(self, store: Any, rank: int, count: int, local: str, device: torch.device) -> None:
        self.rank, self.count, self.device = rank, count, device
        self._coming: tuple[torch.Tensor, Any] | None = None
        self._told = gloo(dist.PrefixStore("told", store), rank, count, local, MEET_WITHIN_S)
        cuda = device.type == "cuda"
        self._rows = nccl(dist.PrefixStore("rows", store), rank, count, WITHIN_S) if cuda else self._told

    def tell(self, rank: int, value: Any) -> None:
        """Send plain data as JSON."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self._told.send([torch.tensor([len(data)])], rank, 0).wait(timedelta(seconds=WITHIN_S))
        self._told.send([data], rank, 0).wait(timedelta(seconds=WITHIN_S))

    def hear(self, rank: int) -> Any:
        """Return what a shard tells, within the time for loading."""
        length = torch.empty(1, dtype=torch.int64)
        self._told.recv([length], rank, 0).wait(timedelta(seconds=MEET_WITHIN_S))
        data = torch.empty(int(length), dtype=torch.uint8)
        self._told.recv([data], rank, 0).wait(timedelta(seconds=WITHIN_S))
        return json.loads(bytes(data.numpy()))

    def order(self, rank: int, header: Sequence[int], tensors: Results = ()) -> list[Any]:
        """Begin to send a header, and the matrices of a call with it or after it. Return what to :meth:`finish`."""
        inline = _inline(header[-1], self.device)
        message = torch.empty(_HEADER_BYTES + (header[-1] if inline else 0), dtype=torch.uint8)
        message[:_HEADER_BYTES].view(torch.int64)[:] = torch.tensor(header)
        if inline:
            for tensor, place in zip(tensors, _places(tensors), strict=True):
                message[place] = tensor.reshape(-1).view(torch.uint8)
        sent = [self._told.send([message], rank, 0)]
        return sent if inline else sent + [self.send(rank, tensor) for tensor in tensors]

    def _await(self) -> tuple[torch.Tensor, Any]:
        message = torch.empty(_HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        return message, self._told.recv([message], 0, 0)

    def next_order(self) -> tuple[list[int], torch.Tensor]:
        """Return the next header of the first shard, whenever it comes, and the message that has it.

        gloo sends nothing before the other side receives, so the one after it is awaited from now on.
        """
        message, coming = self._coming or self._await()
        coming.wait(_FOREVER)
        self._coming = self._await()
        return message[:_HEADER_BYTES].view(torch.int64).tolist(), message

    def take(self, header: Sequence[int], message: torch.Tensor, tensors: Results) -> None:
        """Fill the matrices of a call that was ordered."""
        if _inline(header[-1], self.device):
            for tensor, place in zip(tensors, _places(tensors), strict=True):
                tensor.view(-1).view(torch.uint8)[:] = message[place]
            return
        for one in [self.receive(0, tensor) for tensor in tensors]:
            self.finish(one)

    def report(self, ok: bool) -> Any:
        """Tell the first shard whether this one has computed its part."""
        return self._told.send([torch.tensor([ok], dtype=torch.uint8)], 0, _REPORT)

    def await_report(self, rank: int) -> tuple[torch.Tensor, Any]:
        """Return where a shard's report will be, and what to wait for."""
        report = torch.empty(1, dtype=torch.uint8)
        return report, self._told.recv([report], rank, _REPORT)

    def send(self, rank: int, tensor: torch.Tensor) -> Any:
        return self._rows.send([tensor], rank, _ROWS)

    def receive(self, rank: int, tensor: torch.Tensor) -> Any:
        return self._rows.recv([tensor], rank, _ROWS)

    def finish(self, work: Any) -> None:
        """Wait until an operation is over; on a GPU, have its stream wait."""
        if self.device.type == "cuda":
            work.wait()
        else:
            work.wait(timedelta(seconds=WITHIN_S))


def header_of(key: Key, rows: int, call: Results) -> list[int]:
    """Return 64 numbers that tell a shard what to run, and how many bytes its matrices have."""
    layers, pass_, fp32, choices = key
    numbers = [RUN, pass_, fp32, choices, rows, len(layers), *layers]
    places = _places(call)
    return numbers + [0] * (63 - len(numbers)) + [places[-1].stop - _HEADER_BYTES]


def _inline(size: int, device: torch.device) -> bool:
    """Return whether matrices of so many bytes go with the header."""
    return device.type != "cuda" and size <= _INLINE_BYTES


def _places(tensors: Results) -> list[slice]:
    """Return where matrices are in a message behind its header, each at a multiple of 8 bytes."""
    places, start = [], _HEADER_BYTES
    for tensor in tensors:
        places.append(slice(start, start + tensor.nbytes))
        start += tensor.nbytes + -tensor.nbytes % 8
    return places


def key_of(header: Sequence[int]) -> tuple[Key, int]:
    """Return what a header tells a shard to run, and the number of rows."""
    _, pass_, fp32, choices, rows, count, *layers = header
    return Key(tuple(layers[:count]), Pass(pass_), bool(fp32), choices), rows


def empty(rows: int, columns: Columns, device: torch.device) -> torch.Tensor:
    """Return a matrix (rows × columns.width) whose numbers are still to be received."""
    return torch.empty(rows, columns.width, dtype=columns.dtype, device=device)
