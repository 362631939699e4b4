"""Use a base model that another process serves: with coroutines (:func:`connect`) or without (:func:`open_model`)."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from symbiosis.client.client import Client
from symbiosis.client.hollow import skeleton_for
from symbiosis.client.virtlayer import Link, rehearse
from symbiosis.core.privacy import Preparing, Privacy
from symbiosis.core.registry import make_privacy, make_transport
from symbiosis.core.terms import Kind, Terms
from symbiosis.core.transport import Channel, Look
from symbiosis.errors import ClientClosedError, ExecutorClosedError, UsageError

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["Base", "connect", "open_model"]

_numbers = itertools.count(1)


def _name() -> str:
    """A name that no other client is likely to have."""
    return f"{getpass.getuser()}-{os.getpid()}-{next(_numbers)}"


def connect(address: str, *, privacy: str | Privacy | None = None, **options: Any) -> Base:
    """A base model served by another process, to be opened with ``async with``.

    Args:
        address: where, such as ``shm:///run/symbiosis.sock``.
        privacy: how the rows of its clients are masked, unless a client says otherwise; see
            :meth:`symbiosis.Executor.client`.
        **options: of the transport: ``retry``, how many seconds to wait for an executor that was lost (60 by default).

    Raises:
        UnknownNameError, UsageError: no such transport or scheme, or option.
    """
    return Base(address, privacy=privacy, **options)


class Base:
    """A base model at an address; see :func:`connect`."""

    def __init__(self, address: str, *, privacy: str | Privacy | None = None, **options: Any) -> None:
        self.address = address
        self._options = options
        self._privacy = make_privacy(privacy)
        self._transport = make_transport(address, **options)
        self._look: Look | None = None
        self._clients: list[Client] = []

    async def __aenter__(self) -> Base:
        self._look = await asyncio.to_thread(self._transport.look, self.address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every client that is still open."""
        self._look = None
        while self._clients:
            await self._clients.pop().close()

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
        """A client of this model, to be opened with ``async with``.

        Args:
            peft_config, name, seed: as of :meth:`symbiosis.Executor.client`.
            device: where the client's share of the model runs; by default where the transport brings its tensors.
            priority, slo_ms, ttft_ms, kind: what the client asks for, as of :meth:`symbiosis.Executor.client`. From
                another process it can make itself less urgent than others, and not more: that is for those to give who
                provide the executor.
            privacy: how its rows are masked; by default as :func:`connect` was told. ``"none"`` sends them as they are.

        Raises:
            UsageError: terms that mean nothing, or a scheme that does not.
        """
        terms = Terms(priority, slo_ms, ttft_ms, kind).check()
        scheme = self._privacy if privacy is None else make_privacy(privacy)

        async def connect(name: str) -> Channel:
            if self._look is None:
                raise self._not_open()
            channel = await self._transport.connect(self.address, name, terms)
            return channel if scheme is None else await scheme.wrap(channel, self.address, terms, self._options)

        client = Client(connect, peft_config, name=name or _name(), seed=seed, device=device, masked=scheme is not None)
        self._clients.append(client)
        return client

    async def status(self) -> dict[str, Any]:
        """What the executor is and does."""
        return (await asyncio.to_thread(self._transport.look, self.address)).status

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration."""
        return dict(self._shown().model["config"])

    def tokenizer(self) -> Any:
        """The model's tokenizer, from the executor.

        Raises:
            UsageError: it has none.
        """
        return tokenizer_of(self._shown().tokenizer, self.address)

    def _shown(self) -> Look:
        if self._look is None:
            raise self._not_open()
        return self._look

    def _not_open(self) -> ExecutorClosedError:
        return ExecutorClosedError(f"{self.address} is not open; use `async with symbiosis.connect(...) as base:`")


def tokenizer_of(files: dict[str, bytes], address: str) -> Any:
    """A tokenizer from its files' contents."""
    from transformers import AutoTokenizer

    if not files:
        raise UsageError(f"the executor at {address} has no tokenizer to share; load one yourself")
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        return AutoTokenizer.from_pretrained(folder)


