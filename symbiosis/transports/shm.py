"""``shm:///tmp/symbiosis.sock``: clients in other processes of the same host. The executor's end, and the transport.

Messages travel over a Unix socket; tensors lie in an arena that both processes map (:mod:`symbiosis.transports.arena`),
and the client's share of the model in a sealed memfd that all clients map. Both descriptors come over the
socket. The memory has no name, and is freed when both processes have ended. The kernel tells each side when
the other is gone.

Only the owner may use the socket (mode 0600), and each side checks the user of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from symbiosis.core.requests import Results
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Look, Service
from symbiosis.errors import BusyError, RefusedError, UsageError, WireError
from symbiosis.log import get_logger
from symbiosis.transports import descriptors, device, wire
from symbiosis.transports.arena import Arena, Memory
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.connection import BlockingJoin, Join
from symbiosis.transports.courier import Admitted, Courier
from symbiosis.transports.device import Segment
from symbiosis.transports.limits import Limits
from symbiosis.transports.peer import Peer
from symbiosis.transports.shm_client import AsyncShmConnection, BlockingShmConnection, ShmConnection, socket_path
from symbiosis.transports.sockets import peer_of
from symbiosis.transports.stream_line import StreamLine, StreamListener
from symbiosis.transports.wire import Hello, Type

log = get_logger(__name__)

_CARRIES_DESCRIPTORS = b"\0"
"""The byte that carries descriptors, before the welcome."""


class ShmTransport:
    """Listen on, or connect to, a Unix socket.

    Args:
        retry: seconds for which a client tries to reach an executor that was lost; 0 gives up at once.
        limits: limits of each client, for a listener.

    Raises:
        UsageError: this system is not Linux.
    """

    def __init__(self, retry: float = 60.0, limits: Limits | None = None) -> None:
        if not hasattr(os, "memfd_create"):
            raise UsageError(f"shm:// needs Linux, and this system is {sys.platform}; use tcp://127.0.0.1:7000")
        self._retry_s = retry
        self._limits = limits or Limits()

    @contextlib.contextmanager
    def check(self, address: str) -> Iterator[None]:
        path = socket_path(address)
        with _bind(path, address) as bound:
            bound.listen()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    async def listen(self, address: str, service: Service) -> ShmListener:
        listener = ShmListener(address, service, self._limits)
        await listener.open()
        return listener

    def join(self, address: str) -> Join:
        """Return the function that joins the executor at an address, for an event loop."""
        return partial(AsyncShmConnection, address)

    def join_blocking(self, address: str) -> BlockingJoin:
        """Return the function that joins the executor at an address, for threads that block."""
        return partial(BlockingShmConnection, address)

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return await AsyncChannel.open(self.join(address), address, Hello(client, terms), self._retry_s)

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return BlockingChannel(self.join_blocking(address), address, Hello(client, terms), self._retry_s)

    def look(self, address: str) -> Look:
        connection = ShmConnection(address, Hello(None), False)
        connection.close()
        assert connection.look is not None
        return connection.look


class ShmListener(StreamListener["ShmLine"]):
    """An open socket and the connections that came through it."""

    async def open(self) -> None:
        """Start to accept clients. Raises UsageError if another process listens there, a file is in the way, or the
        folder does not exist, and ShareError if the model cannot be served to other processes."""
        self.service.share()
        self._path = socket_path(self.address)
        listening = _bind(self._path, self.address)
        await self._accept(listening, self.address, asyncio.get_running_loop().create_unix_server, ShmLine)
        self._inode = self._path.stat().st_ino
        log.info("listening", address=self.address)

    async def close(self) -> None:
        was_open = self._server is not None
        await super().close()
        if was_open:
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()


def _bind(path: Path, address: str) -> socket.socket:
    """Return a bound socket, which its owner alone may use."""
    _make_way(path, address)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise UsageError(f"cannot listen on {address}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    return bound


def _make_way(path: Path, address: str) -> None:
    """Remove the socket of an executor that was killed, and nothing else."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UsageError(
                f"cannot listen on {address}: {path} exists and is no socket; remove it or choose another path"
            )
    except FileNotFoundError:
        if path.is_symlink():
            raise UsageError(
                f"cannot listen on {address}: {path} is a link to a file that does not exist; remove it or choose "
                "another path"
            ) from None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        except OSError as error:
            raise UsageError(f"cannot listen on {address}: {error.strerror or error}") from error
        else:
            raise UsageError(
                f"cannot listen on {address}: another executor listens there; stop it or choose another path"
            )


