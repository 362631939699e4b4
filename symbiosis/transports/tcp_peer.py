"""The executor's side of one ``tcp://`` connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import zmq

from symbiosis.core.requests import Expected
from symbiosis.errors import BusyError, WireError
from symbiosis.transports import wire
from symbiosis.transports.peer import Peer
from symbiosis.transports.sockets import Frames, Received, matrices, payload, received, the_connection
from symbiosis.transports.wire import CallMessage, Type

if TYPE_CHECKING:
    from symbiosis.transports.tcp import TcpListener

__all__ = ["Link", "TcpPeer"]

PING = wire.pack(Type.PING)
_COPIED_BELOW = 64 << 10
"""Bytes. ZeroMQ copies what is smaller: that costs less than keeping track of it."""


@dataclass(slots=True, eq=False)
class Link:
    """A TCP connection that ZeroMQ has accepted."""

    descriptor: int
    remote: tuple[str, int]
    since: float
    """Seconds on the loop's clock."""
    doubtful_until: float = 0.0
    """When it is sure that messages that came by its descriptor are its own; on the same clock."""
    peer: TcpPeer | None = None
    cut_at: float | None = None
    messages: int = 0
    """That came from there, whole."""
    _seen: tuple[int, int] = (0, 0)
    """Messages, and bytes, when there were more messages than before."""

    def __str__(self) -> str:
        return f"{self.remote[0]}:{self.remote[1]}"

    def received(self) -> Received:
        """When the last byte came from there, and how many."""
        return received(self.descriptor, self.remote)

    def unfinished(self, received_bytes: int) -> int:
        """Bytes that have come since there was a message; at most what the time between two looks brings too much."""
        if self.messages != self._seen[0]:
            self._seen = self.messages, received_bytes
        return received_bytes - self._seen[1]

    def cut(self) -> None:
        """End it now. ZeroMQ has no call for that; it notices, as if the other side had done it."""
        with the_connection(self.descriptor, self.remote) as connection:
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(sockets.SHUT_RDWR)


