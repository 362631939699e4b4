"""The blocking driver of a client's conversation: the channel for synchronous code, whatever the transport.

The thread that makes a call sends it, waits for the answer and joins again after a loss. One call is outstanding at a
time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref

from symbiosis.core.requests import Call
from symbiosis.core.transport import Check, Identity
from symbiosis.errors import ConnectionLostError, ExecutorClosedError, SymbiosisError, WireError
from symbiosis.log import get_logger
from symbiosis.transports.backoff import backoff
from symbiosis.transports.carrier import BlockingConnection, BlockingConnector
from symbiosis.transports.conversation import CARRIED, Conversation, State, Watch
from symbiosis.transports.outstanding import Pending, Results
from symbiosis.transports.synchronous import SynchronousChannel, closed_error, forked_error
from symbiosis.transports.wire import PING, Hello

__all__ = ["BlockingChannel"]

log = get_logger(__name__)

_JOINED = State.JOINED  # on Python 3.11 a member looked up on its class takes six times as long
AGAIN_S = 5.0
"""Seconds for which to try to join again after an interrupted call, also where ``retry`` is shorter: the executor is
usually there, and only the connection has to be replaced."""


class BlockingChannel(SynchronousChannel):
    """A channel for synchronous code. Any thread may call it; calls take turns."""

    def __init__(
        self, conversation: Conversation, connector: BlockingConnector, connection: BlockingConnection
    ) -> None:
        assert connection.share is not None
        self.client = str(conversation.hello.name)
        self.device = connection.carrier.device
        self.layers = connection.welcome.layers
        self.share = connection.share
        self._conversation = conversation
        self._connector = connector
        self._connection = connection
        self._watch = Watch(conversation.address)
        self._lock = threading.Lock()
        self._patience_s = conversation.retry_s
        """Seconds for which the next attempts to join again go on."""
        _channels.add(self)

    @classmethod
    def open(cls, connector: BlockingConnector, address: str, hello: Hello, retry_s: float) -> BlockingChannel:
        """Join the executor at ``address``; raises the errors of :meth:`BlockingConnector.join`."""
        conversation = Conversation(address, hello, retry_s)
        connection = connector.join(hello, again=False)
        try:
            conversation.joined(connection.welcome, connection.carrier.most_bytes)
            return cls(conversation, connector, connection)
        except BaseException:
            connection.close()
            raise

    def identity(self) -> Identity:
        return self._conversation.identity

    def before_return(self, check: Check) -> None:
        self._conversation.before_return(check)

    # Calls

    def call(self, call: Call) -> Results:
        with self._lock:
            conversation = self._conversation
            pending = conversation.call(call)
            try:
                while True:
                    if conversation.state is not _JOINED:
                        self._rejoin()
                    try:
                        return self._exchange(pending)
                    except (OSError, ConnectionLostError, ExecutorClosedError) as error:
                        self._lost(error)
            except SymbiosisError as error:
                if isinstance(error, WireError):
                    conversation.end(error)
                conversation.outstanding.clear()
                raise
            except BaseException:  # Ctrl-C: a message may be half sent, and an answer may still come
                self._interrupted()
                raise

    def _exchange(self, pending: Pending) -> Results:
        """Send a call and return its results."""
        connection, conversation, watch = self._connection, self._conversation, self._watch
        carrier = connection.carrier
        conversation.outstanding.next()
        parts = carrier.put(pending)
        if parts is not None:
            connection.send(parts)
        watch.heard(time.monotonic())
        while True:
            message = connection.receive()
            if message is None:
                conversation.check_open()
                if watch.look(time.monotonic()):
                    connection.send([PING])
                continue
            type_, content, frames = message
            answer = conversation.receive(type_, content)
            if answer is not None:
                conversation.outstanding.settle(pending)
                carrier.free(pending)
                if answer.error is not None:
                    raise answer.error
                results = carrier.take(pending, frames)
                assert results is not None, "a blocking connection brings results with their message"
                return results
            if conversation.state is not State.JOINED:
                assert conversation.error is not None
                raise conversation.error
            watch.heard(time.monotonic())
            if type_ in CARRIED:
                carrier.control(type_, content)
                if parts is None and (parts := carrier.put(pending)) is not None:
                    connection.send(parts)

    def begin_pass(self) -> None:
        self._walk(True)

    def end_pass(self) -> None:
        self._walk(False)

    def _walk(self, in_pass: bool) -> None:
        with self._lock:
            conversation = self._conversation
            if conversation.in_pass == in_pass:
                return
            message = conversation.walk(in_pass)
            if conversation.state is State.JOINED:
                try:
                    self._connection.send([message])
                except (OSError, SymbiosisError):
                    pass  # the next call finds out, and joins again
                except BaseException:  # Ctrl-C: half the message may be sent
                    self._interrupted()
                    raise

    # Connections

    def _lost(self, error: Exception) -> None:
        conversation = self._conversation
        conversation.lost(error)
        self._connection.close()
        conversation.check_open()
        log.warning("executor lost", address=conversation.address, client=self.client, why=str(error))

    def _interrupted(self) -> None:
        self._conversation.interrupted()
        self._connection.close()
        self._patience_s = max(self._conversation.retry_s, AGAIN_S)

    def _rejoin(self) -> None:
        conversation, patience_s = self._conversation, self._patience_s
        for delay in backoff(patience_s):
            time.sleep(delay)
            conversation.check_open()
            try:
                connection = self._connector.join(conversation.hello, again=True)
            except (SymbiosisError, OSError) as error:
                conversation.failed(error)
                conversation.check_open()
                continue
            try:
                conversation.joined(connection.welcome, connection.carrier.most_bytes)
                if conversation.in_pass:
                    connection.send([conversation.walk(True)])
            except (OSError, SymbiosisError) as error:
                connection.close()
                conversation.failed(error)
                conversation.check_open()
                continue
            self._connection = connection
            self._patience_s = conversation.retry_s
            conversation.check_open()  # closed meanwhile, by another thread
            log.info("executor is back", address=conversation.address, client=self.client)
            return
        conversation.give_up(patience_s)
        conversation.check_open()

    def close(self) -> None:
        """Leave. A call in progress on another thread ends with ClientClosedError."""
        self._conversation.end(closed_error(self.client))
        self._connection.interrupt()
        with self._lock:
            self._connection.close()

    def forked(self) -> None:
        """In a forked child process: end here, and leave the connection to the parent process."""
        self._conversation.end(forked_error(self.client))
        self._lock = threading.Lock()
        self._connection.abandon()


_channels: weakref.WeakSet[BlockingChannel] = weakref.WeakSet()
"""The open channels of this process, for :func:`_forked`."""


def _forked() -> None:
    for channel in list(_channels):
        channel.forked()


os.register_at_fork(after_in_child=_forked)
