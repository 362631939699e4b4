"""Calls of a masked channel besides the call of the client: for effects of noise, and to further executors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from symbiosis.core.requests import Call, Results
from symbiosis.core.transport import Channel
from symbiosis.errors import ClientClosedError

T = TypeVar("T")


class SideCalls:
    """Sends calls from any thread without waiting, and waits for their results on threads that may block.

    ``loop`` is the event loop of the channels. Without one, channels are synchronous, and up to ``threads`` threads
    call them.
    """

    def __init__(self, client: str, threads: int, loop: asyncio.AbstractEventLoop | None) -> None:
        self._client = client
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._pool = ThreadPoolExecutor(threads, "symbiosis-mask")  # starts no thread before it has a call to send
        self._lock = threading.Lock()
        self._interrupted: Future[None] = Future()
        """Ends the waits in progress when it gets an error."""

    def send(self, channel: Channel, call: Call) -> Future[Results]:
        """Send a call and return the future of its results.

        Raises:
            ClientClosedError: the client, or its event loop, was closed.
        """
        answer: Future[Results] = Future()
        try:
            if self._loop is None:
                return self._pool.submit(channel.call, call)
            if threading.get_ident() == self._loop_thread:
                _send_on_loop(channel, call, answer)
            else:
                self._loop.call_soon_threadsafe(_send_on_loop, channel, call, answer)
        except RuntimeError as error:
            raise ClientClosedError(f"the client {self._client!r} or its event loop was closed") from error
        return answer

    def cancel(self, channels: Sequence[Channel], calls: Sequence[Call]) -> None:
        """Cancel calls, one for each channel, from any thread. Calls of synchronous channels end by themselves."""
        if self._loop is not None:
            for channel, call in zip(channels, calls, strict=True):
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(channel.cancel, call)

    def wait(self, future: Future[T]) -> T:
        """Block until a future is done and return its result, or raise the error of :meth:`interrupt`."""
        if not future.done():
            interrupted = self._interrupted
            waited: list[Future[Any]] = [future, interrupted]
            concurrent.futures.wait(waited, return_when=concurrent.futures.FIRST_COMPLETED)
            if not future.done():
                interrupted.result()
        return future.result()

    def interrupt(self, error: BaseException) -> None:
        """End all waits in progress with an error."""
        with self._lock:
            interrupted, self._interrupted = self._interrupted, Future()
        interrupted.set_exception(error)

    def close(self, release: Callable[[], None]) -> Future[None] | None:
        """Call ``release``. Channels are closed already.

        With an event loop, return the future of the call, which is made on a thread; then :meth:`join` ends the thread.
        Without one, block until it and calls of the channels have ended.
        """
        if self._loop is not None:
            return self._pool.submit(release)
        release()
        self.join()
        return None

    def join(self) -> None:
        """Block until all threads have ended."""
        self._pool.shutdown(wait=True)


def _send_on_loop(channel: Channel, call: Call, answer: Future[Results]) -> None:
    try:
        reply = channel.send(call)
    except Exception as error:  # noqa: BLE001 (the error belongs to the thread that waits for the answer)
        answer.set_exception(error)
        return
    asyncio.ensure_future(reply).add_done_callback(partial(_copy_result, answer))


def _copy_result(answer: Future[Results], reply: asyncio.Future[Results]) -> None:
    if reply.cancelled():
        answer.set_exception(ClientClosedError("the request was cancelled"))
    elif (error := reply.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(reply.result())
