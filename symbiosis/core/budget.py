"""The memory that all connections of an executor may take together, beside the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

TABLES_BYTES = 32 << 20
"""The part of an executor's ``max_bytes`` that is set aside for what connections leave in common tables (keys, shapes,
counts). A ninth of the rest is set aside for memory that was freed and that the allocator still keeps."""
LEAST_BYTES = 3 * TABLES_BYTES
"""The smallest ``max_bytes``."""
UNKNOWN_BYTES = 128 << 10
"""Bytes that a connection counts for until its owner is known: it is in its handshake."""
CONNECTION_BYTES = 1 << 20
"""Bytes that a connection counts for from then on, whatever it carries."""
COVERED_BYTES = 1 << 19
"""The part of these bytes that covers tensors: only tensors beyond it count in addition. The other part covers
buffers, keys of TLS, short messages and cached views."""
LARGEST_PART = 8
"""Divisor of the total that gives the largest call with its results. Such a call counts twice, so an owner finds room
for it if a half of the total is free."""


class Budget:
    """Counts the bytes that connections hold.

    An owner may take bytes if it then holds no more than was free before (dynamic thresholds, Choudhury and Hahne
    1998). Of n greedy owners that take small steps in turn, each gets a part of 1/(n+1), and as much stays free. Owners
    that come one after another each leave the next one about half of what they found, until :meth:`rivals` chooses
    connections to end.

    Args:
        total: bytes that may be held.
        freed: called each time that the bytes given back reach the size of the largest call.
    """

    def __init__(self, total: int, freed: Callable[[], object] = lambda: None) -> None:
        self.total = total
        self._freed = freed
        self._given_back = 0
        """Bytes that were given back since the last call of ``freed``."""
        self.held = 0
        self._by: Counter[str] = Counter()
        self._waiting: dict[Account, tuple[int, int, Callable[[], object]]] = {}
        """For each waiting account, the oldest first: the bytes that it needs, how many of them it keeps between calls,
        and what to call when it has them."""
        self._accounts: dict[Account, None] = {}
        """Connections whose owner is known, in the order in which they came."""
        self._turns = 0
        """How often an account has held bytes or begun to wait for them: tells which of two accounts did so first."""

    @property
    def connections(self) -> int:
        """Number of connections whose owner is known."""
        return len(self._accounts)

    def by_client(self) -> dict[str, int]:
        """Return the bytes that count for the connections of each client that has joined."""
        return {one.client: one.size for one in self._accounts if one.client}

    @property
    def largest(self) -> int:
        """Bytes of the largest call, with its results."""
        return self.total // LARGEST_PART

    def resize(self, total: int) -> None:
        """Change how many bytes may be held. What is held stays; if it is more than that, no bytes are free."""
        self.total = total
        self._grant()

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

    def rivals(self, owner: str, size: int, since: int = 0) -> list[Account]:
        """Return the connections that have to end so that an owner finds room for ``size`` more bytes. Return an
        empty list if connections that are ending give back enough, or if ending all candidates would not.

        A connection of another owner may be chosen if it has taken no bytes since turn ``since`` and carries no call.
        Such connections come first, because they lose only what they keep between calls. Another one may be chosen if
        its owner holds more than ``owner`` would hold; the owner that holds most comes first ("longest queue drop").
        With n owners, at least one other owner holds more if ``owner`` would hold less than 1/(n+2) of the total.
        """
        would, free = self._by[owner] + size, self.total - self.held
        held: Counter[str] = Counter()
        for one in self._accounts:
            if one.leaving:
                free += one.size
            else:
                held[one.owner] += one.size
        ranks = {
            one: (one.idle_since(since), held[one.owner], one.size)
            for one in self._accounts
            if not one.leaving and one.owner != owner
        }
        found: list[Account] = []
        for one in sorted(ranks, key=ranks.__getitem__, reverse=True):
            if would > free and (ranks[one][0] or held[one.owner] > would):
                found.append(one)
                held[one.owner] -= one.size
                free += one.size
        return found if would <= free else []

    def turn(self) -> int:
        """Return a larger number than at any call before."""
        self._turns += 1
        return self._turns

    def _grant(self) -> None:
        """Give accounts that wait what they wait for, where there is room."""
        for account, (due, kept, granted) in list(self._waiting.items()):
            if account.hold(due, kept):
                del self._waiting[account]
                granted()


class Account:
    """What one connection holds of a budget.

    Args:
        budget: the budget.
        cut: ends the connection because its bytes are needed for another one. It must call :meth:`leave`.

    Attributes:
        owner: whom the bytes count for; until :meth:`belong_to`, all peers of one listener whose owner is not known.
        client: the client that has joined over the connection; "" before.
        kept: the part of what is held that the connection keeps between calls.
        leaving: whether the connection is ending, and gives back everything soon.
    """

    def __init__(self, budget: Budget, cut: Callable[[], object] = lambda: None) -> None:
        self.owner = self.client = ""
        self.kept = 0
        self.leaving = False
        self._budget = budget
        self._cut = cut
        self._itself = 0
        """Bytes that count for the connection itself."""
        self._held = 0
        self._counted = 0
        """The part of what is held that exceeds COVERED_BYTES."""
        self._held_at = self._waits_since = 0
        """The turn of the budget at which it last held bytes, and at which it last began to wait."""

    @property
    def size(self) -> int:
        """All bytes that count for the connection."""
        return self._itself + self._counted

    def open(self, listener: str) -> bool:
        """Count a connection of a listener whose owner is not known, if there is room. Return whether there was."""
        self.owner = f"unknown peers of {listener}"
        if self._budget.take(self.owner, UNKNOWN_BYTES):
            self._itself = UNKNOWN_BYTES
        return bool(self._itself)

    def belong_to(self, owner: str) -> bool:
        """Count the connection for its owner from now on, if there is room. Return whether there was. If not, end
        connections of owners that hold more, so that the next attempt finds room."""
        if not self._budget.take(owner, CONNECTION_BYTES):
            self._cut_rivals(owner, CONNECTION_BYTES, 0)
            return False
        self._budget.give_back(self.owner, self._itself)
        self.owner, self._itself = owner, CONNECTION_BYTES
        self._budget._accounts[self] = None
        return True

    def hold(self, size: int, kept: int = 0) -> bool:
        """Hold ``size`` more bytes, of which the connection keeps ``kept`` between calls, if there is room. Return
        whether there was."""
        held = self._held + size
        more = held - COVERED_BYTES - self._counted
        if more > 0:
            if not self._budget.take(self.owner, more):
                return False
            self._counted += more
        self._held = held
        self.kept += kept
        self._held_at = self._budget.turn()
        return True

    def keep(self, size: int) -> bool:
        """Keep ``size`` bytes in all between calls, if there is room. Return whether there was."""
        if size >= self.kept:
            return self.hold(size - self.kept, size - self.kept)
        self.release(self.kept - size)
        self.kept = size
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

    def wait(self, size: int, kept: int, granted: Callable[[], object]) -> None:
        """:meth:`hold` bytes as soon as there is room, and call ``granted`` then, which must not release any."""
        self._budget._waiting[self] = size, kept, granted
        self._waits_since = self._budget.turn()

    def make_room(self) -> None:
        """Cut other connections so that there will be room for what this one waits for, if their end gives enough."""
        size, _, _ = self._budget._waiting[self]
        self._cut_rivals(self.owner, self._held + size - COVERED_BYTES - self._counted, self._waits_since)

    def _cut_rivals(self, owner: str, size: int, since: int) -> None:
        for rival in self._budget.rivals(owner, size, since):
            rival._cut()

    def idle_since(self, turn: int) -> bool:
        """Return whether the connection has taken no bytes since a turn, and holds only what it keeps between calls."""
        return self._held_at < turn and self._held == self.kept and self._counted > 0

    def leave(self) -> None:
        """Note that the connection is ending. It waits for nothing any more."""
        self.leaving = True
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Forget what :meth:`wait` was called for. Has no effect if the bytes are held by now."""
        self._budget._waiting.pop(self, None)

    def close(self) -> None:
        """Give back everything."""
        self.leave()
        self._budget._accounts.pop(self, None)
        self.release(self._held)
        self._budget.give_back(self.owner, self._itself)
        self.owner, self._itself, self.kept = "", 0, 0
