"""State that the VirtLayers of one client share: the channel, the way to wait, and what each thread remembers."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from symbiosis.client.placeholders import KeptProduct
from symbiosis.client.siblings import SiblingState
from symbiosis.client.waiting import Waiter, wait_blocking
from symbiosis.core.requests import Call, Key, Results
from symbiosis.core.share import Resident
from symbiosis.core.terms import MOST_DECODED, Kind
from symbiosis.core.transport import Channel
from symbiosis.errors import CannotWaitError, ClientClosedError, UsageError


class ModelCopy:
    """Identifies the copy of a client's model that a layer belongs to: ``copy.deepcopy`` copies it with the layers."""


class KindTracker:
    """Tells decode rows from prefill rows in forward passes without gradients.

    A call of the model says what its rows are for (:meth:`Requester.in_call`). For a part of the model that is called
    by itself, as ``generate`` calls an encoder, the rows tell: several of one sequence belong to a prompt, and flat
    ones to what the rows before them did, or to a prompt if they are the first.

    DeepSeek expands the latent vectors [sequences, 1, tokens, features] of all earlier tokens for each new one. After a
    walk with more of them than the executor believes to be for one token, the next one is stated to be for a prompt.
    """

    __slots__ = ("large", "part")

    def __init__(self) -> None:
        self.part = Kind.PREFILL
        """The kind of the latest rows of a part that was called by itself."""
        self.large = False
        """Whether the latest walk had more rows for one token than the executor believes."""

    def kind_of(self, x: torch.Tensor, most: float, call: _Call | None) -> Kind:
        """Return the kind of a request with the rows x [..., i].

        Args:
            x: the rows.
            most: the largest decode request that the executor believes, in rows.
            call: the call of the model under way, or None.
        """
        latent = x.ndim == 4 and x.shape[1] == 1
        if call is not None:
            if (call.decodes or latent) and x.shape[:-1].numel() > most:
                self.large = True
            return call.kind
        if x.ndim > 2:
            self.part = _PREFILL if x.shape[1:-1].numel() > 1 and not latent else _DECODE
        return self.part


class _Call(NamedTuple):
    """A call of a model: whose it is, the kind that is stated for its rows, and whether it is for one token."""

    requester: Requester
    kind: Kind
    decodes: bool


_call: ContextVar[_Call | None] = ContextVar("call", default=None)
"""The call under way in this fiber or thread. Several may call one model at once."""
_DECODE, _PREFILL = Kind.DECODE, Kind.PREFILL


class ThreadState(threading.local):
    """What is remembered for each thread that walks the model."""

    rehearsing = False
    """Whether requests of this thread are answered with zeros, and not sent."""

    def __init__(self) -> None:
        self.kinds = KindTracker()
        self.siblings = SiblingState()
        self.kept = KeptProduct()

    def forget(self) -> None:
        """Drop what a walk of this thread left behind."""
        self.siblings.forget()
        self.kept = KeptProduct()


