"""Calls from threads that may block to a channel on an event loop.

Backward passes of coroutine clients and synchronous code run on such threads.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from queue import SimpleQueue

from symbiosis.core.requests import Call, Results
from symbiosis.errors import ClientClosedError, ExecutorClosedError

Answers = SimpleQueue["Results | BaseException"]
"""Where a thread waits for the answer to one call. The thread takes the first entry."""


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
        cancel: Callable[[Call], object],
    ) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._send = send
        self._cancel = cancel
        self._waiting: dict[Answers, Call] = {}

    def call(self, call: Call) -> Results:
        """Send a call and return its results. Any thread but the loop's may call this."""
        if os.getpid() != self._pid:
            raise ClientClosedError("this client belongs to the process that opened it, not to its forked child")
        answers: Answers = SimpleQueue()
        self._waiting[answers] = call
        try:
            self._loop.call_soon_threadsafe(self._submit, call, answers)
        except RuntimeError as error:
            del self._waiting[answers]
            raise ExecutorClosedError("the event loop of this client is closed") from error
        try:
            answer = answers.get()
        finally:
            del self._waiting[answers]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _submit(self, call: Call, answers: Answers) -> None:
        if not answers.empty() or answers not in self._waiting:  # interrupted before it was sent
            return

        def deliver(reply: asyncio.Future[Results]) -> None:
            if reply.cancelled():
                answers.put(ClientClosedError("the request was cancelled"))
            else:
                answers.put(reply.exception() or reply.result())

        try:
            self._send(call).add_done_callback(deliver)
        except Exception as error:  # noqa: BLE001 (the waiting thread gets any error)
            answers.put(error)

    def interrupt(self, error: BaseException) -> None:
        """End every waiting call with ``error``."""
        for answers, call in list(self._waiting.items()):
            answers.put(error)
            self._cancel(call)
