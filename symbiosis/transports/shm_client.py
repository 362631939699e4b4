"""The client's end of ``shm://``: carriers of tensors, and connections on an event loop and for threads that block.

The client decides what lies where. In host memory all of the arena is there from the start. If both sides have the same
GPU, tensors lie in a segment of its memory, which the carrier asks for (SEGMENT) when a call needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from symbiosis.core.requests import Results
from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import device, wire
from symbiosis.transports.arena import Arena, Memory, Places
from symbiosis.transports.connection import AsyncConnection, BlockingConnection, Carrier, Receiver, in_executor
from symbiosis.transports.conversation import PING_AFTER_S, Pending
from symbiosis.transports.device import Segment
from symbiosis.transports.joining import ANSWER_WITHIN_S, Message, exchange, joining
from symbiosis.transports.wire import CallMessage, Hello, MessageBuffer, Type, frame

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
        self.most_bytes = arena.end
        self._memory: Memory = arena
        self._places = Places(0, arena.end)

    def put(self, pending: Pending) -> list[bytes] | None:
        place = self._places.take(pending.size)
        if place is None:
            return None
        call, rows = pending.call, pending.rows
        widths, dtype, _ = pending.expected
        pending.place = place
        for matrix, tensor in zip(self._memory.matrices(place, rows, widths, dtype), call.tensors, strict=True):
            matrix.copy_(tensor)
        answer = place + pending.call_bytes
        return [wire.pack_call(CallMessage(pending.id, call.key, call.kind, rows, place, answer))]

    def take(self, pending: Pending, frames: Sequence[Any]) -> Results | None:
        rows = pending.rows
        _, dtype, results = pending.expected
        place = pending.place + pending.call_bytes
        return tuple([matrix.clone() for matrix in self._memory.matrices(place, rows, results, dtype)])

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
        self.most_bytes = limit
        self._arena = arena
        self._places = Places(0, 0)
        self._send = send
        self._segment: Segment | None = None
        self._asked = False
        """Whether a segment was asked for and has not come."""
        self._refused: UsageError | None = None
        """Why the executor gave no segment for the next call."""

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
            self._send([wire.pack(Type.SEGMENT, pending.size, True)])
        return None

    def take(self, pending: Pending, frames: Sequence[Any]) -> Results | None:
        assert self._segment is not None
        self._segment.wait(self._segment.answered)
        return super().take(pending, frames)

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is not Type.SEGMENT:
            super().control(type_, content)
        self._asked = False
        if len(content) == 1:
            self._refused = UsageError(f"the executor has no room for this client's tensors: {content[0]}")
            return
        self._memory = self._segment = segment = Segment.open(self.device, self._arena.end, self.most_bytes, content)
        self._places = Places(segment.start, segment.end)


class ShmConnection:
    """A connection whose first messages were exchanged: the constructor blocks.

    Raises:
        RefusedError: the socket belongs to another user.
        ConnectionLostError: no executor answers.
        SymbiosisError: another error of :func:`~symbiosis.transports.joining.joining`.
    """

    carrier: Carrier

    def __init__(self, address: str, hello: Hello, again: bool) -> None:
        self._address = address
        self._messages = MessageBuffer(wire.MAX_TO_CLIENT)
        self._descriptors: list[int] = []
        """The descriptors that have come with WELCOME: of the arena and of the share's file."""
        path = str(socket_path(address))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_WITHIN_S)
            self._socket.connect(path)
            joined = exchange(joining(address, hello, again), self._ask, self._next)
            self.welcome, self.share, self.look = joined
            if self.look is None:
                self._carry()
        except BaseException as error:
            self._socket.close()
            if isinstance(error, PermissionError):
                raise RefusedError(f"{address} belongs to another user") from error
            if isinstance(error, OSError):
                raise ConnectionLostError(f"no executor answers on {address}: {error.strerror or error}") from error
            raise
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)

    def _ask(self, message: bytes) -> None:
        """Send one of the first messages. If the executor has refused, its reason follows."""
        with contextlib.suppress(BrokenPipeError):
            self._socket.sendall(frame(message))

    def _next(self) -> Message:
        """Return the next of the first messages, and the descriptors that have come."""
        while (message := self._messages.next()) is None:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 20, 0 if self._descriptors else 2)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._descriptors += descriptors
            self._messages.feed(data[1:] if descriptors else data)
        return *wire.unpack_answer(message), self._descriptors

    def _carry(self) -> None:
        """Map the arena."""
        if len(self._descriptors) != 2:
            raise WireError(f"the executor at {self._address} sent {len(self._descriptors)} descriptors, not 2")
        size = self.welcome.content.get("arena_bytes")
        if type(size) is not int or not 0 < size <= os.fstat(self._descriptors[0]).st_size:
            raise WireError(f"the executor at {self._address} promises an arena of {size!r} bytes")
        arena = Arena(self._descriptors[0], size)
        gpu = device.find(self.welcome.content.get("gpu"))
        self.carrier = ArenaCarrier(arena)
        if gpu is not None:
            self.carrier = SegmentCarrier(arena, gpu, self.welcome.limits.arena_bytes, self.send)

    def send(self, parts: Sequence[Any]) -> None:
        self._socket.sendall(frame(parts[0]))

    def close(self) -> None:
        self._socket.close()

    def _gone(self) -> ConnectionLostError:
        return ConnectionLostError(f"the executor at {self._address} is gone")


