"""The executor's end of ``tcp://``: the port, and one line for each connection.

Where there are keys, a connection begins with a TLS handshake, in which the executor sees the tenant's certificate.
Until its end a peer can send the bytes of a handshake and no more, and only for a limited time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbiosis.core.requests import Results
from symbiosis.core.transport import Service
from symbiosis.errors import BusyError, RefusedError, SymbiosisError, UsageError, WireError
from symbiosis.log import get_logger
from symbiosis.transports import wire
from symbiosis.transports.courier import Admitted, Courier
from symbiosis.transports.keys import Keyring, identity
from symbiosis.transports.limits import Limits
from symbiosis.transports.peer import Peer
from symbiosis.transports.sockets import LOST_CLIENT_S, Endpoint, bind, carries_tensors, prepare
from symbiosis.transports.stream import ByteStream, TlsByteStream, block, matrices, payload_of
from symbiosis.transports.stream_line import StreamLine, StreamListener
from symbiosis.transports.wire import Type

log = get_logger(__name__)

HANDSHAKE_S = 1.0
"""Seconds for a TLS handshake, apart from those in which the executor was busy."""
_TICKS = 10
"""Timers that this time is divided into, one after another. A batch that blocks the event loop uses up one at most."""
LINES = 10
"""Lines of the log in a second about peers that have not shown a key."""
LOOKS_OF_ONE = Limits().clients
"""Status connections that a tenant may have, whatever the limit ``clients`` is: a client opens one before it joins."""
SWEEP_S = 1.0
"""Seconds between two looks at whether the key of a client was removed."""


class TcpListener(StreamListener["TcpLine"]):
    """A bound port and the clients that came through it.

    Args:
        endpoint: where to listen.
        service: the executor.
        limits: limits of each client.
        keys: the executor's keys and its tenants'; None for connections without TLS.
        courier: makes the courier of a connection's tensors.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        service: Service,
        limits: Limits,
        keys: Keyring | None,
        courier: Callable[[TcpLine], TcpCourier],
    ) -> None:
        super().__init__("", service, limits)
        self.keys = keys
        self.courier = courier
        self.unknown: dict[TcpLine, None] = {}
        """The connections in their TLS handshake, the oldest first."""
        self._endpoint = endpoint
        self._logged = self._unlogged = 0
        """Lines about such connections in this second, and how many were left out."""
        self._second = 0.0
        self._broken: dict[str, str] = {}
        """The malformed key files that were logged."""
        self._unreadable = False
        """Whether the folder of keys could not be read at the last look."""

    def log_unknown(self, event: str, host: str, why: str) -> None:
        """Count what happened to a peer that has not shown a key, and log it, at most LINES times in a second."""
        self.service.rejected("handshake")
        now = asyncio.get_running_loop().time()
        if now >= self._second + 1:
            self._second, self._logged = now, 0
        if self._logged == LINES:
            self._unlogged += 1
            return
        self._logged += 1
        left_out = {"left_out": self._unlogged} if self._unlogged else {}
        log.warning(event, client=None, host=host, why=why, **left_out)
        self._unlogged = 0

    def log_broken_keys(self) -> None:
        """Log key files that do not count, once for each change of the folder."""
        if self.keys is not None and self.keys.broken is not self._broken:
            self._broken = self.keys.broken
            for file, why in self._broken.items():
                log.warning("key file ignored", file=file, why=why)
            if not self.keys.tenants():
                log.warning("no tenant has a key here", folder=str(self.keys.folder))

    async def open(self, address: str) -> None:
        """Start to accept clients. Raises UsageError if the port is not available, and ShareError if the model cannot
        be served to other processes."""
        self.service.share()
        listening = bind(address, self._endpoint)
        await self._accept(listening, address, asyncio.get_running_loop().create_server, TcpLine)
        port = listening.getsockname()[1]
        self.address = f"{address.partition(':')[0]}://{self._endpoint._replace(port=port)}"
        self._sweep()
        if self.keys is not None:
            self.service.reserve(self, self.keys.tenants)
        encrypted = self.keys is not None and carries_tensors(address)
        log.info("listening", address=self.address, encrypted=encrypted)

    def _sweep(self) -> None:
        """End the sessions of tenants whose key was removed."""
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        if self.keys is None:
            return
        try:
            known = self.keys.names()
        except (OSError, UsageError) as error:
            if not self._unreadable:
                self._unreadable = True
                log.warning("cannot read the keys", folder=str(self.keys.folder), why=str(error))
            return
        if self._unreadable:
            self._unreadable = False
            log.info("the keys can be read again", folder=str(self.keys.folder))
        self.log_broken_keys()
        for line in list(self.lines):
            if line.user is not None and line.user not in known:
                line.peer.refuse(RefusedError(f"the key of {line.tenant} was removed"))

    async def close(self) -> None:
        if self._server is not None:
            self._sweeper.cancel()
        await super().close()


