"""The conformance kit for batching policies. The author of a policy subclasses it::

    from symbiosis.testing import PolicyConformance

    class TestMine(PolicyConformance):
        def make_policy(self):
            return Mine()

pytest then runs Hypothesis scripts against the scheduler. Clients of several tenants join with terms of all kinds,
walk, submit rows of all kinds, decode jointly, cancel and leave in any order; several batches run at once; the clock
advances in steps. A script that fails is shrunk and printed as code.

The properties are tested on a tiny system (2 layers, batches of 8 rows), where errors show in short scripts, and on a
wider one:

* **Each row runs once**: all rows of each request run exactly once, in order, unless the request is cancelled.
* **Batches are valid**: one key, 1 to ``max_rows`` rows, first in first out for each client and key.
* **Waits end**: a wait has no limit only while a client is thinking. If that client never sends a request, a wait with
  a limit ends at most :attr:`patience_s` after the arrival of the oldest request, and does not consist of many waits.
* **The queues drain**: without new requests, all requests run, after waits of at most :attr:`patience_s` per batch.
* **No request starves**: see :meth:`PolicyConformance.test_no_request_starves_tiny`.
* **No decision is refused**, even if the policy is told of impossible latencies.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from symbiosis.core.clients import STOPPED_S
from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Request
from symbiosis.core.scheduler import HELD_S, WaitUntil
from symbiosis.core.terms import JOINT, NO_TERMS, Kind
from symbiosis.testing.script import ANY_TERMS, TENANTS, AnyScript, Joining, Size
from symbiosis.testing.world import World

_TINY = Size(layers=2, max_rows=8, clients=3, most_rows=20)
_WIDE = Size(layers=12, max_rows=64, clients=8, most_rows=200)


class PolicyConformance(ABC):
    """Base class of a policy's conformance tests. A subclass implements :meth:`make_policy`, and pytest collects it.

    A policy that waits for longer on purpose raises the bounds; a policy that promises more lowers them.
    """

    max_examples = 100
    """Number of scripts for each test."""
    steps = 50
    """Largest number of steps in a script."""
    patience_s = 1.0
    """Longest wait, in seconds, that the policy may impose on a request, or on the executor while no client thinks. A
    wait without a limit does not count: the scheduler ends it when the thinking clients have stopped."""

    def patience_batches(self, layers: int) -> int:
        """Return how many batches may run before a request that arrived earlier.

        The default is two walks through the model, as in lockstep, and two more: the batch that was being decided when
        the request arrived, and the batch in which the policy notices that the request is overdue.
        """
        return 2 * layers + 2

    @abstractmethod
    def make_policy(self) -> Policy:
        """Return a new policy."""

    def test_is_a_policy(self) -> None:
        policy = self.make_policy()
        assert isinstance(policy, Policy), f"{policy!r} is not an instance of a subclass of Policy"
        assert isinstance(policy.name, str), f"the name of {policy!r} is {policy.name!r}"
        assert policy.name, f"{policy!r} has an empty name"
        assert self.make_policy() is not policy, "make_policy must make a new policy each time"

    def test_any_script_tiny(self) -> None:
        """Run random scripts with 2 layers, 3 clients and batches of 8 rows."""
        self._run_machine(_TINY)

    def test_any_script_wide(self) -> None:
        """Run random scripts with 12 layers, 8 clients and batches of 64 rows."""
        self._run_machine(_WIDE)

    def test_no_request_starves_tiny(self) -> None:
        """Check that a request is served although all other clients submit again the moment they are answered.

        It may wait for :attr:`patience_s` seconds and for :meth:`patience_batches` batches, whichever is later. After
        that, the requests that are queued at that moment may run first. Before the request is answered, fewer batches
        may have rows of later requests than it takes to serve each of those requests alone.
        """
        self._starve(_TINY)

    def test_no_request_starves_wide(self) -> None:
        """Check the same with 12 layers, 8 clients and batches of 64 rows."""
        self._starve(_WIDE)

    def test_no_walk_is_held_up(self) -> None:
        """Check that clients which send one row of layer 0 now and then, and are thinking in between, do not delay each
        request of another client's walk anew.

        In all, the executor may wait for :attr:`patience_s` while a request of the walk is queued. If the policy waits
        without a limit, it may also wait for a second until one of them is passed over, and for another second after
        that.
        """

        @settings(max_examples=max(self.max_examples // 4, 1), deadline=None)
        @given(
            kinds=st.tuples(st.sampled_from(Kind), st.sampled_from(Kind)),
            rivals=st.integers(1, 3),
            terms=st.lists(ANY_TERMS, min_size=1, max_size=3),
            every_s=st.sampled_from([0.05, 0.9]),
        )
        def game(kinds: tuple[Kind, Kind], rivals: int, terms: Sequence[Joining], every_s: float) -> None:
            world = World(self.make_policy(), layers=8, max_rows=8)
            _hold_up(world, self, kinds, rivals, terms, every_s)

        game()

    def test_waits_end_tiny(self) -> None:
        """Check that waits end if a client is thinking and never sends a request."""
        self._wait(_TINY)

    def test_waits_end_wide(self) -> None:
        """Check the same with 12 layers and batches of 64 rows."""
        self._wait(_WIDE)

    def test_one_client_alone(self) -> None:
        """Check that a client alone, which walks forward and back, never waits for more than :attr:`patience_s`."""
        world = World(self.make_policy(), layers=4, max_rows=8)
        world.join("alone")
        for rows in (1, 8, 20):
            world.begin_walk("alone")
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
            world.end_walk("alone")

    def _run_machine(self, size: Size) -> None:
        machine: Any = partial(AnyScript, self.make_policy, size, self.patience_s)
        limits = settings(max_examples=self.max_examples, stateful_step_count=self.steps, deadline=None)
        run_state_machine_as_test(machine, settings=limits)

    def _wait(self, size: Size) -> None:
        work = st.tuples(st.integers(0, 2 * size.layers), st.integers(1, size.most_rows), st.sampled_from(Kind))

        @settings(max_examples=self.max_examples, deadline=None)
        @given(
            works=st.lists(st.tuples(work, st.sampled_from([0.0, 1e-4, 1e-2])), min_size=1, max_size=20),
            terms=st.lists(ANY_TERMS, min_size=1, max_size=3),
            before=_withdrawals(size),
        )
        def game(works: Sequence[tuple[_Work, float]], terms: Sequence[Joining], before: Sequence[_Withdrawal]) -> None:
            world = World(self.make_policy(), layers=size.layers, max_rows=size.max_rows)
            _await(world, works, terms, before, self.patience_s)

        game()

    def _starve(self, size: Size) -> None:
        work = st.tuples(st.integers(0, 2 * size.layers), st.integers(1, size.most_rows), st.sampled_from(Kind))

        @settings(max_examples=self.max_examples, deadline=None)
        @given(
            victim=work,
            others=st.lists(work, min_size=1, max_size=6),
            rivals=st.integers(1, size.clients),
            joint=st.sampled_from([0, 2, 3]),
            victim_is_joint=st.booleans(),
            terms=st.lists(ANY_TERMS, min_size=1, max_size=3),
            before=_withdrawals(size),
            batches_in_patience=st.sampled_from([20, 100]),
        )
        def game(
            victim: _Work,
            others: Sequence[_Work],
            rivals: int,
            joint: int,
            victim_is_joint: bool,
            terms: Sequence[Joining],
            before: Sequence[_Withdrawal],
            batches_in_patience: int,
        ) -> None:
            world = World(self.make_policy(), layers=size.layers, max_rows=size.max_rows)
            batch_s = self.patience_s / batches_in_patience
            _play(world, self, victim, others, rivals, joint, victim_is_joint, terms, before, batch_s)

        game()


_Work = tuple[int, int, Kind]
"""Index of a key, number of rows, and their kind."""
_Withdrawal = tuple[int, int, str]
"""Numbers of a client and of a key, and how the client withdraws a row for this key."""


def _withdrawals(size: Size) -> st.SearchStrategy[list[_Withdrawal]]:
    how = st.sampled_from(["cancels", "cancels after a decision", "leaves"])
    return st.lists(st.tuples(st.integers(0, 63), st.integers(0, 2 * size.layers), how), max_size=3)


def _withdraw(
    world: World,
    before: Sequence[_Withdrawal],
    clients: Mapping[str, Joining],
    submit: Callable[[str, _Work], Request],
) -> None:
    """Let clients, which are in a walk, submit and withdraw requests before a game. Clients that leave join again."""
    names = list(clients)
    for number, key, how in before:
        name = names[number % len(names)]
        request = submit(name, (key, 1, Kind.DECODE))
        if how == "leaves":
            world.leave(name)
            world.join(name, clients[name][0], local=clients[name][1])
            world.begin_walk(name)
            continue
        action = world.decide() if how == "cancels after a decision" else None
        if isinstance(action, Batch):
            world.clock.advance(_BATCH_S)
            world.complete(action)
        world.cancel(request)


def _play(
    world: World,
    kit: PolicyConformance,
    victim: _Work,
    others: Sequence[_Work],
    rivals: int,
    joint: int,
    victim_is_joint: bool,
    terms: Sequence[Joining],
    before: Sequence[_Withdrawal],
    batch_s: float,
) -> None:
    """Let rivals, and so many local clients that decode jointly, compete with one request, the victim, which may be the
    one of the joint walk. The clients have the given terms in turn, the victim first."""
    script = itertools.cycle(others)
    names = [f"tenant-{number % TENANTS}/rival-{number}" for number in range(rivals)]
    terms_of = dict(zip(["victim", *names], itertools.cycle(terms), strict=False))
    together = tuple(f"tenant-{number % TENANTS}/joint-{number}" for number in range(joint))

    def submit(client: str, work: _Work) -> Request:
        if client == JOINT:
            return world.submit(client, world.keys[work[0]], joint, joint=together)
        return world.submit(client, world.keys[work[0]], work[1], work[2])

    for name in together:
        world.join(name, local=True)
    waits = "victim"
    if together:
        terms_of[JOINT] = NO_TERMS, True
        if victim_is_joint:
            del terms_of[waits]
            waits = JOINT
        else:
            names.append(JOINT)
    for name, (asked, local) in terms_of.items():
        world.join(name, asked, local=local)
        world.begin_walk(name)
    _withdraw(world, before, terms_of, submit)
    for name in names[: len(names) // 2]:
        submit(name, next(script))
    request = submit(waits, victim)
    for name in names[len(names) // 2 :]:
        submit(name, next(script))
    arrived, first = world.clock.now, world.batches
    allowed, latest = math.inf, math.inf
    while request.id in world.waiting:
        overdue = world.clock.now - arrived >= kit.patience_s and (
            world.batches - first >= kit.patience_batches(world.scheduler.layers)
        )
        if allowed == math.inf and overdue:
            allowed = sum(math.ceil(queued.remaining / world.scheduler.max_rows) for queued in world.queued)
            latest = world.queued[-1].id
        assert allowed > 0, (
            f"{world.policy!r} starves a request: {world.batches - first} batches and {world.clock.now - arrived:.2f} s"
            f" have passed, and newer requests still run before it"
        )
        action = world.decide()
        if isinstance(action, Batch):
            allowed -= any(piece.request.id > latest for piece in action.slices)
            world.clock.advance(batch_s)
            for answered in world.complete(action):
                if answered is not request:
                    submit(answered.client, next(script))
        else:
            assert isinstance(action, WaitUntil)
            assert action.time < math.inf, f"{world.policy!r} waits for ever although all clients are blocked"
            world.clock.advance(action.time - world.clock.now)
            assert world.clock.now - arrived < 10 * kit.patience_s, f"{world.policy!r} only waits"


def _hold_up(
    world: World,
    kit: PolicyConformance,
    kinds: tuple[Kind, Kind],
    rivals: int,
    terms: Sequence[Joining],
    every_s: float,
) -> None:
    """Let rivals send a row of layer 0 each ``every_s`` seconds while another client, the victim, walks the later
    layers. The clients have the given terms in turn, the victim first."""
    names = [f"tenant-{number % TENANTS}/rival-{number}" for number in range(rivals)]
    for name, (asked, local) in zip(["victim", *names], itertools.cycle(terms), strict=False):
        world.join(name, asked, local=local)
        world.begin_walk(name)
    due = {name: world.clock.now + every_s * number / rivals for number, name in enumerate(names)}
    keys = [key for key in world.keys if not key.pass_.is_backward and key.layers[0]]
    waited, waits = 0.0, 0
    for key in keys:
        request = world.submit("victim", key, 1, kinds[0])
        while request.id in world.waiting:
            blocked = {queued.client for queued in world.waiting.values()}
            idle = [name for name in names if name not in blocked]
            for name in idle:
                if due[name] <= world.clock.now:
                    world.submit(name, world.keys[0], 1, kinds[1])
                    due[name] = world.clock.now + every_s
            action = world.decide()
            if isinstance(action, Batch):
                world.clock.advance(_BATCH_S)
                world.complete(action)
                continue
            assert isinstance(action, WaitUntil)
            until = min([action.time, *(due[name] for name in idle if due[name] > world.clock.now)])
            waited, waits = waited + until - world.clock.now, waits + 1
            world.clock.advance(until - world.clock.now)
            assert waited <= kit.patience_s + STOPPED_S + HELD_S, (
                f"{world.policy!r} lets a walk of {len(keys)} requests wait for {waited:.2f} s, for clients that send "
                f"a row each {every_s:g} s"
            )
            assert waits <= len(keys) * _WAITS, f"{world.policy!r} waits {waits} times in {waited:.3f} s"


_BATCH_S = 1e-3
_WAITS = 100
"""Largest number of waits in a row without an event in between, however long they last: more than that is polling."""


def _await(
    world: World,
    works: Sequence[tuple[_Work, float]],
    terms: Sequence[Joining],
    before: Sequence[_Withdrawal],
    patience_s: float,
) -> None:
    """Submit each work so many seconds after the previous one, or after the running batch, by a client of its own."""
    thinker = "tenant-0/thinker"
    world.join(thinker)
    world.begin_walk(thinker)
    _withdraw(
        world,
        before,
        {thinker: (NO_TERMS, False)},
        lambda client, work: world.submit(client, world.keys[work[0]], work[1], work[2]),
    )
    coming, due = list(reversed(works)), world.clock.now + works[0][1]
    waits = 0
    while coming or world.waiting:
        while coming and due <= world.clock.now:
            (key, rows, kind), _ = coming.pop()
            name = f"tenant-{len(coming) % TENANTS}/client-{len(coming)}"
            asked, local = terms[len(coming) % len(terms)]
            world.join(name, asked, local=local)
            world.submit(name, world.keys[key], rows, kind)
            waits = 0
            if coming:
                due += coming[-1][1]
        action = world.decide()
        if isinstance(action, Batch):
            world.clock.advance(_BATCH_S)
            world.complete(action)
            waits = 0
            continue
        until = due if coming else math.inf
        if action.time < math.inf:
            late = min(request.arrived for request in world.queued) + patience_s
            assert action.time <= max(late, world.clock.now) + 1e-9, (
                f"{world.policy!r} lets a request wait for more than {patience_s:g} s: at {world.clock.now:g} s until "
                f"{action.time:g} s, for a client that sends no request"
            )
            waits += 1
            assert waits <= _WAITS, f"{world.policy!r} waits {waits} times in a row without an event in between"
            until = min(action.time, until)
        world.clock.advance(max(until - world.clock.now, 0.0))
