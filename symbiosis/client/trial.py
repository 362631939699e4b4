"""Tries a client's part of a model once, before it is served, to find layers that cannot be base layers.

Some models read the weight of a linear layer instead of calling it, or write to it. A client does not have that weight,
so such a layer has to stay with the clients.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from symbiosis.client.fibers import RandomStream, numpys_stream
from symbiosis.client.parameters import SharedParameter
from symbiosis.client.requester import Requester
from symbiosis.client.skeleton import make_skeleton
from symbiosis.client.virtlayer import VirtLayer
from symbiosis.core.share import Resident
from symbiosis.errors import PlaceholderError

log = logging.getLogger(__name__)

_SIZES = (
    *("image_size", "patch_size", "num_channels", "num_mel_bins", "max_length", "max_source_positions"),
    "feature_projection_input_dim",
)
_SHAPES: dict[str, tuple[tuple[str | int, ...], ...]] = {
    "pixel_values": ((1, "num_channels", "height", "width"), (1, 3, 64, 64), (1, 3, 224, 224)),
    "input_values": ((1, 8000), (1, "max_length", "num_mel_bins")),
    "input_features": ((1, "num_mel_bins", "frames"), (1, 8, "feature_projection_input_dim")),
}
"""Shapes of main inputs, in numbers and in sizes of the configuration. 8000 samples are half a second."""
MOST_PATCHES = 1024
"""Patches of the largest image that a vision tower is tried with: attention takes time by their square."""

READS = "the model's own code reads its weight"


def weights_read(resident: Resident) -> dict[str, str]:
    """Return the names of base layers whose weights the model's own code reads or writes, each with the reason.

    A skeleton is walked on short inputs, in evaluation and in training mode, with zeros in place of the base layers'
    results; and so are the models inside, such as a vision tower, that have another main input. Layers of the same name
    in other blocks are treated alike. A model for which no input is known, or that fails for another reason, is not
    tried.
    """
    model, layers = resident.model, list(resident.layers)
    found: dict[str, str] = {}
    while layers:
        names = _try(Resident(model, layers))
        if not names:
            break
        kinds = {_without_numbers(name) for name in names}
        found |= {spec.name: READS for spec, _ in layers if _without_numbers(spec.name) in kinds}
        layers = [(spec, module) for spec, module in layers if spec.name not in found]
    return found


def _try(resident: Resident) -> set[str]:
    """Return the names of base layers whose weights a walk reads or writes, from the first walk that does so."""
    device = next(resident.model.parameters()).device
    requester = Requester()
    skeleton: Any = make_skeleton(resident.model, resident.layers, requester, device)
    for module in skeleton.modules():  # hooks of the model's owner
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    walked: dict[str, set[str]] = {}
    with RandomStream(device), numpys_stream(), requester.rehearsing(), torch.no_grad():
        for name, module in skeleton.named_modules():
            main = getattr(module, "main_input_name", None)
            inside = walked.setdefault(str(main), set())
            if main is None or any(f"{name}.".startswith(f"{outer}.") or not outer for outer in inside):
                continue
            for inputs in _inputs(module, main):
                try:
                    if read := _walk(module, inputs):
                        return read
                except Exception as error:  # noqa: BLE001 (the input may not be one for this model)
                    log.debug("%s was not tried with %s: %s", type(module).__name__, list(inputs), error)
                else:
                    inside.add(name)
                    break
    return set()


def _walk(module: Any, inputs: dict[str, Any]) -> set[str]:
    """Return the names of base layers whose weights a walk of a skeleton, or of a model inside, reads or writes."""
    for training in (False, True):
        module.train(training)
        try:
            module(**inputs)
        except PlaceholderError as error:
            if error.layer is not None:
                return {error.layer}
        written = {
            layer.spec.name
            for layer in module.modules()
            if isinstance(layer, VirtLayer)
            and any(isinstance(p, SharedParameter) and p.own for p in layer._parameters.values())
        }
        if written:
            return written
    return set()


def _without_numbers(name: str) -> str:
    return re.sub(r"\b\d+\b", "0", name)


def _inputs(model: nn.Module, main: str) -> Iterator[dict[str, Any]]:
    """Yield short inputs for a transformers model, by its main input. One of them may suit; none if none is known."""
    config: Any = getattr(model, "config", None)
    parameter = next(model.parameters(), None)
    if config is None or parameter is None:
        return
    ids = torch.zeros(1, 4, dtype=torch.long, device=parameter.device)
    decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
    if main == "input_ids":
        yield {"input_ids": ids, **decoder}
        return
    known = {name: getattr(config, name, None) for name in _SIZES}
    if isinstance(known["image_size"], list | tuple):
        known["height"], known["width"] = known["image_size"]
    else:
        known["height"] = known["width"] = known["image_size"]
    known["num_channels"] = known["num_channels"] or 3
    known["frames"] = 2 * (known["max_source_positions"] or 0) or None
    sizes: dict[str, int] = {name: size for name, size in known.items() if isinstance(size, int)}
    zeros = partial(torch.zeros, dtype=parameter.dtype, device=parameter.device)
    side = 4 * sizes.get("patch_size", 0)
    if side and "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        yield {main: zeros(1, sizes["num_channels"], side, side), "interpolate_pos_encoding": True}
    for names in _SHAPES.get(main, ()):
        shape = [sizes.get(each, 0) if isinstance(each, str) else each for each in names]
        if all(shape) and (main != "pixel_values" or not side or 16 * shape[-1] * shape[-2] <= MOST_PATCHES * side**2):
            yield {main: zeros(shape), **decoder}
