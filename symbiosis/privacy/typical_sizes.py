"""Typical sizes of the public model's rows. They are known before a tenant's first request and to every party."""

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

log = get_logger(__name__)

_TOKENS = 64
_FIRST_TOKENS = 4
"""Tokens at the start of the text that are left out: many models make their rows hundreds of times larger."""
_ROW_QUANTILE, _GRADIENT_QUANTILE = 0.1, 0.5
"""Quantiles of sizes that count as typical. Amplitudes follow smaller rows down but not larger rows up, so the quantile
of rows is low. Gradients are sent for many tokens together, and the largest of those is rarely below the median."""


class TypicalSizes:
    """Root mean squares of the rows in one forward and backward pass of the public model over a constant text.

    A layer that the pass does not reach gets the median of layers that read rows of its width, or else of all layers.
    If the model takes no token ids, or raises, all sizes are 1 and a warning is logged. The model's weights, their
    gradients and torch's generators stay unchanged. ``modules`` are the linear modules of the layer table, by index.
    """

    def __init__(self, model: nn.Module, layers: Sequence[LayerSpec], modules: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._rows: dict[int, float] = {}
        """Layer → typical size of the rows that it reads."""
        self._gradients: dict[int, float] = {}
        """Layer → typical size of the gradients of its results, for a loss that is a sum over tokens."""
        try:
            self._measure(model, modules)
        except Exception as error:  # noqa: BLE001 (the model's own code may raise anything)
            log.warning("the public model could not be run; typical sizes of rows are guessed", why=str(error))
        self.size = cache(self._size)

    def _size(self, key: Key) -> float:
        """Return the typical rms of rows of a key; of a backward key, for a loss that is a sum over tokens."""
        backward = key.pass_.is_backward
        sizes = self._gradients if backward else self._rows
        measured = [sizes[layer] for layer in key.layers if sizes.get(layer)]
        if measured:
            return min(measured)
        width = self._width(key.layers[0], backward)
        alike = [size for layer, size in sizes.items() if size and self._width(layer, backward) == width]
        return median(alike or list(filter(None, sizes.values())) or [1.0])

    def _width(self, layer: int, backward: bool) -> int:
        return self._layers[layer].out_features if backward else self._layers[layer].in_features

    def _measure(self, model: nn.Module, modules: Mapping[int, nn.Module]) -> None:
        thread = threading.get_ident()
        leaves: list[torch.Tensor] = []
        """Inputs of layers that require gradients: enough of them for gradients to reach every layer."""

        def before(layer: int) -> Callable[..., Any]:
            def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
                if threading.get_ident() != thread:  # another thread uses the same model
                    return None
                if len(arguments) != 1 or arguments[0].ndim < 2:
                    return None
                (x,) = arguments
                _keep_least(self._rows, layer, x, _ROW_QUANTILE, _FIRST_TOKENS)
                if x.requires_grad and leaves:
                    return None
                leaves.append(x if x.requires_grad else x.detach().requires_grad_())
                return (leaves[-1],)

            return hook

        def after(layer: int) -> Callable[..., None]:
            def gradient(dy: torch.Tensor) -> None:
                _keep_least(self._gradients, layer, dy, _GRADIENT_QUANTILE)

            def hook(module: nn.Module, arguments: Any, y: torch.Tensor) -> None:
                if threading.get_ident() == thread and y.requires_grad:
                    y.register_hook(gradient)  # type: ignore[no-untyped-call]

            return hook

        with ExitStack() as restored, modes_aside(), torch.inference_mode(False), torch.enable_grad():
            for module in model.modules():  # dropout would draw from the tenant's generators
                if module.training:
                    restored.callback(setattr, module, "training", True)
                    module.training = False
            for layer, module in modules.items():
                restored.callback(module.register_forward_pre_hook(before(layer)).remove)
                restored.callback(module.register_forward_hook(after(layer)).remove)
            torch.autograd.grad(_loss(model), leaves, allow_unused=True)


def _keep_least(sizes: dict[int, float], layer: int, x: torch.Tensor, fraction: float, skip: int = 0) -> None:
    """Keep a quantile of the rms of rows of x [..., width], after some first rows, if it is the least of the layer.

    Rows that are zero or not finite do not count. Without other rows the size is 0.
    """
    rms: list[float] = x.detach().flatten(0, -2).float().square().mean(1).sqrt().tolist()
    finite = [size for size in rms if size < float("inf")]
    ordered = sorted(filter(None, finite[skip:] or finite))
    size = ordered[int(fraction * len(ordered))] if ordered else 0.0
    sizes[layer] = min(sizes.get(layer, size), size)


def _loss(model: nn.Module) -> torch.Tensor:
    """Return the summed loss of a constant text of tokens that are frequent by Zipf's law.

    Vocabularies begin with frequent tokens.
    """
    config: Any = model.config
    text = config.get_text_config()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = min(text.vocab_size, getattr(embedding, "num_embeddings", text.vocab_size))
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    order = random.Random(0).sample(range(length), length)
    tokens = [int(vocabulary ** (0.1 + 0.89 * place / length)) for place in order]
    first = getattr(text, "bos_token_id", None)
    if isinstance(first, int) and 0 <= first < vocabulary:
        tokens[0] = first
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    decoder = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    logits = model(input_ids=ids, **decoder)[0].float()
    if logits.shape[:2] == ids.shape:
        return F.cross_entropy(logits[0, :-1], ids[0, 1:] % logits.shape[-1], reduction="sum")
    return F.cross_entropy(logits.flatten(0, -2), ids.new_zeros(logits[..., 0].numel()), reduction="sum")
