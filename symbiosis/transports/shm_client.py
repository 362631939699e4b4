"""The client's end of ``shm://`` connections, on an event loop and for threads that block."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from symbiosis.core.share import Share
from symbiosis.core.transport import Look
from symbiosis.errors import ConnectionLostError, RefusedError, UsageError, WireError
from symbiosis.transports import device, wire
from symbiosis.transports.arena import Arena
from symbiosis.transports.arena_carrier import ArenaCarrier, SegmentCarrier
from symbiosis.transports.carrier import Arrived, Lost, Message, Received
from symbiosis.transports.conversation import PING_AFTER_S
from symbiosis.transports.stream import MessageBuffer, frame
from symbiosis.transports.welcome import Welcome
from symbiosis.transports.wire import Hello, Type

__all__ = ["BlockingShmConnector", "ShmConnector", "look", "socket_path"]

ANSWER_WITHIN_S = 30.0
"""Seconds within which each answer of the handshake must come: an executor in a long batch does not answer sooner."""
MAX_PATH = 107
"""Bytes of a Unix socket's path, by the kernel's interface."""
SPIN_S, SOON_S = 100e-6, 150e-6
"""Seconds to poll for an answer without sleeping, if the last answer came within ``SOON_S``. A core that sleeps takes
40 µs to wake up (a call of one row: 92 µs with sleep, 41 µs without, in a virtual machine). After a slow answer the
executor is at a large matrix product and needs all cores."""


def socket_path(address: str) -> Path:
    """Return the path in ``shm:///path``.

    Raises:
        UsageError: it is not absolute, or longer than a Unix socket's may be.
    """
    path = address.removeprefix("shm://")
    if not path.startswith("/") or path.endswith("/"):
        raise UsageError(f"{address!r}: write shm:///absolute/path/of/the.sock")
    if len(os.fsencode(path)) > MAX_PATH:
        raise UsageError(
            f"{address!r}: a Unix socket's path has at most {MAX_PATH} bytes; this one has {len(os.fsencode(path))}"
        )
    return Path(path)


# The handshake


def _say_hello(address: str, hello: Hello) -> tuple[socket.socket, Welcome, list[int]]:
    """Connect and send HELLO. Return the socket, the welcome and the descriptors that came. Blocks."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        connected.settimeout(ANSWER_WITHIN_S)
        connected.connect(str(socket_path(address)))
        with contextlib.suppress(BrokenPipeError):  # rejected before it read HELLO; the reason is there to be read
            connected.sendall(frame(wire.pack_hello(hello)))
        messages = MessageBuffer(wire.MAX_TO_CLIENT)
        first, descriptors, _, _ = socket.recv_fds(connected, 1, 2)
        if not descriptors:
            messages.feed(first)
        welcome = Welcome.read(*_next(connected, messages), address)
        return connected, welcome, list(descriptors)
    except BaseException as error:
        connected.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, PermissionError):
            raise RefusedError(f"{address} belongs to another user") from error
        if isinstance(error, OSError):
            raise ConnectionLostError(f"no executor answers on {address}: {error.strerror or error}") from error
        raise


def _next(connected: socket.socket, messages: MessageBuffer) -> tuple[Type, Sequence[Any]]:
    while (message := messages.next()) is None:
        data = connected.recv(1 << 20)
        if not data:
            raise ConnectionResetError("it closed the connection")
        messages.feed(data)
    return wire.unpack_answer(message)


def look(address: str) -> Look:
    """Return what an executor shows without joining it. Blocks."""
    connected, welcome, _ = _say_hello(address, Hello(None))
    with connected:
        try:
            connected.sendall(frame(wire.pack(Type.STATUS)))
            type_, content = _next(connected, MessageBuffer(wire.MAX_TO_CLIENT))
        except OSError as error:
            raise ConnectionLostError(f"the executor at {address} closed the connection") from error
    return welcome.look(type_, content, address)


class _Joined(NamedTuple):
    """The outcome of a handshake."""

    socket: socket.socket
    welcome: Welcome
    arena: Arena
    share: Share | None

    def carrier(self, send: Callable[[Sequence[Any]], None]) -> ArenaCarrier | SegmentCarrier:
        """Return a carrier that uses the GPU's memory if both sides have the same GPU."""
        gpu = device.find(self.welcome.content.get("gpu"))
        if gpu is None:
            return ArenaCarrier(self.arena)
        return SegmentCarrier(gpu, self.arena.size, self.welcome.limits.arena_bytes, send)


