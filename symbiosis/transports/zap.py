"""Who may come in: the answers to ZeroMQ's question for each CURVE handshake (ZAP, https://rfc.zeromq.org/spec/27).

There is one such answerer per ZeroMQ context, so a listener has a context of its own. pyzmq's asyncio authenticator is
a task, which dies of the first exception, silently, and then nobody can log in. Here each question is a callback of its
own, and one that fails is answered with an error and logged.
"""

from __future__ import annotations

import asyncio

import zmq
from zmq.utils import z85

from symbiosis.log import get_logger
from symbiosis.transports.keys import Keyring
from symbiosis.transports.sockets import Reader

__all__ = ["Doorkeeper"]

log = get_logger(__name__)

_VERSION = b"1.0"


class Doorkeeper:
    """Lets in those whose public key is on the ring. Their messages then carry it as ``User-Id``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], loop: asyncio.AbstractEventLoop, keys: Keyring) -> None:
        self._keys = keys
        socket = context.socket(zmq.ROUTER)
        socket.bind("inproc://zeromq.zap.01")
        self._reader = Reader(socket, loop, self._asked)

    def _asked(self, frames: list[zmq.Frame]) -> None:
        parts = [frame.bytes for frame in frames]
        if len(parts) < 4:
            return
        try:
            status, text, user = self._decide(parts)
        except Exception as error:
            log.exception("cannot decide about a log-in", folder=str(self._keys.folder), why=str(error))
            status, text, user = b"500", b"the executor cannot read its keys", b""
        self._reader.send([parts[0], b"", _VERSION, parts[3], status, text, user, b""])

    def _decide(self, parts: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Status, text and user id for [from, empty, version, request, domain, address, id, mechanism, key]."""
        if len(parts) != 9 or parts[2] != _VERSION or parts[7] != b"CURVE" or len(parts[8]) != 32:
            return b"400", b"CURVE alone is understood", b""
        public = z85.encode(parts[8])
        name = self._keys.name_of(public)
        for file, why in self._keys.broken.items():
            log.warning("key file ignored", file=file, why=why)
        if name is None:
            log.warning(
                "client refused",
                client=None,
                tenant=parts[5].decode("ascii", "replace"),
                why=f"its public key {public.decode()} is not in {self._keys.folder}",
            )
            return b"400", b"unknown key", b""
        return b"200", b"OK", public

    def close(self) -> None:
        self._reader.close()