@contextlib.contextmanager
def open_model(
    address: str,
    *,
    name: str | None = None,
    device: str | torch.device | None = None,
    priority: int = 0,
    slo_ms: float | None = None,
    ttft_ms: float | None = None,
    kind: Kind | None = None,
    privacy: str | Privacy | None = None,
    **options: Any,
) -> Iterator[Any]:
    """The model at an address, for synchronous code: a ``transformers`` model like any other, without asyncio.

    Give it to ``get_peft_model``, ``Trainer``, ``pipeline``. Its base layers are VirtLayers, which block until the
    executor has answered. It is in evaluation mode, and frozen. It belongs to the process that opened it. Its
    tokenizer, where the executor has one, is ``model.tokenizer()``; ``model.precompute(training=True, **inputs)`` is as
    :meth:`symbiosis.Client.precompute`, and blocks. Adapters come first: they have layers asked otherwise.

    Args:
        address: where, such as ``shm:///run/symbiosis.sock``.
        name: of this client, shown in the executor's statistics and events.
        device: of the client-side tensors; the executor's kind by default.
        priority, slo_ms, ttft_ms, kind: what this client asks for; see :meth:`Base.client`.
        privacy: how the rows that leave this process are masked; see :meth:`symbiosis.Executor.client`.
        **options: of the transport: ``retry``, how many seconds to wait for an executor that was lost (60 by default).
    """
    transport = make_transport(address, **options)
    scheme = make_privacy(privacy)
    terms = Terms(priority, slo_ms, ttft_ms, kind).check()
    channel = transport.connect_blocking(address, name or _name(), terms)
    if scheme is not None:
        channel = scheme.wrap_blocking(channel, address, terms, options)
    link = Link()
    link.channel = channel
    link.private = scheme is not None
    try:
        model: Any = skeleton_for(channel, link)
        if device is not None:
            model = model.to(device)
        walk = _Walk(channel)
        model.register_forward_pre_hook(walk.begin)
        model.register_forward_hook(walk.end, always_call=True)
        link.backward_began = walk.backward
        model.tokenizer = lambda: tokenizer_of(transport.look(address).tokenizer, address)
        model.precompute = partial(_precompute, model, link)
        yield model
    finally:
        link.channel = None
        channel.close()


def _precompute(model: Any, link: Link, *, training: bool = True, **inputs: Any) -> None:
    channel = link.channel
    if channel is None:
        raise ClientClosedError("this model was closed, so there is nothing to compute ahead for")
    if isinstance(channel, Preparing):
        channel.prepare_blocking(rehearse(model, link, training, inputs, next(model.parameters()).device))


class _Walk:
    """Tells the executor when a synchronous client walks the model, so that nobody waits for it meanwhile (D5).

    Several threads may walk it at once, forward and backward: from when the first begins to when the last has ended.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.RLock()
        self._walks = 0
        self._backwards: set[int] = set()
        """Backward passes in progress, by the number that the autograd engine gives them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Walk:
        return self  # a copy of the model walks on the same connection

    def begin(self, *_: Any) -> None:
        with self._lock:
            self._walks += 1
            if self._walks == 1:
                self._channel.begin_pass()

    def end(self, *_: Any) -> None:
        with self._lock:
            self._walks -= 1
            if self._walks == 0:
                self._channel.end_pass()

    def backward(self) -> None:
        """A request is about to be made that may be the first of a backward pass."""
        number = torch._C._current_graph_task_id()
        if number == -1 or number in self._backwards:
            return
        with self._lock:
            if number in self._backwards:
                return
            self._backwards.add(number)
        self.begin()
        torch.autograd.Variable._execution_engine.queue_callback(_Ended(self, number))

    def backward_ended(self, number: int) -> None:
        with self._lock:
            if number not in self._backwards:
                return
            self._backwards.remove(number)
        self.end()


class _Ended:
    """Called by the engine when a backward pass is through, and dropped by it also when that has failed."""

    def __init__(self, walk: _Walk, number: int) -> None:
        self._walk = walk
        self._number = number

    def __call__(self) -> None:
        self._walk.backward_ended(self._number)

    __del__ = __call__
