"""``shm:///run/symbiosis.sock``: clients in other processes of the same host.

Messages travel over a Unix socket; tensors lie in an arena that both processes map (:mod:`symbiosis.transports.arena`),
and the client's share of the model in a sealed memfd that all clients map. Both descriptors come over the
socket: there is no name to guess, and nothing is left behind, however either side ends. The kernel tells each side when
the other is gone.

Only the owner may use the socket (mode 0600), and the executor checks the user of each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

import safetensors.torch

from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Look, Service
from symbiosis.errors import ExecutorClosedError, UsageError
from symbiosis.log import get_logger
from symbiosis.transports.arena import sealed_copy
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.shm_client import BlockingShmConnector, ShmConnector, look, socket_path
from symbiosis.transports.shm_peer import ShmLine
from symbiosis.transports.wire import Hello, Limits

__all__ = ["ShmListener", "ShmTransport"]

log = get_logger(__name__)


class ShmTransport:
    """Listen on, or connect to, a Unix socket.

    Args:
        retry: seconds for which a client tries to reach an executor that was lost; 0 gives up at once.
        limits: limits of each client, for a listener.
    """

    def __init__(self, retry: float = 60.0, limits: Limits | None = None) -> None:
        self._retry_s = retry
        self._limits = limits or Limits()

    async def listen(self, address: str, service: Service) -> ShmListener:
        listener = ShmListener(address, service, self._limits)
        await listener.open()
        return listener

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return await AsyncChannel.open(ShmConnector(address), address, Hello(client, terms), self._retry_s)

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return BlockingChannel.open(BlockingShmConnector(address), address, Hello(client, terms), self._retry_s)

    def look(self, address: str) -> Look:
        return look(address)


class ShmListener:
    """An open socket and the connections that came through it."""

    def __init__(self, address: str, service: Service, limits: Limits) -> None:
        self.address = address
        self.connected: set[ShmLine] = set()
        self._service = service
        self._limits = limits
        self._path = socket_path(address)
        self._inode: int | None = None
        self._server: asyncio.Server | None = None
        self._share: int | None = None

    async def open(self) -> None:
        """Start to accept clients.

        Raises:
            UsageError: another process listens there, a file is in the way, or the folder does not exist.
            ShareError: the model cannot be served to other processes.
        """
        self._service.share()
        _make_way(self._path, self.address)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)
            try:
                listening.bind(str(self._path))
            finally:
                os.umask(before)
            self._inode = self._path.stat().st_ino
            self._server = await asyncio.get_running_loop().create_unix_server(self._line, sock=listening)
        except OSError as error:
            listening.close()
            raise UsageError(f"cannot listen on {self.address}: {error.strerror or error}") from error
        log.info("listening", address=self.address)

    def _line(self) -> ShmLine:
        return ShmLine(self._service, self._limits, self._share_descriptor, self.connected)

    def _share_descriptor(self) -> int:
        """Return the memfd with the client's share of the model, in safetensors format; the same for all clients."""
        if self._share is None:
            tensors = {name: tensor.cpu().contiguous() for name, tensor in self._service.share().tensors.items()}
            self._share = sealed_copy(safetensors.torch.save(tensors), "symbiosis-share")
        return self._share

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for line in list(self.connected):
                line.end(ExecutorClosedError(f"the executor at {self.address} was shut down"))
            with contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
            self._server = None
        if self._share is not None:
            os.close(self._share)
            self._share = None


def _make_way(path: Path, address: str) -> None:
    """Remove the socket of an executor that was killed, and nothing else."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UsageError(f"cannot listen on {address}: {path} exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        except OSError as error:
            raise UsageError(f"cannot listen on {address}: {error.strerror or error}") from error
        else:
            raise UsageError(f"cannot listen on {address}: another executor does")
