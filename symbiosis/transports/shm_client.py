"""The client's side of ``shm://``: one channel for coroutines, one for plain synchronous code."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from symbiosis.core.requests import Call, Expected, Key, LayerSpec, expected
from symbiosis.core.transport import Check, Identity
from symbiosis.errors import (
    ClientClosedError,
    ConnectionLostError,
    ExecutorClosedError,
    SymbiosisError,
    UsageError,
    WireError,
)
from symbiosis.log import get_logger
from symbiosis.transports import device, wire
from symbiosis.transports.arena import Arena, Places, spread
from symbiosis.transports.backoff import MAY_RETURN, backoff
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.device import DeviceArena, Handles
from symbiosis.transports.shm_connection import Connection, connect, connect_soon
from symbiosis.transports.threads import ThreadCalls
from symbiosis.transports.wire import CallMessage, Frames, Hello, Type, frame

__all__ = ["ShmBlockingChannel", "ShmChannel"]

log = get_logger(__name__)

PING_AFTER_S = 5
SPIN_S, SOON_S = 100e-6, 150e-6
"""How long to look out for an answer without sleeping, and how soon the one before must have come for that."""
SILENT_FOR_S = 120.0
"""An executor that lives but says nothing for so long, not even to a ping, is given up. Its death shows at once."""
_CPU = torch.device("cpu")

Results = tuple[torch.Tensor, ...]


def _put(memory: Arena | DeviceArena, place: int, call: Call, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Write a call's rows."""
    if isinstance(memory, DeviceArena):
        memory.wait(memory.answered)  # this thread's stream may not be the one that read the last answer there
    for matrix, tensor in zip(
        memory.matrices(place, call.tensors[0].shape[0], widths, dtype), call.tensors, strict=True
    ):
        matrix.copy_(tensor)
    if isinstance(memory, DeviceArena):
        memory.record(memory.called)


