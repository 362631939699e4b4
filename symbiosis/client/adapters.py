"""PEFT on a model whose base weights are elsewhere.

Nearly every PEFT method adds to a base layer's result, and works unchanged. A few read the base weights, which a client
does not have: some initialisations factor them, and some methods transform them in every forward pass. This module
refuses them before they produce NaN: initialisations by name, methods by trying each kind of adapted layer once.

PEFT has no place to register such checks. It calls ``BaseTuner.inject_adapter`` for :func:`add_adapter` and for the
tenant's own code (``get_peft_model``, ``PeftModel.from_pretrained``, ``model.add_adapter``), so importing this module
wraps that function. It also wraps ``BaseTuner.__init__``, in which a few PEFT methods read weights, and the function in
which PEFT finds out what to load for ``modules_to_save``. For models without VirtLayers, the wrappers do nothing.

On base models that bitsandbytes has quantized, plain PEFT has layers of its own, which leave a few methods out without
a word. In a client these methods would work, with other numbers and adapters than plain PEFT's, so they are refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Iterator
from os import PathLike
from typing import Any, NoReturn

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import ModulesToSaveWrapper

from symbiosis.client.dora import serve_dora
from symbiosis.client.experts import VirtExperts
from symbiosis.client.requester import Requester
from symbiosis.client.virtlayer import VirtLayer, is_missing
from symbiosis.errors import PlaceholderError, UsageError
from symbiosis.module_state import modes_kept
from symbiosis.offline import without_hub

log = logging.getLogger(__name__)

_FACTORS_WEIGHTS = ("pissa", "corda", "olora", "mica", "loftq", "lora_ga")
"""LoRA initialisations that start from a factorisation of the base weights, or subtract from them."""


def add_adapter(model: torch.nn.Module, config: PeftConfig) -> Any:
    """Return ``get_peft_model(model, config)``, or refuse a configuration that reads base weights.

    Raises:
        PlaceholderError: the method or its initialisation needs the weights of base layers.
    """
    if not isinstance(config, PeftConfig):
        raise UsageError(f"peft_config is {config!r}; give one of PEFT's configurations, such as LoraConfig(r=8)")
    return get_peft_model(model, config)


def vocabulary_of(model: Any) -> int | None:
    """Return the number of tokens in a model's configuration."""
    return getattr(getattr(model, "config", None), "vocab_size", None)


def save_adapter(model: Any, folder: str | PathLike[str], vocabulary: int | None) -> None:
    """Write the model's adapters as PEFT does, with the embeddings if the base model's ``vocabulary`` was resized."""
    if not isinstance(model, PeftModel):
        raise UsageError(
            "this client has no adapter to save; it was made without a peft_config (model.save_pretrained saves what "
            "model.add_adapter has added)"
        )
    resized = vocabulary_of(model) != vocabulary
    with without_hub(), warnings.catch_warnings():
        # PEFT asks the hub whether the vocabulary was resized.
        warnings.filterwarnings("ignore", "Could not find a config file|Unable to fetch remote file")
        model.save_pretrained(str(folder), save_embedding_layers=resized or "auto")


def load_adapter(model: Any, folder: str | PathLike[str], name: str, trainable: bool, requester: Requester) -> Any:
    """Return the model with the adapter of a PEFT folder loaded and active.

    Raises:
        PlaceholderError: the method needs the weights of base layers.
        UsageError: an adapter of this name has another configuration, or the folder's tensors are not those that its
            configuration has in this model. The model is as it was before, but for values of an adapter of this name.
    """
    if name in getattr(model, "peft_config", ()):
        _check_same_config(model, folder, name)
    training, trained = model.training, {parameter for parameter in model.parameters() if parameter.requires_grad}
    with modes_kept(model):
        with requester.rehearsing(), _kept_on_error(model):  # initial values, which the file replaces, need no request
            model = _load(model, str(folder), name, trainable)
        model.train(training)  # PEFT leaves a new adapter's modules in training mode
    if not trainable:  # PEFT leaves parameters of some methods, and every adapter that is set, trainable
        for path, parameter in model.named_parameters():
            if parameter.requires_grad and (parameter not in trained or name in path.split(".")):
                parameter.requires_grad_(False)
    return model


def _load(model: Any, folder: str, name: str, trainable: bool) -> Any:
    is_new = isinstance(model, PeftModel) and name not in model.peft_config
    if not isinstance(model, PeftModel):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
            model = PeftModel.from_pretrained(model, folder, adapter_name=name, is_trainable=trainable)
    try:
        _check_tensors(model.load_adapter(folder, name, is_trainable=trainable), folder)
    except Exception:
        if is_new and name in model.peft_config:
            model.delete_adapter(name)
        raise
    model.set_adapter(name)
    return model


