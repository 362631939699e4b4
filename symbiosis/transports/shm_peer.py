"""The executor's end of one ``shm://`` connection: messages over a Unix socket, tensors in the client's arena."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbiosis.core.transport import Service, Session
from symbiosis.errors import BusyError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import device, peer, wire
from symbiosis.transports.arena import Arena
from symbiosis.transports.device import DeviceArena
from symbiosis.transports.peer import Peer
from symbiosis.transports.stream import MessageBuffer, frame
from symbiosis.transports.wire import CallMessage, Limits, Type

__all__ = ["AT_ONCE", "ShmLine"]

AT_ONCE = 16
"""Messages of one client that are read before other clients get their turn."""
UNSENT_BYTES = 32 << 20
"""Bytes of answers that a client may leave unread before it is disconnected."""
_CARRIES_DESCRIPTORS = b"\0"
"""The byte that carries descriptors, before the welcome."""

Results = tuple[torch.Tensor, ...]


class ShmLine(asyncio.Protocol):
    """One connection of a listener.

    Args:
        service: the executor.
        limits: limits of the client.
        share: returns the descriptor of the client's share of the model.
        connected: the connections of the listener; this one adds and removes itself.
    """

    def __init__(self, service: Service, limits: Limits, share: Callable[[], int], connected: set[ShmLine]) -> None:
        self._service = service
        self._limits = limits
        self._share = share
        self._connected = connected
        self._messages = MessageBuffer(wire.MAX_TO_EXECUTOR)
        self._listening = True
        self._behind = False
        """Whether messages wait that one read has brought."""
        self._transport: Any = None
        self._peer: Peer
        self._deadline: asyncio.TimerHandle | None = None

    # Called by asyncio

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._connected.add(self)
        with self._socket() as connected:
            pid, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        courier = ArenaCourier(self, self._service, self._limits)
        self._peer = Peer(self._service, self._limits, f"uid {user} pid {pid}", self, courier)
        if user not in (os.geteuid(), 0):
            self._peer.refuse(RefusedError(f"this executor serves its own user ({os.geteuid()}), not user {user}"))
        elif len(self._connected) > peer.MAX_CONNECTIONS:
            self._peer.refuse(BusyError(f"{peer.MAX_CONNECTIONS} clients are connected already; try later"))
        else:
            self._refuse_after(peer.HELLO_WITHIN_S, f"no HELLO within {peer.HELLO_WITHIN_S:.0f} s")

    def data_received(self, data: bytes) -> None:
        if not self._listening:
            self._messages.feed(data)
        elif (message := self._messages.only(data)) is not None:
            self._peer.received(message)
        else:
            self._read_messages()

    def _read_messages(self) -> None:
        try:
            for _ in range(AT_ONCE):
                message = self._messages.next() if self._listening and not self._peer.gone else None
                if message is None:
                    if self._behind and self._listening and not self._peer.gone:
                        self._behind = False
                        self._transport.resume_reading()
                    return
                self._peer.received(message)
        except WireError as error:
            self._peer.refuse(error)
            return
        if not self._peer.gone:
            self._behind = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_messages)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_deadline()
        self._connected.discard(self)
        self._peer.leave("it closed the connection" if error is None else str(error))

    # Called by the peer

    def send(self, message: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame(message))
            if self._transport.get_write_buffer_size() > UNSENT_BYTES:
                self._peer.leave("it does not read its answers")
                self._transport.abort()

    def hang_up(self) -> None:
        self._stop_deadline()
        self._transport.close()
        self._deadline = asyncio.get_running_loop().call_later(peer.GOODBYE_S, self._transport.abort)

    def listen(self, wanted: bool) -> None:
        self._listening = wanted
        if wanted:
            if not self._behind:
                self._transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._read_messages)
        else:
            self._transport.pause_reading()

    def admit(self, name: str) -> str:
        self._stop_deadline()
        if not name:
            self._refuse_after(peer.LOOK_WITHIN_S, f"a status connection may stay {peer.LOOK_WITHIN_S:.0f} s")
        return name

    # Called by the courier and the listener

    def send_descriptors(self, arena: int) -> None:
        """Send the descriptors of the arena and of the share. Nothing was sent before, so the socket has room.

        Raises:
            WireError: the client does not take them.
        """
        try:
            with self._socket() as connected:
                socket.send_fds(connected, [_CARRIES_DESCRIPTORS], [arena, self._share()])
        except OSError as error:
            raise WireError(f"the client does not take its descriptors: {error}") from error

    @property
    def busy(self) -> bool:
        """Whether a call of the client is outstanding."""
        return self._peer.busy

    def end(self, error: SymbiosisError) -> None:
        """End the conversation with a reason that the client is told."""
        self._peer.end(error)

    def _refuse_after(self, seconds: float, why: str) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, lambda: self._peer.refuse(WireError(why)))

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _socket(self) -> socket.socket:
        """Return another object for the connection's socket, for what asyncio cannot do."""
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))


class ArenaCourier:
    """Finds tensors in the client's arena, or in its segments of the GPU's memory, and writes results there."""

    def __init__(self, line: ShmLine, service: Service, limits: Limits) -> None:
        self._line = line
        self._device = service.device
        self._limits = limits
        self._arena: Arena | None = None
        self._gpu: DeviceArena | None = None

    def welcome(self, joined: bool) -> dict[str, Any]:
        if not joined:
            return {}
        self._arena, descriptor = Arena.create(self._limits.arena_bytes)
        try:
            self._line.send_descriptors(descriptor)
        finally:
            os.close(descriptor)
        gpu = device.identity(self._device)
        if gpu is not None:
            self._gpu = self._segments()
        return {"arena_bytes": self._arena.size, "gpu": gpu}

    def _segments(self) -> DeviceArena:
        return DeviceArena(self._device, self._limits.arena_bytes, self._limits.arena_bytes)

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        if type_ is not Type.SEGMENT or self._gpu is None:
            return False
        if len(content) == 2 and content[1] is True:  # in place of all segments that the client has
            if self._line.busy:
                raise WireError("segments are replaced while no call is outstanding")
            self._gpu = self._segments()
        try:
            answer = wire.pack(Type.SEGMENT, *self._gpu.grow(wire.read_id(content)))
        except UsageError as error:
            answer = wire.pack(Type.SEGMENT, str(error))
        self._line.send(answer)
        return True

    def _memory(self, place: int) -> Arena | DeviceArena:
        assert self._arena is not None
        return self._arena if self._gpu is None or place < self._arena.size else self._gpu

    def tensors(self, message: CallMessage, session: Session, frames: Sequence[Any]) -> Results | None:
        expected = session.expects(message.key)
        memory = self._memory(message.place)
        tensors = memory.matrices(message.place, message.rows, expected.widths, expected.dtype)
        self._memory(message.answer).matrices(message.answer, message.rows, expected.results, expected.dtype)
        if isinstance(memory, DeviceArena):
            memory.wait(memory.called)
            return tensors
        return tensors if self._device.type == "cpu" else tuple(tensor.to(self._device) for tensor in tensors)

    def free(self, id_: int) -> None:
        pass  # the client alone decides what lies where

    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        memory = self._memory(message.answer)
        widths = tuple([result.shape[1] for result in results])
        places = memory.matrices(message.answer, message.rows, widths, results[0].dtype)
        for place, result in zip(places, results, strict=True):
            place.copy_(result)
        if isinstance(memory, DeviceArena):
            memory.record(memory.answered)
        self._line.send(wire.pack_result(message.id))

    def close(self) -> None:
        self._arena = self._gpu = None
