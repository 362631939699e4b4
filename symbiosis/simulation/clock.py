"""Simulated time: events in order, cores that processes share, and links between machines."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Clock:
    """Simulated time, in seconds, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._settling: dict[Callable[[], None], None] = {}

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Call a function at a time; not before now."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), happen))

    def settle(self, happen: Callable[[], None]) -> None:
        """Call a function once, after all events of this time."""
        self._settling[happen] = None

    @property
    def next_at(self) -> float:
        """Time of the next event; ``inf`` if there is none."""
        return self._events[0][0] if self._events else math.inf

    def step(self) -> None:
        """Process the next event."""
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        while self._settling and self.next_at > self.now:
            happen = next(iter(self._settling))
            del self._settling[happen]
            happen()


class Cores:
    """The cores of one machine. Work of several processes shares them: while it has more threads than there are cores,
    all of it slows down by the same factor.

    Args:
        clock: simulated time.
        count: number of cores.
    """

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._count = count
        self._work: list[_Work] = []
        self._since = 0.0
        self._changes = 0

    def run(self, seconds: float, threads: float, then: Callable[[], None]) -> None:
        """Start work that takes so many seconds, and so many cores, when it has the machine to itself, and call a
        function at its end."""
        self._advance()
        self._work.append(_Work(seconds, threads, then))
        self._plan()

    def _speed(self) -> float:
        threads = sum(work.threads for work in self._work)
        return min(1.0, self._count / threads) if threads else 1.0

    def _advance(self) -> None:
        done = (self._clock.now - self._since) * self._speed()
        self._since = self._clock.now
        for work in self._work:
            work.left_s -= done

    def _plan(self) -> None:
        """Expect the end of the work that ends first."""
        self._changes += 1
        if self._work:
            first = min(work.left_s for work in self._work)
            change = self._changes
            self._clock.at(self._clock.now + max(first, 0.0) / self._speed(), lambda: self._ended(change, first))

    def _ended(self, change: int, first: float) -> None:
        if change != self._changes:  # other work has started since
            return
        ended = [work for work in self._work if work.left_s <= first]
        self._advance()
        self._work = [work for work in self._work if work not in ended]
        self._plan()
        for work in ended:
            work.then()


class Thread:
    """A thread: work that runs on it waits for the work that came before.

    Args:
        cores: the cores that its work shares.

    Attributes:
        idle: called whenever all work has been done.
    """

    def __init__(self, cores: Cores) -> None:
        self.idle: Callable[[], None] = lambda: None
        self._cores = cores
        self._queue: deque[tuple[float, float, Callable[[], None]]] = deque()

    def run(self, seconds: float, threads: float, then: Callable[[], None]) -> None:
        """Run work after all that came before; see :meth:`Cores.run`."""
        self._queue.append((seconds, threads, then))
        if len(self._queue) == 1:
            self._start()

    def is_busy(self) -> bool:
        """Return whether there is work."""
        return bool(self._queue)

    def _start(self) -> None:
        seconds, threads, then = self._queue[0]

        def ended() -> None:
            self._queue.popleft()
            if self._queue:
                self._start()
            then()
            if not self._queue:
                self.idle()

        self._cores.run(seconds, threads, ended)


class _Work:
    def __init__(self, left_s: float, threads: float, then: Callable[[], None]) -> None:
        self.left_s, self.threads, self.then = left_s, threads, then


class Way(Protocol):
    """A way for messages."""

    def send(self, size: int, then: Callable[[], None]) -> None:
        """Send a message of so many bytes, and call a function when it has arrived."""


class Link(Way):
    """One direction of a link between two machines. Messages leave one after another.

    Args:
        clock: simulated time.
        latency_s: seconds from the last byte that leaves to its arrival.
        bytes_per_s: bandwidth.
    """

    def __init__(self, clock: Clock, latency_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        self._clock = clock
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._free = 0.0
        self.bytes = 0

    def send(self, size: int, then: Callable[[], None]) -> None:
        self.bytes += size
        self._free = max(self._free, self._clock.now) + size / self._bytes_per_s
        self._clock.at(self._free + self._latency_s, then)
