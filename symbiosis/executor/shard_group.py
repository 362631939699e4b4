"""What goes between the shards of an executor: orders, and answers with results (:mod:`symbiosis.executor.shards`).

An order is a header of 64 numbers, which names a key and the rows of its call. An answer is a number, which tells
whether the shard has computed its part. On CPUs, small matrices go in the same message, and others after it. gloo sends
nothing before the other side receives, so each shard awaits the next order while it computes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
"""Seconds that one send or receive may take. Tenants choose the experts, so one shard may compute a whole batch while
the others wait. A shard that has ended is noticed at once."""
_TOLD, _ROWS, _ANSWER = range(3)
"""Tags of orders and what is told at the start, of matrices, and of answers. NCCL knows no tags, and has a group for
matrices alone."""
_NUMBER = 8  # bytes
_HEADER_BYTES = 64 * _NUMBER
MOST_LAYERS = 32
"""Layers that a header names."""
_INLINE_BYTES = 1 << 16
"""Size of the largest matrices of an order or an answer that go in its message: rows of clients that decode."""
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
        """Begin to send a header and the matrices of a call. Return what to :meth:`finish`."""
        return self._send(rank, _TOLD, header, tensors)

    def answer(self, ok: bool, tensors: Results) -> list[Any]:
        """Begin to send the first shard whether this one has computed its part, and the matrices. Return what to
        :meth:`finish`."""
        return self._send(0, _ANSWER, [ok], tensors)

    def _send(self, rank: int, tag: int, numbers: Sequence[int], tensors: Results) -> list[Any]:
        inline = tensors if self._is_inline(tensors) else ()
        parts = [torch.tensor(numbers, dtype=torch.int64), *inline]
        message = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        sent = [self._told.send([message], rank, tag)]
        return sent if inline else sent + [self._rows.send([tensor], rank, _ROWS) for tensor in tensors]

    def _is_inline(self, tensors: Results) -> bool:
        """Return whether matrices go in the message of their order or answer."""
        return self.device.type != "cuda" and sum(tensor.nbytes for tensor in tensors) <= _INLINE_BYTES

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

    def take(self, message: torch.Tensor, tensors: Results) -> None:
        """Fill the matrices of a call that was ordered."""
        if self._is_inline(tensors):
            _fill(tensors, message[_HEADER_BYTES:])
            return
        for one in [self.receive(0, tensor) for tensor in tensors]:
            self.finish(one)

    def await_answer(self, rank: int, tensors: Results) -> Answer:
        """Begin to receive an answer. Its matrices are received here if they are in its message."""
        inline = tensors if self._is_inline(tensors) else ()
        message = torch.empty(_NUMBER + sum(tensor.nbytes for tensor in inline), dtype=torch.uint8)
        return Answer(message, self._told.recv([message], rank, _ANSWER), inline, () if inline else tensors)

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
    """An answer that is under way.

    Attributes:
        message: its number, and the matrices in it.
        coming: what to wait for.
        inline: the matrices in it.
        after: the matrices that come after it.
    """

    message: torch.Tensor
    coming: Any
    inline: Results
    after: Results

    def wait(self) -> bool:
        """Wait for the message, fill the matrices in it, and return whether the shard has computed its part."""
        self.coming.wait(timedelta(seconds=WITHIN_S))
        _fill(self.inline, self.message[_NUMBER:])
        return bool(self.message[:_NUMBER].view(torch.int64).item())


def _fill(tensors: Results, data: torch.Tensor) -> None:
    """Copy bytes to contiguous matrices, one after another."""
    start = 0
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8).copy_(data[start : start + tensor.nbytes])
        start += tensor.nbytes


def header_of(key: Key, rows: int) -> list[int]:
    """Return 64 numbers that tell a shard what to run."""
    layers, pass_, fp32, choices = key
    numbers = [RUN, pass_, fp32, choices, rows, len(layers), *layers]
    return numbers + [0] * (64 - len(numbers))


def key_of(header: Sequence[int]) -> tuple[Key, int]:
    """Return what a header tells a shard to run, and the number of rows."""
    _, pass_, fp32, choices, rows, count, *layers = header
    return Key(tuple(layers[:count]), Pass(pass_), bool(fp32), choices), rows


def empty(rows: int, columns: Columns, device: torch.device) -> torch.Tensor:
    """Return a matrix (rows × columns.width) whose numbers are still to be received."""
    return torch.empty(rows, columns.width, dtype=columns.dtype, device=device)
