"""The turn of tokens: while one is under way, clients that come wait, and then begin the next one together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from symbiosis.client.joint.captured import Step
from symbiosis.errors import copied

_NOT_READY = "no other client was ready"


class Turn:
    """Begins one token after another.

    The next token begins once none is under way and everything that is ready on the event loop has run, so that all
    clients can join it. Clients whose caches and positions have the same structure are walked together. The others walk
    their own models at the same time, so that their rows can share batches.

    Args:
        together: begins a walk for several steps; :meth:`ended` is to be called after it.
        most_rows: most rows of a joint walk.
    """

    def __init__(self, together: Callable[[Sequence[Step]], object], most_rows: float) -> None:
        self._together = together
        self._most_rows = most_rows
        self._waiting: list[Step] = []
        self._under_way = 0
        """Walks under way, joint or not."""
        self._start: asyncio.Handle | None = None
        self._closed: BaseException | None = None

    def began(self) -> None:
        """Note that a walk has begun."""
        self._under_way += 1

    def ended(self) -> None:
        """Note that a walk has ended."""
        self._under_way -= 1
        self._start_soon()

    def arrive(self, step: Step) -> None:
        """Have a client wait for its next token. After :meth:`close`, its wait ends at once."""
        if self._closed is not None:
            step.reply.set_exception(copied(self._closed))
            return
        self._waiting.append(step)
        self._start_soon()

    def withdraw(self, step: Step) -> None:
        """Note that a client does not wait for its token any more. It has no part in a joint walk under way."""
        if step in self._waiting:
            self._waiting.remove(step)
        elif step.alone:
            self.ended()

    def apart(self, steps: Sequence[Step], why: str) -> None:
        """Have clients walk models of their own, before the next token."""
        for step in steps:
            if not step.reply.done():
                self.began()
                step.alone = why
                step.reply.set_result(None)

    def all_apart(self, why: str) -> None:
        """Have all clients that wait walk models of their own."""
        waiting, self._waiting = self._waiting, []
        self.apart(waiting, why)

    def close(self, error: BaseException) -> None:
        """Begin no further token. Clients that wait, or come later, get ``error``."""
        self._closed = error
        if self._start is not None:
            self._start.cancel()
        for step in self._waiting:
            if not step.reply.done():
                step.reply.set_exception(copied(error))

    def _start_soon(self) -> None:
        if self._waiting and not self._under_way and self._start is None:
            self._start = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._start = None
        waiting = [step for step in self._waiting if not step.reply.done()]  # others are about to withdraw
        if self._under_way or not waiting:
            return
        self._waiting = [step for step in self._waiting if step.reply.done()]
        (structure, _), *_ = Counter([step.structure for step in waiting]).most_common(1)
        alike = [step for step in waiting if step.structure == structure]
        steps: list[Step] = []
        rows = 0
        for step in alike:
            if rows + len(step.ids) <= self._most_rows:
                steps.append(step)
                rows += len(step.ids)
        if len(steps) < 2:
            steps = []
        full = f"a joint walk has up to {self._most_rows:g} rows"
        self.apart([step for step in alike if step not in steps], full if len(alike) > 1 else _NOT_READY)
        self.apart([step for step in waiting if step not in alike], _NOT_READY)
        if steps:
            self.began()
            self._together(steps)
