"""A client's share of a model, as data that can travel (D10): all that a tenant needs who never saw the checkpoint.

It is made of a *description* (configuration, layer table, which parameters are tied: plain data, fit for msgpack or
JSON), *tensors* (embeddings, norms, biases and buffers, never the weight of a base layer) and the tokenizer's files.
From it :class:`Hollow` builds the model without its base layers, and from that each client its skeleton.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.core.requests import LayerSpec
from symbiosis.core.splitting import SplitModel, make_skeleton
from symbiosis.core.virtlayer import Link
from symbiosis.errors import ShareError

__all__ = ["Hollow", "Share", "weights_fingerprint"]

log = logging.getLogger(__name__)

TOKENIZER_BYTES = 64 << 20
"""Most that the tokenizer's files may come to, together."""
_SAMPLE = 256
"""Numbers of each tensor that go into the fingerprint."""


@dataclass(frozen=True)
class Share:
    """What the executor hands to a tenant.

    ``description`` has ``architecture``, ``model_type``, ``config``, ``generation_config``, ``attention``, ``dtype``,
    ``layers``, ``tied``, ``buffers``, ``weights`` and ``fingerprint``; ``tensors`` are by parameter or buffer name;
    ``tokenizer`` maps file names to contents.
    """

    description: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Mapping[str, bytes]

    @classmethod
    def of(cls, split: SplitModel, source: str | Path | None = None) -> Share:
        """The share of a split model; ``source`` is the folder or hub id that it came from, for its tokenizer.

        Raises:
            ShareError: the model is not one that transformers can build from a configuration.
        """
        model: Any = split.model
        config = getattr(model, "config", None)
        if config is None or not hasattr(model, "_from_config"):
            raise ShareError(
                f"{type(model).__name__} is not a transformers model, so clients in other processes cannot build their "
                "share of it; it can be served to clients in this process only"
            )
        tensors, tied = _client_side(split)
        buffers = dict(model.named_buffers())
        tensors.update(buffers)
        generation = getattr(model, "generation_config", None)
        description = {
            "architecture": type(model).__name__,
            "model_type": config.model_type,
            "config": _plain(config.to_dict()),
            "generation_config": None if generation is None else _plain(generation.to_dict()),
            "attention": config._attn_implementation,
            "dtype": _dtype_name(model.dtype),
            "layers": [[*spec[:4], _dtype_name(spec.dtype), spec.bias, spec.linear] for spec in split.specs],
            "tied": tied,
            "buffers": sorted(buffers),
            "weights": weights_fingerprint([(layer.spec, layer.module) for layer in split.layers]),
        }
        description["fingerprint"] = _fingerprint(description, model)
        return cls(description, tensors, _tokenizer_files(source))


class _EmptyParameters:
    """What this thread builds has parameters without memory; buffers are real, for some of them are computed.

    accelerate's ``init_empty_weights`` does the same to all threads, and two at once leave it so for good.
    """

    _lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._original = original = nn.Module.register_parameter
        mine = threading.get_ident()

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and threading.get_ident() == mine:
                parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            original(module, name, parameter)

        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        nn.Module.register_parameter = self._original  # type: ignore[method-assign]
        self._lock.release()


