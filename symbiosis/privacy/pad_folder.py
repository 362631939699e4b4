"""Where pads outlive their process: the secret key, how many of each kind are used up, effects that are ready.

What must never happen is that a pad is used twice. So the counter on disk runs ahead of use: pads are reserved there,
as many as are made, and only then handed out. A process that dies leaves some reserved and unused, and those are
skipped. Effects are only a store of work that was done: what is damaged there is found by its checksum, and computed
again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from symbiosis.errors import PrivacyError

__all__ = ["Counter", "PadFolder"]

_KEY_BYTES = 32
_COUNT = struct.Struct("<QQ")
"""A counter, and the same with all bits turned: half a write is none."""
_HEAD = struct.Struct("<QI")
"""Before each row of effects: the number of its pad, and the checksum of both."""
_ALL = (1 << 64) - 1


class PadFolder:
    """A folder of pads, locked for one client.

    Raises:
        PrivacyError: another client uses it, it is for another model, or it cannot be written.
    """

    def __init__(self, path: str | Path, weights: str) -> None:
        self._lock = -1
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_mode & 0o077:
                raise PrivacyError(f"local-pads: others may look into {self.path}; its mode must be 0700")
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PrivacyError(f"local-pads: {self.path} cannot be used: {error.strerror or error}") from error
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PrivacyError(
                    f"local-pads: {self.path} is in use by another client; two would use the same pads, so give each a "
                    "folder of its own"
                ) from error
            model = self._once("model", weights.encode())
            if model != weights.encode():
                raise PrivacyError(f"local-pads: {self.path} has pads for another model; use another folder")
            self.key = self._once("key", os.urandom(_KEY_BYTES))
            if len(self.key) != _KEY_BYTES:
                raise PrivacyError(f"local-pads: {self.path / 'key'} is damaged; use another folder")
        except BaseException:
            self.close()
            raise

    def _once(self, name: str, content: bytes) -> bytes:
        """The content of a file that is written once, whole or not at all."""
        path = self.path / name
        if not path.exists():
            new = self.path / f"{name}.new"
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, content)
                os.fsync(file)
            finally:
                os.close(file)
            new.rename(path)
            self._sync()
        return path.read_bytes()

    def _sync(self) -> None:
        """Have the names of new files on disk, too."""
        folder = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def counter(self, name: str) -> Counter:
        """How many pads of a kind are used up."""
        path = self.path / f"{name}.counter"
        new = not path.exists()
        if new and (self.path / f"{name}.effects").exists():
            raise PrivacyError(f"local-pads: {path} is gone, and with it which pads were used; use another folder")
        counter = Counter(path)
        if new:
            self._sync()
        return counter

    def effects(self, name: str, width: int, dtype: torch.dtype) -> Effects:
        """The effects of a kind that are ready."""
        return Effects(self.path / f"{name}.effects", width, dtype)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Counter:
    """A number on disk.

    Raises:
        PrivacyError: what was written last is damaged, so nobody knows the number.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with _opened(path, os.O_RDWR | os.O_CREAT) as file:
            size = os.fstat(file).st_size
            whole = size - size % _COUNT.size
            if whole < size:  # half an entry: it was never told to be on disk
                os.ftruncate(file, whole)
            self.value = 0
            if whole:
                self.value, check = _COUNT.unpack(os.pread(file, _COUNT.size, whole - _COUNT.size))
                if self.value ^ check != _ALL:
                    raise PrivacyError(
                        f"local-pads: the last entry of {path} is damaged, and with it which pads were used; use "
                        "another folder"
                    )

    def reach(self, value: int) -> None:
        """Go up to ``value``, if it is lower."""
        with self._lock:
            if self.value < value:
                self.write(value)

    def write(self, value: int) -> None:
        """On disk when this returns.

        Raises:
            OSError: it is not, and the counter is what it was.
        """
        with _opened(self._path, os.O_WRONLY | os.O_APPEND) as file:
            size = os.fstat(file).st_size
            try:
                if os.write(file, _COUNT.pack(value, value ^ _ALL)) != _COUNT.size:
                    raise OSError(errno.ENOSPC, "a counter of pads was written in part")
                os.fsync(file)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size)
                raise
        self.value = value


class Effects:
    """Rows of effects by the number of their pad, in a file of as many places as there are rows at most."""

    def __init__(self, path: Path, width: int, dtype: torch.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._width = width
        self._size = _HEAD.size + width * dtype.itemsize

    def write(self, first: int, rows: torch.Tensor, places: int) -> None:
        """Keep rows [n, width] of pads ``first``, ``first`` + 1…"""
        with _opened(self._path, os.O_WRONLY | os.O_CREAT) as file:
            for number, row in enumerate(rows, first):
                data = row.contiguous().view(torch.uint8).numpy().tobytes()
                head = _HEAD.pack(number, _checksum(number, data))
                os.pwrite(file, head + data, number % places * self._size)

    def read(self, first: int) -> Iterator[torch.Tensor]:
        """The rows of pads ``first``, ``first`` + 1… as far as they are there."""
        with _opened(self._path, os.O_RDONLY | os.O_CREAT) as file:
            places = os.fstat(file).st_size // self._size
            found = {}
            for place in range(places):
                number, check = _HEAD.unpack(os.pread(file, _HEAD.size, place * self._size))
                if number >= first:
                    found[number] = place, check
            while first in found:
                place, check = found[first]
                data = bytearray(os.pread(file, self._size - _HEAD.size, place * self._size + _HEAD.size))
                if len(data) != self._width * self._dtype.itemsize or _checksum(first, data) != check:
                    return
                yield torch.frombuffer(data, dtype=self._dtype)
                first += 1


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Files are open for as long as they are used: of a large model there are hundreds."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _checksum(number: int, data: bytes | bytearray) -> int:
    return zlib.crc32(data, zlib.crc32(number.to_bytes(8, "little")))
