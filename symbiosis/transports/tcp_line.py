"""The executor's end of one ``tcp://`` connection: flow of messages, and tensors as raw frames after their message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq

from symbiosis.core.requests import Results
from symbiosis.core.transport import Service, Session
from symbiosis.errors import BusyError, WireError
from symbiosis.transports import peer, wire
from symbiosis.transports.peer import Courier, Peer
from symbiosis.transports.share import ServedShare
from symbiosis.transports.sockets import Frames, TcpSocket, matrices, payload
from symbiosis.transports.wire import PING, CallMessage, Limits, Type

_COPIED_BELOW = 64 << 10
"""Bytes. ZeroMQ copies smaller buffers: that costs less than a tracker for each."""


@dataclass(eq=False)
class TcpLine:
    """The messages of one connection."""

    service: Service
    limits: Limits
    identity: bytes
    """The client's identity at the ROUTER."""
    socket: TcpSocket
    user: str | None
    """Public key of the client (Z85); None without CURVE."""
    tenant: str
    """Name of the key, or the client's IP address."""
    send_by_router: Callable[[Sequence[Any]], None]
    """Sends [identity, message, frame…]."""
    connections: Callable[[str], int]
    """Returns how many connections a tenant has."""
    courier: Callable[[TcpLine], TcpCourier]
    """Makes the courier of tensors."""

    def __post_init__(self) -> None:
        self.cut_at: float | None = None
        """When the listener cuts the connection of a rejected client, on the loop's clock."""
        self._listening = True
        self._waiting: deque[Frames] = deque()
        """Messages that came while the client was at its limits."""
        self._waiting_bytes = 0
        self._unsent: deque[tuple[Any, int]] = deque()
        """Large answers on their way: ZeroMQ's tracker, bytes."""
        self._unsent_bytes = 0
        self._courier = self.courier(self)
        self.peer = Peer(self.service, self.limits, self.tenant, self, self._courier)

    def take(self, frames: Frames) -> None:
        """Take a message: [message, matrix…]."""
        if self.peer.gone:
            return
        if len(frames) == 1 and frames[0].buffer == PING:
            self.peer.received(PING)  # also while the client is at its limits
        elif self._listening and not self._waiting:
            self.peer.received(frames[0].buffer, frames[1:])
        else:
            self._waiting.append(frames)
            self._waiting_bytes += sum(map(len, frames))
            try:
                if len(self._waiting) > 4 * self.limits.calls + 64:
                    raise WireError(f"{len(self._waiting)} messages beyond the limit of {self.limits.calls} calls")
                self._courier.check(self._waiting_bytes)
            except WireError as error:
                self.peer.refuse(error)

    def listen(self, wanted: bool) -> None:
        self._listening = wanted
        if wanted and self._waiting:
            asyncio.get_running_loop().call_soon(self._read_waiting)

    def _read_waiting(self) -> None:
        while self._waiting and self._listening and not self.peer.gone:
            frames = self._waiting.popleft()
            self._waiting_bytes -= sum(map(len, frames))
            self.peer.received(frames[0].buffer, frames[1:])

    def admit(self, name: str) -> str:
        others = self.connections(self.tenant) - 1
        if others >= self.limits.clients:
            raise BusyError(f"{self.tenant} has {others} connections here already; close one first")
        return name if self.user is None else f"{self.tenant}/{name}"  # with keys, each tenant has names of its own

    def send(self, message: bytes) -> None:
        if not self.peer.gone:
            self.send_parts([message if len(message) < _COPIED_BELOW else self.trace(memoryview(message))])

    def send_parts(self, parts: Sequence[Any]) -> None:
        """Send a message and its frames."""
        try:
            self.send_by_router([self.identity, *parts])
        except zmq.Again:
            self.drop("it does not read its answers")
        except zmq.ZMQError as error:  # EHOSTUNREACH: the connection has ended
            self.peer.leave(error.strerror or "its connection has ended")
        else:
            self.count_unsent(0)

    def trace(self, buffer: Any) -> Any:
        """Return a buffer as a frame; count the bytes of a large one until ZeroMQ has sent them."""
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

    def count_unsent(self, size: int) -> None:
        """Count bytes on their way to the client (negative: they were sent). Too many end the connection."""
        self._unsent_bytes += size
        if self._unsent_bytes > self.limits.arena_bytes + self.limits.arena_bytes // 4:
            self.drop("it does not read its answers")

    def drop(self, why: object) -> None:
        """End the connection now."""
        self.peer.leave(str(why))
        self.socket.cut()

    def hang_up(self) -> None:
        self._waiting.clear()
        self.cut_at = asyncio.get_running_loop().time() + peer.GOODBYE_S


class TcpCourier(Courier):
    """What the couriers of ``tcp://`` and ``dist://`` have in common: they hand out the client's share of the model in
    chunks, and keep the tensors of outstanding calls within the limit of bytes."""

    def __init__(self, line: TcpLine, share: ServedShare) -> None:
        self.line = line
        self._share = share
        self._held = 0
        self._sizes: dict[int, int] = {}
        """Bytes of the tensors of each outstanding call, by id."""

    def welcome(self, joined: bool) -> dict[str, Any]:
        return {"share_bytes": self._share.size()} if joined else {}

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        if type_ is not Type.SHARE:
            return False
        start = wire.read_id(content)
        chunk = self.line.trace(memoryview(self._share.chunk(start)))
        self.line.send_parts([wire.pack(Type.SHARE, start), chunk])
        return True

    def hold(self, id_: int, size: int) -> None:
        """Count the bytes of a call's tensors; raises the error of :meth:`check`."""
        self.check(size)
        self._sizes[id_] = size
        self._held += size

    def check(self, more: int) -> None:
        """Raise WireError if ``more`` bytes would exceed the limit."""
        limit = self.line.limits.arena_bytes
        if self._held + more > limit:
            raise WireError(f"{self._held + more} bytes of tensors are outstanding; at most {limit} are allowed")

    def free(self, id_: int) -> None:
        self._held -= self._sizes.pop(id_, 0)


class FrameCourier(TcpCourier):
    """Takes tensors from the frames of a message, and sends results as frames."""

    def tensors(self, message: CallMessage, session: Session, frames: Sequence[Any]) -> Results | None:
        expected = session.expects(message.key)
        tensors = matrices(frames, message.rows, expected.widths, expected.dtype)
        self.hold(message.id, sum(map(len, frames)))
        device = self.line.service.device
        return tensors if device.type == "cpu" else tuple(tensor.to(device) for tensor in tensors)

    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        frames = [self.line.trace(payload(result.cpu())) for result in results]
        self.line.send_parts([wire.pack_result(message.id), *frames])
