"""Attention of a joint walk: each row attends to its own client's cache.

The walk runs the model's own code once, on rows [N, 1, ...] of several clients. Two extension points of transformers
put each client's cache in its place: the joint model's configuration names an attention implementation of this module,
and its cache is a :class:`JointCache`. Both call what the client's own walk would call, client by client: the client's
cache, and the model's own attention and mask functions. A row thus gets the bits that it would get alone, whatever the
lengths of the caches, and no keys or values are copied or pooled (docs/decisions/0026-joint-decoding.md).

Some models keep latent vectors and expand them to keys and values for each new token (DeepSeek). They get the vectors
of all clients behind each other, as those of one long text, and what they make of them is divided again.

Layers of linear attention, state spaces and short convolutions keep states of fixed size instead. Their code computes
all rows at once, on the clients' states behind each other.

Legend: N rows; n rows of one client, one for each of its sequences; H heads; D features of a head; L cached tokens of
one client.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from symbiosis.client.joint.pool import PooledLayer

T = TypeVar("T")
NAME = "symbiosis_joint"
"""The attention implementation of a joint model."""
INNER = ("sdpa", "eager")
"""Implementations that are called client by client."""


class JointError(Exception):
    """A model cannot be walked jointly."""


class JointCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The caches of the clients of one walk, in the order of its rows.

    Args:
        caches: the clients' caches, of equal structure (:func:`structure`).
        sizes: n of each client.
        attention: the clients' 2D attention masks, [n, L + 1] each, or None.
        inner: the attention implementation of the clients' models.
        latent: indices of the layers that keep latent vectors.
    """

    def __init__(
        self,
        caches: Sequence[Any],
        sizes: Sequence[int],
        attention: Sequence[torch.Tensor | None],
        inner: str,
        latent: Collection[int],
    ) -> None:
        self.layers = caches[0].layers  # for code that asks which layers have a sliding window
        self.layer_class_to_replicate = None
        self.offloading = False
        self.caches = caches
        self.sizes = list(sizes)
        self.attention = attention
        self.inner = inner
        self.errors: dict[int, Exception] = {}
        """Errors of single clients, by their places in the walk."""
        self.was_updated = False
        """Whether the walk has changed the clients' caches."""
        self._kept: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        """Keys and values of all clients, by the id of the new keys that the model has in hand."""
        self._latent = latent
        self.texts: list[tuple[int, int]] = []
        """n and L of each client whose latent vectors the model has in hand."""
        self._states: dict[tuple[str, int, int], torch.Tensor] = {}
        """States [N, ...] that the walk has used, by kind, layer and number."""
        self._masked_layer = 0
        """The layer whose mask is made."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new keys and values [N, H, 1, D] to the clients' caches, and return them as they are. Of latent
        vectors, return all that the caches have, [1, 1, ΣnL, D]."""
        self.was_updated = True
        found = []
        keys, values = key_states.split_with_sizes(self.sizes), value_states.split_with_sizes(self.sizes)
        clients = zip(self.caches, keys, values, strict=True)
        for place, (cache, key, value) in enumerate(clients):
            found.append(self.for_client(place, cache.update, key, value, layer_idx) or (key, value))
        if layer_idx in self._latent:
            self._kept, self.texts = {}, [(len(key), key.shape[2]) for key, _ in found]
            key_states, value_states = [
                torch.cat([one.reshape(1, 1, -1, one.shape[3]) for one in all_], 2) for all_ in zip(*found, strict=True)
            ]
        else:
            self._kept, self.texts = {id(key_states): (key_states, found)}, []
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the clients' states of a convolution as one tensor [N, ...], which the model's code may change."""
        return self._joint_state("conv_states", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the clients' recurrent states as one tensor [N, ...], which the model's code may change."""
        return self._joint_state("recurrent_states", layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take the clients' new recurrent states [N, ...]."""
        self._states["recurrent_states", layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise JointError("its convolutions keep more than a state")

    def keep_states(self) -> None:
        """Give each client its new states, after the walk."""
        self.was_updated = self.was_updated or bool(self._states)
        for (kind, layer, number), states in self._states.items():
            for place, (cache, state) in enumerate(zip(self.caches, states.split_with_sizes(self.sizes), strict=True)):
                self.for_client(place, getattr(cache.layers[layer], kind)[number].copy_, state)

    def _joint_state(self, kind: str, layer: int, number: int) -> torch.Tensor:
        found = [
            self.for_client(place, getattr(cache.layers[layer], kind).__getitem__, number)
            for place, cache in enumerate(self.caches)
        ]
        like = next(state for state in found if state is not None)
        states = torch.cat(
            [
                like.new_zeros(size, *like.shape[1:]) if state is None else state
                for size, state in zip(self.sizes, found, strict=True)
            ]
        )
        self._states[kind, layer, number] = states
        return states

    def drop(self, place: int, error: Exception) -> None:
        """Ignore a failed client from now on; the results of its rows are discarded."""
        self.errors.setdefault(place, error)

    def for_client(self, place: int, do: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Do something for the client at a place. If it fails, this client has failed and the others go on; the result
        is None."""
        if place in self.errors:
            return None
        try:
            return do(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 (a client's cache or mask may raise anything)
            self.errors[place] = error
            return None

    def of(self, key: torch.Tensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each client's keys and values [n, H, L, D], given what :meth:`update` returned last, or what the model
        made of latent vectors."""
        kept = self._kept.get(id(key))
        if kept is not None:
            return kept[1]
        if not self.texts:
            raise JointError("its attention changes the keys after they were cached")
        return list(zip(self._by_client(key), self._by_client(value), strict=True))

    def _by_client(self, expanded: torch.Tensor) -> list[torch.Tensor]:
        """Return each client's keys or values [n, H, L, D], given those of all, [1, H, ΣnL, D]."""
        parts = expanded.split_with_sizes([n * length for n, length in self.texts], 2)
        _, heads, _, features = expanded.shape
        return [part.view(heads, *text, features).transpose(0, 1) for part, text in zip(parts, self.texts, strict=True)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.caches[0].get_seq_length(layer_idx)  # type: ignore[no-any-return]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.caches[0].get_query_offset(layer_idx)  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self._masked_layer = layer_idx
        return self.caches[0].get_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]

    def mask(self, given: Mapping[str, Any]) -> Any:
        """Return each client's mask, made as its own walk would make it; None if no client needs one.

        Args:
            given: arguments of the mask function for the first client.
        """
        layer, make = self._masked_layer, AttentionMaskInterface._global_mapping[self.inner]
        masks: list[torch.Tensor | None] = []
        for place, (cache, size, mask) in enumerate(zip(self.caches, self.sizes, self.attention, strict=True)):
            kv_length, kv_offset = cache.get_mask_sizes(1, layer)
            own = {
                **given,
                "batch_size": size,
                "kv_length": kv_length,
                "kv_offset": kv_offset,
                "q_offset": cache.get_query_offset(layer),
                "attention_mask": None if mask is None else mask.to(given["device"], torch.bool),
            }
            masks.append(self.for_client(place, make, **own))
        return None if all(mask is None for mask in masks) else _Masks(masks)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> torch.Tensor:
        """Return the attention of each query [N, H, 1, D] over its client's cache: [N, 1, H, D]."""
        inner = _attention_of(module, self.inner)
        masks = mask.masks if isinstance(mask, _Masks) else [None] * len(self.caches)
        outputs = []
        clients = zip(query.split_with_sizes(self.sizes), self.of(key, value), masks, strict=True)
        for place, (queries, (keys, values), own) in enumerate(clients):
            found = self.for_client(place, inner, module, queries, keys, values, own, **options)
            nothing = (len(queries), 1, query.shape[1], value.shape[3])
            outputs.append(value.new_zeros(nothing) if found is None else found[0])
        return torch.cat(outputs)


class _Masks:
    """The masks of all clients; the model's code hands them on as it would hand on one mask."""

    def __init__(self, masks: Sequence[torch.Tensor | None]) -> None:
        self.masks = masks


class WalkCache(Protocol):
    """The caches of a walk, with the attention over them."""

    def mask(self, given: Mapping[str, Any]) -> Any:
        """Return the mask that the model's code hands on to :meth:`attend`, given a mask function's arguments."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> torch.Tensor:
        """Return the attention of queries [N, H, 1, D] over what ``update`` of the cache returned: [N, 1, H, D]."""


walk: ContextVar[WalkCache] = ContextVar("walk")
"""The caches of the joint walk that runs."""


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return walk.get().attend(module, query, key, value, attention_mask, **options), None


def _attention_of(module: torch.nn.Module, inner: str) -> Callable[..., Any]:
    if inner == "eager":
        found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if found is None:
            raise JointError("its attention is not transformers' own")
        return found  # type: ignore[no-any-return]
    return AttentionInterface._global_mapping[inner]  # type: ignore[no-any-return]


def _mask(**given: Any) -> Any:
    return walk.get().mask(given)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)

_WITH_STATES = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, *_WITH_STATES)


def structure(cache: Any, sequences: int) -> tuple[Any, ...] | str:
    """Return what caches of one walk must have in common, or why a cache of so many sequences cannot be in any."""
    if type(cache) is not DynamicCache:
        return f"its cache is a {type(cache).__name__}"
    if cache.offloading or not cache.layers:
        return "its cache is offloaded" if cache.offloading else "its cache is empty"
    layers = tuple([DynamicLayer if type(layer) is PooledLayer else type(layer) for layer in cache.layers])
    found: list[Any] = list(layers)
    for kind, layer in zip(layers, cache.layers, strict=True):
        if kind not in _LAYERS:
            return f"its cache has a {kind.__name__}"
        if kind in _WITH_STATES:
            if layer.record_past or not all(layer.has_previous_state.values()):
                return "its cache has no states yet, or keeps earlier ones"
            both = (*layer.conv_states.values(), *layer.recurrent_states.values())
            states = [state for state in both if state is not None]
            if any(len(state) != sequences for state in states):
                return "its cache has states of another number of sequences"
            found += [(state.shape[1:], state.dtype, state.device) for state in states]
    return tuple(found)


def filled(cache: Any) -> list[bool]:
    """Return which layers of a cache have had tokens, of those that keep keys and values."""
    return [layer.is_initialized for layer in cache.layers if isinstance(layer, DynamicLayer)]
