"""The client's end of ``tcp://`` connections: a DEALER socket on an event loop, or for threads that block."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import zmq

from symbiosis.core.share import Share
from symbiosis.core.transport import Look
from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.carrier import Arrived, Carrier, Lost, Message, Received
from symbiosis.transports.chunks import CHUNK, Progress, ShareFile
from symbiosis.transports.keys import KeyPair
from symbiosis.transports.outstanding import Pending, Results
from symbiosis.transports.sockets import (
    SILENT_S,
    Event,
    Reader,
    configure,
    local_ip,
    matrices,
    monitor,
    payload,
    peer_of,
    received,
    resolve,
)
from symbiosis.transports.threads import LoopThread
from symbiosis.transports.welcome import Welcome
from symbiosis.transports.wire import CallMessage, Hello, Type

__all__ = ["MAX_FRAME_BYTES", "Options", "TcpConnection", "TcpConnector", "look"]

ANSWER_WITHIN_S = 30.0
"""Seconds within which each answer of the handshake must come: an executor in a long batch does not answer sooner."""
MAX_FRAME_BYTES = 4 << 30
CHUNKS_UNDER_WAY = 4
"""Chunks of the share that a client asks for ahead, so that the line is not idle during a round trip."""


class Options(NamedTuple):
    """Options of a client; see :class:`symbiosis.transports.tcp.TcpTransport`."""

    key: KeyPair | None
    insecure: bool
    progress: Progress | None


class TcpCarrier(Carrier, Protocol):
    """Moves the tensors of one ZeroMQ connection."""

    def start(self, arrived: Arrived) -> None:
        """Begin to call ``arrived`` with results that come later than their message."""

    def close(self) -> None:
        """End the carrier with its connection."""


class FrameCarrier:
    """Sends tensors as raw frames after their message."""

    device = torch.device("cpu")
    most_bytes = MAX_FRAME_BYTES

    def __init__(self, connection: TcpConnection) -> None:
        pass

    def start(self, arrived: Arrived) -> None:
        pass  # results come with their message

    def put(self, pending: Pending) -> list[Any] | None:
        call = pending.call
        message = wire.pack_call(CallMessage(pending.id, call.key, call.kind, pending.rows, 0, 0))
        return [message, *map(payload, call.tensors)]

    def take(self, pending: Pending, frames: Sequence[Any]) -> Results | None:
        return matrices(frames, pending.rows, pending.expected.results, pending.expected.dtype)

    def free(self, pending: Pending) -> None:
        pass  # ZeroMQ keeps the frames as long as it needs them

    def control(self, type_: Type, content: Sequence[Any]) -> None:
        raise WireError(f"{type_.name} is not for clients of tcp://")

    def close(self) -> None:
        pass


class Released(NamedTuple):
    """The parts of a connection that leaves its event loop."""

    context: zmq.Context[zmq.Socket[bytes]]
    socket: zmq.Socket[bytes]
    events: zmq.Socket[bytes]
    """Events of the connection."""
    remote: tuple[int, tuple[str, int]] | None
    """Descriptor, and the executor's IP address and port."""
    messages: deque[Message]
    """Messages that came and were not taken."""


