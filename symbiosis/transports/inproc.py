"""``inproc://name``: clients that are coroutines in the executor's own process. The tensor itself is the message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import torch

from symbiosis.core.protocols import Service, Session
from symbiosis.core.requests import Call, LayerSpec
from symbiosis.errors import ExecutorClosedError, UsageError

__all__ = ["InProcTransport"]

_listeners: dict[str, InProcListener] = {}
"""Open addresses of this process."""


class InProcTransport:
    """Listen on, or connect to, a name in this process."""

    async def listen(self, address: str, service: Service) -> InProcListener:
        if address in _listeners:
            raise UsageError(f"{address} is in use already in this process; choose another name")
        listener = _listeners[address] = InProcListener(address, service)
        return listener

    async def connect(self, address: str, client: str) -> InProcChannel:
        listener = _listeners.get(address)
        if listener is None:
            known = ", ".join(_listeners) or "none is"
            raise ExecutorClosedError(f"no executor listens on {address} in this process (open: {known})")
        if listener.loop is not asyncio.get_running_loop():
            raise UsageError(f"{address} belongs to an executor on another event loop; use its client there")
        return listener.accept(client)


class InProcListener:
    """An open address: hands the executor's sessions to channels of the same process."""

    def __init__(self, address: str, service: Service) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self._service = service
        self._channels: set[InProcChannel] = set()

    def accept(self, client: str) -> InProcChannel:
        channel = InProcChannel(self._service, self._service.join(client), self.loop, self._channels.discard)
        self._channels.add(channel)
        return channel

    async def close(self) -> None:
        _listeners.pop(self.address, None)
        for channel in list(self._channels):
            channel.end(ExecutorClosedError(f"the executor at {self.address} was shut down"))


class _Waiting:
    """A thread that waits for the answer to one call."""

    __slots__ = ("answered", "call", "error", "results")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.answered = threading.Lock()
        self.answered.acquire()
        self.results: tuple[torch.Tensor, ...] | None = None
        self.error: BaseException | None = None

    def answer(self, results: tuple[torch.Tensor, ...] | None, error: BaseException | None) -> None:
        if self.results is None and self.error is None:
            self.results, self.error = results, error
            self.answered.release()


class InProcChannel:
    """A client's end. Calls from the loop go straight to the session; calls from a thread go over the loop."""

    def __init__(
        self,
        service: Service,
        session: Session,
        loop: asyncio.AbstractEventLoop,
        forget: Callable[[InProcChannel], None],
    ) -> None:
        self.client = session.client
        self.device = service.device
        self._service = service
        self._session = session
        self._loop = loop
        self._forget = forget
        self._waiting: set[_Waiting] = set()
        self._ended: BaseException | None = None
        self.send = session.submit
        self.flush = session.flush
        self.cancel = session.cancel
        self.begin_pass = session.begin_pass
        self.end_pass = session.end_pass
        self.skeleton = service.skeleton

    @property
    def layers(self) -> Sequence[LayerSpec]:
        return self._service.layers

    def call(self, call: Call) -> tuple[torch.Tensor, ...]:
        if self._ended is not None:
            raise self._ended
        results = self._session.at_once(call)
        if results is not None:
            return results
        waiting = _Waiting(call)
        self._waiting.add(waiting)
        try:
            self._loop.call_soon_threadsafe(self._submit, waiting)
        except RuntimeError as error:  # the loop is closed
            self._waiting.discard(waiting)
            raise ExecutorClosedError("the executor's event loop is closed") from error
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
            reply = self._session.submit(waiting.call)
        except Exception as error:  # noqa: BLE001 (the thread that waits must get it, whatever it is)
            waiting.answer(None, error)
            return
        reply.add_done_callback(lambda reply: _deliver(reply, waiting))

    def interrupt(self, error: BaseException) -> None:
        for waiting in list(self._waiting):
            waiting.answer(None, error)
            self._session.cancel(waiting.call)

    def close(self) -> None:
        self._session.close()
        self._forget(self)

    def end(self, error: BaseException) -> None:
        """The executor ends this channel."""
        self._ended = error
        self._session.close(error)
        self.interrupt(error)
        self._forget(self)


def _deliver(reply: asyncio.Future[tuple[torch.Tensor, ...]], waiting: _Waiting) -> None:
    if reply.cancelled():
        waiting.answer(None, ExecutorClosedError("the request was cancelled"))
    elif (error := reply.exception()) is not None:
        waiting.answer(None, error)
    else:
        waiting.answer(reply.result(), None)
