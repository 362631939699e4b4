"""Tries a client's part of a model once, before it is served, to find layers that cannot be base layers.

Some models read the weight of a linear layer instead of calling it, or write to it. A client does not have that weight,
so such a layer has to stay with the clients.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import nn

from symbiosis.client.fibers import RandomStream
from symbiosis.client.parameters import SharedParameter
from symbiosis.client.requester import Requester
from symbiosis.client.skeleton import make_skeleton
from symbiosis.client.virtlayer import VirtLayer
from symbiosis.core.share import Resident
from symbiosis.errors import PlaceholderError

log = logging.getLogger(__name__)

READS = "the model's own code reads its weight"


def weights_read(resident: Resident) -> dict[str, str]:
    """Return the names of base layers whose weights the model's own code reads or writes, each with the reason.

    A skeleton is walked on a short input, in evaluation and in training mode, with zeros in place of the base layers'
    results. Layers of the same name in other blocks are treated alike. A model for which no input is known, or that
    fails for another reason, is not tried.
    """
    model, layers = resident.model, list(resident.layers)
    inputs = _inputs(model)
    if inputs is None:
        return {}
    found: dict[str, str] = {}
    while layers:
        names = _try(Resident(model, layers), inputs)
        if not names:
            break
        kinds = {_without_numbers(name) for name in names}
        found |= {spec.name: READS for spec, _ in layers if _without_numbers(spec.name) in kinds}
        layers = [(spec, module) for spec, module in layers if spec.name not in found]
    return found


def _try(resident: Resident, inputs: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of base layers whose weights a walk reads or writes; those that it came to."""
    device = next(iter(inputs.values())).device
    requester = Requester()
    skeleton: Any = make_skeleton(resident.model, resident.layers, requester, device)
    for module in skeleton.modules():  # hooks of the model's owner
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    with RandomStream(device), requester.rehearsing(), torch.no_grad():
        for training in (False, True):
            skeleton.train(training)
            try:
                skeleton(**inputs)
            except PlaceholderError as error:
                if error.layer is not None:
                    return {error.layer}
            except Exception as error:  # noqa: BLE001 (the input may not be one for this model)
                log.debug("%s was not tried: %s", type(resident.model).__name__, error)
                return set()
            written = {
                module.spec.name
                for module in skeleton.modules()
                if isinstance(module, VirtLayer)
                and any(isinstance(p, SharedParameter) and p.own for p in module._parameters.values())
            }
            if written:
                return written
    return set()


def _without_numbers(name: str) -> str:
    return re.sub(r"\b\d+\b", "0", name)


def _inputs(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return a short input for a transformers model, by its main input; None if none is known."""
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    device = next(model.parameters()).device
    if config is None:
        return None
    ids = torch.zeros(1, 4, dtype=torch.long, device=device)
    if main == "input_ids":
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    if main == "pixel_values":
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        if isinstance(height, int) and isinstance(width, int):
            dtype = next(model.parameters()).dtype
            return {"pixel_values": torch.zeros(1, channels, height, width, dtype=dtype, device=device)}
    return None
