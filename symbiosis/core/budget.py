"""The memory that all connections of an executor may take together, beside the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

TABLES_BYTES = 32 << 20
"""The part of an executor's ``max_bytes`` that is set aside for what connections leave in common tables (keys, shapes,
counts). A ninth of the rest is set aside for memory that was freed and that the allocator still keeps."""
LEAST_BYTES = 3 * TABLES_BYTES
"""The smallest ``max_bytes``."""
STRANGER_BYTES = 128 << 10
"""Bytes that a connection counts for until its owner is known: it is in its handshake."""
CONNECTION_BYTES = 1 << 20
"""Bytes that a connection counts for from then on, whatever it carries."""
COVERED_BYTES = 1 << 19
"""The part of these bytes that is for tensors: a connection that holds no more counts for no more. The other part is
for buffers, keys of TLS, short messages and cached views."""
LARGEST_PART = 8
"""Divisor of the total that gives the largest call with its results. Such a call counts twice, so an owner finds room
for it if a half of the total is free."""


class Budget:
    """Counts the bytes that connections hold.

    An owner may take bytes if it then holds no more than was free before (dynamic thresholds, Choudhury and Hahne
    1998). Of n greedy owners that take small steps in turn, each gets a part of 1/(n+1), and as much stays free. Of
    owners that come one after another, each leaves the next one about half of what it found: nothing is taken back.

    Args:
        total: bytes that may be held.
        freed: called whenever as many bytes as the largest call has were given back.
    """

    def __init__(self, total: int, freed: Callable[[], object] = lambda: None) -> None:
        self.total = total
        self._freed = freed
        self._given_back = 0
        """Bytes that were given back since."""
        self.held = 0
        self._by: Counter[str] = Counter()
        self._waiting: dict[Account, tuple[int, Callable[[], object]]] = {}
        """Accounts that wait for so many bytes, in the order in which they began to, and what to call then."""

    @property
    def largest(self) -> int:
        """Bytes of the largest call, with its results."""
        return self.total // LARGEST_PART

    def take(self, owner: str, size: int) -> bool:
        """Count ``size`` more bytes for an owner, if there is room. Return whether there was."""
        if self._by[owner] + size > self.total - self.held:
            return False
        self._by[owner] += size
        self.held += size
        return True

    def give_back(self, owner: str, size: int) -> None:
        """Count ``size`` bytes less for an owner. Accounts that wait and now have room get it, in order."""
        self.held -= size
        self._given_back += size
        if self._given_back >= self.largest:
            self._given_back = 0
            self._freed()
        self._by[owner] -= size
        if not self._by[owner]:
            del self._by[owner]
        self._grant()

    def _grant(self) -> None:
        """Give accounts that wait what they wait for, where there is room."""
        for account, (due, granted) in list(self._waiting.items()):
            if account.hold(due):
                del self._waiting[account]
                granted()


class Account:
    """What one connection holds of a budget.

    Attributes:
        owner: whom the bytes count for; until :meth:`admit`, all peers of one listener whose owner is not known.
    """

    def __init__(self, budget: Budget) -> None:
        self.owner = ""
        self._budget = budget
        self._itself = 0
        """Bytes that count for the connection itself."""
        self._held = 0
        self._counted = 0
        """The part of what is held that exceeds COVERED_BYTES."""

    def open(self, listener: str) -> bool:
        """Count a connection of a listener whose owner is not known, if there is room. Return whether there was."""
        self.owner = f"unknown peers of {listener}"
        if self._budget.take(self.owner, STRANGER_BYTES):
            self._itself = STRANGER_BYTES
        return bool(self._itself)

    def admit(self, owner: str) -> bool:
        """Count the connection for its owner from now on, if there is room. Return whether there was."""
        if not self._budget.take(owner, CONNECTION_BYTES):
            return False
        self._budget.give_back(self.owner, self._itself)
        self.owner, self._itself = owner, CONNECTION_BYTES
        return True

    def hold(self, size: int) -> bool:
        """Hold ``size`` more bytes, if there is room. Return whether there was."""
        held = self._held + size
        more = held - COVERED_BYTES - self._counted
        if more > 0:
            if not self._budget.take(self.owner, more):
                return False
            self._counted += more
        self._held = held
        return True

    def release(self, size: int) -> None:
        """Hold ``size`` bytes less."""
        self._held -= size
        less = self._counted - max(self._held - COVERED_BYTES, 0)
        if less > 0:
            self._counted -= less
            self._budget.give_back(self.owner, less)
        elif self in self._budget._waiting:  # it waits for less now
            self._budget._grant()

    def wait(self, size: int, granted: Callable[[], object]) -> None:
        """Hold ``size`` more bytes as soon as there is room, and call ``granted`` then, which must not release any."""
        self._budget._waiting[self] = size, granted

    def stop_waiting(self) -> None:
        """Forget what :meth:`wait` was called for. Has no effect if the bytes are held by now."""
        self._budget._waiting.pop(self, None)

    def close(self) -> None:
        """Give back everything."""
        self.stop_waiting()
        self.release(self._held)
        self._budget.give_back(self.owner, self._itself)
        self.owner, self._itself = "", 0
