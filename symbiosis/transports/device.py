"""GPU memory that carries a client's tensors between two processes of one host: the arena of ``shm://`` on CUDA.

The arena consists of *segments*, which the executor allocates at the client's request, within its limits, and which
both processes map (CUDA IPC). Their places continue after the end of the arena in host memory, which clients without
this GPU use. The client alone decides what lies where, and the executor checks it.

Neither process waits for the GPU. Two interprocess events order the work: the client records ``called`` when its
rows are written, the executor records ``answered`` when its results are written. Each side has its stream wait for the
other's event when the corresponding message comes. The event may already have been recorded again for a later call.
Waiting for the later record takes longer but cannot deadlock: a call's message follows its record, and the answer's
message follows the executor's wait.

Memory comes from the driver and not from torch's allocator, whose blocks contain other tensors. Segments are multiples
of 2 MiB, because an IPC handle opens the whole block that contains an allocation, and are zeroed before use.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple

import torch

from symbiosis.errors import UsageError, WireError
from symbiosis.transports.arena import Memory
from symbiosis.transports.wire import align

__all__ = ["DeviceArena", "Handles", "find", "identity"]

BLOCK = 2 << 20
FIRST = 32 << 20
"""Bytes of a client's first segment, unless it asks for more. Each following segment is twice as large."""
HANDLE = 64
"""Size of an IPC handle, in bytes."""


class Handles(NamedTuple):
    """The data with which a client maps a segment."""

    start: int
    """Place at which the segment begins."""
    size: int
    memory: bytes
    called: bytes
    answered: bytes


class _Segment(NamedTuple):
    start: int
    bytes: torch.Tensor
    """uint8 [size], on the device."""

    @property
    def end(self) -> int:
        return self.start + self.bytes.shape[0]


class DeviceArena(Memory):
    """The segments of one client. The executor makes them with :meth:`grow`, the client maps them with :meth:`open`.

    Args:
        device: a CUDA device.
        start: place of the first segment.
        limit: bytes of all segments together.
    """

    def __init__(self, device: torch.device, start: int, limit: int) -> None:
        super().__init__()
        self.device = device
        self.end = start
        self.called: Any = None
        self.answered: Any = None
        self.segments: list[_Segment] = []
        self._limit = start + limit

    # The executor's side

    def grow(self, size: int) -> Handles:
        """Make a segment of at least ``size`` bytes.

        Raises:
            WireError: the client would exceed its limit.
            UsageError: the GPU has no room.
        """
        most = self._limit - self.end
        if not 0 < size <= most:
            raise WireError(f"a segment of {size} bytes; this client may have {most} more")
        wanted = min(max(size, FIRST << len(self.segments)), most)
        wanted = -(-wanted // BLOCK) * BLOCK
        if not self.segments:
            self.called, self.answered = event(self.device), event(self.device)
        memory, handle = allocate(self.device, wanted)
        self._add(memory)
        return Handles(self.segments[-1].start, wanted, handle, self.called.ipc_handle(), self.answered.ipc_handle())

    # The client's side

    def open(self, handles: Handles) -> int:
        """Map a segment that the executor has made. Return the place at which it begins.

        Raises:
            WireError: it does not follow the last segment.
        """
        sound = handles.start == self.end and 0 < handles.size <= self._limit - self.end + BLOCK
        if not sound or any(len(handle) != HANDLE for handle in handles[2:]):
            raise WireError("the executor's segment does not follow its last one")
        if not self.segments:
            self.called = event(self.device, handles.called)
            self.answered = event(self.device, handles.answered)
        self._add(map_(self.device, handles.memory, handles.size))
        return handles.start

    # Both sides

    def _add(self, memory: torch.Tensor) -> None:
        self.segments.append(_Segment(self.end, memory))
        self.end = self.segments[-1].end

    def wait(self, event: Any) -> None:
        """Have this thread's stream wait for ``called`` or ``answered``. The thread does not wait."""
        event.wait(stream(self.device))

    def record(self, event: Any) -> None:
        """Have ``called`` or ``answered`` stand for the work of this thread's stream so far."""
        event.record(stream(self.device))

    def _make(self, place: int, rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        segment = next((segment for segment in self.segments if segment.start <= place < segment.end), None)
        found = []
        for width in widths:
            size = rows * width * dtype.itemsize
            if segment is None or size == 0 or place + size > segment.end:
                raise WireError(f"[{rows}, {width}] {dtype} at {place} is not inside a segment")
            at = place - segment.start
            found.append(segment.bytes[at : at + size].view(dtype).view(rows, width))
            place += align(size)
        return tuple(found)


# The device


def identity(device: torch.device) -> str | None:
    """Return the UUID of a GPU, the same in all processes; None for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def find(gpu: object) -> torch.device | None:
    """Return the GPU with this identity, as this process numbers it; None if the process does not have it."""
    if not isinstance(gpu, str) or not torch.cuda.is_available():
        return None
    numbers = range(torch.cuda.device_count())
    devices = [torch.device("cuda", number) for number in numbers]
    return next((device for device in devices if identity(device) == gpu), None)


def stream(device: torch.device) -> Any:
    """Return the current stream of this thread."""
    return torch.cuda.current_stream(device)


def event(device: torch.device, handle: bytes | None = None) -> Any:
    """Return an interprocess event: a new one, or that of another process by its handle."""
    if handle is not None:
        return torch.cuda.Event.from_ipc_handle(device, handle)  # type: ignore[no-untyped-call]
    made = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
    made.record(stream(device))  # before this it has no handle
    return made


def allocate(device: torch.device, size: int) -> tuple[torch.Tensor, bytes]:
    """Return new memory of ``size`` bytes, zeroed, as uint8 [size], and its handle. It is freed with its last view.

    Raises:
        UsageError: the GPU has no room.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the driver's context this thread's
        address = ctypes.c_uint64()
        try:
            _check(_driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
        except RuntimeError as error:
            raise UsageError(f"{device} has no {size} bytes for a client's arena: {error}") from error
        memory = _Memory(address.value, size, device, "cuMemFree_v2")
        handle = _Handle()
        _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), address))
        tensor = torch.as_tensor(memory, device=device)
        tensor.zero_()
        torch.cuda.synchronize()
        return tensor, bytes(handle)


def map_(device: torch.device, handle: bytes, size: int) -> torch.Tensor:
    """Return another process's memory as uint8 [size]. It is unmapped with its last view."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        address = ctypes.c_uint64()
        lazily = ctypes.c_uint(1)
        _check(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle.from_buffer_copy(handle), lazily))
        return torch.as_tensor(_Memory(address.value, size, device, "cuIpcCloseMemHandle"), device=device)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE),)


class _Memory:
    """Device memory from the driver. It is given back when the tensor made of it, and its views, are gone."""

    def __init__(self, address: int, size: int, device: torch.device, give_back: str) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self._address = address
        self._device = device
        self._give_back = give_back

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at the end of a process the driver frees all memory
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()  # operations in progress may still use it
                getattr(_driver(), self._give_back)(ctypes.c_uint64(self._address))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()} ({status})")