def _check_tensors(loaded: Any, folder: str) -> None:
    """Raise UsageError if a folder's tensors are not those of the adapter into which PEFT has ``loaded`` them."""
    # Each layer of VB-LoRA names the bank, which the model has once. PEFT puts prompts into their place by itself.
    if missing := [name for name in loaded.missing_keys if "vblora_vector_bank" not in name]:
        raise UsageError(f"the adapter in {folder} is not complete: it lacks {len(missing)} tensors: {missing[:3]}")
    if others := [name for name in loaded.unexpected_keys if name != "prompt_embeddings"]:
        raise UsageError(
            f"the adapter in {folder} is of another model: this one has no place for {len(others)} of its tensors, "
            f"such as {min(others)}"
        )


_MAY_DIFFER = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("init_lora_weights", "init_weights", "init_ia3_weights", "eva_config", "corda_config", "lora_ga_config"),
    *("loftq_config", "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"),
    *("token_dim", "num_layers", "num_attention_heads", "num_transformer_submodules"),  # are the model's by default
}
"""Options of PEFT that have no effect once an adapter has its values."""


def _check_same_config(model: Any, folder: str | PathLike[str], name: str) -> None:
    """Raise UsageError if the adapter of this name has another configuration than that of a folder. PEFT would load the
    tensors alone."""
    loaded = PeftConfig.from_pretrained(str(folder))
    _check_config(model, loaded)
    present, wanted = _options(model.peft_config[name]), _options(loaded)
    if loaded.peft_type == "P_TUNING" or getattr(loaded, "prefix_projection", False):
        # Only while it is trained does the adapter have the encoder, whose results alone are in the folder.
        present["inference_mode"], wanted["inference_mode"] = model.peft_config[name].inference_mode, True
    differ = sorted(each for each in present | wanted if present.get(each) != wanted.get(each))
    if differ:
        options = "; ".join(f"{each} is {wanted.get(each)!r} there and {present.get(each)!r} here" for each in differ)
        raise UsageError(
            f"the adapter in {folder} has another configuration than this client's adapter {name!r}: {options:.500}; "
            "give it another name, or load it into a client without an adapter (made without a peft_config)"
        )


def _options(config: PeftConfig) -> dict[str, Any]:
    options = {name: value for name, value in config.to_dict().items() if name not in _MAY_DIFFER}
    lists = {name: {*value} for name, value in options.items() if "modules" in name and isinstance(value, list)}
    return options | lists


@contextlib.contextmanager
def _kept_on_error(model: torch.nn.Module) -> Iterator[None]:
    """Put the model's modules, and PEFT's configurations, back into their places after an error. The tenant may go on
    with another method."""
    before: list[tuple[dict[str, Any], dict[str, Any]]]
    before = [(module._modules, dict(module._modules)) for module in model.modules()]
    configs = vars(model).get("peft_config")
    if configs is not None:
        before.append((configs, dict(configs)))
    try:
        yield
    except Exception:
        for present, past in before:
            present.clear()
            present.update(past)
        if configs is None:
            vars(model).pop("peft_config", None)
        raise


_init = BaseTuner.__init__
_inject = BaseTuner.inject_adapter


