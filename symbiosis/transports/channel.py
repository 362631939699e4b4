"""The asyncio driver of a client's conversation: the channel for coroutines, whatever the transport."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from symbiosis.core.requests import Call, Results
from symbiosis.errors import ClientClosedError, ConnectionLostError, SymbiosisError, WireError
from symbiosis.log import get_logger
from symbiosis.transports.connection import AsyncConnection, Join, joined
from symbiosis.transports.conversation import CARRIED, Conversation, Pending, State
from symbiosis.transports.threads import ThreadCalls
from symbiosis.transports.wire import Hello, Type

log = get_logger(__name__)

WATCH_S = 1.5
"""Seconds between two looks at whether the executor is alive: one heartbeat of ``tcp://``."""


_channels: weakref.WeakSet[Any] = weakref.WeakSet()
"""The channels of this process."""


def abandon_in_children(channel: Any) -> None:
    """Have ``channel.abandon(error)`` called in each forked child. Calls there would have the ids, places in an arena,
    numbers of TLS records and masks that the parent's next calls have."""
    _channels.add(channel)


def _forked() -> None:
    for channel in list(_channels):
        why = f"{channel.client!r} belongs to the process that opened it, not to its forked child; "
        channel.abandon(ClientClosedError(why + "open another client or model in the child"))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


