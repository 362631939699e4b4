"""A client's skeleton of the model: its module tree, with VirtLayers in place of the base layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from symbiosis.client.parameters import SharedParameter, share
from symbiosis.client.requester import Requester
from symbiosis.client.virtlayer import VirtConv1D, VirtLinear, virtualize
from symbiosis.core.requests import LayerSpec
from symbiosis.errors import PlaceholderError

__all__ = ["make_skeleton"]


def make_skeleton(
    model: nn.Module, layers: Sequence[tuple[LayerSpec, nn.Module]], requester: Requester, device: torch.device
) -> nn.Module:
    """Return a copy of ``model`` whose ``layers`` are VirtLayers. Frozen parameters share memory with the model.

    Base layers may be on the meta device, as they are in a client that has no weights of them.
    """
    memo: dict[int, object] = {}
    shared: dict[int, SharedParameter] = {}
    linears = {id(module): (spec, module) for spec, module in layers if spec.linear}
    for module in model.modules():
        if id(module) not in linears:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in shared:
                    memo[id(parameter)] = shared[id(parameter)] = share(parameter, device)
    for id_, (spec, module) in linears.items():
        cls = VirtLinear if isinstance(module, nn.Linear) else VirtConv1D
        memo[id_] = cls(module, spec, requester, device, shared.get(id(module.weight)))  # type: ignore[arg-type]
    skeleton: nn.Module = copy.deepcopy(model, memo)
    for spec, _ in layers:
        if not spec.linear:
            virtualize(skeleton.get_submodule(spec.name), spec, requester)
    for method in ("save_pretrained", "push_to_hub"):
        if hasattr(skeleton, method):
            setattr(skeleton, method, _refuse_to_save)
    if hasattr(skeleton, "resize_token_embeddings"):
        setattr(skeleton, "resize_token_embeddings", _refuse_to_resize)  # noqa: B010 (not a module or tensor)
    return skeleton


def _refuse_to_save(*args: object, **kwargs: object) -> None:
    raise PlaceholderError(
        "this model cannot be saved as a whole: its base layers belong to the executor and their weights here are "
        "placeholders; save the adapter with client.save_adapter(folder)"
    )


def _refuse_to_resize(*args: object, **kwargs: object) -> None:
    raise PlaceholderError(
        "the vocabulary of this model cannot be resized: its lm_head belongs to the executor; resize the base model "
        "before it is served, or train single tokens with PEFT's trainable_token_indices"
    )
