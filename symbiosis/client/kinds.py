"""What the rows of a client's forward passes without gradients are for: one token of each text, or a prompt.

A call of the model tells. For a part of the model that is called by itself, as ``generate`` calls an encoder, the rows
tell: several of one sequence belong to a prompt, and flat ones to what the rows before them did, or to a prompt if they
are the first.

DeepSeek expands the latent vectors [sequences, 1, tokens, features] of all earlier tokens for each new one. After a
walk with more of them than the executor believes to be for one token, the next one is stated to be for a prompt.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from symbiosis.core.terms import Kind

_DECODE, _PREFILL = Kind.DECODE, Kind.PREFILL  # on Python 3.11 a member looked up on its class takes six times as long
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_CACHES = ("past_key_values", "cache_params", "state", "past_buckets_states", "mems")


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind | None:
    """Return what the rows of a call are for: a token for each sequence, whose earlier tokens are in a cache, or a
    prompt. None if the call gives no tokens."""
    tokens = next((given for name in _TOKENS if (given := kwargs.get(name)) is not None), args[0] if args else None)
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        return None
    cache = next((given for name in _CACHES if (given := kwargs.get(name)) is not None), None)
    if kwargs.get("encoder_outputs") is not None:  # the first call for a text fills this part
        cache = getattr(cache, "cross_attention_cache", cache)
    return _DECODE if tokens.shape[1] == 1 and cache is not None and not _is_empty(cache) else _PREFILL


def _is_empty(cache: Any) -> bool:
    try:
        length = cache.get_seq_length()
    except (AttributeError, ValueError):  # one of states only
        return False
    return type(length) is int and length == 0  # a static cache counts on the device


@dataclass(slots=True)
class _Call:
    """A call of a model: whose it is, the kind that is stated for its rows, and whether it is for one token."""

    kinds: Kinds
    stated: Kind
    decodes: bool
    large: bool | None = None
    """Whether it had more rows for one token than the executor believes. None before its first request."""


_call: ContextVar[_Call | None] = ContextVar("call", default=None)
"""The call under way in this fiber or thread. Several may call one model at once."""


class _Here(threading.local):
    part = Kind.PREFILL
    """The kind of the latest rows of a part that was called by itself."""
    large = False
    """Whether the latest call that had requests had more rows for one token than the executor believes. A call whose
    token a joint walk makes has no requests."""


class Kinds:
    """The kinds of the rows of one client.

    Attributes:
        most: the largest request, in rows, that the executor believes to be for one token of each of several texts.
    """

    def __init__(self) -> None:
        self.most = math.inf
        self._here = _Here()

    @contextlib.contextmanager
    def in_call(self, kind: Kind | None) -> Iterator[None]:
        """Note that the model is called inside the ``with`` block, with rows of this kind, or None if they are to
        tell."""
        here, decodes = self._here, kind is _DECODE
        stated = _PREFILL if decodes and here.large else kind
        call = None if stated is None else _Call(self, stated, decodes)
        before = _call.set(call)
        try:
            yield
        finally:
            _call.reset(before)
            if call is not None and call.large is not None:
                here.large = call.large
            self.forget()

    def kind_of(self, x: torch.Tensor) -> Kind:
        """Return the kind of a request with the rows x [..., i]."""
        here, call = self._here, _call.get()
        latent = x.ndim == 4 and x.shape[1] == 1
        if call is not None and call.kinds is self:
            call.large = call.large or ((call.decodes or latent) and x.shape[:-1].numel() > self.most)
            return call.stated
        if x.ndim > 2:
            here.part = _PREFILL if x.shape[1:-1].numel() > 1 and not latent else _DECODE
        return here.part

    def __deepcopy__(self, memo: dict[int, Any]) -> Kinds:
        return self  # of the copy of a model

    def forget(self) -> None:
        """Forget the rows of parts that were called by themselves on this thread."""
        self._here.part = Kind.PREFILL
