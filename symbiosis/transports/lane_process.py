"""A lane's end in a process of its own: the executor's side of ``dist://`` over gloo.

gloo trusts its peer: bytes that make no sense to it end the process it runs in, from a thread of C++'s. So the
executor does not run it. A lane is a process, forked from one that has torch loaded and nothing else: it knows a
socket to its parent and a ``memfd`` in which the matrices lie, so that the executor reads what arrived without a copy.
A client that kills its lanes is a client whose connection has broken; nobody else notices.

Over the socket, of type SEQPACKET, go: an order to send or to receive, as (place, bytes) of each matrix; for each, in
their order, that it is done; and the ports of the rendezvous, both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from symbiosis.errors import BrokenError, SymbiosisError
from symbiosis.transports import rendezvous
from symbiosis.transports.arena import Arena, Places
from symbiosis.transports.rendezvous import EXECUTOR, TENANT, GlooStore, Note

__all__ = ["LaneProcess", "LaneProcesses"]

_MATRIX = struct.Struct("=QQ")
"""Place and bytes."""
_START = struct.Struct("=BBQdd64s64s")
"""Lane, whether it sends, bytes of its memory, the patience of rendezvous.py, IP addresses of both ends."""
_MAX_MESSAGE = 4096
_DATA_BYTES = 256 << 20
"""Memory of its own that a lane may take: some for threads, and none of note for what gloo is told to remember."""
_AT_ONCE = 32
"""Orders that a process is given before it has answered the first: what surely fits into a socket."""
ORDER, DONE, PORT, FAILED = b"o", b"d", b"p", b"f"


class LaneProcesses:
    """Forks lanes, from a process that has nothing but torch in its memory: one for all listeners of this process, as
    torch takes a second to load. Used by any thread."""

    _here: ClassVar[LaneProcesses | None] = None
    _taking: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._users = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._start()

    @classmethod
    def take(cls) -> LaneProcesses:
        """Those of this process, until :meth:`close`."""
        with cls._taking:
            if cls._here is None or cls._here._pid != os.getpid():
                cls._here = cls()
            cls._here._users += 1
            return cls._here

    def _start(self) -> None:
        self._stop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1"),
                "CUDA_VISIBLE_DEVICES": "",
            }
            self._server = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's to deal with
                pass_fds=[theirs.fileno()],
                env=environment,
            )

    def start(self, descriptors: Sequence[int], order: bytes) -> None:
        """Fork a lane that has these descriptors.

        Raises:
            BrokenError: that cannot be done here.
        """
        with self._lock:
            for last in (False, True):
                try:
                    if not self._users:
                        raise OSError("the listener is closed")
                    assert self._control is not None
                    socket.send_fds(self._control, [order], list(descriptors), socket.MSG_DONTWAIT)
                    return
                except OSError as error:
                    if last or not self._users or isinstance(error, BlockingIOError):
                        raise BrokenError(f"cannot start a process for a lane: {error.strerror or error}") from error
                    self._start()  # somebody has ended it

    def _stop(self) -> None:
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()

    def close(self) -> None:
        """When nobody else has taken it, end the process that forks; lanes are closed by those who opened them. Blocks,
        for a moment."""
        with self._taking:
            self._users -= 1
            if self._users:
                return
            if type(self)._here is self:
                type(self)._here = None
        with self._lock:
            self._stop()


class _Job(NamedTuple):
    tensors: Sequence[torch.Tensor]
    done: Callable[[], None] | None


class LaneProcess:
    """One lane, seen from the executor; what it does is what :class:`symbiosis.transports.lanes._Lane` does.

    Args:
        number: of the lane.
        sends: whether the executor sends on it.
        local, remote: IP addresses of both ends.
        size: of its memory, in bytes of address space.
        processes: who forks it.
        publish: sends a note to the client.
        broken: called when it has ended, with the reason.
    """

    def __init__(
        self,
        number: int,
        sends: bool,
        local: str,
        remote: str,
        size: int,
        processes: LaneProcesses,
        publish: Callable[[Note], None],
        broken: Callable[[SymbiosisError], None],
    ) -> None:
        self._number = number
        self._sends = sends
        self._publish = publish
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._orders: deque[_Job] = deque()
        """That it was not given yet."""
        self._given: deque[_Job] = deque()
        self._places = Places(0, size)
        self._freed: deque[tuple[int, int]] = deque()
        arena, descriptor = Arena.create(size)
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.setblocking(False)
            with theirs:
                times = rendezvous.MEET_WITHIN_S, rendezvous.WITHIN_S
                order = _START.pack(number, sends, size, *times, local.encode(), remote.encode())
                try:
                    processes.start([theirs.fileno(), descriptor], order)
                except BaseException:
                    self._socket.close()
                    raise
        finally:
            os.close(descriptor)
        self._arena: Arena | None = arena  # tensors in it keep it mapped
        self._base = arena.address
        self._loop.add_reader(self._socket, self._readable)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a matrix that this lane carries; it is free again when no tensor lies in it any more.

        Raises:
            BrokenError: there is none.
        """
        while self._freed:
            self._places.give_back(*self._freed.popleft())
        size = rows * width * dtype.itemsize
        place = self._places.take(size)
        if place is None or self._arena is None:
            raise BrokenError(f"the lane has no {size} bytes left: {self._places.in_use} are under way")
        region = self._arena.region(place, size)
        weakref.finalize(region, self._freed.append, (place, size)).atexit = False
        return torch.frombuffer(region, dtype=dtype).view(rows, width)

    def work(self, tensors: Sequence[torch.Tensor], done: Callable[[], None] | None) -> None:
        """Send tensors, or receive into tensors that :meth:`empty` made."""
        if self._sends:
            tensors = [self.empty(len(tensor), tensor.shape[1], tensor.dtype).copy_(tensor) for tensor in tensors]
        self._orders.append(_Job(tensors, done))
        self._give()

    def met(self, note: Note) -> None:
        """The client has sent a note."""
        self._say(PORT + struct.pack("=H", rendezvous.port_of(note)))

    def _give(self) -> None:
        while self._orders and len(self._given) < _AT_ONCE:
            job = self._orders.popleft()
            self._given.append(job)
            matrices = [_MATRIX.pack(tensor.data_ptr() - self._base, tensor.nbytes) for tensor in job.tensors]
            self._say(ORDER + b"".join(matrices))

    def _say(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, which we are told by what we read
            self._socket.send(message)

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._socket.fileno() >= 0:
                try:
                    message = self._socket.recv(_MAX_MESSAGE)
                except ConnectionResetError:
                    message = b""
                self._read(message[:1], message[1:])

    def _read(self, what: bytes, content: bytes) -> None:
        if what == DONE and self._given:
            job = self._given.popleft()
            self._give()
            if job.done is not None:
                job.done()
        elif what == PORT and len(content) == 2:
            self._publish(Note(self._number, "", int.from_bytes(content, sys.byteorder)))
        else:
            why = content.decode(errors="replace") if what == FAILED else "the process of a lane has ended"
            self.close()
            self._broken(BrokenError(f"torch.distributed: {why}"))

    def close(self) -> None:
        """End the process: it notices at once, whatever it is doing."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._arena = None
            self._orders.clear()
            self._given.clear()

    @property
    def alive(self) -> bool:
        """Whether it may still be at something."""
        return self._socket.fileno() >= 0


# ------------------------------------------------------------------------------------------------ in the other process


def serve(descriptor: int) -> None:
    """Fork a lane for every message that comes, until the parent is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a client could have one written with each connection
    control = socket.socket(fileno=descriptor)
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, _START.size, 2)
        if not order:
            return
        if os.fork() == 0:
            try:
                control.close()
                _lane(socket.socket(fileno=descriptors[0]), descriptors[1], order)
            finally:
                os._exit(0)
        for received in descriptors:
            os.close(received)


