"""ZeroMQ sockets on an event loop, and what both ends of ``tcp://`` do with them.

The descriptor of a ZeroMQ socket becomes readable when an event has *happened*, not while a message can be read. So
all messages must be taken after each wake-up and after each send (:class:`Reader`). This costs a fifth of pyzmq's
asyncio sockets, which make a future for each message, and works on every loop with ``add_reader``.

A connection is alive while *bytes* come, not messages. Both ends have ZeroMQ send heartbeats from its own thread,
however busy Python is, and the kernel knows when the last byte came (:func:`received`). So a matrix that takes a
minute on a slow line keeps the connection, and a process that was stopped loses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket as sockets
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from symbiosis.errors import ConnectionLostError, UsageError, WireError
from symbiosis.transports.wire import ALIGN

HEARTBEAT_MS = 1500
SILENT_S = 6.0
"""Seconds without a byte after which a connection is dead: four heartbeats."""
HANDSHAKE_MS = 10_000
_AT_ONCE = 64
"""Messages that are read before other callbacks of the loop get their turn."""

Frames = Sequence[zmq.Frame]
"""Raw frames of a ZeroMQ message."""


class Endpoint(NamedTuple):
    """IP address and port of ``tcp://host:port`` or ``dist://host:port``."""

    ip: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach the address."""
        return ipaddress.ip_address(self.ip.partition("%")[0]).is_loopback

    @property
    def v6(self) -> bool:
        return ":" in self.ip

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.v6 else f"{self.ip}:{self.port}"


def resolve(address: str) -> Endpoint:
    """Return the IP address and port of ``scheme://host:port``. Blocks while it looks up the host. Raises UsageError:
    the address does not have this form; ConnectionLostError: there is no such host."""
    scheme, _, where = address.partition("://")
    host, colon, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r}: write {scheme}://host:port, such as {scheme}://127.0.0.1:7000")
    try:
        found = sockets.getaddrinfo(host, int(port), type=sockets.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConnectionLostError(f"{address}: there is no host {host!r}: {error}") from error
    return Endpoint(str(found[0][4][0]), int(port))


def configure(socket: zmq.Socket[bytes], *, v6: bool, max_frame_bytes: int) -> None:
    """Set the options that both ends have in common, before binding or connecting."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(v6))
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    # ZeroMQ's own timeout counts whole messages, and a large one may take long; see the top of this module.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 600_000)


class Reader:
    """Calls ``received`` with each message of a ZeroMQ socket, on an event loop."""

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
        self._schedule()

    def send(self, parts: Sequence[Any]) -> None:
        """Send a message of bytes, buffers and frames, without waiting and without copying large parts. Raises
        zmq.Again: the queue of unsent messages is full; zmq.ZMQError: the peer is gone (on a ROUTER)."""
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        finally:
            if self._soon is None and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._schedule()  # sending has consumed the wake-up

    def drain(self) -> None:
        """Read the messages that have come, now."""
        if not self._closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._ready()

    def _schedule(self) -> None:
        if self._soon is None and not self._closed:
            self._soon = self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        more = True  # also if a callback raises
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
                self._schedule()

    def stop(self) -> None:
        """Stop reading."""
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        if self._soon is not None:
            self._soon.cancel()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket, which may take ``linger_ms`` to send its last messages."""
        if not self._closed:
            self.stop()
            self.socket.close(linger_ms)


def monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Return a socket that receives the events of a socket's connections; see :func:`event_of`.

    At the end, call ``socket.disable_monitor()`` first and close the returned socket second: ZeroMQ waits without end
    for a receiver of each event. For the same reason the queue of events has no limit.
    """
    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, zmq.EVENT_ALL)
    events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    events.setsockopt(zmq.RCVHWM, 0)
    events.connect(address)
    return events


def event_of(frames: list[zmq.Frame]) -> tuple[zmq.Event, int]:
    """Return an event, and the connection's descriptor or the reason for which a handshake failed."""
    message = parse_monitor_message([frame.bytes for frame in frames])
    return zmq.Event(message["event"]), int(message["value"])


# The TCP connection

_INFO = struct.Struct("=52xI72xQ")
"""Two fields of Linux's ``tcp_info``: tcpi_last_data_recv in milliseconds, tcpi_bytes_received."""


class TcpSocket(NamedTuple):
    """A TCP connection that ZeroMQ has opened or accepted. ZeroMQ reuses descriptors; the peer tells which it is."""

    descriptor: int
    peer: tuple[str, int]
    """IP address and port of the other end."""

    @classmethod
    def of(cls, descriptor: int) -> TcpSocket | None:
        """Return the connection with this descriptor; None if it has ended."""
        try:
            with sockets.socket(fileno=os.dup(descriptor)) as connection:
                return cls(descriptor, tuple(connection.getpeername()[:2]))
        except OSError:
            return None

    def _duplicate(self) -> sockets.socket:
        """Return another object for the socket. Raise OSError if the connection has ended."""
        connection = sockets.socket(fileno=os.dup(self.descriptor))
        try:
            if tuple(connection.getpeername()[:2]) == self.peer:
                return connection
        except OSError:
            pass
        connection.close()
        raise ConnectionResetError("the connection has ended")

    def local_ip(self) -> str:
        """Return the IP address of this end. Raises OSError if the connection has ended."""
        with self._duplicate() as connection:
            return str(connection.getsockname()[0])

    def received(self) -> tuple[float, int]:
        """Return the seconds since the last byte came, and how many have come, by the kernel's count.

        A connection that has ended counts as alive: ZeroMQ reports its end.
        """
        try:
            with self._duplicate() as connection:
                info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO.size)
        except OSError:
            return 0.0, 0
        milliseconds, count = _INFO.unpack(info)
        return milliseconds / 1000, count

    def cut(self) -> None:
        """End the connection now. ZeroMQ has no call for that; it sees it as ended by the other side."""
        with contextlib.suppress(OSError), self._duplicate() as connection:
            connection.shutdown(sockets.SHUT_RDWR)


def payload(tensor: torch.Tensor) -> Any:
    """Return the bytes of a matrix on the CPU as a buffer, without a copy if the matrix is contiguous."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1)


def matrices(frames: Frames, rows: int, widths: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return matrices [rows, width], one from each frame.

    They use the frame's memory if it is aligned as torch's own memory. Otherwise they are copied: on unaligned rows a
    matrix product may differ in the last bits (5 % of the shapes tried), and a client alone would no longer be
    bit-equal to plain PEFT.

    Raises:
        WireError: the number of frames or the size of one is wrong.
    """
    if len(frames) != len(widths):
        raise WireError(f"{len(frames)} matrices have come; {len(widths)} were due")
    found = []
    for frame, width in zip(frames, widths, strict=True):
        size = rows * width * dtype.itemsize
        if len(frame) != size or size == 0:
            raise WireError(f"a matrix of {len(frame)} bytes has come; [{rows}, {width}] {dtype} needs {size}")
        matrix = torch.frombuffer(frame.buffer, dtype=dtype).view(rows, width)
        found.append(matrix.clone() if matrix.data_ptr() % ALIGN else matrix)
    return tuple(found)
