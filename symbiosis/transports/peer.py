"""The executor's side of the wire, without I/O: one :class:`Peer` for each connection of a listener.

A transport feeds a peer messages and provides a line and a courier (:mod:`symbiosis.transports.courier`). All rules of
the conversation and all limits of calls, rows and bytes are here, so every transport has the same.

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
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from symbiosis.core.budget import Account
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
from symbiosis.transports.arena import sizes
from symbiosis.transports.courier import Admitted, Courier, Line
from symbiosis.transports.limits import Limits
from symbiosis.transports.wire import CallMessage, Type

log = get_logger(__name__)

ROOM_WITHIN_S = 60.0
"""Seconds for which a call waits for room in the executor's memory before it fails."""
MAKE_ROOM_S = 10.0
"""Seconds after which, and then at which intervals, connections are disconnected for a call that waits for room. A
client that is disconnected joins again within 0.1 s, and idle ones lose nothing else."""
_COPIES = 2
"""Copies of a call and its results that the executor may hold while it runs: one as a part of a batch, one apart."""
_CALL = Type.CALL  # on Python 3.11 a member looked up on its class takes six times as long


class Peer:
    """One connection of a listener.

    Args:
        service: the executor.
        limits: limits of this client.
        line, courier: the connection.

    Attributes:
        tenant: whose connection this is, "?" if that is not known.
        session: the client's session; None until it joins, after it has left, and for status connections.
        gone: whether the conversation has ended.
        account: what the connection holds of the executor's memory.
    """

    def __init__(self, service: Service, limits: Limits, line: Line, courier: Courier) -> None:
        self.tenant = "?"
        self.session: Session | None = None
        self.gone = False
        self._service = service
        self._limits = limits
        self._line = line
        self._courier = courier
        self._calls: dict[int, Admitted] = {}
        """Outstanding calls by id."""
        self._rows = self._bytes = 0
        """Rows of these calls, and bytes of their tensors and results."""
        self.account = Account(service.budget, self._cut)
        self._no_room: asyncio.TimerHandle | None = None
        """The next step for a call that waits for room: making room, or the end of the wait. None if no call waits.
        While a call waits, no message is read."""
        self._paused = False
        self._greeted = False

    def identified(self, tenant: str) -> None:
        """Note whose connection this is. A connection for which there is no room ends."""
        self.tenant = tenant
        if not self.account.belong_to(tenant):
            self.refuse(BusyError("no memory is left for another connection at the executor; try later"))

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
            raise WireError(f"the client sent {type_.name}, but has not joined with HELLO")
        elif type_ is Type.BEGIN:
            try:
                session.begin_walk()
            except ExecutorClosedError as error:
                self.end(error)
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
        name = self._line.greeted(hello.name or "")
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
            self.account.client = self.session.client
            log.info("client joined", client=self.session.client, tenant=self.tenant)
        share = self._service.share()
        try:
            extra = self._courier.welcome(hello.name is not None)
        except OSError as error:
            raise BusyError(f"the executor cannot serve another client: {error.strerror}; try later") from error
        welcome = {
            "share": share.description,
            "tokenizer": dict(share.tokenizer),
            "limits": asdict(self._limits),
            "instance": self._service.identity().instance,
            **extra,
        }
        message = wire.pack(Type.WELCOME, welcome)
        if not self.account.hold(len(message)):
            raise BusyError("no memory is left at the executor; try later")
        self._line.send(message)
        self._line.when_read(partial(self.account.release, len(message)))

    def _call(self, session: Session, message: CallMessage, payload: int) -> None:
        if message.id in self._calls:
            raise WireError(f"call {message.id} is outstanding already")
        if not message.rows:
            raise WireError("a CALL has at least 1 row")
        rows, limits = self._rows + message.rows, self._limits
        if rows > limits.rows:
            raise WireError(f"{rows} rows are outstanding; at most {limits.rows} are allowed")
        try:
            due = session.expects(message.key)
        except SymbiosisError as error:
            self._fail(message, error)
            return
        incoming, size = sizes(message.rows, due)
        if self._bytes + size > limits.arena_bytes:
            raise WireError(
                f"{self._bytes + size} bytes of tensors and results are outstanding; at most {limits.arena_bytes} are "
                "allowed"
            )
        admitted = Admitted(message, due, incoming, size, _COPIES * size)
        more = max(self._courier.check(admitted, payload) - self.account.kept, 0)
        if self.account.hold(admitted.counted + more, more):
            self._admit(session, admitted)
        else:
            self._wait(session, admitted, more)

    def _fail(self, message: CallMessage, error: SymbiosisError) -> None:
        """Refuse a call whose tensors were not taken."""
        if self._courier.can_skip:
            self._service.rejected(type(error).__name__)
            self._line.send(wire.pack_error(message.id, error))
        else:  # its tensors would be taken for those of the next call
            self.refuse(error if isinstance(error, BusyError) else WireError(str(error)))

    def _wait(self, session: Session, admitted: Admitted, more: int) -> None:
        """Read no message until there is room for a call."""

        def granted() -> None:
            assert self._no_room is not None
            self._no_room.cancel()
            loop.call_soon(self._enter, session, admitted)

        loop = asyncio.get_running_loop()
        self.account.wait(admitted.counted + more, more, granted)
        self._wait_on(admitted, loop.time() + ROOM_WITHIN_S)
        self._pause_if_full()

    def _wait_on(self, admitted: Admitted, until: float) -> None:
        """Let a call wait for room a while longer."""
        loop = asyncio.get_running_loop()
        left = until - loop.time()
        if left > MAKE_ROOM_S:
            self._no_room = loop.call_later(MAKE_ROOM_S, self._make_room, admitted, until)
        else:
            self._no_room = loop.call_later(left, self._give_up, admitted)

    def _make_room(self, admitted: Admitted, until: float) -> None:
        self._wait_on(admitted, until)
        self.account.make_room()

    def _cut(self) -> None:
        """Disconnect the client, which joins again and sends its calls again."""
        self._line.drop("the memory that it holds is needed for another client")

    def _enter(self, session: Session, admitted: Admitted) -> None:
        if not self.gone:
            self._go_on()
            try:
                self._admit(session, admitted)
            except (WireError, BusyError) as error:
                self.refuse(error)

    def _go_on(self) -> None:
        """Read messages again after a call has waited for room."""
        self._no_room = None
        self._pause_if_full()

    def _give_up(self, admitted: Admitted) -> None:
        self.account.stop_waiting()
        self._go_on()
        error = (
            f"the executor had no room for {admitted.counted} bytes within {ROOM_WITHIN_S:.0f} s; try later, send "
            "fewer rows, or ask its host for more max_bytes"
        )
        self._fail(admitted.message, BusyError(error))

    def _admit(self, session: Session, admitted: Admitted) -> None:
        self._rows += admitted.message.rows
        self._bytes += admitted.size
        try:
            tensors = self._courier.tensors(admitted)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            log.error("no memory for a call", client=session.client, why=str(error))
            self._settle(admitted)
            self._fail(admitted.message, BusyError("the executor's process has no memory for this call; try later"))
            return
        if tensors is None:
            self._calls[admitted.message.id] = admitted
            self._pause_if_full()
        else:
            self._submit(session, admitted, tensors)

    def arrived(self, admitted: Admitted, tensors: Results) -> None:
        """Take the tensors of a call for which :meth:`Courier.tensors` returned None."""
        known = self._calls.pop(admitted.message.id, None) is admitted
        if known and not admitted.cancelled and self.session is not None:
            self._submit(self.session, admitted, tensors)
        else:  # it was cancelled on its way, or the client is gone
            self._settle(admitted)
            if not self.gone:
                self._line.send(_cancelled(admitted.message.id))
        self._pause_if_full()

    def _submit(self, session: Session, admitted: Admitted, tensors: Results) -> None:
        message = admitted.message
        call = Call(message.key, message.kind, tensors, answers=admitted.answers)
        try:
            reply = session.submit(call)
        except SymbiosisError as error:
            self._reply(admitted, error)
            return
        if reply.done():  # the executor ran it at once
            self._reply(admitted, reply.exception() or reply.result())
            return
        admitted.call = call
        self._calls[message.id] = admitted
        self._pause_if_full()
        reply.add_done_callback(partial(self._done, admitted))

    def _done(self, admitted: Admitted, reply: asyncio.Future[Results]) -> None:
        if self._calls.get(admitted.message.id) is not admitted:  # it was cancelled, or the client is gone
            if not reply.cancelled():
                reply.exception()  # asyncio must not log it as never retrieved
            return
        del self._calls[admitted.message.id]
        self._reply(admitted, reply.exception() or reply.result())
        self._pause_if_full()

    def _forget(self, admitted: Admitted) -> None:
        self._rows -= admitted.message.rows
        self._bytes -= admitted.size

    def _settle(self, admitted: Admitted) -> None:
        """Give up the memory of a call that is not computed."""
        self._forget(admitted)
        self.account.release(admitted.counted)

    def _reply(self, admitted: Admitted, outcome: Results | BaseException) -> None:
        self._forget(admitted)
        self._courier.ended(admitted)
        release = partial(self.account.release, admitted.counted)
        if isinstance(outcome, BaseException):
            self._line.send(wire.pack_error(admitted.message.id, outcome))
            release()
        else:
            try:
                self._courier.answer(admitted, outcome, release)
            except (MemoryError, RuntimeError) as error:  # torch raises the latter
                self._line.drop(f"there is no memory for its answer: {error}")

    def _cancel(self, session: Session, id_: int) -> None:
        admitted = self._calls.get(id_)
        if admitted is None:
            return  # the answer is on its way
        if admitted.call is None:
            admitted.cancelled = True  # its tensors are still to arrive; it counts until then, also at the client
            return
        del self._calls[id_]
        in_use = session.cancel(admitted.call)
        admitted.call.reply = None  # its callback refers to `admitted`: the tensors would stay
        if in_use:
            self._service.when_idle(partial(self._cancelled, admitted))
        else:
            self._cancelled(admitted)

    def _cancelled(self, admitted: Admitted) -> None:
        """Note that nothing is left of a call that was cancelled in time."""
        self._settle(admitted)
        self._courier.ended(admitted)
        self._line.send(_cancelled(admitted.message.id))
        self._pause_if_full()

    def _pause_if_full(self) -> None:
        """Stop listening to a client that has more calls outstanding than it may; resume when it is within its limits.

        A client that keeps to them is heard: it may ask whether the executor is alive, or leave.
        """
        full = self._no_room is not None or len(self._calls) > self._limits.calls
        if self._paused != full:
            self._paused = full
            self._line.listen(not full)

    @property
    def busy(self) -> bool:
        """Whether a call is outstanding."""
        return bool(self._calls)

    def refuse(self, error: SymbiosisError) -> None:
        """Reject the client with a reason. It is logged and counted, unless it is that this executor shuts down."""
        if not self.gone:
            if not isinstance(error, ExecutorClosedError):
                client = self.session and self.session.client
                log.warning("client refused", client=client, tenant=self.tenant, why=str(error))
                self._service.rejected(type(error).__name__)
            self.end(error)

    def end(self, error: SymbiosisError) -> None:
        """End the conversation with a reason that the client is told."""
        if not self.gone:
            self._line.send(wire.pack(Type.ENDED, type(error).__name__, str(error)[:2000]))
            self.leave(str(error))
            self._line.hang_up()

    def dropped(self, why: str) -> None:
        """Note that the connection was ended without a message to the client."""
        log.warning("connection cut", tenant=self.tenant, why=why)
        if not self.gone:
            self._service.rejected("cut")
        self.leave(why)

    def leave(self, why: str) -> None:
        """Note that the client is gone: its session ends, and its memory here is given up. What is on its way to or
        from it counts until :meth:`closed`."""
        if self.gone:
            return
        self.gone = True
        self.account.leave()
        self._calls.clear()
        if self._no_room is not None:
            self._no_room.cancel()
        self._courier.close()
        session, self.session = self.session, None
        if session is not None:
            log.info("client left", client=session.client, tenant=self.tenant, why=why)
            session.close()

    def closed(self) -> None:
        """Note that the connection is closed and its buffers are gone."""
        self._service.when_idle(partial(self._courier.when_ended, self.account.close))


def _cancelled(id_: int) -> bytes:
    """Return the answer to a call that was cancelled in time."""
    return wire.pack_error(id_, ClientClosedError("the call was cancelled"))
