"""A hand-written client of ``tcp://`` that can send messages that a real client would not send."""

from __future__ import annotations

import select
import socket
import ssl
from pathlib import Path
from typing import Any

from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.transports import wire
from symbiosis.transports.keys import load_key
from symbiosis.transports.sockets import resolve
from symbiosis.transports.stream import ByteStream, TlsByteStream
from symbiosis.transports.wire import CallMessage, Type
from tests.helpers import in_thread

__all__ = ["Raw", "a_call", "hello", "raw", "receive", "rows", "tls_of", "violate"]


class Raw:
    """The connection of a raw client."""

    def __init__(self, address: str, key: Path | None) -> None:
        self.socket = socket.create_connection(resolve(address), 20)
        if key is None:
            self._stream = ByteStream(wire.MAX_TO_CLIENT)
        else:
            self._stream = TlsByteStream(wire.MAX_TO_CLIENT, tls_of(key), server=False)
            while not self._stream.ready:
                self.socket.sendall(self._stream.unsent())
                self._fill()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: bytes, *parts: bytes) -> None:
        """Send a message and the parts of its payload."""
        for part in self._stream.encode(message, sum(map(len, parts)), parts):
            self.socket.sendall(part)

    def poll(self) -> bool:
        """Return whether bytes have arrived."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def _fill(self) -> None:
        count = self.socket.recv_into(self._stream.room())
        if not count:
            raise EOFError("the executor has closed the connection")
        self._stream.filled(count)

    def receive(self) -> tuple[Type, Any]:
        """Return the type and content of the next message."""
        while (found := self._stream.next()) is None:
            self._fill()
        return wire.unpack_answer(found[0])


def tls_of(key: Path) -> ssl.SSLContext:
    context = load_key(key).context
    assert context is not None
    return context


def raw(address: str, key: Path | None = None) -> Raw:
    return Raw(address, key)


def hello(name: str | None) -> bytes:
    return wire.pack_hello(wire.Hello(name))


def a_call(id_: int, n: int = 1, layer: int = 0) -> bytes:
    return wire.pack_call(CallMessage(id_, Key((layer,), Pass.FORWARD), Kind.DECODE, n, 0, 0))


def rows(n: int = 1, width: int = 32) -> bytes:
    return bytes(4 * n * width)


async def violate(address: str, *parts: bytes) -> None:
    """Join, send a message that breaks the protocol, and check that the executor ends the connection for it."""
    with raw(address) as mallory:
        mallory.send(hello("mallory"))
        assert (await in_thread(receive, mallory))[0] is Type.WELCOME
        mallory.send(*parts)
        type_, content = await in_thread(receive, mallory)
        assert type_ is Type.ENDED
        assert content[0] == "WireError"


def receive(connection: Raw) -> tuple[Type, Any]:
    return connection.receive()
