"""Arrivals: whether, and for how long, it pays to wait for another request with the same key.

A batch of a key takes a + b · rows seconds, so a request that joins another one's batch saves ``a``. A client that was
served for an earlier key of the walk has yet to compute before each request up to this one. Waiting for it pays if it
computes for a shorter time than the sum of ``a`` over these keys: clients that meet share batches from there on, and
each of these batches, too, costs a wait of that kind. If ``a`` is larger at the other keys of the walk, their mean
counts, because clients that part at this key share none of their batches either. A client in the executor's process
computes on the executor's cores, so these are not idle while a request waits for it. Waiting for it pays if it computes
for a shorter time than the sum of ``a`` over the last 16 keys of the walk. How long each client computes, and the order
of keys, are learned.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from symbiosis.core.requests import Batch, Key, Request
from symbiosis.policies.latency import LatencyModel

_LEARN = 0.1
"""Weight of the newest time in a client's usual time."""
_PAUSE = 3.0
"""Multiple of a client's usual time that a longer time, such as a pause between two tokens, counts as."""
_PATIENCE = 2
"""How long a wait for a client goes on after it has computed for its usual time, in multiples of what a wait saves."""
_MAX_WALK = 16
"""A client counts as near a key if it needs at most this many requests until the one for the key."""
_MOST = 20_000
"""Keys, and clients. If there are more, what was learned is forgotten."""


class Arrivals:
    """The clients that compute between two requests.

    Args:
        latency: the learned latencies of batches.
        longest_s: longest time in seconds that a client is taken to compute before a request.
    """

    def __init__(self, latency: LatencyModel, longest_s: float) -> None:
        self._latency = latency
        self._longest_s = longest_s
        self._served_at: dict[str, Key] = {}
        """Key of the latest batch of each client that has sent no request since."""
        self._left: dict[Key, OrderedDict[str, float]] = {}
        """The same clients by key, with the time at which that batch ended; the latest one is last."""
        self._usual: dict[str, float] = {}
        """Seconds that each client usually computes before a request."""
        self._local: set[str] = set()
        """Clients in the executor's process."""
        self._before: dict[Key, Key] = {}
        """For each key, the key for which a client was served just before it asked for this one."""

    def submitted(self, request: Request) -> None:
        """Learn from a request that was queued."""
        client = request.client
        before = self._served_at.pop(client, None)
        if before is None:
            return
        seconds = min(max(request.arrived - self._left[before].pop(client), 0.0), self._longest_s)
        usual = self._usual.get(client) or seconds
        self._usual[client] = usual + _LEARN * (min(seconds, _PAUSE * usual) - usual)
        self._before[request.key] = before
        (self._local.add if request.local else self._local.discard)(client)

    def started(self, batch: Batch, now: float) -> None:
        """Note the clients of a batch that starts now."""
        known: list[dict[Any, Any] | set[str]] = [self._served_at, self._left, self._usual, self._local, self._before]
        if max(map(len, known)) >= _MOST:
            for each in known:
                each.clear()
        key, served_at = batch.key, self._served_at
        left = self._left.setdefault(key, OrderedDict())
        for request, _, _ in batch.slices:
            client = request.client
            if client in served_at:  # a client may have several requests queued, or a long one
                del self._left[served_at[client]][client]
            served_at[client] = key
            left[client] = now

    def ran(self, batch: Batch, seconds: float) -> None:
        """Note how long the latest batch of its clients took. On a GPU they may have sent other requests since."""
        for client in {request.client for request, _, _ in batch.slices}:
            if self._served_at.get(client) == batch.key:
                self._left[batch.key][client] += seconds

    def pays_until(self, key: Key, now: float) -> float:
        """Return until when waiting for another request for a key is expected to pay, or ``-inf``.

        Args:
            key: of the request that would wait.
            now: present time, in seconds.
        """
        keys = self._way(key)
        starts = [self._latency[each].start or 0.0 for each in keys[:-1]]
        mean = sum(starts) / max(len(starts), 1)
        for requests, before in enumerate(keys[1:], 1):
            if left := self._left.get(before):
                client, ended = next(reversed(left.items()))
                computed = ended + requests * self._usual.get(client, 0.0)
                saved = sum(starts) if client in self._local else max(sum(starts[:requests]), requests * mean)
                if computed - saved < now < computed + _PATIENCE * saved:
                    return computed + _PATIENCE * saved
        return -math.inf

    def _way(self, key: Key) -> list[Key]:
        """Return a key and those before it in a walk, the nearest one first."""
        keys, before = [key], self._before.get(key)
        while before is not None and len(keys) <= _MAX_WALK:
            keys.append(before)
            before = None if before == key else self._before.get(before)
        return keys
