"""The client's end of ``tcp://`` connections: a DEALER socket on an event loop, or for threads that block."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from symbiosis.core.transport import Look
from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.connection import (
    Arrived,
    AsyncConnection,
    BlockingConnection,
    Carrier,
    Lost,
    Message,
    Received,
)
from symbiosis.transports.conversation import Pending, Results
from symbiosis.transports.keys import KeyPair
from symbiosis.transports.share import CHUNK, Progress, ReceivedShare, Welcome
from symbiosis.transports.sockets import (
    SILENT_S,
    Endpoint,
    Event,
    Reader,
    TcpSocket,
    configure,
    event_of,
    matrices,
    monitor,
    payload,
    resolve,
)
from symbiosis.transports.threads import LoopThread
from symbiosis.transports.wire import CallMessage, Hello, Type

__all__ = ["MAX_FRAME_BYTES", "TcpConnection", "join", "join_blocking", "look"]

ANSWER_WITHIN_S = 30.0
"""Seconds within which each answer of the handshake must come: an executor in a long batch does not answer sooner."""
MAX_FRAME_BYTES = 4 << 30
CHUNKS_UNDER_WAY = 4
"""Chunks of the share that a client asks for ahead, so that the line is not idle during a round trip."""
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


class TcpConnection(AsyncConnection):
    """A connection on an event loop. Messages come one by one from :meth:`next`, after :meth:`start` by callback."""

    def __init__(self, address: str, endpoint: Endpoint, key: KeyPair | None) -> None:
        self.address = address
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.remote: TcpSocket | None = None
        """The TCP connection, when there is one."""
        self.carrier: Carrier = FrameCarrier()
        self._key = key
        self._messages: asyncio.Queue[Message | SymbiosisError] = asyncio.Queue()
        """Messages that were not taken yet, and at its end the reason for which the connection has ended."""
        self._received: Received | None = None
        self._lost: Lost | None = None
        self._ended = self._shaken_hands = False
        loop, socket = asyncio.get_running_loop(), self.context.socket(zmq.DEALER)
        configure(socket, v6=endpoint.v6, max_frame_bytes=MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a new connection has to send HELLO
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(ANSWER_WITHIN_S * 1000))
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the executor's limits
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by what this client asks for
        if key is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.server or b"")
        self._monitor = monitor(socket, loop, self._happened)
        self._reader = Reader(socket, loop, self._take)
        socket.connect(f"tcp://{endpoint}")

    def _happened(self, event: Event) -> None:
        kind, value = event
        if kind is zmq.Event.CONNECTED:
            self.remote = TcpSocket.of(value)
        elif kind is zmq.Event.HANDSHAKE_SUCCEEDED:
            self._shaken_hands = True
        elif kind is zmq.Event.HANDSHAKE_FAILED_AUTH:
            self.lose(self._refusal(value))
        elif kind in (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL):
            self.lose(RefusedError(f"the executor at {self.address} broke off the handshake; {self._mismatch()}"))
        elif kind is zmq.Event.CLOSED and not self._shaken_hands:
            self.lose(ConnectionLostError(f"no executor answers on {self.address}"))
        elif kind is zmq.Event.DISCONNECTED:
            self._reader.drain()  # the executor may have sent the reason
            self.lose(ConnectionLostError(f"the executor at {self.address} is gone"))

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

    # The handshake

    async def greet(self, hello: Hello) -> None:
        """Send HELLO; afterwards :attr:`welcome` is there.

        Raises:
            ConnectionLostError: no executor answers.
            RefusedError: the executor does not admit the client; why.
        """
        self.send([wire.pack_hello(hello)])
        type_, content, _ = await self.next()
        self.welcome = Welcome.read(type_, content, self.address)

    async def next(self) -> Message:
        """Return the next message.

        Raises:
            ConnectionLostError: the connection has ended, or no message came within ANSWER_WITHIN_S.
            SymbiosisError: the executor ended the conversation; why.
        """
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                message = await self._messages.get()
        except TimeoutError:
            raise ConnectionLostError(f"no executor answers on {self.address}") from None
        if isinstance(message, SymbiosisError):
            raise message
        if message[0] is Type.ENDED:
            raise wire.error_of(*message[1][:2])
        return message

    async def fetch(self, progress: Progress | None) -> None:
        """Get the client's share of the model, unless this process has it."""
        self.share = self.welcome.known()
        if self.share is not None:
            return
        file = ReceivedShare(self.welcome.content.get("share_bytes"))
        try:
            asked = 0
            while file.done < file.size:
                while asked < file.size and asked - file.done < CHUNKS_UNDER_WAY * CHUNK:
                    self.send([wire.pack(Type.SHARE, asked)])
                    asked += CHUNK
                type_, content, frames = await self.next()
                if type_ is not Type.SHARE or len(frames) != 1:
                    raise WireError(f"the executor at {self.address} answered SHARE with {type_.name}")
                file.add(wire.read_id(content), frames[0].buffer)
                if progress is not None:
                    progress(file.done, file.size)
            self.share = self.welcome.share(file.tensors)
        finally:
            file.close()

    def local_ip(self) -> str:
        """Return the IP address of this end.

        Raises:
            ConnectionLostError: the connection has ended.
        """
        try:
            assert self.remote is not None
            return self.remote.local_ip()
        except OSError as error:
            raise ConnectionLostError(f"the executor at {self.address} is gone") from error

    # After the handshake

    def carry(self, carrier: Carrier) -> None:
        """Use this carrier of tensors from now on."""
        self.carrier = carrier

    def start(self, received: Received, lost: Lost, arrived: Arrived) -> None:
        self._received, self._lost = received, lost
        self.carrier.start(arrived)
        while self._received is not None and not self._messages.empty():
            message = self._messages.get_nowait()
            if isinstance(message, SymbiosisError):
                lost(message)
            else:
                received(*message)

    def release(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes], deque[Message | SymbiosisError]]:
        """Stop using the sockets. Return them, the second for events, and the messages that were not taken.

        The caller owns the sockets and the context from now on.
        """
        left = deque(self._messages.get_nowait() for _ in range(self._messages.qsize()))
        return self._reader.release(), self._monitor.release(), left

    def send(self, parts: Sequence[Any]) -> None:
        if self._ended:
            return
        try:
            self._reader.send(parts)
        except zmq.Again:  # no limit on what may be queued, so the connection has ended
            self._monitor.drain()  # which may tell why
            self.lose(ConnectionLostError(f"the executor at {self.address} is gone"))

    def _take(self, frames: list[zmq.Frame]) -> None:
        try:
            type_, content = wire.unpack_answer(frames[0].buffer)
        except WireError as error:
            self.lose(error)
            return
        if self._received is not None:
            self._received(type_, content, frames[1:])
        elif type_ is not Type.PONG:  # by which the executor makes sure that a new client is there
            self._messages.put_nowait((type_, content, frames[1:]))

    def silent(self) -> bool:
        return self.remote is not None and self.remote.received()[0] > SILENT_S

    def lose(self, error: SymbiosisError) -> None:
        """Note that the connection has ended."""
        if not self._ended:
            self._ended = True
            if self._lost is not None:
                self._lost(error)
            else:
                self._messages.put_nowait(error)

    def close(self) -> None:
        self._received = self._lost = None
        self._ended = True
        if not self._reader.socket.closed:
            self.carrier.close()
            self._reader.socket.disable_monitor()
            self._monitor.close()
            self._reader.close()
            self.context.term()


