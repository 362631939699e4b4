"""All that arrives at an executor's door: what an honest-but-curious provider can always keep."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from symbiosis.core.requests import Call, Key
from symbiosis.core.terms import NO_TERMS, Kind, Terms
from symbiosis.executor.session import ExecutorSession
from symbiosis.host import Executor

__all__ = ["Seen", "Wiretap"]

Results = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Seen:
    """One call as the executor saw it."""

    number: int
    """In the order of arrival, over all clients."""
    client: str
    key: Key
    kind: Kind
    tensors: tuple[torch.Tensor, ...]
    """Copies of its matrices."""
    results: Results | None = None
    """Copies of the answer, as soon as there was one."""


class Wiretap:
    """Records every call of clients that join while it is open, whatever their transport, also those refused::

        with Wiretap(executor) as tap:
            async with executor.client(config) as client:
                await client.train_step(batch, optimizer)
        tap.seen  # list[Seen], in order of arrival

    Calls of the very same matrices that are sent again after a reconnect are recorded again.
    """

    def __init__(self, executor: Executor) -> None:
        self.seen: list[Seen] = []
        self._executor = executor
        self._numbers = itertools.count()
        self._open = False

    def __enter__(self) -> Wiretap:
        self._open = True
        join = self._executor.service.join

        def joined(client: str, terms: Terms = NO_TERMS, *, local: bool = False) -> ExecutorSession:
            session = join(client, terms, local=local)
            self._tap(session)
            return session

        setattr(self._executor.service, "join", joined)  # noqa: B010 (of this executor only)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        delattr(self._executor.service, "join")

    def of(self, client: str) -> list[Seen]:
        """What was seen of one client."""
        return [seen for seen in self.seen if seen.client == client]

    def _tap(self, session: ExecutorSession) -> None:
        submit, at_once = session.submit, session.at_once

        def submitted(call: Call) -> asyncio.Future[Results]:
            seen = self._record(session.client, call, _copies(call.tensors))
            reply = submit(call)
            if seen is not None:
                if reply.done():
                    _answered(seen, reply)
                else:
                    reply.add_done_callback(lambda reply: _answered(seen, reply))
            return reply

        def ran_at_once(call: Call) -> Results | None:
            tensors = _copies(call.tensors)
            results = at_once(call)
            if results is not None:  # otherwise it comes again, to be queued
                seen = self._record(session.client, call, tensors)
                if seen is not None:
                    seen.results = _copies(results)
            return results

        setattr(session, "submit", submitted)  # noqa: B010
        setattr(session, "at_once", ran_at_once)  # noqa: B010

    def _record(self, client: str, call: Call, tensors: Results) -> Seen | None:
        if not self._open:
            return None
        seen = Seen(next(self._numbers), client, call.key, call.kind, tensors)
        self.seen.append(seen)
        return seen


def _answered(seen: Seen, reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled() and reply.exception() is None:
        seen.results = _copies(reply.result())


def _copies(tensors: Results) -> Results:
    return tuple([tensor.detach().clone() for tensor in tensors])
