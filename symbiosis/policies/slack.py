"""Slack: the time that prefill and fine-tuning batches may take before a token misses its deadline.

Let F be the seconds that the executor has spent on prefill and fine-tuning so far, and F₀ its value when a token began.
The slack of the token is

    min(due − began − usual − (F − F₀), due − now)

where ``usual`` is the time that the token takes without such batches. ``due − began − usual + F₀`` does not change
while the token is being made, so a heap knows the least slack of all tokens, whatever the number of clients. A prefill
has a slack of the same form towards fine-tuning, where F counts fine-tuning alone.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from symbiosis.core.requests import Request

_SPARE_ENTRIES = 64
"""Entries beyond two for each client that a heap may have before the entries of finished tokens are removed."""


@dataclass(slots=True, eq=False)
class Token:
    """One walk of an inference client through the model: the prefill of a prompt, or one decoded token."""

    began: float
    """Arrival of the first request of the walk. All times are in seconds on the executor's clock."""
    slo: float
    """Latency target of this walk, in seconds."""
    due: float
    """Time at which the walk should end."""
    prefill: bool
    rows: int
    """Rows of the first request."""
    others: float
    """Seconds spent on prefill and fine-tuning before the walk began (F₀)."""
    tuned: float
    """Seconds spent on fine-tuning before the walk began."""
    last: Request
    """Latest request of the walk."""
    text_began: float
    """Time at which the first token of the text began."""
    number: int
    """Position of the token in its text, from 0."""
    patience: float
    """Seconds after which a client without a queued request counts as stopped. An untrusted client that asks for a long
    SLO does not lengthen it, because batches of fine-tuning wait for the token."""
    typical: bool
    """Whether the token may teach how long tokens of other clients take."""
    layer: int = -1
    """First layer of the latest request."""
    away: float = 0.0
    """Seconds of the walk during which the client had no request here."""
    answered: float = 0.0
    """Time of the latest answer, or 0 once the client has sent its next request."""
    over: bool = False
    """Whether the walk has ended, or its client has stopped."""

    @property
    def given_up(self) -> float:
        """Time from which the client counts as stopped, unless it has a request queued."""
        return self.began + self.patience

    def ended(self, now: float) -> bool:
        """Return whether the walk is over by now."""
        waits = self.last.remaining and not self.last.cancelled
        if not self.over and not waits and self.given_up <= now:
            self.over = True
        return self.over


class _Heap:
    """Tokens by a value. Tokens that are over leave the heap when they reach its top."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Token]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, value: float, request: Request, token: Token) -> None:
        heapq.heappush(self._entries, (value, request.id, token))

    def least(self, now: float) -> float:
        """Return the least value of the tokens that are not over, or ``inf``."""
        entries = self._entries
        while entries and entries[0][2].ended(now):
            heapq.heappop(entries)
        return entries[0][0] if entries else math.inf

    @property
    def top(self) -> Token | None:
        return self._entries[0][2] if self._entries else None

    def shrink(self, most: int) -> None:
        """Remove tokens that are over if there are more than ``most`` entries.

        Otherwise a token that stays at the top would keep all finished tokens below it in the heap.
        """
        if len(self._entries) > most:
            self._entries[:] = [entry for entry in self._entries if not entry[2].over]
            heapq.heapify(self._entries)


class Slack:
    """The least slack of all tokens that are being made."""

    def __init__(self) -> None:
        self.others = 0.0
        """Seconds spent on prefill and fine-tuning so far (F)."""
        self.tuned = 0.0
        """Seconds spent on fine-tuning so far."""
        self._by_due, self._by_room = _Heap(), _Heap()
        self._prefills_by_due, self._prefills_by_room = _Heap(), _Heap()

    def __len__(self) -> int:
        """Return the number of entries in the largest heap."""
        return max(map(len, self._heaps))

    @property
    def _heaps(self) -> tuple[_Heap, ...]:
        return self._by_due, self._by_room, self._prefills_by_due, self._prefills_by_room

    def spend(self, others: float, tuned: float) -> None:
        """Note seconds that went to prefill and fine-tuning, and those of them that went to fine-tuning."""
        self.others += others
        self.tuned += tuned

    def add_token(self, token: Token, request: Request, usual: float) -> None:
        """Add a decoded token, which takes ``usual`` seconds without prefill and fine-tuning batches."""
        self._by_due.push(token.due, request, token)
        self._by_room.push(token.due - token.began - usual + self.others, request, token)

    def add_prefill(self, token: Token, request: Request, room: float | None) -> None:
        """Add a prefill. ``room`` is the time that fine-tuning may take from it, in seconds, if that is known."""
        self._prefills_by_due.push(token.due, request, token)
        if room is not None:
            self._prefills_by_room.push(room + self.tuned, request, token)

    def shrink(self, clients: int) -> None:
        """Bound the heaps by the number of clients."""
        for heap in self._heaps:
            heap.shrink(2 * clients + _SPARE_ENTRIES)

    def for_prefill(self, now: float) -> float:
        """Return the seconds that prefill rows may take; ``inf`` if no token is being made, ≤ 0 if one is late."""
        return min(self._by_due.least(now) - now, self._by_room.least(now) - self.others)

    def for_tuning(self, now: float) -> float:
        """Return the seconds that fine-tuning rows may take, which no prefill would miss either."""
        slack = min(self.for_prefill(now), self._prefills_by_due.least(now) - now)
        return min(slack, self._prefills_by_room.least(now) - self.tuned)

    def next_given_up(self) -> float:
        """Return when the client at the top of a heap counts as stopped, or ``inf``."""
        tops = (self._by_due.top, self._prefills_by_due.top)
        return min((top.given_up for top in tops if top is not None), default=math.inf)
