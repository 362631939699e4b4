"""The order in which queues catch up with each other, shared by the policies that batch.

Clients drift apart: one waits at layer 5 while another is at layer 2. If the one *furthest behind* runs first, it
arrives where the other waits and from there they share every batch. Running the oldest request first instead keeps
their distance, and they never meet.

Forward and backward walk the layers in opposite directions and never meet, so they are ordered apart. Which of the two
goes first is the policy's choice; both must be served.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Iterator

from symbiosis.core.requests import Key, Request

__all__ = ["FurthestBehind", "Index"]


class FurthestBehind:
    """The non-empty queue furthest behind, per direction. O(log queues) a request; stale entries fall out lazily."""

    def __init__(self) -> None:
        self._heaps: tuple[list[tuple[int, Key]], list[tuple[int, Key]]] = ([], [])
        self._known: set[Key] = set()

    def add(self, request: Request) -> None:
        key = request.key
        if key not in self._known:
            self._known.add(key)
            backward = key.pass_.is_backward
            heapq.heappush(self._heaps[backward], (-key.layers[-1] if backward else key.layers[0], key))

    def candidates(self, queues: Container[Key]) -> list[Key]:
        """The key furthest behind among the forward queues and the one among the backward queues, where there are."""
        found = []
        for heap in self._heaps:
            while heap and heap[0][1] not in queues:
                self._known.discard(heapq.heappop(heap)[1])
            if heap:
                found.append(heap[0][1])
        return found


class Index:
    """The queued requests of some kinds, by key. Stale ones fall out when they come to the front."""

    def __init__(self) -> None:
        self._behind = FurthestBehind()
        self._requests: dict[Key, OrderedDict[int, Request]] = {}

    def add(self, request: Request) -> None:
        self._behind.add(request)
        requests = self._requests.get(request.key)
        if requests is None:
            requests = self._requests[request.key] = OrderedDict()
        requests[request.id] = request

    def __contains__(self, key: object) -> bool:
        requests = self._requests.get(key)  # type: ignore[call-overload]
        while requests:
            first: Request = next(iter(requests.values()))
            if first.remaining and not first.cancelled:
                return True
            del requests[first.id]
        if requests is not None:
            del self._requests[key]  # type: ignore[arg-type]
        return False

    def of(self, key: Key) -> Iterator[Request]:
        """Those for a key, in the order they came."""
        for request in self._requests[key].values():
            if request.taken < request.rows and not request.cancelled:
                yield request

    def furthest_behind(self) -> Request | None:
        """The first request for the key that is furthest behind; of the two directions, the one that came first."""
        firsts = [next(iter(self._requests[key].values())) for key in self._behind.candidates(self)]
        return min(firsts, key=lambda request: request.id, default=None)
