"""``inproc://name``: clients that are coroutines in the executor's process. A call passes tensors by reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch

from symbiosis.core.requests import Call, LayerSpec
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.core.transport import Check, Identity, Service, Session
from symbiosis.errors import ExecutorClosedError, UsageError, copied
from symbiosis.transports.limits import Limits
from symbiosis.transports.threads import ThreadCalls

_listeners: dict[str, InProcListener] = {}
"""Open listeners of this process, by address."""


class InProcTransport:
    """Listen on, or connect to, a name in this process."""

    def check(self, address: str) -> AbstractContextManager[object]:
        if address in _listeners:
            raise UsageError(f"{address} is in use in this process; choose another name")
        return nullcontext()

    async def listen(self, address: str, service: Service) -> InProcListener:
        self.check(address)
        listener = _listeners[address] = InProcListener(address, service)
        return listener

    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> InProcChannel:
        listener = _listeners.get(address)
        if listener is None:
            known = ", ".join(_listeners) or "none is"
            raise ExecutorClosedError(f"no executor listens on {address} in this process (open: {known})")
        if listener.loop is not asyncio.get_running_loop():
            raise UsageError(f"{address} belongs to an executor on another event loop; use its client there")
        return listener.accept(client, terms)

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> NoReturn:
        raise UsageError(f"{address} is in this process: its clients are coroutines; use `executor.client()`")

    def look(self, address: str) -> NoReturn:
        raise UsageError(f"{address} is seen from its own process only; use `executor.statistics()` there")


class InProcListener:
    """An open address. It gives the executor's sessions to channels of the same process."""

    def __init__(self, address: str, service: Service) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self._service = service
        self._channels: set[InProcChannel] = set()

    def accept(self, client: str, terms: Terms) -> InProcChannel:
        session = self._service.join(client, terms, local=True)
        channel = InProcChannel(self._service, session, self.loop, self._channels.discard)
        self._channels.add(channel)
        return channel

    def limit(self, limits: Limits) -> None:
        """Do nothing: clients of this process have no limits."""

    async def close(self) -> None:
        if _listeners.get(self.address) is self:
            del _listeners[self.address]
        for channel in list(self._channels):
            channel.end(ExecutorClosedError.of(self.address))
        self._service.closed(self)


class InProcChannel:
    """A client's end. Calls on the event loop go to the session directly; calls from threads go through the loop."""

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
        self._forget = forget
        self._ended: BaseException | None = None
        self.send = session.submit
        self.flush = session.flush
        self.cancel = session.cancel
        self.begin_walk = session.begin_walk
        self.end_walk = session.end_walk
        self.share = service.resident()
        self._threads = ThreadCalls(loop, self.send, self.cancel)
        self.interrupt = self._threads.interrupt

    @property
    def layers(self) -> Sequence[LayerSpec]:
        return self._service.layers

    def identity(self) -> Identity:
        return self._service.identity()

    def before_return(self, check: Check) -> None:
        pass  # this channel does not reconnect

    def call(self, call: Call) -> tuple[torch.Tensor, ...]:
        if self._ended is not None:
            raise copied(self._ended)
        results = self._session.at_once(call)
        if results is not None:
            return results
        return self._threads.call(call)

    def close(self) -> None:
        self._session.close()
        self._forget(self)

    def end(self, error: BaseException) -> None:
        """End the channel with ``error``, from the executor's side."""
        self._ended = error
        self._session.close(error)
        self.interrupt(error)
        self._forget(self)
