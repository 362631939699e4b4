"""The base executor: one event loop, one frozen model, any number of clients.

It drives the sans-IO scheduler: transports submit calls, the scheduler (that is, its policy) says which rows run next,
the runner runs them, and futures carry the results back. It holds a tenant's tensors only between a call and its
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from symbiosis.core.client import Client
from symbiosis.core.fibers import current_fiber, in_modes
from symbiosis.core.loading import load_model
from symbiosis.core.protocols import Channel, Identity, Listener, Policy, Privacy
from symbiosis.core.registry import make_policy, make_privacy, make_transport
from symbiosis.core.requests import NO_TERMS, Batch, Call, Key, Kind, LayerSpec, Request, Terms
from symbiosis.core.runner import DeviceClock, Runner
from symbiosis.core.scheduler import Scheduler, WaitUntil, tell_unloaded
from symbiosis.core.session import ExecutorSession, kind_of
from symbiosis.core.share import Share, weights_fingerprint
from symbiosis.core.splitting import SplitModel
from symbiosis.core.statistics import Counters, Statistics
from symbiosis.core.timeline import Timeline
from symbiosis.core.virtlayer import Link
from symbiosis.errors import ExecutorClosedError, LayerError, UsageError

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["Executor"]

log = logging.getLogger(__name__)

Results = tuple[torch.Tensor, ...]

_numbers = itertools.count(1)
_now = time.monotonic
"""The executor's clock. Not the loop's: uvloop's counts whole milliseconds."""
_COMPANY_S = 0.5
"""A client is alone when no other was at work for so long. Until then requests go through the queue, where clients that
take turns meet. The gain is small: docs/architecture.md."""
_TURN_S = 0.01
"""How long batches may follow one another before everything else on the event loop gets its turn."""
_STOPPED_S = 1.0
"""A client in a pass that has asked for nothing for so long, or up to twice as long, is no longer waited for."""


