"""Tensors by ``torch.distributed``, point to point: what ``dist://`` adds to ``tcp://``.

A client and the executor have two *lanes*: process groups of two ranks, one for each direction. A lane keeps the order
of its matrices, so they need no tag (NCCL has none), and the two sides cannot deadlock. The sender
also sends a message over the control connection; the receiver allocates, after its checks, when it has read that
message. Sender and receiver match by order alone.

Each lane has a thread, because an operation of gloo blocks, and on CUDA a stream of its own: the current stream of a
new thread is the default stream, on which all lanes would wait for one another. A lane's thread waits until its
matrices have been sent or received, so the streams of the executor and of the client never wait for a peer.

A peer that dies ends its own lanes only: gloo raises an error in the thread that waits, at once or, in the middle of a
matrix, after :data:`WITHIN_S` (decision 0021). Peers are trusted: what a peer sends on a lane is not checked.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from symbiosis.errors import BrokenError, BusyError, SymbiosisError, WireError
from symbiosis.modes import no_modes
from symbiosis.process_groups import gloo, nccl
from symbiosis.transports import wire
from symbiosis.transports.wire import Type

BACKENDS = ("gloo", "nccl")
EXECUTOR, TENANT = 0, 1
"""Ranks."""
UP, DOWN = 0, 1
"""Lanes: from the client, to the client."""
WITHIN_S = 60.0
"""Seconds within which the peer must come to the rendezvous, and within which one matrix must arrive or be taken. A
matrix of 1 GiB takes 9 s at 1 Gbit/s; a peer that dies in the middle of one is noticed after this time."""
MEET_WITHIN_S = 4.0
"""Seconds that one attempt of gloo to connect may take; gloo makes five attempts."""
_LOOK_S = 2e-5
"""Seconds between two looks at a matrix on its way between GPUs."""
END_WITHIN_S = 5.0
"""Seconds to wait for the threads of lanes at the end of the process."""


MOST_VALUES = 16
"""Values of one lane's rendezvous, where the backend is not gloo."""
MAX_HOST = 255
"""Bytes of a host's name."""
ADDRESS = 136
"""Bytes of an address: a sockaddr_storage and a number. The numbers of both ranks' pairs follow, 8 bytes each."""


def check_gloo(key: str, value: bytes, rank: int) -> None:
    """Check what a peer of this rank wants gloo to read: the name and the address of its host, as gloo writes them.

    gloo reads the lengths in the value without looking at its end, and a process that gives it an empty one dies.

    Raises:
        WireError: gloo of this version of torch does not write this.
    """
    name = int.from_bytes(value[:8], "little")
    address = int.from_bytes(value[8 + name : 16 + name], "little")
    if key != f"0/{rank}" or name > MAX_HOST or address != ADDRESS or len(value) != 8 + name + 8 + address + 16:
        raise WireError(f"a RENDEZVOUS with the key {key[:20]!r} and {len(value)} bytes, which gloo does not write")


