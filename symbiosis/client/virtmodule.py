"""VirtModule: stands for a module that is served whole, such as an MLP, in a client's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from symbiosis.client.parameters import SharedParameter
from symbiosis.client.requester import Requester
from symbiosis.client.virtlayer import VirtConv1D, VirtLayer, VirtLinear, is_compiled, is_missing, uncompiled
from symbiosis.core.requests import LayerSpec, Pass
from symbiosis.errors import PlaceholderError, PrivacyError


class VirtModule(VirtLayer):
    """Stands for a module that is served whole, such as an MLP, while the tenant has changed nothing inside it.

    If there is an adapter, a hook, a trainable weight or active dropout inside, or the client's rows are masked, the
    module runs in the client, and its own VirtLayers ask the executor. :func:`virtualize` makes it from the skeleton's
    module, whose class it extends.
    """

    def _watch_inside(self) -> None:
        self._inside = [
            (parent, name, child, _additions(child))
            for parent in self.modules()
            for name, child in parent._modules.items()
            if child is not None
        ]
        self._parts = [m._parameters for m in self.modules() if not isinstance(m, (VirtLinear, VirtConv1D))]
        self._given = [names_given(parameters) for parameters in self._parts]
        self._dropouts = [m for m in self.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]

    def _check_can_run_here(self) -> None:
        """Raise unless all weights inside are the client's, or belong to layers that are served by themselves too."""
        for module in self.modules():
            if not isinstance(module, VirtLayer) and any(map(is_missing, module._parameters.values())):
                why = "is not linear, so its rows cannot be masked" if self._requester.masked else "was changed here"
                raise (PrivacyError if self._requester.masked else PlaceholderError)(
                    f"{self.spec.name} is served whole and {why}, and the linear layers inside are not served; nothing "
                    "was sent. Ask the provider for base_layers='linear' or 'mlp'"
                )

    def _is_untouched(self) -> bool:
        for parent, name, child, additions in self._inside:
            if parent._modules.get(name) is not child or _additions(child) != additions:
                return False
            if "parametrizations" in child._modules:
                return False
            if isinstance(child, (VirtLinear, VirtConv1D)) and (
                child._own_weight() is not None or child._pass() is not Pass.FORWARD
            ):
                return False
        for parameters, given in zip(self._parts, self._given, strict=True):
            if names_given(parameters) != given:
                return False
            for parameter in parameters.values():
                if parameter is not None and not (isinstance(parameter, SharedParameter) and not parameter.own):
                    return False
        return not (self.training and any(m.p > 0 for m in self._dropouts))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_compiled():
            return uncompiled(self, x, *args, **kwargs)
        if self._requester.masked or args or kwargs or not self._is_untouched():
            self._check_can_run_here()
            return cast(torch.Tensor, super().forward(x, *args, **kwargs))
        return self._call(x)


def names_given(parameters: Mapping[str, nn.Parameter | None]) -> set[str]:
    """Return the names of the parameters that there are."""
    return {name for name, parameter in parameters.items() if parameter is not None}


def _additions(module: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes the hooks of a module, and a ``forward`` of its own, from others. The provider's model
    may have some, which the executor runs."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return vars(module).get("forward"), *map(tuple, hooks)


def virtualize(module: nn.Module, spec: LayerSpec, requester: Requester, kind: type[VirtModule] = VirtModule) -> None:
    """Turn a module of a client's skeleton into a VirtModule of this kind, in place."""
    cls = type(module)
    module.__class__ = type(f"Virt{cls.__name__}", (kind, cls), {"__module__": __name__})
    assert isinstance(module, VirtModule)
    module._attach(spec, requester)
    module._watch_inside()
