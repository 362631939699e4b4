"""The client's end of ``shm://``: carriers of tensors, and connections on an event loop and for threads that block.

The client decides what lies where. In host memory all of the arena is there from the start. If both sides have the same
GPU, tensors lie in a segment of its memory, which the carrier asks for (SEGMENT) when a call needs it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from symbiosis.core.requests import Results
from symbiosis.errors import ConnectionLostError, RefusedError, UsageError, WireError
from symbiosis.transports import device, wire
from symbiosis.transports.arena import Arena, Memory, Places, check_sealed
from symbiosis.transports.connection import Carrier
from symbiosis.transports.conversation import Pending
from symbiosis.transports.device import Segment
from symbiosis.transports.joining import ANSWER_WITHIN_S, Message, joining
from symbiosis.transports.sockets import peer_of
from symbiosis.transports.stream import ByteStream
from symbiosis.transports.stream_client import AsyncStreamClient, BlockingStreamClient, StreamClient
from symbiosis.transports.wire import CallMessage, Hello, Type

MAX_PATH = 107
"""Bytes of a Unix socket's path, by the kernel's interface."""
SPIN_S, SOON_S = 100e-6, 150e-6
"""Seconds to poll for an answer without sleeping, if the last answer came within ``SOON_S``. A core that sleeps takes
40 µs to wake up (a call of one row: 92 µs with sleep, 41 µs without, in a virtual machine). After a slow answer the
executor is at a large matrix product and needs all cores."""


def socket_path(address: str) -> Path:
    """Return the path in ``shm:///path``. Raises UsageError if it is not absolute, or too long for a Unix socket."""
    path = address.removeprefix("shm://")
    if not path.startswith("/") or path.endswith("/"):
        raise UsageError(f"{address!r}: write shm:///absolute/path/of/the.sock")
    if len(os.fsencode(path)) > MAX_PATH:
        raise UsageError(
            f"{address!r}: a Unix socket's path has at most {MAX_PATH} bytes; this one has {len(os.fsencode(path))}"
        )
    return Path(path)


class ArenaCarrier(Carrier):
    """Tensors in host memory."""

    def __init__(self, arena: Arena) -> None:
        self._memory: Memory = arena
        self._places = Places(0, arena.end)

    def put(self, pending: Pending) -> list[bytes] | None:
        place = self._places.take(pending.size)
        if place is None:
            return None
        call, rows = pending.call, pending.rows
        pending.place = place
        matrices = self._memory.matrices(place, rows, pending.expected.call)
        try:
            for matrix, tensor in zip(matrices, call.tensors, strict=True):
                matrix.copy_(tensor)
        except BaseException:
            self.free(pending)
            raise
        answer = place + pending.call_bytes
        return [wire.pack_call(CallMessage(pending.id, call.key, call.kind, rows, place, answer))]

    def take(self, pending: Pending, attached: Sequence[Any]) -> Results | None:
        place = pending.place + pending.call_bytes
        results = self._memory.matrices(place, pending.rows, pending.expected.answer)
        return tuple([matrix.clone() for matrix in results])

    def free(self, pending: Pending) -> None:
        self._places.give_back(pending.place, pending.size)


class SegmentCarrier(ArenaCarrier):
    """Tensors in the GPU's memory.

    Args:
        arena: the arena in host memory, whose places come first.
        gpu: the executor's GPU, as this process numbers it.
        limit: largest segment in bytes.
        send: sends a message to the executor.
    """

    def __init__(self, arena: Arena, gpu: torch.device, limit: int, send: Callable[[Sequence[Any]], None]) -> None:
        super().__init__(arena)
        self.device = gpu
        self._limit = limit
        self._arena = arena
        self._places = Places(0, 0)
        self._send = send
        self._segment: Segment | None = None
        self._asked = False
        """Whether a segment was asked for and has not come."""
        self._refused: UsageError | None = None
        """Why there is no segment for the next call."""

    def put(self, pending: Pending) -> list[bytes] | None:
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        segment = self._segment
        if segment is not None:
            segment.wait(segment.answered)  # another stream may still read an earlier answer there
            parts = super().put(pending)
            if parts is not None:
                segment.record(segment.called)
                return parts
        if not self._asked and self._places.unused:
            self._segment, self._memory = None, self._arena  # the old segment is freed first
            self._places = Places(0, 0)
            self._asked = True
            self._send([wire.pack(Type.SEGMENT, pending.size)])
        return None

    def take(self, pending: Pending, attached: Sequence[Any]) -> Results | None:
        assert self._segment is not None
        self._segment.wait(self._segment.answered)
        return super().take(pending, attached)

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is not Type.SEGMENT:
            super().control(type_, content)
        self._asked = False
        if len(content) == 1:
            self._refused = UsageError(f"the executor has no room for this client's tensors: {content[0]}")
            return
        try:
            segment = Segment.open(self.device, self._arena.end, self._limit, content)
        except RuntimeError as error:  # of CUDA
            self._refused = UsageError(f"this client cannot map the executor's memory on {self.device}: {error}")
            return
        self._memory = self._segment = segment
        self._places = Places(segment.start, segment.end)


