"""Tensors by ``torch.distributed``, point to point: what ``dist://`` adds to ``tcp://``.

A client and the executor have two process groups of their own, of two ranks: one carries calls up, the other results
down. Each lane goes one way and keeps its order, so nothing needs a tag (NCCL has none), and neither side can wait
for the other in a circle. Whoever sends also sends a message over the control connection; the receiver allocates,
after its checks, when it has read that message. Waiting is done on a thread a lane; with NCCL, whose waiting means
that a stream waits, threads hand events over (D12).

A process group needs a rendezvous. torch.distributed's own stores open a port for everybody; here the two sides
exchange what they need over the control connection, which knows who is there. Of what gloo wants to say of itself, 170
bytes that the other side's C++ code takes as they are (and crashes on if they are no good), only the port travels.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from symbiosis.errors import BrokenError, SymbiosisError, WireError

__all__ = ["BACKENDS", "DOWN", "EXECUTOR", "TENANT", "UP", "Lanes", "Note"]

BACKENDS = ("gloo", "nccl")
EXECUTOR, TENANT = 0, 1
"""Ranks. NCCL's rendezvous is held by rank 0."""
UP, DOWN = 0, 1
"""Lanes: from the client, to the client."""
WITHIN_S = 60.0
"""How long the other side may take to come to the rendezvous, and how long one matrix may take."""
MEET_WITHIN_S = 4.0
"""How long a connection of gloo's may take; it tries five times."""

END_WITHIN_S = 5.0
"""At the end of the process."""

_SOCKADDR = 128
_ADDRESS = _SOCKADDR + 8
"""gloo's ``Address``: a ``sockaddr_storage`` and a sequence number."""


class Note(NamedTuple):
    """What one side tells the other for the rendezvous of a lane: gloo's port, or a key and its value of NCCL's."""

    lane: int
    key: str
    value: int | bytes


