"""Where pads outlive their process: the secret key, how many of each kind are used up, effects that are ready.

What must never happen is that a pad is used twice. So the counter on disk runs ahead of use: pads are reserved there,
as many as are made, and only then handed out. A process that dies leaves some reserved and unused, and those are
skipped. Effects are only a store of work that was done: what is damaged there is found by its checksum, and computed
again.

A counter is one entry in one place, so it is whole or it is refused. It is less than a sector of a disk, which is
written whole or not at all; where it is not, the folder is lost, and nothing else.
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
"""A counter, and the same with all bits turned: the whole of its file."""
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
        self._pid = os.getpid()
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
        """The content of a file that is written once, before there are pads."""
        path = self.path / name
        if not path.exists():
            if any(path.suffix in (".counter", ".effects") for path in self.path.iterdir()):
                raise PrivacyError(
                    f"local-pads: {path} is gone, and there are pads that were made with it; use another folder"
                )
            _create(path, content)
        return path.read_bytes()

    def counter(self, name: str) -> Counter:
        """How many pads of a kind are used up."""
        path = self.path / f"{name}.counter"
        if not path.exists() and (self.path / f"{name}.effects").exists():
            raise PrivacyError(f"local-pads: {path} is gone, and with it which pads were used; use another folder")
        return Counter(path)

    def effects(self, name: str, width: int, dtype: torch.dtype) -> Effects:
        """The effects of a kind that are ready."""
        return Effects(self.path / f"{name}.effects", width, dtype)

    def close(self) -> None:
        if self._lock < 0:
            return
        if os.getpid() == self._pid:  # a forked child has the same lock, and would keep it
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        self._lock = -1


class Counter:
    """A number on disk.

    Raises:
        PrivacyError: the file is damaged, so nobody knows the number.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        if not path.exists():
            _create(path, _entry(0))
        data = path.read_bytes()
        self.value = _COUNT.unpack(data)[0] if len(data) == _COUNT.size else 0
        if data != _entry(self.value):
            raise PrivacyError(f"local-pads: {path} is damaged, and with it which pads were used; use another folder")

    def reach(self, value: int) -> None:
        """Go up to ``value``, if it is lower."""
        with self._lock:
            if self.value < value:
                self.write(value)

    def write(self, value: int) -> None:
        """On disk when this returns.

        Raises:
            OSError: it may not be, and counts as what it was.
        """
        with _opened(self._path, os.O_WRONLY) as file:
            if os.write(file, _entry(value)) != _COUNT.size:
                raise OSError(errno.EIO, "a counter of pads was written in part")
            os.fsync(file)
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


def _entry(value: int) -> bytes:
    return _COUNT.pack(value, value ^ _ALL)


def _create(path: Path, content: bytes) -> None:
    """A new file that is there whole or not at all, and on disk with its name."""
    new = path.with_name(f"{path.name}.new")
    with _opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        if os.write(file, content) != len(content):
            raise OSError(errno.ENOSPC, f"{new} was written in part")
        os.fsync(file)
    new.rename(path)
    with _opened(path.parent, os.O_RDONLY) as folder:
        os.fsync(folder)


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
