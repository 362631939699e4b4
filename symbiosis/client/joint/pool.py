"""A pool of keys and values: the caches of several clients in tensors that keep their places in memory.

A captured walk (:mod:`symbiosis.client.joint.captured`) needs such places. While a client's ``DynamicCache`` is in a
row of the pool, the layers of the cache are :class:`PooledLayer`, which have a length and no tensors. If code reads
the keys or values of such a layer, as a walk of the client's own does, they become copies that belong to the cache
alone. So no public attribute of a cache has a tensor of the pool.

Legend: R rows, one text of a client each; H heads; L tokens that a row has room for; D features of a head.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class Text:
    """A client's cache in a row: its length in tokens, and whether all of its layers are still in the pool."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.is_whole = True
        self.layers: list[weakref.ref[PooledLayer]] = []

    def is_in(self, cache: Any) -> bool:
        """Return whether this is the text of a cache, as it is now."""
        return (
            self.is_whole
            and len(self.layers) == len(cache.layers)
            and all(mine() is layer for mine, layer in zip(self.layers, cache.layers, strict=True))
        )


class PooledLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """A layer of a client's cache while its keys and values are in a pool; a ``DynamicLayer`` before and after."""

    _text: Text
    _rows: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def take(cls, layer: Any, text: Text, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make a client's layer one whose keys and values are these rows of a pool, [1, H, L, D]."""
        del layer.keys, layer.values
        layer.__class__ = cls
        layer._text, layer._rows = text, (keys, values)

    def leave(self) -> None:
        """Copy the keys and values out of the pool."""
        text, rows = self._text, self._rows
        with torch.inference_mode(False), torch.no_grad():  # the caller may be another client, with modes of its own
            keys, values = [tensor[:, :, : text.length].clone() for tensor in rows]
        text.is_whole = False
        del self._text, self._rows
        self.__class__ = DynamicLayer
        self.keys, self.values = keys, values

    def is_of(self, text: Text) -> bool:
        return self._text is text

    def get_seq_length(self) -> int:
        return self._text.length

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.leave()
        return self.__reduce_ex__(protocol)


def _of_its_own(name: str) -> property:
    """Return a property that takes the layer out of the pool and then reads or sets its attribute."""

    def get(layer: Any) -> Any:
        layer.leave()
        return getattr(layer, name)

    def put(layer: Any, tensor: Any) -> None:
        layer.leave()
        setattr(layer, name, tensor)

    return property(get, put)


for _name in ("keys", "values"):
    setattr(PooledLayer, _name, _of_its_own(_name))


class Pool:
    """Keys and values [R, H, L, D] of each layer of a model.

    Args:
        like: a client's cache. The tensors have the shapes and dtypes of its layers.
        rows: R.
        capacity: L.
    """

    def __init__(self, like: DynamicCache, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.keys = [_room(layer.keys, rows, capacity) for layer in like.layers]
        self.values = [_room(layer.values, rows, capacity) for layer in like.layers]
        self.texts: list[Text | None] = [None] * rows

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    @staticmethod
    def size(like: DynamicCache, rows: int, capacity: int) -> int:
        """Return the bytes that a pool takes."""
        tensors = [tensor for layer in like.layers for tensor in (layer.keys, layer.values)]
        token: int = sum(tensor[0, :, 0].numel() * tensor.element_size() for tensor in tensors)
        return token * rows * capacity

    @torch.no_grad()
    def put(self, row: int, cache: DynamicCache) -> bool:
        """Have a client's cache in a row, in place of what was there. Return whether it fits; if not, the cache is as
        it was, and the row is free."""
        text = self.texts[row]
        if text is not None and text.is_in(cache):
            return text.length < self.capacity
        self.take_out(row)
        if not self._fits(cache):
            return False
        text = self.texts[row] = Text(cache.get_seq_length())
        for keys, values, layer in zip(self.keys, self.values, cache.layers, strict=True):
            mine = keys[row : row + 1], values[row : row + 1]
            for place, tensor in zip(mine, (layer.keys, layer.values), strict=True):
                place[:, :, : text.length].copy_(tensor)
                place[:, :, text.length :].zero_()  # attention multiplies masked values by 0, and 0 · NaN is NaN
            PooledLayer.take(layer, text, *mine)
        text.layers = [weakref.ref(layer) for layer in cache.layers]
        return True

    @torch.no_grad()
    def add_token(self, row: int, cache: DynamicCache) -> None:
        """Count the token behind a row's text, which a walk has computed, in the client's cache. Layers that have left
        the pool during the walk get copies of its keys and values."""
        text = self.texts[row]
        if text is None:
            return
        new = slice(text.length, text.length + 1)
        text.length += 1
        for keys, values, layer in zip(self.keys, self.values, cache.layers, strict=True):
            if not isinstance(layer, PooledLayer):
                layer.update(keys[row : row + 1, :, new], values[row : row + 1, :, new])

    def take_out(self, row: int) -> None:
        """Give the cache in a row, if there is one, its keys and values as tensors of its own."""
        text, self.texts[row] = self.texts[row], None
        if text is not None:
            for reference in text.layers:
                layer = reference()
                if isinstance(layer, PooledLayer) and layer.is_of(text):
                    layer.leave()

    def take_out_full(self, except_: Sequence[int]) -> None:
        """Take out caches that have no room for a token, except in some rows."""
        for row, text in enumerate(self.texts):
            if text is not None and text.length >= self.capacity and row not in except_:
                self.take_out(row)

    def close(self) -> None:
        """Take out all caches."""
        for row in range(len(self.texts)):
            self.take_out(row)

    def _fits(self, cache: DynamicCache) -> bool:
        length = cache.get_seq_length()
        return 0 < length < self.capacity and all(
            isinstance(tensor, torch.Tensor)
            and tensor.shape == (1, room.shape[1], length, room.shape[3])
            and (tensor.dtype, tensor.device) == (room.dtype, room.device)
            for rooms, name in ((self.keys, "keys"), (self.values, "values"))
            for room, tensor in zip(rooms, [getattr(layer, name) for layer in cache.layers], strict=True)
        )


def _room(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    return like.new_zeros(rows, like.shape[1], capacity, like.shape[3])
