"""The engine: drives the scheduler and the runner on the event loop.

Sessions submit calls. The scheduler says which rows run next, the runner runs them, and futures carry the results back.
The engine holds a tenant's tensors only between a call and its answer.

Everything happens on the event loop's thread, with two exceptions. A thread of a client may run a call that skips the
queue (:meth:`Engine.at_once`). And once other processes are served, a batch that will take long runs on a thread of its
own, so that the event loop goes on with its sockets (docs/decisions/0027-long-batches.md); no other queued batch runs
meanwhile. A lock therefore guards the scheduler; no batch runs while it is held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from symbiosis.core.budget import Budget
from symbiosis.core.policy import Policy
from symbiosis.core.requests import Batch, Call, Key, Request, Results
from symbiosis.core.scheduler import Scheduler
from symbiosis.core.terms import Kind, Terms
from symbiosis.errors import LayerError, ShardLostError, copied
from symbiosis.executor.aside import Aside
from symbiosis.executor.counters import Counters
from symbiosis.executor.failures import fail, strip_tracebacks
from symbiosis.executor.layers import BaseLayer
from symbiosis.executor.runner import Compute, DeviceClock, Runner
from symbiosis.executor.statistics import Statistics
from symbiosis.executor.timeline import Timeline
from symbiosis.executor.unpacked import Unpacked
from symbiosis.modes import in_modes, no_modes

log = logging.getLogger(__name__)


now = time.monotonic
"""The executor's clock, in seconds. uvloop's own clock counts whole milliseconds."""
AHEAD_S = 0.01
"""No batch is launched while a GPU has launched prompts and fine-tuning to compute that are expected to take more
seconds. A token cannot overtake them, so it may wait for about this time (docs/decisions/0042-captured-walks.md)."""
_POLL_S = 0.001
"""Seconds between two looks at what the GPU has done."""
_DECODE = Kind.DECODE  # on Python 3.11 a member looked up on its class takes six times as long


class Engine:
    """Runs batches of calls on a table of base layers.

    Args:
        layers: the base layers, in the order of the layer table.
        device: where they are.
        policy: chooses what runs.
        max_rows: largest number of rows in a batch.
        budget: counts the copies of packed weights in the layout of an ``nn.Linear``, which training needs.
        parts: for each layer, the part of a token's walk that one row through it is; see :class:`Scheduler`.
        fraction: the part (0 to 1) of a walk's work that these layers do.
        compute: runs the layers of a key on rows in place of ``layers``, in an executor with shards.

    Attributes:
        scheduler: the queues.
        layers: the base layers.
        runner: runs batches on the layers.
        device_clock: measures batches on a CUDA device; None elsewhere.
        counters: what has run so far.
        timeline: where to record what runs, or None.
        calls: queued and running calls by request id.
    """

    def __init__(
        self,
        layers: Sequence[BaseLayer],
        device: torch.device,
        policy: Policy,
        max_rows: int,
        budget: Budget,
        parts: Sequence[float] = (),
        fraction: float = 1.0,
        compute: Compute | None = None,
    ) -> None:
        self.scheduler = Scheduler(policy, layers=len(layers), max_rows=max_rows, parts=parts, fraction=fraction)
        self.counters = Counters(frozenset(number for number, layer in enumerate(layers) if layer.spec.bias))
        self.timeline: Timeline | None = None
        self.layers = layers
        self.runner = Runner(layers, max_rows, compute)
        self.device_clock = DeviceClock(device) if device.type == "cuda" else None
        self._lock = threading.RLock()
        self.calls: dict[int, Call] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._pump: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._policy_failures = 0
        self._unpacked = Unpacked(layers, budget)
        self._aside = Aside(layers)
        self._on_cpu = device.type == "cpu"  # other devices run batches beside the event loop anyway

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run batches on this event loop, whose thread calls this method."""
        self._loop = loop
        self._loop_thread = threading.get_ident()

    def serve_other_processes(self) -> None:
        """Run long batches beside the event loop from now on.

        Clients of this process would be slower with this: they compute on the event loop's thread, which then shares
        the cores with the batch. Their computations block one another in any case.
        """
        if self._on_cpu:
            self._aside.open()

    async def stop(self, error: BaseException) -> None:
        """Run no further batches, wait for the one under way, and end all calls that are left with ``error``."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
        await self._aside.close()
        for call in self.calls.values():
            fail(call, copied(error))

    def reset_counters(self) -> None:
        """Count from zero."""
        with self._lock:
            slo, service = self.scheduler.accounts()
            self.counters = Counters(
                self.counters.biased, load=self.counters.load, slo_before=dict(slo), service_before=dict(service)
            )

    def statistics(self) -> Statistics:
        """Return what has run so far."""
        with self._lock:
            slo, service = self.scheduler.accounts()
            self._report_policy()
            return self.counters.snapshot([layer.spec.name for layer in self.layers], slo, service)

    def walked(self, client: str, alone: str | None) -> None:
        """Count a token that a client of this process decoded; see :meth:`Counters.walked`."""
        with self._lock:
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
                fail(call, copied(error))
        self._unpacked.left(client, self.when_idle)
        self._pump_soon()

    def begin_walk(self, client: str) -> None:
        """Note that a client begins to walk the model."""
        began = now()
        with self._lock:
            self.scheduler.walk_began(client, began)
        if (timeline := self.timeline) is not None:
            timeline.walk_began(client, began)

    def end_walk(self, client: str) -> None:
        """Note that a client is idle."""
        with self._lock:
            self.scheduler.walk_ended(client)
        if (timeline := self.timeline) is not None:
            timeline.walk_ended(client, now())
        self._pump_soon()

    def may_join(self, client: str) -> bool:
        """Return whether a client may take part in a walk with other clients now."""
        with self._lock:
            return self.scheduler.may_join(client, now())

    def submit(self, client: str, call: Call, kind: Kind, *, answer_first: bool = False) -> asyncio.Future[Results]:
        """Run a checked call of a client at once, or queue it. Called on the event loop.

        Args:
            answer_first: whether a batch that runs at once is counted after the caller has sent its answer.
        """
        loop = self._loop
        assert loop is not None
        reply: asyncio.Future[Results] = loop.create_future()
        request = self._request(client, call, kind)
        self._unpacked.asked(client, call.key)
        # A tenant's modes must not reach base layers, and one batch runs at a time.
        if (
            in_modes()
            or self._aside.batch is not None
            or self._aside.takes(call.key, request.rows)
            or self._is_far_ahead()
        ):
            with self._lock:
                self.scheduler.submit(request)
        else:
            with self._lock:
                batch = self.scheduler.offer(request, request.arrived)
            if batch is not None:
                try:
                    reply.set_result(self._run_lone(batch, call, answer_first=answer_first))
                    return reply
                except LayerError as error:
                    reply.set_exception(copied(error))  # the traceback of this one refers to the rows, and to the reply
                    return reply
                except ShardLostError:  # the executor closes, which ends this call
                    pass
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
        if in_modes() or self._aside.batch is not None or self._is_far_ahead():
            return None
        request = self._request(client, call, kind)
        with self._lock:
            batch = self.scheduler.offer_alone(request, request.arrived)
            if batch is not None:  # the client may have left
                self._unpacked.asked(client, call.key)
        return None if batch is None else self._run_lone(batch, call)

    def _is_far_ahead(self) -> bool:
        """Return whether the device has more than AHEAD_S of launched prompts and fine-tuning to compute."""
        clock = self.device_clock
        if clock is None or clock.ahead_s <= AHEAD_S:
            return False
        try:
            with self._lock:
                self._read_clock(clock)
        except RuntimeError:  # the device has failed, and so will the next batch, whose clients are told
            return False
        return clock.ahead_s > AHEAD_S

    def _read_clock(self, clock: DeviceClock) -> None:
        """Note how long batches have taken that a device has finished."""
        for batch, seconds in clock.done():
            self.scheduler.measured(batch, seconds)
            self.counters.load.ran(batch.rows, seconds, now())
            if not _decodes(batch):
                self._aside.pace.learn(batch.key, batch.rows, seconds)

    def cancel(self, call: Call) -> bool:
        """Withdraw a call; see :meth:`symbiosis.core.transport.Session.cancel`."""
        if self.calls.pop(call.id, None) is None:
            return False
        with self._lock:
            self.scheduler.cancel(call.id, now())
        self._pump_soon()
        return self._aside.holds(call.id)

    def when_idle(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the batch under way has ended; at once if there is none."""
        self._aside.when_idle(then)

    def flush(self) -> None:
        """Run the next batch before the event loop has run its other work, if the scheduler agrees.

        A round of the event loop for each request would double the time of a request of a client that is alone
        (docs/decisions/0008-lone-requests.md). Called outside all fibers, because their torch modes must not reach base
        layers.
        """
        loop = self._loop
        if loop is None or self._aside.batch is not None:
            return
        with self._lock:
            hurries = self.scheduler.hurries(now())
        if hurries:
            self._decide(loop)

    def _request(self, client: str, call: Call, kind: Kind) -> Request:
        rows, arrived = call.tensors[0].shape[0], now()
        return Request(next(self._ids), client, call.key, rows, kind, arrived, joint=call.joint)

    def _pump_soon(self) -> None:
        """Ask the scheduler again once everything that is ready on the event loop has run."""
        if self._pump is None and self._loop is not None and not self._loop.is_closed():
            if threading.get_ident() == self._loop_thread:
                self._pump = self._loop.call_soon(self._on_turn)
            else:
                self._loop.call_soon_threadsafe(self._on_turn)

    def _on_turn(self) -> None:
        self._pump = None
        loop = self._loop
        if loop is not None and self._aside.batch is None:
            with self._lock:
                self.scheduler.turned(now())
            self._decide(loop)

    def _decide(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_far_ahead():
            self._timer = loop.call_later(_POLL_S, self._pump_soon)
            return
        with self._lock:
            action = self.scheduler.next_action(now())
        if self.scheduler.policy_errors:
            self._report_policy()
        if isinstance(action, Batch):
            try:
                with no_modes():
                    self._run(action, loop)
            finally:
                # This turn follows the callbacks of the answered clients, so they can join the next batch.
                if self._pump is not None:
                    self._pump.cancel()
                self._pump = loop.call_soon(self._on_turn)
        elif action.time < math.inf:
            self._timer = loop.call_later(action.time - now(), self._pump_soon)

    def _run(self, batch: Batch, loop: asyncio.AbstractEventLoop) -> None:
        """Run a queued batch and answer its calls, or have this done on the other thread if it will take long."""
        calls = [self.calls[request.id] for request, _, _ in batch.slices]
        self._keep_unpacked(batch.key)
        started, clock = now(), self.device_clock
        if self._aside.takes(batch.key, batch.rows):
            self._aside.run(
                loop, batch, partial(self.runner.run, batch, calls), partial(self._ran_aside, batch, started)
            )
            return
        try:
            began = None if clock is None else clock.mark()
            self.runner.run(batch, calls)
            answered = self._completed(batch, started, now(), began)
        except Exception as cause:  # noqa: BLE001 (an error of a layer or of the device goes to the batch's clients)
            self._answer_failed(batch, cause)
        else:
            self._answer(answered)

    def _ran_aside(self, batch: Batch, started: float, ended: float, cause: BaseException | None) -> None:
        """Answer the calls of a batch that has run on the other thread."""
        try:
            if cause is None:
                self._answer(self._completed(batch, started, ended, None))
            else:
                self._answer_failed(batch, cause)
        finally:
            self._pump_soon()

    def _answer_failed(self, batch: Batch, cause: BaseException) -> None:
        if isinstance(cause, ShardLostError):  # the executor ends, and then all calls: clients elsewhere may go on
            strip_tracebacks(cause)
            return
        error = self._failed(batch, cause)
        for request, _, _ in batch.slices:
            call = self.calls.pop(request.id, None)
            if call is not None:
                fail(call, copied(error))

    def _answer(self, answered: Sequence[Request]) -> None:
        """Hand out the results of requests."""
        for request in answered:
            call = self.calls.pop(request.id, None)
            if call is None:
                continue
            reply, results = call.reply, call.results
            call.reply = call.results = None
            if reply is not None and results is not None and not reply.done():
                reply.set_result(results)

    def _keep_unpacked(self, key: Key) -> None:
        self._unpacked.keep(key, counted=threading.get_ident() == self._loop_thread)

    def _run_lone(self, batch: Batch, call: Call, *, answer_first: bool = False) -> Results:
        """Run a batch of one call that skipped the queue, and return its results.

        Raises:
            LayerError: the base layer failed.
        """
        self._keep_unpacked(batch.key)
        started, clock = now(), self.device_clock
        try:
            began = None if clock is None else clock.mark()
            results = self.runner.run_alone(call)
            self._completed(batch, started, now(), began, count_later=answer_first and self.timeline is None)
        except ShardLostError:
            raise
        except Exception as cause:
            raise self._failed(batch, cause) from cause
        return results

    def _completed(
        self,
        batch: Batch,
        started: float,
        ended: float,
        began: torch.cuda.Event | None,
        *,
        count_later: bool = False,
    ) -> list[Request]:
        """Account for a batch that has run, or was launched on a device, and return the requests that it answered."""
        clock = self.device_clock
        with self._lock:
            beside = self.scheduler.beside(batch) if len(batch.slices) == 1 else ""
            if clock is None or began is None:
                answered = self.scheduler.completed(batch, ended - started, now())
                self.counters.load.ran(batch.rows, ended - started, ended)
            else:
                answered = self.scheduler.completed(batch, None, now())
                expected_s = 0.0 if _decodes(batch) else self._aside.pace.expects(batch.key, batch.rows)
                clock.launched(batch, began, expected_s)
                self._read_clock(clock)
        if count_later and self._loop is not None:
            self._loop.call_soon(self._count, batch, answered, started, ended, beside)
        else:
            self._count(batch, answered, started, ended, beside)
        return answered

    def _count(self, batch: Batch, answered: list[Request], started: float, ended: float, beside: str) -> None:
        if self.device_clock is None:
            self._aside.pace.learn(batch.key, batch.rows, ended - started)
        with self._lock:
            self.counters.count(batch, answered, started, ended, beside)
        if (timeline := self.timeline) is not None:  # another thread may end the recording now
            timeline.ran(batch, answered, started, ended)

    def _failed(self, batch: Batch, cause: BaseException) -> LayerError:
        """Cancel the requests of a batch whose base layer has failed, and return the error for its clients."""
        names = ", ".join(self.layers[layer].spec.name for layer in batch.key.layers)
        log.error("%s failed on a batch of %d rows", names, batch.rows, exc_info=cause)
        strip_tracebacks(cause)
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


def _decodes(batch: Batch) -> bool:
    """Return whether a batch has only decode rows. On a GPU it takes as long as reading the weights."""
    return all(request.kind is _DECODE for request, _, _ in batch.slices)
