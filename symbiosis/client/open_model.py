"""Synchronous clients of a base model that another process serves."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from symbiosis.client.calls import enter
from symbiosis.client.connect import new_name, tokenizer_of
from symbiosis.client.requester import Requester
from symbiosis.client.skeleton import skeleton_for
from symbiosis.client.virtlayer import in_training_step, rehearse
from symbiosis.core.privacy import Preparing, Privacy, masked_blocking
from symbiosis.core.registry import make_privacy, make_transport
from symbiosis.core.terms import Kind, Terms
from symbiosis.core.transport import Channel
from symbiosis.errors import ClientClosedError
from symbiosis.training.step import run_now, training_step


class OpenedModel:
    """Operations of a synchronous client beside calling its model: ``model.symbiosis`` of an opened model."""

    def __init__(self, model: Any, requester: Requester, channel: Channel, tokenizer: Callable[[], Any]) -> None:
        self._model = model
        self._requester = requester
        self._channel = channel
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenedModel:
        return self  # a copy of the model uses the same connection

    def tokenizer(self) -> Any:
        """Return the model's tokenizer, from the executor.

        Raises:
            UsageError: the executor has no tokenizer.
        """
        return self._tokenizer()

    @property
    def weights(self) -> str:
        """Fingerprint of the weights of the base layers: the same for all executors of one model."""
        return self._channel.identity().weights

    def precompute(self, *, training: bool = True, **inputs: Any) -> None:
        """Compute masks ahead of time; see :meth:`symbiosis.Client.precompute`. Blocks.

        Call it after adapters were added, because they change which layers are asked together.
        """
        if self._requester.channel is None:
            raise ClientClosedError("this model was closed, so no masks can be computed for it")
        if isinstance(self._channel, Preparing):
            device = next(self._model.parameters()).device
            self._channel.prepare_blocking(rehearse(self._model, self._requester, training, inputs, device))


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
    """Open the model at an address, for synchronous code: a ``transformers`` model like any other, without asyncio.

    Give it to ``get_peft_model``, ``Trainer``, ``pipeline``. Its base layers are VirtLayers, which block until the
    executor has answered. The model is frozen and in evaluation mode. It belongs to the process that opened it.
    ``model.symbiosis`` is an :class:`OpenedModel`; ``model.tokenizer`` and ``model.precompute`` are its methods.

    Args:
        address: an executor's address, such as ``shm:///tmp/symbiosis.sock``.
        name: name of this client, shown in the executor's statistics and events.
        device: where the client's part of the model runs; by default where the transport delivers tensors.
        priority, slo_ms, ttft_ms, kind: what this client asks for; see :meth:`symbiosis.Base.client`.
        privacy: how the rows that leave this process are masked; see :meth:`symbiosis.Executor.client`.
        **options: of the transport. All transports between processes have ``retry``: seconds to wait for an executor
            that was lost, 60 by default.
    """
    transport = make_transport(address, **options)
    scheme = make_privacy(privacy)
    terms = Terms(priority, slo_ms, ttft_ms, kind).check()
    channel = transport.connect_blocking(address, name or new_name(), terms)
    channel = masked_blocking(scheme, channel, address, terms, options)
    walks = WalkCounter(channel)
    requester = Requester(masked=scheme is not None, before_backward=walks.backward_begins)
    requester.open(channel)
    try:
        model: Any = skeleton_for(channel, requester)
        if device is not None:
            model = model.to(device)
        enter(model, requester.kinds, walks)
        opened = OpenedModel(
            model, requester, channel, lambda: tokenizer_of(transport.look(address).tokenizer, address)
        )
        model.symbiosis, model.tokenizer, model.precompute = opened, opened.tokenizer, opened.precompute
        yield model
    finally:
        requester.close()
        channel.close()


def backward_in_windows(model: Any, batch: Mapping[str, Any], window: int, *, prune: bool = True) -> float:
    """Run a batch forward and backward in windows, for synchronous code, and return its loss.

    This adds to the gradients what ``model(**batch).loss.backward()`` would add. Coroutines use
    :meth:`symbiosis.Client.train_step`.

    Args:
        model: from :func:`symbiosis.open_model`, with a PEFT adapter or trainable parts of its own.
        batch: arguments of the model, with ``labels``, on the model's device.
        window: number of tokens in a window.
        prune: keep fewer activations for backward; see :meth:`symbiosis.Client.train_step`.

    Raises:
        UsageError: the model, its PEFT method or the batch cannot be run in windows.
    """
    step = training_step(model, batch, window, prune)
    with in_training_step(model):
        return run_now(step)


class WalkCounter:
    """Tells the executor when a client is in a walk, so that batches wait for it then and only then.

    Several threads may walk the model at once, forward and backward. The client is in a walk from the time at which the
    first of them begins until the last has ended.
    """

    for_copies = True
    """Whether copies of the model have this seat too."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.RLock()
        self._open = 0
        self._backwards: set[int] = set()
        """Backward passes in progress, by the number that the autograd engine gives them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WalkCounter:
        return self  # a copy of the model uses the same connection

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an opened model cannot be pickled, because its base layers belong to the executor; save the adapter "
            "instead (save_pretrained of the PEFT model)"
        )

    def forward(self, walk: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward pass, and return its result. It also ends by Ctrl-C, when torch calls no hook."""
        self._begin()
        try:
            return walk(*args, **kwargs)
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            if not self._open:
                self._channel.begin_walk()
            self._open += 1

    def _end(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._channel.end_walk()

    def backward_begins(self) -> None:
        """Note that a request follows that may be the first of a backward walk."""
        number = torch._C._current_graph_task_id()
        if number == -1 or number in self._backwards:
            return
        with self._lock:
            if number in self._backwards:
                return
            self._backwards.add(number)
        self._begin()

        def callback() -> None:
            ended()

        # The engine calls the callback when the backward pass is complete, and drops it also if the pass has failed.
        ended = weakref.finalize(callback, self._backward_ended, number)
        ended.atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _backward_ended(self, number: int) -> None:
        with self._lock:
            self._backwards.remove(number)
        self._end()
