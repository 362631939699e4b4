"""``shm:///run/symbiosis.sock``: clients in other processes of the same host.

Messages go over a Unix socket; tensors lie in an arena that both processes map (:mod:`symbiosis.transports.arena`),
and the client's share of the model in a sealed memfd that all clients map (D10, D11). Both descriptors come over the
socket, so there is no name to guess and nothing is left behind, however either side ends. The kernel says when the
other side is gone.

The socket is the owner's alone (mode 0600), and the executor checks who has connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Sequence
from typing import Any

import safetensors.torch
import torch

from symbiosis.core.requests import Expected
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Look, Service
from symbiosis.errors import BusyError, ExecutorClosedError, RefusedError, UsageError, WireError
from symbiosis.log import get_logger
from symbiosis.transports import device, shm_client, wire
from symbiosis.transports.arena import Arena, sealed_copy
from symbiosis.transports.device import DeviceArena
from symbiosis.transports.peer import Peer
from symbiosis.transports.shm_connection import look, socket_path
from symbiosis.transports.wire import CallMessage, Frames, Hello, Limits, Type, frame

__all__ = ["ShmListener", "ShmTransport"]

log = get_logger(__name__)

_AT_ONCE = 16
"""Messages of one client before others have their turn."""
HELLO_WITHIN_S = 5.0
"""How long a connection may stay silent before it says who it is."""
MAX_CONNECTIONS = 1024
UNSENT_BYTES = 32 << 20
"""Answers that a client has not read, in bytes, beyond which it is shown out."""


class ShmTransport:
    """Listen on, or connect to, a Unix socket.

    Args:
        retry: how long a client waits for an executor that was lost, in seconds; 0 gives up at once.
        limits: what a listener allows each client.
    """

    def __init__(self, retry: float = 60.0, limits: Limits | None = None) -> None:
        self._retry_s = retry
        self._limits = limits or Limits()

    async def listen(self, address: str, service: Service) -> ShmListener:
        listener = ShmListener(address, service, self._limits)
        await listener.open()
        return listener

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return await shm_client.ShmChannel.open(address, Hello(client, terms), self._retry_s)

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return shm_client.ShmBlockingChannel.open(address, Hello(client, terms), self._retry_s)

    def look(self, address: str) -> Look:
        return look(address)


class ShmListener:
    """An open socket and the clients that came through it."""

    def __init__(self, address: str, service: Service, limits: Limits) -> None:
        self.address = address
        self.service = service
        self.limits = limits
        self.peers: set[_ShmPeer] = set()
        self._path = socket_path(address)
        self._inode: int | None = None
        self._server: asyncio.Server | None = None
        self._share: int | None = None

    async def open(self) -> None:
        """Start to accept clients.

        Raises:
            UsageError: another process listens there, something else is in the way, or the folder does not exist.
            ShareError: the model cannot be served to other processes.
        """
        self.service.share()
        self._make_way()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)
            try:
                listening.bind(str(self._path))
            finally:
                os.umask(before)
            self._inode = self._path.stat().st_ino
            self._server = await asyncio.get_running_loop().create_unix_server(lambda: _ShmPeer(self), sock=listening)
        except OSError as error:
            listening.close()
            raise UsageError(f"cannot listen on {self.address}: {error.strerror or error}") from error
        log.info("listening", address=self.address)

    def _make_way(self) -> None:
        """Remove the socket of an executor that was killed; nothing else."""
        try:
            if not stat.S_ISSOCK(self._path.stat().st_mode):
                raise UsageError(f"cannot listen on {self.address}: {self._path} exists and is no socket")
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self._path))
            except (ConnectionRefusedError, FileNotFoundError):
                with contextlib.suppress(FileNotFoundError):
                    self._path.unlink()
            except OSError as error:
                raise UsageError(f"cannot listen on {self.address}: {error.strerror or error}") from error
            else:
                raise UsageError(f"cannot listen on {self.address}: another executor does")

    def share_descriptor(self) -> int:
        """The memfd with the client's share of the model, in safetensors format; the same for all."""
        if self._share is None:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in self.service.share().tensors.items()}
            self._share = sealed_copy(safetensors.torch.save(tensors), "symbiosis-share")
        return self._share

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for peer in list(self.peers):
                peer.end(ExecutorClosedError(f"the executor at {self.address} was shut down"))
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
            self._server = None
        if self._share is not None:
            os.close(self._share)
            self._share = None


