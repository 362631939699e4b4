"""Runs long batches on one further thread, so that the event loop continues.

docs/decisions/0027-long-batches.md has the measurements.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from symbiosis.core.requests import Batch, Key
from symbiosis.executor.layers import BaseLayer
from symbiosis.executor.pace import Pace

LONG_S = 0.005
"""Expected duration, in seconds, above which a batch runs on the thread once other processes are served."""
Ended = tuple[float, BaseException | None]
"""The time at which a batch ended, and its error."""


class Aside:
    """Runs long batches on one thread, which starts when the executor begins to serve other processes.

    Args:
        layers: the base layers, whose batches' durations are learned.

    Attributes:
        pace: expects how long a batch takes.
        batch: the batch on the thread, or None. No other queued batch runs meanwhile.
    """

    def __init__(self, layers: Sequence[BaseLayer]) -> None:
        self.pace = Pace(layers)
        self.batch: Batch | None = None
        self._ended: asyncio.Future[Ended] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._then: list[Callable[[], object]] = []

    def open(self) -> None:
        """Run long batches on the thread from now on."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "symbiosis-batches")

    async def close(self) -> None:
        """Wait for the batch on the thread, and end the thread."""
        if self._ended is not None:
            await asyncio.wait([self._ended])
        if self._thread is not None:
            self._thread.shutdown()

    def takes(self, key: Key, rows: int) -> bool:
        """Return whether a batch is to run on the thread."""
        return self._thread is not None and self.pace.expects(key, rows) > LONG_S

    def run(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Batch,
        work: Callable[[], object],
        then: Callable[[float, BaseException | None], object],
    ) -> None:
        """Run a batch on the thread, and call ``then`` on the event loop with the time of its end and its error."""
        self.batch = batch
        self._ended = loop.run_in_executor(self._thread, _run, work)
        self._ended.add_done_callback(partial(self._done, then))

    def _done(self, then: Callable[[float, BaseException | None], object], ended: asyncio.Future[Ended]) -> None:
        self.batch = self._ended = None
        waiting, self._then = self._then, []
        for one in waiting:  # they come after ``then``
            ended.get_loop().call_soon(one)
        then(*ended.result())

    def holds(self, request_id: int) -> bool:
        """Return whether a request is in the batch on the thread."""
        return self.batch is not None and any(request.id == request_id for request, _, _ in self.batch.slices)

    def when_idle(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the batch on the thread has ended; at once if there is none."""
        if self.batch is None:
            then()
        else:
            self._then.append(then)


def _run(work: Callable[[], object]) -> Ended:
    cause = None
    try:
        work()
    except BaseException as error:  # noqa: BLE001 (a future takes no StopIteration, and the others belong here too)
        cause = error
    return time.monotonic(), cause
