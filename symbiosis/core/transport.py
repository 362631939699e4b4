"""The interface between clients, transports and executors.

A client calls a :class:`Channel`. A transport carries the call to a :class:`Session` of the executor, and its results
back. A :class:`Listener` is an open address of an executor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from symbiosis.core.budget import Budget
from symbiosis.core.requests import Call, Expected, Key, LayerSpec
from symbiosis.core.share import Resident, Share
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    import torch


class Identity(NamedTuple):
    """Identifies an executor and its base layers."""

    instance: str
    """Random string, different for each executor that is started. For a model on several executors, the strings of all,
    separated by commas."""
    weights: str
    """Fingerprint of the base layers; see :func:`symbiosis.executor.fingerprint.weights_fingerprint`."""


Check = Callable[[Identity], None]
"""Raises an error if a client must not use this executor."""


class Session(Protocol):
    """The executor's end of one client's channel. Transports call it."""

    client: str

    def expects(self, key: Key) -> Expected:
        """Return the shapes of a call for ``key`` and of its answer.

        Raises:
            RequestError: the layer table has no such key.
        """

    def submit(self, call: Call) -> asyncio.Future[tuple[torch.Tensor, ...]]:
        """Run a call at once, or queue it.

        The future yields one matrix for each layer of the key. A backward pass yields dX and, for a bank of experts,
        the gradient of the routing weights.

        Raises:
            RequestError: the call does not fit the layer table. Nothing was queued.
            ClientClosedError, ExecutorClosedError: the client or the executor was closed.
        """

    def at_once(self, call: Call) -> tuple[torch.Tensor, ...] | None:
        """Run a call on the calling thread, if the scheduler lets it skip the queue; otherwise return None.

        After None the call must be submitted. Any thread may call this method. It raises the errors of :meth:`submit`,
        and LayerError.
        """

    def flush(self) -> None:
        """Note that the client waits for its answers. If no client is thinking, the executor decides immediately."""

    def cancel(self, call: Call) -> bool:
        """Withdraw a call. Has no effect on a call that was answered. Return whether its tensors are still in use, by
        the batch under way."""

    def begin_walk(self) -> None:
        """Note that the client walks the model: it is thinking whenever it has no outstanding request.

        Raises:
            ExecutorClosedError: the executor is shutting down, and no walk begins any more.
        """

    def end_walk(self) -> None:
        """Note that the client is idle: batches need not wait for it."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave. Outstanding calls end with ``error`` (default: ClientClosedError)."""


