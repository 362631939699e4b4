"""The client's carrier of tensors for ``shm://``: matrices lie in an arena, or in segments of the GPU's memory.

The client decides what lies where. In host memory all of the arena is there from the start. On a GPU the carrier asks
the executor for segments (SEGMENT) as calls need them; when no call is outstanding and a call needs a larger segment
than the limit leaves room for, one segment replaces all that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbiosis.errors import UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.arena import Arena, Places
from symbiosis.transports.device import DeviceArena, Handles
from symbiosis.transports.outstanding import Pending, Results
from symbiosis.transports.wire import CallMessage, Type

__all__ = ["ArenaCarrier", "SegmentCarrier"]

_CPU = torch.device("cpu")


class ArenaCarrier:
    """Tensors in host memory."""

    device = _CPU

    def __init__(self, arena: Arena) -> None:
        self.most_bytes = arena.size
        self._arena = arena
        self._places = Places(0, arena.size)

    def put(self, pending: Pending) -> list[bytes] | None:
        place = self._places.take(pending.size)
        if place is None:
            return None
        call, rows = pending.call, pending.rows
        widths, dtype, _ = pending.expected
        pending.place = place
        for matrix, tensor in zip(self._arena.matrices(place, rows, widths, dtype), call.tensors, strict=True):
            matrix.copy_(tensor)
        answer = place + pending.call_bytes
        return [wire.pack_call(CallMessage(pending.id, call.key, call.kind, rows, place, answer))]

    def take(self, pending: Pending, frames: Sequence[Any]) -> Results | None:
        rows = pending.rows
        _, dtype, results = pending.expected
        place = pending.place + pending.call_bytes
        return tuple([matrix.clone() for matrix in self._arena.matrices(place, rows, results, dtype)])

    def free(self, pending: Pending) -> None:
        self._places.give_back(pending.place, pending.size)

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        raise WireError(f"{type_.name} is not for clients without a GPU of the executor's")


class SegmentCarrier:
    """Tensors in the GPU's memory.

    Args:
        device: the executor's GPU, as this process numbers it.
        start: the first place: the size of the arena in host memory.
        limit: bytes of all segments together.
        send: sends a message to the executor.
    """

    def __init__(self, device: torch.device, start: int, limit: int, send: Callable[[Sequence[Any]], None]) -> None:
        self.device = device
        self.most_bytes = limit
        self._start = start
        self._send = send
        self._memory = DeviceArena(device, start, limit)
        self._segments: list[Places] = []
        self._asked = False
        """Whether a segment was asked for and has not come."""
        self._refused: UsageError | None = None
        """Why the executor gave no segment for the next call."""

    def put(self, pending: Pending) -> list[bytes] | None:
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        place = self._place(pending.size)
        if place is None:
            self._ask(pending.size)
            return None
        call, rows, memory = pending.call, pending.rows, self._memory
        widths, dtype, _ = pending.expected
        pending.place = place
        memory.wait(memory.answered)  # another stream may still read an earlier answer there
        for matrix, tensor in zip(memory.matrices(place, rows, widths, dtype), call.tensors, strict=True):
            matrix.copy_(tensor)
        memory.record(memory.called)
        answer = place + pending.call_bytes
        return [wire.pack_call(CallMessage(pending.id, call.key, call.kind, rows, place, answer))]

    def _place(self, size: int) -> int | None:
        for segment in self._segments:
            place = segment.take(size)
            if place is not None:
                return place
        return None

    def _ask(self, size: int) -> None:
        """Ask for a segment, unless one is on its way or the limit leaves no room while calls are outstanding."""
        if self._asked:
            return
        idle = not any(segment.in_use for segment in self._segments)
        if not idle and sum(segment.size for segment in self._segments) + size > self.most_bytes:
            return
        if idle:
            self._memory = DeviceArena(self.device, self._start, self.most_bytes)
            self._segments.clear()
        self._asked = True
        self._send([wire.pack(Type.SEGMENT, size, idle)])

    def take(self, pending: Pending, frames: Sequence[Any]) -> Results | None:
        rows, memory = pending.rows, self._memory
        _, dtype, results = pending.expected
        memory.wait(memory.answered)
        place = pending.place + pending.call_bytes
        return tuple([matrix.clone() for matrix in memory.matrices(place, rows, results, dtype)])

    def free(self, pending: Pending) -> None:
        for segment in self._segments:
            if segment.start <= pending.place < segment.end:
                segment.give_back(pending.place, pending.size)

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is not Type.SEGMENT:
            raise WireError(f"{type_.name} is not for clients of shm://")
        self._asked = False
        if len(content) == 1:
            self._refused = UsageError(f"the executor has no room for this client's tensors: {content[0]}")
            return
        if [type(field) for field in content] != [int, int, bytes, bytes, bytes]:
            raise WireError("the executor sent a malformed SEGMENT")
        start = self._memory.open(Handles(*content))
        self._segments.append(Places(start, self._memory.end))
