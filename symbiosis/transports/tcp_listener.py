"""The listening side of ``tcp://``: one ROUTER socket for all clients, and which connection may send for which client.

ZeroMQ lets a client choose the identity by which a ROUTER knows it. So every message must come over the TCP connection,
and with the public key, with which its conversation began.

ZeroMQ reuses descriptors, and reports only the descriptor and the identity of a message. A connection may end before
its messages were read, and its descriptor may then belong to another connection. A late message of the ended connection
must not be attributed to the new one. So a client that sends its first message is *unidentified* until everything that
was sent before has been read. By then ZeroMQ knows which connections have ended, and refuses to send to them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from symbiosis.core.transport import Service
from symbiosis.errors import ExecutorClosedError, RefusedError, UsageError
from symbiosis.log import get_logger
from symbiosis.transports import peer, wire
from symbiosis.transports.keys import Keyring
from symbiosis.transports.share import ServedShare
from symbiosis.transports.sockets import SILENT_S, Endpoint, Frames, Reader, TcpSocket, configure, event_of, monitor
from symbiosis.transports.tcp_line import TcpCourier, TcpLine
from symbiosis.transports.wire import Limits, Type

log = get_logger(__name__)

MAX_UNIDENTIFIED = 64
"""Messages of a client that is not identified yet."""
UNREAD_WITHIN_S = 0.5
"""Seconds after which messages of an ended connection are surely read, unless other clients never stop sending."""
DOUBT_S = 0.05
"""Seconds to wait before identifying a client on a descriptor that another connection has just left."""
SWEEP_S = 1.0
"""Seconds between two checks of all connections."""
_ZAP_VERSION = b"1.0"
LINGER_MS = 1000
"""Milliseconds that the last messages may take when the executor shuts down."""


class Authenticator:
    """Answers ZeroMQ's requests for authentication (ZAP, https://rfc.zeromq.org/spec/27) of CURVE handshakes.

    It accepts clients whose public key is on the ring. Their messages then carry the key as ``User-Id``. A context has
    one such handler, so each listener has a context of its own. The first exception ends pyzmq's asyncio authenticator
    without a message, and then every handshake fails; here a request that raises is answered with an error and logged.
    """

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
        self._reader.send([parts[0], b"", _ZAP_VERSION, parts[3], status, text, user, b""])

    def _decide(self, parts: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Return status, text and user id for [from, empty, version, request, domain, address, id, mechanism, key]."""
        if len(parts) != 9 or parts[2] != _ZAP_VERSION or parts[7] != b"CURVE" or len(parts[8]) != 32:
            return b"400", b"only CURVE is supported", b""
        public = z85.encode(parts[8])
        name = self._keys.name_of(public)
        for file, why in self._keys.broken.items():
            log.warning("key file ignored", file=file, why=why)
        if name is None:
            why = f"its public key {public.decode()} is not in {self._keys.folder}"
            log.warning("client refused", client=None, tenant=parts[5].decode("ascii", "replace"), why=why)
            return b"400", b"unknown key", b""
        return b"200", b"OK", public

    def close(self) -> None:
        self._reader.close()


@dataclass(eq=False)
class Accepted:
    """A TCP connection that ZeroMQ has accepted. Times are in seconds on the loop's clock."""

    socket: TcpSocket
    since: float
    """When it was accepted."""
    doubtful_until: float
    """Until then, messages may arrive that an earlier connection with this descriptor has sent."""
    line: TcpLine | None = None
    """The client whose messages come over this connection."""
    _messages: int = 0
    _seen: tuple[int, int] = (0, 0)
    """Messages, and bytes received, when a message was last seen to have come."""

    def __str__(self) -> str:
        return f"{self.socket.peer[0]}:{self.socket.peer[1]}"

    def take(self, line: TcpLine, frames: Frames) -> None:
        """Pass on a whole message."""
        self._messages += 1
        line.take(frames)

    def unfinished(self, received_bytes: int) -> int:
        """Return how many bytes have come since the last whole message, to within the time between two calls."""
        if self._messages != self._seen[0]:
            self._seen = self._messages, received_bytes
        return received_bytes - self._seen[1]


@dataclass
class _Unidentified:
    """A client that has spoken and is not identified yet."""

    accepted: Accepted
    user: str | None
    since: float
    """Seconds on the loop's clock."""
    messages: list[Frames] = field(default_factory=list)


