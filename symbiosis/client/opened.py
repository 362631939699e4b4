"""Synchronous clients of a base model that another process serves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from symbiosis.client.connect import new_name, tokenizer_of
from symbiosis.client.hollow import skeleton_for
from symbiosis.client.passes import Passes
from symbiosis.client.requester import Requester
from symbiosis.client.virtlayer import rehearse
from symbiosis.core.privacy import Preparing, Privacy
from symbiosis.core.registry import make_privacy, make_transport
from symbiosis.core.terms import Kind, Terms
from symbiosis.core.transport import Channel
from symbiosis.errors import ClientClosedError

__all__ = ["OpenedModel", "open_model"]


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
        address: an executor's address, such as ``shm:///run/symbiosis.sock``.
        name: name of this client, shown in the executor's statistics and events.
        device: device of the client's part of the model; by default a device of the executor's kind.
        priority, slo_ms, ttft_ms, kind: what this client asks for; see :meth:`symbiosis.Base.client`.
        privacy: how the rows that leave this process are masked; see :meth:`symbiosis.Executor.client`.
        **options: of the transport. All transports have ``retry``: seconds to wait for an executor that was lost, 60 by
            default.
    """
    transport = make_transport(address, **options)
    scheme = make_privacy(privacy)
    terms = Terms(priority, slo_ms, ttft_ms, kind).check()
    channel = transport.connect_blocking(address, name or new_name(), terms)
    if scheme is not None:
        channel = scheme.wrap_blocking(channel, address, terms, options)
    passes = Passes(channel)
    requester = Requester(masked=scheme is not None, before_backward=passes.backward_begins)
    requester.open(channel)
    try:
        model: Any = skeleton_for(channel, requester)
        if device is not None:
            model = model.to(device)
        model.register_forward_pre_hook(passes.begin)
        model.register_forward_hook(passes.end, always_call=True)
        opened = OpenedModel(
            model, requester, channel, lambda: tokenizer_of(transport.look(address).tokenizer, address)
        )
        model.symbiosis, model.tokenizer, model.precompute = opened, opened.tokenizer, opened.precompute
        yield model
    finally:
        requester.close()
        channel.close()
