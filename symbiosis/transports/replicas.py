"""Several addresses of one model: a client joins one of its executors, and another one when that is lost.

A replica is an executor with the same fingerprint. Every call is self-contained, so a client can send it to any of
them. Before it joins, a client asks all replicas for their load. It prefers the busiest one that is not crowded, since
clients that share batches read the weights once for all of them. When its replica is crowded and another one is not, a
client moves there between two walks. Decision 0038 has the reasons.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from symbiosis.core.registry import addresses_in, make_transport, transport_options
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Channel, Check, Listener, Look, Service
from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError, UsageError
from symbiosis.log import get_logger
from symbiosis.transports.blocking import BlockingChannel
from symbiosis.transports.channel import AsyncChannel
from symbiosis.transports.connection import AsyncConnection, BlockingConnection, BlockingJoin, Join
from symbiosis.transports.conversation import MAY_RETURN
from symbiosis.transports.wire import Hello

log = get_logger(__name__)

CROWDED = 0.5
"""Load from which on a replica has no room for more clients."""
PATIENCE_S = 0.5
"""Seconds for which the other replicas may still answer after the first one has."""
LOOK_EVERY_S = 5.0
"""Seconds between two looks at all replicas by clients of one process."""
MAX_REPLICAS = 64


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
        address: their addresses, separated by commas.
        retry: seconds for which a client that has lost an executor tries to reach any of them; 0 gives up at once.
        **options: of the transports. Each transport gets those that it has.

    Raises:
        UsageError: a transport cannot be used here, an address is there twice, or an option has no valid value.
    """

    def __init__(self, address: str, retry: float = 60.0, **options: Any) -> None:
        addresses = addresses_in(address)
        if len(set(addresses)) < len(addresses) or len(addresses) > MAX_REPLICAS:
            raise UsageError(f"{address}: give up to {MAX_REPLICAS} different addresses")
        self._retry_s = retry
        self._replicas: list[Replica] = []
        for each in addresses:
            if each.partition("://")[0] not in ("shm", "tcp"):
                raise UsageError(f"{each}: an address beside others can be shm:// or tcp://")
            taken = transport_options(each)
            transport: Any = make_transport(each, **{name: options[name] for name in options.keys() & taken})
            self._replicas.append(Replica(each, transport))
        self._looked = -LOOK_EVERY_S
        self.loads: Mapping[Replica, float] = {}
        """Load of each replica that has answered the latest look."""

    async def listen(self, address: str, service: Service) -> Listener:
        raise UsageError(f"{address}: an executor listens at one address at a time; call listen for each")

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        choice = Choice(self)

        async def join(hello: Hello, again: bool) -> AsyncConnection:
            candidates = await asyncio.to_thread(choice.candidates)
            errors: list[SymbiosisError] = []
            for replica in candidates:
                try:
                    return choice.take(replica, await replica.transport.join(replica.address)(hello, again))
                except (SymbiosisError, OSError) as error:
                    errors.append(_symbiosis(replica, error))
            raise _together(errors)

        channel = await AsyncChannel.open(join, address, Hello(client, terms), self._retry_s, choice.better)
        channel.before_return = choice.before_return
        return channel

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        choice = Choice(self)

        def join(hello: Hello, again: bool) -> BlockingConnection:
            errors: list[SymbiosisError] = []
            for replica in choice.candidates():
                try:
                    return choice.take(replica, replica.transport.join_blocking(replica.address)(hello, again))
                except (SymbiosisError, OSError) as error:
                    errors.append(_symbiosis(replica, error))
            raise _together(errors)

        channel = BlockingChannel(join, address, Hello(client, terms), self._retry_s, choice.better)
        channel.before_return = choice.before_return
        return channel

    def look(self, address: str) -> Look:
        """Return what the first replica that answers shows. The status has an entry ``replicas``, with the status of
        each address, or of one that does not answer the ``error``.

        Raises:
            RefusedError: replicas serve different models.
            ConnectionLostError: no replica answers.
        """
        looks = self.looks(wait_for_all=True)
        seen = {replica: look for replica, look in looks.items() if isinstance(look, Look)}
        if not seen:
            raise _together([error for error in looks.values() if isinstance(error, SymbiosisError)])
        _same_model(seen)
        replicas = {
            replica.address: look.status if isinstance(look, Look) else {"error": str(look)}
            for replica, look in looks.items()
        }
        return next(iter(seen.values()))._replace(status={"replicas": replicas})

    def looks(self, wait_for_all: bool = False) -> Looks:
        """Ask all replicas at once. Without ``wait_for_all``, those that answer late are left out."""
        answers: queue.SimpleQueue[tuple[Replica, Look | SymbiosisError]] = queue.SimpleQueue()

        def ask(replica: Replica) -> None:
            try:
                answers.put((replica, replica.transport.look(replica.address)))
            except (SymbiosisError, OSError) as error:
                answers.put((replica, _symbiosis(replica, error)))

        for replica in self._replicas:
            threading.Thread(target=ask, args=(replica,), daemon=True).start()
        found: dict[Replica, Look | SymbiosisError] = {}
        until: float | None = None
        while len(found) < len(self._replicas):
            try:
                replica, answer = answers.get(timeout=None if until is None else max(until - time.monotonic(), 0))
            except queue.Empty:
                break
            found[replica] = answer
            if isinstance(answer, Look) and not wait_for_all and until is None:
                until = time.monotonic() + PATIENCE_S
        silent = {
            replica: ConnectionLostError(f"no executor answers on {replica.address} in time")
            for replica in self._replicas
            if replica not in found
        }
        found |= silent
        self._looked = time.monotonic()
        self.loads = {replica: _load(look) for replica, look in found.items() if isinstance(look, Look)}
        return {replica: found[replica] for replica in self._replicas}

    def look_again(self) -> None:
        """Look at all replicas on another thread, unless that was done a short time ago."""
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._looked = time.monotonic()
            threading.Thread(target=self.looks, daemon=True).start()