async def _connect(address: str, hello: Hello, key: KeyPair | None, insecure: bool) -> TcpConnection:
    """Return a connection that has its WELCOME; raises the errors of :func:`join`."""
    endpoint = await resolve(address)
    private = key is not None and not address.startswith("dist:")
    if not private and not endpoint.loopback and not insecure:
        raise UsageError(
            f"{address} is on another host; give key=file (--key; from the executor's provider), "
            "or insecure=True (--insecure) if every host on the network may read the data"
        )
    connection = TcpConnection(address, endpoint, key)
    try:
        await connection.greet(hello)
    except BaseException:
        connection.close()
        raise
    return connection


async def join(
    address: str,
    hello: Hello,
    again: bool,
    *,
    key: KeyPair | None,
    insecure: bool,
    progress: Progress | None,
    carrier: Callable[[TcpConnection], Carrier] | None = None,
) -> TcpConnection:
    """Connect and join; see :data:`symbiosis.transports.connection.Join`.

    Args:
        address, hello, again: the executor, and who joins.
        key, insecure, progress: see :class:`symbiosis.transports.tcp.TcpTransport`.
        carrier: makes the carrier of tensors; by default they travel as frames.

    Raises:
        ConnectionLostError: no executor answers.
        RefusedError: the executor does not admit the client; why.
        UsageError: keys are needed.
    """
    connection = await _connect(address, hello, key, insecure)
    try:
        if not again:
            await connection.fetch(progress)
        if carrier is not None:
            connection.carry(carrier(connection))
    except BaseException:
        connection.close()
        raise
    return connection


