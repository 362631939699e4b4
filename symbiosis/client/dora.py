"""DoRA on base layers whose weights are elsewhere.

DoRA scales the rows of W + s·B·A by the quotient of a trained magnitude and their norms. PEFT computes the norms from
W. Here they follow from what the executor computes, and W stays where it is:

    ‖W_j + s·B_j·A‖² = ‖W_j‖² + 2s·B_j·(A·Wᵀ)_j + s²·B_j·(A·Aᵀ)·B_jᵀ

The norms of W are asked for once, and A·Wᵀ whenever A has changed.

Legend: i in_features; o out_features; r rank; j a row of W.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import transpose
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from symbiosis.client.virtlayer import VirtConv1D, VirtLinear, is_missing
from symbiosis.core.requests import Key, Pass


def serve_dora(model: nn.Module, config: Any) -> None:
    """Have PEFT make the layers of this module on a model, for a configuration that uses DoRA."""
    if getattr(config, "use_dora", False):
        config._register_custom_module({VirtLinear: _adapted, VirtConv1D: _adapted})
        for layer in model.modules():  # those of another adapter
            if type(layer) is lora.Linear and _is_served(layer):
                layer.__class__ = _Linear


def _is_served(layer: Any) -> bool:
    return isinstance(layer.get_base_layer(), VirtLinear | VirtConv1D)


class ServedDora(DoraLinearLayer):  # type: ignore[misc]  # PEFT is not typed
    """PEFT's layer with the magnitudes, for a base layer without a weight."""

    def __init__(self, fan_in_fan_out: bool) -> None:
        super().__init__(fan_in_fan_out)
        self._norms: torch.Tensor | None = None
        """‖W_j‖ [o]."""
        self._product: tuple[torch.Tensor, torch.Tensor] | None = None
        """A copy of A [r, i], and A·Wᵀ [r, o]."""

    def update_layer(self, *, base_layer: Any, scaling: float, **factors: Any) -> None:
        """Set the magnitudes to the norms at the start; ``factors`` are ``lora_A`` [r, i] and ``lora_B`` [o, r]."""
        if not is_missing(base_layer.weight):  # it is the tenant's own
            super().update_layer(base_layer=base_layer, scaling=scaling, **factors)
            return
        down, up = factors["lora_A"], factors["lora_B"]
        norms = self._norms_with(base_layer, down, up, scaling)
        self.weight = nn.Parameter(norms.to(torch.promote_types(base_layer.weight.dtype, down.dtype)))

    def forward(
        self,
        x: torch.Tensor,
        *,
        base_layer: Any,
        scaling: float,
        base_result: torch.Tensor | None = None,
        **factors: Any,
    ) -> torch.Tensor:
        """Return what DoRA adds to the base layer's result, [..., i] → [..., o]."""
        if not is_missing(base_layer.weight):
            found: torch.Tensor = super().forward(
                x, base_layer=base_layer, scaling=scaling, base_result=base_result, **factors
            )
            return found
        down, up = factors["lora_A"], factors["lora_B"]
        norms = self._norms_with(base_layer, down.weight, up.weight, scaling)
        scale = (self.weight / norms.to(x.dtype)).view(1, -1)
        if base_result is None:  # x went through dropout
            base_result = F.linear(x, transpose(base_layer.weight.to(x.dtype), self.fan_in_fan_out))
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        added: torch.Tensor = (scale - 1) * base_result + scale * up(down(x)) * scaling
        return added

    @torch.no_grad()
    def _norms_with(self, base: Any, down: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the norms [o] of the rows of W + s·B·A, for A [r, i] and B [o, r]. No gradients pass through them."""
        if base.rehearsing or down.is_meta:  # their values do not matter
            return up.new_ones(base.spec.out_features)
        if self._norms is None:
            (self._norms,) = _ask(base, Pass.NORMS, down.new_zeros(1, base.spec.in_features))
        kept = self._product
        if kept is None or kept[0].device != down.device or not torch.equal(kept[0], down):
            self._product = kept = down.clone(), _ask(base, Pass.FORWARD_WITHOUT_BIAS, down)
        norms, product = self._norms.to(up.device), kept[1].to(up.device)
        down, up = down.to(product.dtype), up.to(product.dtype)
        cross = (up * product.t()).sum(1)
        added = ((up @ (down @ down.t())) * up).sum(1)
        return (norms.square() + 2 * scaling * cross + scaling**2 * added).clamp_min(0).sqrt()


def _ask(base: Any, pass_: Pass, rows: torch.Tensor) -> torch.Tensor:
    """Return what the base layer computes from rows [n, i], [n, o], in fp32 or in its own wider dtype."""
    narrow = base.spec.dtype.itemsize < 4
    (result,) = base.request(
        Key((base.spec.layer,), pass_, fp32=narrow), rows.to(torch.float32 if narrow else base.spec.dtype)
    )
    return result  # type: ignore[no-any-return]


class _Variant(DoraLinearVariant):  # type: ignore[misc]
    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        dora = ServedDora(module.fan_in_fan_out)
        dora.update_layer(
            base_layer=module.get_base_layer(),
            lora_A=module.lora_A[adapter_name].weight,
            lora_B=module.lora_B[adapter_name].weight,
            scaling=module.scaling[adapter_name],
        )
        module.lora_magnitude_vector[adapter_name] = dora


class _Linear(lora.Linear):  # type: ignore[misc]
    @property
    def lora_variants(self) -> dict[Any, Any]:
        return {**super().lora_variants, ("use_dora",): _Variant}


def _adapted(target: Any, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module:
    """Return the LoRA layer around a VirtLinear or VirtConv1D, or around a LoRA layer that already has one."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    config.fan_in_fan_out = conv = isinstance(base, Conv1D)
    return _Linear(target, adapter_name, config=config, is_target_conv_1d_layer=conv, **kwargs)
