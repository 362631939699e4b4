"""Channels for synchronous code.

:class:`BlockingChannel` is the blocking driver of a client's conversation, whatever the transport: the thread that
makes a call sends it, waits for the answer and joins again after a loss. One call is outstanding at a time.
:class:`ThreadedChannel` uses a channel on the event loop of another thread, for a transport that needs a loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from symbiosis.core.requests import Call, Results
from symbiosis.errors import (
    ClientClosedError,
    ConnectionLostError,
    ExecutorClosedError,
    SymbiosisError,
    UsageError,
    WireError,
    copied,
)
from symbiosis.log import get_logger
from symbiosis.transports.channel import AsyncChannel, abandon_in_children
from symbiosis.transports.connection import BlockingJoin
from symbiosis.transports.conversation import CARRIED, Conversation, Pending, State
from symbiosis.transports.wire import Hello

log = get_logger(__name__)

_JOINED = State.JOINED  # on Python 3.11 a member looked up on its class takes six times as long


class SynchronousChannel(ABC):
    """A channel for synchronous code, without the operations that coroutines use."""

    client: str

    def __init__(self) -> None:
        abandon_in_children(self)

    def send(self, call: Call) -> asyncio.Future[Results]:
        raise UsageError("this model was opened for synchronous code; use symbiosis.connect for coroutines")

    def flush(self) -> None:
        pass

    def cancel(self, call: Call) -> None:
        pass

    def interrupt(self, error: BaseException) -> None:
        pass

    def begin_walk(self) -> None:
        self._walk(True)

    def end_walk(self) -> None:
        self._walk(False)

    @abstractmethod
    def _walk(self, in_walk: bool) -> None:
        """Tell the executor whether the client is in a walk, if it does not know."""

    @abstractmethod
    def abandon(self, error: ClientClosedError) -> None:
        """End the channel in a forked child process with ``error``; the parent process keeps the connection."""

    def _closed(self) -> ClientClosedError:
        return ClientClosedError(f"the model of {self.client!r} was closed; open it again with symbiosis.open_model")


class BlockingChannel(SynchronousChannel):
    """A channel of a client without an event loop. Any thread may make calls; they take turns.

    Args:
        join: joins an executor.
        address: of the executor, for messages.
        hello: the client's name and terms.
        retry_s: seconds for which a client that has lost its executor tries to join again.
        better: called after each walk; returns whether to join again, because there is a better executor.
        leave: called when Ctrl-C ends a connection that works.

    Raises:
        SymbiosisError: the errors of ``join``.
    """

    def __init__(
        self,
        join: BlockingJoin,
        address: str,
        hello: Hello,
        retry_s: float,
        better: Callable[[], bool] | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = str(hello.name)
        self._conversation = conversation = Conversation(address, hello, retry_s)
        self._join = join
        self._better = better
        self._leave = leave
        self._connection = connection = join(hello, False)
        try:
            conversation.joined(connection.welcome)
            assert connection.share is not None
            self.device = connection.carrier.device
            self.layers = connection.welcome.layers
            self.share = connection.share
        except BaseException:
            connection.close()
            raise
        self.identity = conversation.identity
        self.before_return = conversation.before_return
        self.check_open = conversation.check_open
        self._lock = threading.Lock()
        super().__init__()

    def call(self, call: Call) -> Results:
        with self._lock:
            conversation = self._conversation
            try:
                pending = conversation.call(call)
                while True:
                    if conversation.state is not _JOINED:
                        self._rejoin()
                    try:
                        answer = self._exchange(pending)
                        break
                    except (OSError, ConnectionLostError, ExecutorClosedError) as error:
                        self._lost(error)
            except SymbiosisError as error:
                if isinstance(error, WireError):
                    conversation.end(error)
                if conversation.state is State.ENDED:
                    self._connection.close()
                conversation.outstanding.clear()
                raise
            except BaseException:  # Ctrl-C: the call may wait, a message be half sent, and an answer may still come
                self._interrupted()
                raise
        if isinstance(answer, SymbiosisError):
            raise answer
        return answer

    def _exchange(self, pending: Pending) -> Results | SymbiosisError:
        """Send a call and return its results, or the error that the executor answers. It concerns this call alone."""
        connection, conversation = self._connection, self._conversation
        carrier = connection.carrier
        conversation.outstanding.next()
        conversation.check_size(pending.rows, pending.size)
        parts = carrier.put(pending)
        if parts is not None:
            connection.send(parts)
        conversation.heard(time.monotonic())
        while True:
            message = connection.receive()
            if message is None:
                conversation.check_open()
                now = time.monotonic()
                if connection.moves():
                    conversation.heard(now)
                if (ping := conversation.check_alive(now)) is not None:
                    connection.send([ping])
                continue
            type_, content, attached = message
            answer = conversation.receive(type_, content)
            if answer is not None:
                error = answer[1]
                results = None if error is not None else carrier.take(pending, attached)
                conversation.outstanding.settle(pending)
                carrier.free(pending)
                outcome = error or results
                assert outcome is not None, "a blocking connection brings results with their message"
                return outcome
            if conversation.state is not State.JOINED:
                assert conversation.error is not None
                raise conversation.error
            conversation.heard(time.monotonic())
            if type_ in CARRIED:
                carrier.control(type_, content)
                if parts is None and (parts := carrier.put(pending)) is not None:
                    connection.send(parts)

    def _walk(self, in_walk: bool) -> None:
        with self._lock:
            conversation = self._conversation
            if conversation.in_walk == in_walk:
                return
            message = conversation.walk_message(in_walk)
            if conversation.state is State.JOINED:
                try:
                    self._connection.send([message])
                except (OSError, SymbiosisError):
                    pass  # the next call finds out, and joins again
                except BaseException:  # Ctrl-C: half the message may be sent
                    self._interrupted()
                    raise
                if not in_walk and self._better is not None and self._better():
                    conversation.leave()
                    self._connection.close()

    def _lost(self, error: Exception) -> None:
        conversation = self._conversation
        conversation.lost(error)
        self._connection.close()
        conversation.check_open()
        log.warning(
            "executor lost; trying to join again",
            within_s=conversation.retry_s,
            address=conversation.address,
            client=self.client,
            why=str(error),
        )

    def _interrupted(self) -> None:
        if self._conversation.state is _JOINED:
            self._leave()
        self._conversation.interrupted()
        self._connection.close()

    def _rejoin(self) -> None:
        conversation = self._conversation
        while (delay := conversation.next_attempt(time.monotonic())) is not None:
            time.sleep(delay)
            conversation.check_open()
            connection = None
            try:
                connection = self._join(conversation.hello, True)
                for message in conversation.joined(connection.welcome):
                    connection.send([message])
            except (OSError, SymbiosisError) as error:
                if connection is not None:
                    connection.close()
                conversation.lost(error)
                continue
            self._connection = connection
            log.info("joined again", address=conversation.address, client=self.client)
            break
        conversation.check_open()  # another thread may have closed the channel

    def close(self) -> None:
        """Leave. A call in progress on another thread ends with ClientClosedError. A call that is joining an executor
        again ends once this attempt has ended."""
        rejoins = self._conversation.state is State.REJOINING
        self._conversation.end(self._closed())
        if rejoins:  # the old connection is closed, and the thread that opens another one closes it
            return
        self._connection.interrupt()
        with self._lock:
            self._connection.close()

    def abandon(self, error: ClientClosedError) -> None:
        self._conversation.end(error)
        self._lock = threading.Lock()
        self._connection.abandon()


class ThreadedChannel(SynchronousChannel):
    """A channel that uses a channel on an event loop in a thread of its own.

    Args:
        opening: opens the channel, on that event loop. The constructor raises its errors.
    """

    def __init__(self, opening: Coroutine[Any, Any, AsyncChannel]) -> None:
        self._loop = asyncio.new_event_loop()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="symbiosis-loop", daemon=True)
        self._thread.start()
        opened = asyncio.run_coroutine_threadsafe(opening, self._loop)
        try:
            self._channel = channel = opened.result()
        except BaseException:
            opened.cancel()
            self._end_thread()
            raise
        self.client = channel.client
        self.device = channel.device
        self.layers = channel.layers
        self.share = channel.share
        self.identity = channel.identity
        self.before_return = channel.before_return
        self._in_walk = False
        self._ended: ClientClosedError | None = None
        super().__init__()

    def _run(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # each thread has a current one of its own
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def call(self, call: Call) -> Results:
        if self._ended is not None:
            raise copied(self._ended)
        return self._channel.call(call)

    def _walk(self, in_walk: bool) -> None:
        if self._in_walk != in_walk:
            self._in_walk = in_walk
            self._soon(self._channel.walk, in_walk)

    def _soon(self, what: Callable[..., None], *arguments: Any) -> None:
        if self._ended is None:
            self._loop.call_soon_threadsafe(what, *arguments)

    def close(self) -> None:
        """Leave. A call in progress on another thread ends."""
        if self._ended is None:
            self._soon(self._channel.close)
            self._ended = self._closed()
            self._end_thread()

    def abandon(self, error: ClientClosedError) -> None:
        self._ended = error
