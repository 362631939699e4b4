"""Queued requests, by key and in arrival order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from symbiosis.core.requests import Batch, Key, Request


class Queue:
    """The queued requests of one key. Implements :class:`~symbiosis.core.policy.QueueView`."""

    __slots__ = ("_by_client", "_requests", "key", "rows")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.rows = 0
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self._by_client: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.id) is request

    def __repr__(self) -> str:
        return f"Queue({self.key}, {len(self)} requests, {self.rows} rows)"

    @property
    def oldest(self) -> Request:
        return next(iter(self._requests.values()))

    def take(self, max_rows: int, first: Request | None = None) -> list[tuple[Request, int]]:
        takes = []
        left = max_rows
        if first is not None and self._by_client[first.client][0] is first:
            takes.append((first, min(first.remaining, left)))
            left -= takes[0][1]
        else:
            first = None
        for request in self._requests.values():
            if left <= 0:
                break
            if request is not first:
                count = request.rows - request.taken
                if count > left:
                    count = left
                takes.append((request, count))
                left -= count
        return takes

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        mine = self._by_client.get(request.client)
        if mine is None:
            self._by_client[request.client] = [request]
        else:
            mine.append(request)
        self.rows += request.rows - request.taken

    def remove(self, request: Request) -> None:
        """Remove a request. The caller corrects ``rows``."""
        del self._requests[request.id]
        mine = self._by_client[request.client]
        if len(mine) == 1:
            del self._by_client[request.client]
        else:
            mine.remove(request)

    def of(self, client: str) -> Sequence[Request]:
        """Return a client's requests in arrival order; empty if there are none."""
        return self._by_client.get(client, ())

    def validate(self) -> None:
        """Assert that the records agree; for tests, O(requests)."""
        assert self, f"{self}: an empty queue was kept"
        assert self.rows == sum(request.remaining for request in self), f"row count of {self} is wrong"
        assert all(request.key == self.key for request in self), f"{self} holds a request of another key"
        by_client: dict[str, list[Request]] = {}
        for request in self:
            by_client.setdefault(request.client, []).append(request)
        assert by_client == self._by_client


class Queues:
    """All queues that are not empty.

    A change costs O(1) in the number of requests of all clients, and O(n) in those of the same client and key.
    """

    def __init__(self) -> None:
        self._queues: dict[Key, Queue] = {}
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self.by_key: Mapping[Key, Queue] = MappingProxyType(self._queues)
        """Queues by key."""

    def __len__(self) -> int:
        """Return the number of queued requests."""
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    @property
    def oldest(self) -> Request:
        """The request that arrived first."""
        return next(iter(self._requests.values()))

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.id] = request
        queue = self._queues.get(request.key)
        if queue is None:
            queue = self._queues[request.key] = Queue(request.key)
        queue.add(request)

    def started(self, batch: Batch) -> None:
        """Remove the rows of a batch."""
        queue = self._queues[batch.key]
        for request, _, stop in batch.slices:
            if stop == request.rows:
                del self._requests[request.id]
                queue.remove(request)
        queue.rows -= batch.rows
        if not queue.rows:
            del self._queues[batch.key]

    def cancel(self, request: Request) -> None:
        """Remove the remaining rows of a request."""
        queue = self._queues[request.key]
        del self._requests[request.id]
        queue.remove(request)
        queue.rows -= request.remaining
        if not queue.rows:
            del self._queues[request.key]

    def validate(self) -> None:
        """Assert that the records agree; for tests, O(requests)."""
        queued = {request.id: request for queue in self._queues.values() for request in queue}
        assert queued == dict(self._requests), "the queues and the arrival order disagree"
        for queue in self._queues.values():
            queue.validate()