class AsyncChannel:
    """A channel for coroutines.

    It never has more outstanding than the executor's limits allow: further calls wait here, in order. When the
    connection is lost, it joins again and sends every call without an answer again; calls made meanwhile wait.
    """

    def __init__(
        self, conversation: Conversation, join: Join, connection: AsyncConnection, better: Callable[[], bool] | None
    ) -> None:
        assert connection.share is not None
        self.client = str(conversation.hello.name)
        self.device = connection.carrier.device
        self.layers = connection.welcome.layers
        self.share = connection.share
        self.identity = conversation.identity
        self.before_return = conversation.before_return
        self.check_open = conversation.check_open
        self._conversation = conversation
        self._join = join
        self._better = better
        self._connection: AsyncConnection | None = None
        self._loop = asyncio.get_running_loop()
        self._rejoining: asyncio.Task[None] | None = None
        self._threads = ThreadCalls(self._loop, self.send, self.cancel)
        self.call = self._threads.call
        self.interrupt = self._threads.interrupt
        self._timer = self._loop.call_later(WATCH_S, self._watch)
        self._use(connection, [])
        abandon_in_children(self)

    @classmethod
    async def open(
        cls, join: Join, address: str, hello: Hello, retry_s: float, better: Callable[[], bool] | None = None
    ) -> AsyncChannel:
        """Join the executor at ``address``; raises the errors of ``join``.

        After each walk, ``better`` tells whether to join again, because there is a better executor.
        """
        conversation = Conversation(address, hello, retry_s)
        connection = await joined(join, hello, False)
        try:
            conversation.joined(connection.welcome)
            return cls(conversation, join, connection, better)
        except BaseException:
            connection.close()
            raise

    def send(self, call: Call) -> asyncio.Future[Results]:
        reply: asyncio.Future[Results] = self._loop.create_future()
        self._conversation.call(call, reply)
        self._send_waiting()
        return reply

    def _send_waiting(self) -> None:
        connection, outstanding = self._connection, self._conversation.outstanding
        if connection is None:
            return
        if not outstanding.sent:
            self._conversation.heard(time.monotonic())
        while self._connection is connection and (pending := outstanding.next()) is not None:
            try:
                self._conversation.check_size(pending.rows, pending.size)
                parts = connection.carrier.put(pending)
            except Exception as error:  # noqa: BLE001 (no room for the call, or its tensors cannot be copied)
                outstanding.settle(pending)
                _answer(pending, error)
                continue
            if parts is None:
                outstanding.put_back(pending)
                return
            connection.send(parts)

    def received(self, type_: Type, content: Sequence[Any], attached: Sequence[Any]) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            answer = self._conversation.receive(type_, content)
            if answer is not None:
                pending, error = answer
                outcome: Results | Exception | None
                try:
                    outcome = error or connection.carrier.take(pending, attached)
                except WireError:
                    raise
                except Exception as failure:  # noqa: BLE001 (such as no memory for results; it concerns this call alone)
                    outcome = failure
                if outcome is not None:
                    self.arrived(pending, outcome)
            elif self._conversation.state is not State.JOINED:
                self._left()
            elif type_ in CARRIED:
                connection.carrier.control(type_, content)
                self._send_waiting()
        except WireError as error:
            self._end(error)

    def arrived(self, pending: Pending, outcome: Results | Exception) -> None:
        outstanding = self._conversation.outstanding
        if pending.id not in outstanding.sent or self._connection is None:  # late results of a connection that was lost
            return
        outstanding.settle(pending)
        self._connection.carrier.free(pending)
        _answer(pending, outcome)
        if outstanding.waiting:
            self._send_waiting()

    def cancel(self, call: Call) -> None:
        message = self._conversation.cancel(call)
        if message is not None and self._connection is not None:
            self._connection.send([message])

    def flush(self) -> None:
        pass

    def begin_walk(self) -> None:
        self.check_open()
        self.walk(True)

    def end_walk(self) -> None:
        self.walk(False)

    def walk(self, in_walk: bool) -> None:
        """Note that the client begins or ends a walk, also after the conversation has ended."""
        message = self._conversation.walk_message(in_walk)
        if self._connection is None:
            return
        self._connection.send([message])
        outstanding = self._conversation.outstanding
        if not (in_walk or outstanding.sent or outstanding.waiting) and self._better is not None and self._better():
            self._conversation.leave()
            self._join_again()

    def _use(self, connection: AsyncConnection, first: Sequence[bytes]) -> None:
        self._connection = connection
        connection.start(self)
        for message in first:
            connection.send([message])
        self._send_waiting()

    def _watch(self) -> None:
        """Find out whether the executor is still there."""
        self._timer = self._loop.call_later(WATCH_S, self._watch)
        if self._connection is not None and self._conversation.outstanding.sent:
            now = time.monotonic()
            if self._connection.moves():
                self._conversation.heard(now)
            try:
                if (ping := self._conversation.check_alive(now)) is not None:
                    self._connection.send([ping])
            except ConnectionLostError as error:
                self.lost(error)

    def lost(self, error: SymbiosisError) -> None:
        if self._connection is not None:
            self._conversation.lost(error)
            self._left()

    def _left(self) -> None:
        """Close a connection that the conversation has given up, and join again unless the conversation has ended."""
        if self._conversation.state is State.ENDED:
            self._finish()
            return
        why = str(self._conversation.error)
        log.warning(
            "executor lost; trying to join again",
            within_s=self._conversation.retry_s,
            address=self._conversation.address,
            client=self.client,
            why=why,
        )
        self._join_again()

    def _join_again(self) -> None:
        self._close_connection()
        self._rejoining = self._loop.create_task(self._rejoin())

    async def _rejoin(self) -> None:
        conversation = self._conversation
        while (delay := conversation.next_attempt(time.monotonic())) is not None:
            await asyncio.sleep(delay)
            connection = None
            try:
                connection = await joined(self._join, conversation.hello, True)
                first = conversation.joined(connection.welcome)
            except Exception as error:  # noqa: BLE001 (such as no memory for a thread; calls wait for this task)
                if connection is not None:
                    connection.close()
                conversation.lost(error)
            else:
                log.info("joined again", address=conversation.address, client=self.client)
                self._use(connection, first)
                return
        self._finish()

    def _end(self, error: SymbiosisError) -> None:
        self._conversation.end(error)
        self._finish()

    def _finish(self) -> None:
        """Settle every call with the error that ended the conversation."""
        self._timer.cancel()
        self._close_connection()
        error = self._conversation.error
        assert error is not None
        for pending in self._conversation.outstanding.clear():
            _answer(pending, error)

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abandon(self, error: ClientClosedError) -> None:
        """End the channel in a forked child process with ``error``; the parent process keeps the connection."""
        self._conversation.end(error)
        # Closing the connection here would take its socket off the selector that the parent uses, too.
        self._parents, self._connection = self._connection, None

    def close(self) -> None:
        """Leave. Outstanding calls end with ClientClosedError."""
        self._end(ClientClosedError(f"the client {self.client!r} was closed"))
        if self._rejoining is not None:
            self._rejoining.cancel()


def _answer(pending: Pending, outcome: Results | Exception) -> None:
    reply = pending.reply
    if reply is None or pending.cancelled or reply.done():
        return
    if isinstance(outcome, tuple):
        reply.set_result(outcome)
    else:
        reply.set_exception(outcome)