class ShmLine(StreamLine):
    """One connection of a listener."""

    listener: ShmListener

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.listener.lines.add(self)
        connected = transport.get_extra_info("socket")
        pid, user = peer_of(connected)
        service, limits = self.listener.service, self.listener.limits
        self.peer = Peer(service, limits, self, ArenaCourier(self))
        if user not in (os.geteuid(), 0):
            self.peer.refuse(RefusedError(f"this executor serves its own user ({os.geteuid()}), not user {user}"))
        elif self._has_room(readable=True):
            self.open(f"uid {user} pid {pid} connection {connected.fileno()}")

    def send_descriptors(self, arena: int) -> None:
        """Send the descriptors of the arena and of the share. Nothing was sent before, so the socket has room. Raises
        WireError: the client does not take them."""
        share = self.listener.share.descriptor()
        try:
            with self._socket() as connected:
                socket.send_fds(connected, [_CARRIES_DESCRIPTORS], [arena, share])
        except OSError as error:
            raise WireError(f"the client does not take its descriptors: {error}") from error


class ArenaCourier(Courier):
    """Finds tensors, and places for results, in the client's arena or in its segment of the GPU's memory."""

    def __init__(self, line: ShmLine) -> None:
        self._line = line
        self._device = line.listener.service.device
        self._limits = line.listener.limits
        self._arena: Arena | None = None
        self._gpu: str | None = None
        """Identity of the GPU, for a client that may have a segment of its memory."""
        self._segment: Segment | None = None
        self._segment_bytes = 0

    def welcome(self, joined: bool) -> dict[str, Any]:
        if not joined:
            return {}
        self._arena, descriptor = Arena.create(self._limits.arena_bytes)
        try:
            if descriptors.left(descriptor) <= 0:
                raise BusyError("no file descriptors are left at the executor; try later")
            self._line.send_descriptors(descriptor)
        finally:
            os.close(descriptor)
        self._gpu = device.identity(self._device)
        return {"arena_bytes": self._arena.end, "gpu": self._gpu}

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        if type_ is not Type.SEGMENT or self._gpu is None or self._arena is None:
            return False
        if self._line.peer.busy:
            raise WireError("the client replaced its segment while calls were outstanding")
        size, touched, account = wire.read_id(content), self._touched, self._line.peer.account
        self._segment = None  # freed before the next one is allocated
        self._segment_bytes = Segment.size(size, self._limits.arena_bytes)
        answer: Sequence[Any]
        try:
            if not account.keep(touched + self._segment_bytes):
                raise UsageError(f"the executor has no room for a segment of {self._segment_bytes} bytes; try later")
            self._segment, answer = Segment.create(self._device, self._arena.end, self._segment_bytes)
        except UsageError as error:
            self._segment_bytes = 0
            account.keep(touched)
            answer = (str(error),)
        self._line.send(wire.pack(Type.SEGMENT, *answer))
        return True

    @property
    def _touched(self) -> int:
        """Bytes from the arena's start up to the last one that a call has used."""
        return self._line.peer.account.kept - self._segment_bytes

    def _memory(self, place: int) -> Memory:
        assert self._arena is not None
        return self._arena if self._segment is None or place < self._arena.end else self._segment

    def check(self, admitted: Admitted, payload: int) -> int:
        if payload:
            raise WireError("over shm:// a CALL has no payload")
        message, due, incoming = admitted.message, admitted.expected, admitted.incoming
        assert self._arena is not None
        memory, place, answer, arena = self._memory, message.place, message.answer, self._arena.end
        admitted.tensors = memory(place).matrices(place, message.rows, due.call)
        admitted.answers = memory(answer).matrices(answer, message.rows, due.answer)
        touched = self._touched
        for start, end in ((place, place + incoming), (answer, answer + admitted.size - incoming)):
            if start < arena and end > touched:
                touched = end
        return touched + self._segment_bytes

    def tensors(self, admitted: Admitted) -> Results | None:
        tensors, segment = admitted.tensors, self._segment
        if segment is not None and admitted.message.place >= segment.start:
            segment.wait(segment.called)
            return tensors
        return tensors if self._device.type == "cpu" else tuple(tensor.to(self._device) for tensor in tensors)

    def answer(self, admitted: Admitted, results: Results, sent: Callable[[], object]) -> None:
        self._line.send(wire.pack_result(admitted.message.id))
        sent()

    def ended(self, admitted: Admitted) -> None:
        """Have the client wait for what the GPU still has to write where the results belong."""
        segment = self._segment
        if segment is not None and admitted.message.answer >= segment.start:
            segment.record(segment.answered)

    def close(self) -> None:
        self._arena = self._segment = None
