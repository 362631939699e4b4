"""The client's side of one ``tcp://`` connection: from connecting, through the handshake, to its end. Used once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import zmq

from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.chunks import CHUNK, Progress, ShareFile
from symbiosis.transports.keys import Key
from symbiosis.transports.sockets import (
    SILENT_S,
    Event,
    Frames,
    Reader,
    configure,
    local_ip,
    monitor,
    peer_of,
    read_event,
    received,
    resolve,
)
from symbiosis.transports.welcome import Welcome
from symbiosis.transports.wire import Hello, Type

__all__ = ["MAX_FRAME_BYTES", "Connection", "Line", "Message", "Options"]

ANSWER_WITHIN_S = 30.0
"""How long each answer may take during the handshake: an executor in the middle of a long batch does not speak."""
MAX_FRAME_BYTES = 4 << 30
CHUNKS_UNDER_WAY = 4
TICK_MS = 100
"""How often a thread that waits looks whether the executor is still there."""


class Options(NamedTuple):
    """What a client's transport was told; see :class:`symbiosis.transports.tcp.TcpTransport`."""

    key: Key | None
    insecure: bool
    retry_s: float
    progress: Progress | None


class Message(NamedTuple):
    """A message to the client, and the frames that came with it."""

    type: Type
    content: Sequence[Any]
    frames: Frames


class Connection:
    """A DEALER socket. Messages are had one by one by :meth:`next`, or after :meth:`hand_on` by callback."""

    def __init__(self, address: str, options: Options) -> None:
        self.address = address
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._messages: deque[Message] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._received: Callable[[Message], None] | None = None
        self._lost: Callable[[SymbiosisError], None] | None = None
        self._error: SymbiosisError | None = None
        self._remote: tuple[int, tuple[str, int]] | None = None
        """Descriptor and address at the other end."""
        self._shaken_hands = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reader: Reader | None = None
        self._monitor: Reader | None = None

    # ------------------------------------------------------------------------------------------------------ handshake

    async def open(self, hello: Hello) -> Welcome:
        """Connect and say HELLO.

        Raises:
            ConnectionLostError: nobody answers there.
            RefusedError: the executor does not let us in; the message says why.
            UsageError: keys are needed.
        """
        try:
            await self._connect()
            self.send([wire.pack_hello(hello)])
            message = await self.next()
            if message.type is not Type.WELCOME:
                raise WireError(f"the executor at {self.address} answered HELLO with {message.type.name}")
            return Welcome(message.content)
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> None:
        endpoint = await resolve(self.address)
        key = self._options.key
        private = key is not None and not self.address.startswith("dist:")
        if not private and not endpoint.loopback and not self._options.insecure:
            raise UsageError(
                f"{self.address} is on another host; give key=file (--key; yours, from whoever runs the executor), "
                "or insecure=True (--insecure) if everybody on the network may read along"
            )
        socket = self._context.socket(zmq.DEALER)
        configure(socket, v6=endpoint.v6, max_frame_bytes=MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # we reconnect ourselves, and say HELLO again
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(ANSWER_WITHIN_S * 1000))
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the executor's limits
        socket.setsockopt(zmq.RCVHWM, 0)  # bounded by what we ask for
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
                self._reader.drain()  # it may have said why
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
                "give its owner your .public file"
            )
        return ConnectionLostError(f"the executor at {self.address} cannot check keys now (status {status})")

    @property
    def ends(self) -> tuple[str, str]:
        """IP addresses of this end and the other.

        Raises:
            ConnectionLostError: it has ended.
        """
        try:
            assert self._remote is not None
            return local_ip(self._remote[0]), self._remote[1][0]
        except OSError as error:
            raise ConnectionLostError(f"the executor at {self.address} is gone") from error

    async def next(self) -> Message:
        """The next message.

        Raises:
            ConnectionLostError: there will be none, or not in time.
            SymbiosisError: the executor ended the conversation, and why.
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

    async def ask(self, type_: Type) -> Any:
        """The content of the answer to STATUS."""
        self.send([wire.pack(type_)])
        message = await self.next()
        if message.type is not type_ or not message.content:
            raise WireError(f"the executor at {self.address} answered {type_.name} with {message.type.name}")
        return message.content[0]

    async def fetch(self, share: ShareFile, progress: Progress | None) -> None:
        """Get the client's share of the model."""
        asked = 0
        while share.done < share.size:
            while asked < share.size and asked - share.done < CHUNKS_UNDER_WAY * CHUNK:
                self.send([wire.pack(Type.SHARE, asked)])
                asked += CHUNK
            message = await self.next()
            if message.type is not Type.SHARE or len(message.frames) != 1:
                raise WireError(f"the executor at {self.address} answered SHARE with {message.type.name}")
            share.add(wire.read_id(message.content), message.frames[0].buffer)
            if progress is not None:
                progress(share.done, share.size)

    # ----------------------------------------------------------------------------------------------------- afterwards

    def hand_on(self, received: Callable[[Message], None], lost: Callable[[SymbiosisError], None]) -> None:
        """From now on call ``received`` for each message, and ``lost`` once, with the reason, when it is over."""
        self._received, self._lost = received, lost
        while self._messages:
            received(self._messages.popleft())
        if self._error is not None:
            lost(self._error)

    def detach(self) -> Line:
        """From now on the sockets are a thread's that blocks."""
        assert self._reader is not None
        assert self._monitor is not None
        line = Line(self.address, self._context, self._reader.release(), self._monitor.release(), self._remote)
        line.waiting.extend(self._messages)
        return line

    def send(self, parts: Sequence[Any]) -> None:
        """Send a message and its matrices. Nothing happens on a connection that is lost."""
        if self._reader is None or self._monitor is None or self._error is not None:
            return
        try:
            self._reader.send(parts)
        except zmq.Again:  # nothing bounds what may be sent, so there is nobody to send it to any more
            self._monitor.drain()  # which tells why
            self.lose(ConnectionLostError(f"the executor at {self.address} is gone"))

    def _take(self, frames: list[zmq.Frame]) -> None:
        try:
            message = Message(*wire.unpack_answer(frames[0].buffer), frames[1:])
            if message.type is Type.PONG and self._received is None:
                return  # the executor makes sure that we are there
            if self._received is not None:
                self._received(message)
                return
        except WireError as error:
            self.lose(error)
            return
        self._messages.append(message)
        self._wake()

    def silent(self) -> bool:
        """Whether the other side is dead: no byte has come, where a heartbeat comes every second or two."""
        return self._remote is not None and received(*self._remote).silent_s > SILENT_S

    def lose(self, error: SymbiosisError) -> None:
        """It is over, because of ``error``."""
        if self._error is None:
            self._error = error
            self._wake()
            if self._lost is not None:
                self._lost(error)

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self) -> None:
        """Hang up; harmless a second time. No callback comes any more."""
        self._received = self._lost = None
        if self._error is None:
            self._error = ConnectionLostError(f"the connection to {self.address} was closed")
        if self._reader is not None and self._monitor is not None:
            if not self._reader.socket.closed:
                self._reader.socket.disable_monitor()
            self._monitor.close()
            self._reader.close()
        self._context.term()


