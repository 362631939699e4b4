"""Loading a base model from a folder or hub id."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.errors import UsageError
from symbiosis.log import get_logger

log = get_logger(__name__)

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""What a model at a hub is called."""


Check = Callable[[nn.Module], object]
"""Function that gets the model on the meta device before its weights are loaded. It raises if they are not needed."""


def load_model(
    model: str | Path, model_class: type[Any] | None = None, check: Check | None = None, **options: Any
) -> Any:
    """Return the model in a folder or at a hub id.

    Args:
        model: folder or hub id.
        model_class: class to load it with; by default the class that its configuration names.
        check: raises if the weights are not needed, because of a wrong name for instance.
        **options: arguments of the class's ``from_pretrained``.

    Raises:
        UsageError: the folder does not exist, has no configuration of a model, has an adapter beside the model, or the
            model consists of code of its own and ``trust_remote_code=True`` is not among the options.
    """
    import transformers

    options.setdefault("trust_remote_code", False)  # transformers would ask on standard input
    folder = Path(model)
    if not str(model):
        raise UsageError("the model is empty; give a folder or hub id")
    if folder.is_dir():
        if not (folder / str(options.get("subfolder", "")) / "config.json").is_file():
            raise UsageError(f"{model} has no config.json; give a folder that save_pretrained of a model has written")
    elif folder.is_file():
        raise UsageError(f"{model} is a file; give the folder of a model that has a config.json")
    elif not HUB_ID.fullmatch(str(model)):  # transformers would ask the hub for it
        raise UsageError(f"there is no folder {model}")
    else:
        log.info("no folder of this name, so it is a hub id", model=str(model))
    try:
        if model_class is None or check is not None:
            config = transformers.AutoConfig.from_pretrained(model, **_config_options(options))
            model_class = model_class or class_of(config, own_code=options["trust_remote_code"])
            if check is not None:
                trust = {"trust_remote_code": options["trust_remote_code"]}
                with torch.device("meta"):
                    automatic = hasattr(model_class, "from_config")
                    check(model_class.from_config(config, **trust) if automatic else model_class(config))
        return _loaded(model_class, model, options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UsageError(
            f"{model} has Python code of its own, which is not run; if you trust it, load the model with "
            "Executor.from_pretrained(model, trust_remote_code=True) in a program"
        ) from error
    except OSError as error:
        if folder.is_dir():
            raise
        raise UsageError(f"there is no folder {model}, and {_why_not(error)}") from error


def _loaded(model_class: Any, model: str | Path, options: dict[str, Any]) -> Any:
    from transformers import PreTrainedModel

    loading: Any = PreTrainedModel.from_pretrained
    if getattr(model_class.from_pretrained, "__func__", None) is loading.__func__:
        loaded, found = model_class.from_pretrained(model, output_loading_info=True, **options)
        missing = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    else:  # of an Auto class, or around that of transformers, perhaps without this option
        loaded, missing = model_class.from_pretrained(model, **options), set()
    if getattr(loaded, "_hf_peft_config_loaded", False):
        raise UsageError(
            f"{model} has an adapter beside the model (adapter_config.json), which clients would not get; merge it "
            "into the model, or move it to another folder"
        )
    if missing:
        log.warning(
            "the checkpoint lacks weights, which transformers has initialised",
            model=str(model),
            weights=sorted(missing)[:20],
        )
        _draw_again(loaded, missing)
    return loaded


@torch.no_grad()
def _draw_again(model: Any, missing: Collection[str]) -> None:
    """Replace the random weights of linear layers by the same ones each time, so that replicas, and an executor that is
    started again, have the same model. Other weights may be those of a formula, such as sinusoids. Torch's generators
    are left alone: clients of the process draw from them."""
    std = float(getattr(model.config, "initializer_range", None) or 0.02)
    for path, module in model.named_modules():
        name = f"{path}.weight"
        if name in missing and type(module) is nn.Linear and not module.weight.is_meta:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            module.weight.copy_(torch.empty(module.weight.shape).normal_(std=std, generator=generator))


def load_tokenizer(model: str | Path, **options: Any) -> Any:
    """Return the tokenizer of a model, given the arguments of :func:`load_model`. No code of its own is run."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, **{**_config_options(options), "trust_remote_code": False})


def _why_not(error: BaseException) -> str:
    """Return why the hub has given no model, in words that say what to do."""
    from huggingface_hub import errors, is_offline_mode

    cause = error.__cause__
    if isinstance(cause, errors.GatedRepoError):
        return "the hub gives this model only to accounts that may have it; log in with `hf auth login`"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return "the hub has no model of this name; log in with `hf auth login` if it is a private one"
    if is_offline_mode():
        return "no model of this name was downloaded before; the hub is not asked, because HF_HUB_OFFLINE is set"
    if isinstance(cause, errors.LocalEntryNotFoundError):
        return "no model of this name was downloaded before; the hub cannot be reached"
    return f"the hub gives no model of this name ({' '.join(str(error).split())})"


def class_of(config: Any, own_code: bool = False) -> Any:
    """Return the class that a configuration names, or transformers' class for causal language models.

    With ``own_code``, a class in the checkpoint's own code comes before one of this name in transformers: the result is
    the Auto class that loads it.
    """
    import transformers

    name = (config.architectures or [""])[0]
    for automatic, reference in (getattr(config, "auto_map", None) or {}).items() if own_code else ():
        if automatic.startswith("AutoModel") and reference.rpartition(".")[2] == name:
            return getattr(transformers, automatic)
    return getattr(transformers, name, transformers.AutoModelForCausalLM)


def _config_options(options: dict[str, Any]) -> dict[str, Any]:
    shared = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")
    return {name: options[name] for name in shared if name in options}


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the precision that a text such as "bf16" or "float32" names.

    Raises:
        UsageError: none does, or torch does not compute in it.
    """
    named = getattr(torch, _SHORT.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if dtype is not None and named not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UsageError(f"dtype is {dtype!r}; name one of float16, bfloat16, float32 and float64, such as 'bf16'")
    return named
