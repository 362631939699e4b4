"""The seams of the runtime, as protocols: batching policies on one side, transports on the other.

Policies and transports import this module, :mod:`symbiosis.core.requests` and :mod:`symbiosis.core.queues`, nothing
else of the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from symbiosis.core.requests import NO_TERMS, Call, Expected, Key, LayerSpec, Request, Terms

if TYPE_CHECKING:
    import torch
    from torch import nn

    from symbiosis.core.share import Share
    from symbiosis.core.virtlayer import Link

__all__ = [
    "Channel",
    "Check",
    "Decision",
    "Expected",
    "Identity",
    "Listener",
    "Look",
    "Policy",
    "Preparing",
    "Privacy",
    "QueueView",
    "Reply",
    "Run",
    "Service",
    "Session",
    "Transport",
    "View",
    "Wait",
]


# ---------------------------------------------------------------------------------------------------------- policies


@dataclass(slots=True)
class Run:
    """Run rows of queued requests now.

    ``takes`` are (request, number of rows), all of one key, in arrival order for each client. A request may be taken
    in part; its other rows stay queued.
    """

    key: Key
    takes: Sequence[tuple[Request, int]]
    reason: str


@dataclass(slots=True)
class Wait:
    """Run nothing before time ``until`` (seconds on the executor's clock) unless something changes first.

    ``None`` waits for a change alone, which is allowed only while some client is thinking; while none is, a wait may
    last for :data:`MAX_WAIT_S`.
    """

    until: float | None


MAX_WAIT_S = 3600.0
"""A wait while nobody is thinking ends by itself only."""


Decision = Run | Wait


class QueueView(Protocol):
    """The queued requests of one key, read only."""

    @property
    def key(self) -> Key: ...
    @property
    def rows(self) -> int:
        """Rows still queued, over all requests."""

    @property
    def oldest(self) -> Request: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]:
        """Requests in the order they arrived."""

    def of(self, client: str) -> Sequence[Request]:
        """A client's requests in the order they arrived, which is the order in which they have to be taken."""

    def take(self, max_rows: int, first: Request | None = None) -> list[tuple[Request, int]]:
        """As many rows as fit, oldest request first; the last request may be taken in part.

        ``first`` goes ahead of all others, unless its client has an earlier request here.
        """


class View(Protocol):
    """What a policy may look at when it decides: the queues and who might still come."""

    @property
    def queues(self) -> Mapping[Key, QueueView]:
        """The queues that are not empty."""

    @property
    def oldest(self) -> Request:
        """The queued request that arrived first."""

    @property
    def thinking(self) -> int:
        """Clients in a pass with no request outstanding: those who might join a batch if it waits."""

    @property
    def layers(self) -> int:
        """Number of layers in the layer table."""

    @property
    def max_rows(self) -> int:
        """Most rows a batch may have."""


@runtime_checkable
class Policy(Protocol):
    """Chooses what to run. Pure: no clock, no I/O, no tensor. Called only while something is queued.

    The scheduler owns the queues and refuses a decision that breaks its rules; see
    :class:`symbiosis.core.scheduler.Scheduler`. A policy belongs to one executor.

    A policy may have more methods, by which it is told what becomes of requests: ``started(batch: Batch) -> None``, the
    batch's rows are queued no more; ``ran(batch: Batch, seconds: float) -> None``, it has run, in so many seconds (on a
    GPU this is told some batches later, when it is known); and ``cancelled(request: Request) -> None``, a request that
    was queued, in part at least, is not any more. ``unloaded(seconds: float) -> None`` is called once, before all else:
    what a token takes in base layers when nothing else goes on. Raises UsageError when the policy promises what cannot
    be kept.

    A policy with a class attribute ``lone_at_once = True`` is not asked about a request that finds nothing else
    outstanding and nobody thinking: it runs there and then, which costs half as much. All but those that ration
    should say so.
    """

    name: str

    def submitted(self, request: Request) -> None:
        """A request was queued. For policies that keep an index of their own; others do nothing."""

    def decide(self, view: View, now: float) -> Decision:
        """What to do at time ``now`` (seconds)."""


# -------------------------------------------------------------------------------------------------------- transports


class Session(Protocol):
    """The executor's end of one client's channel: what a transport calls."""

    client: str

    def expects(self, key: Key) -> Expected:
        """What a call for ``key`` must bring and what it gets.

        Raises:
            RequestError: the layer table has no such key.
        """

    def submit(self, call: Call) -> asyncio.Future[tuple[torch.Tensor, ...]]:
        """Queue a request; the future yields one result matrix per layer of the key (one dX for a backward pass).

        Raises:
            RequestError: the call does not fit the layer table. Nothing was queued.
            ClientClosedError, ExecutorClosedError: too late.
        """

    def at_once(self, call: Call) -> tuple[torch.Tensor, ...] | None:
        """The results, if this call is the only thing that goes on and may run there and then; otherwise None, and
        the call is still to be submitted. May be called on any thread. Raises what :meth:`submit` raises, and
        LayerError."""

    def flush(self) -> None:
        """The client waits. If that was the last one to think, the executor need not go round the loop to find out."""

    def cancel(self, call: Call) -> None:
        """Forget a request. Harmless when it is already answered."""

    def begin_pass(self) -> None:
        """The client starts to walk the model: from now on it is thinking whenever it has nothing outstanding."""

    def end_pass(self) -> None:
        """The client is idle: nobody should wait for it."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave. What is outstanding ends with ``error`` (default: ClientClosedError)."""


class Identity(NamedTuple):
    """Which executor it is, and of which base layers."""

    instance: str
    """Random, another for each executor that was started."""
    weights: str
    """See :func:`symbiosis.core.share.weights_fingerprint`."""


class Service(Protocol):
    """What a listener serves: the executor."""

    @property
    def layers(self) -> Sequence[LayerSpec]: ...
    @property
    def device(self) -> torch.device: ...
    def identity(self) -> Identity: ...
    def join(self, client: str, terms: Terms = NO_TERMS) -> Session:
        """Admit a client under a name that no other has.

        Raises:
            UsageError: the name is taken.
            ExecutorClosedError: too late.
        """

    def skeleton(self, link: Link) -> nn.Module:
        """A client's share of the model (D10), its base layers replaced by VirtLayers on ``link``."""

    def share(self) -> Share:
        """The same as data, for clients in other processes.

        Raises:
            ShareError: this model cannot be built from data.
        """

    def status(self) -> dict[str, Any]:
        """What the executor is and does, as plain data: for whoever watches it."""


class Reply(Protocol):
    """What a call will be answered with: an ``asyncio.Future``, or something that is awaited like one."""

    def done(self) -> bool: ...
    def result(self) -> tuple[torch.Tensor, ...]: ...
    def __await__(self) -> Generator[Any, None, tuple[torch.Tensor, ...]]: ...


Check = Callable[[Identity], None]
"""Raises what a client is to be told if this executor is not one for it."""


class Channel(Protocol):
    """The client's end: carries calls to one executor and results back."""

    @property
    def client(self) -> str: ...
    @property
    def layers(self) -> Sequence[LayerSpec]: ...
    @property
    def device(self) -> torch.device:
        """Where calls must have their tensors, and results have theirs."""

    def identity(self) -> Identity:
        """The executor at the other end, as it was when it was last connected to."""

    def before_return(self, check: Check) -> None:
        """Have ``check`` asked about an executor that is found at the address after one was lost, before it is sent any
        call, on whatever thread. What it raises ends the channel's calls."""

    def send(self, call: Call) -> Reply:
        """Send from the event loop; see :meth:`Session.submit`."""

    def call(self, call: Call) -> tuple[torch.Tensor, ...]:
        """Send from a thread that may block, and wait."""

    def flush(self) -> None:
        """The caller is about to wait for what it sent: whatever can be done for it without waiting, do now."""

    def cancel(self, call: Call) -> None:
        """Forget a call made by :meth:`send`."""

    def interrupt(self, error: BaseException) -> None:
        """End the blocking :meth:`call` in progress, if any, with ``error``."""

    def begin_pass(self) -> None: ...
    def end_pass(self) -> None: ...
    def skeleton(self, link: Link) -> nn.Module:
        """The client's share of the model; see :meth:`Service.skeleton`."""

    def close(self) -> None: ...


class Listener(Protocol):
    """An open address of an executor."""

    @property
    def address(self) -> str: ...
    async def close(self) -> None:
        """Stop accepting clients and end those that came this way."""


class Look(NamedTuple):
    """What an executor shows without letting anybody in."""

    status: dict[str, Any]
    """See :meth:`Service.status`."""
    model: dict[str, Any]
    """See :class:`symbiosis.core.share.Share`: its description."""
    tokenizer: dict[str, bytes]
    """File names and contents."""


class Transport(Protocol):
    """One address scheme. Options of a transport are arguments of its constructor."""

    async def listen(self, address: str, service: Service) -> Listener: ...
    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        """Join an executor, for coroutines. ``terms`` are what the client asks for.

        Raises:
            ConnectionLostError: nobody answers there.
            RefusedError: the executor does not let this client in.
        """

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        """Join an executor, for synchronous code: the channel has :meth:`Channel.call`, not :meth:`Channel.send`."""

    def look(self, address: str) -> Look:
        """See who is there without joining. Blocks."""


# ----------------------------------------------------------------------------------------------------------- privacy


@runtime_checkable
class Preparing(Protocol):
    """A channel for which something can be computed ahead of time."""

    async def prepare(self, keys: Iterable[Key]) -> None:
        """Get ready for these keys."""

    def prepare_blocking(self, keys: Iterable[Key]) -> None:
        """The same for synchronous code."""


@runtime_checkable
class Privacy(Protocol):
    """How a client's rows are masked before they leave it. One object may serve several clients, each with noise of its
    own. What it makes of a channel is a channel that never sends a row as it is."""

    name: str

    async def wrap(self, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]) -> Channel:
        """Mask what goes over a channel to ``address``; on its event loop. ``terms`` are the client's, and ``options``
        those of its transport, for channels to executors elsewhere. If it fails, the channel is closed.

        Raises:
            PrivacyError: these executors will not do.
        """

    def wrap_blocking(self, channel: Channel, address: str, terms: Terms, options: Mapping[str, Any]) -> Channel:
        """The same for synchronous code."""
