"""Splitting a model into base layers, which the executor runs, and the clients' part, which is all the rest."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from symbiosis.core.requests import LayerSpec
from symbiosis.core.share import Resident
from symbiosis.errors import SplitError, UsageError
from symbiosis.executor.layers import BaseLayer, base_layer, is_linear
from symbiosis.executor.packing import pack

MLP_NAMES = ("mlp", "feed_forward", "ffn", "ff", "fc")
"""Names that models of transformers give to the MLP of a block."""


class SplitModel:
    """A frozen model and its base layers.

    Args:
        model: any ``transformers`` model (or other ``nn.Module``). It is frozen, and put in evaluation mode, in place.
        base_layers: what the executor serves. ``"linear"``: every ``nn.Linear`` and ``Conv1D``. ``"mlp"``: these, and
            each MLP as a whole, for tenants that change nothing inside it. Otherwise module names or patterns
            (``"*.q_proj"``, ``"lm_head"``); a name that is not a linear layer is served whole.
        packed: whether weights on a CPU are packed; see :mod:`symbiosis.executor.packing`.

    Attributes:
        packed: number of packed weights.

    Raises:
        SplitError: no module matches, or one that does cannot be a base layer.
    """

    def __init__(self, model: nn.Module, base_layers: str | Sequence[str] = "linear", *, packed: bool = False) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1 or torch.device("meta") in devices:
            found = ", ".join(sorted(map(str, devices))) or "none at all"
            raise SplitError(
                f"the base model must be on one device, with its weights loaded; its parameters are on {found}"
            )
        self.model = model.requires_grad_(False).eval()
        (self.device,) = devices
        chosen = {name: model.get_submodule(name) for name in _choose(model, base_layers)}
        self.packed = pack(model, filter(is_linear, chosen.values())) if packed else 0
        self.layers: list[BaseLayer] = [
            base_layer(index, name, module) for index, (name, module) in enumerate(chosen.items())
        ]
        if not self.layers:
            raise SplitError(
                f"{type(model).__name__} has no base layers to serve: none of its {_count(model)} modules "
                "is an nn.Linear or a transformers Conv1D"
                + ("" if base_layers == "linear" else f" that matches {base_layers!r}")
            )

    @property
    def specs(self) -> list[LayerSpec]:
        """The layer table: base layers in the order in which the model defines them."""
        return [layer.spec for layer in self.layers]

    def token_layers(self) -> list[int]:
        """Return the layers that every token goes through, or nothing if their names do not show that."""
        config = getattr(self.model, "config", None)
        if config is None or config.is_encoder_decoder or config.get_text_config() is not config:
            return []
        whole = tuple(f"{spec.name}." for spec in self.specs if not spec.linear)
        return [spec.layer for spec in self.specs if not spec.name.startswith(whole) and "expert" not in spec.name]

    def resident(self) -> Resident:
        """Return the model and its base layers, for clients in this process."""
        return Resident(self.model, [(layer.spec, layer.module) for layer in self.layers])


def _choose(model: nn.Module, base_layers: str | Sequence[str]) -> Iterable[str]:
    """Return the names of the modules to serve, each object once, in the order in which the model defines them."""
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if is_linear(module)]
    if base_layers == "linear":
        return linear
    if base_layers == "mlp":
        whole = [name for name, module in modules.items() if _is_mlp(name, module)]
        chosen = {*linear, *whole}
        return [name for name in modules if name in chosen]
    patterns = [base_layers] if isinstance(base_layers, str) else list(base_layers if _is_several(base_layers) else ())
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(
            f"base_layers is {base_layers!r}; give 'linear', 'mlp', or one or more module names or patterns"
        )
    names = [name for name in modules if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SplitError(
                f"base_layers: no module matches {pattern!r}; module names look like {', '.join(map(repr, linear[:3]))}"
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _is_several(value: object) -> bool:
    return isinstance(value, Iterable)


def _is_mlp(name: str, module: nn.Module) -> bool:
    """Return whether a module is named like an MLP and has two or more linear layers and no other parameters."""
    inside = [child for child in module.modules() if child is not module]
    linears = [child for child in inside if is_linear(child)]
    return (
        name.rpartition(".")[2] in MLP_NAMES
        and len(linears) >= 2
        and all(child in linears or not any(True for _ in child.parameters()) for child in inside)
    )


def _count(model: nn.Module) -> int:
    return sum(1 for _ in model.modules())