async def join(address: str, hello: Hello, again: bool) -> AsyncConnection:
    """Connect and join; see :data:`symbiosis.transports.connection.Join`."""
    return await in_executor(partial(AsyncShmConnection, address, hello, again))


class AsyncShmConnection(ShmConnection, AsyncConnection):
    """A connection on an event loop.

    A Unix socket has room for some 280 small messages. While the executor is in a long batch and reads none, further
    messages wait here.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _unsent = b""

    def start(self, channel: Receiver) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)

    def send(self, parts: Sequence[Any]) -> None:
        waiting = bool(self._unsent)
        self._unsent += frame(parts[0])
        if not waiting:
            self._write()
            if self._unsent and self._loop is not None:
                self._loop.add_writer(self._socket, self._write_on)

    def _write(self) -> None:
        """Send what has room in the socket."""
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the connection has ended; the next read reports it
            self._unsent = b""

    def _write_on(self) -> None:
        self._write()
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(self._gone())
            return
        try:
            message = self._messages.only(data) or self._messages.next()
            while message is not None and self._loop is not None:
                self._channel.received(*wire.unpack_answer(message), ())
                message = self._messages.next()
        except WireError as error:
            self._end(error)

    def _end(self, error: SymbiosisError) -> None:
        if self._loop is not None:
            self._stop()
            self._channel.lost(error)

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._loop = None

    def close(self) -> None:
        self._stop()
        super().close()


class BlockingShmConnection(ShmConnection, BlockingConnection):
    """A connection for threads that block: the calling thread itself writes to the socket and reads from it."""

    def __init__(self, address: str, hello: Hello, again: bool) -> None:
        super().__init__(address, hello, again)
        self._socket.settimeout(None)
        # A timeout in the kernel: Python's own would cost a second system call for each read.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(PING_AFTER_S), 0))
        self._sent = 0.0
        self._quick = False
        """Whether the last answer came within SOON_S."""

    def send(self, parts: Sequence[Any]) -> None:
        self._socket.sendall(frame(parts[0]))
        self._sent = time.perf_counter()

    def receive(self) -> Message | None:
        message = self._messages.next()
        while message is None:
            try:
                data = (self._quick and self._poll()) or self._socket.recv(1 << 16)
            except BlockingIOError:
                return None
            if not data:
                raise self._gone()
            message = self._messages.only(data) or self._messages.next()
        self._quick = time.perf_counter() - self._sent < SOON_S
        return *wire.unpack_answer(message), ()

    def _poll(self) -> bytes | None:
        """Return what comes within SPIN_S, without sleeping."""
        recv = self._socket.recv
        end = time.perf_counter() + SPIN_S
        while time.perf_counter() < end:
            try:
                return recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        return None

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        self._socket.close()
