"""Fingerprints of weights: hashes by which executors and tenants tell whether they have the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from symbiosis.core.requests import LayerSpec
from symbiosis.core.share import dtype_name, fingerprint_of
from symbiosis.executor.quantized import parts_of, scales_of

_BLOCKS, _BLOCK = 8, 2048
"""Blocks of each tensor that enter a fingerprint, and elements of a block. Of a file that is mapped, few pages are
read."""


def layer_fingerprints(layers: Iterable[tuple[LayerSpec, nn.Module]]) -> list[str]:
    """Return a hash for each base layer: of its entry in the layer table without the index, and of a sample of its
    parameters.

    Weights of linear layers are hashed in the dtype that the table states, so a tenant's own copy in another dtype
    compares equal.
    """
    hashes = []
    for spec, module in layers:
        found = hashlib.blake2b(repr((*spec[1:4], dtype_name(spec.dtype), *spec[5:])).encode(), digest_size=16)
        for name, parameter in module.named_parameters():
            plain = spec.linear and parameter.is_floating_point() and not hasattr(parameter, "__tensor_flatten__")
            for part in [parameter] if plain else parts_of(parameter):
                _sample(found, name, part, spec.dtype if plain else part.dtype)
            if (state := getattr(parameter, "quant_state", None)) is not None:  # dequantized numbers have its dtype
                found.update(dtype_name(state.dtype).encode())
        for name, each in module.named_modules():
            if (scales := scales_of(each)) is not None:
                _sample(found, name, scales, scales.dtype)
        hashes.append(found.hexdigest())
    return hashes


def weights_fingerprint(layers: Iterable[tuple[LayerSpec, nn.Module]]) -> str:
    """Return a hash of the fingerprints of all base layers."""
    return fingerprint_of(layer_fingerprints(layers))


def tensors_fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of a sample of tensors, by name."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        for part in parts_of(tensors[name]):
            _sample(found, name, part, part.dtype)
    return found.hexdigest()


def _sample(found: Any, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Add a tensor's name, shape and dtype to a hash, and blocks of its elements that are spread evenly."""
    flat = tensor.detach().reshape(-1)
    last = max(flat.numel() - _BLOCK, 0)
    starts = sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)})
    blocks = [flat[start : start + _BLOCK].to(dtype).view(torch.uint8) for start in starts]
    found.update(f"{name} {list(tensor.shape)} {dtype}".encode())
    found.update(torch.cat(blocks).cpu().numpy().tobytes())
