"""The client's side of the wire, without I/O: what a client may send, and what each message from the executor means.

A :class:`Conversation` lasts as long as a channel and outlives its connections. A driver (``channel.py`` for asyncio,
``blocking.py`` for threads) opens connections, passes on messages and sends what the conversation tells it to send. A
carrier (``connection.py``) moves the tensors. States and transitions:

=========  ==================================================  =========  =============================================
state      input                                               next       the driver then
=========  ==================================================  =========  =============================================
JOINING    :meth:`~Conversation.joined` (first WELCOME)        JOINED     sends calls as the limits allow
JOINED     RESULT, FAILED                                      JOINED     settles that call and sends waiting calls
JOINED     :meth:`~Conversation.lost`, ENDED because the       REJOINING  closes the connection and connects again until
           executor closes                                                ``retry_s`` has passed; calls wait
REJOINING  ``joined``, same model, all checks passed           JOINED     sends what ``joined`` returns, then calls
                                                                          without an answer again, in order
REJOINING  ``joined``, another model or a check that fails     ENDED      settles all calls with the error
REJOINING  ``lost``: an attempt has failed                     REJOINING  tries again (executor absent or busy), or
                                                               or ENDED   settles all calls with the error
REJOINING  :meth:`~Conversation.next_attempt`, ``retry_s``     ENDED      settles all calls with the error
           have passed
JOINED     ENDED for another reason, a malformed message       ENDED      settles all calls with the error
any        ``lost`` with another error than the loss of an     ENDED      settles all calls with the error
           executor, such as a malformed message
JOINED     :meth:`~Conversation.leave`                         REJOINING  closes the connection and connects again, to
                                                                          another replica
JOINED     :meth:`~Conversation.interrupted` (Ctrl-C in a      REJOINING  closes the connection and, at the next call,
           blocking call)                                                 connects again for ``retry_s``, 5 s at least
any        :meth:`~Conversation.end`                           ENDED      settles all calls with the error
=========  ==================================================  =========  =============================================

What is sent and received up to WELCOME is in ``joining.py``. With ``retry_s`` 0, a lost connection ends the
conversation. Calls may be sent again because a request is self-contained and the executor keeps nothing between
requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from symbiosis.core.requests import Call, Expected, Key, LayerSpec, Results, expected
from symbiosis.core.transport import Check, Identity
from symbiosis.errors import (
    BusyError,
    ConnectionLostError,
    ExecutorClosedError,
    RefusedError,
    RequestError,
    SymbiosisError,
    UsageError,
    WireError,
    copied,
)
from symbiosis.transports import wire
from symbiosis.transports.arena import sizes
from symbiosis.transports.limits import Limits
from symbiosis.transports.share import Welcome
from symbiosis.transports.wire import PING, Hello, Type

PING_AFTER_S = 5.0
"""Seconds without a sign of life after which a client with a call outstanding sends PING."""
UNANSWERED = 24
"""PINGs in a row without a sign of life after which a client gives up the connection: two minutes. A long batch may
take a minute; the death of an executor shows earlier, by other means. A client that was stopped meanwhile has sent
none."""
CARRIED = (Type.SEGMENT, Type.RENDEZVOUS)
"""Messages for the carrier of tensors."""
FIRST_S, LONGEST_S = 0.05, 2.0
"""Seconds of the first and of the longest delay between attempts to join again. A local executor restarts in about a
second."""
FRUITLESS = 10
"""Consecutive short connections without an answer after which another connection no longer restarts the time limit
``retry_s``. An executor that admits a client and ends the connection, again and again, counts as lost."""
SHORT_S = 60.0
"""A connection is short if it lasts at most so many seconds, or ``retry_s`` if that is longer."""
AGAIN_S = 5.0
"""Seconds for which to try to join again after an interrupted call, also where ``retry_s`` is shorter: the executor is
usually there, and only the connection has to be replaced."""
MAY_RETURN = (ConnectionLostError, ExecutorClosedError, BusyError)
"""Errors after which another attempt to join is worthwhile, apart from those of the operating system. An executor is
busy while it still counts the connection that was lost."""


class State(Enum):
    """State of a conversation; see the table at the top of this module."""

    JOINING = "joining"
    JOINED = "joined"
    REJOINING = "rejoining"
    ENDED = "ended"


def run_checks(checks: Sequence[Check], identity: Identity) -> None:
    """Raise a SymbiosisError if any of the checks refuses an executor, or fails."""
    for check in checks:
        try:
            check(identity)
        except SymbiosisError:
            raise
        except Exception as error:
            raise RefusedError(f"a check of this client refused the executor: {error!r}") from error


_RESULT, _JOINED = Type.RESULT, State.JOINED  # on Python 3.11 a member looked up on its class takes six times as long


@dataclass(slots=True, eq=False)
class Pending:
    """A call without an answer."""

    id: int
    call: Call
    expected: Expected
    rows: int
    call_bytes: int
    """Bytes of the call's matrices, each aligned as in an arena."""
    size: int
    """The same, with the results."""
    reply: asyncio.Future[Results] | None = None
    """Future of the caller, in the asyncio driver only."""
    cancelled: bool = False
    """Whether the caller has withdrawn the call."""
    place: int = 0
    """Offset into the client's memory, where the carrier uses one."""