class Requester:
    """Sends the requests of one client's VirtLayers.

    Args:
        masked: whether rows are masked on the way, so that only products with a weight can be asked for.
        before_backward: called before each request of a backward pass.

    Attributes:
        model: the model, of layers that are not copies.
        quantization: what has quantized the base layers, see :func:`~symbiosis.core.share.quantization_of`.
        here: what is remembered for the calling thread.
    """

    def __init__(self, *, masked: bool = False, before_backward: Callable[[], None] | None = None) -> None:
        self.masked = masked
        self.model = ModelCopy()
        self.quantization: str | None = None
        self.before_backward = before_backward or (lambda: None)
        self.finetuning = False
        self.most_decoded = math.inf
        """Largest request, in rows, that the executor believes to be for one token of each of several texts."""
        self.joint: Mapping[str, float] | None = None
        """In a joint walk, the part of the rows that each client has; None in a client's own model."""
        self._channel: Channel | None = None
        self._wait: Waiter = wait_blocking
        self._answer: Callable[[Call], Results] | None = None
        self.here = ThreadState()

    def open(self, channel: Channel, waiter: Waiter | None = None) -> None:
        """Send over this channel from now on. By default every thread that sends blocks."""
        self._channel = channel
        self.most_decoded = math.inf if isinstance(channel.share, Resident) else MOST_DECODED
        if waiter is not None:
            self._wait = waiter

    def close(self) -> None:
        """Send no further requests."""
        self._channel = None

    @property
    def channel(self) -> Channel | None:
        """The channel that requests are sent over; None before it is opened and after it is closed."""
        return self._channel

    def forget(self) -> None:
        """Drop what a walk that has ended, or failed, left behind on any thread."""
        self.here.forget()
        large, self.here = self.here.kinds.large, ThreadState()
        self.here.kinds.large = large

    def __deepcopy__(self, memo: dict[int, Any]) -> Requester:
        return self  # a copy of a model asks over the same channel

    @contextlib.contextmanager
    def in_call(self, kind: Kind | None) -> Iterator[None]:
        """Note that the model is called inside the ``with`` block, with rows of this kind, or None if they are to
        tell."""
        kinds = self.here.kinds
        decodes = kind is _DECODE
        stated = _PREFILL if decodes and kinds.large else kind
        if kind is not None:
            kinds.large = False
        before = _call.set(None if stated is None else _Call(self, stated, decodes))
        try:
            yield
        finally:
            _call.reset(before)
            kinds.part = _PREFILL

    def kind_of(self, x: torch.Tensor) -> Kind:
        """Return what the rows x [..., i] of a request without gradients are for."""
        call = _call.get()
        return self.here.kinds.kind_of(x, self.most_decoded, call if call and call.requester is self else None)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Answer requests of this thread with zeros inside the ``with`` block."""
        before, self.here.rehearsing = self.here.rehearsing, True
        try:
            yield
        finally:
            self.here.rehearsing = before
            self.here.forget()

    @contextlib.contextmanager
    def answered_by(self, answer: Callable[[Call], Results]) -> Iterator[None]:
        """Answer requests by a function, and send none, inside the ``with`` block."""
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None
            self.here.forget()

    @contextlib.contextmanager
    def in_training_step(self) -> Iterator[None]:
        """Count forward passes without gradients as parts of a training step inside the ``with`` block."""
        self.finetuning = True
        try:
            yield
        finally:
            self.finetuning = False

    def request(self, key: Key, kind: Kind, tensors: Results, name: str) -> Results:
        """Send a request and return its results. ``name`` is the layer's, for errors.

        Raises:
            ClientClosedError: the client was closed.
            CannotWaitError: the layer was called where it cannot wait.
        """
        if self._answer is not None:
            return self._answer(Call(key, kind, tensors))
        channel = self._channel
        if channel is None:
            raise ClientClosedError(f"{name}: the client of this model was closed, and its base layers are gone")
        if torch._C._is_tracing():
            raise refuse_to_trace(name)
        # Tensors that such transforms wrap would be merged with other tenants' rows.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CannotWaitError(f"{name}: torch.func transforms (vmap, grad, jvp…) cannot be used on this model")
        if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
            raise CannotWaitError(f"{name}: forward-mode differentiation cannot be used on this model")
        home = tensors[0].device
        if on_own_stream(home):
            return self._on_default_stream(key, kind, tensors, name)
        if home == channel.device:
            return self._wait(channel, Call(key, kind, tensors, self.joint), name)
        moved = tuple(tensor.to(channel.device) for tensor in tensors)
        return tuple(result.to(home) for result in self._wait(channel, Call(key, kind, moved), name))

    def _on_default_stream(self, key: Key, kind: Kind, tensors: Results, name: str) -> Results:
        """Send a request of code that computes on a CUDA stream of its own.

        Batches, and other clients that share the thread, run on the default stream. It waits for the rows, and the
        caller's stream waits for the results.
        """
        own, default = torch.cuda.current_stream(tensors[0].device), torch.cuda.default_stream(tensors[0].device)
        default.wait_stream(own)
        with torch.cuda.stream(default):
            results = self.request(key, kind, tensors, name)
        own.wait_stream(default)
        for tensor, stream in (*((tensor, default) for tensor in tensors), *((result, own) for result in results)):
            tensor.record_stream(stream)  # its memory is not used for anything else before
        return results


def on_own_stream(device: torch.device) -> bool:
    """Return whether this thread computes on a CUDA stream other than the default one."""
    return device.type == "cuda" and torch._C._cuda_getCurrentRawStream(device.index or 0) != 0


def refuse_to_trace(name: str) -> UsageError:
    """Return the error for a program that would be written down without the layer of this name."""
    return UsageError(
        f"{name}: this model cannot be traced or exported (torch.jit, torch.export), because its base layers are with "
        "the executor; save the adapter, and trace the model where the base model is"
    )


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
