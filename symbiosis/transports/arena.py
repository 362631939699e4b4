"""The memory that carries a client's tensors between two processes of one host.

An arena is a ``memfd``: memory with a descriptor and no name, freed with its last user. The executor makes it with all
the address space that the client may use; the kernel allocates pages when they are touched. The size is sealed:
otherwise one side could truncate the arena and the other would get SIGBUS. The client alone decides what lies where.
Each call says where its matrices are and where its results belong, and the executor checks that both lie inside.
"""

from __future__ import annotations

import bisect
import mmap
import os
from functools import lru_cache
from typing import Any

import torch

from symbiosis.core.requests import Columns, Expected
from symbiosis.errors import WireError
from symbiosis.transports.wire import ALIGN, align

_VIEWS = 512
"""Matrices whose views are kept, for each memory. A model has fewer distinct ones."""


class Memory:
    """Memory [bytes] that two processes map, with places from ``start`` to ``end``. It keeps views of matrices, because
    calls reuse places and making a view takes two calls of torch."""

    def __init__(self, memory: torch.Tensor, start: int) -> None:
        self.start = start
        self.end = start + memory.shape[0]
        self._memory = memory
        self._views: dict[tuple[int, int, tuple[Columns, ...]], tuple[torch.Tensor, ...]] = {}
        self._count = 0
        """Matrices of these views."""

    def matrices(self, place: int, rows: int, columns: tuple[Columns, ...]) -> tuple[torch.Tensor, ...]:
        """Return views of matrices that lie one after another from ``place``. Raises WireError if a matrix does not lie
        inside the memory."""
        key = place, rows, columns
        views = self._views.get(key)
        if views is None:
            self._count += len(columns)
            if self._count > _VIEWS:
                self._views.clear()
                self._count = len(columns)
            views = self._views[key] = self._make(place, rows, columns)
        return views

    @torch.inference_mode(False)  # the caller's mode may be another one when the matrices are written to
    def _make(self, place: int, rows: int, columns: tuple[Columns, ...]) -> tuple[torch.Tensor, ...]:
        if rows < 1 or place < self.start or place + spread(rows, columns) > self.end:
            raise WireError(
                f"{rows} rows of {columns} at {place} are not inside the client's memory, {self.start} to {self.end}"
            )
        storage, offset = self._memory.untyped_storage(), self._memory.storage_offset() + place - self.start
        found = []
        for width, dtype in columns:
            # Views of one tensor would share its version counter, which autograd checks while others are written to.
            matrix: Any = torch.empty(0, dtype=dtype, device=self._memory.device)
            found.append(matrix.set_(storage, offset // dtype.itemsize, (rows, width)))
            offset += align(rows * width * dtype.itemsize)
        return tuple(found)


class Arena(Memory):
    """A mapped arena. The caller closes ``descriptor``; the mapping lives as long as tensors in it."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8), 0)

    @classmethod
    def create(cls, size: int) -> tuple[Arena, int]:
        """Return a new arena of ``size`` bytes of address space or a few more, and its descriptor."""
        import fcntl  # not on Windows

        size = align(size)  # a segment of the GPU's memory begins where it ends
        descriptor = os.memfd_create("symbiosis-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(descriptor, size), descriptor
        except BaseException:
            os.close(descriptor)
            raise


def check_sealed(descriptor: int) -> None:
    """Raise WireError if the process that has sent a descriptor can truncate the file."""
    import fcntl  # not on Windows

    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # it is no memfd
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WireError("the executor has sent a file that it could truncate while this client uses it")


@lru_cache(4096)
def spread(rows: int, columns: tuple[Columns, ...]) -> int:
    """Return the bytes that matrices take in an arena, one after another."""
    return sum(align(rows * width * dtype.itemsize) for width, dtype in columns)


@lru_cache(4096)
def sizes(rows: int, due: Expected) -> tuple[int, int]:
    """Return the bytes that a call's matrices take in an arena, and those of its matrices and results."""
    incoming = spread(rows, due.call)
    return incoming, incoming + spread(rows, due.answer)


class Places:
    """Allocates parts of the memory from ``start`` to ``end``, first fit. Used on the client's side only."""

    def __init__(self, start: int, end: int) -> None:
        self._whole = [(start, end)]
        self._free = self._whole.copy()
        """Start and end of each free part, ascending."""

    def take(self, size: int) -> int | None:
        """Return a place of at least ``size`` bytes, or None if there is none."""
        size = max(align(size), ALIGN)
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[index]
                else:
                    self._free[index] = (start + size, end)
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Free a place that :meth:`take` returned for ``size`` bytes."""
        free = self._free
        end = start + max(align(size), ALIGN)
        if free and free[0][0] == end:  # the common case: a client with one call outstanding
            free[0] = (start, free[0][1])
            return
        index = bisect.bisect(free, (start, end))
        if index < len(free) and free[index][0] == end:
            end = free.pop(index)[1]
        if index and free[index - 1][1] == start:
            index -= 1
            start = free.pop(index)[0]
        free.insert(index, (start, end))

    @property
    def unused(self) -> bool:
        """Whether nothing is allocated."""
        return self._free == self._whole
