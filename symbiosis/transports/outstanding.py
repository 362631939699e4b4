"""The calls of one client that have no answer yet, kept within the executor's limits.

A call waits until the executor's limits allow it, is then sent, and counts until the executor has answered it. After a
lost connection, calls that were sent come first again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import torch

from symbiosis.core.requests import Call, Expected
from symbiosis.transports.wire import Limits

__all__ = ["Outstanding", "Pending", "Results"]

Results = tuple[torch.Tensor, ...]
"""Matrices of an answer, [rows, width] each."""


@dataclass(slots=True, eq=False)
class Pending:
    """A call without an answer."""

    id: int
    call: Call
    expected: Expected
    rows: int
    call_bytes: int
    """Bytes of the call's matrices, each aligned as in an arena."""
    size: int
    """The same, with the results."""
    reply: asyncio.Future[Results] | None = None
    """Future of the caller, in the asyncio driver only."""
    cancelled: bool = False
    """Whether the caller has withdrawn the call."""
    place: int = 0
    """Offset into the client's memory, where the carrier uses one."""


class Outstanding:
    """Calls that wait to be sent, and calls that were sent and have no answer.

    ``waiting`` holds the former in order, ``sent`` the latter by id.
    """

    def __init__(self) -> None:
        self.waiting: deque[Pending] = deque()
        self.sent: dict[int, Pending] = {}
        self._limits = Limits()
        self._rows = self._bytes = 0

    def next(self) -> Pending | None:
        """Return the next call and count it as sent; None if no call waits or the limits forbid another.

        A call that exceeds the limit of rows is sent alone.
        """
        if not self.waiting:
            return None
        pending, limits = self.waiting[0], self._limits
        if self.sent and (
            len(self.sent) >= limits.calls
            or self._rows + pending.rows > limits.rows
            or self._bytes + pending.size > limits.arena_bytes
        ):
            return None
        self.waiting.popleft()
        self.sent[pending.id] = pending
        self._rows += pending.rows
        self._bytes += pending.size
        return pending

    def put_back(self, pending: Pending) -> None:
        """Let a call that :meth:`next` returned wait again, before all others."""
        self.settle(pending)
        self.waiting.appendleft(pending)

    def settle(self, pending: Pending) -> None:
        """Forget a call that was sent: it has its answer."""
        del self.sent[pending.id]
        self._rows -= pending.rows
        self._bytes -= pending.size

    def cancel(self, call: Call) -> Pending | None:
        """Withdraw a call. Return it if it was sent: then it counts until the executor has answered."""
        pending = self.sent.get(call.id)
        if pending is None or pending.call is not call:
            self.waiting = deque(pending for pending in self.waiting if pending.call is not call)
            return None
        if pending.cancelled:
            return None
        pending.cancelled = True
        return pending

    def restart(self, limits: Limits) -> None:
        """Begin again on a new connection: calls that were sent and not cancelled wait again, before all others."""
        self._limits = limits
        self._rows = self._bytes = 0
        again = [pending for pending in self.sent.values() if not pending.cancelled]
        self.sent.clear()
        self.waiting.extendleft(reversed(again))

    def clear(self) -> list[Pending]:
        """Forget all calls, and return them."""
        found = [*self.sent.values(), *self.waiting]
        self.sent.clear()
        self.waiting.clear()
        self._rows = self._bytes = 0
        return found