class Outstanding:
    """The calls of one client that have no answer yet, kept within the executor's limits.

    ``waiting`` holds the calls that wait to be sent, in order; ``sent`` those that were sent, by id. After a lost
    connection, calls that were sent come first again.
    """

    def __init__(self) -> None:
        self.waiting: deque[Pending] = deque()
        self.sent: dict[int, Pending] = {}
        self._limits = Limits()
        self._rows = self._bytes = 0

    def next(self) -> Pending | None:
        """Return the next call and count it as sent; None if no call waits or the limits forbid another."""
        if not self.waiting:
            return None
        pending, limits = self.waiting[0], self._limits
        if self.sent and (
            len(self.sent) >= limits.calls
            or self._rows + pending.rows > limits.rows
            or self._bytes + pending.size > limits.arena_bytes
        ):
            return None
        self.waiting.popleft()
        self.sent[pending.id] = pending
        self._rows += pending.rows
        self._bytes += pending.size
        return pending

    def put_back(self, pending: Pending) -> None:
        """Let a call that :meth:`next` returned wait again, before all others."""
        self.settle(pending)
        self.waiting.appendleft(pending)

    def settle(self, pending: Pending) -> None:
        """Forget a call that was sent: it has its answer."""
        del self.sent[pending.id]
        self._rows -= pending.rows
        self._bytes -= pending.size

    def cancel(self, call: Call) -> Pending | None:
        """Withdraw a call. Return it if it was sent: then it counts until the executor has answered."""
        pending = self.sent.get(call.id)
        if pending is None or pending.call is not call:
            self.waiting = deque(pending for pending in self.waiting if pending.call is not call)
            return None
        if pending.cancelled:
            return None
        pending.cancelled = True
        return pending

    def restart(self, limits: Limits) -> None:
        """Begin again on a new connection: calls that were sent and not cancelled wait again, before all others."""
        self._limits = limits
        self._rows = self._bytes = 0
        again = [pending for pending in self.sent.values() if not pending.cancelled]
        self.sent.clear()
        self.waiting.extendleft(reversed(again))

    def clear(self) -> list[Pending]:
        """Forget all calls, and return them."""
        found = [*self.sent.values(), *self.waiting]
        self.sent.clear()
        self.waiting.clear()
        self._rows = self._bytes = 0
        return found


