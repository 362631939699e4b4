"""Note what the calls of a client's model are for, route them to its seat, and decide which of them a joint walk can
serve.

The seat of a synchronous client notes when a walk begins and ends (:mod:`symbiosis.client.open_model`).
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from symbiosis.client.parameters import explain_training
from symbiosis.client.requester import Requester, on_own_stream
from symbiosis.core.terms import Kind
from symbiosis.modes import in_modes

_SEAT, _REQUESTER = "_symbiosis_seat", "_symbiosis_requester"
"""Attributes of a client's model."""
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_CACHES = ("past_key_values", "cache_params", "state", "past_buckets_states", "mems")
_USED = {"input_ids", "past_key_values", "position_ids", "attention_mask"}


def enter(model: Any, requester: Requester, seat: Any = None) -> None:
    """Tell a requester of the calls of a model from now on, and let them go to ``seat.forward``, as to that of a
    :class:`~symbiosis.client.joint.decoder.Seat`, if there is a seat."""
    cls: Any = type(model)
    model.__class__ = _with_seat(cls)
    model.__dict__[_REQUESTER] = requester
    if seat is not None:
        model.__dict__[_SEAT] = seat


def leave(model: Any) -> None:
    """Let the calls of a model go to its own forward again."""
    model.__dict__.pop(_SEAT, None)


@functools.cache
def _with_seat(cls: type[Any]) -> type[Any]:
    """Return a model class whose forward asks the seat of the instance first."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seat = self.__dict__.get(_SEAT)
        noted = contextlib.nullcontext()
        if not torch.compiler.is_compiling():
            noted = self.__dict__[_REQUESTER].in_call(kind_of_call(args, kwargs))
        with noted:
            if seat is None:
                output = cls.forward(self, *args, **kwargs)  # looked up now: libraries replace it
            else:
                output = seat.forward(functools.partial(cls.forward, self), args, kwargs)
        return explain_training(self, args, output)  # not as a forward hook, with which the model would walk alone

    def reduce(self: Any, protocol: Any) -> Any:
        """Copy the model as one that has no seat, unless copies have the same seat."""
        seat = self.__dict__.get(_SEAT)
        kept = seat if seat is not None and seat.for_copies else None
        state, *more = super(cls, self).__reduce_ex__(protocol)[2:]
        return _new, (cls, kept), {name: value for name, value in state.items() if name != _SEAT}, *more

    members = {"forward": forward, "__reduce_ex__": reduce}
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _new(cls: Any, seat: Any) -> Any:
    new = cls.__new__(_with_seat(cls))
    if seat is not None:
        new.__dict__[_SEAT] = seat
    return new


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    """Return what the rows of a call are for: a token for each sequence, whose earlier tokens are in a cache, or a
    prompt. None if the call gives no tokens."""
    tokens = next((given for name in _TOKENS if (given := kwargs.get(name)) is not None), args[0] if args else None)
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        return None
    cache = next((given for name in _CACHES if (given := kwargs.get(name)) is not None), None)
    if kwargs.get("encoder_outputs") is not None:  # the first call for a text fills this part
        cache = getattr(cache, "cross_attention_cache", cache)
    return Kind.DECODE if tokens.shape[1] == 1 and cache is not None and not _is_empty(cache) else Kind.PREFILL


def _is_empty(cache: Any) -> bool:
    try:
        length = cache.get_seq_length()
    except (AttributeError, ValueError):  # one of states only
        return False
    return type(length) is int and length == 0  # a static cache counts on the device


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
    if position is not None and (position.ndim > 3 or position.shape[-2:] not in ((1, 1), ids.shape)):
        return "positions of another shape"
    if in_modes():
        return "a torch mode, such as autocast or a hook"
    if on_own_stream(ids.device):
        return "a CUDA stream of its own"
    return None
