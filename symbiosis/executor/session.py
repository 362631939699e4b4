"""The executor's end of one client's channel: every call is checked here before anything is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from symbiosis.core.requests import Call, Expected, Key, LayerSpec, Results
from symbiosis.core.terms import Kind, Terms, kind_of
from symbiosis.errors import ClientClosedError, RequestError, copied
from symbiosis.executor.engine import Engine


class ExecutorSession:
    """One admitted client. Implements :class:`~symbiosis.core.transport.Session`.

    Args:
        engine: runs the calls.
        client: the client's name.
        layers: the layer table.
        expected: returns the shapes of a call, by the layer table.
        device: device of all tensors of calls.
        terms: the client's effective terms.
        local: whether the client computes in the executor's process.
        check_stays: raises ExecutorClosedError if no client of another process may begin a walk any more.
        forget: called with the client's name when the session ends.
    """

    def __init__(
        self,
        engine: Engine,
        client: str,
        layers: Sequence[LayerSpec],
        expected: Callable[[Key], Expected],
        device: torch.device,
        terms: Terms,
        local: bool,
        check_stays: Callable[[], None],
        forget: Callable[[str], object],
    ) -> None:
        self.client = client
        self.terms = terms
        self._engine = engine
        self._layers = layers
        self._expected = expected
        self._device = device
        self.local = local
        self._check_stays = check_stays
        self._forget = forget
        self._ended: BaseException | None = None
        self.flush = engine.flush
        self.cancel = engine.cancel

    def submit(self, call: Call) -> asyncio.Future[Results]:
        self._check(call)
        return self._engine.submit(self.client, call, self._kind(call), answer_first=not self.local)

    def at_once(self, call: Call) -> Results | None:
        self._check(call)
        return self._engine.at_once(self.client, call, self._kind(call))

    def _kind(self, call: Call) -> Kind:
        rows, backward = call.tensors[0].shape[0], call.key.pass_.is_backward
        return kind_of(self.terms, call.kind, rows, backward=backward, trusted=self.local)

    def expects(self, key: Key) -> Expected:
        try:
            return self._expected(key)
        except RequestError as error:
            self._refuse(str(error))

    def _check(self, call: Call) -> None:
        if self._ended is not None:
            raise copied(self._ended)
        due = self.expects(call.key)
        if due.rows(call.tensors):
            for tensor in call.tensors:
                if tensor.device != self._device or type(tensor) is not torch.Tensor:
                    break
            else:
                return
        name = f"{self._layers[call.key.layers[0]].name} {call.key.pass_.name}"
        misfit = due.misfit(name, call.tensors)
        self._refuse(f"{misfit}; plain tensors on {self._device} are due")

    def _refuse(self, problem: str) -> NoReturn:
        raise RequestError(f"request of {self.client!r} refused: {problem}")

    def begin_walk(self) -> None:
        if self._ended is not None:
            raise copied(self._ended)
        if not self.local:
            self._check_stays()
        self._engine.begin_walk(self.client)

    def end_walk(self) -> None:
        if self._ended is None:
            self._engine.end_walk(self.client)

    def close(self, error: BaseException | None = None) -> None:
        if self._ended is None:
            self._ended = error or ClientClosedError(f"the client {self.client!r} was closed")
            self._forget(self.client)
            self._engine.leave(self.client, self._ended)
