"""A record of all calls that arrive at an executor: what an honest-but-curious provider can keep."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from symbiosis.core.executor import Executor
from symbiosis.core.requests import NO_TERMS, Call, Key, Kind, Terms
from symbiosis.core.session import ExecutorSession
from symbiosis.privacy.masks import Results

__all__ = ["Seen", "Wiretap"]


@dataclass(slots=True)
class Seen:
    """One call as the executor received it."""

    number: int
    """Number of the call in order of arrival, over all clients."""
    client: str
    key: Key
    kind: Kind
    tensors: tuple[torch.Tensor, ...]
    """Copies of the call's matrices."""
    results: Results | None = None
    """Copies of the results, once the call is answered."""


class Wiretap:
    """Records every call of clients that join while it is open, over any transport, refused calls included::

        with Wiretap(executor) as tap:
            async with executor.client(config) as client:
                await client.train_step(batch, optimizer)
        tap.seen  # list[Seen], in order of arrival

    A call that a client sends again after a reconnect is recorded again.
    """

    def __init__(self, executor: Executor) -> None:
        self.seen: list[Seen] = []
        self._executor = executor
        self._numbers = itertools.count()
        self._open = False

    def __enter__(self) -> Wiretap:
        self._open = True
        join = self._executor.join

        def joined(client: str, terms: Terms = NO_TERMS) -> ExecutorSession:
            session = join(client, terms)
            self._tap(session)
            return session

        setattr(self._executor, "join", joined)  # noqa: B010 (on this executor only, not on the class)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        delattr(self._executor, "join")

    def of(self, client: str) -> list[Seen]:
        """Return the calls of one client."""
        return [seen for seen in self.seen if seen.client == client]

    def _tap(self, session: ExecutorSession) -> None:
        submit, at_once = session.submit, session.at_once

        def submitted(call: Call) -> asyncio.Future[Results]:
            seen = self._record(session.client, call, _copies(call.tensors))
            reply = submit(call)
            if reply.done():
                _keep_results(seen, reply)
            else:
                reply.add_done_callback(lambda reply: _keep_results(seen, reply))
            return reply

        def ran_at_once(call: Call) -> Results | None:
            tensors = _copies(call.tensors)
            results = at_once(call)
            if results is not None:  # otherwise the same call is submitted next
                self._record(session.client, call, tensors).results = _copies(results)
            return results

        setattr(session, "submit", submitted)  # noqa: B010
        setattr(session, "at_once", ran_at_once)  # noqa: B010

    def _record(self, client: str, call: Call, tensors: Results) -> Seen:
        seen = Seen(next(self._numbers) if self._open else -1, client, call.key, call.kind, tensors)
        if self._open:
            self.seen.append(seen)
        return seen


def _keep_results(seen: Seen, reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled() and reply.exception() is None:
        seen.results = _copies(reply.result())


def _copies(tensors: Results) -> Results:
    return tuple([tensor.detach().clone() for tensor in tensors])
