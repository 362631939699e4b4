"""The executor's side of a conversation with one client, whatever carries it.

A transport subclasses :class:`Peer`, feeds it messages and says how to send, where a call's tensors are and how to stop
listening for a while. All checks and limits are here, so every transport has the same.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from symbiosis.core.requests import Call, Expected
from symbiosis.core.transport import Service, Session
from symbiosis.errors import BusyError, ClientClosedError, ExecutorClosedError, SymbiosisError, UsageError, WireError
from symbiosis.log import get_logger
from symbiosis.transports import wire
from symbiosis.transports.wire import CallMessage, Limits, Type

__all__ = ["Peer"]

log = get_logger(__name__)

_KNOWN = 1024
"""Calls, but for their ids, that a peer remembers to have checked."""


class Peer(ABC):
    """One client of a listener. ``tenant`` is who the transport found it to be."""

    def __init__(self, service: Service, limits: Limits, tenant: str) -> None:
        self.tenant = tenant
        self.session: Session | None = None
        self._service = service
        self._limits = limits
        self._calls: dict[int, Call] = {}
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._rows = 0
        self._paused = False
        self._gone = False
        self._greeted = False

    # --------------------------------------------------------------------------------------- what a transport provides

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Send a message to the client, without waiting. May be called when the client is gone."""

    @abstractmethod
    def hang_up(self) -> None:
        """End the connection once what was sent is on its way."""

    @abstractmethod
    def listen(self, wanted: bool) -> None:
        """Stop feeding messages, or go on."""

    @abstractmethod
    def welcome(self, session: bool) -> dict[str, Any]:
        """What this transport adds to the welcome of a client that joins, or that only looks."""

    @abstractmethod
    def tensors(self, message: CallMessage, expected: Expected) -> tuple[torch.Tensor, ...]:
        """The call's matrices, [rows, width] each.

        Raises:
            WireError: they, or their answer, do not fit where the message says.
        """

    @abstractmethod
    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        """Send RESULT, with the results where the message wants them."""

    def qualified(self, name: str) -> str:
        """What a client of this name is called here."""
        return name

    # ------------------------------------------------------------------------------------------------- the conversation

    def received(self, data: bytes | memoryview) -> None:
        """A message has come. One that breaks the rules ends the conversation, and nothing else."""
        try:
            type_, content = wire.unpack(data)
            if type_ is Type.CALL and self.session is not None:
                self._call(self.session, self._read(content))
            else:
                self._control(type_, content)
        except WireError as error:
            self.refuse(error)

    def _control(self, type_: Type, content: Sequence[Any]) -> None:
        if type_ is Type.PING:
            self.send(wire.pack(Type.PONG))
        elif type_ is Type.STATUS:
            self.send(wire.pack(Type.STATUS, self._service.status()))
        elif type_ is Type.HELLO:
            self._hello(wire.read_hello(content))
        elif self.session is None:
            raise WireError(f"{type_.name} before HELLO")
        elif type_ is Type.BEGIN:
            self.session.begin_pass()
        elif type_ is Type.END:
            self.session.end_pass()
        elif type_ is Type.CANCEL:
            self._cancel(wire.read_id(content))
        else:
            raise WireError(f"{type_.name} is not for executors")

    def _hello(self, hello: wire.Hello) -> None:
        if self._greeted:
            raise WireError("a second HELLO")
        self._greeted = True
        if hello.name is not None:
            try:
                self.session = self._service.join(self.qualified(hello.name), hello.terms)
            except UsageError as error:  # the name is in use
                self.refuse(BusyError(str(error)))
                return
            except ExecutorClosedError as error:
                self.refuse(error)
                return
            log.info("client joined", client=self.session.client, tenant=self.tenant)
        share = self._service.share()
        welcome = {
            "share": share.description,
            "tokenizer": dict(share.tokenizer),
            "limits": self._limits.to_wire(),
            "instance": self._service.identity().instance,
            **self.welcome(hello.name is not None),
        }
        self.send(wire.pack(Type.WELCOME, welcome))

    def _read(self, content: Sequence[Any]) -> CallMessage:
        """Check a CALL. Most repeat an earlier one in all but their id; those were checked already."""
        try:
            known = self._known.get(content[1:])  # type: ignore[call-overload]
        except TypeError:  # something in it cannot be a key
            known = None
        if known is not None and type(content[0]) is int:
            return CallMessage(wire.read_id(content), *known)
        message = wire.read_call(content)
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[tuple(content[1:])] = message[1:]
        return message

    def _call(self, session: Session, message: CallMessage) -> None:
        if message.id in self._calls:
            raise WireError(f"call {message.id} is outstanding already")
        try:
            tensors = self.tensors(message, session.expects(message.key))
        except SymbiosisError as error:
            if isinstance(error, WireError):
                raise
            self.send(wire.pack_error(message.id, error))
            return
        self._submit(session, message, tensors)

    def _submit(self, session: Session, message: CallMessage, tensors: tuple[torch.Tensor, ...]) -> None:
        call = Call(message.key, message.kind, tensors)
        try:
            reply = session.submit(call)
        except SymbiosisError as error:
            self.send(wire.pack_error(message.id, error))
            return
        if reply.done():  # it was run at once
            self._reply(message, reply)
            return
        self._calls[message.id] = call
        self._rows += message.rows
        self._pause_if_full()
        reply.add_done_callback(partial(self._done, message))

    def _done(self, message: CallMessage, reply: asyncio.Future[tuple[torch.Tensor, ...]]) -> None:
        if self._calls.pop(message.id, None) is None:
            if not reply.cancelled():
                reply.exception()  # nobody wants it: it was cancelled, or the client is gone
            return
        self._rows -= message.rows
        self._reply(message, reply)
        self._pause_if_full()

    def _reply(self, message: CallMessage, reply: asyncio.Future[tuple[torch.Tensor, ...]]) -> None:
        error = reply.exception()
        if error is None:
            self.answer(message, reply.result())
        elif not self._gone:
            self.send(wire.pack_error(message.id, error))

    def _cancel(self, id_: int) -> None:
        call = self._calls.pop(id_, None)
        if call is None or self.session is None:
            return  # the answer is on its way
        self._rows -= call.tensors[0].shape[0]
        self.session.cancel(call)
        self.send(wire.pack_error(id_, ClientClosedError("the call was cancelled")))
        self._pause_if_full()

    def _outstanding(self) -> int:
        return len(self._calls)

    def _pause_if_full(self) -> None:
        """Stop listening to a client at its limits; go on when it is within them."""
        full = self._outstanding() >= self._limits.calls or self._rows >= self._limits.rows
        if self._paused != full:
            self._paused = full
            self.listen(not full)

    def refuse(self, error: SymbiosisError) -> None:
        """Say why, and hang up."""
        if not self._gone:
            log.warning(
                "client refused", client=self.session and self.session.client, tenant=self.tenant, why=str(error)
            )
            self.end(error)

    def end(self, error: SymbiosisError) -> None:
        """End the conversation with a reason that the client is told."""
        if not self._gone:
            self.send(wire.pack(Type.ENDED, type(error).__name__, str(error)[:2000]))
            self.gone(str(error))
            self.hang_up()

    def gone(self, why: str) -> None:
        """The client is gone: its memory here is given up and nobody waits for it any more."""
        if self._gone:
            return
        self._gone = True
        self._calls.clear()
        session, self.session = self.session, None
        if session is not None:
            log.info("client left", client=session.client, tenant=self.tenant, why=why)
            session.close()
