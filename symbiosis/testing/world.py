"""A simulated executor: the real scheduler with simulated clients and a clock that the test advances.

:class:`World` keeps records of its own, in the simplest form, and compares the scheduler and its policy with them after
each step. The conformance kit drives it with random scripts; a test can drive it directly::

    world = World(MyPolicy(), layers=2, max_rows=8)
    world.join("alice")
    world.begin_walk("alice")
    world.submit("alice", world.keys[0], rows=3)
    batch = world.decide()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from symbiosis.core.clients import STOPPED_S
from symbiosis.core.faults import tell_unloaded
from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.scheduler import HELD_S, Scheduler, WaitUntil
from symbiosis.core.terms import NO_TERMS, Kind, Terms


class FakeClock:
    """A clock, in seconds, that the test advances."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> None:
        """Advance the clock.

        Raises:
            ValueError: ``seconds`` is less than 0 or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"the clock cannot advance by {seconds} seconds")
        self.now += seconds

    def __repr__(self) -> str:
        return f"FakeClock({self.now})"


class World:
    """A scheduler with simulated clients.

    Each method that changes the state ends with :meth:`check`. Several batches may run at once.

    Args:
        policy: a new policy, which is tested.
        layers: size of the layer table. ``keys`` has a forward key and a backward key for each layer, in this order,
            and then a forward key for layers 0 and 1 as siblings, if there are as many.
        max_rows: largest number of rows in a batch.
    """

    def __init__(self, policy: Policy, *, layers: int, max_rows: int) -> None:
        self.policy = policy
        self.clock = FakeClock()
        self.scheduler = Scheduler(policy, layers=layers, max_rows=max_rows)
        self.keys = [
            *(Key((layer,), pass_) for layer in range(layers) for pass_ in (Pass.FORWARD, Pass.BACKWARD)),
            *([Key((0, 1), Pass.FORWARD)] if layers > 1 else []),
        ]
        self.running: list[Batch] = []
        self.batches = 0
        """Number of batches that were started."""
        self.clients: dict[str, bool] = {}
        """Clients that have joined, and whether they are in a walk."""
        self.waiting: dict[int, Request] = {}
        """Requests neither answered nor cancelled, by id, in arrival order."""
        self._taken: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._began: dict[int, float] = {}
        """Times at which the running batches started, by ``id()``."""
        self._thinks_since: dict[str, float] = {}
        """Clients in a walk with nothing outstanding that have not stopped, and since when."""
        self.local: set[str] = set()
        """Clients in the executor's process."""
        self._silent: set[str] = set()
        """Clients that counted as thinking because they began a walk, and have sent no request since."""
        self._held: dict[str, float] = {}
        """Seconds for which requests of each client's walk that were passed over have held the front of the queue in
        waits."""
        self._wait: tuple[str, float] | None = None
        """During a wait with such a request at the front: its client, and since when."""
        self._requests: Counter[str] = Counter()
        """Requests of each client in its walk; a new walk begins after two for each layer."""
        self._passed_over: set[str] = set()
        """Clients of whose present walk a request was passed over."""
        self._overtaken: set[int] = set()
        """Requests, by id, that were passed over, or submitted in a walk of which one was."""
        self._ids = 0

    def unloaded(self, seconds: float) -> None:
        """Tell the policy how long a token takes in the base layers of an idle executor, before any client joins."""
        tell_unloaded(self.policy, seconds)

    def join(self, client: str, terms: Terms = NO_TERMS, *, local: bool = False) -> None:
        """Let a client join."""
        self.scheduler.client_joined(client, terms, local=local)
        self.clients[client] = False
        if local:
            self.local.add(client)
        self.check()

    def leave(self, client: str) -> None:
        """Let a client leave; its open requests are cancelled."""
        left = self.scheduler.client_left(client, self.clock.now)
        mine = [request for request in self.waiting.values() if request.client == client]
        assert left == mine, f"{client} left: {mine} were open, but {left} were given back"
        for request in mine:
            del self.waiting[request.id]
        del self.clients[client]
        self._thinks_since.pop(client, None)
        self.local.discard(client)
        self._silent.discard(client)
        self.check()

    def begin_walk(self, client: str) -> None:
        """Let a client begin a walk."""
        self.scheduler.walk_began(client, self.clock.now)
        self.clients[client] = True
        self._new_walk(client)
        if (client not in self._silent or client in self.local) and self._freed(client):
            self._silent.add(client)
        self.check()

    def end_walk(self, client: str) -> None:
        """Let a client end its walk."""
        self.scheduler.walk_ended(client)
        self.clients[client] = False
        self._thinks_since.pop(client, None)
        self.check()

    def submit(self, client: str, key: Key, rows: int, kind: Kind = Kind.DECODE, joint: Sequence[str] = ()) -> Request:
        """Queue a request, in a joint walk of these clients if any are given, each as often as it has rows in equal
        parts of them. The policy is asked whether they may join it, and the world goes on whatever it answers."""
        for member in joint:
            self.scheduler.may_join(member, self.clock.now)
        request = self._request(client, key, rows, kind)
        request.joint = {name: count / len(joint) for name, count in Counter(joint).items()} or None
        self.scheduler.submit(request)
        self.check()
        return request

    def offer(self, client: str, key: Key, rows: int, kind: Kind = Kind.DECODE) -> Batch | None:
        """Offer a request: either it is queued, or a batch of it alone starts, which counts as running."""
        idle = not self.waiting and set(self._thinks_since) <= {client}
        self.scheduler.turned(self.clock.now)
        batch = self.scheduler.offer(self._request(client, key, rows, kind), self.clock.now)
        if batch is not None:
            assert idle, f"a request of {client} ran alone although other clients were at work"
            self._started(batch)
        self.check()
        return batch

    def _request(self, client: str, key: Key, rows: int, kind: Kind) -> Request:
        request = Request(self._ids, client, key, rows, kind, self.clock.now)
        self._ids += 1
        self.waiting[request.id] = request
        self._taken[request.id] = self._done[request.id] = 0
        if not self.clients[client] or self._requests[client] == 2 * self.scheduler.layers:
            self._new_walk(client)
        self._requests[client] += 1
        if client in self._passed_over:
            self._overtaken.add(request.id)
        self._thinks_since.pop(client, None)
        self._silent.discard(client)
        return request

    def cancel(self, request: Request) -> None:
        """Withdraw a request, which may have been answered."""
        was_open = self.waiting.pop(request.id, None) is not None
        self.scheduler.cancel(request.id, self.clock.now)
        if was_open:
            self._freed(request.client)
        self.check()

    def _freed(self, client: str) -> bool:
        """Note that a client thinks from now on, if it is in a walk and has nothing outstanding. Return whether it
        is."""
        free = self.clients[client] and all(request.client != client for request in self.waiting.values())
        if free:
            self._thinks_since[client] = self.clock.now
        return free

    def decide(self) -> Batch | WaitUntil:
        """Ask for the next action, and check it. A batch counts as running until :meth:`complete`."""
        queued = self.queued
        before = bool(queued)
        if before:
            self._thinks_since = {
                client: since for client, since in self._thinks_since.items() if self.clock.now < since + STOPPED_S
            }
        if self._wait is not None:
            client, since = self._wait
            self._held[client] = self._held.get(client, 0.0) + self.clock.now - since
            self._wait = None
        self.scheduler.turned(self.clock.now)
        action = self.scheduler.next_action(self.clock.now)
        if before and not self.scheduler.thinking and self._held_up(queued[0]):
            self._thinks_since.clear()
        if isinstance(action, Batch):
            self._started(action)
            self._overtaken.update(request.id for request in self.queued)
            self._passed_over.update(request.client for request in queued if request.id in self._overtaken)
        elif before:
            assert self.clock.now < action.time < math.inf, (
                f"{self.policy!r} waits until {action.time}, now is {self.clock.now}"
            )
            if queued[0].id in self._overtaken:
                self._wait = queued[0].client, self.clock.now
        else:
            assert action.time == math.inf, f"{self.policy!r} waits although nothing is queued"
        self.check()
        return action

    def _held_up(self, oldest: Request) -> bool:
        """Return whether waits have held up the walk of the oldest request for so long that no client counts as
        thinking any more."""
        return self._held.get(oldest.client, 0.0) >= HELD_S - 1e-3

    def _new_walk(self, client: str) -> None:
        self._held[client] = 0.0
        self._requests[client] = 0
        self._passed_over.discard(client)

    def _started(self, batch: Batch) -> None:
        self._check_batch(batch)
        self.running.append(batch)
        self._began[id(batch)] = self.clock.now
        self.batches += 1

    def complete(self, batch: Batch, seconds: float | None = None) -> list[Request]:
        """End a running batch, and return the requests that it answered. The policy is told that the batch took
        ``seconds``, or the time on the clock since it started."""
        self.running.remove(batch)
        began = self._began.pop(id(batch))
        expected = []
        for request, start, stop in batch.slices:
            self._done[request.id] += stop - start
            if request.id in self.waiting and self._done[request.id] == request.rows:
                del self.waiting[request.id]
                expected.append(request)
        seconds = self.clock.now - began if seconds is None else seconds
        answered = self.scheduler.completed(batch, seconds, self.clock.now)
        for request in answered:
            self._freed(request.client)
        assert answered == expected, f"{expected} should have been answered, not {answered}"
        self.check()
        return answered

    def drain(self, patience_s: float) -> None:
        """Serve all queued requests, without new ones, after waits of at most ``patience_s`` seconds for each batch."""
        for batch in list(self.running):
            self.complete(batch)
        for client in self.clients:
            self.end_walk(client)
        while self.queued:
            waited = 0.0
            for _ in range(1000):
                action = self.decide()
                if isinstance(action, Batch):
                    self.complete(action)
                    break
                waited += action.time - self.clock.now
                assert waited <= patience_s, (
                    f"{self.policy!r} waits {waited:.3f} s while no client is thinking; {patience_s} s are allowed"
                )
                self.clock.advance(action.time - self.clock.now)
            else:
                raise AssertionError(f"{self.policy!r} waited 1000 times in a row while no client is thinking")
        assert not self.waiting, f"{list(self.waiting.values())} were lost"
        assert self.decide() == WaitUntil(math.inf)

    @property
    def queued(self) -> list[Request]:
        """Requests with rows that no batch has taken, in arrival order."""
        return [request for request in self.waiting.values() if self._taken[request.id] < request.rows]

    @property
    def thinking(self) -> list[str]:
        """Clients in a walk with nothing outstanding that have not stopped."""
        return list(self._thinks_since)

    def check(self) -> None:
        """Assert that the scheduler's records agree with these, and that it has refused no decision of the policy."""
        self.scheduler.validate()
        self.scheduler.accounts()
        if self.scheduler.policy_errors:
            error = self.scheduler.policy_errors[0]
            raise AssertionError(f"the scheduler refused a decision: {error}") from error
        assert self.scheduler.outstanding == len(self.waiting), "outstanding requests were lost or invented"
        assert self.scheduler.thinking == len(self.thinking), "the count of thinking clients is off"
        queued = self.queued
        theirs = sorted(request.id for queue in self.scheduler.queues.values() for request in queue)
        assert theirs == [request.id for request in queued], "the queues do not hold what is queued"
        if queued:
            assert self.scheduler.oldest is queued[0], "the oldest request is not the one that arrived first"

    def _check_batch(self, batch: Batch) -> None:
        rows = 0
        for request, start, stop in batch.slices:
            id_, taken = request.id, self._taken[request.id]
            assert request.key == batch.key, f"a batch of {batch.key} has rows of {request.key}"
            assert self.waiting.get(id_) is request, f"request {id_} is served although it is not open"
            assert start == taken, f"request {id_}: row {taken} is next, not {start}"
            assert start < stop <= request.rows, f"request {id_} has no rows {start} to {stop}"
            same = [other.id for other in self.queued if (other.client, other.key) == (request.client, request.key)]
            ahead = [other for other in same if other < id_]
            assert not ahead, f"request {id_} overtakes {ahead} of the same client for the same key"
            self._taken[id_] = stop
            rows += stop - start
        assert rows == batch.rows, f"a batch of {rows} rows says that it has {batch.rows}"
        assert 1 <= rows <= self.scheduler.max_rows, f"a batch of {rows} rows; the cap is {self.scheduler.max_rows}"
        assert isinstance(batch.reason, str), f"the reason of a batch is {batch.reason!r}"
