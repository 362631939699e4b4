"""The client's end of ``tcp://`` connections: a DEALER socket on an event loop, or for threads that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from symbiosis.core.requests import Results
from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.connection import AsyncConnection, BlockingConnection, Carrier, Receiver, in_executor
from symbiosis.transports.conversation import Pending
from symbiosis.transports.joining import ANSWER_WITHIN_S, Message, exchange, joining
from symbiosis.transports.keys import KeyPair
from symbiosis.transports.share import Progress
from symbiosis.transports.sockets import (
    SILENT_S,
    Reader,
    TcpSocket,
    configure,
    event_of,
    matrices,
    monitor,
    payload,
    resolve,
)
from symbiosis.transports.wire import CallMessage, Hello

MAX_FRAME_BYTES = 4 << 30
TICK_MS = 100
"""Milliseconds after which a thread that waits checks whether the executor is still there."""


class FrameCarrier(Carrier):
    """Sends tensors as raw frames after their message."""

    most_bytes = MAX_FRAME_BYTES

    def put(self, pending: Pending) -> list[Any] | None:
        call = pending.call
        message = wire.pack_call(CallMessage(pending.id, call.key, call.kind, pending.rows, 0, 0))
        return [message, *map(payload, call.tensors)]

    def take(self, pending: Pending, frames: Sequence[Any]) -> Results | None:
        return matrices(frames, pending.rows, pending.expected.results, pending.expected.dtype)


class TcpConnection:
    """A connection whose first messages were exchanged: the constructor blocks.

    Raises:
        ConnectionLostError: no executor answers.
        RefusedError: the executor does not admit the client.
        UsageError: a key is needed.
        SymbiosisError: another error of :func:`~symbiosis.transports.joining.joining`.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        again: bool,
        *,
        key: KeyPair | None,
        insecure: bool,
        progress: Progress | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        endpoint = resolve(address)
        private = key is not None and not address.startswith("dist:")
        if not private and not endpoint.loopback and not insecure:
            raise UsageError(
                f"{address} is on another host; give key=file (--key; from the executor's provider), "
                "or insecure=True (--insecure) if every host on the network may read the data"
            )
        self.address = address
        self.carrier: Carrier = FrameCarrier()
        self._key = key
        self._cancelled = cancelled
        self._remote: TcpSocket | None = None
        """The TCP connection, when there is one."""
        self._shaken_hands = False
        self._error: SymbiosisError | None = None
        """Reason for the end of the connection."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, v6=endpoint.v6, max_frame_bytes=MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a new connection has to send HELLO
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(ANSWER_WITHIN_S * 1000))
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the executor's limits
        self._socket.setsockopt(zmq.RCVHWM, 0)  # bounded by what this client asks for
        self._socket.setsockopt(zmq.RCVTIMEO, TICK_MS)
        if key is not None:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, key.server or b"")
        self._events = monitor(self._socket)
        try:
            self._socket.connect(f"tcp://{endpoint}")
            joined = exchange(joining(address, hello, again, progress), self._ask, self._next)
            self.welcome, self.share, self.look = joined
            self._read_events()
        except BaseException:
            TcpConnection.close(self)
            raise

    def _ask(self, message: bytes) -> None:
        """Send one of the first messages. If the connection has ended, :meth:`_next` tells why."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)

    def _next(self) -> Message:
        """Return the next of the first messages. Raises the reason if the connection has ended, and ConnectionLostError
        if no message came within ANSWER_WITHIN_S."""
        end = time.monotonic() + ANSWER_WITHIN_S
        while time.monotonic() < end and not (self._cancelled and self._cancelled.is_set()):
            message = self._receive()
            if message is not None:
                return message
        raise ConnectionLostError(f"no executor answers on {self.address}")

    def _receive(self) -> Message | None:
        """Return the next message; None if none came within TICK_MS. Raise the reason if the connection has ended."""
        error = self._error
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK if error else 0, copy=False)
        except zmq.Again:
            if error is not None:  # all messages were read; none had a more precise reason
                raise error from None
            self._read_events()
            return None
        return *wire.unpack_answer(frames[0].buffer), frames[1:]

    def _read_events(self) -> None:
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._happened(self._events.recv_multipart(zmq.NOBLOCK, copy=False))

    def _happened(self, frames: list[zmq.Frame]) -> None:
        """Note what has happened to the connection, and the reason if it has ended."""
        kind, value = event_of(frames)
        error: SymbiosisError | None = None
        if kind is zmq.Event.CONNECTED:
            self._remote = TcpSocket.of(value)
        elif kind is zmq.Event.HANDSHAKE_SUCCEEDED:
            self._shaken_hands = True
        elif kind is zmq.Event.HANDSHAKE_FAILED_AUTH:
            error = self._refusal(value)
        elif kind in (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL):
            error = RefusedError(f"the executor at {self.address} broke off the handshake; {self._mismatch()}")
        elif kind is zmq.Event.CLOSED and not self._shaken_hands:
            error = ConnectionLostError(f"no executor answers on {self.address}")
        elif kind is zmq.Event.DISCONNECTED:
            error = self._gone()
        self._error = self._error or error

    def _mismatch(self) -> str:
        if self._key is None:
            return "this client has no key, and the executor wants one: give key=file (--key)"
        return "its public key is not the server-key in this client's key file, or it runs without keys"

    def _refusal(self, status: int) -> SymbiosisError:
        key = self._key
        if status == 400 and key is not None:
            return RefusedError(
                f"the executor at {self.address} does not know the public key {key.public.decode()}; "
                "give its provider your .public file"
            )
        return ConnectionLostError(f"the executor at {self.address} cannot check keys now (status {status})")

    def _gone(self) -> ConnectionLostError:
        return ConnectionLostError(f"the executor at {self.address} is gone")

    def silent(self) -> bool:
        """Return whether no byte has come for too long."""
        return self._remote is not None and self._remote.received()[0] > SILENT_S

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(0)
            self._socket.close(0)
            self._context.term()