class Choice:
    """The replica of one client.

    Args:
        replicas: all of them.
        chance: returns a number from 0 to 1.
    """

    def __init__(self, replicas: Replicas, chance: Callable[[], float] = random.random) -> None:
        self._replicas = replicas
        self._chance = chance
        self._replica: Replica | None = None
        self._fingerprint: str | None = None
        self._device: torch.device | None = None
        self._judged: Mapping[Replica, float] = {}
        self._checks: list[Check] = []

    def candidates(self) -> list[Replica]:
        """Return the replicas to join, the best one first and those that did not answer last. Blocks.

        Raises:
            RefusedError: replicas serve different models, or all of them another model than before.
            UsageError: an address cannot be used in this way.
        """
        looks = self._replicas.looks()
        seen = {replica: look for replica, look in looks.items() if isinstance(look, Look)}
        if self._fingerprint is None:
            for error in looks.values():
                if isinstance(error, UsageError):
                    raise error
            _same_model(seen)
        else:
            same = {replica: look for replica, look in seen.items() if _fingerprint(look) == self._fingerprint}
            if len(same) < len(seen):
                others = ", ".join(replica.address for replica in seen if replica not in same)
                if not same and len(seen) == len(looks):
                    raise RefusedError(f"{others} came back with another model; open a new client")
                log.warning("a replica has another model", addresses=others)
                looks = {replica: look for replica, look in looks.items() if replica in same or replica not in seen}
            seen = same
        return [*ranked({replica: _load(look) for replica, look in seen.items()}), *(r for r in looks if r not in seen)]

    def take(self, replica: Replica, connection: C) -> C:
        """Note that the client has joined a replica.

        Raises:
            RefusedError: its connection cannot replace the former one.
            SymbiosisError: a check failed. In both cases the connection is closed.
        """
        try:
            fingerprint, device = connection.welcome.fingerprint, connection.carrier.device
            if self._fingerprint not in (None, fingerprint):
                raise RefusedError(f"{replica.address} came back with another model; open a new client")
            if self._device not in (None, device):
                raise RefusedError(f"{replica.address} takes tensors on {device}, not on {self._device}")
            for check in self._checks:
                check(connection.welcome.identity)
        except SymbiosisError:
            connection.close()
            raise
        self._replica, self._fingerprint, self._device = replica, fingerprint, device
        return connection

    def before_return(self, check: Check) -> None:
        """Register a check of each replica that is joined from now on; one that fails it is passed over."""
        self._checks.append(check)

    def better(self) -> bool:
        """Return whether the client should join again, because its replica is crowded and another one is not.

        Each look at the replicas is judged once. If all clients of a crowded replica went, it would be empty: each
        goes with a probability that leaves half of the difference behind.
        """
        self._replicas.look_again()
        loads = self._replicas.loads
        if loads is self._judged or self._replica is None:
            return False
        self._judged = loads
        here = loads.get(self._replica, 0.0)
        there = min(loads.values(), default=1.0)
        return here >= CROWDED > there and self._chance() < (here - there) / (2 * here)


def ranked(loads: Mapping[Replica, float]) -> list[Replica]:
    """Return replicas in the order in which a client prefers them: the busiest one that is not crowded, then the others
    that are not, then the least crowded."""
    room = [replica for replica, load in loads.items() if load < CROWDED]
    crowded = [replica for replica, load in loads.items() if load >= CROWDED]
    return sorted(room, key=lambda replica: -loads[replica]) + sorted(crowded, key=lambda replica: loads[replica])


def _load(look: Look) -> float:
    load = look.status.get("load")
    return min(max(load, 0.0), 1.0) if isinstance(load, float) else 0.0


def _fingerprint(look: Look) -> object:
    return look.model.get("fingerprint")


def _same_model(seen: Mapping[Replica, Look]) -> None:
    """Raise RefusedError if executors serve different models."""
    answers = list(seen.items())
    for replica, look in answers[1:]:
        first, shown = answers[0]
        if _fingerprint(look) != _fingerprint(shown):
            raise RefusedError(
                f"{first.address} and {replica.address} serve different models: {_difference(shown.model, look.model)}"
            )


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return in words in what two descriptions of shares differ."""
    named = [model.get("name") for model in (one, other)]
    for entry in ("architecture", "config", "dtype", "layers", "layer_weights"):
        if one.get(entry) != other.get(entry):
            found = f"{entry.replace('_', ' ')} differ"
            break
    else:
        found = "embeddings, norms or settings differ"
    return f"{found} ({named[0]}, {named[1]})"[:300]


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
