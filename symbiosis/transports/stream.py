"""Messages on a byte stream, a Unix socket or TCP, with TLS or without, and without I/O.

Each message has a header in front: the length of the message (4 bytes, little-endian) and the length of the *payload*,
raw bytes that follow the message (8 bytes, little-endian). The payload of a CALL or RESULT over ``tcp://`` is its
matrices, each at a multiple of 64 bytes; over other transports tensors travel elsewhere, and payloads are empty.
"""

from __future__ import annotations

import contextlib
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, cast

import torch

from symbiosis.core.requests import Columns
from symbiosis.errors import WireError
from symbiosis.transports.wire import align

_HEADER = struct.Struct("<IQ")
_ROOM = 64 << 10
"""Bytes that a receiver asks the operating system for at a time, at least, if no payload is due."""
_PIECE = 1 << 20
"""Bytes of a payload that are handed to the operating system at a time, at most."""
_HANDSHAKE_ROOM = 4 << 10
"""Bytes that a receiver asks for at a time during a TLS handshake, when the peer is not authenticated."""
MAX_HANDSHAKE = 64 << 10
"""Bytes of a TLS handshake; one with the certificates of :mod:`symbiosis.transports.keys` has less than 2 KiB."""
MAX_OF_TLS = 16 << 10
"""Bytes that TLS itself may have to send after the handshake. Each request of the peer for new keys adds some 30, and
they wait for the next message."""


def frame(message: bytes, payload: int = 0) -> bytes:
    """Return a message with its header in front."""
    return _HEADER.pack(len(message), payload) + message


