"""What the tuner layers of a client do to its rows in a joint walk: what is known of PEFT's, and a trial of others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from peft.tuners.ia3 import layer as ia3
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from symbiosis.client.experts import VirtExperts
from symbiosis.client.joint.adapters import in_place_of_base
from symbiosis.client.joint.stacks import parameters_of
from symbiosis.client.virtlayer import VirtLayer
from symbiosis.client.virtmodule import VirtModule

_KINDS = (lora.Linear, lora.Embedding, ia3.Linear)


class WalksAloneError(Exception):
    """A client's model is not one that can be walked jointly; the text says what it has."""


def can_be_adapted(module: nn.Module) -> bool:
    """Return whether the joint model can run a client's own code in place of a module."""
    if isinstance(module, nn.Embedding):  # some for positions get several tensors
        return len(inspect.signature(type(module).forward).parameters) == 2
    return isinstance(module, VirtLayer) and not isinstance(module, (VirtModule, VirtExperts))


def known_adapter(layer: Any) -> str | None:
    """Return the active adapter of a tuner layer if what it does to a row is known; None if there is no such adapter,
    and an empty text if the layer's own code must run."""
    if type(layer) not in _KINDS or isinstance(layer.base_layer, BaseTunerLayer):
        return ""
    if is_replaced(layer):
        return ""
    active = [adapter for adapter in layer.active_adapters if adapter in _parts(layer)]
    if not active:
        return None
    (adapter, *more) = active
    if more or (not isinstance(layer, ia3.Linear) and adapter in layer.lora_variant):
        return ""
    if isinstance(layer, lora.Linear):
        parts: list[Any] = [layer.lora_A[adapter], layer.lora_B[adapter]]
        if any(type(part) is not nn.Linear or part.bias is not None for part in parts):
            return ""
        if any(part._parameters.get("weight") is None for part in parts):  # pruned, or with old weight norm
            return ""
        if type(layer.lora_dropout[adapter]) not in (nn.Identity, nn.Dropout):
            return ""
        a, b = parameters_of(layer, adapter)
        if a.dtype is not b.dtype or a.device != b.device or a.shape[:1] != b.shape[1:]:
            return ""
    return adapter if getattr(layer, "cast_input_dtype_enabled", True) else ""


def try_layer(layer: Any, base: Any) -> None:
    """Run a tuner layer on a row of zeros, with zeros as what its base layer gives. An embedding gets token 0.

    Raises:
        WalksAloneError: its code needs more than what the base layer gives for one matrix of rows. Or it draws random
            numbers, which would not be the client's, or its results are not rows like the base layer's.
    """
    calls, device = [], base.weight.device
    if isinstance(base, nn.Embedding):
        row, wanted = torch.zeros(1, 1, dtype=torch.long, device=device), None
    else:
        row = torch.zeros(1, 1, base.spec.in_features, dtype=base.spec.dtype, device=device)
        wanted = torch.zeros(1, 1, base.spec.out_features, dtype=base.spec.dtype, device=device)

    def stand_in(x: torch.Tensor) -> torch.Tensor:
        calls.append((base._own_weight() is None, x.shape == row.shape and x.dtype is row.dtype))
        return x.new_zeros(*x.shape[:-1], base.spec.out_features)

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("a product with the weights of its base layer")

    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        if wanted is None:
            wanted, found = base(row), layer(row)
        else:
            with base._requester.rehearsing(), in_place_of_base(layer, stand_in, multiply=refuse):
                found = layer(row)
        drawn = not all(map(torch.equal, [generator.get_state() for generator in generators], states))
    except Exception as error:
        raise WalksAloneError(f"an adapter that needs more than what its base layer gives ({_kind(layer)})") from error
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    if drawn:
        raise WalksAloneError(f"an adapter that draws random numbers ({_kind(layer)})")
    if calls and not calls[0][0]:
        raise WalksAloneError(f"an adapter that changes its base layer ({_kind(layer)})")
    if calls not in ([], [(True, True)]):
        raise WalksAloneError(f"an adapter that calls its base layer twice, or with other rows ({_kind(layer)})")
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise WalksAloneError(f"an adapter whose results have another shape or dtype ({_kind(layer)})")


def _kind(layer: Any) -> str:
    return f"{type(layer).__module__.split('.')[-2:][0]} {type(layer).__name__}"


def is_replaced(layer: Any) -> bool:
    """Return whether a tuner layer, or a part of it, has a ``forward`` of the tenant's own."""
    return any(has_own_forward(vars(part)) for part in layer.modules() if part is not layer.get_base_layer())


def has_own_forward(state: Mapping[str, Any]) -> bool:
    """Return whether there is a ``forward`` of its own among the attributes of a module."""
    return "forward" in state


def _parts(layer: Any) -> Any:
    if isinstance(layer, lora.Embedding):
        return layer.lora_embedding_A
    return layer.lora_A if isinstance(layer, lora.Linear) else layer.ia3_l
