"""How large rows usually are, by the public model: known before a tenant's first request, and to everybody."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from symbiosis.core.requests import Key, LayerSpec
from symbiosis.log import get_logger
from symbiosis.modes import modes_aside

__all__ = ["Usual"]

log = get_logger(__name__)

_TOKENS = 64
_BEGINNING = 4
"""Tokens at the beginning of a text, which many models make hundreds of times as large as others."""
_SMALL, _MIDDLE = 0.1, 0.5
"""Of the rows, and of the gradients, that are smaller than what is taken to be usual. Amplitudes follow smaller ones
down, but not larger ones up, and some models have many rows that are far larger than others. Gradients never come
alone, so the largest of a request is hardly below the middle."""


class Usual:
    """Sizes (root mean square) of rows in one walk of the public model, forward and back, over one constant text.

    Layers that the walk did not reach are taken to be like others that read rows of their width, or like all others;
    and rows to be of size 1 where nothing is known, as of a model that takes no token ids, or fails: a warning says so.
    The model's weights, their gradients and torch's generators stay as they are.

    Args:
        model: with all its weights.
        layers: the layer table.
        modules: the linear ones of these layers, by their numbers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[LayerSpec], modules: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._rows: dict[int, float] = {}
        """That a layer reads."""
        self._gradients: dict[int, float] = {}
        """Of a layer's results, for a loss that is a sum over tokens."""
        try:
            self._walk(model, modules)
        except Exception as error:  # noqa: BLE001 (whatever a model of the tenant's raises)
            log.warning("the public model could not be walked; how large rows usually are is guessed", why=str(error))
        self.size = cache(self._size)

    def _size(self, key: Key) -> float:
        """Of rows that hardly a request's largest is far below; of gradients, for a loss that is a sum over tokens."""
        backward = key.pass_.is_backward
        sizes = self._gradients if backward else self._rows
        known = [sizes[layer] for layer in key.layers if sizes.get(layer)]
        if not known:
            width = self._width(key.layers[0], backward)
            alike = [size for layer, size in sizes.items() if size and self._width(layer, backward) == width]
            return median(alike or list(filter(None, sizes.values())) or [1.0])
        return min(known)

    def _width(self, layer: int, backward: bool) -> int:
        return self._layers[layer].out_features if backward else self._layers[layer].in_features

    def _walk(self, model: nn.Module, modules: Mapping[int, nn.Module]) -> None:
        thread = threading.get_ident()
        inputs: list[torch.Tensor] = []
        """Of layers: enough for gradients to come to all of them."""

        def reads(layer: int) -> Callable[..., Any]:
            def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
                if threading.get_ident() != thread:  # somebody else's, who uses the same model
                    return None
                if len(arguments) != 1 or arguments[0].ndim < 2:
                    return None
                (x,) = arguments
                sizes = _sizes(x)
                small = _at(_SMALL, sizes[_BEGINNING:] or sizes)
                self._rows[layer] = min(self._rows.get(layer, small), small)
                if x.requires_grad and inputs:
                    return None
                inputs.append(x if x.requires_grad else x.detach().requires_grad_())
                return (inputs[-1],)

            return hook

        def gives(layer: int) -> Callable[..., None]:
            def gradient(dy: torch.Tensor) -> None:
                middle = _at(_MIDDLE, _sizes(dy))
                self._gradients[layer] = min(self._gradients.get(layer, middle), middle)

            def hook(module: nn.Module, arguments: Any, y: torch.Tensor) -> None:
                if threading.get_ident() == thread and y.requires_grad:
                    y.register_hook(gradient)  # type: ignore[no-untyped-call]

            return hook

        with ExitStack() as hooks, modes_aside(), torch.inference_mode(False), torch.enable_grad():
            for module in model.modules():  # no dropout: it would draw from the tenant's generators
                if module.training:
                    hooks.callback(setattr, module, "training", True)
                    module.training = False
            for layer, module in modules.items():
                hooks.callback(module.register_forward_pre_hook(reads(layer)).remove)
                hooks.callback(module.register_forward_hook(gives(layer)).remove)
            torch.autograd.grad(_loss(model), inputs, allow_unused=True)


def _sizes(x: torch.Tensor) -> list[float]:
    """The rms of each row that is finite."""
    sizes: list[float] = x.detach().flatten(0, -2).float().square().mean(1).sqrt().tolist()
    return [size for size in sizes if size < float("inf")]


def _at(part: float, sizes: Sequence[float]) -> float:
    """One that such a part of them is smaller than, of those that are not zero."""
    some = sorted(filter(None, sizes))
    return some[int(part * len(some))] if some else 0.0


def _loss(model: nn.Module) -> torch.Tensor:
    """Of the constant text: tokens that are frequent, by Zipf's law, in vocabularies that begin with frequent ones."""
    config: Any = model.config
    text = config.get_text_config()
    many = text.vocab_size
    embedded = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "num_embeddings", many)
    many = min(many, embedded)  # on a GPU an id beyond it would be the end of more than this walk
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    order = random.Random(0).sample(range(length), length)
    begin = getattr(text, "bos_token_id", None)
    tokens = [int(many ** (0.1 + 0.89 * place / length)) for place in order]
    if isinstance(begin, int) and 0 <= begin < many:
        tokens[0] = begin
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    more = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    logits = model(input_ids=ids, **more)[0].float()
    classes = logits.shape[-1]
    if logits.shape[:2] == ids.shape:
        return F.cross_entropy(logits[0, :-1], ids[0, 1:] % classes, reduction="sum")
    return F.cross_entropy(logits.flatten(0, -2), ids.new_zeros(logits[..., 0].numel()), reduction="sum")