@functools.wraps(_init)
def _init_checked(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Explain why a method is refused that reads base weights before it injects an adapter, as FRoD does."""
    had_adapter = "peft_config" in vars(model)
    try:
        _init(self, model, *args, **kwargs)
    except Exception as error:
        if not had_adapter:
            vars(model).pop("_hf_peft_config_loaded", None)  # transformers' add_adapter has set it
        if not isinstance(error, PlaceholderError) or error.layer is None:  # it is explained already
            raise
        config = self.peft_config[self.active_adapter]
        raise PlaceholderError(_reads_weights(config, "when it is initialised")) from error


@functools.wraps(_inject)
def _inject_checked(self: Any, model: torch.nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    requester = next((layer._requester for layer in model.modules() if isinstance(layer, VirtLayer)), None)
    if requester is None:
        _inject(self, model, adapter_name, *args, **kwargs)
        return
    config = self.peft_config[adapter_name]
    _check_config(model, config)
    _check_quantization(config, requester.quantization)
    serve_dora(model, config)
    had_values = {parameter for parameter in model.parameters() if not is_missing(parameter)}
    with _kept_on_error(model):
        try:
            _inject(self, model, adapter_name, *args, **kwargs)
        except Exception as error:
            # GLoRA asks for layers whose class is nn.Linear itself.
            if str(error).startswith("Target module VirtLinear(") or _reads_a_weight(error):
                raise PlaceholderError(_reads_weights(config, "when it is initialised")) from error
            raise
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or parameter.is_meta or parameter in had_values:
                continue
            if torch.isnan(parameter).any():
                raise PlaceholderError(_reads_weights(config, f"to initialise {name}"))
        _try_layers(model, config, requester, had_values)
    for method in ("merge_adapter", "merge_and_unload"):
        if hasattr(self, method):
            setattr(self, method, _refuse_to_merge)


_load_map = ModulesToSaveWrapper.adapter_state_dict_load_map


@functools.wraps(_load_map)
def _load_map_without_placeholders(self: Any, adapter_name: str) -> Any:
    """Name what an adapter's copy of a module takes from a file. PEFT and transformers look for the names in the copy's
    state dict, which lacks placeholders, so these are replaced by values of the copy's own, NaN until they are loaded.
    """
    if adapter_name in self._adapters:
        for parameter in self.modules_to_save[adapter_name].parameters():
            if is_missing(parameter):
                parameter.copy_(torch.full(parameter.shape, math.nan))
    return _load_map(self, adapter_name)


BaseTuner.__init__ = _init_checked
BaseTuner.inject_adapter = _inject_checked
ModulesToSaveWrapper.adapter_state_dict_load_map = _load_map_without_placeholders


def _reads_a_weight(error: BaseException | None) -> bool:
    """Return whether an error comes from code that needs the values of a base layer's weight."""
    while error is not None and not (isinstance(error, PlaceholderError) and error.layer is not None):
        error = error.__cause__ or error.__context__
    return error is not None


def _check_config(model: torch.nn.Module, config: Any) -> None:
    init = getattr(config, "init_lora_weights", None)
    if isinstance(init, str) and init.lower().startswith(_FACTORS_WEIGHTS):
        raise PlaceholderError(
            f"init_lora_weights={init!r} factors the base weights, which a client does not have; "
            "use True, 'gaussian', 'orthogonal' or 'eva', or train where the weights are, save the adapter with "
            "path_initial_model_for_weight_conversion, and load it"
        )
    for target in getattr(config, "target_parameters", None) or ():
        for name, module in model.named_modules():
            if any(_ends(f"{name}.{leaf}", target) for leaf, p in module._parameters.items() if is_missing(p)):
                bank = isinstance(module, VirtExperts)
                remedy = "use a client in the executor's process" if bank else "name the layer in target_modules"
                raise PlaceholderError(
                    f"target_parameters has {target!r}, but the weights of base layer {name} are not with the client; "
                    f"{remedy}"
                )


def _check_quantization(config: Any, quantization: str | None) -> None:
    """Raise UsageError for a method that plain PEFT leaves out on a base model with this quantization."""
    if quantization != "bitsandbytes":
        return
    why = "rounds the scales of UNILORA to integers, most of them to 0, on" if config.peft_type == "UNILORA" else ""
    for option in ("monteclora_config", "use_bdlora"):
        if getattr(config, option, None):
            why = f"ignores {option} on"
    if why:
        raise UsageError(
            f"plain PEFT {why} the layers of a base model in bitsandbytes' int8 or NF4, so the adapter would not work "
            "there as it does here; use plain LoRA, or another base model, such as one in torchao's int8"
        )


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _try_layers(model: torch.nn.Module, config: Any, requester: Requester, had_values: set[torch.nn.Parameter]) -> None:
    """Try one adapted layer of each kind on a row of ones, with zeros as the base layer's result. ``had_values`` has
    the parameters with values of before the configuration was applied."""
    tried = set()
    with requester.rehearsing(), torch.no_grad():
        for name, layer in model.named_modules():
            if not isinstance(layer, BaseTunerLayer) or type(layer) in tried:
                continue
            base = layer.get_base_layer()
            if isinstance(base, VirtExperts) and any(map(is_missing, base.parameters())):
                raise PlaceholderError(
                    f"the configuration adapts the experts of {base.spec.name}, whose weights are not with the client; "
                    "name layers of the attention in target_modules (PEFT takes 'all-linear', and names such as "
                    "'gate_proj', for experts too), or use a client in the executor's process"
                )
            if not isinstance(base, VirtLayer) or isinstance(base, VirtExperts):
                continue
            if any(parameter.is_meta for parameter in layer.parameters()):
                continue  # low_cpu_mem_usage: values are loaded later; until then results are uninitialised memory
            if not all(parameter.isfinite().all() for parameter in layer.parameters() if parameter in had_values):
                continue  # another adapter has diverged
            tried.add(type(layer))
            weight = next(base.parameters())
            try:
                row = torch.ones(1, 1, base.spec.in_features, dtype=base.spec.dtype, device=weight.device)
                with modes_kept(layer):
                    if not torch.isfinite(layer.eval()(row)).all():
                        raise PlaceholderError("its result is NaN")
            except PlaceholderError as error:
                raise PlaceholderError(_reads_weights(config, f"in the forward pass of {name}")) from error
            except Exception as error:  # noqa: BLE001 (some layers need further arguments, such as POLY's task_ids)
                log.debug("%s was not tried: %s", name, error)


def _reads_weights(config: Any, when: str) -> str:
    method = getattr(config.peft_type, "value", config.peft_type)
    remedy = (
        "leave out the option that needs them (such as kasa_config, or trainable_token_indices of a base layer)"
        if method == "LORA"
        else "choose a method that adds to what a layer gives, such as LORA, IA3, LOHA, VERA, OFT or PREFIX_TUNING"
    )
    return f"{method} reads the weights of base layers {when}, and a client does not have them; {remedy}"


def _refuse_to_merge(*args: object, **kwargs: object) -> NoReturn:
    raise PlaceholderError(
        "the base weights belong to the executor, so nothing can be merged into them here; to merge an adapter, save "
        "it and load it where the base model is"
    )
