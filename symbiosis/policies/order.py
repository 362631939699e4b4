"""The order of queues, and the requests of one kind.

Clients desynchronize: one waits at layer 5 while another is at layer 2. If the queue *furthest behind* runs first, the
second client reaches layer 5 while the first one waits there, and they share every batch from there on. Serving the
oldest request first keeps their distance, so they never meet.

Forward and backward passes walk the layers in opposite directions and never meet, so they are ordered separately. The
policy chooses between the two directions, and must serve both.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator

from symbiosis.core.requests import Key, Request


class FurthestBehind:
    """The non-empty queue that is furthest behind, by direction.

    A request costs O(log queues). Keys of empty queues are removed when they reach the top of a heap, or when most of
    the keys are such keys: tenants choose keys freely.
    """

    def __init__(self) -> None:
        self._heaps: tuple[list[tuple[int, Key]], list[tuple[int, Key]]] = ([], [])
        """Heaps of forward keys and of backward keys."""
        self._known: set[Key] = set()

    def add(self, request: Request) -> None:
        """Note that a request was queued."""
        key = request.key
        if key not in self._known:
            self._known.add(key)
            backward = key.pass_.is_backward
            heapq.heappush(self._heaps[backward], (-key.layers[-1] if backward else key.layers[0], key))

    def prune(self, queues: Collection[Key]) -> None:
        """Remove the keys of empty queues if they are :func:`too_many`."""
        if too_many(self._known, queues):
            self._known.intersection_update(queues)
            for heap in self._heaps:
                heap[:] = [entry for entry in heap if entry[1] in self._known]
                heapq.heapify(heap)

    def candidates(self, queues: Collection[Key]) -> list[Key]:
        """Return the forward key and the backward key that are furthest behind, as far as there are any."""
        self.prune(queues)
        found = []
        for heap in self._heaps:
            while heap and heap[0][1] not in queues:
                self._known.discard(heapq.heappop(heap)[1])
            if heap:
                found.append(heap[0][1])
        return found


def too_many(keys: set[Key], queues: Collection[Key]) -> bool:
    """Return whether most of many keys have no queue. Removing them then costs O(1) a request on average."""
    return len(keys) > 2 * len(queues) + 64


class Index:
    """The queued requests of some kinds, by key. The policy adds a request in ``submitted``, and removes it when its
    last row has been taken or the rest of it was cancelled."""

    def __init__(self) -> None:
        self._behind = FurthestBehind()
        self._requests: dict[Key, OrderedDict[int, Request]] = {}

    def add(self, request: Request) -> None:
        """Note that a request was queued."""
        self._behind.add(request)
        requests = self._requests.get(request.key)
        if requests is None:
            requests = self._requests[request.key] = OrderedDict()
        requests[request.id] = request

    def remove(self, request: Request) -> None:
        """Note that a request is no longer queued."""
        requests = self._requests[request.key]
        del requests[request.id]
        if not requests:
            del self._requests[request.key]

    def of(self, key: Key) -> Iterator[Request]:
        """Iterate over the requests for a key, in arrival order."""
        return iter(self._requests[key].values()) if key in self._requests else iter(())

    def furthest_behind(self) -> Request | None:
        """Return the first request for the key that is furthest behind; of the two directions, the older request."""
        firsts = [next(iter(self._requests[key].values())) for key in self._behind.candidates(self._requests)]
        return min(firsts, key=lambda request: request.id, default=None)
