"""GPU memory that carries a client's tensors between two processes of one host: the arena of ``shm://`` on CUDA.

It is one *segment*, which the executor allocates at the client's request, within its limits, and which both processes
map (CUDA IPC). When a call needs more and none is outstanding, a larger segment replaces it. Its places begin after the
end of the arena in host memory, which clients without this GPU use. The client alone decides what lies where, and the
executor checks it.

Neither process waits for the GPU. Two interprocess events order the work: the client records ``called`` when its rows
are written, the executor records ``answered`` when its results are written. Each side has its stream wait for the
other's event when the corresponding message comes. A later call may have recorded the event again by then, so the wait
may be longer. It cannot deadlock, because each side records an event before it sends the message that has the other
side wait.

Memory comes from the driver and not from torch's allocator, whose blocks contain other tensors. A segment is a multiple
of 2 MiB, because an IPC handle opens the whole block that contains an allocation, and is zeroed before use.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from symbiosis.errors import UsageError, WireError
from symbiosis.transports.arena import Memory

BLOCK = 2 << 20
FIRST = 32 << 20
"""Bytes of the smallest segment, if the limit allows it."""
HANDLE = 64
"""Size of an IPC handle, in bytes."""


class Segment(Memory):
    """A client's memory on a GPU. The executor makes it with :meth:`create`, the client maps it with :meth:`open`."""

    def __init__(self, memory: torch.Tensor, start: int, called: Any, answered: Any) -> None:
        super().__init__(memory, start)
        self.called = called
        self.answered = answered

    @staticmethod
    def size(least: int, limit: int) -> int:
        """Return the bytes of a segment for calls of ``least`` bytes. Raises WireError if they exceed the limit."""
        if not 0 < least <= limit:
            raise WireError(f"the client asks for a segment of {least} bytes; it may have {limit}")
        return -(-min(max(least, FIRST), limit) // BLOCK) * BLOCK

    @classmethod
    def create(cls, device: torch.device, start: int, size: int) -> tuple[Segment, Sequence[Any]]:
        """Return a segment of ``size`` bytes with places from ``start``, and the content of SEGMENT for it. Raises
        UsageError if the GPU has no room."""
        memory, handle = allocate(device, size)
        called, answered = event(device), event(device)
        content = (start, size, handle, called.ipc_handle(), answered.ipc_handle())
        return cls(memory, start, called, answered), content

    @classmethod
    def open(cls, device: torch.device, start: int, limit: int, content: Sequence[Any]) -> Segment:
        """Map the segment that the executor describes in SEGMENT. Raises WireError if the message is malformed."""
        if (
            [type(field) for field in content] != [int, int, bytes, bytes, bytes]
            or content[0] != start
            or not 0 < content[1] <= limit + BLOCK
            or any(len(handle) != HANDLE for handle in content[2:])
        ):
            raise WireError("the executor sent a malformed SEGMENT")
        _, size, memory, called, answered = content
        return cls(map_(device, memory, size), start, event(device, called), event(device, answered))

    def wait(self, event: Any) -> None:
        """Have this thread's stream wait for ``called`` or ``answered``. The thread does not wait."""
        event.wait(stream(self._memory.device))

    def record(self, event: Any) -> None:
        """Have ``called`` or ``answered`` stand for the work of this thread's stream so far."""
        event.record(stream(self._memory.device))


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
    Raises UsageError if the GPU has no room."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the driver's context this thread's
        address = ctypes.c_uint64()
        try:
            _check(_driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
        except RuntimeError as error:
            raise UsageError(f"{device} has no {size} bytes for a client's arena: {error}") from error
        memory = _DeviceMemory(address.value, size, device, "cuMemFree_v2")
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
        return torch.as_tensor(_DeviceMemory(address.value, size, device, "cuIpcCloseMemHandle"), device=device)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE),)


class _DeviceMemory:
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
