"""The client's end of a connection that is a byte stream, on an event loop and for threads that block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from symbiosis.errors import ConnectionLostError, SymbiosisError, WireError
from symbiosis.modes import no_modes
from symbiosis.transports import wire
from symbiosis.transports.connection import AsyncConnection, BlockingConnection, Carrier, Receiver
from symbiosis.transports.conversation import PING_AFTER_S
from symbiosis.transports.joining import ANSWER_WITHIN_S, Joined, Joining, Message, exchange
from symbiosis.transports.share import CHUNK
from symbiosis.transports.stream import ByteStream, block
from symbiosis.transports.wire import Type

_TOGETHER = 64 << 10
"""Bytes of a message with its payload up to which they are copied together and sent at once."""


class StreamClient:
    """One connection, whose first messages are exchanged by a thread that blocks."""

    carrier: Carrier
    _stream: ByteStream
    _socket: socket.socket
    _due = 0.0
    """Time at which the message that comes next must be there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._whole: deque[Message] = deque()
        self._joining = True
        """Whether large messages may come, and parts of the client's share."""

    def _use(self, joined: Joined) -> None:
        """Note what the first messages have brought."""
        self.welcome, self.share, self.look = joined
        self._joining = False
        self._stream.limit(wire.MAX_TO_JOINED)

    def _take(self) -> Message | None:
        """Return the next message, when its payload has come. Raises WireError if it is malformed."""
        whole = self._whole
        while not whole:
            try:
                found = self._stream.next()
            except WireError as error:
                if self._joining:
                    raise WireError(f"{self.address} may be the address of another service: {error}") from error
                raise
            if found is None:
                break
            data, size = found
            type_, content = wire.unpack_answer(data, joined=not self._joining)
            if size:
                self._check(type_, content, size)
                _, view = block(size)
                self._stream.into(view, partial(whole.append, (type_, content, (view,))))
            else:
                whole.append((type_, content, ()))
        return whole.popleft() if whole else None

    def _check(self, type_: Type, content: Sequence[Any], size: int) -> None:
        """Raise WireError if a message must not have a payload of ``size`` bytes, before memory is allocated for it."""
        due = CHUNK if type_ is Type.SHARE and self._joining else 0
        if type_ is Type.RESULT:
            due = self.carrier.due(wire.read_id(content))
        if size > due:
            raise WireError(f"{type_.name} has a payload of {size} bytes; {due} are allowed")

    def _reason(self, error: Exception | None) -> SymbiosisError:
        """Return why the connection has ended: with an error, or because the executor has closed it."""
        if not self._joining:
            return ConnectionLostError(f"the executor at {self.address} is gone")
        if isinstance(error, TimeoutError):
            return ConnectionLostError(f"no executor answers on {self.address}: {error}")
        return ConnectionLostError(
            f"{self.address} closed the connection before it answered as an executor; check the address, or try again"
        )

    def _exchange(self, messages: Joining) -> None:
        """Send and receive the first messages. Raises OSError, and the errors of ``messages``."""
        self._due = time.monotonic() + ANSWER_WITHIN_S
        while not self._stream.ready:
            self._socket.sendall(self._stream.unsent())
            self._fill()
        self._use(exchange(messages, self._ask, self._first))

    def _ask(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the executor's reason may have come
            StreamClient.send(self, [message])

    def send(self, parts: Sequence[Any]) -> None:
        """Send a message and its payload."""
        size = sum(map(len, parts[1:]))
        encoded = list(self._stream.encode(parts[0], size, parts[1:]))
        if 0 < size <= _TOGETHER:
            encoded = [b"".join(encoded)]
        for part in encoded:
            self._socket.sendall(part)

    def close(self) -> None:
        """Close the connection. Has no effect the second time."""
        self._socket.close()

    def _first(self) -> Message:
        self._due = time.monotonic() + ANSWER_WITHIN_S
        while (message := self._take()) is None:
            self._fill()
        return message

    def _fill(self) -> None:
        """Wait for bytes."""
        self._wait()
        count = self._socket.recv_into(self._stream.room())
        if not count:
            raise ConnectionResetError("it closed the connection")
        self._stream.filled(count)

    def _wait(self) -> None:
        """Let the next operation of the socket take as long as the message may still take."""
        left = self._due - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole message within {ANSWER_WITHIN_S:.0f} s")
        self._socket.settimeout(left)


class AsyncStreamClient(StreamClient, AsyncConnection, asyncio.BufferedProtocol):
    """A connection on an event loop."""

    _transport: Any = None
    _channel: Receiver | None = None
    _error: SymbiosisError | None = None
    """Why the connection has ended."""
    _came = False
    """Whether bytes have come since :meth:`moves` was last called."""
    _waited = 0
    """Bytes that waited to be sent then."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, hint: int) -> memoryview:
        return self._stream.room()

    def buffer_updated(self, count: int) -> None:
        self._came = True
        try:
            self._stream.filled(count)
        except (OSError, WireError) as error:  # of TLS
            self._transport.write(self._stream.unsent())
            self.lose(self._reason(error))
            self._transport.close()
            return
        if self._channel is not None:
            self._pass_on()

    def connection_lost(self, error: Exception | None) -> None:
        self.lose(self._reason(error))

    def start(self, channel: Receiver) -> None:
        self._channel = channel
        self.carrier.start(channel)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._pass_on)
        if self._error is not None:
            loop.call_soon(self.lose, self._error)

    def moves(self) -> bool:
        waits = self._transport.get_write_buffer_size()
        moves = self._came or waits < self._waited
        self._came, self._waited = False, waits
        return moves

    def _pass_on(self) -> None:
        """Give the channel the messages that have come."""
        try:
            with no_modes():
                while self._channel is not None and (message := self._take()) is not None:
                    self._channel.received(*message)
        except WireError as error:
            self.lose(error)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            self.lose(ConnectionLostError(f"there is no memory for an answer: {error}"))

    def send(self, parts: Sequence[Any]) -> None:
        if self._error is None:
            for part in self._stream.encode(parts[0], sum(map(len, parts[1:])), parts[1:]):
                self._transport.write(part)

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
        if self._transport is None:
            self._socket.close()
            return
        if not self._transport.is_closing():
            with contextlib.suppress(OSError):  # the executor has reset the connection
                self._transport.write_eof()  # a child process may have the socket too
        self._transport.close()


class BlockingStreamClient(StreamClient, BlockingConnection):
    """A connection for threads that block: the calling thread itself writes to the socket and reads from it."""

    _came = False

    def _begin(self) -> None:
        """Begin to receive, after the first messages."""
        self._socket.settimeout(None)
        # A timeout in the kernel: Python's own would cost a second system call for each read.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(PING_AFTER_S), 0))

    def receive(self) -> Message | None:
        self._came = False
        while (message := self._take()) is None:
            try:
                count = self._read(self._stream.room())
                if count:
                    self._came = True
                    self._stream.filled(count)
            except BlockingIOError:
                return None
            except OSError as error:
                raise self._reason(error) from error
            if not count:
                raise self._reason(None)
        return message

    def moves(self) -> bool:
        return self._came

    def _read(self, room: memoryview) -> int:
        """Wait for bytes, and return their number. Raises BlockingIOError if none came within PING_AFTER_S."""
        return self._socket.recv_into(room)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        self._socket.close()
