"""Fingerprints of weights: hashes by which executors and tenants tell whether they have the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from symbiosis.core.requests import LayerSpec
from symbiosis.executor.quantized import parts_of

_SAMPLE = 256
"""Elements of each tensor that enter a fingerprint."""


def weights_fingerprint(layers: Iterable[tuple[LayerSpec, nn.Module]]) -> str:
    """Return a hash of the layer table and of a sample of every parameter of the base layers.

    Weights of linear layers are hashed in the dtype that the table states, so a tenant's own copy in another dtype
    compares equal.
    """
    found = hashlib.blake2b(digest_size=16)
    for spec, module in layers:
        found.update(repr((*spec[:4], dtype_name(spec.dtype), *spec[5:])).encode())
        for name, parameter in module.named_parameters():
            plain = spec.linear and parameter.is_floating_point() and not hasattr(parameter, "__tensor_flatten__")
            for part in [parameter.detach().to(spec.dtype)] if plain else parts_of(parameter):
                _sample(found, name, part)
    return found.hexdigest()


def model_fingerprint(description: Mapping[str, Any], model: nn.Module) -> str:
    """Return a hash of the description of a share and of a sample of every parameter of its model."""
    found = hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16)
    for name, parameter in model.named_parameters():
        for part in parts_of(parameter):
            _sample(found, name, part)
    return found.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def _sample(found: Any, name: str, tensor: torch.Tensor) -> None:
    flat = tensor.reshape(-1)
    step = max(1, flat.numel() // _SAMPLE) | 1  # an odd step: a multiple of the width would sample a single column
    sample = flat[::step][:_SAMPLE].contiguous().cpu()
    found.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
    found.update(sample.view(torch.uint8).numpy().tobytes())
