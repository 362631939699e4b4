"""Calls from threads that may block (a client's backward) to a channel that lives on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import torch

from symbiosis.core.requests import Call
from symbiosis.errors import ExecutorClosedError

__all__ = ["ThreadCalls"]

Results = tuple[torch.Tensor, ...]


class _Waiting:
    """A thread that waits for the answer to one call."""

    __slots__ = ("answered", "call", "error", "results")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.answered = threading.Lock()
        self.answered.acquire()
        self.results: Results | None = None
        self.error: BaseException | None = None

    def answer(self, results: Results | None, error: BaseException | None) -> None:
        if self.results is None and self.error is None:
            self.results, self.error = results, error
            self.answered.release()


class ThreadCalls:
    """Hands calls to a channel's ``send`` on its event loop and blocks until they are answered."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Call], asyncio.Future[Results]],
        cancel: Callable[[Call], None],
    ) -> None:
        self._loop = loop
        self._send = send
        self._cancel = cancel
        self._waiting: set[_Waiting] = set()

    def call(self, call: Call) -> Results:
        """Send a call and wait; on any thread but the loop's."""
        waiting = _Waiting(call)
        self._waiting.add(waiting)
        try:
            self._loop.call_soon_threadsafe(self._submit, waiting)
        except RuntimeError as error:  # the loop is closed
            self._waiting.discard(waiting)
            raise ExecutorClosedError("the event loop of this client is closed") from error
        with waiting.answered:
            self._waiting.discard(waiting)
        if waiting.error is not None:
            raise waiting.error
        assert waiting.results is not None
        return waiting.results

    def _submit(self, waiting: _Waiting) -> None:
        if waiting.error is not None:  # interrupted before it was sent
            return
        try:
            reply = self._send(waiting.call)
        except Exception as error:  # noqa: BLE001 (the thread that waits must get it, whatever it is)
            waiting.answer(None, error)
            return
        reply.add_done_callback(partial(_deliver, waiting))

    def interrupt(self, error: BaseException) -> None:
        """End every call that waits with ``error``."""
        for waiting in list(self._waiting):
            waiting.answer(None, error)
            self._cancel(waiting.call)


def _deliver(waiting: _Waiting, reply: asyncio.Future[Results]) -> None:
    if reply.cancelled():
        waiting.answer(None, ExecutorClosedError("the request was cancelled"))
    elif (error := reply.exception()) is not None:
        waiting.answer(None, error)
    else:
        waiting.answer(reply.result(), None)
