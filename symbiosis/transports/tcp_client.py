"""The client's end of ``tcp://`` connections, on an event loop and for threads that block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import torch

from symbiosis.core.requests import Results
from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.transports import wire
from symbiosis.transports.connection import Carrier
from symbiosis.transports.conversation import Pending
from symbiosis.transports.joining import ANSWER_WITHIN_S, joining
from symbiosis.transports.keys import KeyPair
from symbiosis.transports.share import Progress
from symbiosis.transports.sockets import LOST_EXECUTOR_S, Endpoint, carries_tensors, prepare, resolve_all
from symbiosis.transports.stream import ByteStream, TlsByteStream, matrices, payload_of
from symbiosis.transports.stream_client import AsyncStreamClient, BlockingStreamClient, StreamClient
from symbiosis.transports.wire import CallMessage, Hello


class PayloadCarrier(Carrier):
    """Sends tensors as the payload of CALL, and takes results from the payload of RESULT."""

    def __init__(self) -> None:
        self._due: dict[int, int] = {}
        """Bytes of the results of each call that was sent, by id."""

    def put(self, pending: Pending) -> list[Any] | None:
        call = pending.call
        self._due[pending.id] = pending.size - pending.call_bytes
        message = wire.pack_call(CallMessage(pending.id, call.key, call.kind, pending.rows, 0, 0))
        return [message, *payload_of(call.tensors)[1]]

    def take(self, pending: Pending, attached: Sequence[Any]) -> Results | None:
        size, due = sum(map(len, attached)), self.due(pending.id)
        if size != due:
            raise WireError(f"results of {size} bytes have come; {due} were due")
        return matrices(torch.frombuffer(attached[0], dtype=torch.uint8), pending.rows, pending.expected.answer)

    def due(self, id_: int) -> int:
        return self._due.get(id_, 0)

    def free(self, pending: Pending) -> None:
        del self._due[pending.id]


class TcpConnection(StreamClient):
    """A connection whose first messages were exchanged: the constructor blocks.

    Args:
        address, hello, again: the executor, and the client.
        key: the client's key; None for a connection without TLS.
        insecure: allow an address beyond this host without a key.
        progress: see :class:`symbiosis.transports.tcp.TcpTransport`.

    Raises:
        ConnectionLostError: no executor answers.
        RefusedError: the executor does not admit the client.
        UsageError: a key is needed.
        SymbiosisError: another error of :func:`~symbiosis.transports.joining.joining`.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        again: bool,
        *,
        key: KeyPair | None,
        insecure: bool,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(address)
        endpoints = resolve_all(address)
        private = key is not None and carries_tensors(address)
        if not private and not insecure and not all(endpoint.loopback for endpoint in endpoints):
            raise UsageError(
                f"{address} is on another host; give key=file (--key; from the executor's provider), "
                "or insecure=True (--insecure) if every host on the network may read the data"
            )
        self.carrier = PayloadCarrier()
        self._key = key
        if key is None or key.context is None:
            self._stream = ByteStream(wire.MAX_TO_CLIENT)
        else:
            self._stream = TlsByteStream(wire.MAX_TO_CLIENT, key.context, server=False)
        self._socket = self._connect(endpoints)
        try:
            prepare(self._socket, LOST_EXECUTOR_S)
            self._exchange(joining(address, hello, again, progress))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._socket.sendall(self._stream.unsent())
            self._socket.close()
            raise self._reason(error) from error
        except BaseException:
            self._socket.close()
            raise

    def _connect(self, endpoints: Sequence[Endpoint]) -> socket.socket:
        """Connect to the first address that answers."""
        why = ""
        for endpoint in endpoints:
            try:
                return socket.create_connection(endpoint, ANSWER_WITHIN_S)
            except OSError as error:
                why = error.strerror or str(error)
        raise ConnectionLostError(f"no executor answers on {self.address}: {why}")

    def _reason(self, error: Exception | None) -> SymbiosisError:
        if isinstance(error, SymbiosisError):
            return error
        reason = error.reason or "" if isinstance(error, ssl.SSLError) else ""
        if self._key is not None and ("UNKNOWN_CA" in reason or "ALERT_CERTIFICATE" in reason):
            return RefusedError(
                f"the executor at {self.address} does not know the public key {self._key.public}; "
                "give its provider your .public file"
            )
        if error is None and not self._stream.ready:
            return ConnectionLostError(
                f"the executor at {self.address} closed the connection during the handshake, for which a client has a "
                "second; try again"
            )
        if isinstance(error, ssl.SSLError) and not self._stream.ready:
            return RefusedError(
                f"the TLS handshake with {self.address} failed: the executor's public key is not the one in this "
                "client's key file, it runs without keys, or another service has this address; ask the provider for "
                "the address and for server.public"
            )
        return super()._reason(error)


class BlockingTcpConnection(BlockingStreamClient, TcpConnection):
    """A connection for threads that block, one at a time."""

    def __init__(self, address: str, hello: Hello, again: bool, **options: Any) -> None:
        TcpConnection.__init__(self, address, hello, again, **options)
        self._begin()


class AsyncTcpConnection(AsyncStreamClient, TcpConnection):
    """A connection on an event loop."""

    async def attach(self) -> None:
        self._socket.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    def local_ip(self) -> str:
        """Return the IP address of this end. Raises ConnectionLostError if the connection has ended."""
        name = self._transport.get_extra_info("sockname")
        if not name or self._error is not None:
            raise self._reason(None)
        return str(name[0])
