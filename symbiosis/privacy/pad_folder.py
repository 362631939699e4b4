"""Pads on disk: for each key a secret, how many of its pads are used, and effects that were computed.

No pad may be used twice. So the counter on disk is ahead of use: pads are first counted there as used, and then handed
out. A process that dies leaves pads that are counted and unused; they are skipped. An orderly end stores their
effects and counts them as unused again. Stored effects only save work; damaged ones are computed again.

A counter and the secret of its pads are one file, smaller than a sector of a disk, which is written as a whole. A file
that is damaged nevertheless is refused, and the folder cannot be used any more. Where a counter is missing, the new one
has a new secret and so other pads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import zlib
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from symbiosis.errors import PrivacyError

_SECRET_BYTES = 32
ENTRY = struct.Struct("<QQ")
"""A number and a check: the first bytes of a counter's file, and the header of a file of effects.

The check is the number with all bits inverted, or the checksum of the secret, the number and the effects."""


class PadFolder:
    """A folder of pads, locked for one client. It is created if necessary, accessible to its owner only.

    ``fingerprint`` identifies the weights that the effects belong to.

    Raises:
        PrivacyError: another client uses the folder, it belongs to another model, or it cannot be used.
    """

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        self.path = Path(path).absolute()  # counters are opened again and again, perhaps from another directory
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_mode & 0o077:
                raise PrivacyError(f"local-pads: {self.path} is accessible to other users; set its mode to 0700")
            self._lock = _open(self.path / "lock", "ab")
        except OSError as error:
            raise PrivacyError(f"local-pads: {self.path} cannot be used: {error.strerror or error}") from error
        try:
            self._acquire()
            if self._model(fingerprint.encode()) != fingerprint.encode():
                raise PrivacyError(f"local-pads: {self.path} has pads for another model; use another folder")
        except BaseException:
            self.close()
            raise

    def _acquire(self) -> None:
        import fcntl  # not on Windows

        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PrivacyError(
                f"local-pads: {self.path} is in use by another client, which would use the same pads; give each client "
                "a folder of its own"
            ) from error
        except OSError as error:
            raise PrivacyError(
                f"local-pads: {self.path} cannot be locked ({error.strerror or error}); use a folder on a local disk"
            ) from error

    def _model(self, fingerprint: bytes) -> bytes:
        """Return the fingerprint on disk, which is written before there are pads and never again."""
        path = self.path / "model"
        if not path.exists():
            if any(path.suffix in (".counter", ".effects") for path in self.path.iterdir()):
                raise PrivacyError(f"local-pads: {path} is missing, and the pads depend on it; use another folder")
            _create(path, fingerprint)
        return path.read_bytes()

    def counter(self, name: str) -> PadCounter:
        """Return the counter of used pads under a name.

        Raises:
            PrivacyError: the file is damaged, so the number of used pads is unknown.
        """
        return PadCounter(self.path / f"{name}.counter")

    def _effects(self, name: str) -> Path:
        return self.path / f"{name}.effects"

    def write_effects(self, name: str, secret: bytes, first: int, rows: torch.Tensor) -> None:
        """Store the effects [n, width] of pads ``first``, ``first`` + 1, … of a secret, and forget earlier ones.

        Raises:
            OSError: there is no room.
        """
        data: Any = rows.contiguous().view(torch.uint8).numpy()
        with _open(self._effects(name), "wb") as file:
            file.write(ENTRY.pack(first, _checksum(secret, first, data)))
            file.write(data)

    def read_effects(self, name: str, secret: bytes, first: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the effects [n, width] of pads ``first``, ``first`` + 1, … of a secret, as far as they are stored and
        whole."""
        path = self._effects(name)
        data = bytearray(path.read_bytes()) if path.exists() else bytearray()
        if len(data) > ENTRY.size:
            start, checksum = ENTRY.unpack_from(data)
            if start <= first and checksum == _checksum(secret, start, memoryview(data)[ENTRY.size :]):
                return torch.frombuffer(data, dtype=dtype, offset=ENTRY.size).view(-1, width)[first - start :]
        return torch.empty(0, width, dtype=dtype, device="cpu")

    def close(self) -> None:
        """Release the folder."""
        import fcntl

        with contextlib.suppress(OSError):  # on a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing the file is not enough: a forked child shares the lock
        self._lock.close()


class PadCounter:
    """A number on disk, and the secret of the pads that it counts.

    Raises:
        PrivacyError: the file is damaged, so the number is unknown, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        if not path.exists():
            secret = os.urandom(_SECRET_BYTES)
            _create(path, _entry(0) + secret + _digest(secret))
        data = path.read_bytes()
        entry, self.secret = data[: ENTRY.size], data[ENTRY.size : ENTRY.size + _SECRET_BYTES]
        self.value = ENTRY.unpack(entry)[0] if len(entry) == ENTRY.size else 0
        if data != _entry(self.value) + self.secret + _digest(self.secret):
            raise PrivacyError(
                f"local-pads: {path} is damaged or of an earlier version, so it is unknown which pads were used; use "
                "another folder"
            )

    def reach(self, value: int) -> None:
        """Raise the number to ``value`` if it is lower. Raises the error of :meth:`write`."""
        with self._lock:
            if self.value < value:
                self.write(value)

    def write(self, value: int) -> None:
        """Set the number, which is on disk when this returns.

        Raises:
            PrivacyError: the number may not be on disk; :attr:`value` stays as it was.
        """
        _write(self._path, "r+b", _entry(value))
        self.value = value


def _entry(value: int) -> bytes:
    return ENTRY.pack(value, value ^ (1 << 64) - 1)


def _digest(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=8).digest()


def _create(path: Path, content: bytes) -> None:
    """Create a file that exists with all its content or not at all. Both it and its name are on disk on return."""
    new = path.with_name(f"{path.name}.new")
    _write(new, "wb", content)
    new.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, mode: str, content: bytes) -> None:
    """Write a file, which is open for this time only: a large model has hundreds of counters."""
    try:
        with _open(path, mode) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise PrivacyError(
            f"local-pads: the number of used pads cannot be kept on disk ({error.strerror or error}); nothing was "
            "sent. Make room, and try again"
        ) from error


def _open(path: Path, mode: str) -> IO[bytes]:
    """Open a file. A new one is accessible to its owner only."""
    return open(path, mode, opener=partial(os.open, mode=0o600))


def _checksum(secret: bytes, first: int, effects: Any) -> int:
    return zlib.crc32(effects, zlib.crc32(secret + first.to_bytes(8, "little")))
