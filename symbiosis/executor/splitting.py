"""Splitting a model into base layers, which the executor runs, and the clients' part, which is all the rest."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from symbiosis.core.requests import LayerSpec
from symbiosis.core.share import Resident, block_of
from symbiosis.errors import SplitError, UsageError
from symbiosis.executor.choosing import NOT_CHOSEN, allowed_of, choose, served_of
from symbiosis.executor.fingerprint import layer_fingerprints
from symbiosis.executor.layers import BaseLayer, base_layer
from symbiosis.executor.packing import PackedWeight, pack
from symbiosis.executor.parts import part_of
from symbiosis.executor.quantized import is_narrow, is_quantized

log = logging.getLogger(__name__)

Trial = Callable[[Resident], Mapping[str, str]]
"""Returns names of base layers that cannot be served, each with the reason."""


class SplitModel:
    """A frozen model and its base layers.

    Args:
        model: any ``transformers`` model (or other ``nn.Module``). It is frozen, and put in evaluation mode, in place.
        base_layers: what the executor serves. ``"linear"``: every ``nn.Linear``, ``Conv1D`` and bank of experts, apart
            from heads that a tenant trains in full. ``"mlp"``: these, and each MLP as a whole where it can be served
            so, for tenants that change nothing inside it. Otherwise module names or patterns (``"*.q_proj"``,
            ``"lm_head"``); a name that is not a linear layer is served whole.
        packed: whether weights on a CPU are packed; see :mod:`symbiosis.executor.packing`.
        trial: asked which of the layers cannot be served after all.
        allow_weights: names or patterns of base layers whose weights clients may have too, to train them in full.
        shard: this process and the number of all that hold a part of each base layer, if there are several; see
            :mod:`symbiosis.executor.parts`. The other parts are dropped without being read.
        layers: which of the base layers are served here: numbers of blocks, ranges of them, and names or patterns,
            separated by commas, such as ``"0-15,lm_head"``. Other executors serve the others, whose weights are dropped
            without being read. By default all.
        device: where the model is moved to. By default it stays where it is.
        dtype: with ``layers`` or ``shard``, the precision to which the model is converted, with the exceptions that
            transformers makes when it loads a model in it. By default it keeps its own.

    Attributes:
        elsewhere: specs and modules of the base layers that other executors serve. Their weights are on the meta
            device.
        parts: this process's parts of the base layers, whose own weights are on the meta device then.
        fingerprints: fingerprints of the whole base layers, if their weights are on the meta device.
        order: names of all base layers, wherever they are served, in the model's order.
        fraction: the part (0 to 1) of the elements of all base layers' weights that this executor serves.
        allowed: names of base layers whose weights clients in other processes may have.
        packed: how many weights were packed.
        left_out: names of modules that were considered and are not served, each with the reason.

    Raises:
        SplitError: no module matches, or one that does cannot be a base layer.
    """

    def __init__(
        self,
        model: nn.Module,
        base_layers: str | Sequence[str] = "linear",
        *,
        packed: bool = False,
        trial: Trial = lambda _: {},
        allow_weights: Sequence[str] = (),
        layers: str | None = None,
        shard: tuple[int, int] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        divided = layers is not None or shard is not None
        if not divided and device is not None:
            model = model.to(device)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1 or torch.device("meta") in devices:
            found = ", ".join(sorted(map(str, devices))) or "none at all"
            raise SplitError(
                f"the base model must be on one device, with its weights loaded; its parameters are on {found}"
            )
        self.model = model.requires_grad_(False).eval()
        (self.device,) = devices
        chosen, self.left_out = choose(model, base_layers)
        self.layers = self._table(chosen, skip=base_layers in ("linear", "mlp"))
        if refused := trial(self.resident()):
            self.left_out |= refused
            self._keep(name for name in chosen if name not in refused)
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        reasons.pop(NOT_CHOSEN, None)
        if reasons:
            log.info("not served: %s", "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()))
        self.order = [layer.spec.name for layer in self.layers]
        self.elsewhere: list[tuple[LayerSpec, nn.Module]] = []
        self.fraction = 1.0
        self.parts: list[BaseLayer] = []
        self.fingerprints: list[str] | None = None
        if divided:
            if allow_weights:
                raise UsageError("allow_weights is for an executor that holds all weights; leave out layers and shards")
            if layers is not None:
                self._serve_part(layers)
            if shard is not None:
                self._refuse_unknown_quantization()
                self._cut(*shard, device, dtype)
            if shard is None or shard[0] == 0:  # clients are with the first shard
                self._move(device)
                if dtype is not None:
                    self._load_as(dtype)
            if shard is None:
                self.layers = self._table([layer.spec.name for layer in self.layers], skip=False)
        packed = packed and shard is None
        self.packed = pack(model, [layer.module for layer in self.layers if layer.spec.linear]) if packed else 0
        self._refuse_unknown_quantization()
        if not self.layers:
            raise SplitError(
                f"{type(model).__name__} has no base layers to serve: none of its {sum(1 for _ in model.modules())} "
                "modules is an nn.Linear, a transformers Conv1D or a bank of experts"
                + ("" if base_layers == "linear" else f" that matches {base_layers!r}")
            )
        plain = [layer.spec.name for layer in self.layers if layer.spec.linear and not is_quantized(layer.module)]
        self.allowed = allowed_of(plain, allow_weights)

    def _keep(self, names: Iterable[str]) -> None:
        """Leave out all base layers but these."""
        kept = set(names)
        self.layers = [layer for layer in self.layers if layer.spec.name in kept]
        for index, layer in enumerate(self.layers):
            layer.spec = layer.spec._replace(layer=index)

    def _serve_part(self, layers: str) -> None:
        """Keep the base layers of these blocks and names, and drop the weights of the others."""
        served = served_of(self.order, layers)
        if divided := {block_of(name) for name in served} & {block_of(name) for name in {*self.order} - served}:
            raise SplitError(f"layers: {layers!r} divides {min(divided)}; serve blocks whole")
        self.elsewhere = [(layer.spec, layer.module) for layer in self.layers if layer.spec.name not in served]
        sizes = {layer.spec.name: layer.size for layer in self.layers}
        self.fraction = sum(sizes[name] for name in served) / sum(sizes.values())
        self._keep(served)
        self._drop(self.elsewhere)

    def _cut(self, rank: int, count: int, device: str | torch.device | None, dtype: torch.dtype | None) -> None:
        """Keep a part of each base layer, and drop the weights of the others."""
        wanted = None if dtype is None else self._as_loaded(dtype)
        self.fingerprints = []
        for layer in self.layers:
            name = next(iter(dict(layer.module.named_parameters())))
            to = layer.spec.dtype if wanted is None else wanted.get_parameter(f"{layer.spec.name}.{name}").dtype
            layer.spec = layer.spec._replace(dtype=to)
            self.fingerprints += layer_fingerprints([(layer.spec, layer.module)])
            layer.device = torch.device(device or self.device)
            self.parts.append(part_of(layer, rank, count, layer.device, to))
        self._drop([(layer.spec, layer.module) for layer in self.layers])

    def _drop(self, layers: Sequence[tuple[LayerSpec, nn.Module]]) -> None:
        """Put the weights of base layers on the meta device, apart from those that clients hold."""
        linear = {id(module) for spec, module in layers if spec.linear}
        gone = {id(module) for _, whole in layers for module in whole.modules()}
        tied = {id(p) for module in self.model.modules() if id(module) not in gone for p in module._parameters.values()}
        for _, whole in layers:
            for module in whole.modules():
                for leaf, parameter in module._parameters.items():
                    if parameter is None or id(parameter) in tied or (id(module) in linear and leaf == "bias"):
                        continue
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)

    def _move(self, device: str | torch.device | None) -> None:
        """Move what is left of the model."""
        if device is not None:
            self.model._apply(lambda t: t if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
            self.device = torch.empty(0, device=device).device  # with the number of the GPU, as tensors have it

    def _load_as(self, dtype: torch.dtype) -> None:
        """Give what is left of the model the precision in which transformers loads it with ``dtype=``."""
        model: Any = self.model
        wanted = self._as_loaded(dtype)
        for name, buffer in wanted.named_non_persistent_buffers():
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._buffers[leaf] = buffer
        dtypes = {name: tensor.dtype for name, tensor in _tensors(wanted)}
        by_id = {id(tensor): dtypes.get(name, dtype) for name, tensor in _tensors(model)}
        model._apply(lambda tensor: tensor.to(by_id[id(tensor)]) if tensor.is_floating_point() else tensor)
        for config in (model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)):
            if config is not None:
                config.dtype = dtype

    def _as_loaded(self, dtype: torch.dtype) -> Any:
        """Return the model as transformers would load it with ``dtype=``, on the meta device apart from buffers that no
        checkpoint has, such as rotary frequencies: it computes them. Some modules keep fp32."""
        model: Any = self.model
        with torch.device("meta"):
            loaded = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
        for name, buffer in [*loaded.named_non_persistent_buffers()]:
            parent, _, leaf = name.rpartition(".")
            loaded.get_submodule(parent)._buffers[leaf] = torch.empty_like(buffer, device=self.device)
        loaded.initialize_weights()
        fp32 = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
        fp32 |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
        for name, tensor in _tensors(loaded):
            if tensor.is_meta and any(re.search(part, name) for part in fp32):
                tensor.data = tensor.data.float()
        return loaded

    def _refuse_unknown_quantization(self) -> None:
        """Raise SplitError if clients would hold quantized weights, because no base layer can compute with them."""
        known = getattr(getattr(self.model, "config", None), "quantization_config", None) is not None
        known_layers = [*(layer.module for layer in self.layers), *(module for _, module in self.elsewhere)]
        served = {id(inside) for module in known_layers for inside in module.modules()}
        for name, module in self.model.named_modules():
            numbers = [*module._parameters.values(), *module._buffers.values()]
            if id(module) not in served and any(
                t is not None and t.ndim > 1 and _is_quantized(t, known) for t in numbers
            ):
                why = self.left_out.get(name, "it is no nn.Linear").rpartition(" cannot be served: ")[2]
                what = f"{name} ({type(module).__name__}) has quantized weights"
                if why == NOT_CHOSEN:
                    raise SplitError(f"{what}, which clients cannot hold: name all such layers in base_layers")
                types = ", ".join(sorted({type(t).__name__ for t in numbers if t is not None}))
                raise SplitError(
                    f"{what} that cannot be served: {why} (types {types}). Load the model with torchao's int8, int4 or "
                    "fp8, with bitsandbytes' int8 or NF4, or without quantization"
                )

    def _table(self, names: Sequence[str], *, skip: bool) -> list[BaseLayer]:
        """Return the base layers of these names. With ``skip``, leave out modules that cannot be base layers."""
        layers: list[BaseLayer] = []
        dtype = _precision(self.model)
        config: Any = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        for name in names:
            try:
                layers.append(base_layer(len(layers), name, self.model.get_submodule(name), dtype, config))
            except SplitError as error:
                if not skip:
                    raise
                self.left_out[name] = str(error)
        return layers

    def hashes(self) -> list[str]:
        """Return the fingerprint of each base layer."""
        if self.fingerprints is None:
            self.fingerprints = layer_fingerprints([(layer.spec, layer.module) for layer in self.layers])
        return self.fingerprints

    @property
    def specs(self) -> list[LayerSpec]:
        """The layer table: base layers in the order in which the model defines them."""
        return [layer.spec for layer in self.layers]

    def token_layers(self) -> list[int]:
        """Return the layers that every token goes through, or nothing if their names do not show that."""
        config = getattr(self.model, "config", None)
        if config is None or config.is_encoder_decoder or config.get_text_config() is not config:
            return []
        whole = self._whole()
        return [
            spec.layer
            for spec in self.specs
            if not spec.name.startswith(whole) and not _OF_ONE_EXPERT.search(spec.name)
        ]

    def _whole(self) -> tuple[str, ...]:
        """Return what the names of layers inside layers that are served whole begin with."""
        return tuple(f"{spec.name}." for spec in self.specs if not spec.linear)

    def row_parts(self) -> list[float]:
        """Return, for each layer, the part of a token's walk that one row through it is, by the weights that the row is
        multiplied with: those of one expert of a bank."""
        weights = [layer.size // max(layer.spec.experts, 1) for layer in self.layers]
        inside = self._whole()
        walked = self.token_layers() or [spec.layer for spec in self.specs if not spec.name.startswith(inside)]
        total = sum(weights[number] * max(self.layers[number].spec.choices, 1) for number in walked)
        return [weight / total for weight in weights]

    def resident(self) -> Resident:
        """Return the model and its base layers, for clients in this process."""
        return Resident(self.model, [(layer.spec, layer.module) for layer in self.layers])


_OF_ONE_EXPERT = re.compile(r"experts\.\d+\.")
"""In the name of a layer of one of a mixture's experts. Every token goes through shared experts and banks."""


def _precision(model: nn.Module) -> torch.dtype | None:
    """Return the precision of a model's first number, apart from weights that are quantized and modules that
    transformers keeps in fp32, such as BLIP-2's queries; None if there are no numbers."""
    kept: set[str] = set()
    for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        kept |= set(getattr(model, name, None) or ())
    found = {
        name: parameter.dtype
        for name, parameter in model.named_parameters()
        if type(parameter) is nn.Parameter and parameter.is_floating_point() and not is_narrow(parameter)
    }
    usual = (dtype for name, dtype in found.items() if not any(re.search(part, name) for part in kept))
    return next(chain(usual, found.values()), None)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _is_quantized(tensor: torch.Tensor, known: bool) -> bool:
    """Return whether a tensor is quantized; ``known``: whether the model's configuration says that it has such."""
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's, which states the dtype of its rows
        return not isinstance(tensor, PackedWeight)
    return known and (tensor.dtype in (torch.int8, torch.uint8, torch.int32) or is_narrow(tensor))
