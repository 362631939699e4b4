"""What a client needs to build its part of the model.

An executor offers it in one of two forms. A client in the executor's process gets the :class:`Resident` model itself
and shares its memory. A client elsewhere gets a :class:`Share`: plain data that travels over a transport.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from symbiosis.core.requests import LayerSpec
from symbiosis.errors import ShareError

if TYPE_CHECKING:
    import torch
    from torch import nn


MAX_MODEL_NAME = 256
"""Largest number of characters of a model's name."""


def is_model_name(value: object) -> bool:
    """Return whether a value is a text that can be a model's name."""
    return isinstance(value, str) and len(value) <= MAX_MODEL_NAME and value.isprintable()


def quantization_of(modules: Iterable[object]) -> str | None:
    """Return ``"bitsandbytes"`` if any of a model's modules are of that library, otherwise None. PEFT wraps
    its layers in classes of their own."""
    found = any(type(module).__module__.partition(".")[0] == "bitsandbytes" for module in modules)
    return "bitsandbytes" if found else None


@dataclass(frozen=True, eq=False)
class Share:
    """A client's part of a model, as data. A tenant without a checkpoint needs nothing else.

    ``description`` is plain data, fit for msgpack or JSON. It has the entries ``architecture``, ``model_type``,
    ``config``, ``generation_config``, ``attention``, ``dtype``, ``layers``, ``tied``, ``buffers``, ``allowed``,
    ``layer_weights`` (a hash of each base layer), ``weights`` (of all of them), ``client_weights`` (of the tensors),
    ``fingerprint`` (of all this) and ``name``. If other executors serve other base layers of the model, it also has
    ``order``: the names of all base layers in the model's order. If bitsandbytes has quantized layers, it has
    ``quantization`` (see :func:`quantization_of`). ``tensors`` are embeddings, norms, biases and buffers by name, and
    the weights of base layers that the provider allows. ``tokenizer`` maps file names to contents.
    """

    description: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Mapping[str, bytes]


def quantization_in(share: Share | Resident) -> str | None:
    """Return :func:`quantization_of` the model of a share."""
    if isinstance(share, Resident):
        return quantization_of(share.model.modules())
    return share.description.get("quantization")


@dataclass(frozen=True, eq=False)
class Resident:
    """The base model of an executor in this process: the module tree, and the base layers in it."""

    model: nn.Module
    layers: Sequence[tuple[LayerSpec, nn.Module]]


_BLOCK = re.compile(r"(?:^|.*?\.)[0-9]+(?=\.|$)")


def block_of(name: str) -> str:
    """Return the block to which a layer belongs: its name up to the first number, or all of it if it has none."""
    found = _BLOCK.match(name)
    return found[0] if found else name


def fingerprint_of(value: Any) -> str:
    """Return a hash of plain data, such as the description of a share or the fingerprints of its layers."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def layers_of(description: Mapping[str, Any]) -> list[LayerSpec]:
    """Return the layer table in the description of a share.

    Raises:
        ShareError: the table is malformed, or names a dtype that this version of torch does not have.
    """
    try:
        specs = [
            LayerSpec(index, name, in_features, out_features, dtype_named(dtype), *rest)
            for index, name, in_features, out_features, dtype, *rest in description["layers"]
        ]
        if len({spec.name for spec in specs}) < len(specs):
            raise ValueError("a name is there twice")
        for index, spec in enumerate(specs):
            types = [type(value) for value in (spec.name, spec.in_features, spec.out_features, *spec[5:])]
            if (
                spec.layer != index
                or types != [str, int, int, bool, bool, int, int]
                or min(spec[2:4]) < 1
                or not 0 <= spec.choices <= spec.experts
                or bool(spec.choices) != bool(spec.experts)
                or (spec.experts and spec.linear)
                or not spec.dtype.is_floating_point
            ):
                raise ValueError(f"entry {index} is {tuple(spec)}"[:300])
        return specs
    except (KeyError, TypeError, ValueError) as error:
        raise ShareError(f"the executor's layer table cannot be read: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that a name such as ``"bfloat16"`` stands for.

    Raises:
        ValueError: torch has no such dtype.
    """
    import torch

    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype
