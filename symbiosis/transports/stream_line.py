"""The executor's end of a connection that is a byte stream: ``shm://``, ``tcp://`` and the messages of ``dist://``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from symbiosis.errors import BusyError, SymbiosisError, WireError
from symbiosis.log import get_logger
from symbiosis.transports import descriptors, peer, wire
from symbiosis.transports.peer import Peer
from symbiosis.transports.stream import ByteStream

log = get_logger(__name__)

AT_ONCE = 16
"""Messages of one client that are read before other clients get their turn."""


class StreamLine(asyncio.BufferedProtocol):
    """One connection of a listener. Implements :class:`~symbiosis.transports.peer.Line`.

    Args:
        most_unsent: bytes of answers that the client may leave unread before it is disconnected.
    """

    peer: Peer

    def __init__(self, most_unsent: int) -> None:
        self._stream = ByteStream(wire.MAX_TO_EXECUTOR)
        self._most_unsent = most_unsent
        self._listening = True
        self._paused = False
        """Whether the event loop does not read the connection."""
        self._transport: Any = None
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.Handle | None = None

    def open(self) -> None:
        """Begin the conversation."""
        self._refuse_after(peer.HELLO_WITHIN_S, f"no HELLO within {peer.HELLO_WITHIN_S:.0f} s")

    def _has_room(self, connections: int, *, readable: bool) -> bool:
        """Return whether the executor can serve one more connection; otherwise end this one.

        Args:
            connections: number of connections of the listener.
            readable: whether the client can read a reason.
        """
        left = descriptors.left(self._transport.get_extra_info("socket").fileno())
        if connections <= peer.MAX_CONNECTIONS and left > 0:
            return True
        why = f"{peer.MAX_CONNECTIONS} clients are connected already" if left > 0 else "no file descriptors are left"
        error = BusyError(f"{why} at the executor; try later")
        if readable and 2 * left > -descriptors.SPARE:
            self.peer.refuse(error)
        else:
            self.drop(error)
        return False

    def get_buffer(self, hint: int) -> memoryview:
        return self._stream.room()

    def buffer_updated(self, count: int) -> None:
        if self.peer.gone:
            return
        try:
            self._stream.filled(count)
        except OSError as error:  # of TLS
            self.drop(error)
            return
        if self._listening and self._reading is None:
            self._read()

    def _read(self) -> None:
        """Take some messages that have come; reading of the connection goes on when there are no more."""
        self._reading = None
        try:
            for _ in range(AT_ONCE):
                if not self._listening or self.peer.gone:
                    return
                found = self._stream.next()
                if found is None:
                    self._resume()
                    return
                self.peer.received(*found)
        except WireError as error:
            self.peer.refuse(error)
            return
        self._pause()
        self._reading = asyncio.get_running_loop().call_soon(self._read)

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
        self._stop_deadline()
        if self._transport is not None:
            self.peer.leave("it closed the connection" if error is None else str(error))

    def send(self, message: bytes, payload: int = 0, parts: Sequence[Any] = ()) -> None:
        """Send a message and the parts of its payload, ``payload`` bytes together. Has no effect when the client is
        gone."""
        transport = self._transport
        if not self.peer.gone and not transport.is_closing():
            for part in self._stream.encode(message, payload, parts):
                transport.write(part)
            self.count_unsent(transport.get_write_buffer_size())

    def count_unsent(self, size: int) -> None:
        """Disconnect the client if it has left too many bytes unread."""
        if size > self._most_unsent:
            self.drop("it does not read its answers")

    def drop(self, why: object) -> None:
        """End the connection now."""
        log.warning("connection cut", tenant=self.peer.tenant, why=str(why))
        self.peer.leave(str(why))
        self._transport.abort()

    def hang_up(self) -> None:
        self._stop_deadline()
        if self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client is gone
            self._transport.abort()
            return
        self._resume()  # and drop what comes: with bytes unread, the kernel would drop what was sent
        self._deadline = asyncio.get_running_loop().call_later(peer.GOODBYE_S, self._transport.abort)

    def listen(self, wanted: bool) -> None:
        self._listening = wanted
        if not wanted:
            self._pause()
        elif self._reading is None:
            self._reading = asyncio.get_running_loop().call_soon(self._read)

    @property
    def authenticated(self) -> bool:
        return False

    def show(self, status: dict[str, Any]) -> dict[str, Any]:
        return status

    def admit(self, name: str) -> str:
        self._stop_deadline()
        if not name:
            self._refuse_after(peer.LOOK_WITHIN_S, f"a status connection may stay {peer.LOOK_WITHIN_S:.0f} s")
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
