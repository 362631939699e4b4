"""The executor's side of the wire, without I/O: one :class:`Peer` for each connection of a listener.

A transport feeds a peer messages and provides two small objects: a :class:`Line`, which sends messages and ends the
connection, and a :class:`Courier`, which finds the tensors of a call and delivers its results. All rules of the
conversation and the limits of calls and rows are here, so every transport has the same.

==========  ===========================  ==========  ==================================================================
state       message                      next        answer
==========  ===========================  ==========  ==================================================================
new         HELLO with a name            joined      WELCOME, or ENDED (the name is in use, too many connections, …)
new         HELLO without a name         looking     WELCOME
any         PING, STATUS                 the same    PONG, STATUS
joined      CALL                         joined      RESULT or FAILED, once
joined      CANCEL, BEGIN, END           joined      FAILED for a call that was cancelled in time
joined      the courier's own types      joined      the courier's
any         anything else                gone        ENDED with WireError
==========  ===========================  ==========  ==================================================================
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

import torch

from symbiosis.core.requests import Call, Results
from symbiosis.core.transport import Service, Session
from symbiosis.errors import (
    BusyError,
    ClientClosedError,
    ExecutorClosedError,
    RefusedError,
    SymbiosisError,
    UsageError,
    WireError,
)
from symbiosis.log import get_logger
from symbiosis.transports import wire
from symbiosis.transports.limits import Limits
from symbiosis.transports.wire import CallMessage, Type

log = get_logger(__name__)

HELLO_WITHIN_S = 10.0
"""Seconds within which a new connection must send HELLO."""
LOOK_WITHIN_S = 30.0
"""Seconds for which a connection without a session may stay."""
GOODBYE_S = 1.0
"""Seconds for which a rejected client may read the reason before its connection is cut."""
MAX_CONNECTIONS = 1024
"""Connections of a listener."""
BACKLOG = 1024
"""Connections that the kernel keeps until a busy executor accepts them."""
AT_ONCE = 8
"""Connections that the event loop accepts in one turn. It looks at them some turns later, and until then each holds one
of the spare descriptors."""
_CALL = Type.CALL  # on Python 3.11 a member looked up on its class takes six times as long


class Line(Protocol):
    """The executor's end of one connection, as far as messages are concerned."""

    @property
    def authenticated(self) -> bool:
        """Whether the connection has shown whose it is. Other clients cannot have the names of tenants with keys."""

    def send(self, message: bytes) -> None:
        """Send a message without waiting. Has no effect when the client is gone."""

    def hang_up(self) -> None:
        """End the connection when the messages sent have been read, or after :data:`GOODBYE_S`."""

    def listen(self, wanted: bool) -> None:
        """Stop feeding messages to the peer, or resume."""

    def show(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return what of the executor's status the client may see."""

    def admit(self, name: str) -> str:
        """Return the name under which a client of this name joins. Raises BusyError if the tenant has too many
        connections."""


class Courier(ABC):
    """The executor's end of one connection, as far as tensors are concerned."""

    @abstractmethod
    def welcome(self, joined: bool) -> dict[str, Any]:
        """Return what this transport adds to WELCOME. ``joined``: the client has joined; else it only looks. Raises
        WireError: the client does not take what comes with the welcome."""

    @abstractmethod
    def tensors(self, message: CallMessage, session: Session, payload: int) -> Results | None:
        """Return the matrices of a call, [rows, width] each; None if they arrive later, by :meth:`Peer.arrived`.

        ``payload`` is the number of raw bytes that follow the message.

        Raises:
            RequestError: the layer table has no such key. The call fails, and the conversation goes on.
            WireError: they, or the results, do not fit where the message says, or exceed the limit of bytes.
        """

    @abstractmethod
    def answer(self, message: CallMessage, results: Sequence[torch.Tensor]) -> None:
        """Send RESULT, with the results where the message wants them."""

    def free(self, id_: int) -> None:
        """Stop counting the tensors of a call that was answered or cancelled."""

    def control(self, type_: Type, content: Sequence[Any]) -> bool:
        """Take a message of a type that only this transport has. Return whether it is one."""
        return False

    def close(self) -> None:
        """Give up the memory of the connection."""


class Peer:
    """One client of a listener.

    Args:
        service: the executor.
        limits: limits of this client.
        tenant: what the transport knows of the client's owner; for logs.
    """

    def __init__(self, service: Service, limits: Limits, tenant: str, line: Line, courier: Courier) -> None:
        self.tenant = tenant
        self.session: Session | None = None
        self.gone = False
        self._service = service
        self._limits = limits
        self._line = line
        self._courier = courier
        self._calls: dict[int, Call | CallMessage] = {}
        """Outstanding calls by id; a message while the tensors of its call have not arrived."""
        self._rows = 0
        self._paused = False
        self._greeted = False

    def identified(self, tenant: str) -> None:
        """Note the client's owner, if it becomes known after the connection was made."""
        self.tenant = tenant

    def received(self, data: bytes, payload: int = 0) -> None:
        """Take a message, and the length of its payload in bytes. A violation of the rules ends this conversation and
        no other."""
        try:
            type_, content = wire.unpack(data)
            if type_ is _CALL and self.session is not None:
                self._call(self.session, wire.read_call(content), payload)
            elif payload:
                raise WireError(f"{type_.name} has no payload")
            else:
                self._control(type_, content)
        except (WireError, BusyError) as error:
            self.refuse(error)

    def _control(self, type_: Type, content: Sequence[Any]) -> None:
        session = self.session
        if type_ is Type.PING:
            self._line.send(wire.pack(Type.PONG))
        elif type_ is Type.STATUS:
            self._line.send(wire.pack(Type.STATUS, self._line.show(self._service.status())))
        elif type_ is Type.HELLO:
            self._hello(wire.read_hello(content))
        elif session is None:
            raise WireError(f"the client sent {type_.name} before HELLO")
        elif type_ is Type.BEGIN:
            session.begin_walk()
        elif type_ is Type.END:
            session.end_walk()
        elif type_ is Type.CANCEL:
            self._cancel(session, wire.read_id(content))
        elif not self._courier.control(type_, content):
            raise WireError(f"{type_.name} is not for executors")

    def _hello(self, hello: wire.Hello) -> None:
        if self._greeted:
            raise WireError("the client sent a second HELLO on one connection")
        self._greeted = True
        name = self._line.admit(hello.name or "")
        if hello.name is not None:
            try:
                if not self._line.authenticated:
                    self._service.check_name(name)
                self.session = self._service.join(name, hello.terms)
            except UsageError as error:  # the name is in use
                raise BusyError(str(error)) from error
            except (ExecutorClosedError, RefusedError) as error:
                self.refuse(error)
                return
            log.info("client joined", client=self.session.client, tenant=self.tenant)
        share = self._service.share()
        welcome = {
            "share": share.description,
            "tokenizer": dict(share.tokenizer),
            "limits": asdict(self._limits),
            "instance": self._service.identity().instance,
            **self._courier.welcome(hello.name is not None),
        }
        self._line.send(wire.pack(Type.WELCOME, welcome))

    def _call(self, session: Session, message: CallMessage, payload: int) -> None:
        if message.id in self._calls:
            raise WireError(f"call {message.id} is outstanding already")
        rows = self._rows + message.rows
        if rows > self._limits.rows:
            raise WireError(f"{rows} rows are outstanding; at most {self._limits.rows} are allowed")
        try:
            tensors = self._courier.tensors(message, session, payload)
        except (WireError, BusyError):
            raise
        except SymbiosisError as error:
            self._line.send(wire.pack_error(message.id, error))
            return
        if tensors is None:
            self._count(message, message)
        else:
            self._submit(session, message, tensors)

    def arrived(self, message: CallMessage, tensors: Results) -> bool:
        """Take the tensors of a call for which :meth:`Courier.tensors` returned None.

        Return False if the call was cancelled meanwhile, or the client is gone.
        """
        if self._calls.get(message.id) is not message or self.session is None:
            return False
        del self._calls[message.id]
        self._rows -= message.rows
        self._submit(self.session, message, tensors)
        self._pause_if_full()
        return True

    def _submit(self, session: Session, message: CallMessage, tensors: Results) -> None:
        call = Call(message.key, message.kind, tensors)
        try:
            reply = session.submit(call)
        except SymbiosisError as error:
            self._courier.free(message.id)
            self._line.send(wire.pack_error(message.id, error))
            return
        if reply.done():  # the executor ran it at once
            self._courier.free(message.id)
            self._reply(message, reply)
            return
        self._count(message, call)
        reply.add_done_callback(partial(self._done, message, call))

    def _count(self, message: CallMessage, call: Call | CallMessage) -> None:
        self._calls[message.id] = call
        self._rows += message.rows
        self._pause_if_full()

    def _done(self, message: CallMessage, call: Call, reply: asyncio.Future[Results]) -> None:
        if self._calls.get(message.id) is not call:  # it was cancelled, or the client is gone
            if not reply.cancelled():
                reply.exception()  # asyncio must not log it as never retrieved
            return
        del self._calls[message.id]
        self._rows -= message.rows
        self._courier.free(message.id)
        self._reply(message, reply)
        self._pause_if_full()

    def _reply(self, message: CallMessage, reply: asyncio.Future[Results]) -> None:
        error = reply.exception()
        if self.gone:
            return
        if error is None:
            self._courier.answer(message, reply.result())
        else:
            self._line.send(wire.pack_error(message.id, error))

    def _cancel(self, session: Session, id_: int) -> None:
        call = self._calls.pop(id_, None)
        if call is None:
            return  # the answer is on its way
        if isinstance(call, Call):
            self._rows -= call.tensors[0].shape[0]
            self._courier.free(id_)
            session.cancel(call)
        else:
            self._rows -= call.rows  # its tensors are still to arrive: the courier counts them until then
        self._line.send(wire.pack_error(id_, ClientClosedError("the call was cancelled")))
        self._pause_if_full()

    def _pause_if_full(self) -> None:
        """Stop listening to a client at its limits; resume when it is within them."""
        full = len(self._calls) >= self._limits.calls or self._rows >= self._limits.rows
        if self._paused != full:
            self._paused = full
            self._line.listen(not full)

    @property
    def busy(self) -> bool:
        """Whether a call is outstanding."""
        return bool(self._calls)

    def refuse(self, error: SymbiosisError) -> None:
        """Reject the client with a reason, in the log too."""
        if not self.gone:
            log.warning(
                "client refused", client=self.session and self.session.client, tenant=self.tenant, why=str(error)
            )
            self.end(error)

    def end(self, error: SymbiosisError) -> None:
        """End the conversation with a reason that the client is told."""
        if not self.gone:
            self._line.send(wire.pack(Type.ENDED, type(error).__name__, str(error)[:2000]))
            self.leave(str(error))
            self._line.hang_up()

    def leave(self, why: str) -> None:
        """Note that the client is gone: its session ends, and its memory here is given up."""
        if self.gone:
            return
        self.gone = True
        self._calls.clear()
        self._courier.close()
        session, self.session = self.session, None
        if session is not None:
            log.info("client left", client=session.client, tenant=self.tenant, why=why)
            session.close()
