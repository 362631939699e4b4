"""PEFT on a model whose base weights are elsewhere."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from symbiosis.errors import PlaceholderError, UsageError

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["add_adapter", "load_adapter", "save_adapter"]

_FACTORS_WEIGHTS = ("pissa", "corda", "olora", "mica", "loftq", "eva", "lora_ga")
"""LoRA initialisations that start from a factorisation of the base weights, or subtract from them."""


def add_adapter(model: torch.nn.Module, config: PeftConfig) -> Any:
    """``get_peft_model``, refusing what would read base weights.

    Raises:
        PlaceholderError: the method or its initialisation needs the weights of base layers.
    """
    from peft import get_peft_model

    _check(config)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and torch.isnan(parameter).any():
            raise PlaceholderError(
                f"{config.peft_type}: {name} was initialised from base weights, which a client does not have; "
                "choose an initialisation that does not read them"
            )
    return adapted


def _check(config: Any) -> None:
    init = getattr(config, "init_lora_weights", None)
    if isinstance(init, str) and init.lower().startswith(_FACTORS_WEIGHTS):
        raise PlaceholderError(
            f"init_lora_weights={init!r} factors the base weights, which a client does not have; "
            "use True, 'gaussian' or 'orthogonal', or initialise where the weights are and load the adapter"
        )
    if getattr(config, "use_dora", False):
        raise PlaceholderError(
            "use_dora=True reads the norms of the base weights, which a client does not have; use LoRA or rsLoRA"
        )


def save_adapter(model: Any, folder: str | PathLike[str]) -> None:
    """Write the model's adapters as PEFT does."""
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise UsageError("this client has no adapter to save; it was made without a peft_config")
    model.save_pretrained(str(folder))


def load_adapter(model: Any, folder: str | PathLike[str], name: str, trainable: bool) -> Any:
    """The model with the adapter of a PEFT folder loaded and active."""
    from peft import PeftConfig, PeftModel

    _check(PeftConfig.from_pretrained(str(folder)))
    training = model.training
    if isinstance(model, PeftModel):
        model.load_adapter(str(folder), adapter_name=name, is_trainable=trainable)
        model.set_adapter(name)
    else:
        model = PeftModel.from_pretrained(model, str(folder), adapter_name=name, is_trainable=trainable)
    if not trainable:  # PEFT leaves some methods' parameters, and every adapter that is set, trainable
        model.requires_grad_(False)
    return model.train(training)  # and a new adapter's modules in training mode
