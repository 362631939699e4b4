"""A client's share of the model in safetensors format, in chunks, so that no second copy of it is in memory."""

from __future__ import annotations

import bisect
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from symbiosis.errors import WireError

__all__ = ["CHUNK", "Chunks", "Progress", "ShareFile", "bar_unless"]

CHUNK = 1 << 20
"""Bytes of a chunk."""
_SHOW_FROM = 8 << 20
"""Bytes of a share from which a bar is shown: smaller ones arrive in less than a second."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Progress = Callable[[int, int], None]
"""Called with the number of bytes received, and the total."""


class Chunks:
    """The executor's side: a safetensors file of the tensors, in pieces of :data:`CHUNK` bytes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        header: dict[str, Any] = {}
        self._parts: list[torch.Tensor] = []
        """Bytes of the header and of each tensor, flat, on the tensor's device."""
        self._starts: list[int] = []
        end = 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64 + 56)  # the data are aligned to a cache line
        first = bytearray(len(text).to_bytes(8, "little") + text)
        self.size = 0
        for part in (torch.frombuffer(first, dtype=torch.uint8), *map(_flat, tensors.values())):
            if part.numel():
                self._parts.append(part)
                self._starts.append(self.size)
                self.size += part.numel()

    def at(self, start: int) -> torch.Tensor:
        """Return the chunk that begins at ``start``, as uint8 on the CPU, without a copy where possible.

        Raises:
            WireError: no chunk begins there.
        """
        if start % CHUNK or not 0 <= start < self.size:
            raise WireError(f"no chunk of the share starts at {start}")
        stop = min(start + CHUNK, self.size)
        found: list[torch.Tensor] = []
        index = bisect.bisect(self._starts, start) - 1
        while start < stop:
            part, at = self._parts[index], self._starts[index]
            found.append(part[start - at : stop - at].cpu())
            start, index = at + part.numel(), index + 1
        return found[0] if len(found) == 1 else torch.cat(found)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class ShareFile:
    """The client's side: a temporary file from which tensors are mapped. It is removed at the end of the process."""

    def __init__(self, size: Any) -> None:
        if type(size) is not int or not 8 < size < 1 << 44:
            raise WireError(f"the executor announces a share of {size!r} bytes")
        self.size = size
        self.done = 0
        self._folder = tempfile.TemporaryDirectory(prefix="symbiosis-")
        self._path = Path(self._folder.name) / "share.safetensors"
        self._file = self._path.open("wb")

    def add(self, start: int, data: Any) -> None:
        """Write the next chunk.

        Raises:
            WireError: it is not the next chunk, or has another length.
        """
        if start != self.done or len(data) != min(CHUNK, self.size - start):
            raise WireError(f"{len(data)} bytes of the share at {start} have come, not those at {self.done}")
        self._file.write(data)
        self.done += len(data)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, mapped: pages are read when they are touched."""
        self._file.close()
        try:
            with safe_open(self._path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise WireError(f"the executor's share cannot be read: {error}") from error

    def close(self) -> None:
        """Remove the file. Mapped tensors stay valid."""
        self._file.close()
        self._folder.cleanup()


@contextlib.contextmanager
def bar_unless(progress: Progress | None, address: str) -> Iterator[Progress | None]:
    """Yield ``progress`` if it is given; otherwise, at a terminal, a function that shows a bar for a large share."""
    if progress is not None or not sys.stderr.isatty():
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(f"model from {address}", total=None)

    def show(done: int, total: int) -> None:
        if total >= _SHOW_FROM:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()
