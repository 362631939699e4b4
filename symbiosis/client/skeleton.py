"""A client's part of the model, built from the share that an executor offers.

In the executor's process the skeleton is copied from the executor's model. Elsewhere the model is built from its
configuration with parameters on the meta device, then filled with the tensors of the share: a :class:`Hollow` model, of
which every client of the process gets a skeleton.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.pytorch_utils import Conv1D

from symbiosis.client.bounded_build import bounded_build
from symbiosis.client.experts import may_be_bank, virtualize_experts
from symbiosis.client.parameters import SharedParameter, shared_parameter
from symbiosis.client.placeholders import another_layer
from symbiosis.client.requester import Requester
from symbiosis.client.virtlayer import VirtConv1D, VirtLayer, VirtLinear, is_missing
from symbiosis.client.virtmodule import virtualize
from symbiosis.core.requests import LayerSpec
from symbiosis.core.share import MAX_MODEL_NAME, Resident, Share, dtype_named, is_model_name, layers_of, quantization_in
from symbiosis.core.transport import Channel
from symbiosis.errors import PlaceholderError, ShareError, SplitError
from symbiosis.offline import without_hub

_hollows: weakref.WeakKeyDictionary[Share, dict[torch.device, Hollow]] = weakref.WeakKeyDictionary()
"""The hollow models of this process, so that clients of one executor share their tensors."""


def skeleton_for(channel: Channel, requester: Requester) -> nn.Module:
    """Return a new skeleton for the client at this end of a channel, with its VirtLayers on ``requester``.

    Raises:
        ShareError: the installed version of transformers cannot build the model.
    """
    share, device = channel.share, channel.device
    requester.quantization = quantization_in(share)
    if isinstance(share, Resident):
        return make_skeleton(share.model, share.layers, requester, device)
    hollows = _hollows.setdefault(share, {})
    if device not in hollows:
        with torch.inference_mode(False):  # other clients will use it
            hollows[device] = Hollow(share, device)
    return hollows[device].skeleton(requester)


class Hollow:
    """A model without its base layers, built from a share.

    Args:
        share: the model's description and its tensors, whose memory is used as it is.
        device: where the client-side tensors are placed.

    Raises:
        ShareError: the installed version of transformers cannot build the model, or the description is malformed.
    """

    def __init__(self, share: Share, device: torch.device) -> None:
        import transformers

        description = share.description
        self.device = device
        try:
            specs = layers_of(description)
            tied, buffers = dict(description["tied"]), set(description["buffers"])
            names = {*share.tensors, *tied, *(spec.name for spec in specs)}
            with without_hub(), bounded_build(description["config"], len(names)):
                self.model: Any = _build(description)
            self._fill(share.tensors, tied, buffers)
            self._layers = [(spec, self.model.get_submodule(spec.name)) for spec in specs]
            self._check_complete()
            for spec, module in self._layers:
                if spec.linear and sorted(module.weight.shape) != sorted(spec[2:4]):
                    raise ShareError(f"{spec.name} is {list(module.weight.shape)}, not {spec[2:4]}")
                if spec.experts and not may_be_bank(module, spec):
                    raise ShareError(
                        f"{spec.name} is a {type(module).__name__}, which is no bank of {spec.experts} experts"
                    )
                if spec.linear and not isinstance(module, (nn.Linear, Conv1D)):
                    raise ShareError(f"{spec.name} is a {type(module).__name__}, which is no linear layer")
        except ShareError:
            raise
        except Exception as error:  # a provider chooses what transformers is given
            name, version = str(description.get("architecture"))[:100], transformers.__version__
            raise ShareError(
                f"transformers {version} cannot build the executor's model ({name}): {str(error)[:500]}; if the "
                "executor has another version of transformers, install that one"
            ) from error

    def _fill(self, tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], buffers: set[str]) -> None:
        """Put the tensors in their places; ``tied`` maps further names of a parameter to its first name."""
        names: dict[str, str] = {name: name for name in tensors} | dict(tied)
        parameters: dict[str, nn.Parameter] = {}
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

    def _check_complete(self) -> None:
        """Raise ShareError if a parameter has no values and is of no base layer: results would be NaN."""
        served = {id(inside) for _, module in self._layers for inside in module.modules()}
        for name, module in self.model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and id(module) not in served:
                    raise ShareError(
                        f"{name}.{leaf} is neither served nor sent by the executor. If it serves a part of the model, "
                        "give the addresses of all parts, separated by commas"
                    )

    def skeleton(self, requester: Requester) -> nn.Module:
        """Return a new skeleton with its VirtLayers on ``requester``."""
        return make_skeleton(self.model, self._layers, requester, self.device)


def _build(description: Mapping[str, Any]) -> Any:
    """Return a model on the meta device. Raises ShareError, or whatever transformers raises."""
    import transformers

    architecture: Any = getattr(transformers, description["architecture"])
    known: Any = transformers.PreTrainedModel
    if not (isinstance(architecture, type) and issubclass(architecture, known)):
        raise ShareError(f"the executor's model is a {description['architecture']}, which is no transformers model")
    if not is_model_name(name := description["name"]):
        raise ShareError(
            f"the name of the executor's model is {name!r:.300}; at most {MAX_MODEL_NAME} characters are taken"
        )
    config = transformers.CONFIG_MAPPING[description["model_type"]].from_dict(_data_only(description["config"]))
    config._name_or_path = name  # what PEFT writes as an adapter's base model
    with torch.device("meta"):
        model: Any = getattr(architecture, "_from_config")(  # noqa: B009 (mypy does not know the class)
            config,
            attn_implementation=_known_attention(description["attention"]),
            dtype=dtype_named(description["dtype"]),
        )
    if (generation := description["generation_config"]) is not None:
        model.generation_config = transformers.GenerationConfig.from_dict(dict(generation))
    return model.requires_grad_(False).eval()


_NAMES_CODE = {"auto_map", "custom_pipelines"} | {
    start + what + end
    for start in ("", "_")
    for what in ("attn_implementation", "experts_implementation")
    for end in ("", "_internal")
}
"""Entries of a configuration that name code, of which transformers may load some from a hub."""
_ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations of attention that are part of torch and transformers."""


