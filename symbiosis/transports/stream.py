"""Messages on a byte stream: each has its length in front, 4 bytes, little-endian."""

from __future__ import annotations

import struct

from symbiosis.errors import WireError

__all__ = ["MessageBuffer", "frame"]

_LENGTH = struct.Struct("<I")


def frame(message: bytes) -> bytes:
    """Return a message with its length in front."""
    return _LENGTH.pack(len(message)) + message


class MessageBuffer:
    """Cuts a byte stream into messages of at most ``max_bytes``. Holds the messages that were not taken yet."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._buffer += data

    def only(self, data: bytes) -> bytes | None:
        """Return the message, if ``data`` is exactly one and the buffer is empty: the common case, without a copy
        into the buffer. Otherwise feed ``data`` and return None."""
        if not self._buffer and len(data) >= 4 and _LENGTH.unpack_from(data)[0] == len(data) - 4 <= self._max:
            return data[4:]
        self._buffer += data
        return None

    def next(self) -> bytes | None:
        """Return the next whole message, if it has arrived.

        Raises:
            WireError: the length exceeds the limit. Nothing was allocated for it.
        """
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if length > self._max:
            raise WireError(f"a message of {length} bytes is announced; at most {self._max} are allowed")
        if len(buffer) < 4 + length:
            return None
        message = bytes(buffer[4 : 4 + length])
        del buffer[: 4 + length]
        return message