class _ShmPeer(Peer, asyncio.Protocol):
    """One connection."""

    def __init__(self, listener: ShmListener) -> None:
        super().__init__(listener.service, listener.limits, "?")
        self._listener = listener
        self._frames = Frames(wire.MAX_TO_EXECUTOR)
        self._listening = True
        self._behind = False
        """Whether messages wait that one read has brought."""
        self._arena: Arena | None = None
        self._gpu: DeviceArena | None = None
        self._transport: Any = None
        self._deadline: asyncio.TimerHandle | None = None

    # asyncio's side

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._listener.peers.add(self)
        with self._socket() as connected:
            pid, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.tenant = f"uid {user} pid {pid}"
        if user not in (os.geteuid(), 0):
            self.refuse(RefusedError(f"this executor serves its own user ({os.geteuid()}), not user {user}"))
        elif len(self._listener.peers) > MAX_CONNECTIONS:
            self.refuse(BusyError(f"{MAX_CONNECTIONS} clients are connected already; try later"))
        else:
            self._deadline = asyncio.get_running_loop().call_later(
                HELLO_WITHIN_S, lambda: self.refuse(WireError(f"no HELLO within {HELLO_WITHIN_S:.0f} s"))
            )

    def data_received(self, data: bytes) -> None:
        if not self._listening:
            self._frames.feed(data)
        elif (message := self._frames.only(data)) is not None:
            self.received(message)
        else:
            self._read_frames()

    def _read_frames(self) -> None:
        try:
            for _ in range(_AT_ONCE):
                message = self._frames.next() if self._listening and not self._gone else None
                if message is None:
                    if self._behind and self._listening and not self._gone:
                        self._behind = False
                        self._transport.resume_reading()
                    return
                self.received(message)
        except WireError as error:
            self.refuse(error)
            return
        if not self._gone:  # others come first
            self._behind = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_frames)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        self._listener.peers.discard(self)
        self._arena = self._gpu = None
        self.gone("it hung up" if error is None else str(error))

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _socket(self) -> socket.socket:
        """The connection's socket, for what asyncio cannot do."""
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))

    # a peer's side

    def send(self, message: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame(message))
            if self._transport.get_write_buffer_size() > UNSENT_BYTES:
                self.gone("it does not read its answers")
                self._transport.abort()

    def hang_up(self) -> None:
        self._stop_waiting()
        self._transport.close()  # when what was said has been read; but not for ever
        self._deadline = asyncio.get_running_loop().call_later(wire.GOODBYE_S, self._transport.abort)

    def listen(self, wanted: bool) -> None:
        self._listening = wanted
        if wanted:
            if not self._behind:
                self._transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._read_frames)
        else:
            self._transport.pause_reading()

    def welcome(self, session: bool) -> dict[str, Any]:
        self._stop_waiting()
        if not session:
            self._deadline = asyncio.get_running_loop().call_later(
                wire.LOOK_WITHIN_S, lambda: self.refuse(WireError("it has looked for long enough"))
            )
            return {}
        self._arena, descriptor = Arena.create(self._limits.arena_bytes)
        try:
            with self._socket() as connected:  # nothing was sent before, so there is room for this
                socket.send_fds(connected, [_HANDLE], [descriptor, self._listener.share_descriptor()])
        except OSError as error:
            raise WireError(f"the client does not take its descriptors: {error}") from error
        finally:
            os.close(descriptor)
        gpu = device.identity(self._service.device)
        if gpu is not None:
            self._gpu = self._new_gpu_arena()
        return {"arena_bytes": self._arena.size, "gpu": gpu}

    def _new_gpu_arena(self) -> DeviceArena:
        assert self._arena is not None
        return DeviceArena(self._service.device, self._arena.size, self._limits.arena_bytes)

    def _control(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is Type.SEGMENT and self._gpu is not None:
            if len(content) == 2 and content[1] is True:  # instead of what it has
                if self._calls:
                    raise WireError("segments are replaced while no call is outstanding")
                self._gpu = self._new_gpu_arena()
            try:
                self.send(wire.pack(Type.SEGMENT, *self._gpu.grow(wire.read_id(content))))
            except UsageError as error:
                self.send(wire.pack(Type.SEGMENT, str(error)))
        else:
            super()._control(type_, content)

    def _memory(self, place: int) -> Arena | DeviceArena:
        assert self._arena is not None
        return self._arena if self._gpu is None or place < self._arena.size else self._gpu

    def tensors(self, message: CallMessage, expected: Expected) -> tuple[torch.Tensor, ...]:
        memory = self._memory(message.place)
        tensors = memory.matrices(message.place, message.rows, expected.widths, expected.dtype)
        self._memory(message.answer).matrices(message.answer, message.rows, expected.results, expected.dtype)
        if isinstance(memory, DeviceArena):
            memory.wait(memory.called)
            return tensors
        home = self._service.device
        return tensors if home.type == "cpu" else tuple(tensor.to(home) for tensor in tensors)

    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        if self._arena is not None:
            memory = self._memory(message.answer)
            widths = tuple([result.shape[1] for result in results])
            places = memory.matrices(message.answer, message.rows, widths, results[0].dtype)
            for place, result in zip(places, results, strict=True):
                place.copy_(result)
            if isinstance(memory, DeviceArena):
                memory.record(memory.answered)
            self.send(wire.pack_result(message.id))


_HANDLE = b"\0"
"""The byte that carries descriptors, before the welcome."""