class ByteStream:
    """One end of a byte stream.

    Its driver reads bytes into :meth:`room`, reports them to :meth:`filled`, and then calls :meth:`next` until it
    returns None. A payload goes where :meth:`into` says, without another copy; otherwise it is dropped.

    Args:
        max_bytes: largest message. No memory is allocated for a larger one.
    """

    ready = True
    """Whether messages can be sent: the TLS handshake is over, where there is one."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._buffer = memoryview(bytearray())
        self._start = self._end = 0
        """The part of the buffer that has come and was not taken."""
        self._due = -1
        """Bytes of a payload that are still to come, or to be taken from the buffer; -1: no payload is under way."""
        self._target: memoryview | None = None
        self._then: Callable[[], object] | None = None

    def limit(self, max_bytes: int) -> None:
        """Allow no message of more than ``max_bytes`` from now on."""
        self._max = max_bytes

    def room(self) -> memoryview:
        """Return memory for the bytes that come next; at least one byte."""
        if self._start == self._end:
            if self._due > 0 and self._target is not None:
                return self._target[-self._due :]
            self._start = self._end = 0
            if len(self._buffer) != _ROOM:
                self._buffer = memoryview(bytearray(_ROOM))
            return self._buffer
        size = len(self._buffer)
        if self._end == size:
            held = size - self._start
            before, self._buffer = self._buffer, memoryview(bytearray(2 * size if held > size // 2 else size))
            self._buffer[:held] = before[self._start :]
            self._start, self._end = 0, held
        return self._buffer[self._end :]

    def filled(self, count: int) -> None:
        """Note that ``count`` bytes were read into the memory that :meth:`room` returned last."""
        if self._due > 0 and self._target is not None and self._start == self._end:
            self._due -= count
        else:
            self._end += count

    def next(self) -> tuple[bytes, int] | None:
        """Return the next message and the length of its payload; None if it has not come.

        Raises:
            WireError: a longer message is announced than is allowed.
        """
        if not self.take():
            return None
        start = self._start
        held = self._end - start
        if held < _HEADER.size:
            return None
        length, payload = _HEADER.unpack_from(self._buffer, start)
        if length > self._max:
            raise WireError(f"a message of {length} bytes is announced; at most {self._max} are allowed")
        if held < _HEADER.size + length:
            return None
        start += _HEADER.size
        self._start = end = start + length
        if payload:
            self._due = payload
        return bytes(self._buffer[start:end]), payload

    def into(self, target: memoryview, then: Callable[[], object]) -> None:
        """Let the payload of the message that :meth:`next` returned last go to ``target``, which has its length; call
        ``then`` when it is there."""
        assert len(target) == self._due, (len(target), self._due)
        self._target, self._then = target, then

    def encode(self, message: bytes, payload: int = 0, parts: Sequence[Any] = ()) -> Iterator[Any]:
        """Return what to send for a message whose payload consists of ``parts``, ``payload`` bytes together, in pieces
        of up to 1 MiB. The next message may be encoded after the last piece."""
        if not parts:
            return iter((frame(message, payload),))
        pieces = (part[start : start + _PIECE] for part in parts for start in range(0, len(part), _PIECE))
        return chain((frame(message, payload),), pieces)

    def unsent(self) -> bytes:
        """Return what TLS itself has to send now: parts of a handshake, or why it has failed."""
        return b""

    @property
    def awaits(self) -> bool:
        """Whether a payload that :meth:`into` asked for is still to come, or to be taken."""
        return self._target is not None

    def take(self) -> bool:
        """Move what has come of a payload. Return whether all of it has come, or none is under way."""
        if self._due < 0:
            return True
        count = min(self._due, self._end - self._start)
        if count:
            if self._target is not None:
                start = len(self._target) - self._due
                self._target[start : start + count] = self._buffer[self._start : self._start + count]
            self._start += count
            self._due -= count
        if self._due:
            return False
        then, self._target, self._then, self._due = self._then, None, None, -1
        if then is not None:
            then()
        return True


class TlsByteStream(ByteStream):
    """One end of a byte stream that TLS encrypts. :meth:`filled` raises ssl.SSLError if the handshake fails, and
    WireError if the peer makes TLS itself send too much.

    Args:
        max_bytes: as above.
        context: the keys, and the certificates that are accepted.
        server: whether this is the executor's end.
    """

    def __init__(self, max_bytes: int, context: ssl.SSLContext, server: bool) -> None:
        super().__init__(max_bytes)
        self.ready = False
        self._encrypted = memoryview(bytearray(_HANDSHAKE_ROOM))
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._before = 0
        """Bytes that came before the end of the handshake."""
        self._shake_hands()

    def room(self) -> memoryview:
        if self.ready and len(self._encrypted) != _ROOM:
            self._encrypted = memoryview(bytearray(_ROOM))
        return self._encrypted

    def filled(self, count: int) -> None:
        self._in.write(self._encrypted[:count])
        if not self.ready:
            self._before += count
            self._shake_hands()
            if not self.ready:
                if self._before > MAX_HANDSHAKE:
                    raise WireError(f"{self._before} bytes and no end of the TLS handshake")
                return
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):  # the end of what has come
            while count := cast(int, self._tls.read(1 << 30, super().room())):
                super().filled(count)
        if self._out.pending > MAX_OF_TLS:
            raise WireError(f"the peer asks for new TLS keys without end; {self._out.pending} bytes of answers wait")

    def _shake_hands(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.ready = True

    def encode(self, message: bytes, payload: int = 0, parts: Sequence[Any] = ()) -> Iterator[Any]:
        for part in super().encode(message, payload, parts):
            for start in range(0, len(part), _ROOM):
                self._tls.write(part[start : start + _ROOM])
                if self._out.pending >= _ROOM:  # a MemoryBIO keeps as much memory as it has ever held
                    yield self._out.read()
        if self._out.pending:
            yield self._out.read()

    def unsent(self) -> bytes:
        return self._out.read()

    def certificate(self) -> bytes:
        """Return the other side's certificate (DER), after the handshake."""
        return self._tls.getpeercert(True) or b""


def payload_of(tensors: Sequence[torch.Tensor]) -> tuple[int, list[Any]]:
    """Return the length of a payload, and its parts: matrices on the CPU, without a copy if they are contiguous."""
    parts: list[Any] = []
    total = 0
    for tensor in tensors:
        view = tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1).data
        parts.append(view)
        size = align(len(view))
        if size > len(view):
            parts.append(bytes(size - len(view)))
        total += size
    return total, parts


def block(size: int) -> tuple[torch.Tensor, memoryview]:
    """Return memory for a payload, as a tensor and as a view. torch aligns it to 64 bytes: on unaligned rows a matrix
    product may differ in its last bits."""
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    return memory, memory.numpy().data


def matrices(memory: torch.Tensor, rows: int, columns: Sequence[Columns]) -> tuple[torch.Tensor, ...]:
    """Return the matrices in a payload of the right length."""
    found, start = [], 0
    for width, dtype in columns:
        size = rows * width * dtype.itemsize
        found.append(memory[start : start + size].view(dtype).view(rows, width))
        start = align(start + size)
    return tuple(found)
