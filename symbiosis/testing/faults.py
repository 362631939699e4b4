"""Faulty connections for tests of transports: latency, lost connections, answers out of order, flipped bits.

A :class:`FaultyProxy` stands between clients and an executor whose transport uses a stream socket (``shm://``,
``tcp://``). It forwards data and descriptors in both directions and injects faults at random.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symbiosis.errors import UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.stream import ByteStream
from symbiosis.transports.wire import Type


@dataclass(frozen=True)
class Faults:
    """Kinds of faults and their probabilities. A *piece* is the data of one read from a socket.

    Args:
        latency_s: average delay of each piece, in seconds.
        cut: probability that a connection ends instead of forwarding a piece.
        corrupt: probability that one bit of a piece is flipped.
        reorder: whether answers that come close together are forwarded in any order (``shm://`` only).
        spare: pieces at the start of each connection that are forwarded without faults, so that clients can join.
        seed: seed of the random choices.
    """

    latency_s: float = 0.0
    cut: float = 0.0
    corrupt: float = 0.0
    reorder: bool = False
    spare: int = 4
    seed: int = 0


class FaultyProxy:
    """Listens on ``address`` and forwards data to ``target`` and back. ``with`` starts and ends it.

    Args:
        target: address of the executor, ``shm://`` or ``tcp://``.
        address: address of the proxy, of the same scheme.
        faults: the faults to inject.

    Raises:
        UsageError: the addresses have different schemes, or one that the proxy does not know.
    """

    def __init__(self, target: str, address: str, faults: Faults) -> None:
        self.address = address
        self.faults = faults
        self.cuts = 0
        """Connections ended by a fault so far."""
        self.corrupted = 0
        """Bits flipped so far."""
        self.reordered = 0
        """Times so far at which answers were put out of order."""
        self._target = _endpoint(target)
        self._own = _endpoint(address)
        if self._own[0] != self._target[0]:
            raise UsageError(f"{address} and {target} are of different kinds; a proxy forwards data unchanged")
        self._rng = random.Random(faults.seed)
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> FaultyProxy:
        self._listening = socket.socket(self._own[0], socket.SOCK_STREAM)
        try:
            self._listening.bind(self._own[1])
        except OSError:
            self._listening.close()
            raise
        self._listening.listen()
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for open_ in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                open_.shutdown(socket.SHUT_RDWR)
            open_.close()
        for thread in self._threads:
            thread.join(10)
        if self._own[0] == socket.AF_UNIX:
            Path(str(self._own[1])).unlink(missing_ok=True)

    def _start(self, fn: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=fn, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.socket(self._target[0], socket.SOCK_STREAM)
            try:
                far.connect(self._target[1])
            except OSError:  # the target does not listen
                near.close()
                far.close()
                continue
            self._open |= {near, far}
            self._start(self._pump, near, far, None)
            self._start(self._pump, far, near, ByteStream(wire.MAX_TO_CLIENT) if self.faults.reorder else None)

    def _pump(self, source: socket.socket, sink: socket.socket, stream: ByteStream | None) -> None:
        """Forward data from ``source`` to ``sink``; with ``stream``, put answers out of order."""
        pieces = 0
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, 1 << 16, 4)
                pieces += 1
                try:
                    if not data:
                        break
                    if pieces > self.faults.spare and self._rng.random() < self.faults.cut:
                        self.cuts += 1
                        break
                    if self.faults.latency_s:
                        time.sleep(self._rng.expovariate(1 / self.faults.latency_s))
                    if pieces > self.faults.spare:
                        data = self._spoil(data, stream, source)
                    sent = socket.send_fds(sink, [data], descriptors) if descriptors else 0
                    sink.sendall(data[sent:])
                finally:
                    for descriptor in descriptors:
                        socket.close(descriptor)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            self._open.discard(end)

    def _spoil(self, data: bytes, stream: ByteStream | None, source: socket.socket) -> bytes:
        """Return ``data`` with one bit flipped, or with answers out of order."""
        if self._rng.random() < self.faults.corrupt:
            self.corrupted += 1
            changed = bytearray(data)
            changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
            data = bytes(changed)
        return data if stream is None else self._shuffle(data, stream, source)

    def _shuffle(self, data: bytes, stream: ByteStream, source: socket.socket) -> bytes:
        """Return ``data`` and the answers that come within 2 ms, in any order."""
        source.settimeout(0.002)
        with contextlib.suppress(TimeoutError):
            for _ in range(4):
                data += source.recv(1 << 16)
        source.settimeout(None)
        messages = []
        with contextlib.suppress(WireError):
            while data:
                count = len(data[: len(stream.room())])
                stream.room()[:count] = data[:count]
                stream.filled(count)
                data = data[count:]
                while (found := stream.next()) is not None:
                    messages.append(found[0])
        if all(wire.unpack_answer(message)[0] in (Type.RESULT, Type.FAILED) for message in messages):
            before = list(messages)
            self._rng.shuffle(messages)
            self.reordered += messages != before
        return b"".join(part for message in messages for part in stream.encode(message))


def _endpoint(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    scheme, _, rest = address.partition("://")
    if scheme == "shm":
        return socket.AF_UNIX, rest
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        return socket.AF_INET, (host, int(port))
    raise UsageError(f"{address!r}: a proxy knows shm:// and tcp://")
