"""Arrivals: whether, and for how long, it pays to wait for another request with the same key.

A batch of a key takes a + b · rows seconds. A second request in the batch saves ``a``. The two clients save it again in
each batch that they share from there on. Let n be the number of these batches. Waiting pays if the next request for
the key usually comes within n · a of the last one, and if a client is *near* the key: it was served a moment ago for
one of the 16 keys before this one. n, the gaps between requests and the order of keys are learned.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from symbiosis.core.requests import Batch, Key, Request

_LEARN_GAP = 0.1
"""Weight of the newest gap between two requests for a key."""
_LEARN_TOGETHER = 0.02
"""Weight of the newest batch in the mean of ``_together``."""
_MAX_LAYERS_TOGETHER = 64
_MAX_WALK = 16
"""A client counts as near a key if it needs at most this many requests until the one for the key."""
_MAX_KEYS = 20_000
_MAX_CLIENTS = 20_000


class Arrivals:
    """The recent requests of all clients, by key.

    Args:
        longest_s: upper bound for a gap between two requests for a key, in seconds.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._gaps: dict[Key, tuple[float, float]] = {}
        """Time of the last request for a key, and the usual gap between two; in seconds."""
        self._served_at: dict[str, Key] = {}
        """Key of the latest batch of each client that has sent no request since."""
        self._left: dict[Key, OrderedDict[str, float]] = {}
        """The same clients by key, with the time of that batch; the latest one is last."""
        self._before: dict[Key, Key] = {}
        """For each key, the key for which a client was served just before it asked for this one."""
        self._batches = 0
        self._last_batch: dict[str, int] = {}
        """Number of the latest batch of each client."""
        self._together = 0.0
        """Share of the neighbours in a batch that were in the same batch before."""

    def submitted(self, request: Request) -> None:
        """Learn from a request that was queued."""
        key, now = request.key, request.arrived
        last, usual = self._gaps.get(key) or self._new_key()
        usual *= 1 - _LEARN_GAP
        if now > last:  # otherwise a wrapper has held the request back
            gap = now - last
            usual += _LEARN_GAP * min(gap, self._longest_s)
            last = now
        self._gaps[key] = last, usual
        before = self._served_at.pop(request.client, None)
        if before is not None:
            del self._left[before][request.client]
            self._before[key] = before

    def started(self, batch: Batch, now: float) -> None:
        """Learn from a batch that starts now."""
        if len(self._last_batch) >= _MAX_CLIENTS:
            for known in (self._last_batch, self._served_at, self._left):
                known.clear()
        self._batches += 1
        same, previous, number = 0, -1, self._batches
        key, last_batch, served_at = batch.key, self._last_batch, self._served_at
        left = self._left.get(key)
        if left is None:
            left = self._left[key] = OrderedDict()
        for request, _, _ in batch.slices:
            client = request.client
            last = last_batch.get(client, -2)
            same += last == previous
            previous = last
            last_batch[client] = number
            if client in served_at:  # a client may have several requests queued, or a long one
                del self._left[served_at[client]][client]
            served_at[client] = key
            left[client] = now
        if len(batch.slices) > 1:
            self._together += _LEARN_TOGETHER * (same / (len(batch.slices) - 1) - self._together)

    def pays_until(self, key: Key, start: float, now: float) -> float:
        """Return until when waiting for another request for a key is expected to pay, or ``-inf``.

        Args:
            start: seconds that any batch of the key takes (``a``).
            now: present time, in seconds.
        """
        last, usual = self._gaps.get(key, (-math.inf, math.inf))
        worth = start * min(1 / max(1 - self._together, 1e-9), _MAX_LAYERS_TOGETHER)
        if usual >= worth or not self._is_on_the_way(key, now - start - worth):
            return -math.inf
        return last + worth

    def _is_on_the_way(self, key: Key, since: float) -> bool:
        """Return whether a client that has sent no request since was served a few layers earlier, after ``since``."""
        for _ in range(_MAX_WALK):
            before = self._before.get(key)
            if before is None:
                return False
            left = self._left.get(before)
            if left and next(reversed(left.values())) >= since:
                return True
            key = before
        return False

    def _new_key(self) -> tuple[float, float]:
        """Make room for a new key, and return its time of the last request and its usual gap."""
        if len(self._gaps) >= _MAX_KEYS:
            for known in (self._gaps, self._served_at, self._left, self._before):
                known.clear()
        return -math.inf, 0.0
