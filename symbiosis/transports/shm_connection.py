"""The client's side of one ``shm://`` connection, up to the welcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from symbiosis.core.transport import Look
from symbiosis.errors import ConnectionLostError, RefusedError, UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.arena import Arena
from symbiosis.transports.welcome import Welcome
from symbiosis.transports.wire import Frames, Hello, Type, frame

__all__ = ["Connection", "connect", "connect_soon", "look", "socket_path"]

ANSWER_WITHIN_S = 30.0
"""How long a handshake may take."""
MAX_PATH = 107


@dataclass(frozen=True)
class Connection:
    """What a handshake gives."""

    socket: socket.socket
    welcome: Welcome
    arena: Arena
    share: int
    """Descriptor of the client's share."""

    def close(self) -> None:
        """Hang up; the share's descriptor, too."""
        self.socket.close()
        with contextlib.suppress(OSError):
            os.close(self.share)


def socket_path(address: str) -> Path:
    """``shm:///path`` → the path.

    Raises:
        UsageError: it is not absolute, or longer than a Unix socket's may be.
    """
    path = address.removeprefix("shm://")
    if not path.startswith("/") or path.endswith("/"):
        raise UsageError(f"{address!r}: write shm:///absolute/path/of/the.sock")
    if len(os.fsencode(path)) > MAX_PATH:
        raise UsageError(
            f"{address!r}: a Unix socket's path has at most {MAX_PATH} bytes; this one has {len(os.fsencode(path))}"
        )
    return Path(path)


def _say_hello(address: str, hello: Hello) -> tuple[socket.socket, Welcome, list[int]]:
    """Connect and say HELLO; the socket, the welcome and the descriptors that came. Blocks.

    Raises:
        ConnectionLostError: nobody listens there, or it went away.
        RefusedError: the executor does not let us in.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        connected.settimeout(ANSWER_WITHIN_S)
        connected.connect(str(socket_path(address)))
        with contextlib.suppress(BrokenPipeError):  # refused before it heard us; it has said why
            connected.sendall(frame(wire.pack_hello(hello)))
        frames = Frames(wire.MAX_TO_CLIENT)
        first, descriptors, _, _ = socket.recv_fds(connected, 1, 2)
        if not descriptors:
            frames.feed(first)
        while (message := frames.next()) is None:
            data = connected.recv(1 << 20)
            if not data:
                raise ConnectionResetError("it hung up")
            frames.feed(data)
        type_, content = wire.unpack_answer(message)
        if type_ is Type.ENDED:
            raise wire.error_of(*content[:2])
        if type_ is not Type.WELCOME:
            raise WireError(f"the executor at {address} answered HELLO with {type_.name}")
        return connected, Welcome(content), list(descriptors)
    except BaseException as error:
        connected.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, PermissionError):
            raise RefusedError(f"{address} belongs to another user") from error
        if isinstance(error, OSError):
            raise ConnectionLostError(f"no executor answers on {address}: {error.strerror or error}") from error
        raise


def look(address: str) -> Look:
    """What there is to see without joining. Blocks."""
    connected, welcome, _ = _say_hello(address, Hello(None))
    with connected:
        connected.sendall(frame(wire.pack(Type.STATUS)))
        frames = Frames(wire.MAX_TO_CLIENT)
        while (message := frames.next()) is None:
            data = connected.recv(1 << 20)
            if not data:
                raise ConnectionLostError(f"the executor at {address} hung up")
            frames.feed(data)
    type_, content = wire.unpack_answer(message)
    if type_ is not Type.STATUS or not content or not isinstance(content[0], dict):
        raise WireError(f"the executor at {address} answered STATUS with {type_.name}")
    return Look(content[0], welcome.description, welcome.tokenizer)


def connect(address: str, hello: Hello, fingerprint: str | None = None) -> Connection:
    """Join an executor; ``fingerprint`` of the model that it must have."""
    connected, welcome, descriptors = _say_hello(address, hello)
    try:
        if len(descriptors) != 2:
            raise WireError(f"the executor at {address} sent {len(descriptors)} descriptors, not 2")
        if fingerprint is not None and welcome.fingerprint != fingerprint:
            raise RefusedError(f"the executor at {address} came back with another model; open a new client")
        size = welcome.content.get("arena_bytes")
        if type(size) is not int or not 0 < size <= os.fstat(descriptors[0]).st_size:
            raise WireError(f"the executor at {address} promises an arena of {size!r} bytes")
        arena = Arena(descriptors[0], size)
        os.close(descriptors.pop(0))
        return Connection(connected, welcome, arena, descriptors.pop())
    except BaseException:
        connected.close()
        for descriptor in descriptors:
            os.close(descriptor)
        raise


async def connect_soon(address: str, hello: Hello, fingerprint: str | None = None) -> Connection:
    """:func:`connect`, in a thread. Where nobody waits for it any more, it hangs up again."""
    connecting = asyncio.get_running_loop().run_in_executor(None, connect, address, hello, fingerprint)
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_abandon)
        raise


def _abandon(connecting: asyncio.Future[Connection]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