class ShmConnection(StreamClient):
    """A connection whose first messages were exchanged: the constructor blocks.

    Raises:
        RefusedError: this user may not connect to the socket, or another user listens there.
        ConnectionLostError: no executor answers.
        SymbiosisError: another error of :func:`~symbiosis.transports.joining.joining`.
    """

    carrier: Carrier

    def __init__(self, address: str, hello: Hello, again: bool) -> None:
        super().__init__(address)
        self._stream = ByteStream(wire.MAX_TO_CLIENT)
        self._descriptors: list[int] = []
        """The descriptors that have come with WELCOME: of the arena and of the share's file."""
        path = str(socket_path(address))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_WITHIN_S)
            self._socket.connect(path)
            self._check_user()
            self._exchange(joining(address, hello, again))
            if self.look is None:
                self._carry()
        except BaseException as error:
            self._socket.close()
            if isinstance(error, PermissionError):
                raise RefusedError(f"{address}: the socket or a folder above it belongs to another user") from error
            if isinstance(error, OSError):
                raise ConnectionLostError(f"no executor answers on {address}: {error.strerror or error}") from error
            raise
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)

    def _check_user(self) -> None:
        """Raise RefusedError if the executor is neither this user's nor root's. It would get this client's rows. Root
        may connect to any."""
        own, (_, user) = os.geteuid(), peer_of(self._socket)
        if own != 0 and user not in (own, 0):
            raise RefusedError(f"{self.address}: user {user} listens there, and not this user ({own}) or root")

    def _first(self) -> Message:
        type_, content, _ = super()._first()
        return type_, content, self._descriptors

    def _fill(self) -> None:
        self._wait()
        room = self._stream.room()
        data, descriptors, _, _ = socket.recv_fds(self._socket, len(room), 0 if self._descriptors else 2)
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._descriptors += descriptors
        for descriptor in descriptors:
            check_sealed(descriptor)
        data = data[1:] if descriptors else data
        room[: len(data)] = data
        self._stream.filled(len(data))

    def _carry(self) -> None:
        """Map the arena."""
        if len(self._descriptors) != 2:
            raise WireError(f"the executor at {self.address} sent {len(self._descriptors)} descriptors, not 2")
        size = self.welcome.content.get("arena_bytes")
        there = os.fstat(self._descriptors[0]).st_size
        if type(size) is not int or not self.welcome.limits.arena_bytes <= size <= there:
            raise WireError(f"the executor at {self.address} promises an arena of {size!r} bytes")
        arena = Arena(self._descriptors[0], size)
        gpu = device.find(self.welcome.content.get("gpu"))
        self.carrier = ArenaCarrier(arena)
        if gpu is not None:
            self.carrier = SegmentCarrier(arena, gpu, self.welcome.limits.arena_bytes, self.send)


class AsyncShmConnection(AsyncStreamClient, ShmConnection):
    """A connection on an event loop."""

    async def attach(self) -> None:
        self._socket.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)


class BlockingShmConnection(BlockingStreamClient, ShmConnection):
    """A connection for threads that block."""

    def __init__(self, address: str, hello: Hello, again: bool) -> None:
        ShmConnection.__init__(self, address, hello, again)
        self._begin()
        self._sent = 0.0
        self._quick = False
        """Whether the last answer came within SOON_S."""

    def send(self, parts: Sequence[Any]) -> None:
        super().send(parts)
        self._sent = time.perf_counter()

    def receive(self) -> Message | None:
        message = super().receive()
        self._quick = time.perf_counter() - self._sent < SOON_S
        return message

    def _read(self, room: memoryview) -> int:
        if self._quick:  # poll for SPIN_S, without sleeping
            receive, end = self._socket.recv_into, time.perf_counter() + SPIN_S
            while time.perf_counter() < end:
                try:
                    return receive(room, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
        return self._socket.recv_into(room)
