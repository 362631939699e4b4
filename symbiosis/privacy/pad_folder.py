"""Pads on disk: the secret key, how many pads of each key are used, and effects that were computed.

No pad may be used twice. So the counter on disk is ahead of use: pads are first counted there as used, and then handed
out. A process that dies leaves some that are counted and unused, and those are skipped. Stored effects only save work;
a checksum detects damage, and damaged effects are computed again.

A counter is one entry in one place. It is smaller than a sector of a disk, which is written as a whole. An entry that
is damaged nevertheless is refused, and the folder cannot be used any more.
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

__all__ = ["EFFECT_HEADER", "PadCounter", "PadFolder", "StoredEffects"]

_KEY_BYTES = 32
_COUNTER = struct.Struct("<QQ")
"""The content of a counter's file: the number, and the number with all bits inverted."""
EFFECT_HEADER = struct.Struct("<QI")
"""Header of each row of effects: the number of its pad, and the checksum of that number and the row."""


class PadFolder:
    """A folder of pads, locked for one client.

    Args:
        path: the folder; it is created if necessary, readable by its owner only.
        fingerprint: fingerprint of the weights that the effects belong to.

    Raises:
        PrivacyError: another client uses the folder, it belongs to another model, or it cannot be used.
    """

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        self._lock = -1
        self._pid = os.getpid()
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_mode & 0o077:
                raise PrivacyError(f"local-pads: {self.path} is accessible to other users; set its mode to 0700")
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PrivacyError(f"local-pads: {self.path} cannot be used: {error.strerror or error}") from error
        try:
            self._acquire()
            if self._write_once("model", fingerprint.encode()) != fingerprint.encode():
                raise PrivacyError(f"local-pads: {self.path} has pads for another model; use another folder")
            self.key = self._write_once("key", os.urandom(_KEY_BYTES))
            if len(self.key) != _KEY_BYTES:
                raise PrivacyError(f"local-pads: {self.path / 'key'} is damaged; use another folder")
        except BaseException:
            self.close()
            raise

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PrivacyError(
                f"local-pads: {self.path} is in use by another client, which would use the same pads; give each client "
                "a folder of its own"
            ) from error

    def _write_once(self, name: str, content: bytes) -> bytes:
        """Return the content of a file, which is written before there are pads and never again."""
        path = self.path / name
        if not path.exists():
            if any(path.suffix in (".counter", ".effects") for path in self.path.iterdir()):
                raise PrivacyError(f"local-pads: {path} is missing, and the pads depend on it; use another folder")
            _create(path, content)
        return path.read_bytes()

    def counter(self, name: str) -> PadCounter:
        """Return the counter of used pads under a name.

        Raises:
            PrivacyError: the file is damaged or missing, so the number of used pads is unknown.
        """
        path = self.path / f"{name}.counter"
        if not path.exists() and (self.path / f"{name}.effects").exists():
            raise PrivacyError(
                f"local-pads: {path} is missing, so it is unknown which pads were used; use another folder"
            )
        return PadCounter(path)

    def effects(self, name: str, width: int, dtype: torch.dtype) -> StoredEffects:
        """Return the stored effects under a name, as rows of ``width`` numbers."""
        return StoredEffects(self.path / f"{name}.effects", width, dtype)

    def close(self) -> None:
        """Release the folder."""
        if self._lock < 0:
            return
        if os.getpid() == self._pid:  # a forked child shares the lock, and must not release it
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        self._lock = -1


class PadCounter:
    """A number on disk.

    Raises:
        PrivacyError: the file is damaged, so the number is unknown.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        if not path.exists():
            _create(path, _entry(0))
        data = path.read_bytes()
        self.value = _COUNTER.unpack(data)[0] if len(data) == _COUNTER.size else 0
        if data != _entry(self.value):
            raise PrivacyError(
                f"local-pads: {path} is damaged, so it is unknown which pads were used; use another folder"
            )

    def reach(self, value: int) -> None:
        """Raise the number to ``value`` if it is lower. Raises the error of :meth:`write`."""
        with self._lock:
            if self.value < value:
                self.write(value)

    def write(self, value: int) -> None:
        """Set the number, which is on disk when this returns.

        Raises:
            OSError: the number may not be on disk; :attr:`value` stays as it was.
        """
        with _opened(self._path, os.O_WRONLY) as file:
            _write_whole(file, _entry(value), self._path)
            os.fsync(file)
        self.value = value


class StoredEffects:
    """Rows of effects by the number of their pad, in a file with a fixed number of places."""

    def __init__(self, path: Path, width: int, dtype: torch.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._row_bytes = width * dtype.itemsize
        self._place_bytes = EFFECT_HEADER.size + self._row_bytes

    def write(self, first: int, rows: torch.Tensor, places: int) -> None:
        """Store rows [n, width] of pads ``first``, ``first`` + 1, … over earlier ones, in ``places`` places."""
        with _opened(self._path, os.O_WRONLY | os.O_CREAT) as file:
            for number, row in enumerate(rows, first):
                data = row.contiguous().view(torch.uint8).numpy().tobytes()
                header = EFFECT_HEADER.pack(number, _checksum(number, data))
                os.pwrite(file, header + data, number % places * self._place_bytes)

    def read(self, first: int) -> Iterator[torch.Tensor]:
        """Yield the rows of pads ``first``, ``first`` + 1, … until one is missing or damaged."""
        with _opened(self._path, os.O_RDONLY | os.O_CREAT) as file:
            found = {}
            for place in range(os.fstat(file).st_size // self._place_bytes):
                start = place * self._place_bytes
                number, checksum = EFFECT_HEADER.unpack(os.pread(file, EFFECT_HEADER.size, start))
                found[number] = start + EFFECT_HEADER.size, checksum
            while first in found:
                start, checksum = found[first]
                data = bytearray(os.pread(file, self._row_bytes, start))
                if len(data) != self._row_bytes or _checksum(first, data) != checksum:
                    return
                yield torch.frombuffer(data, dtype=self._dtype)
                first += 1


def _entry(value: int) -> bytes:
    return _COUNTER.pack(value, value ^ (1 << 64) - 1)


def _create(path: Path, content: bytes) -> None:
    """Create a file that exists with all its content or not at all. Both it and its name are on disk on return."""
    new = path.with_name(f"{path.name}.new")
    with _opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        _write_whole(file, content, new)
        os.fsync(file)
    new.rename(path)
    with _opened(path.parent, os.O_RDONLY) as folder:
        os.fsync(folder)


def _write_whole(file: int, content: bytes, path: Path) -> None:
    if os.write(file, content) != len(content):
        raise OSError(errno.ENOSPC, f"{path} was written in part")


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file while it is in use only: a large model has hundreds of counters."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _checksum(number: int, data: bytes | bytearray) -> int:
    return zlib.crc32(data, zlib.crc32(number.to_bytes(8, "little")))
