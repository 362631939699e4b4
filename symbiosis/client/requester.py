"""State that the VirtLayers of one client share: the channel, the way to wait, and what each thread remembers."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.autograd import forward_ad

from symbiosis.client.kinds import Kinds
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


class ThreadState(threading.local):
    """What is remembered for each thread that walks the model."""

    rehearsing = False
    """Whether requests of this thread are answered with zeros, and not sent."""

    def __init__(self) -> None:
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
        kinds: what rows are for.
        quantization: what has quantized the base layers, see :func:`~symbiosis.core.share.quantization_of`.
        here: what is remembered for the calling thread.
    """

    def __init__(self, *, masked: bool = False, before_backward: Callable[[], None] | None = None) -> None:
        self.masked = masked
        self.model = ModelCopy()
        self.kinds = Kinds()
        self.quantization: str | None = None
        self.before_backward = before_backward or (lambda: None)
        self.finetuning = False
        self.joint: Mapping[str, float] | None = None
        """In a joint walk, the part of the rows that each client has; None in a client's own model."""
        self._channel: Channel | None = None
        self._wait: Waiter = wait_blocking
        self._answer: Callable[[Call], Results] | None = None
        self.here = ThreadState()

    def open(self, channel: Channel, waiter: Waiter | None = None) -> None:
        """Send over this channel from now on. By default every thread that sends blocks."""
        self._channel = channel
        self.kinds.most = math.inf if isinstance(channel.share, Resident) else MOST_DECODED
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
        self.kinds.forget()
        self.here = ThreadState()

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