class Executor:
    """Serves the base layers of one frozen model to any number of clients.

    Use it as an asynchronous context manager, on the event loop that the clients run on too.

    Args:
        model: any ``transformers`` model. It is frozen, and put in evaluation mode, in place.
        policy: what to batch, and how long to wait for it: an object, or a name with options such as
            ``"opportunistic:wait_ms=20"``.
        base_layers: what is served: ``"linear"``, ``"mlp"``, or module names or patterns; see
            :class:`~symbiosis.core.splitting.SplitModel`.
        device: where the base model runs; by default where it is.
        dtype: in what precision it is served; by default the model's.
        max_rows: most rows in a batch. Larger requests are served in slices, so this bounds the executor's own memory.
        name: of the address ``inproc://name``; chosen freely by default.

    Raises:
        SplitError: the model has no such base layers.
        PolicyError: the policy raised when it was told of the model.
        UnknownNameError, UsageError: no such policy, or options that it does not take; or it promises what cannot be
            kept on this machine.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: str | Policy = "opportunistic",
        base_layers: str | Sequence[str] = "linear",
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        max_rows: int = 8192,
        name: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"model is {model!r}, not a module; for a folder or hub id use Executor.from_pretrained")
        dtype = _dtype(dtype)
        if type(max_rows) is not int:
            raise UsageError(f"max_rows is {max_rows!r}; give a whole number, 1 or more")
        if device is not None or dtype is not None:
            model = model.to(device=device, dtype=dtype)
        policy = make_policy(policy)
        self._split = SplitModel(model, base_layers)
        self._scheduler = Scheduler(policy, layers=len(self._split.layers), max_rows=max_rows)
        self._runner = Runner(self._split.layers)
        self._clock = DeviceClock(self._split.device) if self._split.device.type == "cuda" else None
        self._unloaded_s = 0.0
        """A token in base layers when nothing else goes on, for a policy that promises times."""
        if hasattr(policy, "unloaded") and (walk := self._split.walk()):
            self._unloaded_s = min(self._runner.time(walk) for _ in range(3))
            tell_unloaded(policy, self._unloaded_s)
        self._counters = Counters()
        self._timeline: Timeline | None = None
        self._address = f"inproc://{name or f'executor-{next(_numbers)}'}"
        self._listeners: list[Listener] = []
        self._sessions: dict[str, ExecutorSession] = {}
        self._calls: dict[int, Call] = {}
        self._ids = itertools.count()
        self._client_numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump: asyncio.Handle | None = None
        self._turned = 0.0
        """When the loop last came round to us."""
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._thought: dict[str, int] = {}
        """Who was thinking when we last looked, and how many requests they had made."""
        self._stopped: set[str] = set()
        """Who is in a pass, and not waited for."""
        self._policy_failures = 0
        self._last = ""
        """The client that was last at work."""
        self._met = 0.0
        """When it was another one before."""
        self._running = threading.Lock()
        """Held by a lone request: there is one at a time, whichever thread it is on."""
        self._share: Share | None = None
        self._identity: Identity | None = None
        self._source: str | Path | None = None
        """Where the model came from: there its tokenizer is, too."""
        self._started = 0.0

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        model_class: type[Any] | None = None,
        policy: str | Policy = "opportunistic",
        base_layers: str | Sequence[str] = "linear",
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        max_rows: int = 8192,
        name: str | None = None,
        **options: Any,
    ) -> Executor:
        """An executor for a model folder or hub id.

        Args:
            model: folder or hub id.
            model_class: class to load it with; by default the architecture that its config names.
            dtype: precision to load it in; by default the checkpoint's.
            **options: for the class's own ``from_pretrained`` (``revision``, ``attn_implementation``…).

        The other arguments are those of :class:`Executor`.
        """
        if dtype is not None:
            options["dtype"] = dtype if dtype == "auto" else _dtype(dtype)
        loaded = load_model(model, model_class, **options)
        executor = cls(loaded, policy=policy, base_layers=base_layers, device=device, max_rows=max_rows, name=name)
        executor._source = model
        return executor

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def __aenter__(self) -> Executor:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Open for clients on the running event loop."""
        if self._loop is not None or self._started:
            raise UsageError(f"the executor at {self._address} was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._started = _now()
        self._look_who_stopped()
        await self.listen(self._address)

    async def listen(self, address: str, **options: Any) -> Listener:
        """Open one more address, such as ``shm:///run/symbiosis.sock``; options are those of its transport.

        Raises:
            UnknownNameError, UsageError: no such transport or option, or the address cannot be had.
            ShareError: the model cannot be served to other processes.
        """
        if self._loop is None:
            raise UsageError("start the executor first: `async with executor:`")
        listener = await make_transport(address, **options).listen(address, self)
        self._listeners.append(listener)
        return listener

    async def close(self) -> None:
        """Shut down. Every call that waits ends with :class:`~symbiosis.errors.ExecutorClosedError`."""
        while self._listeners:
            await self._listeners.pop().close()
        error = ExecutorClosedError(f"the executor at {self._address} was shut down")
        for session in list(self._sessions.values()):
            session.close(error)
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        self._loop = None
        self._address = f"{self._address} (closed)" if "closed" not in self._address else self._address

    def __repr__(self) -> str:
        state = f"{len(self._sessions)} clients, {self._scheduler.outstanding} requests" if self._loop else "not open"
        return f"<Executor {self._address}: {len(self._split.layers)} base layers, {self._scheduler.policy}, {state}>"

    # -------------------------------------------------------------------------------------------------------- clients

    def client(
        self,
        peft_config: PeftConfig | None = None,
        *,
        name: str | None = None,
        seed: int | None = None,
        device: str | torch.device | None = None,
        priority: int = 0,
        slo_ms: float | None = None,
        ttft_ms: float | None = None,
        kind: Kind | None = None,
        privacy: str | Privacy | None = None,
    ) -> Client:
        """A tenant's client in this process, to be opened with ``async with``.

        Args:
            peft_config: any PEFT configuration; None for the bare model (an adapter can be loaded later).
            name: shown in statistics and errors; must differ from those of other clients.
            seed: starts the client's stream of random numbers (adapter initialisation, dropout, sampling). By default
                the stream starts as a copy of torch's own.
            device: where the client's share of the model runs; by default where the base model is.
            priority: for the policy ``priority``; higher goes first.
            slo_ms, ttft_ms: for the policy ``co-serving``: milliseconds for each generated token, and to the first one,
                that this client is promised instead of what everybody is.
            kind: what all its rows are for, where that is not to be told from them (one row of a sequence: decode;
                more: prefill; with gradients: fine-tuning).
            privacy: how the rows that leave the client are masked: a scheme of :mod:`symbiosis.privacy`, or a name with
                options such as ``"noise-pool:size=64"``; by default they are sent as they are.

        Raises:
            UsageError: a promise that means nothing, or cannot be kept.
            UnknownNameError, PrivacyError: no such scheme, or options that it does not take.
        """
        name = name or f"client-{next(self._client_numbers)}"
        terms = Terms(priority, slo_ms, ttft_ms, kind, asked=False).check()
        for what, promised in (("slo_ms", slo_ms), ("ttft_ms", ttft_ms)):
            if promised is not None and promised < 1e3 * self._unloaded_s:
                raise UsageError(
                    f"{what} of {name!r} is {promised:g}, but a token takes {1e3 * self._unloaded_s:.3g} ms in base "
                    "layers alone when nothing else goes on; promise more"
                )
        scheme = make_privacy(privacy)

        async def connect(name: str) -> Channel:
            if self._loop is None:
                raise ExecutorClosedError(f"the executor at {self._address} is not open; use `async with executor:`")
            channel = await make_transport(self._address).connect(self._address, name, terms)
            return channel if scheme is None else await scheme.wrap(channel, self._address, terms, {})

        return Client(
            connect, peft_config, name=name, seed=seed, device=device, crowded=lambda: len(self._sessions) > 1
        )

    def statistics(self) -> Statistics:
        """Requests, batches, rows and waits so far, per layer and per client."""
        return self._counters.snapshot([spec.name for spec in self.layers])

    def reset_statistics(self) -> None:
        """Count from zero, for instance after a warm-up."""
        self._counters = Counters()

    @contextlib.contextmanager
    def trace(self, file: str | Path) -> Iterator[None]:
        """Write what runs when to a file, for as long as the block runs: batches, and for each client when it was
        thinking, waiting and running. Chrome's trace format; open it at https://ui.perfetto.dev.

        ::

            with executor.trace("batches.json"):
                await client.train_step(batch, optimizer)

        Raises:
            UsageError: the file cannot be written, or a trace is being written already.
        """
        if self._timeline is not None:
            raise UsageError("a trace of this executor is being written already; end that first")
        timeline = self._timeline = Timeline(file, [spec.name for spec in self.layers], _now())
        try:
            yield
        finally:
            self._timeline = None
            timeline.close()

    # ------------------------------------------------------------------------- the service that transports listen for

    @property
    def layers(self) -> Sequence[LayerSpec]:
        """The layer table."""
        return self._split.specs

    @property
    def device(self) -> torch.device:
        return self._split.device

    def skeleton(self, link: Link) -> nn.Module:
        """A client's share of the model; see :meth:`SplitModel.skeleton`."""
        return self._split.skeleton(link)

    def identity(self) -> Identity:
        """Which executor this is, and of which base layers."""
        if self._identity is None:
            layers = [(layer.spec, layer.module) for layer in self._split.layers]
            self._identity = Identity(os.urandom(8).hex(), weights_fingerprint(layers))
        return self._identity

    def share(self) -> Share:
        """A client's share of the model as data; see :class:`~symbiosis.core.share.Share`."""
        if self._share is None:
            self._share = Share.of(self._split, self._source)
        return self._share

    def status(self) -> dict[str, Any]:
        """What the executor is and does, as plain data."""
        statistics = self.statistics()
        return {
            "model": type(self._split.model).__name__,
            "policy": repr(self._scheduler.policy),
            "layers": len(self._split.layers),
            "addresses": [listener.address for listener in self._listeners],
            "clients": sorted(self._sessions),
            "outstanding": self._scheduler.outstanding,
            "uptime_s": round(_now() - self._started, 3),
            **{name: getattr(statistics, name) for name in ("requests", "batches", "rows", "mean_batch", "run_s")},
        }

    def join(self, client: str, terms: Terms = NO_TERMS) -> ExecutorSession:
        """Admit a client; see :class:`~symbiosis.core.protocols.Service`."""
        if self._loop is None:
            raise ExecutorClosedError(f"the executor at {self._address} is not open")
        self._scheduler.client_joined(client)
        session = self._sessions[client] = ExecutorSession(self, client, self._split.specs, terms)
        return session

    # -------------------------------------------------------------------------------------------------------- the loop

    def submit(self, client: str, call: Call) -> asyncio.Future[Results]:
        """Queue a checked call of an admitted client, or run it at once."""
        loop = self._loop
        assert loop is not None
        reply: asyncio.Future[Results] = loop.create_future()
        results = self.at_once(client, call)
        if results is not None:
            reply.set_result(results)
            return reply
        if client in self._stopped:
            self._stopped.discard(client)
            self._scheduler.pass_began(client)
        call.id = id_ = next(self._ids)
        call.reply = reply
        self._calls[id_] = call
        terms = self._sessions[client].terms
        rows = call.tensors[0].shape[0]
        kind = kind_of(call, terms)
        self._scheduler.submit(Request(id_, client, call.key, rows, kind, _now(), terms=terms))
        if self._pump is None:
            self.pump_soon()
        return reply

    def at_once(self, client: str, call: Call) -> Results | None:
        """Run a checked call on the calling thread, without a queue, if nothing else goes on; None otherwise.

        When nobody is there to share a batch with, there is nothing to schedule (D5). It halves what a client alone
        pays, and saves a backward thread two changes of thread a request. Should somebody turn up meanwhile, two
        batches run side by side, once.
        """
        rows = call.tensors[0].shape[0]
        if not self._scheduler.lone(client, rows) or in_modes():  # modes of the tenant's must not reach base layers
            return None
        started = _now()
        if client != self._last or started - self._met < _COMPANY_S:
            self._meet(client)
            return None
        if started - self._turned > _TURN_S and current_fiber() is not None:
            return None  # fibers follow one another without end; whatever else asks gives the loop its turns
        if not self._running.acquire(blocking=False):
            return None
        try:
            results = self._runner.run_alone(call)
        except Exception as error:
            raise self._errors(call.key, rows, 1, error)[0] from error
        finally:
            self._running.release()
        ended = _now()
        self._counters.count_lone(call.key, client, rows, ended - started)
        if (timeline := self._timeline) is not None:
            timeline.ran_alone(call.key, client, rows, call.kind, started, ended)
        return results

    def cancel(self, call: Call) -> None:
        """Forget a call; harmless when it was answered."""
        if self._calls.pop(call.id, None) is not None:
            self._scheduler.cancel(call.id)
            self.pump_soon()

    def begin_pass(self, client: str) -> None:
        """A client starts to walk the model."""
        self._stopped.discard(client)
        self._scheduler.pass_began(client)
        if self._timeline is not None:
            self._timeline.pass_began(client, _now())
        self._meet(client)
        self._turned = -math.inf  # others may be about to: let the loop turn once before anything runs alone

    def end_pass(self, client: str) -> None:
        """A client is idle."""
        self._stopped.discard(client)
        self._scheduler.pass_ended(client)
        if self._timeline is not None:
            self._timeline.pass_ended(client, _now())
        self.pump_soon()

    def _look_who_stopped(self) -> None:
        """Others wait for clients that think. One that sits in a debugger, or that says so and means harm, is not
        waited for until it asks again."""
        assert self._loop is not None
        self._watch = self._loop.call_later(_STOPPED_S, self._look_who_stopped)
        thinking = {
            client: self._counters.requests_of(client)
            for client in self._sessions
            if self._scheduler.is_thinking(client)
        }
        for client, requests in thinking.items():
            if self._thought.get(client) == requests:
                self._stopped.add(client)
                self._scheduler.pass_ended(client)
        self._thought = thinking
        if self._stopped:
            self.pump_soon()

    def _meet(self, client: str) -> None:
        if client != self._last:
            self._last = client
            self._met = _now()

    def leave(self, client: str, error: BaseException) -> None:
        """A client is gone: what it waits for ends with ``error``."""
        self._stopped.discard(client)
        del self._sessions[client]
        for request in self._scheduler.client_left(client):
            _fail(self._calls.pop(request.id), error)
        self.pump_soon()

    def pump_soon(self) -> None:
        """Ask the scheduler again once everything that is ready on the loop has run."""
        if self._pump is None and self._loop is not None:
            self._pump = self._loop.call_soon(self._on_turn)

    def pump_now(self) -> None:
        """Ask the scheduler at once if nobody is thinking, unless the loop has not had its turn for a while.

        Going round the loop costs two rounds a request, which a client alone would pay in full (D5). Must be called
        outside all fibers, whose torch modes are not the executor's.
        """
        loop = self._loop
        if loop is not None and not self._scheduler.thinking and _now() - self._turned < _TURN_S:
            self._decide(loop)

    def _on_turn(self) -> None:
        self._pump = None
        loop = self._loop
        if loop is not None:
            self._turned = _now()
            self._decide(loop)

    def _decide(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        action = self._scheduler.next_action(_now())
        if self._scheduler.policy_errors:
            self._report_policy()
        if isinstance(action, Batch):
            try:
                self._run(action)
            finally:
                # Behind the clients that were just answered, so that they can join the next batch.
                if self._pump is not None:
                    self._pump.cancel()
                self._pump = loop.call_soon(self._on_turn)
        elif isinstance(action, WaitUntil) and action.time < math.inf:
            self._timer = loop.call_later(action.time - _now(), self.pump_soon)

    def _run(self, batch: Batch) -> None:
        calls = [self._calls[request.id] for request, _, _ in batch.slices]
        started, clock = _now(), self._clock
        began = clock.mark() if clock is not None else None
        try:
            self._runner.run(batch, calls)
        except Exception as error:  # noqa: BLE001 (whatever it was, it belongs to the clients of this batch)
            self._fail(batch, error)
            return
        ended = _now()
        if clock is None or began is None:
            answered = self._scheduler.completed(batch, ended - started)
        else:
            answered = self._scheduler.completed(batch, None)
            clock.launched(batch, began)
            for earlier, seconds in clock.done():
                self._scheduler.measured(earlier, seconds)
        for request in answered:
            call = self._calls.pop(request.id)
            reply, results = call.reply, call.results
            call.reply = call.results = None
            if reply is not None and results is not None and not reply.done():
                reply.set_result(results)
        self._counters.count(batch, answered, started, ended)
        if self._timeline is not None:
            self._timeline.ran(batch, answered, started, ended)

    def _fail(self, batch: Batch, cause: Exception) -> None:
        for (request, _, _), error in zip(
            batch.slices, self._errors(batch.key, batch.rows, len(batch.slices), cause), strict=True
        ):
            self._scheduler.cancel(request.id)
            _fail(self._calls.pop(request.id), error)

    def _errors(self, key: Key, rows: int, members: int, cause: Exception) -> list[LayerError]:
        """Log why a batch failed; an error for each of its members."""
        names = ", ".join(self._split.layers[layer].spec.name for layer in key.layers)
        log.error("%s failed on a batch of %d rows", names, rows, exc_info=cause)
        _strip_tracebacks(cause)  # through their frames every tenant of the batch could reach the rows of all others
        errors = [LayerError(f"{names} failed on a batch of {rows} rows: {cause}") for _ in range(members)]
        for error in errors:
            error.__cause__ = cause
        return errors

    def _report_policy(self) -> None:
        while self._scheduler.policy_errors:
            error = self._scheduler.policy_errors.popleft()
            self._policy_failures += 1
            if self._policy_failures & (self._policy_failures - 1) == 0:  # the 1st, 2nd, 4th, 8th… time
                log.error(
                    "%s (%d such faults so far)",
                    error,
                    self._policy_failures,
                    exc_info=error.__cause__,
                )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(named, torch.dtype):
        raise UsageError(f"dtype is {dtype!r}; name one of torch's, such as 'float32' or 'bfloat16'")
    return named


def _fail(call: Call, error: BaseException) -> None:
    if call.reply is not None and not call.reply.done():
        call.reply.set_exception(error)


def _strip_tracebacks(error: BaseException) -> None:
    """Take the tracebacks off an error and all that led to it. They have been logged."""
    found: dict[int, BaseException] = {}
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
