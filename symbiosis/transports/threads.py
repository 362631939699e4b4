"""Calls from threads that may block to a channel on an event loop.

Backward passes of coroutine clients and synchronous code run on such threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import torch

from symbiosis.core.requests import Call
from symbiosis.core.transport import Channel
from symbiosis.errors import ClientClosedError, ExecutorClosedError, SymbiosisError
from symbiosis.transports.synchronous import SynchronousChannel, closed_error, forked_error

__all__ = ["LoopThread", "ThreadCalls", "ThreadedChannel"]

T = TypeVar("T")
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
    """Passes calls to a channel's ``send`` on its event loop and blocks until they are answered.

    Args:
        loop: the channel's event loop.
        send: sends a call; called on the loop.
        cancel: withdraws a call; called on the thread that calls :meth:`interrupt`.
    """

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
        """Send a call and return its results. Any thread but the loop's may call this."""
        waiting = _Waiting(call)
        self._waiting.add(waiting)
        try:
            self._loop.call_soon_threadsafe(self._submit, waiting)
        except RuntimeError as error:  # the loop is closed
            self._waiting.discard(waiting)
            raise ExecutorClosedError("the event loop of this client is closed") from error
        try:
            waiting.answered.acquire()
        finally:
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
        except Exception as error:  # noqa: BLE001 (the waiting thread gets any error)
            waiting.answer(None, error)
            return
        reply.add_done_callback(partial(_deliver, waiting))

    def interrupt(self, error: BaseException) -> None:
        """End every waiting call with ``error``."""
        for waiting in list(self._waiting):
            waiting.answer(None, error)
            self._cancel(waiting.call)


def _deliver(waiting: _Waiting, reply: asyncio.Future[Results]) -> None:
    if reply.cancelled():
        waiting.answer(None, ClientClosedError("the request was cancelled"))
    elif (error := reply.exception()) is not None:
        waiting.answer(None, error)
    else:
        waiting.answer(reply.result(), None)


class LoopThread:
    """An event loop on its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="symbiosis-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. Blocks."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and wait for its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ThreadedChannel(SynchronousChannel):
    """A channel for synchronous code that uses a channel on the event loop of another thread."""

    def __init__(self, thread: LoopThread, channel: Channel) -> None:
        self.client = channel.client
        self.device = channel.device
        self.layers = channel.layers
        self.share = channel.share
        self.identity = channel.identity
        self.before_return = channel.before_return
        self._thread = thread
        self._channel = channel
        self._in_pass = False
        self._closed = False
        self._pid = os.getpid()

    def call(self, call: Call) -> Results:
        self._check()
        return self._channel.call(call)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise forked_error(self.client)
        if self._closed:
            raise closed_error(self.client)

    def begin_pass(self) -> None:
        self._walk(True)

    def end_pass(self) -> None:
        self._walk(False)

    def _walk(self, in_pass: bool) -> None:
        if self._in_pass != in_pass and not self._closed and os.getpid() == self._pid:
            self._in_pass = in_pass
            self._soon(self._walk_now, in_pass)

    def _walk_now(self, in_pass: bool) -> None:
        with contextlib.suppress(SymbiosisError):  # the next call raises it
            if in_pass:
                self._channel.begin_pass()
            else:
                self._channel.end_pass()

    def _soon(self, what: Callable[..., None], *arguments: Any) -> None:
        self._thread.loop.call_soon_threadsafe(what, *arguments)

    def close(self) -> None:
        """Leave. A call in progress on another thread ends."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._soon(self._channel.close)
            self._thread.close()
