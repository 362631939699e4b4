"""The share of a split model: a client's part of it, as data for clients in other processes."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.core.share import Share, dtype_name, fingerprint_of, quantization_of
from symbiosis.errors import ShareError
from symbiosis.executor.fingerprint import tensors_fingerprint
from symbiosis.executor.loading import HUB_ID
from symbiosis.executor.packing import plain
from symbiosis.executor.splitting import SplitModel

log = logging.getLogger(__name__)

TOKENIZER_BYTES = 64 << 20
"""Largest total size of the tokenizer's files."""
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
"""Entries of configurations that may differ between copies of one checkpoint."""


def share_of(split: SplitModel, tokenizer: Callable[[], Any] | None = None, name: str | None = None) -> Share:
    """Return the share of a split model.

    Args:
        split: the model and its base layers.
        tokenizer: loads the model's tokenizer; None if it has none.
        name: the model's name for clients; by default its hub id, or the last part of its folder.

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
    _check_as_built(split)
    tensors, tied, buffers = client_side(split)
    generation = getattr(model, "generation_config", None)
    hashes = split.hashes()
    description = {
        "architecture": type(model).__name__,
        "model_type": config.model_type,
        "config": _without(_plain(config.to_dict()), "quantization_config", *_NOT_THE_MODEL),
        "generation_config": None if generation is None else _without(_plain(generation.to_dict()), *_NOT_THE_MODEL),
        "attention": _attention(config),
        "dtype": dtype_name(model.dtype),
        "layers": [[*spec[:4], dtype_name(spec.dtype), *spec[5:]] for spec in split.specs],
        "tied": tied,
        "buffers": sorted(buffers),
        "allowed": sorted(split.allowed),
        "layer_weights": hashes,
        "weights": fingerprint_of(hashes),
        "client_weights": tensors_fingerprint(tensors),
    }
    if split.elsewhere:
        description["order"] = split.order
    if (quantization := quantization_of(model.modules())) is not None:
        description["quantization"] = quantization
    description["fingerprint"] = fingerprint_of(description)
    description["name"] = name_of(model, name)
    return Share(description, tensors, _tokenizer_files(description["name"], tokenizer))


def _attention(config: Any) -> Any:
    """Return a configuration's implementation of attention or, if it has parts, that of each part by the part's name,
    and its own under "", as transformers takes them."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    of_parts = {name: _attention(part) for name, part in parts.items() if hasattr(part, "sub_configs")}
    return {"": config._attn_implementation, **of_parts} if of_parts else config._attn_implementation


def _check_as_built(split: SplitModel) -> None:
    """Raise ShareError if the model is of a class of its own, or a module of the clients' part has hooks or a
    ``forward`` of its own: clients in other processes build this part from the configuration and the class's name."""
    import transformers

    if getattr(transformers, (name := type(split.model).__name__), None) is not type(split.model):
        raise ShareError(
            f"the model's class {type(split.model).__module__}.{name} is not one of transformers, so clients in other "
            "processes cannot build their share of it; it can be served to clients in this process only"
        )
    layers = [*(layer.module for layer in split.layers), *(module for _, module in split.elsewhere)]
    served = {id(part) for layer in layers for part in layer.modules()}
    for name, module in split.model.named_modules():
        places = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
        hooks = [hook for place in places for hook in place.values()]
        changes = any("require_grads" not in getattr(hook, "__qualname__", "") for hook in hooks)  # transformers' own
        if id(module) not in served and (changes or _has_own_forward(module)):
            raise ShareError(
                f"{name or 'the model'} ({type(module).__name__}) has hooks or a forward of its own, which would not "
                "reach clients in other processes; remove them, or serve clients of this process only"
            )


def _has_own_forward(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    changes_nothing = hasattr(forward, "_torchdynamo_orig_callable") or hasattr(module, "_hf_hook")  # of accelerate
    return forward is not None and not changes_nothing


def name_of(model: Any, name: str | None) -> str:
    """Return a model's name for clients and operators: ``name``, or its hub id, or the last part of its folder, or an
    empty text."""
    return public_name(str(getattr(getattr(model, "config", None), "_name_or_path", ""))) if name is None else name


def public_name(source: str) -> str:
    """Return a hub id as it is, and of a folder's path the last part."""
    if source and (Path(source).is_dir() or not HUB_ID.fullmatch(source)):
        return Path(source).resolve().name
    return source


def client_side(split: SplitModel) -> tuple[dict[str, torch.Tensor], dict[str, str], set[str]]:
    """Return the tensors that clients get, by name; a map of further names of the same tensors; and which of the names
    are buffers."""
    layers = [*((layer.spec, layer.module) for layer in split.layers), *split.elsewhere]
    linear = {id(module) for spec, module in layers if spec.linear}
    whole = {id(inside) for spec, module in layers if not spec.linear for inside in module.modules()} - linear
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
                if path in split.allowed and id(parameter) not in names:
                    names[id(parameter)] = name
                    tensors[name] = plain(parameter.data)
            elif id(parameter) in names:
                tied[name] = names[id(parameter)]
            else:
                names[id(parameter)] = name
                tensors[name] = parameter.data
    tied |= {name: names[id(w)] for name, w in weights if id(w) in names and name not in tensors}
    buffers = dict(split.model.named_buffers())
    return tensors | buffers, tied, set(buffers)


def _tokenizer_files(name: str, load: Callable[[], Any] | None) -> dict[str, bytes]:
    """Return the files of the tokenizer of a model with this name; none if it has no tokenizer, or it is too large."""
    if load is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        try:  # several chat templates would otherwise be in a folder of their own
            load().save_pretrained(folder, save_jinja_files=False)
        except Exception as error:  # noqa: BLE001 (whatever tokenizers and transformers raise for a file)
            log.info("%s has no tokenizer to share with clients: %s", name, error)
            return {}
        files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
    if sum(map(len, files.values())) > TOKENIZER_BYTES:
        log.warning("the tokenizer of %s is larger than %d MiB and is not shared", name, TOKENIZER_BYTES >> 20)
        return {}
    return files


def _without(value: Any, *names: str) -> Any:
    """Return a configuration without the entries of these names, also in the configurations inside it."""
    if not isinstance(value, dict):
        return value
    return {name: _without(entry, *names) for name, entry in value.items() if name not in names}


def _plain(value: Any) -> Any:
    """Return a configuration as JSON represents it. Raises ShareError if JSON cannot."""
    try:
        return json.loads(json.dumps(value, default=str))
    except TypeError as error:  # sequence_bias may have tuples as keys, in place of a list
        raise ShareError(f"the model's configuration cannot be sent to clients in other processes: {error}") from error
