"""The message WELCOME, and the client's share of the model that it describes.

The tensors of the share are one file in safetensors format. The executor keeps the file in memory and seals it, so that
no process can change it. A client of ``shm://`` gets its descriptor; a client on another host gets chunks of it and
writes them to a temporary file. Both map the file privately: pages are read when they are touched, and are common to
all clients of a process until one of them writes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from symbiosis.core.requests import LayerSpec
from symbiosis.core.share import Share, layers_of
from symbiosis.core.transport import Identity, Look, Service
from symbiosis.errors import ShareError, WireError
from symbiosis.transports import wire

CHUNK = 1 << 18
"""Bytes of a chunk."""
MAX_SHARE = 1 << 36
"""Bytes of the largest share: 64 GiB."""
LEAST_RATE, SLOW_S = 1 << 17, 60.0
"""Bytes per second at which a share must arrive, and seconds for which it may be slower."""
_SHOW_FROM = 8 << 20
"""Bytes of a share from which a bar is shown: smaller ones arrive in less than a second."""

OPEN_FILES = Path("/proc/self/fd")
"""Where Linux has names for open files. Other systems have none."""

Progress = Callable[[int, int], None]
"""Called with the number of bytes received, and the total."""


class ServedShare:
    """The executor's side of a listener: a file, which is made when the first client joins. Clients over ``shm://`` map
    it from a sealed memfd, which Linux alone has; others receive chunks of it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._file: int | None = None
        self._content = b""

    def _make(self) -> bytes:
        return safetensors.torch.save(
            {name: tensor.cpu().contiguous() for name, tensor in self._service.share().tensors.items()}
        )

    def descriptor(self) -> int:
        """Return the descriptor of the memfd."""
        if self._file is None:
            import fcntl  # not on Windows

            made = os.memfd_create("symbiosis-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            with os.fdopen(made, "wb") as file:
                file.write(self._make())
                file.flush()
                seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
                self._file = os.dup(file.fileno())  # no client gets a file that is not whole and sealed
        return self._file

    def size(self) -> int:
        """Return the size of the file in bytes."""
        self._content = self._content or self._make()
        return len(self._content)

    def chunk(self, start: int) -> bytes:
        """Return the chunk that begins at ``start``. Raises WireError if no chunk begins there."""
        if start % CHUNK or not 0 <= start < self.size():
            raise WireError(f"no chunk of the share starts at {start}")
        return self._content[start : start + CHUNK]

    def close(self) -> None:
        """Close the file. Clients that have mapped it keep it."""
        self._content = b""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ReceivedShare:
    """The client's side, where the share arrives in chunks: a temporary file without a name."""

    def __init__(self, size: Any) -> None:
        if type(size) is not int or not 8 < size < MAX_SHARE:
            raise WireError(f"the executor announces a share of {size!r} bytes")
        self.size = size
        self.done = 0
        self._began = time.monotonic()
        try:
            if shutil.disk_usage(tempfile.gettempdir()).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._file = tempfile.TemporaryFile(prefix="symbiosis-")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise self._no_room(error) from error

    def add(self, start: int, data: Any) -> None:
        """Write the next chunk. Raises WireError if it is not the next chunk, has another length, or comes too late,
        and ShareError if it cannot be written."""
        if start != self.done or len(data) != min(CHUNK, self.size - start):
            raise WireError(f"{len(data)} bytes of the share at {start} have come, not those at {self.done}")
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise self._no_room(error) from error
        self.done += len(data)
        if self.done < LEAST_RATE * (time.monotonic() - self._began - SLOW_S):
            raise WireError(f"the share arrives too slowly: {self.done} of {self.size} bytes")

    def _no_room(self, error: OSError) -> ShareError:
        return ShareError(
            f"cannot write the client's share of the model, {self.size} bytes, to a temporary file: {error.strerror}; "
            "set TMPDIR to a folder that has room"
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, mapped."""
        return tensors_in(self._file.fileno())

    def close(self) -> None:
        """Close the file. Mapped tensors stay valid."""
        with contextlib.suppress(OSError):  # the disk is full, and what is left in the buffer does not matter
            self._file.close()


@torch.inference_mode(False)  # clients of this process have the tensors in common, whatever mode the first is in
def tensors_in(descriptor: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an open file, mapped privately; on systems other than Linux they are copied. Raises
    WireError if the file is malformed."""
    name = OPEN_FILES / str(descriptor)
    try:
        if not name.exists():
            with open(descriptor, "rb", closefd=False) as opened:
                opened.seek(0)
                return safetensors.torch.load(opened.read())
        with safe_open(str(name), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise WireError(f"the executor's share cannot be read: {error}") from error


_shares: weakref.WeakValueDictionary[bytes, Share] = weakref.WeakValueDictionary()
"""The shares that clients of this process use, by :func:`_key`, so that they have their tensors in common."""


def _key(description: Mapping[str, Any], tokenizer: Mapping[str, bytes]) -> bytes:
    """Return a hash of a description and of tokenizer files. The fingerprint in the description is not enough: another
    executor may have stated it with another description.

    Raises:
        ShareError: the description is not plain data.
    """
    try:
        found = hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16)
    except (TypeError, ValueError, RecursionError) as error:
        raise ShareError(f"the executor's description of its model cannot be read: {error!r}"[:500]) from error
    for name in sorted(tokenizer):
        found.update(len(tokenizer[name]).to_bytes(8) + name.encode() + b"\0" + tokenizer[name])
    return found.digest()


class Welcome:
    """Checks the content of a WELCOME."""

    def __init__(self, content: Any) -> None:
        if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
            raise WireError("the executor sent a malformed WELCOME")
        self.content: dict[str, Any] = content[0]
        share, tokenizer = self.content.get("share"), self.content.get("tokenizer")
        if not isinstance(share, dict) or not isinstance(share.get("fingerprint"), str):
            raise WireError("the executor's WELCOME does not describe a model")
        if not isinstance(tokenizer, dict) or not all(
            isinstance(name, str) and isinstance(data, bytes) and "/" not in name and name not in ("", ".", "..")
            for name, data in tokenizer.items()
        ):
            raise WireError("the executor's WELCOME has malformed tokenizer files")
        self.description: dict[str, Any] = share
        self.tokenizer: dict[str, bytes] = tokenizer
        self.limits = wire.read_limits(self.content.get("limits"))

    def look(self, content: Sequence[Any]) -> Look:
        """Return what the executor shows to a peer that has not joined, given the content of its STATUS. Raises
        WireError if the content is malformed."""
        if (
            len(content) != 1
            or not isinstance(content[0], dict)
            or not all(isinstance(name, str) for name in content[0])
        ):
            raise WireError("the executor sent a malformed STATUS")
        return Look(content[0], self.description, self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model; the same after a reconnect if the model is the same."""
        return str(self.description["fingerprint"])

    @property
    def identity(self) -> Identity:
        """Identity of the executor and of its base layers."""
        return Identity(str(self.content.get("instance", "")), str(self.description.get("weights", "")))

    @property
    def layers(self) -> list[LayerSpec]:
        """The layer table. Raises ShareError if it is malformed."""
        return layers_of(self.description)

    def known(self) -> Share | None:
        """Return the share, if a client of this process uses it already."""
        return _shares.get(_key(self.description, self.tokenizer))

    def share(self, tensors: Mapping[str, torch.Tensor]) -> Share:
        """Return the share, the same object for all clients of this process."""
        return common_share(self.description, tensors, self.tokenizer)


def common_share(
    description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tokenizer: Mapping[str, bytes]
) -> Share:
    """Return the share of this description and tokenizer, the same object for all clients of this process."""
    key = _key(description, tokenizer)
    share = _shares.get(key)
    if share is None:
        share = _shares[key] = Share(description, tensors, tokenizer)
    return share


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
