"""The service: what an executor offers to clients, whatever transport they use.

It admits clients, hands out their part of the model, says which model it is and what it does, and keeps the addresses
at which it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from symbiosis.core.budget import Budget
from symbiosis.core.policy import names_of
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import LayerSpec, expected
from symbiosis.core.share import Resident, Share, fingerprint_of
from symbiosis.core.terms import JOINT, NO_TERMS, Terms, tenant_of
from symbiosis.core.transport import Identity, Listener, Session
from symbiosis.errors import ExecutorClosedError, RefusedError, ShareError, SymbiosisError, UsageError
from symbiosis.executor.activity import activity_of, layers_text
from symbiosis.executor.engine import Engine, now
from symbiosis.executor.session import ExecutorSession
from symbiosis.executor.share import name_of, share_of
from symbiosis.executor.sharing import Sharing, describe, sharing_of
from symbiosis.executor.splitting import SplitModel

KEYS = 1 << 12
"""Keys of requests whose shapes are kept. Few models have as many layers and groups of siblings."""

ACTIVITY_EVERY_S = 0.2
"""Least seconds between two reports of what tenants do. With thousands of tenants a report takes milliseconds, and a
peer may ask at any rate."""

TRUSTED = ("inproc:", "shm:", "dist:")
"""Schemes of addresses that are for the same process, the same user, and hosts that trust each other."""

DRAIN_EVERY_S = 0.02
"""Seconds between two looks at whether all walks have ended."""


class ExecutorService:
    """Implements :class:`~symbiosis.core.transport.Service`.

    Args:
        split: the model and its base layers.
        engine: runs the calls.
        budget: the memory that all connections may take together.
        address: the first address to listen at, in this process.
        tokenizer: loads the model's tokenizer; None if it has none.
        model_name: the model's name for clients in other processes; see :func:`~symbiosis.executor.share.share_of`.

    Attributes:
        address: the first address.
        listeners: open addresses.
        taps: functions that wrap the session of each client that joins, for instance to record its calls.
    """

    def __init__(
        self,
        split: SplitModel,
        engine: Engine,
        budget: Budget,
        address: str,
        tokenizer: Callable[[], Any] | None,
        model_name: str | None,
    ) -> None:
        self.address = address
        self.budget = budget
        self._split = split
        self._expected = lru_cache(KEYS)(partial(expected, split.specs))
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._sessions: dict[str, ExecutorSession] = {}
        self.listeners: list[Listener] = []
        self.taps: list[Callable[[Session], Session]] = []
        self._share: Share | None = None
        self._identity: Identity | None = None
        self._reserved: dict[Listener, Callable[[], Collection[str]]] = {}
        """Functions that return the names of tenants that a listener authenticates."""
        self._activity: dict[str, Any] = {}
        self._activity_until = 0.0
        self._started: float | None = None
        self._draining = self._closed = False

    @property
    def is_open(self) -> bool:
        return self._started is not None and not self._closed

    def check_open(self) -> None:
        """Raise ExecutorClosedError unless clients can join."""
        if self._closed:
            raise ExecutorClosedError.of(self.address)
        if self._started is None:
            raise ExecutorClosedError(f"the executor at {self.address} is not open; use `async with executor:`")

    def _check_stays(self) -> None:
        """Raise ExecutorClosedError if no client of another process may join or begin a walk any more."""
        if self._draining:
            raise ExecutorClosedError("the executor is shutting down, and no walk begins any more")

    async def start(self) -> None:
        """Open for clients on the running event loop."""
        if self._started is not None:
            raise UsageError(f"the executor at {self.address} was started before; make a new one")
        self._started = now()
        self._engine.start(asyncio.get_running_loop())
        await self.listen(self.address)

    async def listen(self, address: str, *, keep_weights: bool | None = None, **options: Any) -> Listener:
        """Open one more address; see :meth:`symbiosis.Executor.listen`."""
        if not self.is_open:
            raise UsageError("start the executor first: `async with executor:`")
        if not address.startswith(TRUSTED) if keep_weights is None else keep_weights:
            self._check_leaving(address)
        listener = await make_transport(address, **options).listen(address, self)
        if self._closed:  # meanwhile
            await listener.close()
            raise ExecutorClosedError.of(self.address)
        self.listeners.append(listener)
        if not address.startswith("inproc:"):
            self._engine.serve_other_processes()
        return listener

    def _check_leaving(self, address: str) -> None:
        """Raise ShareError if clients would get weights that are no embeddings, norms, heads or small tensors."""
        if leaving := self.sharing.leaving():
            raise ShareError(
                f"{address}: weights that are not served would go to clients: {'; '.join(describe(leaving))}. To allow "
                "that, listen with keep_weights=False (--no-keep-weights)"
            )

    def limit(self, limits: Any, total: int) -> None:
        """Change the limits of clients that connect from now on, and the bytes that all connections may take."""
        self.budget.resize(total)
        for listener in self.listeners:
            listener.limit(limits)

    async def drain(self, within_s: float) -> bool:
        """Let walks end; see :meth:`symbiosis.Executor.drain`."""
        self._draining = True
        until = now() + within_s
        while self._engine.scheduler.walking and now() < until:  # noqa: ASYNC110 (most walks end within a second)
            await asyncio.sleep(DRAIN_EVERY_S)
        return not self._engine.scheduler.walking

    async def close(self, error: SymbiosisError) -> None:
        """Close all addresses and end all sessions, whose calls end with ``error``."""
        self._closed = True
        for own in [session for session in self._sessions.values() if session.local]:
            own.close(error)  # clients of this process get the reason, and those elsewhere may go on at a replica
        async with contextlib.AsyncExitStack() as stack:  # runs what follows from the last to the first, also on errors
            stack.push_async_callback(self._engine.stop, error)
            stack.callback(self._end_sessions, error)
            for listener in self.listeners:
                stack.push_async_callback(listener.close)
            self.listeners.clear()

    def _end_sessions(self, error: SymbiosisError) -> None:
        for session in list(self._sessions.values()):
            session.close(error)

    def when_idle(self, then: Callable[[], object]) -> None:
        self._engine.when_idle(then)

    def join(self, client: str, terms: Terms = NO_TERMS, *, local: bool = False) -> Session:
        self.check_open()
        if not local:
            self._check_stays()
        granted = self._engine.join(client, terms, local)
        session = ExecutorSession(
            *(self._engine, client, self.layers, self._expected, self.device, granted, local),
            *(self._check_stays, self._sessions.pop),
        )
        self._sessions[client] = session
        tapped: Session = session
        for tap in self.taps:
            tapped = tap(tapped)
        return tapped

    def reserve(self, listener: Listener, tenants: Callable[[], Collection[str]]) -> None:
        self._reserved[listener] = tenants

    def closed(self, listener: Listener) -> None:
        if listener in self.listeners:
            self.listeners.remove(listener)
        self._reserved.pop(listener, None)

    @property
    def keyed_tenants(self) -> set[str]:
        """Names of the tenants that have keys."""
        return {name for tenants in self._reserved.values() for name in tenants()}

    def check_name(self, client: str) -> None:
        tenant = tenant_of(client)
        if client == JOINT:
            raise RefusedError(f"the name {client!r} is the executor's own; choose another one")
        if any(tenant in tenants() for tenants in self._reserved.values()):
            raise RefusedError(f"the name {client!r} is for a tenant with a key; choose another one")

    @property
    def clients(self) -> list[str]:
        """Names of the clients that have joined, sorted."""
        return sorted(self._sessions.keys() - {JOINT})

    @property
    def policy_names(self) -> str:
        return names_of(self._engine.scheduler.policy)

    @property
    def walks_jointly(self) -> bool:
        """Whether joint walks of clients of this process have joined."""
        return JOINT in self._sessions

    @property
    def layers(self) -> list[LayerSpec]:
        return self._split.specs

    @property
    def device(self) -> torch.device:
        return self._split.device

    def resident(self) -> Resident:
        return self._split.resident()

    @property
    def elsewhere(self) -> list[LayerSpec]:
        """The base layers that other executors serve."""
        return [spec for spec, _ in self._split.elsewhere]

    def identity(self) -> Identity:
        if self._identity is None:
            self._identity = Identity(os.urandom(8).hex(), fingerprint_of(self._split.hashes()))
        return self._identity

    def share(self) -> Share:
        if self._share is None:
            self._share = share_of(self._split, self._tokenizer, self._model_name)
        return self._share

    @cached_property
    def sharing(self) -> Sharing:
        """What is served, and what every client holds."""
        return sharing_of(self._split)

    @cached_property
    def _served(self) -> dict[str, Any]:
        """What the status says of the model, which stays as it is."""
        return {
            "name": name_of(self._split.model, self._model_name),
            "model": type(self._split.model).__name__,
            "layers": len(self._split.layers),
            "served_layers": layers_text(spec.name for spec in self.layers),
            "layers_elsewhere": len(self._split.elsewhere),
            "packed_layers": self._split.packed,
            "served_bytes": self.sharing.served,
            "client_bytes": self.sharing.held,
        }

    def _present_activity(self) -> dict[str, Any]:
        """Return what tenants did, as of at most ACTIVITY_EVERY_S ago."""
        if now() >= self._activity_until:
            at = round(now() - (self._started or now()), 6)
            found = activity_of(self._engine.statistics(), self.clients, self.budget.by_client())
            self._activity, self._activity_until = {"at": at, **found}, now() + ACTIVITY_EVERY_S
        return self._activity

    def rejected(self, why: str) -> None:
        self._engine.counters.rejections[why] += 1

    def status(self) -> dict[str, Any]:
        counters = self._engine.counters
        return {
            **self._served,
            "policy": repr(self._engine.scheduler.policy),
            "unpacked_bytes": sum(weight.unpacked_bytes for layer in self._split.layers for weight in layer.packed),
            "addresses": [listener.address for listener in self.listeners],
            "clients": self.clients,
            "outstanding": self._engine.scheduler.outstanding,
            "held_bytes": self.budget.held,
            "free_bytes": self.budget.total - self.budget.held,
            "draining": self._draining,
            "uptime_s": round(now() - (self._started or now()), 3),
            **{name: getattr(counters, name) for name in ("requests", "batches", "rows")},
            "mean_batch": counters.members / counters.batches if counters.batches else 0.0,
            "run_s": counters.run_times.seconds,
            "load": round(counters.load.at(now()), 3),
            "activity": self._present_activity(),
        }
