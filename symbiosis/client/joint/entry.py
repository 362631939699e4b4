"""Which calls of a client's model a joint walk can serve."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from symbiosis.client.requester import on_own_stream
from symbiosis.modes import in_modes

_USED = {"input_ids", "past_key_values", "position_ids", "attention_mask"}


class Inputs(NamedTuple):
    """The token [b, 1] of a call that decodes one token of each sequence, and the cache."""

    ids: torch.Tensor
    cache: Any


def one_token(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
    """Return token and cache of a call that decodes one token of each sequence; None for any other call."""
    ids, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
    if args or ids is None or cache is None or torch.is_grad_enabled() or model.training:
        return None
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[1] != 1:
        return None
    return Inputs(ids, cache)


def _are_zeros(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.any()


def why_alone(ids: torch.Tensor, kwargs: dict[str, Any]) -> str | None:
    """Return what keeps a call for a token [b, 1] from being walked jointly, or None."""
    for name, value in kwargs.items():
        if name in _USED or value is None or value is False:
            continue
        if value is True and name in ("use_cache", "return_dict"):
            continue
        if name == "mm_token_type_ids" and kwargs.get("position_ids") is not None and _are_zeros(value):
            continue  # a token of text; an image's tokens are in the cache
        if name == "logits_to_keep" and type(value) is int and 0 <= value <= 1:
            continue
        return f"the argument {name}"
    attention = kwargs.get("attention_mask")
    if attention is not None and not (isinstance(attention, torch.Tensor) and attention.ndim == 2):
        return "the argument attention_mask"
    if kwargs.get("use_cache") is False or kwargs.get("return_dict") is False:
        return "the argument use_cache or return_dict"
    position = kwargs.get("position_ids")
    if position is None and attention is not None and not attention.all():
        return "a mask without positions"
    if not {each.dtype for each in (ids, position) if each is not None} <= {torch.int, torch.long}:
        return "tokens or positions that are not integers"
    if position is not None and (position.ndim > 3 or position.shape[-2:] not in ((1, 1), ids.shape)):
        return "positions of another shape"
    if in_modes():
        return "a torch mode, such as autocast or a hook"
    if on_own_stream(ids.device):
        return "a CUDA stream of its own"
    return None