@dataclass(eq=False)
class TcpListener:
    """A bound port and the clients that came through it."""

    endpoint: Endpoint
    service: Service
    limits: Limits
    """Limits of each client."""
    keys: Keyring | None
    """The executor's keys and its tenants'; None without CURVE."""
    courier: Callable[[TcpLine, ServedShare], TcpCourier]
    """Makes the courier of a connection's tensors."""

    def __post_init__(self) -> None:
        self.address = ""
        self.lines: dict[bytes, TcpLine] = {}
        """Clients by ROUTER identity."""
        self.accepted: dict[int, Accepted] = {}
        """Connections by descriptor."""
        self._failure: str | None = None
        """Why the last handshake failed, until ZeroMQ tells which connection it was."""
        self._share = ServedShare(self.service)
        self._unidentified: dict[bytes, _Unidentified] = {}
        """By ROUTER identity."""
        self._settling: asyncio.Handle | None = None
        self._ended: dict[int, float] = {}
        """When a connection ended, by descriptor; in seconds on the loop's clock."""
        self._closed = False

    def open(self, address: str) -> None:
        """Start to accept clients. Raises UsageError if the port is not available, and ShareError if the model cannot
        be served to other processes."""
        self.service.share()
        self._loop = loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # a context has one authenticator
        self._authenticator = None if self.keys is None else Authenticator(self._context, loop, self.keys)
        socket = self._context.socket(zmq.ROUTER)
        configure(socket, v6=self.endpoint.v6, max_frame_bytes=max(self.limits.arena_bytes, wire.MAX_TO_EXECUTOR))
        # Messages, each way: what a client within its limits may have under way, and some more.
        socket.setsockopt(zmq.RCVHWM, 4 * self.limits.calls + 64)
        socket.setsockopt(zmq.SNDHWM, 4 * self.limits.calls + 64)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise, instead of dropping what a client does not read
        if self.keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.own.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"symbiosis")
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._monitor = Reader(monitor(socket), loop, self._happened)
        self._reader = Reader(socket, loop, self._received)
        try:
            socket.bind(f"tcp://{self.endpoint}")
        except zmq.ZMQError as error:
            self._close_sockets(0)
            self._context.term()
            raise UsageError(f"cannot listen on {address}: {error.strerror or error}") from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = f"{address.partition(':')[0]}://{self.endpoint._replace(port=int(bound.rpartition(':')[2]))}"
        self._swept = loop.time()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        encrypted = self.keys is not None and not address.startswith("dist:")
        log.info("listening", address=self.address, encrypted=encrypted)

    def _close_sockets(self, linger_ms: int) -> None:
        self._reader.socket.disable_monitor()
        self._monitor.close()
        self._reader.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.close()

    def _connections_of(self, tenant: str) -> int:
        """Return how many open connections a tenant has, client connections and status connections."""
        return sum(line.tenant == tenant and not line.peer.gone for line in self.lines.values())

    def _send(self, parts: Sequence[Any]) -> None:
        if not self._closed:
            self._reader.send(parts)

    def _received(self, frames: list[zmq.Frame]) -> None:
        self._monitor.drain()  # first what happened to connections: descriptors and identities are reused
        if len(frames) < 2:
            return
        accepted = self.accepted.get(frames[1].get(zmq.SRCFD))
        if accepted is None:
            return  # its connection has ended
        identity = frames[0].bytes
        user = None if self.keys is None else str(frames[1].get("User-Id"))
        line = self.lines.get(identity)
        if line is None:
            client = self._unidentified.setdefault(identity, _Unidentified(accepted, user, self._loop.time()))
            small = len(frames) == 2 and len(frames[1]) <= wire.MAX_TO_EXECUTOR
            if client.accepted is accepted and small and len(client.messages) < MAX_UNIDENTIFIED:
                client.messages.append(frames[1:])
            if self._settling is None:
                self._settling = self._loop.call_soon(self._settle)
        elif accepted.line is line and line.user == user:
            accepted.take(line, frames[1:])

    def _settle(self) -> None:
        """Identify the clients whose waiting time has passed."""
        self._settling = None
        if self._closed:
            return
        now, again = self._loop.time(), math.inf
        unread = int(self._reader.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        for identity, client in list(self._unidentified.items()):
            accepted = client.accepted
            wait = max(now if unread and now < client.since + UNREAD_WITHIN_S else 0.0, accepted.doubtful_until)
            if self.accepted.get(accepted.socket.descriptor) is not accepted:
                del self._unidentified[identity]
            elif wait >= now:
                again = min(again, max(wait, now + 1e-3))
            else:
                del self._unidentified[identity]
                self._meet(identity, client)
        if self._unidentified and self._settling is None and again < math.inf:
            self._settling = self._loop.call_at(again, self._settle)
        self._reader.drain()  # reading EVENTS has consumed the wake-up

    def _meet(self, identity: bytes, client: _Unidentified) -> None:
        accepted = client.accepted
        if not self._alive(identity) or (accepted.line is not None and self._alive(accepted.line.identity)):
            return  # sent by a connection that has ended
        if accepted.line is not None:
            self.lines.pop(accepted.line.identity, None)
            accepted.line.peer.leave("its connection has ended")
        tenant: str | None = accepted.socket.peer[0]
        if client.user is not None and self.keys is not None:
            tenant = self.keys.name_of(client.user.encode())
        accepted.line = line = self.lines[identity] = TcpLine(
            self.service,
            self.limits,
            identity,
            accepted.socket,
            client.user,
            tenant or "?",
            self._send,
            self._connections_of,
            lambda line: self.courier(line, self._share),
        )
        if tenant is None:
            line.peer.refuse(RefusedError("its key was removed"))
        for frames in client.messages:
            accepted.take(line, frames)

    def _alive(self, identity: bytes) -> bool:
        """Return whether ZeroMQ has a connection of this identity."""
        self._reader.socket.getsockopt(zmq.EVENTS)  # makes ZeroMQ notice what has happened; sending alone may not
        try:
            self._reader.send([identity, _PONG])
        except zmq.ZMQError:
            return False
        return True

    def _happened(self, frames: list[zmq.Frame]) -> None:
        kind, value = event_of(frames)
        if kind is zmq.Event.ACCEPTED:
            socket = TcpSocket.of(value)
            if socket is not None:
                now = self._loop.time()
                doubtful = now + DOUBT_S if now < self._ended.pop(value, -math.inf) + UNREAD_WITHIN_S else -math.inf
                self.accepted[value] = accepted = Accepted(socket, now, doubtful)
                if len(self.accepted) > peer.MAX_CONNECTIONS:
                    why = f"{peer.MAX_CONNECTIONS} are connected"
                    log.warning("client refused", client=None, tenant=str(accepted), why=why)
                    socket.cut()
        elif kind is zmq.Event.DISCONNECTED:
            self._ended[value] = self._loop.time()
            self._disconnected(self.accepted.pop(value, None))
        elif kind is zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            self._failure = _FAILURES.get(value, f"it does not speak this version of ZeroMQ (error {value:#x})")
        elif kind is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._failure = "it closed the connection during the handshake"

    def _disconnected(self, accepted: Accepted | None) -> None:
        failure, self._failure = self._failure, None
        if accepted is not None and accepted.line is not None:
            self.lines.pop(accepted.line.identity, None)
            accepted.line.peer.leave("its connection has ended")
        elif failure is not None:
            log.warning("client refused", client=None, tenant=str(accepted or "?"), why=failure)

    def _sweep(self) -> None:
        """Cut connections that are dead, silent, in the middle of an endless message, or rejected."""
        now = self._loop.time()
        late, self._swept = now - self._swept > 2 * SWEEP_S, now
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._monitor.drain()
        known = self._known_keys()
        for accepted in list(self.accepted.values()):
            line = accepted.line
            if line is not None and line.peer.session is not None and known is not None and line.user not in known:
                line.peer.refuse(RefusedError(f"the key of {line.tenant} was removed"))
            why = self._overdue(accepted, now)
            if why is None and not late:  # after a long batch, this process may have kept clients from sending
                why = self._trouble(accepted)
            if why is not None:
                log.warning("connection cut", tenant=line.tenant if line else str(accepted), why=why)
                if line is not None:
                    line.peer.leave(why)
                accepted.socket.cut()

    @staticmethod
    def _overdue(accepted: Accepted, now: float) -> str | None:
        """Return why a connection has exceeded the time for its state, if it has."""
        line, age = accepted.line, now - accepted.since
        if line is None:
            return "it has sent no HELLO" if age >= peer.HELLO_WITHIN_S else None
        if line.cut_at is not None:
            return "it was rejected" if now >= line.cut_at else None
        if line.peer.session is None and age >= peer.LOOK_WITHIN_S:
            return f"a status connection may stay {peer.LOOK_WITHIN_S:.0f} s"
        return None

    def _known_keys(self) -> Collection[str] | None:
        """Return the public keys of all tenants; None without keys, or while the folder cannot be read."""
        if self.keys is None:
            return None
        try:
            return {key.decode() for key in self.keys.names()}
        except OSError as error:
            log.warning("cannot read the keys", folder=str(self.keys.folder), why=str(error))
            return None

    def _trouble(self, accepted: Accepted) -> str | None:
        """Return what is wrong with the bytes of a connection, if anything."""
        silent, count = accepted.socket.received()
        if silent > SILENT_S:
            return f"no byte came for {silent:.0f} s"
        # ZeroMQ limits each frame, not the number of frames in a message, and keeps them until the last one has come.
        most = self.limits.arena_bytes + self.limits.arena_bytes // 4 + wire.MAX_TO_EXECUTOR
        unfinished = accepted.unfinished(count)
        if unfinished > most:
            return f"{unfinished} bytes and no end of the message; at most {most} are allowed"
        return None

    async def close(self) -> None:
        if self._closed:
            return
        for line in list(self.lines.values()):
            line.peer.end(ExecutorClosedError(f"the executor at {self.address} was shut down"))
        self._closed = True
        self._sweeper.cancel()
        if self._settling is not None:
            self._settling.cancel()
        self._close_sockets(LINGER_MS)
        self.lines.clear()
        self.accepted.clear()
        self._share.close()
        await asyncio.to_thread(self._context.term)


_PONG = wire.pack(Type.PONG)
_FAILURES = {
    int(zmq.Event.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): "one side has CURVE keys and the other has none",
    int(zmq.Event.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "it does not know this executor's public key",
}
