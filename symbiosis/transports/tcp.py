"""``tcp://host:port``: tenants on other hosts, over ZeroMQ with CURVE.

One ROUTER socket serves all clients, each of which has a DEALER. A message is one frame in the wire format; the
matrices of a CALL or RESULT follow it as raw frames, and go out without a copy. CURVE encrypts, and tells the executor
by its public key which tenant a message comes from (:mod:`symbiosis.transports.keys`); without keys nothing but the
loopback address is used, unless told ``insecure=True``.

Nobody can speak for another. ZeroMQ lets a client choose by what identity a ROUTER knows it; so every message must come
over the very TCP connection, and with the very public key, that the conversation began with.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Look, Service
from symbiosis.errors import ExecutorClosedError, RefusedError, UsageError
from symbiosis.log import get_logger
from symbiosis.transports import tcp_client, wire
from symbiosis.transports.chunks import Chunks, Progress
from symbiosis.transports.keys import Keyring, load_key
from symbiosis.transports.sockets import SILENT_S, Endpoint, Event, Frames, Reader, configure, monitor, peer_of, resolve
from symbiosis.transports.tcp_peer import Link, TcpPeer
from symbiosis.transports.wire import Hello, Limits, Type
from symbiosis.transports.zap import Doorkeeper

__all__ = ["TcpListener", "TcpTransport"]

log = get_logger(__name__)


MAX_CONNECTIONS = 1024
MAX_UNASKED = 64
"""Messages of somebody who was not welcomed yet."""
UNREAD_WITHIN_S = 0.5
"""How long what a connection has sent may lie unread; more than that only if others never stop to send."""
DOUBT_S = 0.05
"""For a connection with the descriptor of one that has just ended: until ZeroMQ is done with that one."""
HELLO_WITHIN_S = 10.0
"""How long a connection may stay silent before it says who it is."""
SWEEP_S = 1.0
LINGER_MS = 1000
"""How long the last messages may take when the executor shuts down."""


class TcpTransport:
    """Listen on, or connect to, a TCP port.

    Args:
        key: a tenant's secret key file, to connect.
        keys: the folder with the executor's own key and the tenants' public ones, to listen.
        insecure: allow an address beyond this host without keys; anybody on the way can then read and change all.
        retry: how long a client waits for an executor that was lost, in seconds; 0 gives up at once.
        limits: what a listener allows each client.
        progress: called with the bytes done and the total while a client's share of the model comes in. By default,
            synchronous code at a terminal shows a bar.

    Raises:
        UsageError: a key file that is none.
    """

    _channel: type[tcp_client.TcpChannel] = tcp_client.TcpChannel

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
        if self._key is not None and self._key.server is None:
            raise UsageError(f'{key} does not have the executor\'s public key; add a line: server-key = "…"')
        self._keys = None if keys is None else Keyring(keys)
        self._insecure = insecure
        self._retry_s = retry
        self._limits = limits or Limits()
        self._progress = progress

    async def listen(self, address: str, service: Service) -> TcpListener:
        endpoint = await resolve(address)
        if self._keys is None and not endpoint.loopback and not self._insecure:
            raise UsageError(
                f"{address} can be reached from other hosts; give keys=folder (--keys; `symbiosis keys new` makes "
                "them), or insecure=True (--insecure) if everybody on the network may read along and use the executor"
            )
        listener = self._listener(endpoint, service)
        listener.open(address)
        return listener

    def _listener(self, endpoint: Endpoint, service: Service) -> TcpListener:
        return TcpListener(endpoint, service, self._limits, self._keys)

    def _options(self) -> tcp_client.Options:
        return tcp_client.Options(self._key, self._insecure, self._retry_s, self._progress)

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return await self._channel.open(address, Hello(client, terms), self._options())

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        return tcp_client.TcpBlockingChannel.open(address, Hello(client, terms), self._options())

    def look(self, address: str) -> Look:
        return tcp_client.look(address, self._options())


@dataclass(slots=True)
class _Stranger:
    """Somebody who has spoken, and whom we do not know yet."""

    link: Link
    user: str | None
    since: float
    """Seconds on the loop's clock."""
    messages: list[Frames] = field(default_factory=list)


