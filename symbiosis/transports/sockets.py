"""ZeroMQ sockets on an event loop, and what both ends of ``tcp://`` do with them.

A ZeroMQ socket has a descriptor that becomes readable when something *happened*, not while something is there to be
read. So after each wake-up, and after each send, whatever has come must be taken (:class:`Reader`). With plain sockets
this costs a fifth of what futures for each message do, and works on any loop that has ``add_reader``.

Signs of life are *bytes*, not messages: both ends have ZeroMQ send a heartbeat every second or two from its own thread,
however busy Python is, and the kernel knows when the last byte came (:func:`received`). A matrix that takes a minute on
a slow line is no silence; a frozen process is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket as sockets
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from symbiosis.errors import ConnectionLostError, UsageError, WireError
from symbiosis.transports.wire import ALIGN

__all__ = [
    "Endpoint",
    "Reader",
    "Received",
    "configure",
    "local_ip",
    "matrices",
    "monitor",
    "payload",
    "read_event",
    "received",
    "resolve",
    "the_connection",
]

HEARTBEAT_MS = 1500
SILENT_S = 6.0
"""A connection without a byte for so long is dead: four heartbeats."""
HANDSHAKE_MS = 10_000
_AT_ONCE = 64
"""Messages taken before everything else on the loop gets its turn."""

Frames = Sequence[zmq.Frame]


# ---------------------------------------------------------------------------------------------------------- addresses


class Endpoint(NamedTuple):
    """Where ``tcp://host:port`` or ``dist://host:port`` is; as text, ``host:port``."""

    ip: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether it can be reached from this host alone."""
        return ipaddress.ip_address(self.ip.partition("%")[0]).is_loopback

    @property
    def v6(self) -> bool:
        return ":" in self.ip

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.v6 else f"{self.ip}:{self.port}"


async def resolve(address: str) -> Endpoint:
    """``scheme://host:port`` → its IP address and port.

    Raises:
        UsageError: it is not of this form.
        ConnectionLostError: there is no such host.
    """
    scheme, _, where = address.partition("://")
    host, colon, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r}: write {scheme}://host:port, such as {scheme}://127.0.0.1:7000")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=sockets.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConnectionLostError(f"{address}: there is no host {host!r}: {error}") from error
    return Endpoint(str(found[0][4][0]), int(port))


# ------------------------------------------------------------------------------------------------------------ sockets


def configure(socket: zmq.Socket[bytes], *, v6: bool, max_frame_bytes: int) -> None:
    """What both ends set before they bind or connect."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(v6))
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    # ZeroMQ's own patience counts whole messages, and a large one may take long; see the module's documentation.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 600_000)