class Lanes:
    """Both lanes of one client, on either side. All methods, and all callbacks, are the event loop's.

    Args:
        backend: "gloo" for tensors on the CPU, "nccl" for tensors on CUDA.
        rank: ``EXECUTOR`` or ``TENANT``.
        device: where the tensors are.
        local, remote: IP addresses of both ends.
        publish: sends a note to the other side.
        lost: called once, with the reason, when a lane has broken.
    """

    def __init__(
        self,
        backend: str,
        rank: int,
        device: torch.device,
        local: str,
        remote: str,
        publish: Callable[[Note], None],
        lost: Callable[[SymbiosisError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._publish = publish
        self._lost = lost
        self._closed = False
        lanes = []
        for number in (UP, DOWN):
            if backend == "gloo":
                store: _Store = _GlooStore(number, rank, remote, self._note)
                make = partial(_gloo, store, rank, local)
            else:
                store = _NcclStore(number, rank, self._note)
                make = partial(_nccl, store, rank, device)
            sends = (number == UP) == (rank == TENANT)
            lanes.append(_Lane(store, make, device, 1 - rank, sends, self))
        self._lanes = lanes
        self._out, self._in = lanes if rank == TENANT else reversed(lanes)

    def met(self, note: Note) -> None:
        """The other side has sent a note."""
        self._lanes[note.lane].store.met(note)

    def send(self, tensors: Sequence[torch.Tensor], sent: Callable[[], None] | None = None) -> None:
        """Send matrices, one after another; ``sent`` is called when they are on their way."""
        self._out.work(tensors, sent)

    def receive(self, tensors: Sequence[torch.Tensor], arrived: Callable[[], None]) -> None:
        """Receive into ``tensors`` what the other side sends next; ``arrived`` is called when it is there."""
        self._in.work(tensors, arrived)

    def close(self) -> None:
        """No callback comes any more. What is under way may take :data:`WITHIN_S` to end, on its thread."""
        self._closed = True
        for lane in self._lanes:
            lane.close()

    @property
    def alive(self) -> bool:
        """Whether a thread of it still waits for something."""
        return any(lane.alive for lane in self._lanes)

    # From the lanes' threads.

    def call_soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._unless_closed, callback)

    def _unless_closed(self, callback: Callable[[], None]) -> None:
        if not self._closed:
            callback()

    def _note(self, note: Note) -> None:
        self.call_soon(partial(self._publish, note))

    def broken(self, error: SymbiosisError) -> None:
        self.call_soon(partial(self._lost, error))


class _Job(NamedTuple):
    tensors: Sequence[torch.Tensor]
    done: Callable[[], None] | None
    ready: torch.cuda.Event | None
    """When the tensors may be read, or written to."""


class _Lane:
    """A process group and the thread that waits for it."""

    def __init__(
        self, store: _Store, make: Callable[[], Any], device: torch.device, other: int, sends: bool, lanes: Lanes
    ) -> None:
        self.store = store
        self._device = device
        self._other = other
        self._sends = sends
        self._lanes = lanes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._group: Any = None
        self._thread = threading.Thread(target=self._run, args=(make,), name="symbiosis-dist", daemon=True)
        _threads.add(self)
        self._thread.start()

    def work(self, tensors: Sequence[torch.Tensor], done: Callable[[], None] | None) -> None:
        self._jobs.put(_Job(tensors, done, _event(self._device)))

    def close(self) -> None:
        self._closed = True
        self.store.close()
        if self._group is not None:
            self._group.abort()  # NCCL's; gloo's wait for the connection to end, or for their time
        self._jobs.put(None)

    def _run(self, make: Callable[[], Any]) -> None:
        self._work(make)
        _threads.discard(self)  # now that the group is gone, with its own threads

    def _work(self, make: Callable[[], Any]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            group = self._group = make()
            while not self._closed and self._one(group):  # in a frame of its own, which keeps no tensor afterwards
                pass
        except Exception as error:  # noqa: BLE001 (whatever torch.distributed raises, it is the end of this lane)
            if not self._closed:
                first = str(error).strip().partition("\n")[0][:300]
                self._lanes.broken(
                    error if isinstance(error, SymbiosisError) else BrokenError(f"torch.distributed: {first}")
                )
        finally:
            self._group = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, within_s: float) -> None:
        """Close it and wait for its thread."""
        self.close()
        self._thread.join(within_s)

    def _one(self, group: Any) -> bool:
        job = self._jobs.get()
        if job is None:
            return False
        if job.ready is not None:
            job.ready.wait()
        for tensor in job.tensors:
            work = group.send([tensor], self._other, 0) if self._sends else group.recv([tensor], self._other, 0)
            if self._device.type == "cpu":
                work.wait(timedelta(seconds=WITHIN_S))
            else:
                work.wait()  # has this thread's stream wait; with a limit, NCCL would have this thread wait
        if job.done is not None:
            self._lanes.call_soon(partial(_after, _event(self._device), job.done))
        return True


_threads: set[_Lane] = set()


@atexit.register
def _end_all() -> None:
    """gloo's threads must not see the interpreter go down: C++ ends the process with an abort then."""
    end = time.monotonic() + END_WITHIN_S
    for lane in list(_threads):
        lane.close()
    for lane in list(_threads):
        lane.end(max(end - time.monotonic(), 0.0))


def _event(device: torch.device) -> torch.cuda.Event | None:
    """What this thread's stream has done so far, for another thread's stream to wait for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _after(event: torch.cuda.Event | None, done: Callable[[], None]) -> None:
    if event is not None:
        event.wait()
    done()


# ------------------------------------------------------------------------------------------------------------- groups


def _gloo(store: _Store, rank: int, local: str) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # A device for each group: its pairs are numbered from the start, the same on both sides.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local)]
    options._timeout = timedelta(seconds=MEET_WITHIN_S)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: _Store, rank: int, device: torch.device) -> Any:
    # By default torch ends the process where an operation takes too long: a tenant that stalls would end them all.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=WITHIN_S)
    return dist.ProcessGroupNCCL(store, rank, 2, options)


class _Store(dist.Store):  # type: ignore[misc, name-defined]
    """The rendezvous of one lane, as far as a process group uses it; called by the thread that makes the group."""

    def __init__(self, lane: int, rank: int, publish: Callable[[Note], None]) -> None:
        super().__init__()
        self._lane = lane
        self._rank = rank
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def met(self, note: Note) -> None:
        """The other side has sent a note. On the event loop."""
        raise NotImplementedError

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        self._put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = WITHIN_S  # a process group's own patience is with connections
        with self._changed:
            found = self._changed.wait_for(lambda: self._closed or all(key in self._values for key in keys), seconds)
            if self._closed or not found:
                raise TimeoutError(f"the other side did not come to the rendezvous within {seconds:.0f} s")

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


class _GlooStore(_Store):
    """Each rank says where it listens, under "prefix/rank": host name, address, numbers of its pairs."""

    def __init__(self, lane: int, rank: int, remote: str, publish: Callable[[Note], None]) -> None:
        super().__init__(lane, rank, publish)
        self._remote = remote
        self._mine: tuple[str, bytes] | None = None
        self._port: int | None = None

    def set(self, key: str, value: bytes | str) -> None:
        super().set(key, value)
        prefix, _, rank = key.rpartition("/")
        if rank == str(self._rank):
            mine = self.get(key)
            self._mine = f"{prefix}/{1 - self._rank}", mine
            port = struct.unpack_from(">H", mine, _address_at(mine) + 2)[0]
            self._publish(Note(self._lane, "", int(port)))
            self._complete()

    def met(self, note: Note) -> None:
        if type(note.value) is not int or not 0 < note.value < 1 << 16:
            raise WireError("gloo's rendezvous is a port")
        self._port = note.value
        self._complete()

    def _complete(self) -> None:
        """What the other side says is what we say, but for its address."""
        if self._mine is not None and self._port is not None:
            key, mine = self._mine
            at = _address_at(mine)
            address = _sockaddr(self._remote, self._port).ljust(_SOCKADDR, b"\0")
            self._put(key, mine[:at] + address + mine[at + _SOCKADDR :])


def _address_at(value: bytes) -> int:
    """Where gloo's address begins: after the host name; each has its length in front, in 8 bytes."""
    (name,) = struct.unpack_from("<Q", value)
    at = 8 + int(name)
    if at + 8 + _ADDRESS > len(value) or struct.unpack_from("<Q", value, at)[0] != _ADDRESS:
        raise BrokenError("this torch's gloo describes itself in a way that symbiosis does not know; use tcp://")
    return at + 8


def _sockaddr(ip: str, port: int) -> bytes:
    if ":" in ip:
        ip, _, zone = ip.partition("%")
        scope = socket.if_nametoindex(zone) if zone else 0
        return (
            struct.pack("=H", socket.AF_INET6)
            + struct.pack(">HI", port, 0)
            + socket.inet_pton(socket.AF_INET6, ip)
            + struct.pack("=I", scope)
        )
    return struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton(ip)


class _NcclStore(_Store):
    """Rank 0, the executor, makes up an id that the other rank must have."""

    def set(self, key: str, value: bytes | str) -> None:
        super().set(key, value)
        if self._rank == EXECUTOR:
            self._publish(Note(self._lane, key, self.get(key)))

    def met(self, note: Note) -> None:
        if self._rank == EXECUTOR or not isinstance(note.value, bytes):
            raise WireError("NCCL's rendezvous is the executor's to hold")
        self._put(note.key, note.value)