class TcpConnection:
    """A connection on an event loop. Messages come one by one from :meth:`next`, after :meth:`start` by callback."""

    welcome: Welcome
    share: Share | None = None

    def __init__(self, address: str, options: Options) -> None:
        self.address = address
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._carrier: TcpCarrier | None = None
        self._messages: deque[Message] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._received: Received | None = None
        self._lost: Lost | None = None
        self._error: SymbiosisError | None = None
        self._remote: tuple[int, tuple[str, int]] | None = None
        """Descriptor, and the executor's IP address and port."""
        self._shaken_hands = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reader: Reader | None = None
        self._monitor: Reader | None = None

    # The handshake

    async def open(self, hello: Hello) -> None:
        """Connect and send HELLO; afterwards :attr:`welcome` is there.

        Raises:
            ConnectionLostError: no executor answers.
            RefusedError: the executor does not admit the client; why.
            UsageError: keys are needed.
        """
        try:
            await self._connect()
            self.send([wire.pack_hello(hello)])
            message = await self.next()
            self.welcome = Welcome.read(message.type, message.content, self.address)
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> None:
        endpoint = await resolve(self.address)
        key = self._options.key
        private = key is not None and not self.address.startswith("dist:")
        if not private and not endpoint.loopback and not self._options.insecure:
            raise UsageError(
                f"{self.address} is on another host; give key=file (--key; from the executor's provider), "
                "or insecure=True (--insecure) if every host on the network may read the data"
            )
        socket = self._context.socket(zmq.DEALER)
        configure(socket, v6=endpoint.v6, max_frame_bytes=MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a new connection has to send HELLO
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(ANSWER_WITHIN_S * 1000))
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the executor's limits
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by what this client asks for
        if key is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, key.server or b"")
        self._monitor = monitor(socket, self._loop, self._happened)
        self._reader = Reader(socket, self._loop, self._take)
        socket.connect(f"tcp://{endpoint}")

    def _happened(self, event: Event) -> None:
        kind, value = event
        if kind is zmq.Event.CONNECTED:
            peer = peer_of(value)
            self._remote = None if peer is None else (value, peer)
        elif kind is zmq.Event.HANDSHAKE_SUCCEEDED:
            self._shaken_hands = True
        elif kind is zmq.Event.HANDSHAKE_FAILED_AUTH:
            self.lose(self._refusal(value))
        elif kind in (zmq.Event.HANDSHAKE_FAILED_PROTOCOL, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL):
            self.lose(RefusedError(f"the executor at {self.address} broke off the handshake; {self._mismatch()}"))
        elif kind is zmq.Event.CLOSED and not self._shaken_hands:
            self.lose(ConnectionLostError(f"no executor answers on {self.address}"))
        elif kind is zmq.Event.DISCONNECTED:
            if self._reader is not None:
                self._reader.drain()  # the executor may have sent the reason
            self.lose(ConnectionLostError(f"the executor at {self.address} is gone"))

    def _mismatch(self) -> str:
        if self._options.key is None:
            return "this client has no key, and the executor wants one: give key=file (--key)"
        return "its public key is not the server-key in this client's key file, or it runs without keys"

    def _refusal(self, status: int) -> SymbiosisError:
        key = self._options.key
        if status == 400 and key is not None:
            return RefusedError(
                f"the executor at {self.address} does not know the public key {key.public.decode()}; "
                "give its provider your .public file"
            )
        return ConnectionLostError(f"the executor at {self.address} cannot check keys now (status {status})")

    @property
    def carrier(self) -> TcpCarrier:
        """Carrier of tensors; there after :meth:`join`."""
        assert self._carrier is not None
        return self._carrier

    @property
    def ends(self) -> tuple[str, str]:
        """IP addresses of this end and of the executor's.

        Raises:
            ConnectionLostError: the connection has ended.
        """
        try:
            assert self._remote is not None
            return local_ip(self._remote[0]), self._remote[1][0]
        except OSError as error:
            raise ConnectionLostError(f"the executor at {self.address} is gone") from error

    async def next(self) -> Message:
        """Return the next message.

        Raises:
            ConnectionLostError: the connection has ended, or no message came within ANSWER_WITHIN_S.
            SymbiosisError: the executor ended the conversation; why.
        """
        while not self._messages:
            if self._error is not None:
                raise self._error
            self._arrived = self._loop.create_future()
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await self._arrived
            except TimeoutError:
                raise ConnectionLostError(f"no executor answers on {self.address}") from None
        message = self._messages.popleft()
        if message.type is Type.ENDED:
            raise wire.error_of(*message.content[:2])
        return message

    async def join(self, hello: Hello, again: bool, carrier: Callable[[TcpConnection], TcpCarrier]) -> None:
        """Connect, get the client's share of the model unless it has joined before (``again``), and make the carrier.

        Raises the errors of :meth:`open`.
        """
        await self.open(hello)
        try:
            if not again:
                await self._fetch()
            self._carrier = carrier(self)
        except BaseException:
            self.close()
            raise

    async def _fetch(self) -> None:
        """Get the client's share of the model, unless this process has it."""
        self.share = self.welcome.known()
        if self.share is not None:
            return
        file = ShareFile(self.welcome.content.get("share_bytes"))
        try:
            asked = 0
            while file.done < file.size:
                while asked < file.size and asked - file.done < CHUNKS_UNDER_WAY * CHUNK:
                    self.send([wire.pack(Type.SHARE, asked)])
                    asked += CHUNK
                message = await self.next()
                if message.type is not Type.SHARE or len(message.frames) != 1:
                    raise WireError(f"the executor at {self.address} answered SHARE with {message.type.name}")
                file.add(wire.read_id(message.content), message.frames[0].buffer)
                if self._options.progress is not None:
                    self._options.progress(file.done, file.size)
            self.share = self.welcome.share(file.tensors)
        finally:
            file.close()

    # After the handshake

    def start(self, received: Received, lost: Lost, arrived: Arrived) -> None:
        self._received, self._lost = received, lost
        self.carrier.start(arrived)
        while self._messages and self._received is not None:
            received(*self._messages.popleft())
        if self._error is not None and self._lost is not None:
            lost(self._error)

    def release(self) -> Released:
        """Stop using the sockets and return them. The caller owns them from now on."""
        assert self._reader is not None
        assert self._monitor is not None
        sockets = self._reader.release(), self._monitor.release()
        return Released(self._context, *sockets, self._remote, self._messages)

    def send(self, parts: Sequence[Any]) -> None:
        if self._reader is None or self._monitor is None or self._error is not None:
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
            self._messages.append(Message(type_, content, frames[1:]))
            self._wake()

    def silent(self) -> bool:
        return self._remote is not None and received(*self._remote).silent_s > SILENT_S

    def lose(self, error: SymbiosisError) -> None:
        """Note that the connection has ended."""
        if self._error is None:
            self._error = error
            self._wake()
            if self._lost is not None:
                self._lost(error)

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self) -> None:
        self._received = self._lost = None
        if self._carrier is not None:
            self._carrier.close()
        if self._error is None:
            self._error = ConnectionLostError(f"the connection to {self.address} was closed")
        if self._reader is not None and self._monitor is not None:
            if not self._reader.socket.closed:
                self._reader.socket.disable_monitor()
            self._monitor.close()
            self._reader.close()
        self._context.term()


class TcpConnector:
    """Opens connections to one executor on an event loop."""

    def __init__(
        self, address: str, options: Options, carrier: Callable[[TcpConnection], TcpCarrier] = FrameCarrier
    ) -> None:
        self._address = address
        self._options = options
        self._carrier = carrier

    async def join(self, hello: Hello, again: bool) -> TcpConnection:
        connection = TcpConnection(self._address, self._options)
        await connection.join(hello, again, self._carrier)
        return connection


def look(address: str, options: Options) -> Look:
    """Return what an executor shows without joining it. Blocks."""

    async def see() -> Look:
        connection = TcpConnection(address, options)
        await connection.open(Hello(None))
        try:
            connection.send([wire.pack(Type.STATUS)])
            message = await connection.next()
        finally:
            connection.close()
        return connection.welcome.look(message.type, message.content, address)

    with LoopThread() as thread:
        return thread.run(see())
