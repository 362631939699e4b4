"""Tensors by ``torch.distributed``, point to point: what ``dist://`` adds to ``tcp://``.

A client and the executor have two process groups of their own, of two ranks: one carries calls up, the other results
down. Each lane goes one way and keeps its order, so nothing needs a tag (NCCL has none), and neither side can wait
for the other in a circle. Whoever sends also sends a message over the control connection; the receiver allocates,
after its checks, when it has read that message. Waiting is done on a thread a lane; with NCCL, whose waiting means
that a stream waits, threads hand events over (D12). On the executor's side, gloo's lanes are processes
(:mod:`symbiosis.transports.lane_process`): a tenant can end what gloo runs in.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch

from symbiosis.errors import BrokenError, SymbiosisError
from symbiosis.transports import rendezvous
from symbiosis.transports.lane_process import LaneProcess, LaneProcesses
from symbiosis.transports.rendezvous import DOWN, TENANT, UP, GlooStore, NcclStore, Note, Store

__all__ = ["Lanes"]

END_WITHIN_S = 5.0
"""At the end of the process."""


class Lanes:
    """Both lanes of one client, on either side. All methods, and all callbacks, are the event loop's.

    Args:
        backend: "gloo" for tensors on the CPU, "nccl" for tensors on CUDA.
        rank: ``EXECUTOR`` or ``TENANT``.
        device: where the tensors are.
        local, remote: IP addresses of both ends.
        publish: sends a note to the other side.
        lost: called once, with the reason, when a lane has broken.
        processes: where gloo's lanes run; on threads of this process if None.
        memory: bytes of address space of such a process.
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
        processes: LaneProcesses | None = None,
        memory: int = 0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._publish = publish
        self._lost = lost
        self._closed = False
        self._lanes: list[_Lane | LaneProcess] = []
        try:
            for number in (UP, DOWN):
                sends = (number == UP) == (rank == TENANT)
                if processes is not None and backend == "gloo":
                    self._lanes.append(
                        LaneProcess(number, sends, local, remote, memory, processes, self._publish, self._broken)
                    )
                    continue
                store: Store
                if backend == "nccl":
                    store = NcclStore(number, rank, self._note)
                    make = partial(rendezvous.nccl, store, rank, device)
                else:
                    store = GlooStore(number, rank, remote, self._note)
                    make = partial(rendezvous.gloo, store, rank, local)
                self._lanes.append(_Lane(store, make, device, 1 - rank, sends, self))
        except BaseException:
            self.close()
            raise
        self._out, self._in = self._lanes if rank == TENANT else reversed(self._lanes)

    def met(self, note: Note) -> None:
        """The other side has sent a note."""
        self._lanes[note.lane].met(note)

    def send(self, tensors: Sequence[torch.Tensor], sent: Callable[[], None] | None = None) -> None:
        """Send matrices, one after another; ``sent`` is called when they are on their way."""
        self._out.work(tensors, sent)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A matrix to receive into.

        Raises:
            BrokenError: there is no memory for it.
        """
        return self._in.empty(rows, width, dtype)

    def receive(self, tensors: Sequence[torch.Tensor], arrived: Callable[[], None]) -> None:
        """Receive into ``tensors`` what the other side sends next; ``arrived`` is called when it is there."""
        self._in.work(tensors, arrived)

    def close(self) -> None:
        """No callback comes any more. What is under way on a thread may take its time to end."""
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
        self.call_soon(partial(self._broken, error))

    def _broken(self, error: SymbiosisError) -> None:
        if not self._closed:
            self._lost(error)


class _Job(NamedTuple):
    tensors: Sequence[torch.Tensor]
    done: Callable[[], None] | None
    ready: torch.cuda.Event | None
    """When the tensors may be read, or written to."""


class _Lane:
    """A process group and the thread that waits for it."""

    def __init__(
        self, store: Store, make: Callable[[], Any], device: torch.device, other: int, sends: bool, lanes: Lanes
    ) -> None:
        self._store = store
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

    def met(self, note: Note) -> None:
        self._store.met(note)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, width, dtype=dtype, device=self._device)

    def work(self, tensors: Sequence[torch.Tensor], done: Callable[[], None] | None) -> None:
        self._jobs.put(_Job(tensors, done, _event(self._device)))

    def close(self) -> None:
        self._closed = True
        self._store.close()
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
                if not isinstance(error, SymbiosisError):
                    error = BrokenError(f"torch.distributed: {rendezvous.first_line(error)}")
                self._lanes.broken(error)
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
                work.wait(timedelta(seconds=rendezvous.WITHIN_S))
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