class TcpListener:
    """A bound port and the clients that came through it."""

    _peer: type[TcpPeer] = TcpPeer
    _encrypts = True
    """With keys, all that is sent."""

    def __init__(self, endpoint: Endpoint, service: Service, limits: Limits, keys: Keyring | None) -> None:
        self.address = ""
        self.service = service
        self.limits = limits
        self.peers: dict[bytes, TcpPeer] = {}
        """By ROUTER identity."""
        self.links: dict[int, Link] = {}
        """By descriptor."""
        self._endpoint = endpoint
        self._keys = keys
        self._failure: str | None = None
        """Why the last handshake failed, until we hear whose it was."""
        self._chunks: Chunks | None = None
        self._strangers: dict[bytes, _Stranger] = {}
        """By ROUTER identity."""
        self._settling: asyncio.Handle | None = None
        self._ended: dict[int, float] = {}
        """By descriptor, when a connection with it ended; in seconds on the loop's clock."""
        self._swept = 0.0
        self._closed = False

    def open(self, address: str) -> None:
        """Start to accept clients.

        Raises:
            UsageError: the port cannot be had.
            ShareError: the model cannot be served to other processes.
        """
        self.service.share()
        self._loop = loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # the doorkeeper's is one per context
        self._door = None if self._keys is None else Doorkeeper(self._context, loop, self._keys)
        socket = self._context.socket(zmq.ROUTER)
        self._configure(socket)
        self._monitor = monitor(socket, loop, self._happened)
        try:
            socket.bind(f"tcp://{self._endpoint}")
        except zmq.ZMQError as error:
            socket.disable_monitor()
            self._monitor.close()
            socket.close()
            if self._door is not None:
                self._door.close()
            self._context.term()
            raise UsageError(f"cannot listen on {address}: {error.strerror or error}") from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = f"{address.partition(':')[0]}://{self._endpoint._replace(port=int(bound.rpartition(':')[2]))}"
        self._reader = Reader(socket, loop, self._received)
        self._swept = loop.time()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        log.info("listening", address=self.address, encrypted=self._keys is not None and self._encrypts)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        configure(socket, v6=self._endpoint.v6, max_frame_bytes=max(self.limits.arena_bytes, wire.MAX_TO_EXECUTOR))
        # Messages, each way: what a client within its limits may have under way, and a little more.
        socket.setsockopt(zmq.RCVHWM, 4 * self.limits.calls + 64)
        socket.setsockopt(zmq.SNDHWM, 4 * self.limits.calls + 64)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so, instead of dropping what a client does not take
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.own.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"symbiosis")
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def chunks(self) -> Chunks:
        """The client's share of the model; the same for all."""
        if self._chunks is None:
            self._chunks = Chunks(self.service.share().tensors)
        return self._chunks

    def connections_of(self, tenant: str) -> int:
        """How many clients, and how many who look, a tenant has here."""
        return sum(peer.tenant == tenant and not peer.is_gone for peer in self.peers.values())

    # ------------------------------------------------------------------------------------------------------- messages

    def send(self, parts: Sequence[Any]) -> None:
        """Send [identity, message, matrix…]; raises what :meth:`Reader.send` does."""
        if not self._closed:
            self._reader.send(parts)

    def _received(self, frames: list[zmq.Frame]) -> None:
        # First what happened to connections: descriptors and identities are used again.
        self._monitor.drain()
        if len(frames) < 2:
            return
        link = self.links.get(frames[1].get(zmq.SRCFD))
        if link is None:
            return  # its connection has ended
        identity = frames[0].bytes
        user = None if self._keys is None else str(frames[1].get("User-Id"))
        peer = self.peers.get(identity)
        if peer is None:
            stranger = self._strangers.setdefault(identity, _Stranger(link, user, self._loop.time()))
            small = len(frames) == 2 and len(frames[1]) <= wire.MAX_TO_EXECUTOR
            if stranger.link is link and small and len(stranger.messages) < MAX_UNASKED:
                stranger.messages.append(frames[1:])
            if self._settling is None:
                self._settling = self._loop.call_soon(self._settle)
        elif peer.link is link and peer.user == user:
            link.messages += 1
            peer.take(frames[1:])

    # A connection may end before we have read what it sent, and its descriptor be another's by now. ZeroMQ tells us of
    # a message the descriptor that it came by, and the identity of its connection, and nothing else that one could go
    # by. What a dead connection has sent must not be taken for the living one's. So whoever speaks for the first time
    # is listened to when all that was sent has been read: then ZeroMQ knows who has gone, and refuses to send there.

    def _settle(self) -> None:
        """Get to know those who have spoken for the first time."""
        self._settling = None
        if self._closed:
            return
        now, again = self._loop.time(), math.inf
        unread = int(self._reader.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        for identity, stranger in list(self._strangers.items()):
            link = stranger.link
            wait = max(now if unread and now < stranger.since + UNREAD_WITHIN_S else 0.0, link.doubtful_until)
            if self.links.get(link.descriptor) is not link:
                del self._strangers[identity]
            elif wait >= now:
                again = min(again, max(wait, now + 1e-3))
            else:
                del self._strangers[identity]
                self._meet(identity, stranger)
        if self._strangers and self._settling is None and again < math.inf:
            self._settling = self._loop.call_at(again, self._settle)
        self._reader.drain()  # asking ZeroMQ has eaten the wake-up

    def _meet(self, identity: bytes, stranger: _Stranger) -> None:
        link = stranger.link
        if not self._alive(identity) or (link.peer is not None and self._alive(link.peer.identity)):
            return  # of a connection that has ended
        if link.peer is not None:
            self.peers.pop(link.peer.identity, None)
            link.peer.gone("its connection has ended")
        peer = self._new_peer(identity, link, stranger.user)
        for frames in stranger.messages:
            link.messages += 1
            peer.take(frames)

    def _alive(self, identity: bytes) -> bool:
        """Whether ZeroMQ has a connection of this identity."""
        self._reader.socket.getsockopt(zmq.EVENTS)  # has it take notice of all that has happened; sending alone may not
        try:
            self._reader.send([identity, _PONG])
        except zmq.ZMQError:
            return False
        return True

    def _new_peer(self, identity: bytes, link: Link, user: str | None) -> TcpPeer:
        tenant = link.remote[0] if user is None or self._keys is None else self._keys.name_of(user.encode())
        peer = self.peers[identity] = link.peer = self._peer(self, identity, link, user, tenant or "?")
        if tenant is None:
            peer.refuse(RefusedError("its key was taken away"))
        return peer

    # ---------------------------------------------------------------------------------------------------- connections

    def _happened(self, event: Event) -> None:
        kind, value = event
        if kind is zmq.Event.ACCEPTED:
            remote = peer_of(value)
            if remote is not None:
                now = self._loop.time()
                doubtful = now + DOUBT_S if now < self._ended.pop(value, -math.inf) + UNREAD_WITHIN_S else -math.inf
                self.links[value] = link = Link(value, remote, now, doubtful)
                if len(self.links) > MAX_CONNECTIONS:
                    log.warning("client refused", client=None, tenant=str(link), why=f"{MAX_CONNECTIONS} are connected")
                    link.cut()
        elif kind is zmq.Event.DISCONNECTED:
            self._ended[value] = self._loop.time()
            self._disconnected(self.links.pop(value, None))
        elif kind is zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            self._failure = _FAILURES.get(value, f"it does not speak ZeroMQ as we do (error {value:#x})")
        elif kind is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._failure = "it hung up during the handshake"

    def _disconnected(self, link: Link | None) -> None:
        failure, self._failure = self._failure, None
        if link is not None and link.peer is not None:
            self.peers.pop(link.peer.identity, None)
            link.peer.gone("its connection has ended")
        elif failure is not None:
            log.warning("client refused", client=None, tenant=str(link or "?"), why=failure)

    def _sweep(self) -> None:
        """Once a second: end connections that are silent, mute, endless or shown out."""
        now = self._loop.time()
        late, self._swept = now - self._swept > 2 * SWEEP_S, now
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._monitor.drain()
        known = self._known_keys()
        for link in list(self.links.values()):
            if link.peer is None:
                why = None if now - link.since < HELLO_WITHIN_S else "it has not said who it is"
            elif link.peer.session is None and link.cut_at is None:
                why = None if now - link.since < wire.LOOK_WITHIN_S else "it has looked for long enough"
            elif link.cut_at is not None:
                why = None if now < link.cut_at else "it was shown out"
            else:
                why = None
                if known is not None and link.peer.user not in known:
                    link.peer.refuse(RefusedError(f"the key of {link.peer.tenant} was taken away"))
            if why is None and not late:  # after a long batch some may have been kept from sending by ourselves
                why = self._trouble(link)
            if why is not None:
                log.warning("connection cut", tenant=link.peer.tenant if link.peer else str(link), why=why)
                if link.peer is not None:
                    link.peer.gone(why)
                link.cut()

    def _known_keys(self) -> Collection[str] | None:
        """Who may be here; None if everybody may, or if that cannot be told just now."""
        if self._keys is None:
            return None
        try:
            return {key.decode() for key in self._keys.names()}
        except OSError as error:
            log.warning("cannot read the keys", folder=str(self._keys.folder), why=str(error))
            return None

    def _trouble(self, link: Link) -> str | None:
        """What is wrong with the bytes of a connection, if anything."""
        silent, count = link.received()
        if silent > SILENT_S:
            return f"not a sign of life for {silent:.0f} s"
        # ZeroMQ bounds each frame and not how many there are in a message, and keeps them all until the last has come.
        most = self.limits.arena_bytes + self.limits.arena_bytes // 4 + wire.MAX_TO_EXECUTOR
        unfinished = link.unfinished(count)
        if unfinished > most:
            return f"{unfinished} bytes and no end of the message; at most {most} are allowed"
        return None

    async def close(self) -> None:
        if self._closed:
            return
        for peer in list(self.peers.values()):
            peer.end(ExecutorClosedError(f"the executor at {self.address} was shut down"))
        self._closed = True
        self._sweeper.cancel()
        if self._settling is not None:
            self._settling.cancel()
        self._reader.socket.disable_monitor()
        self._monitor.close()
        self._reader.close(LINGER_MS)
        if self._door is not None:
            self._door.close()
        self.peers.clear()
        self.links.clear()
        await asyncio.to_thread(self._context.term)


_PONG = wire.pack(Type.PONG)
_FAILURES = {
    int(zmq.Event.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): "one side has CURVE keys and the other has none",
    int(zmq.Event.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "it does not know this executor's public key",
}
