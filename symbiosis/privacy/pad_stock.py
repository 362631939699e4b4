"""The pads of one key: which are used, which effects are ready, and which effects are waited for.

A pad and its effect belong to a number. Pads are drawn in order, so the number of the next one is all the state that
has to survive. Drawing may be interrupted anywhere (Ctrl-C): numbers below ``next`` are then never used again, and the
effect of a number stays the same.

Legend: n rows.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

import torch

from symbiosis.privacy.keystream import Keystream, blocks
from symbiosis.privacy.masks import MaskedKey, Results
from symbiosis.privacy.pad_folder import PadCounter, StoredEffects

__all__ = ["PadStock"]


class PadStock:
    """The pads of one key. Its caller holds a lock.

    Args:
        key: the key.
        secret: 32 bytes, the secret key of its pads.
        counter: the counter of used pads on disk, if they are kept there.
        stored: effects on disk, likewise.
    """

    def __init__(self, key: MaskedKey, secret: bytes, counter: PadCounter | None, stored: StoredEffects | None) -> None:
        self.key = key
        self.counter = counter
        self.stored = stored
        self.next = 0 if counter is None else counter.value
        """Number of the next pad; those below are used."""
        rows = [] if stored is None else list(stored.read(self.next))
        self.made = self.next + len(rows)
        """Number of the first pad whose effect is not computed."""
        self._secret = secret
        self._effects: deque[tuple[int, Results]] = deque()
        """Effects of consecutive pads, and the number of the first of them."""
        if rows:
            self._effects.append((self.next, torch.stack(rows).split(key.results, dim=1)))  # type: ignore[no-untyped-call]
        self._draws: deque[tuple[int, int, Future[Results]]] = deque()
        """Draws that wait for their effects: number of the first pad, how many, and the future."""
        self._goals: list[tuple[int, Future[None]]] = []
        """Numbers up to which effects are requested ahead of time."""

    @property
    def ready(self) -> int:
        """Pads that are computed and unused."""
        return max(0, self.made - self.next)

    @property
    def awaited(self) -> bool:
        """Whether a draw waits for its effects."""
        return bool(self._draws)

    def pads(self, first: int, rows: int) -> torch.Tensor:
        """Return pads ``first``, ``first`` + 1, … as integers [rows, width]."""
        width, dtype = self.key.width, self.key.dtype
        return Keystream(self._secret, first * blocks(width, dtype)).integers(rows, width, dtype)

    def draw(self, rows: int, effects: Future[Results]) -> torch.Tensor:
        """Use the next pads, and return them; ``effects`` gets their effects now or when they are computed."""
        first, self.next = self.next, self.next + rows
        noise = self.pads(first, rows)
        if self._draws or self.made < self.next:
            self._draws.append((first, rows, effects))
        else:
            effects.set_result(self._take(first, rows))
        return noise

    def prepare(self, rows: int) -> Future[None]:
        """Return a future that is done when ``rows`` pads are ready."""
        goal = self.next + rows
        ready: Future[None] = Future()
        if self.made >= goal:
            ready.set_result(None)
        else:
            self._goals.append((goal, ready))
        return ready

    def put(self, effects: Results) -> list[tuple[Future[Any], Any]]:
        """Add the effects of the next pads. Returns futures that are to be completed, with their results."""
        self._effects.append((self.made, effects))
        self.made += effects[0].shape[0]
        done: list[tuple[Future[Any], Any]] = []
        while self._draws and sum(self._draws[0][:2]) <= self.made:
            first, rows, future = self._draws.popleft()
            done.append((future, self._take(first, rows)))
        done += [(future, None) for goal, future in self._goals if goal <= self.made]
        self._goals = [(goal, future) for goal, future in self._goals if goal > self.made]
        return done

    def fail(self, error: BaseException) -> None:
        """End all waits for effects with an error."""
        waiting: list[Future[Any]] = [future for *_, future in self._draws]
        waiting += [future for _, future in self._goals]
        self._draws.clear()
        self._goals.clear()
        for future in waiting:
            future.set_exception(error)

    def _take(self, first: int, rows: int) -> Results:
        """Return the effects of pads ``first``, ``first`` + 1, …, which are computed, and forget earlier ones."""
        last = first + rows
        parts = []
        for start, effects in self._effects:
            low, high = max(first - start, 0), min(last - start, effects[0].shape[0])
            if low < high:
                parts.append(tuple([effect[low:high] for effect in effects]))
        while self._effects and self._effects[0][0] + self._effects[0][1][0].shape[0] <= last:
            self._effects.popleft()
        return parts[0] if len(parts) == 1 else tuple([torch.cat(column) for column in zip(*parts, strict=True)])