class TcpLine(StreamLine):
    """One connection."""

    listener: TcpListener

    def __init__(self, listener: TcpListener) -> None:
        super().__init__(listener)
        self.user: str | None = None
        """Identity of the client's certificate; None without TLS, and before the end of the handshake."""
        self.tenant = "?"
        """Name of the client's key, or its IP address."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        listener = self.listener
        listener.lines.add(self)
        where = transport.get_extra_info("peername")
        self.tenant = where[0] if where else "?"
        self.peer = Peer(listener.service, listener.limits, self, listener.courier(self))
        if not self._has_room(readable=listener.keys is None):
            return
        try:
            prepare(transport.get_extra_info("socket"), LOST_CLIENT_S)
            if listener.keys is None:
                self.open(self.tenant)
                return
            self._stream = TlsByteStream(wire.MAX_TO_EXECUTOR, listener.keys.context(), server=True)
        except (OSError, SymbiosisError) as error:
            self._fail(error)
            return
        listener.log_broken_keys()
        listener.unknown[self] = None
        self._tick(_TICKS)

    def _tick(self, left: int) -> None:
        """Give up the handshake after so many parts of its time."""
        if left:
            self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S / _TICKS, self._tick, left - 1)
        else:
            self.drop(f"its handshake took more than {HANDSHAKE_S:g} s")

    def buffer_updated(self, count: int) -> None:
        if self.listener.keys is None or self.user is not None or self.peer.gone:
            super().buffer_updated(count)
            return
        try:
            self._stream.filled(count)
        except (OSError, SymbiosisError) as error:
            self._fail(error)
            return
        self._flush()
        if self._stream.ready:
            self._stop_deadline()
            self._known()

    def open(self, tenant: str) -> None:
        super().open(tenant)
        try:  # the rest follows with HELLO; without this, connections that send none would take those of all tenants
            self._check_count(sum(self._of_tenant()), self.listener.limits.clients + self._most_others())
        except BusyError as error:
            self.peer.refuse(error)

    def _flush(self) -> None:
        """Send what TLS itself has to send."""
        if data := self._stream.unsent():
            self._transport.write(data)

    def _known(self) -> None:
        """Begin the conversation with a client whose certificate was accepted."""
        self.listener.unknown.pop(self, None)
        assert isinstance(self._stream, TlsByteStream)
        assert self.listener.keys is not None
        self.user = identity(self._stream.certificate())
        name = self.listener.keys.name_of(self.user)
        self.tenant = name or "?"
        self.open(self.tenant)
        if name is None:
            self.peer.refuse(RefusedError(_UNKNOWN))
        else:
            self._read()

    def _fail(self, error: Exception) -> None:
        """End a connection whose handshake has failed."""
        if not self.peer.gone:
            why = _why(error)
            if why is _NO_TLS:
                self._stream = ByteStream(wire.MAX_TO_EXECUTOR)  # which the peer can read
                refused = RefusedError("this executor admits clients with a key; give key=file (--key)")
                self.listener.log_unknown("client refused", self.tenant, str(refused))
                self.peer.end(refused)
                return
            self.listener.log_unknown("client refused", self.tenant, why)
            self.peer.leave(why)
            self._flush()
            self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        self.listener.unknown.pop(self, None)
        super().connection_lost(error)

    def _cut_oldest(self) -> bool:
        for oldest in self.listener.unknown:
            oldest.drop("its handshake had not ended, and newer connections needed the room")
            oldest.peer.account.close()
            return True
        return False

    def drop(self, why: object) -> None:
        if self.listener.keys is None or self.user is not None:
            super().drop(why)
            return
        self.listener.unknown.pop(self, None)
        self.listener.log_unknown("connection cut", self.tenant, str(why))
        self.peer.leave(str(why))
        self._abort()

    def end(self, error: SymbiosisError) -> None:
        if self._stream.ready:
            super().end(error)
        else:
            self.drop(error)

    @property
    def authenticated(self) -> bool:
        return self.user is not None

    def show(self, status: dict[str, Any]) -> dict[str, Any]:
        if self.user is None:
            return status
        # Sums over all tenants, and the times at which layers run, would show what other tenants do, such as the length
        # of a prompt.
        own = [name for name in status["clients"] if name.startswith(f"{self.tenant}/")]
        record = status["activity"]["tenants"].get(self.tenant)
        mine = record or {"requests": 0, "rows": 0, "members": 0}
        activity = {
            "at": status["activity"]["at"],
            "tenants": {} if record is None else {self.tenant: record},
            "batches": mine["requests"],
            "members": mine["members"],
            "run_s": 0.0,
            "layers": {},
            "apart": {},
        }
        return {
            **{name: value for name, value in status.items() if name not in _OF_ALL_TENANTS},
            "policy": self.listener.service.policy_names,  # its options may name tenants
            "clients": own,
            "other_clients": len(status["clients"]) - len(own),
            "requests": mine["requests"],
            "rows": mine["rows"],
            "activity": activity,
            "load": round(20 * status["load"]) / 20,  # finer steps would show single batches
        }

    def greeted(self, name: str) -> str:
        clients, others = self._of_tenant()
        if name and clients >= self.listener.limits.clients:
            raise BusyError(f"{self.tenant} has {clients} clients here already; close one first")
        self._check_count(clients + others, clients + self._most_others())
        super().greeted(name)
        return name if self.user is None else f"{self.tenant}/{name}"  # with keys, each tenant has names of its own

    def _of_tenant(self) -> tuple[int, int]:
        """Return how many clients the tenant has here, and how many other connections besides this one."""
        lines = [line for line in self.listener.lines if line.tenant == self.tenant and line is not self]
        peers = [line.peer for line in lines if not line.peer.gone]
        clients = sum(peer.session is not None for peer in peers)
        return clients, len(peers) - clients

    def _most_others(self) -> int:
        return max(self.listener.limits.clients, LOOKS_OF_ONE)

    def _check_count(self, connections: int, most: int) -> None:
        if connections >= most:
            raise BusyError(f"{self.tenant} has {connections} connections here already; close one first")

    def local_ip(self) -> str:
        """Return the IP address of this end."""
        return str(self._transport.get_extra_info("sockname")[0])


_OF_ALL_TENANTS = {
    *("addresses", "requests", "batches", "rows", "mean_batch", "run_s", "outstanding"),
    *("held_bytes", "free_bytes", "unpacked_bytes"),
}
"""Entries of the status that a tenant with a key does not see."""
_NO_TLS = "it speaks no TLS; perhaps it has no key"
_UNKNOWN = "its key is not in the folder of keys"


def _why(error: Exception) -> str:
    """Return why a handshake has failed."""
    reason = error.reason or "" if isinstance(error, ssl.SSLError) else ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _UNKNOWN
    if reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER"):
        return _NO_TLS
    if "ALERT" in reason:
        return "it does not know this executor's public key"
    return str(error)


class TcpCourier(Courier):
    """What the couriers of ``tcp://`` and ``dist://`` have in common: they hand out the client's share of the model in
    chunks."""

    def __init__(self, line: TcpLine) -> None:
        self.line = line

    def welcome(self, joined: bool) -> dict[str, Any]:
        return {"share_bytes": self.line.listener.share.size()} if joined else {}

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        if type_ is not Type.SHARE:
            return False
        start = wire.read_id(content)
        chunk = self.line.listener.share.chunk(start)
        self.line.send(wire.pack(Type.SHARE, start), len(chunk), [chunk])
        return True


class PayloadCourier(TcpCourier):
    """Takes tensors from the payload of a CALL, and sends results as the payload of a RESULT."""

    def check(self, admitted: Admitted, payload: int) -> int:
        if payload != admitted.incoming:
            raise WireError(
                f"a CALL of {admitted.message.rows} rows has a payload of {payload} bytes; {admitted.incoming} were due"
            )
        return 0

    def tensors(self, admitted: Admitted) -> Results | None:
        memory, view = block(admitted.incoming)
        self.line.into(view, lambda: self._arrived(admitted, memory))
        return None

    def _arrived(self, admitted: Admitted, memory: torch.Tensor) -> None:
        tensors = matrices(memory, admitted.message.rows, admitted.expected.call)
        device = self.line.listener.service.device
        if device.type != "cpu":
            tensors = tuple([tensor.to(device) for tensor in tensors])
        self.line.peer.arrived(admitted, tensors)

    def answer(self, admitted: Admitted, results: Results, sent: Callable[[], object]) -> None:
        size, parts = payload_of([result.cpu() for result in results])
        self.line.send(wire.pack_result(admitted.message.id), size, parts, results=True)
        self.line.when_read(sent)