class Service(Protocol):
    """The part of an executor that listeners use."""

    @property
    def layers(self) -> Sequence[LayerSpec]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def policy_names(self) -> str:
        """The names of the policy and of those inside it, without their options."""

    @property
    def budget(self) -> Budget:
        """The memory that all connections may take together."""

    def identity(self) -> Identity: ...
    def when_idle(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the batch under way has ended; at once if there is none."""

    def join(self, client: str, terms: Terms = NO_TERMS, *, local: bool = False) -> Session:
        """Admit a client.

        Args:
            client: a name that no other client has.
            terms: what the client asks for, or, if it is local, what the provider grants.
            local: whether the client computes in the executor's process.

        Raises:
            UsageError: the name is in use.
            ExecutorClosedError: the executor was closed.
        """

    def reserve(self, listener: Listener, tenants: Callable[[], Collection[str]]) -> None:
        """Reserve the names of tenants whom a listener authenticates, until it is closed. ``tenants`` returns the names
        at the time of the call."""

    def closed(self, listener: Listener) -> None:
        """Note that a listener was closed. Has no effect the second time."""

    def check_name(self, client: str) -> None:
        """Raise RefusedError if a client that is not authenticated has the name of a tenant whom a listener
        authenticates."""

    def rejected(self, why: str) -> None:
        """Count a peer that was not admitted or was disconnected, or a call that was not taken.

        Args:
            why: the name of the error's class, or one of a few other words.
        """

    def resident(self) -> Resident:
        """Return the model itself, for clients in this process."""

    def share(self) -> Share:
        """Return the client's part of the model as data, for clients in other processes.

        Raises:
            ShareError: this model cannot be built from data.
        """

    def status(self) -> dict[str, Any]:
        """Return what the executor is and does, as plain data."""


class Reply(Protocol):
    """The future answer to a call: an ``asyncio.Future``, or an object that is awaited like one."""

    def done(self) -> bool: ...
    def result(self) -> tuple[torch.Tensor, ...]: ...
    def __await__(self) -> Generator[Any, None, tuple[torch.Tensor, ...]]: ...


class Channel(Protocol):
    """The client's end of a connection: carries calls to one executor and results back."""

    @property
    def client(self) -> str: ...
    @property
    def layers(self) -> Sequence[LayerSpec]: ...
    @property
    def device(self) -> torch.device:
        """Device of the tensors in calls and results."""

    @property
    def share(self) -> Share | Resident:
        """The client's part of the model."""

    def identity(self) -> Identity:
        """Return the identity of the executor, as of the last connection."""

    def before_return(self, check: Check) -> None:
        """Register a check of executors that the channel reconnects to.

        The check runs before any call is sent, on any thread. An error that it raises ends all calls of the channel.
        """

    def send(self, call: Call) -> Reply:
        """Send a call from the event loop; see :meth:`Session.submit`."""

    def call(self, call: Call) -> tuple[torch.Tensor, ...]:
        """Send a call from a thread that may block, and return its results."""

    def flush(self) -> None:
        """Note that the caller is about to wait for its calls."""

    def cancel(self, call: Call) -> None:
        """Withdraw a call made by :meth:`send`."""

    def interrupt(self, error: BaseException) -> None:
        """End the blocking :meth:`call` in progress, if any, with ``error``, and withdraw it.

        Has no effect on a channel of :meth:`Transport.connect_blocking`, where a signal ends the call.
        """

    def begin_walk(self) -> None: ...
    def end_walk(self) -> None: ...
    def close(self) -> None: ...


class Listener(Protocol):
    """An open address of an executor."""

    @property
    def address(self) -> str: ...
    def limit(self, limits: Any) -> None:
        """Give clients that connect from now on other limits: a :class:`~symbiosis.transports.limits.Limits`. Listeners
        without limits ignore it."""

    async def close(self) -> None:
        """Stop accepting clients, and end the connections of this address."""


class Look(NamedTuple):
    """What an executor shows to a peer that has not joined."""

    status: dict[str, Any]
    """See :meth:`Service.status`."""
    model: dict[str, Any]
    """The description in the executor's :class:`~symbiosis.core.share.Share`."""
    tokenizer: dict[str, bytes]
    """Tokenizer files: names and contents."""
    gap: SymbiosisError | None = None
    """Of several executors, why they do not serve the whole model now; ``model`` is then that of one part."""


class Transport(Protocol):
    """One address scheme. Options of a transport are arguments of its constructor."""

    def check(self, address: str) -> AbstractContextManager[object]:
        """Return a context manager that occupies the address.

        Commands enter it for each of their addresses before they load a model, so they find addresses that exclude each
        other. Blocks.

        Raises:
            UsageError: here or at the entry: :meth:`listen` cannot open the address, as far as that shows without an
                executor.
        """

    async def listen(self, address: str, service: Service) -> Listener: ...
    async def connect(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        """Join an executor, for coroutines.

        Raises:
            ConnectionLostError: no executor answers at the address.
            RefusedError: the executor does not admit this client.
        """

    def connect_blocking(self, address: str, client: str, terms: Terms = NO_TERMS) -> Channel:
        """Join an executor, for synchronous code. The channel supports :meth:`Channel.call`, not :meth:`Channel.send`.

        Raises the errors of :meth:`connect`.
        """

    def look(self, address: str) -> Look:
        """Return what an executor shows without joining it. Blocks."""
