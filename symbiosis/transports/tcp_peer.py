"""The executor's end of one ``tcp://`` connection: flow of messages, and tensors as raw frames after their message."""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from symbiosis.core.transport import Service, Session
from symbiosis.errors import BusyError, WireError
from symbiosis.transports import peer, wire
from symbiosis.transports.chunks import Chunks
from symbiosis.transports.peer import Courier, Peer
from symbiosis.transports.sockets import Frames, Received, matrices, payload, received, the_connection
from symbiosis.transports.wire import PING, CallMessage, Limits, Type

__all__ = ["Accepted", "FrameCourier", "ShareCourier", "TcpLine"]

_COPIED_BELOW = 64 << 10
"""Bytes. ZeroMQ copies smaller buffers: that costs less than a tracker for each."""

Results = tuple[torch.Tensor, ...]


class Accepted:
    """A TCP connection that ZeroMQ has accepted. Times are in seconds on the loop's clock.

    Args:
        descriptor: of the connection.
        remote: IP address and port of the client.
        since: when it was accepted.
        doubtful_until: until then, messages may arrive that an earlier connection with this descriptor has sent.
    """

    def __init__(self, descriptor: int, remote: tuple[str, int], since: float, doubtful_until: float) -> None:
        self.descriptor = descriptor
        self.remote = remote
        self.since = since
        self.doubtful_until = doubtful_until
        self.line: TcpLine | None = None
        self.cut_at: float | None = None
        self._messages = 0
        self._seen = (0, 0)
        """Messages, and bytes received, when a message was last seen to have come."""

    def __str__(self) -> str:
        return f"{self.remote[0]}:{self.remote[1]}"

    def belongs_to(self, line: TcpLine) -> None:
        """Note whose messages come over this connection."""
        self.line = line

    def take(self, line: TcpLine, frames: Frames) -> None:
        """Pass on a whole message."""
        self._messages += 1
        line.take(frames)

    def received(self) -> Received:
        """Return when the last byte came, and how many have come."""
        return received(self.descriptor, self.remote)

    def unfinished(self, received_bytes: int) -> int:
        """Return how many bytes have come since the last whole message, to within the time between two calls."""
        if self._messages != self._seen[0]:
            self._seen = self._messages, received_bytes
        return received_bytes - self._seen[1]

    def cut_after(self, seconds: float) -> None:
        """Have the listener cut the connection unless the client closes it first."""
        self.cut_at = asyncio.get_running_loop().time() + seconds

    def cut(self) -> None:
        """End the connection now. ZeroMQ has no call for that; it sees it as ended by the client."""
        with the_connection(self.descriptor, self.remote) as connection:
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shutdown(sockets.SHUT_RDWR)


class Budget:
    """Bytes of the tensors of one client's outstanding calls, within ``limit``."""

    def __init__(self, limit: int) -> None:
        self.held = 0
        self._limit = limit
        self._sizes: dict[int, int] = {}

    def hold(self, id_: int, size: int) -> None:
        """Count the tensors of a call.

        Raises:
            WireError: the client would exceed its limit.
        """
        self.check(size)
        self._sizes[id_] = size
        self.held += size

    def check(self, more: int) -> None:
        """Raise WireError if ``more`` bytes would exceed the limit."""
        if self.held + more > self._limit:
            raise WireError(f"{self.held + more} bytes of tensors are outstanding; at most {self._limit} are allowed")

    def free(self, id_: int) -> None:
        """Stop counting the tensors of a call."""
        self.held -= self._sizes.pop(id_, 0)


class TcpLine:
    """The messages of one connection.

    Args:
        service: the executor.
        limits: limits of the client.
        identity: the client's identity at the ROUTER.
        accepted: the connection.
        user: public key of the client (Z85); None without CURVE.
        tenant: name of the key, or the client's IP address.
        send: sends [identity, message, frame…] by the ROUTER.
        connections: returns how many connections a tenant has.
        courier: makes the courier of tensors.
    """

    def __init__(
        self,
        service: Service,
        limits: Limits,
        identity: bytes,
        accepted: Accepted,
        user: str | None,
        tenant: str,
        send: Callable[[Sequence[Any]], None],
        connections: Callable[[str], int],
        courier: Callable[[TcpLine], Courier],
    ) -> None:
        self.service = service
        self.limits = limits
        self.identity = identity
        self.accepted = accepted
        self.user = user
        self.tenant = tenant
        self.budget = Budget(limits.arena_bytes)
        self._send_by_router = send
        self._connections = connections
        self._listening = True
        self._waiting: deque[Frames] = deque()
        """Messages that came while the client was at its limits."""
        self._waiting_bytes = 0
        self._unsent: deque[tuple[Any, int]] = deque()
        """Large answers on their way: ZeroMQ's tracker, bytes."""
        self._unsent_bytes = 0
        self.peer = Peer(service, limits, tenant, self, courier(self))

    # Incoming messages

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
                self.budget.check(self._waiting_bytes)
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
        others = self._connections(self.tenant) - 1
        if others >= self.limits.clients:
            raise BusyError(f"{self.tenant} has {others} connections here already; close one first")
        return name if self.user is None else f"{self.tenant}/{name}"  # with keys, each tenant has names of its own

    # Outgoing messages

    def send(self, message: bytes) -> None:
        if not self.peer.gone:
            self.send_parts([message if len(message) < _COPIED_BELOW else self.trace(memoryview(message))])

    def send_parts(self, parts: Sequence[Any]) -> None:
        """Send a message and its frames."""
        try:
            self._send_by_router([self.identity, *parts])
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

    def drop(self, why: str) -> None:
        """End the connection now."""
        self.peer.leave(why)
        self.accepted.cut()

    def hang_up(self) -> None:
        self._waiting.clear()
        self.accepted.cut_after(peer.GOODBYE_S)


class ShareCourier:
    """Hands out the client's share of the model in chunks.

    Args:
        line: the connection.
        chunks: returns the share; called when the first client joins.
    """

    def __init__(self, line: TcpLine, chunks: Callable[[], Chunks]) -> None:
        self._line = line
        self._chunks = chunks

    def welcome(self, joined: bool) -> dict[str, Any]:
        """Return the size of the share, for a client that joins."""
        return {"share_bytes": self._chunks().size} if joined else {}

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        """Answer SHARE. Return whether the message is one."""
        if type_ is not Type.SHARE:
            return False
        start = wire.read_id(content)
        chunk = self._line.trace(payload(self._chunks().at(start)))
        self._line.send_parts([wire.pack(Type.SHARE, start), chunk])
        return True


class FrameCourier:
    """Takes tensors from the frames of a message, and sends results as frames."""

    def __init__(self, line: TcpLine, share: ShareCourier) -> None:
        self.welcome = share.welcome
        self.control = share.control
        self.free = line.budget.free
        self._line = line
        self._device = line.service.device

    def tensors(self, message: CallMessage, session: Session, frames: Sequence[Any]) -> Results | None:
        expected = session.expects(message.key)
        tensors = matrices(frames, message.rows, expected.widths, expected.dtype)
        self._line.budget.hold(message.id, sum(map(len, frames)))
        return tensors if self._device.type == "cpu" else tuple(tensor.to(self._device) for tensor in tensors)

    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        parts = [wire.pack_result(message.id), *[self._line.trace(payload(result.cpu())) for result in results]]
        self._line.send_parts(parts)

    def close(self) -> None:
        pass  # frames go with the calls that hold them