def _take(memory: Arena | DeviceArena, place: int, rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> Results:
    """Copies of a call's results."""
    if isinstance(memory, DeviceArena):
        memory.wait(memory.answered)
    return tuple([matrix.clone() for matrix in memory.matrices(place, rows, widths, dtype)])


def _open_segment(gpu: DeviceArena, content: Sequence[Any], address: str) -> int:
    """Map the segment that a SEGMENT tells of; where it begins."""
    if len(content) == 1:
        raise UsageError(f"the executor at {address} has no room for this client's tensors: {content[0]}")
    if len(content) != len(Handles._fields) or [type(one) for one in content] != [int, int, bytes, bytes, bytes]:
        raise WireError(f"the executor at {address} sent a segment that is not understood")
    return gpu.open(Handles(*content))


class _ShmChannel:
    """What both channels have in common: the share, the layer table, what a call looks like in the arena."""

    def __init__(self, address: str, connection: Connection, hello: Hello, retry_s: float) -> None:
        self.client = str(hello.name)
        self._hello = hello
        self._checks: list[Check] = []
        self.welcome = connection.welcome
        self._gpu_here = device.find(connection.welcome.content.get("gpu"))
        """The executor's GPU, if this process has it too."""
        self.device = self._gpu_here or _CPU
        self._address = address
        self._retry_s = retry_s
        self._share_file = connection.share
        self._ids = itertools.count(1)
        self._in_pass = False
        self.layers: Sequence[LayerSpec] = connection.welcome.layers
        self.share = connection.welcome.share(self._tensors)
        self._expected: dict[Key, Expected] = {}
        os.close(connection.share)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        # Mapped privately: pages are shared with every other client until this process writes to them.
        with safe_open(f"/proc/self/fd/{self._share_file}", "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def _check_again(self, connection: Connection) -> None:
        """Of an executor that was found again: hang up if it will not do."""
        try:
            for check in self._checks:
                check(connection.welcome.identity)
        except BaseException:
            connection.close()
            raise
        os.close(connection.share)

    def identity(self) -> Identity:
        return self.welcome.identity

    def before_return(self, check: Check) -> None:
        self._checks.append(check)

    def _gpu_arena(self, connection: Connection) -> DeviceArena | None:
        """Where tensors lie instead, if both sides have the same GPU; nothing in it yet."""
        if self._gpu_here is None:
            return None
        return DeviceArena(self._gpu_here, connection.arena.size, connection.welcome.limits.arena_bytes)

    def _expects(self, key: Key) -> Expected:
        found = self._expected.get(key)
        if found is None:
            found = self._expected[key] = expected(self.layers, key)
        return found


class ShmBlockingChannel(_ShmChannel, BlockingChannel):
    """For synchronous code: the thread that calls writes to the socket and waits for the answer itself."""

    def __init__(self, address: str, connection: Connection, hello: Hello, retry_s: float) -> None:
        _ShmChannel.__init__(self, address, connection, hello, retry_s)
        BlockingChannel.__init__(self, address, self.client, retry_s)
        self._quick = False
        """Whether the last answer came soon."""
        self._arena: Arena | None = None
        self._gpu: DeviceArena | None = None
        self._use(connection)

    @classmethod
    def open(cls, address: str, hello: Hello, retry_s: float) -> ShmBlockingChannel:
        """Join the executor at ``address``."""
        return cls(address, connect(address, hello), hello, retry_s)

    def _use(self, connection: Connection) -> None:
        self.welcome = connection.welcome
        self._socket = connection.socket
        self._socket.settimeout(None)
        # A timeout in the kernel: Python's own would cost a second system call each time.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, PING_AFTER_S.to_bytes(8, "little") + bytes(8))
        self._arena = connection.arena
        self._gpu = self._gpu_arena(connection)
        self._frames = Frames(wire.MAX_TO_CLIENT)

    def _exchange(self, call: Call) -> Results:
        key, rows = call.key, call.tensors[0].shape[0]
        widths, dtype, results = self._expects(key)
        taken = spread(rows, widths, dtype)
        memory, place = self._room(taken + spread(rows, results, dtype))
        _put(memory, place, call, widths, dtype)
        id_ = next(self._ids)
        message = wire.pack_call(CallMessage(id_, key, call.kind, rows, place, place + taken))
        sent = time.perf_counter()
        self._socket.sendall(frame(message))
        type_, content = self._answer(id_)
        self._quick = time.perf_counter() - sent < SOON_S
        if type_ is Type.FAILED:
            raise wire.error_of(*content[1:3])
        return _take(memory, place + taken, rows, results, dtype)

    def _room(self, size: int) -> tuple[Arena | DeviceArena, int]:
        """Where a call and its results can lie. One is outstanding at a time, so each may have all there is."""
        arena, gpu = self._arena, self._gpu
        assert arena is not None
        if size > arena.size:
            raise UsageError(f"a call of {size} bytes does not fit in {arena.size}; send fewer tokens at once")
        if gpu is None:
            return arena, 0
        for segment in gpu.segments:
            if segment.start + size <= segment.end:
                return gpu, segment.start
        if gpu.segments:  # one that is larger, in the place of all there are
            gpu = self._gpu = DeviceArena(gpu.device, arena.size, self.welcome.limits.arena_bytes)
        self._socket.sendall(frame(wire.pack(Type.SEGMENT, size, True)))
        return gpu, _open_segment(gpu, self._next(lambda type_, _: type_ is Type.SEGMENT)[1], self._address)

    def _answer(self, id_: int) -> tuple[Type, Sequence[Any]]:
        """RESULT or FAILED of call ``id_``."""
        return self._next(lambda type_, content: type_ in (Type.RESULT, Type.FAILED) and wire.read_id(content) == id_)

    def _next(self, wanted: Callable[[Type, Sequence[Any]], bool]) -> tuple[Type, Sequence[Any]]:
        """The next message that is ``wanted``."""
        heard = 0.0
        while True:
            message = self._frames.next()
            if message is None:
                try:
                    data = (self._quick and self._soon()) or self._socket.recv(1 << 16)
                except BlockingIOError:
                    heard = heard or time.monotonic() - PING_AFTER_S
                    if time.monotonic() - heard > SILENT_FOR_S:
                        raise ConnectionLostError(f"{self._address} has been silent for {SILENT_FOR_S:.0f} s") from None
                    self._socket.sendall(_PING)
                    continue
                if not data:
                    raise ConnectionLostError(f"the executor at {self._address} is gone")
                message = self._frames.only(data)
                if message is None:
                    heard = time.monotonic()
                    continue
            heard = 0.0
            type_, content = wire.unpack_answer(message)
            if type_ is Type.ENDED:
                raise wire.error_of(*content[:2])
            if wanted(type_, content):
                return type_, content

    def _soon(self) -> bytes | None:
        """What comes within some microseconds.

        A core that has gone to sleep takes 40 µs to wake up (measured in a virtual machine: a call of one row took 92
        µs asleep, 41 awake). Done only where the last answer came soon: while the executor is at a large matrix
        product, it needs all cores.
        """
        recv = self._socket.recv
        end = time.perf_counter() + SPIN_S
        while time.perf_counter() < end:
            try:
                return recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        return None

    def _tell(self, in_pass: bool) -> None:
        self._socket.sendall(_BEGIN if in_pass else _END)

    def _join_again(self) -> None:
        connection = connect(self._address, self._hello, self.welcome.fingerprint)
        self._check_again(connection)
        self._use(connection)

    def _interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        self._socket.close()
        if self._closed:
            self._arena = self._gpu = None

    def _let_go(self) -> None:
        self._socket.close()


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that was sent, or is to be when the executor is back."""

    id: int
    call: Call
    reply: asyncio.Future[Results] | None
    """None when nobody waits any more."""
    place: int
    size: int


class ShmChannel(_ShmChannel, asyncio.Protocol):
    """For coroutines: answers arrive on the event loop."""

    def __init__(self, address: str, connection: Connection, hello: Hello, retry_s: float) -> None:
        super().__init__(address, connection, hello, retry_s)
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._arena: Arena | None = None
        self._gpu: DeviceArena | None = None
        self._unplaced: list[_Pending] = []
        """Calls that wait for the next segment."""
        self._ended: SymbiosisError | None = None
        self._transport: Any = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._heard = time.monotonic()
        self._watcher: asyncio.TimerHandle | None = None
        self._threads = ThreadCalls(self._loop, self.send, self.cancel)
        self.call = self._threads.call
        self.interrupt = self._threads.interrupt

    @classmethod
    async def open(cls, address: str, hello: Hello, retry_s: float) -> ShmChannel:
        """Join the executor at ``address``."""
        connection = await connect_soon(address, hello)
        try:
            channel = cls(address, connection, hello, retry_s)
        except BaseException:
            connection.close()
            raise
        try:
            await channel._use(connection)
        except BaseException:
            channel.close()
            connection.socket.close()
            raise
        return channel

    async def _use(self, connection: Connection) -> None:
        self.welcome = connection.welcome
        self._arena = connection.arena
        self._gpu = self._gpu_arena(connection)
        self._places = [] if self._gpu is not None else [Places(0, connection.arena.size)]
        self._unplaced.clear()
        self._frames = Frames(wire.MAX_TO_CLIENT)
        connection.socket.setblocking(False)
        self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=connection.socket)
        self._heard = time.monotonic()
        if self._watcher is None:
            self._watch()
        if self._in_pass:
            self._transport.write(_BEGIN)
        for pending in list(self._pending.values()):
            if pending.reply is None:
                del self._pending[pending.id]
            else:
                self._write(pending)

    def _watch(self) -> None:
        """Every few seconds: does the executor still answer? The kernel tells of its death, and not of its sleep."""
        self._watcher = self._loop.call_later(PING_AFTER_S, self._watch)
        unheard = time.monotonic() - self._heard
        if self._transport is None or not self._pending or unheard < PING_AFTER_S:
            return
        if unheard > SILENT_FOR_S:
            log.warning("executor silent", address=self._address, client=self.client, seconds=round(unheard))
            self._transport.abort()
        else:
            self._transport.write(_PING)

    def send(self, call: Call) -> asyncio.Future[Results]:
        if self._ended is not None:
            raise self._ended
        if not self._pending:
            self._heard = time.monotonic()
        call.id = next(self._ids)
        reply: asyncio.Future[Results] = self._loop.create_future()
        pending = _Pending(call.id, call, reply, -1, 0)
        if self._transport is not None:
            self._write(pending)
        self._pending[call.id] = pending
        return reply

    def _write(self, pending: _Pending) -> None:
        call = pending.call
        rows = call.tensors[0].shape[0]
        widths, dtype, results = self._expects(call.key)
        taken = spread(rows, widths, dtype)
        pending.size = taken + spread(rows, results, dtype)
        place = self._place(pending)
        if place is None:
            return
        pending.place = place
        _put(self._memory, place, call, widths, dtype)
        message = CallMessage(pending.id, call.key, call.kind, rows, place, place + taken)
        self._transport.write(frame(wire.pack_call(message)))

    @property
    def _memory(self) -> Arena | DeviceArena:
        memory = self._gpu or self._arena
        assert memory is not None
        return memory

    def _place(self, pending: _Pending) -> int | None:
        """Where a call and its results can lie; None if it has to wait for another segment of the GPU's memory."""
        size, most = pending.size, self.welcome.limits.arena_bytes
        if not self._unplaced:  # in order
            for places in self._places:
                place = places.take(size)
                if place is not None:
                    return place
        if self._gpu is None or sum(places.size for places in self._places) + size > most:
            raise UsageError(
                f"a call needs {size} bytes of this client's memory at the executor, which is at most {most} for all "
                "its calls; send fewer tokens at once, or ask the executor's host for a larger arena_bytes limit"
            )
        if not self._unplaced:
            self._transport.write(frame(wire.pack(Type.SEGMENT, size, False)))
        self._unplaced.append(pending)
        return None

    def _segment(self, gpu: DeviceArena, content: Sequence[Any]) -> None:
        """More memory has come, or none: those who waited for it go on, or fail."""
        waiting, self._unplaced = self._unplaced, []
        try:
            start = _open_segment(gpu, content, self._address)
        except UsageError as error:
            for pending in waiting:
                self._settle(pending, error)
            return
        self._places.append(Places(start, gpu.end))
        for pending in waiting:
            if pending.reply is None:
                del self._pending[pending.id]
                continue
            try:
                self._write(pending)
            except UsageError as error:
                self._settle(pending, error)

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        try:
            message = self._frames.only(data) or self._frames.next()
            while message is not None:
                self._received(*wire.unpack_answer(message))
                message = self._frames.next()
        except WireError as error:
            self._end(error)

    def _received(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is Type.ENDED:
            error = wire.error_of(*content[:2])
            if not isinstance(error, ExecutorClosedError) or self._retry_s <= 0:
                self._end(error)
            return
        if type_ is Type.SEGMENT and self._gpu is not None:
            self._segment(self._gpu, content)
            return
        pending = self._pending.get(wire.read_id(content)) if type_ in (Type.RESULT, Type.FAILED) else None
        if pending is None:
            return
        if type_ is Type.FAILED:
            self._settle(pending, wire.error_of(*content[1:3]))
        elif pending.reply is None:
            self._settle(pending, ())
        else:
            call = pending.call
            rows = call.tensors[0].shape[0]
            widths, dtype, results = self._expects(call.key)
            self._settle(
                pending, _take(self._memory, pending.place + spread(rows, widths, dtype), rows, results, dtype)
            )

    def _settle(self, pending: _Pending, outcome: Results | SymbiosisError) -> None:
        del self._pending[pending.id]
        reply = pending.reply
        if reply is not None and not reply.done():
            if isinstance(outcome, tuple):
                reply.set_result(outcome)
            else:
                reply.set_exception(outcome)
        for places in self._places:
            if places.start <= pending.place < places.end:
                places.give_back(pending.place, pending.size)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._ended is not None:
            return
        if self._retry_s <= 0:
            self._end(ConnectionLostError(f"the executor at {self._address} is gone"))
        else:
            self._reconnecting = self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        log.warning("executor lost", address=self._address, client=self.client)
        last: Exception | None = None
        for delay in backoff(self._retry_s):
            await asyncio.sleep(delay)
            try:
                connection = await connect_soon(self._address, self._hello, self.welcome.fingerprint)
                self._check_again(connection)
                try:
                    await self._use(connection)
                except BaseException:
                    connection.socket.close()
                    raise
            except (SymbiosisError, OSError) as error:
                if isinstance(error, SymbiosisError) and not isinstance(error, MAY_RETURN):
                    self._end(error)
                    return
                last = error
            else:
                log.info("executor is back", address=self._address, client=self.client)
                return
        self._end(
            ConnectionLostError(
                f"lost the executor at {self._address} and it did not come back within {self._retry_s:.0f} s: {last}"
            )
        )

    def _end(self, error: SymbiosisError) -> None:
        """Every call that waits ends with ``error``, and every later one."""
        if self._ended is not None:
            return
        self._ended = error
        for pending in self._pending.values():
            if pending.reply is not None and not pending.reply.done():
                pending.reply.set_exception(error)
        self._pending.clear()
        self._arena = self._gpu = None  # their memory goes with the last tensor in it
        self._unplaced.clear()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._transport is not None:
            self._transport.close()

    def cancel(self, call: Call) -> None:
        pending = self._pending.get(call.id)
        if pending is not None:
            pending.reply = None
            if self._transport is not None and pending not in self._unplaced:
                # Its place is free when the executor has answered.
                self._transport.write(frame(wire.pack(Type.CANCEL, pending.id)))

    def flush(self) -> None:
        pass

    def begin_pass(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._in_pass = True
        if self._transport is not None:
            self._transport.write(_BEGIN)

    def end_pass(self) -> None:
        self._in_pass = False
        if self._transport is not None:
            self._transport.write(_END)

    def close(self) -> None:
        self._end(ClientClosedError(f"the client {self.client!r} was closed"))
        if self._reconnecting is not None:
            self._reconnecting.cancel()


_BEGIN, _END, _PING = (frame(wire.pack(type_)) for type_ in (Type.BEGIN, Type.END, Type.PING))