def _data_only(config: Any) -> Any:
    """Return a configuration without the entries that name code."""
    if not isinstance(config, Mapping):
        return config
    return {name: _data_only(value) for name, value in config.items() if name not in _NAMES_CODE}


def _known_attention(name: Any) -> Any:
    """Return the name of an implementation of attention that is installed, None for a model without attention, or a map
    of these by the names of the model's parts. Raises ShareError for any other: for a name that it does not know,
    transformers downloads code."""
    if isinstance(name, Mapping):
        return {part: _known_attention(own) for part, own in name.items()}
    installed = [*_ATTENTION, *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]
    if name is None or name in installed:
        return name
    raise ShareError(
        f"the executor's model uses the attention {str(name)[:100]!r}; installed are {', '.join(installed)}; ask its "
        "provider for another attn_implementation"
    )


def _is_compiled(name: str, module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has replaced the ``forward`` of a module.

    Raises:
        SplitError: another function has. A copy of the module would call the function, and the function the original,
            with the base layers of the executor and without a client's adapter.
    """
    forward = vars(module).get("forward")
    if forward is None or isinstance(forward, MethodType | functools.partial):  # their module is copied with them
        return False
    original = getattr(forward, "_torchdynamo_orig_callable", None)
    if isinstance(original, MethodType) and original.__func__ is type(module).forward:
        return True
    raise SplitError(
        f"forward of {name or 'the model'} ({type(module).__name__}) was replaced by a function, which clients' copies "
        "of the model would share; make it a method (types.MethodType), or use a subclass"
    )


def make_skeleton(
    model: nn.Module, layers: Sequence[tuple[LayerSpec, nn.Module]], requester: Requester, device: torch.device
) -> nn.Module:
    """Return a copy of ``model`` whose ``layers`` are VirtLayers. Frozen parameters share memory with the model.

    Base layers may be on the meta device, as they are in a client that has no weights of them.

    Raises:
        SplitError: the ``forward`` of a module was replaced by a function, which cannot be copied.
    """
    inside = {id(part) for _, module in layers for part in module.modules()}
    compiled = [name for name, each in model.named_modules() if id(each) not in inside and _is_compiled(name, each)]
    memo: dict[int, object] = {}
    shared: dict[int, SharedParameter] = {}
    linears = {id(module): (spec, module) for spec, module in layers if spec.linear}
    wholes = {id(p): spec.name for spec, module in layers if not spec.linear for p in module.parameters()}
    for module in model.modules():
        if id(module) not in linears:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in shared:
                    whole = wholes.get(id(parameter), "")
                    memo[id(parameter)] = shared[id(parameter)] = shared_parameter(parameter, device, whole)
    for id_, (spec, module) in linears.items():
        cls = VirtLinear if isinstance(module, nn.Linear) else VirtConv1D
        memo[id_] = cls(module, spec, requester, device, shared)
    skeleton: Any = copy.deepcopy(model, memo)
    for name in compiled:
        del skeleton.get_submodule(name).forward
    for spec, _ in layers:
        if spec.experts:
            virtualize_experts(skeleton.get_submodule(spec.name), spec, requester)
        elif not spec.linear:
            virtualize(skeleton.get_submodule(spec.name), spec, requester)
    if (generation := getattr(skeleton, "generation_config", None)) is not None:
        # On a GPU, ``generate`` would compile with CUDA graphs, whose results another tenant's graphs overwrite.
        generation.disable_compile = True
    for part in skeleton.modules():
        part.register_state_dict_post_hook(_Protection(skeleton))
        if part._parameters or isinstance(part, VirtLayer):
            part.register_load_state_dict_pre_hook(_fill_in_placeholders)
        for method in ("save_pretrained", "push_to_hub"):
            if hasattr(part, method):  # also those of models inside
                setattr(part, method, _Saving(part, method))
    if hasattr(skeleton, "get_output_embeddings") and isinstance(skeleton.get_output_embeddings(), VirtLayer):
        # With the embeddings instead of the model, which would then refer to itself.
        skeleton.resize_token_embeddings = functools.partial(_resize, skeleton.get_input_embeddings())
    return cast(nn.Module, skeleton)


_init_ddp = DistributedDataParallel.__init__


@functools.wraps(_init_ddp)
def _init_ddp_without_placeholders(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """Have it leave placeholders alone wherever the module has them. It would send their NaN to all processes."""
    missing = [name for name, parameter in module.named_parameters(remove_duplicate=False) if is_missing(parameter)]
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    if missing:
        module._ddp_params_and_buffers_to_ignore = [*before, *missing]
    try:
        _init_ddp(self, module, *args, **kwargs)
    finally:
        if missing:  # weights that the tenant fetches later are its own
            module._ddp_params_and_buffers_to_ignore = before


DistributedDataParallel.__init__ = _init_ddp_without_placeholders  # type: ignore[method-assign]


class _Protection:
    """Leaves placeholders out of a module's state dict, where they would be NaN in a file. Puts shared parameters into
    it as they are, so that a write to one is noticed and reaches this tenant alone. Serves as a post-hook.

    From the state dict of a copied part of the model, such as PEFT's copies for ``modules_to_save``, placeholders are
    left out too, and all else is as usual.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        _name_layer(module, metadata)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if is_missing(parameter):
                state.pop(prefix + name, None)
            elif isinstance(parameter, SharedParameter) and not parameter.own and prefix + name in state:
                state[prefix + name] = parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        copied = memo.get(id(self._model()))
        return _Protection.of_part if copied is None else _Protection(copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (_Protection, "of_part")  # pickling goes on to a VirtLayer, which refuses it and says why

    @staticmethod
    def of_part(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        """Be the post-hook of a copied part."""
        _name_layer(module, metadata)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if is_missing(parameter):
                state.pop(prefix + name, None)


def _name_layer(module: nn.Module, metadata: dict[str, Any]) -> None:
    """Note in a state dict, which lacks the weights of base layers, from which layer it is."""
    if isinstance(module, VirtLayer):
        metadata["base_layer"] = module.spec.name


def _fill_in_placeholders(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object
) -> None:
    """Load a state dict that has no placeholders. To load a placeholder onto itself changes nothing.

    Raises:
        PlaceholderError: the state dict is from another base layer.
    """
    filled = False
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_missing(parameter):
            filled |= state.setdefault(prefix + name, parameter) is parameter
    if filled and isinstance(module, VirtLayer):
        own = module.spec.name
        if (other := metadata.get("base_layer", own)) != own:
            raise another_layer(own, other)


class _Saving:
    """Stands for a skeleton's ``save_pretrained`` or ``push_to_hub``. transformers saves the adapter alone if there is
    one that was added by the model's own ``add_adapter``, and otherwise the whole model, which is refused."""

    def __init__(self, model: nn.Module, method: str) -> None:
        self._model = weakref.ref(model)
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if getattr(model, "_hf_peft_config_loaded", False):
            return getattr(type(model), self._method)(model, *args, **kwargs)
        raise PlaceholderError(
            "this model cannot be saved as a whole: its base layers belong to the executor and their weights here are "
            "placeholders; save the adapter with client.save_adapter(folder), or with save_pretrained of the PEFT model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Saving:
        return _Saving(memo[id(self._model())], self._method)


def _resize(
    embeddings: nn.Embedding,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Embedding:
    """Stand for ``resize_token_embeddings`` of a model whose lm_head is served. Accepts the present size."""
    size = embeddings.weight.shape[0]
    wanted = size if new_num_tokens is None else new_num_tokens
    wanted += -wanted % (pad_to_multiple_of or 1)
    if wanted != size:
        raise PlaceholderError(
            f"the vocabulary of this model has {size} tokens and cannot be resized to {wanted}: its lm_head belongs to "
            "the executor. A tokenizer with fewer tokens needs no other size; for more tokens, resize the base model "
            "before it is served, or train unused tokens with PEFT's trainable_token_indices"
        )
    return embeddings
