"""Authentication of CURVE handshakes: answers to the requests of ZeroMQ (ZAP, https://rfc.zeromq.org/spec/27).

A ZeroMQ context has one such handler, so each listener has a context of its own. pyzmq's asyncio authenticator is a
task that the first exception ends without a message, and then every handshake fails. Here each request is a callback of
its own; one that raises is answered with an error and logged.
"""

from __future__ import annotations

import asyncio

import zmq
from zmq.utils import z85

from symbiosis.log import get_logger
from symbiosis.transports.keys import Keyring
from symbiosis.transports.sockets import Reader

__all__ = ["Authenticator"]

log = get_logger(__name__)

_VERSION = b"1.0"


class Authenticator:
    """Accepts clients whose public key is on the ring. Their messages then carry the key as ``User-Id``."""

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
            log.exception("cannot check a key", folder=str(self._keys.folder), why=str(error))
            status, text, user = b"500", b"the executor cannot read its keys", b""
        self._reader.send([parts[0], b"", _VERSION, parts[3], status, text, user, b""])

    def _decide(self, parts: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Return status, text and user id for a request.

        Args:
            parts: [from, empty, version, request, domain, address, id, mechanism, key].
        """
        if len(parts) != 9 or parts[2] != _VERSION or parts[7] != b"CURVE" or len(parts[8]) != 32:
            return b"400", b"only CURVE is supported", b""
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
