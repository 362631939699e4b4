"""How a VirtLayer waits for the answer to its call, which depends on where it is called.

* In a client on an event loop (:class:`LoopWaiter`), a fiber suspends, and any other thread blocks. Backward passes run
  on a thread of the client's own (:class:`ClientThread`), because autograd cannot be suspended.
* In a client without an event loop, the thread blocks (:func:`wait_blocking`).
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from greenlet import getcurrent

from symbiosis.client.cores import end_helpers, use_cores
from symbiosis.client.fibers import Fiber, RandomStream
from symbiosis.core.requests import Call, Results
from symbiosis.core.transport import Channel
from symbiosis.errors import CannotWaitError, ClientClosedError
from symbiosis.modes import modes_aside

T = TypeVar("T")


Waiter = Callable[[Channel, Call, str], Results]
"""Sends a call and returns its results, given the layer's name for errors. Raises CannotWaitError if the layer was
called where it cannot wait."""


def wait_blocking(channel: Channel, call: Call, name: str) -> Results:
    """Wait in a client without an event loop, on any thread."""
    return channel.call(call)


class LoopWaiter:
    """Waits in clients that live on the running event loop: in the running fiber, or on a thread.

    Args:
        thread: the client's own thread.
    """

    def __init__(self, thread: ClientThread) -> None:
        self._thread = thread
        self._loop_thread = threading.get_ident()

    def __call__(self, channel: Channel, call: Call, name: str) -> Results:
        fiber = getcurrent()
        if isinstance(fiber, Fiber):
            return _wait_in_fiber(fiber, channel, call, name)
        if threading.get_ident() == self._loop_thread:
            verb = "backward(loss)" if call.key.pass_.is_backward else "forward(...), generate(...) or run(fn, ...)"
            raise CannotWaitError(
                f"{name}: this model was called directly on the event loop, which would wait for itself; "
                f"use `await client.{verb}`, or call it from another thread"
            )
        owner = _running.thread
        if owner is None:
            return channel.call(call)
        if owner is not self._thread:
            raise CannotWaitError(
                f"{name}: this backward pass goes through the models of two clients; each has a thread of its own, so "
                "detach the output of one model before it enters the other, or call backward for each"
            )
        if owner.interrupted is not None:
            raise owner.interrupted
        owner.choose_cores()
        stream = owner.stream
        if stream is None:
            return channel.call(call)
        stream.leave()
        try:
            return channel.call(call)
        finally:
            stream.enter()


def _wait_in_fiber(fiber: Fiber, channel: Channel, call: Call, name: str) -> Results:
    if torch._C._current_graph_task_id() != -1:
        raise CannotWaitError(
            f"{name}: loss.backward() was called inside a fiber, where autograd cannot be suspended; "
            "return the loss and `await client.backward(loss)` instead, or run a whole trainer on a thread: "
            "`await asyncio.to_thread(trainer.train)`"
        )
    reply = channel.send(call)
    if reply.done():
        return reply.result()
    try:
        return fiber.wait(reply, channel)
    except BaseException:
        channel.cancel(call)
        raise


class _Running(threading.local):
    """The client whose own thread this is."""

    thread: ClientThread | None = None
    cores = 1
    """Cores that operators use on this thread when its client has the process to itself."""


_running = _Running()


class ClientThread:
    """A thread of one client, for work that cannot be suspended. It starts when it is first needed.

    Args:
        client: the client's name.
        beside_others: returns whether another client of the executor is under way.
        at_work: the threads of clients of the same executor that have work at the moment.

    Attributes:
        interrupted: raised by the next call from the thread, so that work that was cancelled ends; None otherwise.
        stream: the stream of random numbers that work on the thread draws from, to be left while it waits; or None.
    """

    def __init__(self, client: str, beside_others: Callable[[], bool], at_work: set[ClientThread]) -> None:
        self._client = client
        self._beside_others = beside_others
        self._at_work = at_work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._beside: bool | None = None  # during work: what `_is_beside` returned when the cores were chosen
        self.interrupted: BaseException | None = None
        self.stream: RandomStream | None = None

    async def run(self, interrupt: Callable[[BaseException], None], fn: Callable[..., T], *args: object) -> T:
        """Run a function on the thread, with the caller's context variables, and return its result.

        When the awaiting task is cancelled, ``interrupt`` is called with an error for the calls that wait, and this
        method ends only after the thread is free again.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, f"symbiosis-{self._client}", initializer=self._started)
        with modes_aside():
            self._loop = loop = asyncio.get_running_loop()
            self._at_work.add(self)
            try:
                if not self._is_beside():
                    end_helpers()  # of the event loop's thread, so that those of the client's thread need not sleep
                context = contextvars.copy_context()
                work = loop.run_in_executor(self._pool, context.run, self._with_cores, fn, args)
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                self.interrupted = ClientClosedError(f"this operation of client {self._client!r} was cancelled")
                interrupt(self.interrupted)
                while not work.done():
                    try:
                        await asyncio.wait([work])
                    except asyncio.CancelledError:
                        continue
                work.exception()  # caused by the interruption
                raise
            finally:
                self.interrupted = None
                self._at_work.discard(self)

    def with_stream(self, stream: RandomStream, fn: Callable[..., T], *args: object) -> T:
        """Run a function on this thread, with random numbers from a stream."""
        with stream:
            self.stream = stream
            try:
                return fn(*args)
            finally:
                self.stream = None

    @property
    def is_current(self) -> bool:
        """Whether this code runs on the thread."""
        return _running.thread is self

    def close(self) -> None:
        """End the thread, once its work is done."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _started(self) -> None:
        _running.thread = self
        _running.cores = torch.get_num_threads()

    def _is_beside(self) -> bool:
        return len(self._at_work) > 1 or self._beside_others()

    def choose_cores(self) -> None:
        """Have operators on this thread use half of the cores while others are under way, so that the event loop has
        the other half, and otherwise all of them (docs/decisions/0012-cores-of-backward-threads.md)."""
        beside = self._is_beside()
        if beside is not self._beside:
            if beside:
                end_helpers()  # so that those of the event loop's thread need not sleep
            elif self._beside:
                assert self._loop is not None
                self._loop.call_soon_threadsafe(end_helpers)  # those of its thread, for the same reason
            self._beside = beside
            use_cores(max(1, _running.cores // 2) if beside else _running.cores)

    def _with_cores(self, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        self.choose_cores()
        try:
            return fn(*args)
        except StopIteration as error:  # a future cannot have it
            raise RuntimeError(f"an operation of client {self._client!r} raised StopIteration") from error
        finally:
            end_helpers()
            self._beside = None