def _lane(parent: socket.socket, descriptor: int, order: bytes) -> None:
    number, sends, size, rendezvous.MEET_WITHIN_S, rendezvous.WITHIN_S, local, remote = _START.unpack(order)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C++ says when it is ended
    taken = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + _DATA_BYTES, taken))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        arena = Arena(descriptor, size)
        store = _ParentStore(number, remote.rstrip(b"\0").decode(), parent)
        group = rendezvous.gloo(store, EXECUTOR, local.rstrip(b"\0").decode())
        while True:
            for place, count in store.next_order():
                tensor = torch.frombuffer(arena.region(place, count), dtype=torch.uint8)
                work = group.send([tensor], TENANT, 0) if sends else group.recv([tensor], TENANT, 0)
                work.wait(timedelta(seconds=rendezvous.WITHIN_S))
            parent.send(DONE)
    except Exception as error:  # noqa: BLE001 (whatever torch.distributed raises, it is the end of this lane)
        parent.send(FAILED + rendezvous.first_line(error).encode())


def _data_bytes() -> int:
    """Memory of its own that this process has asked for."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:")) << 10


def _end_with(parent: socket.socket) -> None:
    """gloo may be waiting for its peer when the parent hangs up, or is killed."""
    hung_up = select.poll()
    hung_up.register(parent, 0)
    hung_up.poll()
    os._exit(0)


class _ParentStore(GlooStore):
    """The rendezvous, by way of the parent."""

    def __init__(self, lane: int, remote: str, parent: socket.socket) -> None:
        super().__init__(lane, EXECUTOR, remote, self._publish_port)
        self._parent = parent
        self._orders: deque[bytes] = deque()

    def _publish_port(self, note: Note) -> None:
        self._parent.send(PORT + struct.pack("=H", note.value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._parent.settimeout(rendezvous.WITHIN_S)
        try:
            while not self.check(keys):
                self._read()
        except TimeoutError:
            raise rendezvous.not_met() from None
        finally:
            self._parent.settimeout(None)

    def next_order(self) -> list[tuple[int, int]]:
        """Places and bytes of the next matrices to send, or to receive."""
        while not self._orders:
            self._read()
        return list(_MATRIX.iter_unpack(self._orders.popleft()))

    def _read(self) -> None:
        message = self._parent.recv(_MAX_MESSAGE)
        if message[:1] == ORDER:
            self._orders.append(message[1:])
        elif message[:1] == PORT:
            self.met(Note(0, "", int.from_bytes(message[1:], sys.byteorder)))
        else:
            os._exit(0)