class Hollow:
    """A model without its base layers, built from a share; the skeletons of all clients of a process come from it.

    Args:
        description, tensors: see :class:`Share`; the tensors' memory is used as it is.
        device: of the client-side tensors.

    Raises:
        ShareError: the description is not one that this version of transformers can build.
    """

    def __init__(self, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device):
        import transformers

        try:
            architecture: Any = getattr(transformers, description["architecture"])
            config = transformers.CONFIG_MAPPING[description["model_type"]].from_dict(dict(description["config"]))
            self.layers = [
                LayerSpec(index, name, in_features, out_features, dtype_named(dtype), bias, linear)
                for index, name, in_features, out_features, dtype, bias, linear in description["layers"]
            ]
            dtype = dtype_named(description["dtype"])
            generation = description["generation_config"]
            tied, buffers = dict(description["tied"]), set(description["buffers"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ShareError(
                f"transformers {transformers.__version__} cannot build the executor's model "
                f"({description.get('architecture')}): {error}; is it older than the executor's?"
            ) from error
        known: Any = transformers.PreTrainedModel
        if not (isinstance(architecture, type) and issubclass(architecture, known)):
            raise ShareError(f"the executor's model is a {description['architecture']}, which is no transformers model")
        with _EmptyParameters():
            self.model: Any = getattr(architecture, "_from_config")(  # noqa: B009 (mypy does not know the class)
                config, attn_implementation=description["attention"], dtype=dtype
            )
        if generation is not None:
            self.model.generation_config = transformers.GenerationConfig.from_dict(dict(generation))
        self.model.requires_grad_(False).eval()
        self.device = device
        self._fill(tensors, tied, buffers)

    def _fill(self, tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], buffers: set[str]) -> None:
        names: dict[str, str] = {name: name for name in tensors} | dict(tied)
        parameters: dict[str, nn.Parameter] = {}
        try:
            for name, original in names.items():
                path, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(path)
                tensor = tensors[original].to(self.device)
                if original in buffers:
                    module._buffers[leaf] = tensor
                    continue
                if module._parameters[leaf].shape != tensor.shape:
                    raise ShareError(f"{name} is {list(tensor.shape)}, not {list(module._parameters[leaf].shape)}")
                if original not in parameters:
                    parameters[original] = nn.Parameter(tensor, requires_grad=False)
                module._parameters[leaf] = parameters[original]
            self._modules = [(spec, self.model.get_submodule(spec.name)) for spec in self.layers]
        except (AttributeError, KeyError) as error:
            raise ShareError(
                f"the executor's share does not fit {type(self.model).__name__} of this transformers: {error}"
            ) from error

    def skeleton(self, link: Link) -> nn.Module:
        """A client's share of the model, its base layers replaced by VirtLayers on ``link``."""
        return make_skeleton(self.model, self._modules, link, self.device)


def _client_side(split: SplitModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The parameters that clients need, and which other names stand for one of them."""
    linear = {id(layer.module) for layer in split.layers if layer.spec.linear}
    whole = {
        id(module) for layer in split.layers if not layer.spec.linear for module in layer.module.modules()
    } - linear
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    weights: list[tuple[str, nn.Parameter]] = []
    for path, module in split.model.named_modules(remove_duplicate=False):
        for leaf, parameter in module._parameters.items():
            name = f"{path}.{leaf}" if path else leaf
            if parameter is None or id(module) in whole:
                continue
            if id(module) in linear and leaf == "weight":
                weights.append((name, parameter))
            elif id(parameter) in names:
                tied[name] = names[id(parameter)]
            else:
                names[id(parameter)] = name
                tensors[name] = parameter.data
    tied |= {name: names[id(weight)] for name, weight in weights if id(weight) in names}
    return tensors, tied


def weights_fingerprint(layers: Sequence[tuple[LayerSpec, nn.Module]]) -> str:
    """Tells whether two executors, or an executor and a tenant, have the same base layers: a hash of the layer table
    and of a sample of every parameter of theirs, in the dtype that the table says."""
    found = hashlib.blake2b(digest_size=16)
    for spec, module in layers:
        found.update(repr((*spec[:4], _dtype_name(spec.dtype), *spec[5:])).encode())
        for name, parameter in module.named_parameters():
            _sample(found, name, parameter.detach().to(spec.dtype) if spec.linear else parameter.detach())
    return found.hexdigest()


def _fingerprint(description: Mapping[str, Any], model: nn.Module) -> str:
    """Tells whether two executors serve the same model: a hash of the description and of a sample of every tensor."""
    found = hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16)
    for name, parameter in model.named_parameters():
        _sample(found, name, parameter.detach())
    return found.hexdigest()


def _sample(found: Any, name: str, tensor: torch.Tensor) -> None:
    flat = tensor.reshape(-1)
    step = max(1, flat.numel() // _SAMPLE) | 1  # odd: one that is a multiple of the width would see a single column
    sample = flat[::step][:_SAMPLE].contiguous().cpu()
    found.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
    found.update(sample.view(torch.uint8).numpy().tobytes())


def _tokenizer_files(source: str | Path | None) -> dict[str, bytes]:
    if source is None:
        return {}
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        try:
            AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        except (OSError, ValueError, KeyError, ImportError) as error:
            log.info("%s has no tokenizer that could be shared with clients: %s", source, error)
            return {}
        files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
    if sum(map(len, files.values())) > TOKENIZER_BYTES:
        log.warning("the tokenizer of %s is larger than %d MiB and is not shared", source, TOKENIZER_BYTES >> 20)
        return {}
    return files


def _plain(value: Any) -> Any:
    """The same as JSON would carry it."""
    return json.loads(json.dumps(value, default=str))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """``"bfloat16"`` → ``torch.bfloat16``.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype
