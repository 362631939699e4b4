"""Which replica a client joins, and when it joins another one. Decision 0038 has the reasons."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from symbiosis.core.share import Share
from symbiosis.core.transport import Check, Look
from symbiosis.errors import ConnectionLostError, RefusedError, SymbiosisError
from symbiosis.transports.addresses import Addresses, Looks, Replica, fingerprint_in, together
from symbiosis.transports.connection import AsyncConnection, BlockingConnection
from symbiosis.transports.conversation import MAY_RETURN, run_checks
from symbiosis.transports.limits import Limits
from symbiosis.transports.model_parts import checked

CROWDED = 0.5
"""Load from which on a replica has no room for more clients."""
AVOID_S, LONGEST_AVOID_S = 60.0, 3600.0
"""Seconds for which a client prefers other replicas to one that it has lost or could not join; four times as many after
each further failure, up to the second number."""
_NEVER = 0.0, 0.0

C = TypeVar("C", AsyncConnection, BlockingConnection)


class Choice:
    """The replica of one client.

    Args:
        addresses: of all replicas, and of executors of other parts of the model.
        fingerprint: of the model, or of this part of it.
        looks: what was seen before the first choice.
        has_share: whether the client has its share of the model from another executor.
        parts: fingerprints of all parts of the model, if it is divided.
        chance: returns a number from 0 to 1.
        now: returns the time in seconds.
    """

    def __init__(
        self,
        addresses: Addresses,
        fingerprint: str,
        looks: Looks,
        has_share: bool = False,
        parts: Collection[str] = (),
        chance: Callable[[], float] = random.random,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses = addresses
        self._fingerprint = fingerprint
        self._looks: Looks | None = looks
        self.has_share = has_share
        self._parts = parts
        self._chance = chance
        self._replica: Replica | None = None
        self._device: torch.device | None = None
        self._limits: Limits | None = None
        self._smaller: list[tuple[Replica, Limits]] = []
        """The replicas that were passed over in this attempt because of their limits."""
        self._accepted: Replica | None = None
        """The one of them that is joined all the same."""
        self._judged: Looks = {}
        self._checks: list[Check] = []
        self._now = now
        self._taken = 0.0
        """When the replica was joined."""
        self._moves = False
        """Whether the client leaves a replica that works."""
        self._failures: dict[Replica, tuple[float, float]] = {}
        """For each replica that has failed: for how many seconds others are preferred, and the time at which that
        ends."""

    def candidates(self) -> list[Replica]:
        """Return the replicas to join: preferred ones first, then those that were lost recently, then those that did
        not answer. Blocks.

        Raises:
            RefusedError: all of them serve another model than before.
            ConnectionLostError: all of them serve other parts of the model. A list of addresses leaves out an executor
                that is starting again.
            SymbiosisError: no replica of this model answers. Silent ones are not tried then: look again later, as
                another replica may return during an attempt.
        """
        if self._replica is not None and not self._moves:
            self.failed(self._replica)
        self._replica, self._moves, self._smaller, self._accepted = None, False, [], None
        looks, self._looks = self._looks or self._addresses.looks(), None
        silent = {replica: look for replica, look in looks.items() if not isinstance(look, Look)}
        if found := ranked(self._loads(looks)):
            return [*sorted(found, key=self._avoided), *silent]
        others = ", ".join(
            replica.address
            for replica, look in looks.items()
            if isinstance(look, Look) and fingerprint_in(look) not in self._parts
        )
        other = [RefusedError(f"{others} came back with another model; open a new client")] if others else []
        lost = ConnectionLostError("the addresses have no executor of this part of the model")
        raise together([*other, *silent.values()] or [lost])

    def with_smaller_limits(self, errors: Sequence[SymbiosisError]) -> Iterator[Replica]:
        """Yield one replica to join after all candidates have failed with these errors: that with the largest limits of
        those that were passed over because of them, if no other one may return. Its limits replace those of the
        executor that was joined first."""
        if self._smaller and not any(isinstance(error, MAY_RETURN) for error in errors):
            self._accepted, _ = max(self._smaller, key=lambda found: (found[1].rows, found[1].arena_bytes))
            yield self._accepted

    def _loads(self, looks: Looks) -> dict[Replica, float]:
        """Return the load of each executor of this model, or of this part of it."""
        return {
            replica: _load(look)
            for replica, look in looks.items()
            if isinstance(look, Look) and fingerprint_in(look) == self._fingerprint
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
            least = limits if self._limits is None or replica is self._accepted else self._limits
            if limits.rows < least.rows or limits.arena_bytes < least.arena_bytes:
                self._smaller.append((replica, limits))
                raise RefusedError(f"{replica.address} allows smaller calls than the executor that was joined first")
            run_checks(self._checks, connection.welcome.identity)
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

    def leave(self) -> None:
        """Note that the client ends its connection, and has not lost the replica."""
        self._moves = True

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
        self._addresses.look_again()
        seen = self._addresses.seen
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


def _load(look: Look) -> float:
    load = look.status.get("load")
    return min(load, 1.0) if isinstance(load, float) and load >= 0 else 0.0
