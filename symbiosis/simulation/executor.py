"""An executor in simulated time: the scheduler that chooses its batches, and the seconds that they take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.scheduler import Scheduler
from symbiosis.core.terms import Kind
from symbiosis.errors import PolicyError
from symbiosis.simulation.clock import Clock, Thread

MAX_ROWS = 8192
"""Largest number of rows in a batch."""


class SimulatedExecutor:
    """One executor. It runs one batch after another.

    Args:
        clock: simulated time.
        policy: a new policy.
        layers: size of the layer table.
        cost: function of a batch, and of whether the batch before it had the same key: the latency in seconds.
        overhead_s: seconds that the executor needs for each batch besides its latency.
        local: whether clients compute in the executor's process, where one action happens at a time: clients compute in
            the order of their answers, and a batch starts when no client has anything to compute.
        thread: the thread that runs batches, and chooses one when all messages that have come are handled; None if
            nothing slows batches down.
        threads: number of cores that a batch uses.
        parts: for each layer, the part of a token's walk that one row through it is; see :class:`Scheduler`.
        fraction: the part (0 to 1) of a walk's work that its layers do.

    Attributes:
        batches: batches that have run.
        members: requests in them, counted once for each batch that took rows of them; those of a joint walk once for
            each client.

    Raises:
        PolicyError: from :meth:`decide`: the scheduler refused a decision of the policy.
    """

    def __init__(
        self,
        clock: Clock,
        policy: Policy,
        *,
        layers: int,
        cost: Callable[[Batch, bool], float],
        overhead_s: float = 0.0,
        local: bool = False,
        thread: Thread | None = None,
        threads: float = 1.0,
        parts: Sequence[float] = (),
        fraction: float = 1.0,
    ) -> None:
        self.scheduler = Scheduler(policy, layers=layers, max_rows=MAX_ROWS, parts=parts, fraction=fraction)
        self.batches = self.members = 0
        self.local = local
        self.settle = self.decide
        """Called after all events of a time in which something happened to this executor."""
        self._clock = clock
        self._cost = cost
        self._overhead_s = overhead_s
        self._thread = thread
        if thread is not None:
            thread.idle = self.changed
        self._threads = threads
        self._free = 0.0
        """Time at which local clients have finished their computations."""
        self._answers: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._busy = False
        self._last_key: Key | None = None
        self._wake = math.inf
        """Time at which the scheduler is asked again."""

    def changed(self) -> None:
        """Decide after all events of this time."""
        self._clock.settle(self.settle)

    def submit(
        self,
        client: str,
        key: Key,
        rows: int,
        kind: Kind,
        joint: Mapping[str, float] | None,
        answer: Callable[[], None],
    ) -> None:
        """Submit a request. ``answer`` is called when its rows have run."""
        request = Request(next(self._numbers), client, key, rows, kind, self._clock.now, joint=joint)
        self._answers[request.id] = answer
        batch = self.scheduler.offer(request, self._clock.now)
        if batch is not None:
            self._run(batch)
        self.changed()

    def compute(self, seconds: float, then: Callable[[], None]) -> None:
        """Have a local client compute, and call a function at the end."""
        self._free = max(self._free, self._clock.now) + seconds
        self._clock.at(self._free, then)

    def computing(self) -> bool:
        """Return whether the thread of local clients has something to do."""
        return self.local and self._free > self._clock.now

    def decide(self) -> None:
        """Start a batch if the scheduler says so."""
        if self._busy or self.computing() or (self._thread is not None and self._thread.is_busy()):
            return
        now = self._clock.now
        self.scheduler.turned(now)
        action = self.scheduler.next_action(now)
        if self.scheduler.policy_errors:
            raise PolicyError(str(self.scheduler.policy_errors[0])) from self.scheduler.policy_errors[0]
        if isinstance(action, Batch):
            self._run(action)
        elif now < action.time < self._wake:
            self._wake = action.time
            self._clock.at(action.time, self._woken)

    def _woken(self) -> None:
        self._wake = math.inf
        self.changed()

    def _run(self, batch: Batch) -> None:
        """Start a batch; no other batch is running."""
        self._busy = True
        seconds = self._cost(batch, batch.key == self._last_key)
        self._last_key = batch.key
        began = self._clock.now
        if self._thread is None:
            then = began + seconds + self._overhead_s
            if self.local:
                self._free = then
            self._clock.at(then, lambda: self._ran(batch, seconds))
        else:
            total = seconds + self._overhead_s
            cores = (seconds * self._threads + self._overhead_s) / total

            def ended() -> None:
                self._ran(batch, (self._clock.now - began) * seconds / total)

            self._thread.run(total, cores, ended)

    def _ran(self, batch: Batch, seconds: float) -> None:
        self._busy = False
        self.batches += 1
        self.members += sum(len(piece.request.clients) for piece in batch.slices)
        for request in self.scheduler.completed(batch, seconds, self._clock.now):
            self._answers.pop(request.id)()
        self.changed()
