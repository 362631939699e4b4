"""How the two sides of a lane find each other, without torch.distributed's own stores, which open a port for everybody:
they exchange what they need over the control connection, which knows who is there.

Of what gloo wants to say of itself, 170 bytes that the other side's C++ code takes as they are (and crashes on if they
are no good), only the port travels.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from symbiosis.errors import BrokenError, WireError

__all__ = [
    "BACKENDS",
    "DOWN",
    "EXECUTOR",
    "TENANT",
    "UP",
    "GlooStore",
    "NcclStore",
    "Note",
    "Store",
    "first_line",
    "gloo",
    "nccl",
    "not_met",
    "port_of",
]

BACKENDS = ("gloo", "nccl")
EXECUTOR, TENANT = 0, 1
"""Ranks. NCCL's rendezvous is held by rank 0."""
UP, DOWN = 0, 1
"""Lanes: from the client, to the client."""
WITHIN_S = 60.0
"""How long the other side may take to come to the rendezvous, and how long one matrix may take."""
MEET_WITHIN_S = 4.0
"""How long a connection of gloo's may take; it tries five times."""

_SOCKADDR = 128
_ADDRESS = _SOCKADDR + 8
"""gloo's ``Address``: a ``sockaddr_storage`` and a sequence number."""


class Note(NamedTuple):
    """What one side tells the other for the rendezvous of a lane: gloo's port, or a key and its value of NCCL's."""

    lane: int
    key: str
    value: int | bytes


def port_of(note: Note) -> int:
    """gloo's port.

    Raises:
        WireError: it is none.
    """
    if type(note.value) is not int or not 0 < note.value < 1 << 16:
        raise WireError("gloo's rendezvous is a port")
    return note.value


def first_line(error: Exception) -> str:
    """What torch.distributed has to say, without the stack that follows."""
    return str(error).strip().partition("\n")[0][:300]


def gloo(store: Store, rank: int, local: str) -> Any:
    """A process group of two over TCP, that listens on the address ``local``."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # A device for each group: its pairs are numbered from the start, the same on both sides.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=local)]
    options._timeout = timedelta(seconds=MEET_WITHIN_S)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def nccl(store: Store, rank: int, device: torch.device) -> Any:
    """A process group of two between GPUs."""
    # By default torch ends the process where an operation takes too long: a tenant that stalls would end them all.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=WITHIN_S)
    return dist.ProcessGroupNCCL(store, rank, 2, options)


class Store(dist.Store):  # type: ignore[misc, name-defined]
    """The rendezvous of one lane, as far as a process group uses it; called by the thread that makes the group."""

    def __init__(self, lane: int, rank: int, publish: Callable[[Note], None]) -> None:
        super().__init__()
        self._lane = lane
        self._rank = rank
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def met(self, note: Note) -> None:
        """The other side has sent a note. On the event loop."""
        raise NotImplementedError

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        self._put(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # A process group's own patience is with connections.
        with self._changed:
            found = self._changed.wait_for(lambda: self._closed or all(key in self._values for key in keys), WITHIN_S)
            if self._closed or not found:
                raise not_met()

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


def not_met() -> TimeoutError:
    """What to raise when the other side does not come."""
    return TimeoutError(f"the other side did not come to the rendezvous within {WITHIN_S:.0f} s")


class GlooStore(Store):
    """Each rank says where it listens, under "prefix/rank": host name, address, numbers of its pairs."""

    def __init__(self, lane: int, rank: int, remote: str, publish: Callable[[Note], None]) -> None:
        super().__init__(lane, rank, publish)
        self._remote = remote
        self._mine: tuple[str, bytes] | None = None
        self._port: int | None = None

    def set(self, key: str, value: bytes | str) -> None:
        super().set(key, value)
        prefix, _, rank = key.rpartition("/")
        if rank == str(self._rank):
            mine = self.get(key)
            self._mine = f"{prefix}/{1 - self._rank}", mine
            port = struct.unpack_from(">H", mine, _address_at(mine) + 2)[0]
            self._publish(Note(self._lane, "", int(port)))
            self._complete()

    def met(self, note: Note) -> None:
        self._port = port_of(note)
        self._complete()

    def _complete(self) -> None:
        """What the other side says is what we say, but for its address."""
        if self._mine is not None and self._port is not None:
            key, mine = self._mine
            at = _address_at(mine)
            address = _sockaddr(self._remote, self._port).ljust(_SOCKADDR, b"\0")
            self._put(key, mine[:at] + address + mine[at + _SOCKADDR :])


def _address_at(value: bytes) -> int:
    """Where gloo's address begins: after the host name; each has its length in front, in 8 bytes."""
    (name,) = struct.unpack_from("<Q", value)
    at = 8 + int(name)
    if at + 8 + _ADDRESS > len(value) or struct.unpack_from("<Q", value, at)[0] != _ADDRESS:
        raise BrokenError("this torch's gloo describes itself in a way that symbiosis does not know; use tcp://")
    return at + 8


def _sockaddr(ip: str, port: int) -> bytes:
    if ":" in ip:
        ip, _, zone = ip.partition("%")
        scope = socket.if_nametoindex(zone) if zone else 0
        return (
            struct.pack("=H", socket.AF_INET6)
            + struct.pack(">HI", port, 0)
            + socket.inet_pton(socket.AF_INET6, ip)
            + struct.pack("=I", scope)
        )
    return struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton(ip)


class NcclStore(Store):
    """Rank 0, the executor, makes up an id that the other rank must have."""

    def set(self, key: str, value: bytes | str) -> None:
        super().set(key, value)
        if self._rank == EXECUTOR:
            self._publish(Note(self._lane, key, self.get(key)))

    def met(self, note: Note) -> None:
        if self._rank == EXECUTOR or not isinstance(note.value, bytes):
            raise WireError("NCCL's rendezvous is the executor's to hold")
        self._put(note.key, note.value)