class Conversation:
    """One client's conversation with an executor.

    ``error`` is why the last connection was lost, or in state ENDED why the conversation ended.
    """

    def __init__(self, address: str, hello: Hello, retry_s: float) -> None:
        self.address = address
        self.hello = hello
        self.retry_s = retry_s
        self.state = State.JOINING
        self.error: SymbiosisError | None = None
        self.outstanding = Outstanding()
        self.in_walk = False
        self._welcome: Welcome | None = None
        self._layers: Sequence[LayerSpec] = ()
        self._checks: list[Check] = []
        self._expected: dict[Key, Expected] = {}
        self._limits = Limits()
        self._ids = itertools.count(1)
        self._asked = 0.0
        """Time of the last sign of life, or of the last PING."""
        self._unanswered = 0
        """PINGs since the last sign of life."""
        self._patience_s = retry_s
        """Seconds for which the next attempts to join again go on."""
        self._until: float | None = None
        """Time until which attempts to join again go on, from the first attempt on."""
        self._delay = FIRST_S
        self._fruitless = 0
        """Short connections since the last answer to a call."""
        self._attempted = 0.0
        """Time of the last attempt to join again."""
        self._is_new = False
        """Whether the last connection was joined after that attempt."""

    def joined(self, welcome: Welcome) -> list[bytes]:
        """Note that a new connection has its WELCOME. Calls without an answer wait to be sent again.

        Return the messages that come before these calls.

        Raises:
            RefusedError: the executor serves another model than before.
            SymbiosisError: a check registered by :meth:`before_return` failed. In both cases the conversation ends.
        """
        try:
            if self._welcome is None:
                self._layers = welcome.layers
            elif welcome.fingerprint != self._welcome.fingerprint:
                raise RefusedError(f"the executor at {self.address} came back with another model; open a new client")
            else:
                run_checks(self._checks, welcome.identity)
        except SymbiosisError as error:
            self.end(error)
            raise
        self._welcome = welcome
        self._limits = welcome.limits
        self.outstanding.restart(welcome.limits)
        self._fruitless, self._is_new = self._fruitless + 1, True
        if self._fruitless < FRUITLESS:
            self._patience_s, self._until, self._delay = self.retry_s, None, FIRST_S
        if self.state is not State.ENDED:
            self.state = State.JOINED
        return [wire.BEGIN] if self.in_walk else []

    def next_attempt(self, now: float) -> float | None:
        """Return the seconds to wait before the next attempt to join again; None if the conversation has ended.

        Delays double, with a random factor so that tenants do not all come back at the same moment. The conversation
        ends when attempts have failed for ``retry_s`` seconds.
        """
        if self._is_new and now - self._attempted > max(self.retry_s, SHORT_S):
            self._fruitless, self._until, self._delay = 0, None, min(self._delay, FIRST_S)
        self._attempted, self._is_new = now, False
        if self._until is None:
            self._until = now + self._patience_s
        if self.state is State.REJOINING and now >= self._until:
            why = f"it did not come back within {self._patience_s:.0f} s: {self.error}"
            self.end(ConnectionLostError(f"lost the executor at {self.address} and {why}"))
        if self.state is State.ENDED:
            return None
        delay, self._delay = self._delay, min(max(2 * self._delay, FIRST_S), LONGEST_S)
        return min(delay * random.uniform(0.5, 1.5), self._until - now)

    def before_return(self, check: Check) -> None:
        """Register a check that runs when an executor is joined again."""
        self._checks.append(check)

    def identity(self) -> Identity:
        """Return the identity of the executor, as of the last connection."""
        assert self._welcome is not None, "the conversation has not been joined"
        return self._welcome.identity

    def call(self, call: Call, reply: asyncio.Future[Results] | None = None) -> Pending:
        """Let a call wait to be sent. ``reply`` is the driver's, for the answer.

        Raises:
            RequestError: its tensors are not what its layers take.
            UsageError: it exceeds the executor's limit of bytes.
            SymbiosisError: the conversation has ended; why.
        """
        if self.state is not _JOINED:
            self.check_open()
        due = self._expected.get(call.key)
        if due is None:
            due = self._expected[call.key] = expected(self._layers, call.key)
        rows = due.rows(call.tensors)
        if not rows:
            name = f"{self._layers[call.key.layers[0]].name} {call.key.pass_.name}"
            raise RequestError(due.misfit(name, call.tensors))
        call_bytes, size = sizes(rows, due)
        self.check_size(rows, size)
        call.id = next(self._ids)
        pending = Pending(call.id, call, due, rows, call_bytes, size, reply)
        self.outstanding.waiting.append(pending)
        return pending

    def check_size(self, rows: int, size: int) -> None:
        """Raise UsageError if a call exceeds the executor's limits. They may be lower once it was joined again."""
        if rows > self._limits.rows:
            raise UsageError(
                f"a call has {rows} rows; the executor allows {self._limits.rows}; send fewer tokens at once, or ask "
                "its host for a larger rows limit"
            )
        if size > self._limits.arena_bytes:
            raise UsageError(
                f"a call of {rows} rows needs {size} bytes for its rows and results; the executor allows "
                f"{self._limits.arena_bytes}; send fewer tokens at once, or ask its host for a larger arena_bytes limit"
            )

    def receive(self, type_: Type, content: Sequence[Any]) -> tuple[Pending, SymbiosisError | None] | None:
        """Take a message from the executor.

        Return the call that it answers and the error, if any; without an error the carrier takes the results. Other
        messages may change :attr:`state`; types in :data:`CARRIED` are for the carrier.

        Raises:
            WireError: the message is malformed.
        """
        if type_ is _RESULT:
            pending = self.outstanding.sent.get(wire.read_id(content))
            if pending is not None and self._fruitless:
                self._fruitless, self._patience_s, self._until, self._delay = 0, self.retry_s, None, FIRST_S
            return None if pending is None else (pending, None)
        if type_ is Type.FAILED:
            pending = self.outstanding.sent.get(wire.read_id(content))
            error = wire.error_of(*content[1:3])
            if isinstance(error, ExecutorClosedError):  # it shuts down; after a reconnect the call is sent again
                self.lost(error)
                return None
            return None if pending is None else (pending, error)
        if type_ is Type.ENDED:
            error = wire.error_of(*content[:2])
            if isinstance(error, ExecutorClosedError):
                self.lost(error)
            else:
                self.end(error)
        elif type_ is not Type.PONG and type_ not in CARRIED:
            raise WireError(f"the executor sent {type_.name}, which is not for a client that has joined")
        return None

    def cancel(self, call: Call) -> bytes | None:
        """Withdraw a call. Return the message that tells the executor so; None if the call was not sent."""
        pending = self.outstanding.cancel(call)
        return None if pending is None else wire.pack(Type.CANCEL, pending.id)

    def walk_message(self, in_walk: bool) -> bytes:
        """Return the message that tells the executor whether the client is in a walk."""
        self.in_walk = in_walk
        return wire.BEGIN if in_walk else wire.END

    def heard(self, now: float) -> None:
        """Note a sign of life: a message, bytes that came or went, or that a call was sent. Times are in seconds."""
        self._asked = now
        self._unanswered = 0

    def check_alive(self, now: float) -> bytes | None:
        """Return PING if it is time to ask a silent executor whether it is alive. Called while a call is outstanding.
        Raises ConnectionLostError if the last :data:`UNANSWERED` PINGs had no answer."""
        if now - self._asked < PING_AFTER_S:
            return None
        if self._unanswered == UNANSWERED:
            silent = PING_AFTER_S * (UNANSWERED + 1)
            raise ConnectionLostError(f"the executor at {self.address} has not answered for {silent:.0f} s")
        self._unanswered += 1
        self._asked = now
        return PING

    def lost(self, error: Exception) -> None:
        """Note that the connection was lost, or that an attempt to join again has failed."""
        if self.state is State.ENDED:
            return
        if isinstance(error, SymbiosisError) and not isinstance(error, MAY_RETURN):
            self.end(error)
            return
        if not isinstance(error, SymbiosisError):
            error = ConnectionLostError(f"lost the executor at {self.address}: {error}")
        if self.retry_s > 0 or self.state is State.REJOINING:
            self.error = error
            self.state = State.REJOINING
        else:
            self.end(error)

    def leave(self) -> None:
        """Give up the connection for one to another replica. No call is outstanding."""
        if self.state is _JOINED:
            self.error = ConnectionLostError("the client left for another replica")
            self.state = State.REJOINING
            self._patience_s, self._until, self._delay = max(self.retry_s, AGAIN_S), None, 0.0

    def interrupted(self) -> None:
        """Note that a blocking call was interrupted: its answer may still come over this connection, so another
        connection is needed. The call is forgotten."""
        self.outstanding.clear()
        if self.state is not State.ENDED:
            self.error = ConnectionLostError("a call was interrupted")
            self.state = State.REJOINING
            self._patience_s, self._until, self._delay = max(self.retry_s, AGAIN_S), None, FIRST_S

    def end(self, error: SymbiosisError) -> None:
        """End the conversation, if it has not ended."""
        if self.state is not State.ENDED:
            self.error = error
            self.state = State.ENDED

    def check_open(self) -> None:
        """Raise the reason if the conversation has ended."""
        if self.state is State.ENDED:
            assert self.error is not None
            raise copied(self.error)
