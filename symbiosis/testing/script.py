"""Random scripts of the conformance kit for policies: all events of a scheduler, in any order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch
from symbiosis.core.terms import JOINT, Kind, Terms
from symbiosis.testing.world import World


class Size(NamedTuple):
    """Size of a simulated system."""

    layers: int
    max_rows: int
    clients: int
    most_rows: int
    """Largest number of rows in a request; more than in a batch, so that requests are cut."""


TENANTS = 2
"""Number of tenants, whose clients are named ``tenant-0/…`` and ``tenant-1/…``."""
Joining = tuple[Terms, bool]
"""Terms that a client asks for, and whether it is local."""
ANY_TERMS = st.tuples(
    st.builds(
        Terms,
        priority=st.integers(-2, 2),
        slo_ms=st.sampled_from([None, 1.0, 50.0, 1e4]),
        ttft_ms=st.sampled_from([None, 10.0, 1e5]),
        kind=st.none() | st.sampled_from(Kind),
    ),
    st.booleans(),
)
_NUMBERS = st.integers(0, 63)


class AnyScript(RuleBasedStateMachine):
    """A script on a system of one size. It ends when all queues have drained, after waits of ``patience_s`` at most."""

    def __init__(self, make_policy: Callable[[], Policy], size: Size, patience_s: float) -> None:
        super().__init__()
        self.world = World(make_policy(), layers=size.layers, max_rows=size.max_rows)
        self.until: float | None = None
        self._size = size
        self._patience_s = patience_s

    @initialize(seconds=st.sampled_from([None, 1e-6]))
    def unloaded(self, seconds: float | None) -> None:
        if seconds is not None:
            self.world.unloaded(seconds)

    def _name(self, number: int) -> str:
        number %= self._size.clients
        return f"tenant-{number % TENANTS}/client-{number}"

    @rule(number=_NUMBERS, in_walk=st.booleans(), terms=ANY_TERMS)
    def join_or_leave(self, number: int, in_walk: bool, terms: Joining) -> None:
        client = self._name(number)
        if client in self.world.clients:
            self.world.leave(client)
        else:
            self.world.join(client, terms[0], local=terms[1])
            if in_walk:
                self.world.begin_walk(client)

    @rule(number=_NUMBERS)
    def begin_or_end_walk(self, number: int) -> None:
        client = self._name(number)
        if client in self.world.clients:
            (self.world.end_walk if self.world.clients[client] else self.world.begin_walk)(client)

    @precondition(lambda self: self._tenants())
    @rule(
        number=_NUMBERS,
        key=_NUMBERS,
        rows=st.integers(1, 4) | st.integers(1, 200),
        kind=st.sampled_from(Kind),
        times=st.integers(1, 3),
        offered=st.booleans(),
    )
    def submit(self, number: int, key: int, rows: int, kind: Kind, times: int, offered: bool) -> None:
        clients = self._tenants()
        client = clients[number % len(clients)]
        submit = self.world.offer if offered else self.world.submit
        for _ in range(times):
            submit(client, self.world.keys[key % len(self.world.keys)], 1 + (rows - 1) % self._size.most_rows, kind)

    def _tenants(self) -> list[str]:
        return [client for client in self.world.clients if client != JOINT]

    def _local(self) -> list[str]:
        return [client for client in self._tenants() if client in self.world.local]

    def _walks_jointly(self) -> bool:
        return any(request.client == JOINT for request in self.world.waiting.values())

    @precondition(lambda self: len(self._local()) > 1 and not self._walks_jointly())
    @rule(first=_NUMBERS, count=st.integers(2, 8), key=_NUMBERS)
    def submit_jointly(self, first: int, count: int, key: int) -> None:
        """Submit a request of a joint walk of local clients, of which one has two rows and the others one each. A joint
        walk has one request at a time."""
        if JOINT not in self.world.clients:
            self.world.join(JOINT, local=True)
        local = self._local()
        first %= len(local)
        together = [local[first], *(local[first:] + local[:first])[:count]]
        self.world.submit(JOINT, self.world.keys[key % len(self.world.keys)], len(together), joint=together)

    @precondition(lambda self: self.world.waiting)
    @rule(number=_NUMBERS)
    def cancel(self, number: int) -> None:
        waiting = list(self.world.waiting.values())
        self.world.cancel(waiting[number % len(waiting)])

    @rule(times=st.integers(1, 4))
    def decide(self, times: int) -> None:
        for _ in range(times):
            action = self.world.decide()
            if not isinstance(action, Batch):
                self.until = action.time if action.time < math.inf else None
                break

    @precondition(lambda self: self.world.running)
    @rule(number=_NUMBERS, seconds=st.sampled_from([None, None, 1e-3, 0.0, -1.0, math.nan, math.inf, 1e9]))
    def complete(self, number: int, seconds: float | None) -> None:
        self.world.complete(self.world.running[number % len(self.world.running)], seconds)

    @rule(seconds=st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 10.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @precondition(lambda self: self.until is not None and self.until > self.world.clock.now)
    @rule()
    def wait_as_told(self) -> None:
        assert self.until is not None
        self.world.clock.advance(self.until - self.world.clock.now)
        self.decide(1)

    @invariant()
    def books_agree(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.drain(self._patience_s)