class TcpPeer(Peer):
    """One connection that has said something. ``user`` is the public key that it has shown; None without CURVE."""

    def __init__(self, listener: TcpListener, identity: bytes, link: Link, user: str | None, tenant: str) -> None:
        super().__init__(listener.service, listener.limits, tenant)
        self.identity = identity
        self.link = link
        self.user = user
        self._listener = listener
        self._listening = True
        self._waiting: deque[Frames] = deque()
        """Messages that came while it had more outstanding than it may."""
        self._waiting_bytes = 0
        self._frames: Frames = ()
        """What came with the message that is being read."""
        self._sizes: dict[int, int] = {}
        """Bytes of each outstanding call's tensors."""
        self._held_bytes = 0
        self._unsent: deque[tuple[Any, int]] = deque()
        """Large answers on their way: ZeroMQ's tracker, bytes."""
        self._unsent_bytes = 0

    @property
    def is_gone(self) -> bool:
        return self._gone

    # ------------------------------------------------------------------------------------------------ what comes in

    def take(self, frames: Frames) -> None:
        """A message: [message, matrix…]."""
        if self._gone:
            return
        if len(frames) == 1 and frames[0].buffer == PING:
            self.received(PING)  # however much else it has to wait for
        elif self._listening and not self._waiting:
            self._read_one(frames)
        else:
            self._waiting.append(frames)
            self._waiting_bytes += sum(map(len, frames))
            if len(self._waiting) > 4 * self._limits.calls + 64:
                self.refuse(WireError(f"{len(self._waiting)} messages beyond the limit of {self._limits.calls} calls"))
            elif self._waiting_bytes + self._held_bytes > self._limits.arena_bytes:
                self.refuse(self._too_much(self._waiting_bytes + self._held_bytes))

    def _too_much(self, size: int) -> WireError:
        return WireError(f"{size} bytes of tensors are outstanding; at most {self._limits.arena_bytes} are allowed")

    def _read_one(self, frames: Frames) -> None:
        self._frames = frames[1:]
        try:
            self.received(frames[0].buffer)
        finally:
            self._frames = ()

    def _read_waiting(self) -> None:
        while self._waiting and self._listening and not self._gone:
            frames = self._waiting.popleft()
            self._waiting_bytes -= sum(map(len, frames))
            self._read_one(frames)

    def listen(self, wanted: bool) -> None:
        self._listening = wanted
        if wanted and self._waiting:
            asyncio.get_running_loop().call_soon(self._read_waiting)

    def _control(self, type_: Type, content: Sequence[Any]) -> None:
        if self._frames:
            raise WireError(f"{type_.name} brings no tensors")
        if type_ is Type.SHARE and self.session is not None:
            start = wire.read_id(content)
            self._send([wire.pack(Type.SHARE, start), self._trace(payload(self._listener.chunks().at(start)))])
        else:
            super()._control(type_, content)

    def qualified(self, name: str) -> str:
        # With keys, names are each tenant's own: nobody can be in the way of another.
        return name if self.user is None else f"{self.tenant}/{name}"

    def _hello(self, hello: wire.Hello) -> None:
        mine = self._listener.connections_of(self.tenant)
        if not self._greeted and mine > self._limits.clients:
            self.refuse(BusyError(f"{self.tenant} has {mine - 1} connections here already; close one first"))
            return
        super()._hello(hello)

    def tensors(self, message: CallMessage, expected: Expected) -> tuple[torch.Tensor, ...]:
        size = sum(map(len, self._frames))
        if self._held_bytes + size > self._limits.arena_bytes:
            raise self._too_much(self._held_bytes + size)
        tensors = matrices(self._frames, message.rows, expected.widths, expected.dtype)
        device = self._service.device
        return tensors if device.type == "cpu" else tuple(tensor.to(device) for tensor in tensors)

    # What is outstanding, in bytes: Peer counts calls and rows.

    def _call(self, session: Any, message: CallMessage) -> None:
        size = sum(map(len, self._frames))
        super()._call(session, message)
        if message.id in self._calls:
            self._sizes[message.id] = size
            self._held_bytes += size

    def _done(self, message: CallMessage, reply: asyncio.Future[tuple[torch.Tensor, ...]]) -> None:
        self._held_bytes -= self._sizes.pop(message.id, 0)
        super()._done(message, reply)

    def _cancel(self, id_: int) -> None:
        self._held_bytes -= self._sizes.pop(id_, 0)
        super()._cancel(id_)

    # ------------------------------------------------------------------------------------------------ what goes out

    def welcome(self, session: bool) -> dict[str, Any]:
        return {"share_bytes": self._listener.chunks().size} if session else {}

    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        if not self._gone:
            parts: list[Any] = [wire.pack(Type.RESULT, message.id)]
            parts.extend(self._trace(payload(result.cpu())) for result in results)
            self._send(parts)

    def send(self, message: bytes) -> None:
        if not self._gone:
            self._send([message if len(message) < _COPIED_BELOW else self._trace(memoryview(message))])

    def _trace(self, buffer: Any) -> Any:
        """A large buffer as a frame of which we learn when it is on its way."""
        size = buffer.nbytes
        if size < _COPIED_BELOW:
            return buffer
        frame = zmq.Frame(buffer, track=True, copy=False, copy_threshold=0)
        unsent = self._unsent
        while unsent and unsent[0][0].done:
            self._unsent_bytes -= unsent.popleft()[1]
        unsent.append((frame.tracker, size))
        self._unsent_bytes += size
        return frame

    def _send(self, parts: list[Any]) -> None:
        try:
            self._listener.send([self.identity, *parts])
        except zmq.Again:
            self._drop("it does not read its answers")
        except zmq.ZMQError as error:  # EHOSTUNREACH: the connection has ended; the monitor will say so too
            self.gone(error.strerror or "its connection has ended")
        else:
            if self._unsent_bytes > self._limits.arena_bytes + self._limits.arena_bytes // 4:
                self._drop("it does not read its answers")

    def _drop(self, why: str) -> None:
        self.gone(why)
        self.link.cut()

    def hang_up(self) -> None:
        self.link.cut_at = asyncio.get_running_loop().time() + wire.GOODBYE_S

    def gone(self, why: str) -> None:
        super().gone(why)
        self._waiting.clear()
        self._sizes.clear()
        self._unsent.clear()