class Line:
    """A connection after its handshake, for threads that block, one at a time."""

    def __init__(
        self,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        events: zmq.Socket[bytes],
        remote: tuple[int, tuple[str, int]] | None,
    ) -> None:
        self.address = address
        self.waiting: deque[Message] = deque()
        self._context = context
        self._socket = socket
        self._events = events
        self._remote = remote
        self._ended = False
        socket.setsockopt(zmq.RCVTIMEO, TICK_MS)

    def send(self, parts: Sequence[Any]) -> None:
        """Send a message and its matrices.

        Raises:
            ConnectionLostError: there is nobody to send it to.
        """
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # nothing bounds what may be sent
            raise self._gone() from error

    def receive(self) -> Message | None:
        """The next message, or None where none comes within a tenth of a second.

        Raises:
            ConnectionLostError: there will be none.
            WireError: what came is none.
        """
        if self.waiting:
            return self.waiting.popleft()
        try:
            frames = self._socket.recv_multipart(copy=False)
        except zmq.Again:
            if self._ended:
                raise self._gone() from None
            self._look()
            return None
        except zmq.ZMQError as error:
            raise self._gone() from error
        return Message(*wire.unpack_answer(frames[0].buffer), frames[1:])

    def _look(self) -> None:
        """Is the executor still there? If not, there is one more chance for what it said last."""
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._ended |= read_event(self._events).kind is zmq.Event.DISCONNECTED
        if self._remote is not None and received(*self._remote).silent_s > SILENT_S:
            raise ConnectionLostError(f"there is no sign of life from the executor at {self.address}")

    def _gone(self) -> ConnectionLostError:
        return ConnectionLostError(f"the executor at {self.address} is gone")

    def close(self) -> None:
        """Hang up; harmless a second time."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(0)
            self._socket.close(0)
            self._context.term()
