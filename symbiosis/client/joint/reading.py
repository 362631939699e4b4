"""Reads which adapter a client's model has, and notices changes.

A client takes part in joint walks only if its model is the shared skeleton with adapters around base layers and
embeddings. Everything else walks alone. :meth:`Reading.is_current` is asked before each token, so that a client may
train, switch or disable its adapter, or add a hook, between two tokens. Classes of modules, numbers among their
attributes, and a replaced ``forward``, are compared at the first token of each operation.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, ClassVar

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig
from transformers.utils import output_capturing

from symbiosis.client.calls import plain_class
from symbiosis.client.joint.stacks import parameters_of
from symbiosis.client.joint.tuners import (
    WalksAloneError,
    can_be_adapted,
    has_own_forward,
    is_replaced,
    known_adapter,
    try_layer,
)
from symbiosis.client.parameters import SharedParameter, times_owned, values_of
from symbiosis.client.virtlayer import VirtLayer
from symbiosis.client.virtmodule import VirtModule, names_given

_UNLIKE = {"training", "may_have_siblings", "_output_capturing_hooks_installed"}
"""Attributes that may differ between a client's skeleton and the joint one."""
_SENSES = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}
"""What models of images, videos and sound read. Inside another model, they take no part in a walk for a token."""
Settings = tuple[dict[str, Any], list[str | None]]
"""A configuration, as :func:`settings_of` gives it."""


