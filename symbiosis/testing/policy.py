"""The conformance kit for batching policies. The author of a policy tests it in three lines::

    from symbiosis.testing import PolicyConformance

    class TestMine(PolicyConformance):
        def make_policy(self):
            return Mine()

pytest then runs Hypothesis scripts against the real scheduler: clients of several tenants join, on terms of all sorts,
walk, submit rows of all kinds, cancel and leave in any order, several batches run at once, the clock goes on in steps.
A script that fails is shrunk and printed as code.

What is tested, on a tiny system (2 layers, batches of 8 rows), where bugs show soonest, and on a wide one:

* **nothing lost, nothing twice**: every row of every request is served exactly once, in order, unless it is cancelled;
* **rules of a batch**: one key, 1 to ``max_rows`` rows, first in first out for each client and key;
* **waits end**: a wait without limit only while somebody is thinking; while somebody is who never comes, one with a
  limit for no longer than :attr:`patience_s` after the oldest request came, and not by asking again all the time;
* **it drains**: when nobody submits any more, everything is served, after waits of at most :attr:`patience_s` a batch;
* **nobody starves**: see :meth:`PolicyConformance.test_nobody_starves`;
* **no refusals**: the scheduler had no reason to refuse a decision, however strange the times that it was told of.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Request
from symbiosis.core.scheduler import WaitUntil
from symbiosis.core.terms import Kind, Terms
from symbiosis.testing.world import World

__all__ = ["PolicyConformance"]


class _Size(NamedTuple):
    layers: int
    max_rows: int
    clients: int
    most_rows: int
    """Of one request: more than a batch may have, so that requests are cut."""


_ANY_WISHES = st.builds(
    Terms,
    priority=st.integers(-2, 2),
    slo_ms=st.sampled_from([None, 1.0, 50.0, 1e4]),
    ttft_ms=st.sampled_from([None, 10.0, 1e5]),
    kind=st.none() | st.sampled_from(Kind),
)
_Joining = tuple[Terms, bool]
"""What a client asks for, and whether it is local."""
_ANY_TERMS = st.tuples(_ANY_WISHES, st.booleans())
_TENANTS = 2
"""Whose clients take part: ``tenant-0/…``, ``tenant-1/…``"""
_TINY = _Size(layers=2, max_rows=8, clients=3, most_rows=20)
_WIDE = _Size(layers=12, max_rows=64, clients=8, most_rows=200)


class PolicyConformance(ABC):
    """Inherit from it, say how to make the policy, and let pytest collect the class.

    A policy that is patient on purpose raises the bounds; one that promises more lowers them.
    """

    max_examples = 100
    """Scripts per test."""
    steps = 50
    """Most steps in a script."""
    patience_s = 1.0
    """Longest wait, in seconds, that the policy may impose on a request, or on the executor while nobody thinks. A wait
    without limit is not counted: the executor ends it, after a second in which whoever thinks asks for nothing."""

    def patience_batches(self, layers: int) -> int:
        """How many batches may go before a request that came earlier: two walks of the model (as in lockstep), plus the
        batch that was being decided when the request came and the one in which the policy notices."""
        return 2 * layers + 2

    @abstractmethod
    def make_policy(self) -> Policy:
        """A fresh policy, as for a new executor."""

    # ----------------------------------------------------------------------------------------------------------- tests

    def test_is_a_policy(self) -> None:
        policy = self.make_policy()
        assert isinstance(policy, Policy), f"{policy!r} needs a name, submitted() and decide()"
        assert isinstance(policy.name, str), f"the name of {policy!r} is {policy.name!r}"
        assert policy.name, f"{policy!r} has an empty name"
        assert self.make_policy() is not policy, "make_policy must make a new policy each time"

    def test_any_script_tiny(self) -> None:
        """Random scripts, 2 layers, batches of 8 rows."""
        self._run_machine(_TINY)

    def test_any_script_wide(self) -> None:
        """Random scripts, 12 layers, batches of 64 rows, 8 clients."""
        self._run_machine(_WIDE)

    def test_nobody_starves_tiny(self) -> None:
        self._starve(_TINY)

    def test_nobody_starves_wide(self) -> None:
        self._starve(_WIDE)

    def test_waits_end_tiny(self) -> None:
        self._wait(_TINY)

    def test_waits_end_wide(self) -> None:
        self._wait(_WIDE)

    def test_one_client_alone(self) -> None:
        """One client walks the model forward and back, thinking between layers; nothing makes it wait for long."""
        world = World(self.make_policy(), layers=4, max_rows=8)
        world.join("alone")
        for rows in (1, 8, 20):
            world.begin_pass("alone")
            for key in world.keys:
                request = world.submit("alone", key, rows)
                deadline = world.clock.now + self.patience_s
                while request.id in world.waiting:
                    action = world.decide()
                    if isinstance(action, Batch):
                        world.complete(action)
                    else:
                        assert isinstance(action, WaitUntil)
                        assert action.time <= deadline, (
                            f"{world.policy!r} lets the only client wait until {action.time}"
                        )
                        world.clock.advance(action.time - world.clock.now)
            world.end_pass("alone")

    # ----------------------------------------------------------------------------------------------------------- parts

    def _run_machine(self, size: _Size) -> None:
        machine = _machine(self.make_policy, size, self.patience_s)
        run_state_machine_as_test(
            machine, settings=settings(max_examples=self.max_examples, stateful_step_count=self.steps, deadline=None)
        )

    def _wait(self, size: _Size) -> None:
        """Requests that come one after another, while a client thinks and asks for nothing."""
        work = st.tuples(st.integers(0, 2 * size.layers), st.integers(1, size.most_rows), st.sampled_from(Kind))

        @settings(max_examples=self.max_examples, deadline=None)
        @given(
            works=st.lists(st.tuples(work, st.sampled_from([0.0, 1e-4, 1e-2])), min_size=1, max_size=20),
            terms=st.lists(_ANY_TERMS, min_size=1, max_size=3),
        )
        def game(works: Sequence[tuple[_Work, float]], terms: Sequence[_Joining]) -> None:
            world = World(self.make_policy(), layers=size.layers, max_rows=size.max_rows)
            _await(world, works, terms, self.patience_s)

        game()

    def _starve(self, size: _Size) -> None:
        """One request waits while all other clients submit again the moment they are answered, whatever they like.

        It may wait for :attr:`patience_s` seconds and for :meth:`patience_batches` batches, whichever is later. From
        then on, what was queued at that moment may go first, but nothing that came later: so it must be answered within
        as many batches as it takes to serve all that, each request by itself.
        """
        keys = st.integers(0, 2 * size.layers)
        work = st.tuples(keys, st.integers(1, size.most_rows), st.sampled_from(Kind))

        @settings(max_examples=self.max_examples, deadline=None)
        @given(
            victim=work,
            others=st.lists(work, min_size=1, max_size=6),
            rivals=st.integers(1, size.clients),
            terms=st.lists(_ANY_TERMS, min_size=1, max_size=3),
            batches_in_patience=st.sampled_from([20, 100]),
        )
        def game(
            victim: _Work, others: Sequence[_Work], rivals: int, terms: Sequence[_Joining], batches_in_patience: int
        ) -> None:
            world = World(self.make_policy(), layers=size.layers, max_rows=size.max_rows)
            _play(world, self, victim, others, rivals, terms, self.patience_s / batches_in_patience)

        game()


_Work = tuple[int, int, Kind]
"""Index of a key, number of rows, what they are for."""


def _play(
    world: World,
    kit: PolicyConformance,
    victim: _Work,
    others: Sequence[_Work],
    rivals: int,
    terms: Sequence[_Joining],
    batch_s: float,
) -> None:
    """The victim comes on the first of the terms, rivals on all of them in turn."""
    script = itertools.cycle(others)
    names = [f"tenant-{number % _TENANTS}/rival-{number}" for number in range(rivals)]
    terms_of = dict(zip(["victim", *names], itertools.cycle(terms), strict=False))

    def submit(client: str, work: _Work) -> Request:
        return world.submit(client, world.keys[work[0]], work[1], work[2])

    for name in [*names, "victim"]:
        world.join(name, terms_of[name][0], local=terms_of[name][1])
        world.begin_pass(name)
    for name in names[: rivals // 2]:
        submit(name, next(script))
    request = submit("victim", victim)
    for name in names[rivals // 2 :]:
        submit(name, next(script))
    arrived, first = world.clock.now, world.batches
    allowed = math.inf
    while request.id in world.waiting:
        overdue = world.clock.now - arrived >= kit.patience_s and (
            world.batches - first >= kit.patience_batches(world.scheduler.layers)
        )
        if allowed == math.inf and overdue:
            allowed = world.batches + sum(
                math.ceil(queued.remaining / world.scheduler.max_rows) for queued in world.queued
            )
        assert world.batches < allowed, (
            f"{world.policy!r} starves a request: {world.batches - first} batches and {world.clock.now - arrived:.2f} s"
            f" have gone by, and it is still passed over for newer ones"
        )
        action = world.decide()
        if isinstance(action, Batch):
            world.clock.advance(batch_s)
            for answered in world.complete(action):
                if answered is not request:
                    submit(answered.client, next(script))
        else:
            assert isinstance(action, WaitUntil)
            assert action.time < math.inf, f"{world.policy!r} waits for ever, though everybody is blocked"
            world.clock.advance(action.time - world.clock.now)
            assert world.clock.now - arrived < 10 * kit.patience_s, f"{world.policy!r} only waits"


_BATCH_S = 1e-3
_WAITS, _WAITS_A_SECOND = 100, 10_000
"""Without anything that happens in between: more is asking all the time."""


def _await(world: World, works: Sequence[tuple[_Work, float]], terms: Sequence[_Joining], patience_s: float) -> None:
    """Each work is submitted so many seconds after the one before it, by a client of its own, or later if a batch is
    running then."""
    thinker = "tenant-0/thinker"
    world.join(thinker)
    world.begin_pass(thinker)
    coming, due = list(reversed(works)), world.clock.now + works[0][1]
    waits, began = 0, world.clock.now
    while coming or world.waiting:
        while coming and due <= world.clock.now:
            (key, rows, kind), _ = coming.pop()
            name = f"tenant-{len(coming) % _TENANTS}/client-{len(coming)}"
            asked, local = terms[len(coming) % len(terms)]
            world.join(name, asked, local=local)
            world.submit(name, world.keys[key], rows, kind)
            waits, began = 0, world.clock.now
            if coming:
                due += coming[-1][1]
        action = world.decide()
        if isinstance(action, Batch):
            world.clock.advance(_BATCH_S)
            world.complete(action)
            waits, began = 0, world.clock.now
            continue
        until = due if coming else math.inf
        if isinstance(action, WaitUntil) and action.time < math.inf:
            late = min(request.arrived for request in world.queued) + patience_s
            assert action.time <= max(late, world.clock.now) + 1e-9, (
                f"{world.policy!r} lets a request wait for more than {patience_s:g} s: at {world.clock.now:g} s until "
                f"{action.time:g} s, for somebody who never comes"
            )
            waits += 1
            most = _WAITS + _WAITS_A_SECOND * (world.clock.now - began)
            assert waits <= most, f"{world.policy!r} waits again and again: {waits} times, and nothing has happened"
            until = min(action.time, until)
        world.clock.advance(max(until - world.clock.now, 0.0))


def _machine(make_policy: Callable[[], Policy], size: _Size, patience_s: float) -> type[RuleBasedStateMachine]:
    names = [f"tenant-{number % _TENANTS}/client-{number}" for number in range(size.clients)]
    clients = st.sampled_from(names)
    numbers = st.integers(0, 63)

    class AnyScript(RuleBasedStateMachine):
        """Anything that may happen to a scheduler, in any order."""

        def __init__(self) -> None:
            super().__init__()
            self.world = World(make_policy(), layers=size.layers, max_rows=size.max_rows)
            self.until: float | None = None

        @rule(client=clients, in_pass=st.booleans(), terms=_ANY_TERMS)
        def join_or_leave(self, client: str, in_pass: bool, terms: _Joining) -> None:
            if client in self.world.clients:
                self.world.leave(client)
            else:
                self.world.join(client, terms[0], local=terms[1])
                if in_pass:
                    self.world.begin_pass(client)

        @rule(client=clients)
        def begin_or_end_pass(self, client: str) -> None:
            if client in self.world.clients:
                (self.world.end_pass if self.world.clients[client] else self.world.begin_pass)(client)

        @precondition(lambda self: self.world.clients)
        @rule(
            number=numbers,
            key=st.integers(0, 2 * size.layers),
            rows=st.one_of(st.integers(1, 4), st.integers(1, size.most_rows)),
            kind=st.sampled_from(Kind),
            times=st.integers(1, 3),
            offered=st.booleans(),
        )
        def submit(self, number: int, key: int, rows: int, kind: Kind, times: int, offered: bool) -> None:
            client = list(self.world.clients)[number % len(self.world.clients)]
            for _ in range(times):
                (self.world.offer if offered else self.world.submit)(client, self.world.keys[key], rows, kind)

        @precondition(lambda self: self.world.waiting)
        @rule(number=numbers)
        def cancel(self, number: int) -> None:
            waiting = list(self.world.waiting.values())
            self.world.cancel(waiting[number % len(waiting)])

        @rule(times=st.integers(1, 4))
        def decide(self, times: int) -> None:
            for _ in range(times):
                action = self.world.decide()
                if not isinstance(action, Batch):
                    self.until = action.time if isinstance(action, WaitUntil) and action.time < math.inf else None
                    break

        @precondition(lambda self: self.world.running)
        @rule(number=numbers, seconds=st.sampled_from([None, None, 1e-3, 0.0, -1.0, math.nan, math.inf, 1e9]))
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
            self.world.drain(patience_s)

    return AnyScript