def _join(address: str, hello: Hello, again: bool) -> _Joined:
    """Join an executor. Blocks."""
    connected, welcome, descriptors = _say_hello(address, hello)
    try:
        if len(descriptors) != 2:
            raise WireError(f"the executor at {address} sent {len(descriptors)} descriptors, not 2")
        size = welcome.content.get("arena_bytes")
        if type(size) is not int or not 0 < size <= os.fstat(descriptors[0]).st_size:
            raise WireError(f"the executor at {address} promises an arena of {size!r} bytes")
        arena = Arena(descriptors[0], size)
        share = None if again else welcome.share(lambda: _tensors(descriptors[1]))
        return _Joined(connected, welcome, arena, share)
    except BaseException:
        connected.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _tensors(descriptor: int) -> Mapping[str, torch.Tensor]:
    """Map the share privately: all clients have its pages in common until a process writes to them."""
    with safe_open(f"/proc/self/fd/{descriptor}", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


# On an event loop


class ShmConnector:
    """Opens connections to one executor on an event loop."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def join(self, hello: Hello, again: bool) -> _ShmConnection:
        loop = asyncio.get_running_loop()
        joining = loop.run_in_executor(None, _join, self._address, hello, again)
        try:
            joined = await asyncio.shield(joining)
        except asyncio.CancelledError:
            joining.add_done_callback(_abandon)
            raise
        joined.socket.setblocking(False)
        try:
            _, connection = await loop.create_unix_connection(
                lambda: _ShmConnection(self._address, joined), sock=joined.socket
            )
        except BaseException:
            joined.socket.close()
            raise
        return connection


def _abandon(joining: asyncio.Future[_Joined]) -> None:
    """Hang up after a handshake whose caller was cancelled."""
    if not joining.cancelled() and joining.exception() is None:
        joining.result().socket.close()


class _ShmConnection(asyncio.Protocol):
    """A connection on an event loop."""

    def __init__(self, address: str, joined: _Joined) -> None:
        self.welcome = joined.welcome
        self.share = joined.share
        self.carrier = joined.carrier(self.send)
        self._address = address
        self._messages = MessageBuffer(wire.MAX_TO_CLIENT)
        self._transport: Any = None
        self._received: Received | None = None
        self._lost: Lost | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def start(self, received: Received, lost: Lost, arrived: Arrived) -> None:
        self._received, self._lost = received, lost
        self._read_messages(b"")
        if self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self.connection_lost, None)

    def send(self, parts: Sequence[Any]) -> None:
        self._transport.write(frame(parts[0]))

    def data_received(self, data: bytes) -> None:
        if self._received is None:
            self._messages.feed(data)
        else:
            self._read_messages(data)

    def _read_messages(self, data: bytes) -> None:
        try:
            message = self._messages.only(data) or self._messages.next()
            while message is not None and self._received is not None:
                type_, content = wire.unpack_answer(message)
                self._received(type_, content, ())
                message = self._messages.next()
        except WireError as error:
            if self._lost is not None:
                self._lost(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self._lost is not None:
            self._lost(ConnectionLostError(f"the executor at {self._address} is gone"))

    def silent(self) -> bool:
        return False  # the kernel tells when the executor is gone

    def close(self) -> None:
        self._received = self._lost = None
        self._transport.close()


# For threads that block


class BlockingShmConnector:
    """Opens connections to one executor for threads that block."""

    def __init__(self, address: str) -> None:
        self._address = address

    def join(self, hello: Hello, again: bool) -> _BlockingShmConnection:
        return _BlockingShmConnection(self._address, _join(self._address, hello, again))


class _BlockingShmConnection:
    """A connection for threads that block: the calling thread itself writes to the socket and reads from it."""

    def __init__(self, address: str, joined: _Joined) -> None:
        self.welcome = joined.welcome
        self.share = joined.share
        self.carrier = joined.carrier(self.send)
        self._address = address
        self._messages = MessageBuffer(wire.MAX_TO_CLIENT)
        self._socket = joined.socket
        self._socket.settimeout(None)
        # A timeout in the kernel: Python's own would cost a second system call for each read.
        seconds = int(PING_AFTER_S).to_bytes(8, "little")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds + bytes(8))
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
                raise ConnectionLostError(f"the executor at {self._address} is gone")
            message = self._messages.only(data) or self._messages.next()
        self._quick = time.perf_counter() - self._sent < SOON_S
        return Message(*wire.unpack_answer(message), ())

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

    def close(self) -> None:
        self._socket.close()

    def abandon(self) -> None:
        self._socket.close()
