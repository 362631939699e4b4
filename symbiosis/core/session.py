"""The executor's end of one client's channel: every call is checked here before anything is queued."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from symbiosis.core.requests import Call, Expected, Key, Kind, LayerSpec, Terms, expected
from symbiosis.errors import ClientClosedError, RequestError

if TYPE_CHECKING:
    from symbiosis.core.executor import Executor

__all__ = ["ExecutorSession"]

Results = tuple[torch.Tensor, ...]


_MOST_DECODED = 64
"""Rows of a request from another process that are believed to be a token each of as many texts."""


def kind_of(call: Call, terms: Terms) -> Kind:
    """What a call's rows are for. Kinds ascend from the most urgent to the most patient; a client from another process
    is believed that its rows are more patient than they look, and not that they are less."""
    kind = Kind.FINETUNE if call.key.pass_.is_backward else call.kind
    if kind is Kind.DECODE and terms.asked and call.tensors[0].shape[0] > _MOST_DECODED:
        kind = Kind.PREFILL
    if terms.kind is None:
        return kind
    return max(kind, terms.kind) if terms.asked else terms.kind


class ExecutorSession:
    """One admitted client. Checks every call against the layer table before anything is queued."""

    def __init__(self, executor: Executor, client: str, specs: Sequence[LayerSpec], terms: Terms) -> None:
        self.client = client
        self.terms = terms
        self._executor = executor
        self._specs = specs
        self._device = executor.device
        self._expected: dict[Key, Expected] = {}
        """What was found for the keys seen so far."""
        self._ended: BaseException | None = None

    def submit(self, call: Call) -> asyncio.Future[Results]:
        self._check(call)
        return self._executor.submit(self.client, call)

    def at_once(self, call: Call) -> Results | None:
        self._check(call)
        return self._executor.at_once(self.client, call)

    def expects(self, key: Key) -> Expected:
        found = self._expected.get(key)
        if found is None:
            if len(self._expected) >= 8 * len(self._specs) + 64:  # more groups than any model has: a tenant at play
                self._refuse(f"layers {key.layers} are one group of siblings too many")
            try:
                found = self._expected[key] = expected(self._specs, key)
            except RequestError as error:
                self._refuse(str(error))
        return found

    def _check(self, call: Call) -> None:
        if self._ended is not None:
            raise self._ended
        widths, dtype, _ = self._expected.get(call.key) or self.expects(call.key)
        tensors = call.tensors
        rows = tensors[0].shape[0] if tensors and tensors[0].ndim else 0
        if len(tensors) == len(widths) and rows:
            for tensor, width in zip(tensors, widths, strict=True):
                if (
                    tensor.shape != (rows, width)
                    or tensor.dtype is not dtype
                    or tensor.device != self._device
                    or type(tensor) is not torch.Tensor
                ):
                    break
            else:
                return
        name = self._specs[call.key.layers[0]].name
        wanted = " and ".join(f"[n, {width}]" for width in widths)
        got = " and ".join(f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}" for tensor in tensors)
        self._refuse(f"{name} {call.key.pass_.name} takes {wanted} {dtype} on {self._device} with n ≥ 1, not {got}")

    def _refuse(self, problem: str) -> NoReturn:
        raise RequestError(f"request of {self.client!r} refused: {problem}")

    def flush(self) -> None:
        self._executor.pump_now()

    def cancel(self, call: Call) -> None:
        self._executor.cancel(call)

    def begin_pass(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._executor.begin_pass(self.client)

    def end_pass(self) -> None:
        if self._ended is None:
            self._executor.end_pass(self.client)

    def close(self, error: BaseException | None = None) -> None:
        if self._ended is None:
            self._ended = error or ClientClosedError(f"the client {self.client!r} was closed")
            self._executor.leave(self.client, self._ended)
