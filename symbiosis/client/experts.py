"""VirtExperts: stands for a bank of experts in a client's model.

A bank holds the weights of all experts of a mixture. The router stays with the client; the bank gets the rows, the
experts of each row and their routing weights, and the executor computes. Autograd sends the same again with the
gradient of the result, and gets the gradients of rows and routing weights.

The forms of banks are in :mod:`symbiosis.executor.experts`. Of Llama 4's grid, only rows that are not zero are sent:
rows of zeros give zeros, and no gradient.

Legend: n rows; i in_features; o out_features; k experts for each row.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn

from symbiosis.client.requester import Requester
from symbiosis.client.virtlayer import is_compiled, is_missing, known, uncompiled
from symbiosis.client.virtmodule import VirtModule, virtualize
from symbiosis.core.requests import Key, LayerSpec, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import PlaceholderError, PrivacyError, RequestError


class VirtExperts(VirtModule):
    """Stands for a bank of experts while the tenant has changed nothing inside it. Otherwise the bank runs in the
    client, which needs the bank's weights: only clients in the executor's process have them."""

    _arguments: tuple[str, ...]
    """Names of the arguments of the module's forward."""

    @property
    def by_place(self) -> bool:
        """Whether the bank takes each row in a place for its expert."""
        return len(self._arguments) < 3

    def _check_can_run_here(self) -> None:
        if self._requester.masked:
            raise PrivacyError(
                f"{self.spec.name} is a bank of experts, whose rows cannot be masked; nothing was sent. Use a model "
                "without experts, or no privacy scheme"
            )
        if any(map(is_missing, self.parameters())):
            raise PlaceholderError(
                f"{self.spec.name} is a bank of experts that was changed here, and its weights stay with the executor; "
                "adapt other layers with target_modules, or use a client in the executor's process"
            )

    def _is_untouched(self) -> bool:
        return "parametrizations" not in self._modules and super()._is_untouched()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_compiled():
            return uncompiled(self, *args, **kwargs)
        if self._requester.masked or not self._is_untouched():
            self._check_can_run_here()
            return cast(torch.Tensor, super(VirtModule, self).forward(*args, **kwargs))
        given = dict(zip(self._arguments, args, strict=False)) | kwargs
        x, *routing = [cast(torch.Tensor, given[name]) for name in self._arguments]
        if len(routing) == 2:
            return self._ask(x, *routing)
        if routing:
            sizes = torch.as_tensor(routing[0], device=x.device)
            chosen = torch.arange(len(sizes), device=x.device).repeat_interleave(sizes)[:, None]
            return self._ask(x, chosen, x.new_ones(chosen.shape))
        used = x.detach().ne(0).any(-1).nonzero()[:, 0]
        if not len(used):
            return x.new_zeros(x.shape[0], self.spec.out_features)
        chosen = (used // (x.shape[0] // self.spec.experts))[:, None]
        y = self._ask(x[used], chosen, x.new_ones(len(used), 1))
        return y.new_zeros(x.shape[0], self.spec.out_features).index_copy(0, used, y)

    def _ask(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the bank's results [..., o] for rows [..., i], their experts [n, k] and routing weights [n, k]."""
        spec = self.spec
        if x.shape[-1] != spec.in_features or chosen.shape != weights.shape:
            raise RequestError(
                f"{spec.name} takes rows [n, {spec.in_features}], experts [n, k] and weights [n, k], not "
                f"{list(x.shape)}, {list(chosen.shape)} and {list(weights.shape)}"
            )
        shape = (*x.shape[:-1], spec.out_features)
        if not x.numel():
            return x.new_empty(shape)
        x = x.to(spec.dtype)
        weights = weights if weights.dtype is spec.dtype else weights.float()
        rows, routing = (
            _plain(x, spec.in_features),
            (_plain(chosen.long(), chosen.shape[-1]), _plain(weights, chosen.shape[-1])),
        )
        key = Key((spec.layer,), Pass.FORWARD, weights.dtype is not spec.dtype, chosen.shape[-1])
        if self._requester.here.rehearsing:
            y = rows.new_zeros(rows.shape[0], spec.out_features)
        else:
            (y,) = self._requester.request(key, self._kind(x), (rows, *routing), spec.name)
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            y = torch.ops.aten._unsafe_view(y, shape)
            return known(y, self._bank_gradients, (x, weights, routing[0]), saved=True)
        return y.view(shape)

    def _bank_gradients(
        self, dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradients of rows and of routing weights, of their shapes."""
        spec, k = self.spec, chosen.shape[-1]
        if self._requester.here.rehearsing:
            return x.new_zeros(x.shape), weights.new_zeros(weights.shape), None
        self._requester.before_backward()
        key = Key((spec.layer,), Pass.BACKWARD, weights.dtype is not spec.dtype, k)
        tensors = (_plain(x, spec.in_features), chosen, _plain(weights, k), _plain(dy, spec.out_features))
        dx, dw = self._requester.request(key, Kind.FINETUNE, tensors, spec.name)
        return dx.view(x.shape), dw.view(weights.shape), None


def _plain(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return a plain matrix [n, width] of a tensor's values."""
    return tensor.detach().reshape(-1, width).as_subclass(torch.Tensor)


def may_be_bank(module: nn.Module, spec: LayerSpec) -> bool:
    """Return whether a module can stand for a bank with this entry in the layer table, which a provider has sent."""
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    arguments = len(inspect.signature(module.forward).parameters)
    counts = (getattr(module, "num_experts", None), getattr(module, "total_experts", None))
    return (
        spec.experts in counts
        and {spec.in_features, spec.out_features} <= sizes
        and 1 <= arguments <= 3
        and not any(isinstance(child, nn.Linear) for child in module.modules())
    )


def virtualize_experts(module: nn.Module, spec: LayerSpec, requester: Requester) -> None:
    """Turn a bank of experts of a client's skeleton into VirtExperts, in place."""
    arguments = tuple(inspect.signature(module.forward).parameters)
    virtualize(module, spec, requester, VirtExperts)
    assert isinstance(module, VirtExperts)
    module._arguments = arguments