async def join(
    address: str,
    hello: Hello,
    again: bool,
    *,
    progress: Progress | None,
    carrier: Callable[[AsyncTcpConnection], Carrier] | None = None,
    **options: Any,
) -> AsyncTcpConnection:
    """Connect and join; see :data:`symbiosis.transports.connection.Join`.

    Args:
        address, hello, again: the executor, and the client.
        progress: called on the event loop; see :class:`symbiosis.transports.tcp.TcpTransport`.
        carrier: makes the carrier of tensors; by default they travel as frames.
        **options: of :class:`TcpConnection`.
    """
    loop, cancelled = asyncio.get_running_loop(), threading.Event()

    def on_loop(done: int, total: int) -> None:
        if progress is not None:
            loop.call_soon_threadsafe(progress, done, total)

    open_ = partial(AsyncTcpConnection, address, hello, again, progress=on_loop, cancelled=cancelled, **options)
    try:
        connection = await in_executor(open_)
    except asyncio.CancelledError:
        cancelled.set()
        raise
    try:
        if carrier is not None:
            connection.carry(carrier(connection))
    except BaseException:
        connection.close()
        raise
    return connection


class AsyncTcpConnection(TcpConnection, AsyncConnection):
    """A connection on an event loop."""

    _readers: tuple[Reader, Reader] | None = None
    """Readers of the event socket and of the message socket."""
    _channel: Receiver | None = None

    def carry(self, carrier: Carrier) -> None:
        """Use this carrier of tensors from now on."""
        self.carrier = carrier

    def local_ip(self) -> str:
        """Return the IP address of this end. Raises ConnectionLostError if the connection has ended."""
        try:
            assert self._remote is not None
            return self._remote.local_ip()
        except OSError as error:
            raise self._gone() from error

    def start(self, channel: Receiver) -> None:
        self._channel = channel
        self.carrier.start(channel)
        loop = asyncio.get_running_loop()
        self._readers = Reader(self._events, loop, self._event), Reader(self._socket, loop, self._take)
        if self._error is not None:
            loop.call_soon(self.lose, self._error)

    def send(self, parts: Sequence[Any]) -> None:
        if self._error is None and self._readers is not None:
            try:
                self._readers[1].send(parts)
            except zmq.ZMQError:  # no limit on what may be queued, so the connection has ended
                self._readers[0].drain()  # which may tell why
                self.lose(self._gone())

    def _event(self, frames: list[zmq.Frame]) -> None:
        self._happened(frames)
        if self._error is not None and self._readers is not None:
            self._readers[1].drain()  # the executor may have sent the reason
            self.lose(self._error)

    def _take(self, frames: list[zmq.Frame]) -> None:
        try:
            type_, content = wire.unpack_answer(frames[0].buffer)
        except WireError as error:
            self.lose(error)
        else:
            if self._channel is not None:
                self._channel.received(type_, content, frames[1:])

    def lose(self, error: SymbiosisError) -> None:
        """Note that the connection has ended."""
        self._error = self._error or error
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.lost(self._error)

    def close(self) -> None:
        self._channel = None
        self._error = self._error or ConnectionLostError(f"the connection to {self.address} was closed")
        self.carrier.close()
        for reader in self._readers or ():
            reader.stop()
        super().close()


class BlockingTcpConnection(TcpConnection, BlockingConnection):
    """A connection for threads that block, one at a time: the calling thread uses the ZeroMQ socket itself.

    No thread has to stay awake for signs of life: ZeroMQ sends heartbeats, and the kernel knows when a byte came last.
    """

    def send(self, parts: Sequence[Any]) -> None:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # no limit on what may be queued
            raise self._gone() from error

    def receive(self) -> Message | None:
        try:
            message = self._receive()
        except zmq.ZMQError as error:
            raise self._gone() from error
        if message is None and self.silent():
            raise ConnectionLostError(f"no byte came from the executor at {self.address} for {SILENT_S:.0f} s")
        return message