class Reader:
    """Hands on what a ZeroMQ socket receives, message by message, on an event loop."""

    def __init__(
        self, socket: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop, received: Callable[[list[zmq.Frame]], None]
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._received = received
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._soon: asyncio.Handle | None = None
        self._closed = False
        loop.add_reader(self._descriptor, self._ready)
        self._look_again()

    def send(self, parts: Sequence[Any]) -> None:
        """Send a message of bytes, buffers and frames, without waiting and without copying the large ones.

        Raises:
            zmq.Again: the other side does not take what was sent before.
            zmq.ZMQError: the other side is gone (a ROUTER's).
        """
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        finally:
            if self._soon is None and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._look_again()  # sending has eaten the wake-up

    def drain(self) -> None:
        """Take now what has come."""
        if not self._closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._ready()

    def _look_again(self) -> None:
        if self._soon is None and not self._closed:
            self._soon = self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        more = True  # also if somebody raises
        try:
            for _ in range(_AT_ONCE):
                if self._closed:
                    return
                try:
                    frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    more = False
                    return
                self._received(frames)
        finally:
            if more:
                self._look_again()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket too; what was sent may linger."""
        if not self._closed:
            self.release().close(linger_ms)

    def release(self) -> zmq.Socket[bytes]:
        """Leave the socket to somebody else."""
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        if self._soon is not None:
            self._soon.cancel()
        return self.socket


class Event(NamedTuple):
    """What ZeroMQ says of a connection. ``value`` is a descriptor, or why a handshake failed."""

    kind: zmq.Event
    value: int


def monitor(socket: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop, happened: Callable[[Event], None]) -> Reader:
    """Hear of the connections of a socket. At the end, ``socket.disable_monitor()`` comes first, then this is closed:
    ZeroMQ waits, for ever, where an event has no receiver. For the same reason there is no bound on events unread."""
    kinds = (
        zmq.Event.ACCEPTED
        | zmq.Event.CONNECTED
        | zmq.Event.CLOSED
        | zmq.Event.DISCONNECTED
        | zmq.Event.HANDSHAKE_SUCCEEDED
        | zmq.Event.HANDSHAKE_FAILED_AUTH
        | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    )

    def received(frames: list[zmq.Frame]) -> None:
        happened(_event([frame.bytes for frame in frames]))

    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, int(kinds))
    events = socket.context.socket(zmq.PAIR)
    events.setsockopt(zmq.RCVHWM, 0)
    events.connect(address)
    return Reader(events, loop, received)


def read_event(events: zmq.Socket[bytes]) -> Event:
    """The next one, without an event loop."""
    return _event(events.recv_multipart(zmq.NOBLOCK))


def _event(parts: list[bytes]) -> Event:
    message = parse_monitor_message(parts)
    return Event(zmq.Event(message["event"]), int(message["value"]))


# -------------------------------------------------------------------------------------------------- the TCP connection


def peer_of(descriptor: int) -> tuple[str, int] | None:
    """IP address and port at the other end of a connection; None if it is no connection, any more."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            return tuple(connection.getpeername()[:2])
    except OSError:
        return None


def local_ip(descriptor: int) -> str:
    """IP address at our end of a connection."""
    with sockets.socket(fileno=os.dup(descriptor)) as connection:
        return str(connection.getsockname()[0])


@contextlib.contextmanager
def the_connection(descriptor: int, peer: tuple[str, int]) -> Iterator[sockets.socket | None]:
    """ZeroMQ's own connection with ``peer``, for what ZeroMQ cannot do; None if the descriptor has become another's."""
    try:
        connection = sockets.socket(fileno=os.dup(descriptor))
    except OSError:
        yield None
        return
    with connection:
        try:
            same = tuple(connection.getpeername()[:2]) == peer
        except OSError:
            same = False
        yield connection if same else None


class Received(NamedTuple):
    """What the kernel knows of the bytes that came over a connection."""

    silent_s: float
    """Seconds since the last one."""
    bytes: int


_INFO = struct.Struct("=52xI72xQ")
"""Of Linux's ``tcp_info``: tcpi_last_data_recv in milliseconds, tcpi_bytes_received."""


def received(descriptor: int, peer: tuple[str, int]) -> Received:
    """What came from ``peer``; nothing just now if the connection has ended, which ZeroMQ reports by itself."""
    with the_connection(descriptor, peer) as connection:
        if connection is None:
            return Received(0.0, 0)
        info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO.size)
    milliseconds, count = _INFO.unpack(info)
    return Received(milliseconds / 1000, count)


# ------------------------------------------------------------------------------------------------------------ tensors


def payload(tensor: torch.Tensor) -> Any:
    """The bytes of a matrix on the CPU, as a buffer that shares its memory where it can."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1)


def matrices(frames: Frames, rows: int, widths: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Matrices [rows, width] from a frame each.

    They stay in the frame's memory if it is aligned as torch's own is. Otherwise they are copied once: a matrix product
    may give other last bits on unaligned rows (5 % of the shapes that were tried), and a client alone would no longer
    be bit-equal to plain PEFT.

    Raises:
        WireError: another number of frames, or another size.
    """
    if len(frames) != len(widths):
        raise WireError(f"{len(frames)} matrices have come; {len(widths)} were due")
    found = []
    for frame, width in zip(frames, widths, strict=True):
        size = rows * width * dtype.itemsize
        if len(frame) != size or size == 0:
            raise WireError(f"a matrix of {len(frame)} bytes has come; [{rows}, {width}] {dtype} has {size}")
        matrix = torch.frombuffer(frame.buffer, dtype=dtype).view(rows, width)
        found.append(matrix.clone() if matrix.data_ptr() % ALIGN else matrix)
    return tuple(found)
