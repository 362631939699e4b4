"""The executor's end of a byte stream (``shm://``, ``tcp://``, messages of ``dist://``): listener and connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from symbiosis.core.transport import Service
from symbiosis.errors import BusyError, ExecutorClosedError, SymbiosisError, UsageError, WireError
from symbiosis.modes import no_modes
from symbiosis.transports import descriptors, wire
from symbiosis.transports.limits import Limits
from symbiosis.transports.peer import Peer
from symbiosis.transports.share import ServedShare
from symbiosis.transports.stream import ByteStream

HELLO_WITHIN_S = 10.0
"""Seconds within which a new connection must send HELLO."""
LOOK_WITHIN_S = 30.0
"""Seconds for which a status connection may stay."""
GOODBYE_S = 1.0
"""Seconds for which a rejected client may read the reason before its connection is cut."""
MAX_CONNECTIONS = 1024
"""Connections of a listener."""
BACKLOG = 1024
"""Connections that the kernel keeps until a busy executor accepts them."""
ACCEPTED_AT_ONCE = 8
"""Connections that the event loop accepts in one turn. It looks at them some turns later, and until then each holds one
of the spare descriptors."""
READ_AT_ONCE = 16
"""Messages of one client that are read before other clients get their turn."""
WRITTEN_AT_ONCE = 1 << 20
"""Bytes to one client that are encrypted and written before the event loop does other work."""
MAX_UNREAD = 64 << 10
"""Unread bytes, without tensors of results, after which the executor stops reading from this client."""
MESSAGE_BYTES = 1 << 10
"""Bytes that an unread message counts for at least, because the event loop keeps objects of Python for it."""
CHECK_S = 10.0
"""Seconds between two checks of whether a client moves the bytes that it should move."""
CHECKS = 6
"""Checks one after another of a client that moved less than LEAST_BYTES, after which it is disconnected. A batch that
blocks the event loop uses up one at most."""
LEAST_BYTES = 1 << 20
"""Bytes that a client must move in that time while it sends the tensors of a call, or has unread answers."""


class StreamLine(asyncio.BufferedProtocol):
    """One connection of a listener. Implements :class:`~symbiosis.transports.courier.Line`."""

    peer: Peer

    def __init__(self, listener: StreamListener[Any]) -> None:
        self.listener = listener
        self._stream = ByteStream(wire.MAX_TO_EXECUTOR)
        self._outgoing: deque[Iterator[Any]] = deque()
        """Messages of which the event loop does not have all parts yet, in their order."""
        self._writing: asyncio.Handle | None = None
        self._ends = False
        """Whether the connection ends after the messages that wait."""
        self._unsent = False
        """Whether the event loop has asked to stop writing, because 64 KiB wait for the client to read; any byte, if
        the limit is 0."""
        self._unread = 0
        """Bytes of messages, apart from the tensors of results, sent since the client was last seen to have read
        everything."""
        self._then: list[Callable[[], object]] = []
        """What to call when the client has read them."""
        self._moved = 0
        """Bytes that came, and that were sent."""
        self._watch: asyncio.TimerHandle | None = None
        self._listening = True
        self._paused = False
        """Whether the event loop does not read the connection."""
        self._transport: Any = None
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.Handle | None = None

    def open(self, tenant: str) -> None:
        """Begin the conversation with a client of this tenant."""
        self.peer.identified(tenant)
        if self.peer.gone:
            return
        self._refuse_after(HELLO_WITHIN_S, f"no HELLO within {HELLO_WITHIN_S:.0f} s")
        self._check_progress(0, 0)

    def _has_room(self, *, readable: bool) -> bool:
        """Return whether the executor can serve one more connection; otherwise end this one.

        Args:
            readable: whether the client can read a reason.
        """
        while not self.peer.account.open(self.listener.address):
            if not self._cut_oldest():  # there is no memory for a goodbye either
                self.drop(BusyError("no memory is left for another connection"))
                return False
        left = descriptors.left(self._transport.get_extra_info("socket").fileno())
        if left <= 0:
            why = "no file descriptors are left"
        elif len(self.listener.lines) > MAX_CONNECTIONS:
            why = f"{MAX_CONNECTIONS} clients are connected already"
        else:
            return True
        if self._cut_oldest():
            return True
        error = BusyError(f"{why} at the executor; try later")
        if readable and 2 * left > -descriptors.SPARE:
            self.peer.refuse(error)
        else:
            self.drop(error)
        return False

    def _cut_oldest(self) -> bool:
        """Cut the listener's oldest connection whose owner is not known, to have room for this one. Return whether
        there was another one."""
        return False

    def get_buffer(self, hint: int) -> memoryview:
        return self._stream.room()

    def buffer_updated(self, count: int) -> None:
        if self.peer.gone:
            return
        self._moved += count
        try:
            self._stream.filled(count)
        except OSError as error:  # of TLS
            self.drop(error)
            return
        except WireError as error:
            self.peer.refuse(error)
            return
        if self._reading is None:
            self._read()

    def _read(self) -> None:
        """Take some messages that have come; reading of the connection goes on when there are no more."""
        self._reading = None
        try:
            with no_modes():
                for _ in range(READ_AT_ONCE):
                    if self.peer.gone:
                        return
                    if self._stream.awaits and not self._stream.take():
                        self._resume()
                        return
                    if not self._listening or self._has_enough_unread():
                        self._pause()
                        return
                    found = self._stream.next()
                    if found is None:
                        self._resume()
                        return
                    self.peer.received(*found)
        except WireError as error:
            self.peer.refuse(error)
            return
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            self.drop(f"there is no memory for its call: {error}")
            return
        self._pause()
        self._read_soon()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def into(self, target: memoryview, then: Callable[[], object]) -> None:
        """Read the payload of the message that the peer has just received into ``target``; then call ``then``."""
        self._stream.into(target, then)

    def connection_lost(self, error: Exception | None) -> None:
        self.listener.lines.discard(self)
        self._stop_deadline()
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self.peer.leave("it closed the connection" if error is None else str(error))
            # A payload that was under way refers to this line: its memory would stay until Python looks for cycles.
            self._stream = ByteStream(0)
            self._outgoing.clear()
            if self._writing is not None:
                self._writing.cancel()
            self._then.clear()
            self.peer.closed()

    def send(self, message: bytes, payload: int = 0, parts: Sequence[Any] = (), *, results: bool = False) -> None:
        """Send a message and the parts of its payload, ``payload`` bytes together: results, or something else. Has no
        effect when the client is gone."""
        transport = self._transport
        if not self.peer.gone and not transport.is_closing():
            self._outgoing.append(self._stream.encode(message, payload, parts))
            self._unread += max(len(message) + (0 if results else payload), MESSAGE_BYTES)
            if len(self._outgoing) == 1 and not self._unsent:
                self._write()

    def _write(self) -> None:
        """Write a part of what is to be sent. The rest follows when other work had its turn, and when the client has
        read."""
        written = 0
        while self._outgoing and not self._transport.is_closing():
            for part in self._outgoing[0]:
                written += len(part)
                self._transport.write(part)
                if written >= WRITTEN_AT_ONCE:
                    break
            else:
                self._outgoing.popleft()
                continue
            if not self._unsent and self._writing is None:
                self._writing = asyncio.get_running_loop().call_soon(self._write_on)
            break
        self._moved += written

    def _write_on(self) -> None:
        """Write more of what is to be sent."""
        self._writing = None
        try:
            self._write()
        except (MemoryError, RuntimeError, OSError) as error:  # torch raises the second, TLS the third
            self.drop(f"an answer cannot be sent: {error}")
            return
        if not self._outgoing:
            if self._ends:
                self.peer.leave("it sends no more")  # no answer can follow the end
                # The caller may be a write of asyncio, which itself writes an end that it finds, also a second time.
                asyncio.get_running_loop().call_soon(self._write_eof)
            if not self._unsent:
                self._was_read()

    def _was_read(self) -> None:
        """Go on with what waits until the client has read."""
        then, self._then = self._then, []
        for one in then:
            one()
        self._read_soon()

    def _has_enough_unread(self) -> bool:
        """Return whether the client leaves too much unread. If so, :meth:`resume_writing` is called when it has read
        everything."""
        if self._unread <= MAX_UNREAD:
            return False
        if self._outgoing:
            return True
        if not self._transport.get_write_buffer_size():
            self._unread = 0
            return False
        if not self._unsent:
            self._transport.set_write_buffer_limits(0)  # calls pause_writing if anything waits
        return self._unsent

    def pause_writing(self) -> None:
        self._unsent = True

    def resume_writing(self) -> None:
        self._unsent = False
        self._transport.set_write_buffer_limits()
        if self._outgoing:
            self._write_on()
        else:
            self._unread = 0
            self._was_read()

    def when_read(self, then: Callable[[], object]) -> None:
        if self._unsent or self._outgoing:
            self._then.append(then)
        else:
            then()

    def _check_progress(self, moved: int, checks: int) -> None:
        """Disconnect a client that keeps memory occupied and moves no bytes."""
        now = self._moved - self._transport.get_write_buffer_size()
        if now - moved >= LEAST_BYTES or not (self._unsent or self._stream.awaits):
            moved, checks = now, 0
        elif checks == CHECKS:
            self.drop("it does not read its answers" if self._unsent else "it does not send the tensors of its call")
            return
        self._watch = asyncio.get_running_loop().call_later(CHECK_S, self._check_progress, moved, checks + 1)

    def drop(self, why: object) -> None:
        """End the connection now."""
        self.peer.dropped(str(why))
        self._abort()

    def _abort(self) -> None:
        with contextlib.suppress(OSError), self._socket() as connected:  # an error if it has ended already
            connected.shutdown(socket.SHUT_RDWR)  # a forked process may have it too, and keep the client waiting
        self._transport.abort()

    def _socket(self) -> socket.socket:
        """Return an object of its own for the connection's socket. That of the event loop can do less."""
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))

    def hang_up(self) -> None:
        if not self._transport.is_closing():
            if self._outgoing:
                self._ends = True
            elif not self._write_eof():
                return
            self._resume()  # and drop what comes: with bytes unread, the kernel would drop what was sent
        self._abort_soon()

    def _write_eof(self) -> bool:
        """Tell the client that nothing follows. Return whether it is still there."""
        try:
            if not self._transport.is_closing():
                self._transport.write_eof()
        except OSError:
            self._abort()
            return False
        return True

    def eof_received(self) -> bool:
        """Close the connection of a client that sends no more, once everything is written or GOODBYE_S have passed."""
        self._abort_soon()
        self._ends = bool(self._outgoing)
        return self._ends

    def _abort_soon(self) -> None:
        self._stop_deadline()
        self._deadline = asyncio.get_running_loop().call_later(GOODBYE_S, self._abort)

    def listen(self, wanted: bool) -> None:
        self._listening = wanted
        if wanted or self._stream.awaits:
            self._read_soon()
        else:
            self._pause()

    def _read_soon(self) -> None:
        if self._reading is None:
            self._reading = asyncio.get_running_loop().call_soon(self._read)

    @property
    def authenticated(self) -> bool:
        return False

    def show(self, status: dict[str, Any]) -> dict[str, Any]:
        return status

    def greeted(self, name: str) -> str:
        self._stop_deadline()
        if not name:
            self._refuse_after(LOOK_WITHIN_S, f"a status connection may stay {LOOK_WITHIN_S:.0f} s")
        return name

    def end(self, error: SymbiosisError) -> None:
        """End the conversation with a reason that the client is told."""
        self.peer.end(error)

    def _refuse_after(self, seconds: float, why: str) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, lambda: self.peer.refuse(WireError(why)))

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


