"""``tcp://host:port``: tenants on other hosts, over TLS 1.3.

Messages travel over one TCP connection for each client; the matrices of a CALL or RESULT follow it as its payload
(:mod:`symbiosis.transports.stream`). TLS encrypts, and tells the executor by its certificate which tenant a connection
belongs to (:mod:`symbiosis.transports.keys`). Without keys a listener accepts only the loopback address, unless it is
told ``insecure=True``.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Listener, Look, Service
from symbiosis.errors import UsageError
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.connection import BlockingJoin, Join
from symbiosis.transports.keys import Keyring, load_key
from symbiosis.transports.limits import Limits
from symbiosis.transports.share import Progress, bar_unless
from symbiosis.transports.sockets import Endpoint, bind, resolve
from symbiosis.transports.tcp_client import AsyncTcpConnection, BlockingTcpConnection, TcpConnection
from symbiosis.transports.tcp_listener import PayloadCourier, TcpListener
from symbiosis.transports.wire import Hello


class TcpTransport:
    """Listen on, or connect to, a TCP port.

    Args:
        key: a tenant's secret key file, to connect.
        keys: the folder with the executor's own key and the tenants' public keys, to listen.
        insecure: allow an address beyond this host without keys. Every host on the way can then read and change the
            data.
        retry: seconds for which a client tries to reach an executor that was lost; 0 gives up at once.
        limits: limits of each client, for a listener.
        progress: called with the bytes done and the total while a client receives its share of the model. By default,
            synchronous code at a terminal shows a bar.

    Raises:
        UsageError: a key file is malformed.
    """

    def __init__(
        self,
        key: str | Path | None = None,
        keys: str | Path | None = None,
        insecure: bool = False,
        retry: float = 60.0,
        limits: Limits | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._key = None if key is None else load_key(key)
        if self._key is not None and self._key.context is None:
            raise UsageError(f"{key} does not hold the executor's certificate; append its server.public to the file")
        self._keys = None if keys is None else Keyring(keys)
        self._insecure = insecure
        self._retry_s = retry
        self._limits = limits or Limits()
        self._progress = progress

    def _endpoint(self, address: str) -> Endpoint:
        """Return where to listen. Raises UsageError if that needs keys, or is malformed."""
        endpoint = resolve(address)
        if self._keys is None and not endpoint.loopback and not self._insecure:
            raise UsageError(
                f"{address} can be reached from other hosts; give keys=folder (--keys; `symbiosis keys new` makes "
                "them), or insecure=True (--insecure) if every host on the network may read the data and use the "
                "executor"
            )
        return endpoint

    def check(self, address: str) -> AbstractContextManager[object]:
        return bind(address, self._endpoint(address))

    async def listen(self, address: str, service: Service) -> Listener:
        endpoint = await asyncio.to_thread(self._endpoint, address)
        listener = TcpListener(endpoint, service, self._limits, self._keys, PayloadCourier)
        await listener.open(address)
        return listener

    def _options(self, progress: Progress | None) -> dict[str, Any]:
        """Return the options with which a client joins."""
        return {"key": self._key, "insecure": self._insecure, "progress": progress}

    def join(self, address: str) -> Join:
        """Return the function that joins the executor at an address, for an event loop."""
        return partial(AsyncTcpConnection, address, **self._options(self._progress))

    def join_blocking(self, address: str) -> BlockingJoin:
        """Return the function that joins the executor at an address, for threads that block."""

        def joins(hello: Hello, again: bool) -> BlockingTcpConnection:
            with bar_unless(self._progress, address) as progress:
                return BlockingTcpConnection(address, hello, again, **self._options(progress))

        return joins

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return await AsyncChannel.open(self.join(address), address, Hello(client, terms), self._retry_s)

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return BlockingChannel(self.join_blocking(address), address, Hello(client, terms), self._retry_s)

    def look(self, address: str) -> Look:
        connection = TcpConnection(address, Hello(None), False, key=self._key, insecure=self._insecure)
        connection.close()
        assert connection.look is not None
        return connection.look
