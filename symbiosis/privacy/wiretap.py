"""A record of all calls that arrive at an executor: what an honest-but-curious provider can keep."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from symbiosis.core.requests import Call, Key, Results
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Session
from symbiosis.errors import UsageError
from symbiosis.host import Executor


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

    A call that a client sends again after a reconnect is recorded again. Calls of joint walks are recorded as those of
    the client ``joint walks``; with ``Executor(joint="off")`` there are none. Captured walks on a GPU are not recorded.

    Raises:
        UsageError: when it is opened; clients were walked jointly before, and these walks would not be recorded.
    """

    def __init__(self, executor: Executor) -> None:
        self.seen: list[Seen] = []
        self._service = executor.service
        self._numbers = itertools.count()
        self._open = False

    def __enter__(self) -> Wiretap:
        if self._service.walks_jointly:
            raise UsageError(
                "clients of this executor were walked jointly before, and these walks would not be recorded; open the "
                "wiretap earlier, or use Executor(joint='off')"
            )
        self._open = True
        self._service.taps.append(self._tap)
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._service.taps.remove(self._tap)

    def of(self, client: str) -> list[Seen]:
        """Return the calls of one client."""
        return [seen for seen in self.seen if seen.client == client]

    def _tap(self, session: Session) -> Session:
        return cast(Session, _TappedSession(session, self._record))

    def _record(self, client: str, call: Call, tensors: Results) -> Seen:
        seen = Seen(next(self._numbers) if self._open else -1, client, call.key, call.kind, tensors)
        if self._open:
            self.seen.append(seen)
        return seen


class _TappedSession:
    """A session whose calls are recorded."""

    def __init__(self, session: Session, record: Callable[[str, Call, Results], Seen]) -> None:
        self._session = session
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def submit(self, call: Call) -> asyncio.Future[Results]:
        seen = self._record(self.client, call, _copies(call.tensors))
        reply = self._session.submit(call)
        if reply.done():
            _keep_results(seen, reply)
        else:
            reply.add_done_callback(partial(_keep_results, seen))
        return reply

    def at_once(self, call: Call) -> Results | None:
        tensors = _copies(call.tensors)
        try:
            results = self._session.at_once(call)
        except Exception:
            self._record(self.client, call, tensors)
            raise
        if results is not None:  # otherwise the call is submitted next
            self._record(self.client, call, tensors).results = _copies(results)
        return results


def _keep_results(seen: Seen, reply: asyncio.Future[Results]) -> None:
    if not reply.cancelled() and reply.exception() is None:
        seen.results = _copies(reply.result())


def _copies(tensors: Results) -> Results:
    return tuple([tensor.detach().clone() for tensor in tensors])
