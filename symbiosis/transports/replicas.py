"""Several addresses of one model: a client joins one of its executors, and another one when that is lost.

Executors may also serve different parts of the model (:mod:`symbiosis.transports.directory`); then a client joins one
executor for each part. A replica is an executor with the same fingerprint. Every call is self-contained, so a client
can send it to any of them. Before it joins, a client asks all replicas for their load. It prefers the busiest one that
is not crowded, since clients that share batches read the weights once for all of them. When its replica is crowded and
another one is not, a client moves there between two walks. Decision 0038 has the reasons.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar
from urllib.error import HTTPError

import torch

from symbiosis.core.registry import LISTS, addresses_in, make_transport, transport_options
from symbiosis.core.share import Share
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Check, Listener, Look, Service
from symbiosis.errors import ConnectionLostError, RefusedError, ShareError, SymbiosisError, UsageError
from symbiosis.log import get_logger
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.connection import AsyncConnection, BlockingConnection, BlockingJoin, Join
from symbiosis.transports.conversation import MAY_RETURN
from symbiosis.transports.directory import DirectoryChannel, GapError, checked, merge
from symbiosis.transports.limits import Limits
from symbiosis.transports.shm_client import socket_path
from symbiosis.transports.sockets import host_and_port
from symbiosis.transports.wire import Hello

log = get_logger(__name__)

CROWDED = 0.5
"""Load from which on a replica has no room for more clients."""
PATIENCE_S = 0.5
"""Seconds for which the other replicas may still answer after the first one has."""
SHOWN_WITHIN_S = 5.0
"""The same, where the status of each is asked for or none has answered: a replica in a long batch answers late."""
LOOK_EVERY_S = 5.0
"""Seconds between two looks at all replicas by clients of one process."""
AVOID_S, LONGEST_AVOID_S = 60.0, 3600.0
"""Seconds for which a client prefers other replicas to one that it has lost or could not join; four times as many after
each further failure, up to the second number."""
_NEVER = 0.0, 0.0
MAX_REPLICAS = 64
LIST_WITHIN_S = 5.0
"""Seconds for which a server may be silent that is asked for a list of addresses."""
MAX_LIST_BYTES = 64 << 10


class Joinable(Protocol):
    """A transport whose connections can replace each other."""

    def look(self, address: str) -> Look: ...
    def join(self, address: str) -> Join: ...
    def join_blocking(self, address: str) -> BlockingJoin: ...


C = TypeVar("C", AsyncConnection, BlockingConnection)


class Replica(NamedTuple):
    """One address, and the transport to it."""

    address: str
    transport: Joinable


Looks = Mapping[Replica, Look | SymbiosisError]
"""What each replica that has answered shows, or why it does not."""


class Replicas:
    """Connect to executors of the same model.

    Args:
        address: their addresses, separated by commas, or where a list with an address on each line is kept:
            ``file:///path`` or ``http://host:port/path``. The list is read again before executors are chosen.
        retry: seconds for which a client that has lost an executor tries to reach any of them; 0 gives up at once.
        **options: of the transports. Each transport gets those that it has.

    Raises:
        UsageError: a transport cannot be used here, an address is there twice, an option has no valid value, or the
            file cannot be read.
    """

    def __init__(self, address: str, retry: float = 60.0, **options: Any) -> None:
        self._retry_s = retry
        self._options = options
        self._list = address if address.startswith(LISTS) else None
        self._text: str | None = None
        self._replicas = self._made(address) if self._list is None else []
        if address.startswith("file://"):
            self._read(address)
        self._looked = -LOOK_EVERY_S
        self.seen: Looks = {}
        """What the latest look has shown."""

    def _made(self, address: str) -> list[Replica]:
        addresses = addresses_in(address)
        if len(set(addresses)) < len(addresses) or len(addresses) > MAX_REPLICAS:
            raise UsageError(f"{address}: give up to {MAX_REPLICAS} different addresses")
        made = []
        for each in addresses:
            if each.partition("://")[0] not in ("shm", "tcp"):
                raise UsageError(f"{each}: an address beside others can be shm:// or tcp://")
            (socket_path if each.startswith("shm:") else host_and_port)(each)  # refuse one that is malformed
            taken = transport_options(each)
            transport: Any = make_transport(
                each, **{name: self._options[name] for name in self._options.keys() & taken}
            )
            made.append(Replica(each, transport))
        return made

    def _read(self, source: str) -> None:
        """Read the list of addresses, and use it if it has changed. Blocks.

        Raises:
            UsageError: the list cannot be read, or is malformed.
            ConnectionLostError: the server does not give it.
        """
        text = _text_at(source)
        if text == self._text:
            return
        found = ",".join(filter(None, (line.partition("#")[0].strip() for line in text.splitlines())))
        if not found:
            raise UsageError(f"{source} has no address; write one on each line")
        known = {replica.address: replica for replica in self._replicas}
        self._replicas = [known.get(replica.address, replica) for replica in self._made(found)]
        self._text = text

    def check(self, address: str) -> NoReturn:
        raise UsageError(
            f"{address}: an executor listens at one address at a time; call listen for each (repeat --listen)"
        )

    async def listen(self, address: str, service: Service) -> Listener:
        self.check(address)

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        parts, whole, looks = await asyncio.to_thread(self._parts)
        channels: list[Channel] = []
        try:
            for part in parts:
                channels.append(await self._connect(Choice(self, part, looks, bool(channels)), address, client, terms))
            return _whole(channels, whole, asyncio.get_running_loop())
        except BaseException:
            for channel in channels:
                channel.close()
            raise

    async def _connect(self, choice: Choice, address: str, client: str, terms: Terms) -> Channel:
        async def join(hello: Hello, again: bool) -> AsyncConnection:
            candidates = await asyncio.to_thread(choice.candidates)
            errors: list[SymbiosisError] = []
            for replica in candidates:
                try:
                    opened = await replica.transport.join(replica.address)(hello, again or choice.has_share)
                    return choice.take(replica, opened, again)
                except (SymbiosisError, OSError) as error:
                    choice.failed(replica)
                    errors.append(_symbiosis(replica, error))
            raise _together(errors)

        channel = await AsyncChannel.open(join, address, Hello(client, terms), self._retry_s, choice.better)
        channel.before_return = choice.before_return
        return channel

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        parts, whole, looks = self._parts()
        channels: list[Channel] = []
        try:
            for part in parts:
                channels.append(
                    self._connect_blocking(Choice(self, part, looks, bool(channels)), address, client, terms)
                )
            return _whole(channels, whole, None)
        except BaseException:
            for channel in channels:
                channel.close()
            raise

    def _connect_blocking(self, choice: Choice, address: str, client: str, terms: Terms) -> Channel:
        def join(hello: Hello, again: bool) -> BlockingConnection:
            errors: list[SymbiosisError] = []
            for replica in choice.candidates():
                try:
                    opened = replica.transport.join_blocking(replica.address)(hello, again or choice.has_share)
                    return choice.take(replica, opened, again)
                except (SymbiosisError, OSError) as error:
                    choice.failed(replica)
                    errors.append(_symbiosis(replica, error))
            raise _together(errors)

        channel = BlockingChannel(join, address, Hello(client, terms), self._retry_s, choice.better)
        channel.before_return = choice.before_return
        return channel

    def look(self, address: str) -> Look:
        """Return what an executor shows, with the description of the whole model. The status has an entry ``replicas``,
        with the status of each address, or of one that does not answer the ``error``. Raises the errors of
        :meth:`connect`."""
        whole, looks = self._seen_whole(SHOWN_WITHIN_S)
        replicas = {
            replica.address: look.status if isinstance(look, Look) else {"error": str(look)}
            for replica, look in looks.items()
        }
        seen = next(look for look in looks.values() if isinstance(look, Look))
        return Look({"replicas": replicas}, whole, seen.tokenizer)

    def _parts(self) -> tuple[list[str], dict[str, Any], Looks]:
        """Return the fingerprints of the model's parts, the description of the whole model, and what was seen.

        Raises:
            RefusedError: executors serve different models, or a layer is served by none of them.
            ConnectionLostError: the same, and an executor does not answer.
            UsageError: an address cannot be used in this way.
        """
        whole, looks = self._seen_whole(PATIENCE_S)
        found = (str(_fingerprint(look)) for look in looks.values() if isinstance(look, Look))
        return list(dict.fromkeys(found)), whole, looks

    def _seen_whole(self, patience_s: float) -> tuple[dict[str, Any], Looks]:
        """Return the description of the whole model, and what was seen. Raises like :meth:`_parts`."""
        looks = self.looks(patience_s)
        for error in looks.values():
            if isinstance(error, UsageError) and not isinstance(error, ShareError):
                raise error
        try:
            return _merge(looks), looks
        except ConnectionLostError:
            looks = self.looks(None)
            return _merge(looks), looks

    def looks(self, patience_s: float | None = PATIENCE_S) -> Looks:
        """Ask all replicas at once. Those that do not answer within ``patience_s`` after the first one are left out, as
        are all after :data:`SHOWN_WITHIN_S`; None waits for all."""
        if self._list is not None:
            try:
                self._read(self._list)
            except SymbiosisError as error:
                if not self._replicas:
                    raise
                log.warning("addresses not changed", why=str(error))  # those that were read before stay in use
        asked = list(self._replicas)
        answers: queue.SimpleQueue[tuple[Replica, Look | SymbiosisError]] = queue.SimpleQueue()

        def ask(replica: Replica) -> None:
            try:
                look = replica.transport.look(replica.address)
                checked(replica.address, look.model)
                answers.put((replica, look))
            except (SymbiosisError, OSError) as error:
                answers.put((replica, _symbiosis(replica, error)))

        for replica in asked:
            threading.Thread(target=ask, args=(replica,), daemon=True).start()
        found: dict[Replica, Look | SymbiosisError] = {}
        until = None if patience_s is None else time.monotonic() + max(patience_s, SHOWN_WITHIN_S)
        while len(found) < len(asked):
            try:
                replica, answer = answers.get(timeout=None if until is None else max(until - time.monotonic(), 0))
            except queue.Empty:
                break
            found[replica] = answer
            if isinstance(answer, Look) and patience_s is not None and until is not None:
                until = min(until, time.monotonic() + patience_s)
        silent = {
            replica: ConnectionLostError(f"no executor answers on {replica.address} in time")
            for replica in asked
            if replica not in found
        }
        found |= silent
        self._looked = time.monotonic()
        self.seen = {replica: found[replica] for replica in asked}
        return self.seen

    def look_again(self) -> None:
        """Look at all replicas on another thread, unless that was done a short time ago."""
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._looked = time.monotonic()
            threading.Thread(target=self.looks, daemon=True).start()


class Choice:
    """The replica of one client.

    Args:
        replicas: all of them, and executors of other parts of the model.
        fingerprint: of the model, or of this part of it.
        looks: what was seen before the first choice.
        has_share: whether the client has its share of the model from another executor.
        chance: returns a number from 0 to 1.
        now: returns the time in seconds.
    """

    def __init__(
        self,
        replicas: Replicas,
        fingerprint: str,
        looks: Looks,
        has_share: bool = False,
        chance: Callable[[], float] = random.random,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._fingerprint = fingerprint
        self._looks: Looks | None = looks
        self.has_share = has_share
        self._chance = chance
        self._replica: Replica | None = None
        self._device: torch.device | None = None
        self._limits: Limits | None = None
        self._judged: Looks = {}
        self._checks: list[Check] = []
        self._now = now
        self._taken = 0.0
        """When the replica was joined."""
        self._moves = False
        """Whether the client leaves a replica that works for a better one."""
        self._failures: dict[Replica, tuple[float, float]] = {}
        """Of a replica that has failed, for how many seconds others are preferred, and until when."""

    def candidates(self) -> list[Replica]:
        """Return the replicas to join, the best one first, those that were lost lately behind the others, and those
        that did not answer last. Blocks.

        Raises:
            RefusedError: all of them serve another model than before.
            SymbiosisError: no replica answers. One that is silent is not joined then, because that would last while
                another one returns.
        """
        if self._replica is not None and not self._moves:
            self.failed(self._replica)
        self._replica, self._moves = None, False
        looks, self._looks = self._looks or self._replicas.looks(), None
        silent = {replica: look for replica, look in looks.items() if not isinstance(look, Look)}
        if found := ranked(self._loads(looks)):
            return [*sorted(found, key=self._avoided), *silent]
        others = ", ".join(replica.address for replica in looks if replica not in silent)
        other = [RefusedError(f"{others} came back with another model; open a new client")] if others else []
        raise _together([*other, *silent.values()])

    def _loads(self, looks: Looks) -> dict[Replica, float]:
        """Return the load of each executor of this model, or of this part of it."""
        return {
            replica: _load(look)
            for replica, look in looks.items()
            if isinstance(look, Look) and _fingerprint(look) == self._fingerprint
        }

    def take(self, replica: Replica, connection: C, again: bool) -> C:
        """Note that the client has joined a replica.

        Raises:
            RefusedError: its connection cannot replace the former one.
            SymbiosisError: a check failed. In both cases the connection is closed.
        """
        try:
            device, limits = connection.carrier.device, connection.welcome.limits
            if checked(replica.address, connection.welcome.description) != self._fingerprint:
                raise RefusedError(f"{replica.address} came back with another model; open a new client")
            if self._device not in (None, device):
                raise RefusedError(f"{replica.address} takes tensors on {device}, not on {self._device}")
            least = self._limits or limits
            if limits.rows < least.rows or limits.arena_bytes < least.arena_bytes:
                raise RefusedError(f"{replica.address} allows smaller calls than the executor that was joined first")
            for check in self._checks:
                check(connection.welcome.identity)
        except SymbiosisError:
            connection.close()
            raise
        self._replica, self._device, self._limits, self._taken = replica, device, least, self._now()
        if self.has_share and not again:
            connection.share = Share(connection.welcome.description, {}, {})
        return connection

    def failed(self, replica: Replica) -> None:
        """Note that a replica could not be joined, or was lost."""
        before, _ = self._failures.get(replica, _NEVER)
        if replica is not self._replica and self._avoided(replica):
            return  # attempts of one outage count once
        if replica is self._replica and self._now() - self._taken > AVOID_S:
            before = 0.0  # it has worked
        seconds = min(4 * before, LONGEST_AVOID_S) or AVOID_S
        self._failures[replica] = seconds, self._now() + seconds

    def _avoided(self, replica: Replica) -> bool:
        return self._now() < self._failures.get(replica, _NEVER)[1]

    def before_return(self, check: Check) -> None:
        """Register a check of each replica that is joined from now on; one that fails it is passed over."""
        self._checks.append(check)

    def better(self) -> bool:
        """Return whether the client should join again, because its replica is crowded and another one is not.

        Each look at the replicas is judged once. If all clients of a crowded replica went, it would be empty: each
        goes with a probability that leaves half of the difference behind.
        """
        self._replicas.look_again()
        seen = self._replicas.seen
        if seen is self._judged or self._replica is None:
            return False
        self._judged = seen
        loads = self._loads(seen)
        here = loads.get(self._replica, 0.0)
        there = min((load for replica, load in loads.items() if not self._avoided(replica)), default=1.0)
        self._moves = here >= CROWDED > there and self._chance() < (here - there) / (2 * here)
        return self._moves


def ranked(loads: Mapping[Replica, float]) -> list[Replica]:
    """Return replicas in the order in which a client prefers them: the busiest one that is not crowded, then the others
    that are not, then the least crowded."""
    room = [replica for replica, load in loads.items() if load < CROWDED]
    crowded = [replica for replica, load in loads.items() if load >= CROWDED]
    return sorted(room, key=lambda replica: -loads[replica]) + sorted(crowded, key=lambda replica: loads[replica])


def _text_at(source: str) -> str:
    """Return the list of addresses in a file, or from a server. Raises like :meth:`Replicas._read`."""
    try:
        if source.startswith("file://"):
            return Path(source.removeprefix("file://")).read_text()
        with urllib.request.urlopen(source, timeout=LIST_WITHIN_S) as answer:
            return str(answer.read(MAX_LIST_BYTES).decode())
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        kind = UsageError if source.startswith("file://") else ConnectionLostError
        raise kind(f"cannot read the addresses in {source.removeprefix('file://')}: {error}") from error


def _load(look: Look) -> float:
    load = look.status.get("load")
    return min(load, 1.0) if isinstance(load, float) and load >= 0 else 0.0


def _fingerprint(look: Look) -> object:
    return look.model.get("fingerprint")


def _merge(looks: Looks) -> dict[str, Any]:
    """Return the description of the whole model. Raises like :meth:`Replicas._parts`."""
    seen: dict[object, tuple[str, Mapping[str, Any]]] = {}
    for replica, look in looks.items():
        if isinstance(look, Look):
            seen.setdefault(_fingerprint(look), (replica.address, look.model))
    errors = [look for look in looks.values() if isinstance(look, SymbiosisError)]
    if not seen:
        raise _together(errors)
    try:
        return merge(dict(seen.values()))
    except GapError as error:
        if not errors:
            raise
        why = _together(errors)
        kind = ConnectionLostError if isinstance(why, MAY_RETURN) else RefusedError
        raise kind(f"{error}; {why}") from error


def _whole(channels: list[Channel], whole: Mapping[str, Any], loop: asyncio.AbstractEventLoop | None) -> Channel:
    return channels[0] if len(channels) == 1 else DirectoryChannel(channels, whole, loop)


def _symbiosis(replica: Replica, error: Exception) -> SymbiosisError:
    if isinstance(error, SymbiosisError):
        return error
    return ConnectionLostError(f"no executor answers on {replica.address}: {error}")


def _together(errors: Sequence[SymbiosisError]) -> SymbiosisError:
    """Return the error for a client that could join no replica: one after which it tries again, if there is any."""
    may_return = [error for error in errors if isinstance(error, MAY_RETURN)]
    if not may_return:
        return errors[0]
    return type(may_return[0])("; ".join(dict.fromkeys(map(str, errors))))