class Reading:
    """A client's model, as it was read.

    Args:
        model: the client's top-level transformers model.
        reference: an unchanged skeleton of the same base model.
        settings: its configuration.

    Attributes:
        reason: why the client walks alone, or None.
        adapted: the tuner layers whose active adapter has an effect, and its name, by the name of the module that they
            wrap; an empty name if what the adapter does is not known, so that its own code is to run.
        runs_own_code: whether there are such adapters.
    """

    def __init__(self, model: Any, reference: Any, settings: Settings) -> None:
        self.adapted: dict[str, tuple[Any, str]] = {}
        self._scalings: list[tuple[dict[str, Any], str, float]] = []
        """Where the factors of the active LoRA adapters are, and their values. PEFT may write to a tensor in place."""
        self._parameters: list[tuple[dict[str, Any], str]] = []
        """Dictionaries with the parameters of the active adapters, and their names there."""
        self._buffers: list[torch.Tensor] = []
        self._embedding = reference.get_input_embeddings()
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        """Modules that are not of an adapter, and those of the skeleton."""
        self._tuners: list[tuple[Any, bool, Any]] = []
        """Tuner layers, whether they are disabled, and a copy of their active adapters."""
        self._shared: list[SharedParameter] = []
        self._states: list[dict[str, Any]] = []
        """Attributes of all modules."""
        self._replaced: list[bool] = []
        """Whether they have a ``forward`` of their own."""
        self._dropouts: list[dict[str, Any]] = []
        """Attributes of the modules that training mode changes."""
        self._seen = _changes()
        self._contents: list[dict[str, Any]] = []
        """Children and parameters of all modules."""
        self._hooks: list[Mapping[int, Any]] = []
        self.reason: str | None = None
        self.runs_own_code = False
        self._untried: list[tuple[Any, Any]] = []
        """Tuner layers whose own code is to run, and their base layers."""
        self._passing = False
        """Whether the reason, such as training mode, can end without a change that :meth:`is_current` detects."""
        try:
            if settings_of(model.config) != settings:
                raise WalksAloneError("a configuration of its own")
            self._read(model, reference, "")
            self._check_state()
            for layer, base in self._untried:
                try_layer(layer, base)
        except WalksAloneError as error:
            self.reason = str(error)
        self._configs = [(vars(config), _copied(vars(config))) for config in _with_nested(model.config)]
        self._replaced = list(map(has_own_forward, self._states))
        self._objects = list(chain.from_iterable(map(_values, self._contents)))
        self._ids, self._types = list(map(id, self._objects)), list(map(type, self._objects))
        self._versions = [buffer._version for buffer in self._buffers]
        self.note_places()

    def lora(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Return A and B of the active LoRA layers that share no parameter, by the name of the module that they
        wrap."""
        found = {
            name: parameters_of(layer, adapter)
            for name, (layer, adapter) in self.adapted.items()
            if adapter and isinstance(layer, lora.Linear)
        }
        uses = Counter(id(parameter) for pair in found.values() for parameter in pair)
        return {name: pair for name, pair in found.items() if all(uses[id(parameter)] == 1 for parameter in pair)}

    def tensors(self) -> list[torch.Tensor]:
        """Return the present values of the active adapters, without copies."""
        return [place[0][place[1]].detach() for place in self._parameters if place[0].get(place[1]) is not None]

    def note_places(self) -> None:
        """Take the present places of the parameters in memory for what was read."""
        self._places = list(map(_place, self._parameters))

    def is_current(self, *, thorough: bool) -> bool:
        """Return whether the model is still what was read.

        A model has a thousand modules, and looking at each of them before each token would take 3 % of a round. So the
        thorough check is left out while nothing was registered in this process: no hook, module or parameter.
        """
        changes = _changes()
        if thorough or changes != self._seen:
            if not self._has_same_parts():
                return False
            self._seen = changes
        if self._passing or any(map(_training, self._dropouts)):
            return False
        if any(now != before and _effective(now) != _effective(before) for now, before in self._configs):
            return False
        for layer, disabled, active in self._tuners:
            if layer._disable_adapters is not disabled or layer._active_adapter != active or layer.merged_adapters:
                return False
        for state, name, value in self._scalings:
            if state["scaling"].get(name) != value:
                return False
        if [buffer._version for buffer in self._buffers] != self._versions:
            return False
        return list(map(_place, self._parameters)) == self._places

    def _has_same_parts(self) -> bool:
        objects = list(chain.from_iterable(map(_values, self._contents)))
        if list(map(id, objects)) != self._ids or list(map(type, objects)) != self._types:
            return False
        if self._is_hooked() or any(map(_training, self._states)) or None in map(_fetch, self._shared):
            return False
        if list(map(has_own_forward, self._states)) != self._replaced:
            return False
        return all(_attributes(module) == _attributes(other) for module, other in self._pairs)

    def _read(self, module: nn.Module, reference: nn.Module, name: str) -> None:
        """Compare a module with the one of the skeleton, and note the tuner layers in it."""
        if isinstance(module, BaseTunerLayer):
            for part in module.modules():
                self._watch(part)
            self._read_tuner(name, module)
            self._read(module.base_layer, reference, name)
            return
        if isinstance(module, AuxiliaryTrainingWrapper):
            for part in module.modules():
                self._watch(part)
            self._read_wrapper(name, module)
            self._read(module.original_module, reference, name)
            return
        self._watch(module)
        self._pairs.append((module, reference))
        if name and not _alike(type(module), type(reference)):
            raise WalksAloneError(f"{type(module).__name__} in place of {type(reference).__name__} at {name}")
        if isinstance(module, VirtLayer) and module.spec != reference.spec:
            raise WalksAloneError(f"{module.spec.name} in place of {name}")
        if module._modules.keys() != reference._modules.keys():
            raise WalksAloneError(f"other modules in {name or type(module).__name__}")
        if _attributes(module) != _attributes(reference):
            raise WalksAloneError(f"other attributes of {name or type(module).__name__}")
        self._read_parameters(name, module, reference)
        before = len(self.adapted)
        for leaf, child in module._modules.items():
            other = reference._modules[leaf]
            if child is not None and other is not None and not self._is_a_sense(other):
                self._read(child, other, f"{name}.{leaf}" if name else leaf)
        if isinstance(module, VirtModule) and len(self.adapted) > before:
            raise WalksAloneError(f"an adapter inside {name}, which is served whole")

    def _is_a_sense(self, module: nn.Module) -> bool:
        """Return whether a module of the skeleton reads images, videos or sound, and no text."""
        if getattr(type(module), "main_input_name", None) not in _SENSES:
            return False
        return all(part is not self._embedding for part in module.modules())

    def _watch(self, module: nn.Module) -> None:
        _Registrations.read.add(module)
        state = module.__dict__
        self._states.append(state)
        if any("dropout" in name and value for name, value in state.items()) or isinstance(module, _DropoutNd):
            self._dropouts.append(state)
        self._contents += [module._modules, module._parameters, module._buffers]
        self._hooks += [module._forward_hooks, module._forward_pre_hooks]

    def _check_state(self) -> None:
        self._hooks += [global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks]
        self._passing = True
        if self._is_hooked():
            raise WalksAloneError("forward hooks")
        if any(map(_training, self._states)):
            raise WalksAloneError("training mode")
        self._passing = False

    def _is_hooked(self) -> bool:
        return any(map(_has_effect, filter(None, self._hooks)))

    def _read_parameters(self, name: str, module: nn.Module, other: nn.Module) -> None:
        if names_given(module._parameters) != names_given(other._parameters):
            raise WalksAloneError(f"other parameters of {name}")
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            shared = other._parameters.get(leaf)
            if not isinstance(parameter, SharedParameter) or parameter.own or shared is None:
                raise WalksAloneError(f"a {leaf} of its own at {name}")
            if not parameter.is_placeholder and values_of(parameter).data_ptr() != values_of(shared).data_ptr():
                raise WalksAloneError(f"a {leaf} of its own at {name}")
            self._shared.append(parameter)
        for leaf, buffer in module._buffers.items():
            theirs = other._buffers.get(leaf)
            if buffer is not None and (theirs is None or not torch.equal(buffer, theirs)):
                raise WalksAloneError(f"a {leaf} of its own at {name}")
            if buffer is not None:
                self._buffers.append(buffer)

    def _read_tuner(self, name: str, layer: Any) -> None:
        self._tuners.append((layer, layer._disable_adapters, _copied(layer._active_adapter)))
        if layer.merged_adapters:
            raise WalksAloneError("a merged adapter")
        if name in self.adapted:  # the code of an adapter around this one runs it
            return
        if layer.disable_adapters and not is_replaced(layer):
            return
        base = layer.get_base_layer()
        if not can_be_adapted(base):
            raise WalksAloneError(f"an adapter on {type(base).__name__}, which is no base layer")
        adapter = known_adapter(layer)
        if adapter is None:
            return
        if not adapter:
            self.runs_own_code = True
            self._untried.append((layer, base))
        elif isinstance(layer, lora.Linear):
            self._scalings.append((layer.__dict__, adapter, float(layer.scaling[adapter])))
            pair = layer.lora_A[adapter], layer.lora_B[adapter]
            self._parameters += [(part._parameters, "weight") for part in pair]
        elif isinstance(layer, lora.Embedding):
            self._scalings.append((layer.__dict__, adapter, float(layer.scaling[adapter])))
            self._parameters += [
                (part._parameters, adapter) for part in (layer.lora_embedding_A, layer.lora_embedding_B)
            ]
        else:
            self._parameters.append((layer.ia3_l._parameters, adapter))
        self.adapted[name] = layer, adapter

    def _read_wrapper(self, name: str, wrapper: Any) -> None:
        """Note a module around another one, of which the client trains a copy, or the embeddings of some tokens."""
        base = wrapper.original_module
        if not can_be_adapted(base):
            raise WalksAloneError(f"a {type(base).__name__} of its own at {name}")
        others: list[Any] = [part for part in wrapper.modules() if isinstance(part, VirtLayer) and part is not base]
        if any(part._own_weight() is None for part in others):
            raise WalksAloneError(f"a copy of {name} without values")
        self.runs_own_code = True
        self._untried.append((wrapper, base))
        self.adapted[name] = wrapper, ""


def settings_of(config: PreTrainedConfig) -> Settings:
    """Return the values of a configuration, and its choices of attention, which are not among them. Choices of code for
    experts have no effect on banks that are served, and ``generate`` changes them on GPUs."""
    return _effective(config.to_dict()), [each._attn_implementation for each in _with_nested(config)]


_NO_EFFECT = {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Values without an effect on a token that is decoded with a cache. Trainers change them, and leave them changed."""


def _effective(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration that have an effect on a token that is decoded with a cache."""
    return {
        key: _effective(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in _NO_EFFECT
    }


def gives_cache(config: PreTrainedConfig) -> bool:
    """Return whether calls that do not say ``use_cache`` return the cache."""
    return all(getattr(each, "use_cache", True) for each in _with_nested(config))


def _with_nested(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and those nested in it, such as that of a text model."""
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *chain.from_iterable(map(_with_nested, nested))]


def _copied(value: Any) -> Any:
    """Return a value with copies of its dictionaries and lists, so that changes inside them are detected."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return list(map(_copied, value)) if isinstance(value, list) else value


class _Registrations:
    """The number of modules, parameters and buffers that were registered on modules that a reading has read."""

    count = 0
    read: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()

    @classmethod
    def note(cls, module: nn.Module, *_: object) -> None:
        if module in cls.read:  # models also make new lists of their layers in each walk
            cls.count += 1


register_module_module_registration_hook(_Registrations.note)
register_module_parameter_registration_hook(_Registrations.note)
register_module_buffer_registration_hook(_Registrations.note)


def _changes() -> tuple[int, int, int]:
    """Return numbers that change when a module, a parameter or a hook is registered, or a shared parameter becomes a
    client's own."""
    return _Registrations.count, RemovableHandle.next_id, times_owned()


def _place(place: tuple[dict[str, Any], str]) -> tuple[Any, ...]:
    """Return which parameter this is and where it lies."""
    parameter = place[0].get(place[1])
    if parameter is None:
        return ()
    return id(parameter), parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and names among a module's attributes, and its forward if the instance has its own."""
    return {
        name: value
        for name, value in module.__dict__.items()
        if (isinstance(value, (int, float, str)) and name not in _UNLIKE) or name == "forward"
    }


def _has_effect(hooks: Mapping[int, Any]) -> bool:
    """Return whether a module has hooks with an effect in a call for logits alone. Those that transformers leaves on
    modules after a call for hidden states or attentions have none."""
    return any(getattr(hook, "__module__", None) != output_capturing.__name__ for hook in hooks.values())


def _alike(one: type[Any], reference: type[Any]) -> bool:
    """Return whether a module's class is the skeleton's, which the joint model extends."""
    one = plain_class(one)
    return issubclass(reference, one) or (issubclass(one, VirtModule) and one.__bases__ == reference.__bases__)


_values: Callable[[dict[str, Any]], Any] = dict.values
_training = itemgetter("training")
_fetch = attrgetter("_fetch")