def look(address: str, key: KeyPair | None, insecure: bool) -> Look:
    """Return what an executor shows without joining it. Blocks."""

    async def see() -> Look:
        connection = await _connect(address, Hello(None), key, insecure)
        try:
            connection.send([wire.pack(Type.STATUS)])
            type_, content, _ = await connection.next()
        finally:
            connection.close()
        return connection.welcome.look(type_, content, address)

    with LoopThread() as thread:
        return thread.run(see())


# For threads that block


def join_blocking(address: str, hello: Hello, again: bool, **options: Any) -> BlockingConnection:
    """Connect and join; takes the options of :func:`join`. The handshake uses an event loop in a thread that ends with
    it."""

    async def open_() -> _BlockingTcpConnection:
        return _BlockingTcpConnection(await join(address, hello, again, **options))

    with LoopThread() as thread:
        return thread.run(open_())


class _BlockingTcpConnection(BlockingConnection):
    """A connection for threads that block, one at a time: the calling thread uses the ZeroMQ socket itself.

    No thread has to stay awake for signs of life: ZeroMQ sends heartbeats, and the kernel knows when a byte came last.
    """

    def __init__(self, opened: TcpConnection) -> None:
        self.welcome = opened.welcome
        self.share = opened.share
        self.carrier = opened.carrier
        self._address = opened.address
        self._context = opened.context
        self._remote = opened.remote
        self._socket, self._events, self._messages = opened.release()
        self._socket.setsockopt(zmq.RCVTIMEO, TICK_MS)
        self._ended = False

    def send(self, parts: Sequence[Any]) -> None:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # no limit on what may be queued
            raise self._gone() from error

    def receive(self) -> Message | None:
        if self._messages:
            message = self._messages.popleft()
            if isinstance(message, SymbiosisError):
                raise message
            return message
        try:
            frames = self._socket.recv_multipart(copy=False)
        except zmq.Again:
            if self._ended:
                raise self._gone() from None
            self._check_alive()
            return None
        except zmq.ZMQError as error:
            raise self._gone() from error
        return *wire.unpack_answer(frames[0].buffer), frames[1:]

    def _check_alive(self) -> None:
        """Note whether the connection has ended. One more attempt to receive follows, for the executor's reason."""
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._ended |= event_of(self._events.recv_multipart(zmq.NOBLOCK))[0] is zmq.Event.DISCONNECTED
        if self._remote is not None and self._remote.received()[0] > SILENT_S:
            raise ConnectionLostError(f"no sign of life from the executor at {self._address}")

    def _gone(self) -> ConnectionLostError:
        return ConnectionLostError(f"the executor at {self._address} is gone")

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(0)
            self._socket.close(0)
            self._context.term()
