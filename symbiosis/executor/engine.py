"""The engine: drives the scheduler and the runner on the event loop.

Sessions submit calls. The scheduler says which rows run next, the runner runs them, and futures carry the results back.
The engine holds a tenant's tensors only between a call and its answer.

Everything happens on the event loop's thread, with one exception: a thread of a client may run a call that skips the
queue (:meth:`Engine.at_once`). A lock therefore guards the scheduler; no batch runs while it is held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence

import torch

from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Call, Request, Results
from symbiosis.core.scheduler import Scheduler, WaitUntil
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import LayerError
from symbiosis.executor.layers import BaseLayer
from symbiosis.executor.runner import DeviceClock, Runner
from symbiosis.executor.statistics import Counters
from symbiosis.executor.timeline import Timeline
from symbiosis.modes import in_modes

log = logging.getLogger(__name__)


now = time.monotonic
"""The executor's clock, in seconds. uvloop's own clock counts whole milliseconds."""


class Engine:
    """Runs batches of calls on a table of base layers.

    Args:
        layers: the base layers, in the order of the layer table.
        device: where they are.
        policy: chooses what runs.
        max_rows: largest number of rows in a batch.

    Attributes:
        scheduler: the queues.
        layers: the base layers.
        runner: runs batches on the layers.
        device_clock: measures batches on a CUDA device; None elsewhere.
        counters: what has run so far.
        timeline: where to record what runs, or None.
        calls: queued and running calls by request id.
    """

    def __init__(self, layers: Sequence[BaseLayer], device: torch.device, policy: Policy, max_rows: int) -> None:
        self.scheduler = Scheduler(policy, layers=len(layers), max_rows=max_rows)
        self.counters = Counters()
        self.timeline: Timeline | None = None
        self.layers = layers
        self.runner = Runner(layers)
        self.device_clock = DeviceClock(device) if device.type == "cuda" else None
        self._lock = threading.RLock()
        self.calls: dict[int, Call] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._pump: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._policy_failures = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run batches on this event loop, whose thread calls this method."""
        self._loop = loop
        self._loop_thread = threading.get_ident()

    def stop(self) -> None:
        """Run no further batches."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()

    def reset_counters(self) -> None:
        """Count from zero."""
        self.counters = Counters()

    def walked(self, client: str, alone: str | None) -> None:
        """Count a token that a client of this process decoded; see :meth:`Counters.walked`."""
        self.counters.walked(client, alone)

    def record(self, timeline: Timeline | None) -> None:
        """Record what runs in a timeline from now on, or stop recording."""
        self.timeline = timeline

    def time_layers(self, layers: Sequence[int]) -> float:
        """Return the seconds that one row takes through these layers, one after another: the best of three runs."""
        return min(self.runner.time(layers) for _ in range(3))

    def join(self, client: str, terms: Terms, local: bool) -> Terms:
        """Admit a client, and return its effective terms; see :meth:`Scheduler.client_joined`."""
        with self._lock:
            return self.scheduler.client_joined(client, terms, local=local)

    def leave(self, client: str, error: BaseException) -> None:
        """Forget a client. Its outstanding calls end with ``error``."""
        with self._lock:
            requests = self.scheduler.client_left(client, now())
        for request in requests:
            call = self.calls.pop(request.id, None)
            if call is not None:
                _fail(call, error)
        self._pump_soon()

    def begin_walk(self, client: str) -> None:
        """Note that a client begins to walk the model."""
        began = now()
        with self._lock:
            self.scheduler.walk_began(client, began)
        if self.timeline is not None:
            self.timeline.walk_began(client, began)

    def end_walk(self, client: str) -> None:
        """Note that a client is idle."""
        with self._lock:
            self.scheduler.walk_ended(client)
        if self.timeline is not None:
            self.timeline.walk_ended(client, now())
        self._pump_soon()

    def may_join(self, client: str) -> bool:
        """Return whether a client may take part in a walk with other clients now."""
        with self._lock:
            return self.scheduler.may_join(client, now())

    def submit(self, client: str, call: Call, kind: Kind) -> asyncio.Future[Results]:
        """Run a checked call of a client at once, or queue it. Called on the event loop."""
        loop = self._loop
        assert loop is not None
        reply: asyncio.Future[Results] = loop.create_future()
        request = self._request(client, call, kind)
        if in_modes():  # a tenant's modes must not reach base layers
            with self._lock:
                self.scheduler.submit(request)
        else:
            with self._lock:
                batch = self.scheduler.offer(request, request.arrived)
            if batch is not None:
                try:
                    reply.set_result(self._run_lone(batch, call))
                except LayerError as error:
                    reply.set_exception(error)
                return reply
        call.id, call.reply = request.id, reply
        self.calls[request.id] = call
        self._pump_soon()
        return reply

    def at_once(self, client: str, call: Call, kind: Kind) -> Results | None:
        """Run a checked call on the calling thread if it may skip the queue; otherwise return None.

        This saves a client's own thread two changes of thread. A request that arrives meanwhile may start a second
        batch on the event loop; then the two run at the same time.

        Raises:
            LayerError: the base layer failed.
        """
        if in_modes():
            return None
        request = self._request(client, call, kind)
        with self._lock:
            batch = self.scheduler.offer_alone(request, request.arrived)
        return None if batch is None else self._run_lone(batch, call)

    def cancel(self, call: Call) -> None:
        """Withdraw a call. Has no effect on a call that was answered."""
        if self.calls.pop(call.id, None) is not None:
            with self._lock:
                self.scheduler.cancel(call.id, now())
            self._pump_soon()

    def flush(self) -> None:
        """Run the next batch before the event loop has run its other work, if the scheduler agrees.

        A round of the event loop for each request would double what a lone client pays
        (docs/decisions/0008-lone-requests.md). Called outside all fibers, because their torch modes must not reach base
        layers.
        """
        loop = self._loop
        if loop is None:
            return
        with self._lock:
            hurries = self.scheduler.hurries(now())
        if hurries:
            self._decide(loop)

    def _request(self, client: str, call: Call, kind: Kind) -> Request:
        rows = call.tensors[0].shape[0]
        return Request(next(self._ids), client, call.key, rows, kind, now(), tenants=call.tenants)

    def _pump_soon(self) -> None:
        """Ask the scheduler again once everything that is ready on the event loop has run."""
        if self._pump is None and self._loop is not None:
            if threading.get_ident() == self._loop_thread:
                self._pump = self._loop.call_soon(self._on_turn)
            else:
                self._loop.call_soon_threadsafe(self._on_turn)

    def _on_turn(self) -> None:
        self._pump = None
        loop = self._loop
        if loop is not None:
            with self._lock:
                self.scheduler.turned(now())
            self._decide(loop)

    def _decide(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            action = self.scheduler.next_action(now())
        if self.scheduler.policy_errors:
            self._report_policy()
        if isinstance(action, Batch):
            try:
                self._run(action)
            finally:
                # This turn follows the callbacks of the answered clients, so they can join the next batch.
                if self._pump is not None:
                    self._pump.cancel()
                self._pump = loop.call_soon(self._on_turn)
        elif isinstance(action, WaitUntil) and action.time < math.inf:
            self._timer = loop.call_later(action.time - now(), self._pump_soon)

    def _run(self, batch: Batch) -> None:
        """Run a queued batch and answer its calls."""
        calls = [self.calls[request.id] for request, _, _ in batch.slices]
        started, clock = now(), self.device_clock
        began = None if clock is None else clock.mark()
        try:
            self.runner.run(batch, calls)
        except Exception as cause:  # noqa: BLE001 (any error of a layer is reported to the clients of the batch)
            error = self._failed(batch, cause)
            for request, _, _ in batch.slices:
                _fail(self.calls.pop(request.id), _copy(error))
            return
        answered = self._completed(batch, started, began)
        for request in answered:
            call = self.calls.pop(request.id, None)
            if call is None:
                continue
            reply, results = call.reply, call.results
            call.reply = call.results = None
            if reply is not None and results is not None and not reply.done():
                reply.set_result(results)

    def _run_lone(self, batch: Batch, call: Call) -> Results:
        """Run a batch of one call that skipped the queue, and return its results.

        Raises:
            LayerError: the base layer failed.
        """
        started, clock = now(), self.device_clock
        began = None if clock is None else clock.mark()
        try:
            results = self.runner.run_alone(call)
        except Exception as cause:
            raise self._failed(batch, cause) from cause
        self._completed(batch, started, began)
        return results

    def _completed(self, batch: Batch, started: float, began: torch.cuda.Event | None) -> list[Request]:
        """Account for a batch that has run, or was launched on a device, and return the requests that it answered."""
        ended, clock = now(), self.device_clock
        with self._lock:
            if clock is None or began is None:
                answered = self.scheduler.completed(batch, ended - started, ended)
            else:
                answered = self.scheduler.completed(batch, None, ended)
                clock.launched(batch, began)
                for earlier, seconds in clock.done():
                    self.scheduler.measured(earlier, seconds)
            self.counters.count(batch, answered, started, ended)
        if self.timeline is not None:
            self.timeline.ran(batch, answered, started, ended)
        return answered

    def _failed(self, batch: Batch, cause: Exception) -> LayerError:
        """Cancel the requests of a batch whose base layer has failed, and return the error for its clients."""
        names = ", ".join(self.layers[layer].spec.name for layer in batch.key.layers)
        log.error("%s failed on a batch of %d rows", names, batch.rows, exc_info=cause)
        _strip_tracebacks(cause)  # their frames hold the rows of every tenant in the batch
        error = LayerError(f"{names} failed on a batch of {batch.rows} rows: {cause}")
        error.__cause__ = cause
        with self._lock:
            for request, _, _ in batch.slices:
                self.scheduler.cancel(request.id, now())
        return error

    def _report_policy(self) -> None:
        while self.scheduler.policy_errors:
            error = self.scheduler.policy_errors.popleft()
            self._policy_failures += 1
            if self._policy_failures & (self._policy_failures - 1) == 0:  # the 1st, 2nd, 4th, 8th… time
                log.error("%s (%d such faults so far)", error, self._policy_failures, exc_info=error.__cause__)


def _fail(call: Call, error: BaseException) -> None:
    if call.reply is not None and not call.reply.done():
        call.reply.set_exception(error)


def _copy(error: LayerError) -> LayerError:
    """Return a copy of the error for another tenant, because raising one object twice would join both tracebacks."""
    copy = LayerError(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _strip_tracebacks(error: BaseException) -> None:
    """Take the tracebacks off an error and off all that led to it. They have been logged."""
    found: dict[int, BaseException] = {}
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