class _Store(dist.Store):  # type: ignore[misc, name-defined]
    """The rendezvous of one lane: what one side sets, the other side can get.

    torch.distributed's own stores open a port for it; here the control connection carries each value.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def met(self, key: str, value: bytes) -> None:
        """Take a value that the other side has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._values)

    def close(self) -> None:
        """End every wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.met(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self._closed or all(key in self._values for key in keys), WITHIN_S)
            if self._closed or not found:
                raise TimeoutError(f"the other side did not come to the rendezvous within {WITHIN_S:.0f} s")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


@dataclass(eq=False)
class Lanes:
    """Both lanes of one client, on either side. Methods are called, and callbacks come, on the event loop."""

    backend: str
    """ "gloo" for tensors on the CPU, "nccl" for tensors on CUDA."""
    rank: int
    """``EXECUTOR`` or ``TENANT``."""
    device: torch.device
    local: str
    """IP address of this side, for gloo."""
    rendezvous: Callable[[bytes], None]
    """Sends a RENDEZVOUS to the other side."""
    lost: Callable[[SymbiosisError], None]
    """Called once, with the reason, when a lane has broken."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._lanes: list[_Lane] = []
        self._running = 0
        """Lanes whose threads may hold tensors."""
        self._ended: Callable[[], object] = lambda: None
        for number in (UP, DOWN):
            store = _Store(partial(self.from_thread, self._publish, number))
            sends = (number == UP) == (self.rank == TENANT)
            try:
                self._lanes.append(_Lane(self, store, sends))
                self._running += 1
            except RuntimeError as error:
                self.close()
                raise BusyError(f"a lane cannot be opened: {error}") from error
        self._out, self._in = self._lanes if self.rank == TENANT else reversed(self._lanes)

    def _publish(self, lane: int, key: str, value: bytes) -> None:
        self.rendezvous(wire.pack(Type.RENDEZVOUS, lane, key, value))

    def met(self, lane: int, key: str, value: bytes) -> None:
        """Take a value of a lane's rendezvous from the other side. Raises WireError if no process group sets it."""
        store = self._lanes[lane].store
        if self.backend == "gloo":
            check_gloo(key, value, 1 - self.rank)
        elif len(store) >= MOST_VALUES:
            raise WireError(f"more than {MOST_VALUES} values of a rendezvous")
        store.met(key, value)

    def send(self, tensors: Sequence[torch.Tensor], sent: Callable[[], object] | None = None) -> None:
        """Send contiguous matrices, one after another; ``sent`` is called when they are on their way."""
        self._out.work(tensors, sent)

    def receive(self, tensors: Sequence[torch.Tensor], arrived: Callable[[], None]) -> None:
        """Receive into ``tensors`` what the other side sends next; ``arrived`` is called when it is there."""
        self._in.work(tensors, arrived)

    def close(self) -> None:
        """End the lanes. No callback comes any more. An operation in progress on a thread may take WITHIN_S to end."""
        self._closed = True
        for lane in self._lanes:
            lane.close()

    def when_ended(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the lanes, which are closed, have let go of all tensors; perhaps at once."""
        self._ended = then
        if not self._running:
            then()

    def thread_ends(self) -> None:
        """Note, on the thread of a lane, that it has let go of its tensors."""

        def note() -> None:
            self._running -= 1
            if not self._running:
                self._ended()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(note)

    def from_thread(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Have the event loop call ``callback``, unless the lanes are closed by then."""

        def unless_closed() -> None:
            if not self._closed:
                with no_modes():
                    callback(*arguments)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(unless_closed)


class _Lane:
    """One process group and the thread that uses it."""

    def __init__(self, lanes: Lanes, store: _Store, sends: bool) -> None:
        self.store = store
        self._lanes = lanes
        self._sends = sends
        self._jobs: queue.SimpleQueue[tuple[Sequence[torch.Tensor], Callable[[], object] | None, Any] | None]
        self._jobs = queue.SimpleQueue()
        """Tensors, what to call when they have been sent or received, and an event after which they may be accessed."""
        self._closed = False
        self._group: Any = None
        self.thread = threading.Thread(target=self._run, name="symbiosis-dist", daemon=True)
        self.thread.start()
        _lanes.add(self)

    def work(self, tensors: Sequence[torch.Tensor], done: Callable[[], object] | None) -> None:
        """Send or receive tensors, after everything asked for before."""
        self._jobs.put((tensors, done, _event(self._lanes.device)))

    def close(self) -> None:
        """Have the thread end."""
        self._closed = True
        self.store.close()
        if self._group is not None:
            self._group.abort()  # ends operations of NCCL; gloo's end with the connection, or after WITHIN_S
        self._jobs.put(None)

    def _run(self) -> None:
        lanes = self._lanes
        stream: Any = contextlib.nullcontext()
        if lanes.device.type == "cuda":
            stream = torch.cuda.stream(torch.cuda.Stream(lanes.device))  # type: ignore[no-untyped-call]
        try:
            with stream:
                if lanes.backend == "nccl":
                    self._group = nccl(self.store, lanes.rank, 2, WITHIN_S)
                else:
                    self._group = gloo(self.store, lanes.rank, 2, lanes.local, MEET_WITHIN_S)
                while not self._closed and self._one():  # a function of its own releases its tensors
                    pass
        except Exception as error:  # noqa: BLE001 (any error of torch.distributed is the end of this lane)
            if not self._closed:
                first_line = str(error).strip().partition("\n")[0][:300]  # a stack follows
                lanes.from_thread(lanes.lost, BrokenError(f"torch.distributed: {first_line}"))
        finally:
            self._group = None
            self._jobs = queue.SimpleQueue()  # and the tensors of what was not done
            _lanes.discard(self)  # the group is gone, with its own threads
            lanes.thread_ends()

    def _one(self) -> bool:
        job, group, device = self._jobs.get(), self._group, self._lanes.device
        if job is None:
            return False
        tensors, done, ready = job
        if ready is not None:
            ready.wait()
        transfer, other = group.send if self._sends else group.recv, 1 - self._lanes.rank
        for tensor in tensors:
            work = transfer([tensor], other, 0)
            if device.type == "cpu":
                work.wait(timedelta(seconds=WITHIN_S))
            else:
                work.wait()  # has this thread's stream wait; with a limit, NCCL would look once a millisecond only
                tensor.record_stream(torch.cuda.current_stream(device))
                _wait(_event(device), WITHIN_S)
        if done is not None:
            self._lanes.from_thread(done)
        return True


_lanes: set[_Lane] = set()
"""Lanes whose threads run, for the end of the process."""


@atexit.register
def _end_all() -> None:
    """End all lanes before the interpreter goes down: gloo's threads would end the process with an abort then."""
    end = time.monotonic() + END_WITHIN_S
    for lane in list(_lanes):
        lane.close()
    for lane in list(_lanes):
        lane.thread.join(max(end - time.monotonic(), 0.0))


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Record what this thread's stream has to do so far, for another thread's stream to wait for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _wait(event: Any, seconds: float) -> None:
    """Wait until what an event stands for is done. Raises TimeoutError after ``seconds``."""
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            raise TimeoutError(f"the other side has not sent or taken a matrix within {seconds:.0f} s")
        time.sleep(_LOOK_S)