L = TypeVar("L", bound=StreamLine)


class StreamListener(Generic[L]):
    """What the listeners of byte streams have in common.

    Args:
        address: where clients connect, as far as it is known.
        service: the executor.
        limits: limits of each client.
    """

    def __init__(self, address: str, service: Service, limits: Limits) -> None:
        self.address = address
        self.service = service
        self.limit(limits)
        self.share = ServedShare(service)
        self.lines: set[L] = set()
        """Connections; each adds and removes itself."""
        self._server: asyncio.Server | None = None

    def limit(self, limits: Limits) -> None:
        """Give clients that connect from now on these limits."""
        self.limits = limits.within(self.service.budget.largest)

    async def _accept(
        self, listening: socket.socket, address: str, create: Callable[..., Awaitable[asyncio.Server]], line: type[L]
    ) -> None:
        """Accept clients at a bound socket; ``create`` is the event loop's function for it. Raises UsageError."""
        self._listening = listening
        try:
            self._server = await create(lambda: line(self), sock=listening, backlog=ACCEPTED_AT_ONCE)
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise UsageError(f"cannot listen on {address}: {error.strerror or error}") from error

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # asyncio loses a connection that it has accepted but not made yet. It makes each in two cycles.
            asyncio.get_running_loop().remove_reader(self._listening)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with contextlib.suppress(OSError):  # Linux alone shuts down sockets that listen
                self._listening.shutdown(socket.SHUT_RDWR)  # a forked process may have it too, and keep the port alive
            server.close()
            for line in list(self.lines):
                line.end(ExecutorClosedError.of(self.address))
        self.share.close()
        self.service.closed(self)
