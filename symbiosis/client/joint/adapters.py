"""The adapters of a joint walk: what each client's adapter does to its rows of a layer.

* ``exact``: products run client by client, with the client's own parameters and in their precision, as in PEFT's own
  forward pass. Each row gets the bits that PEFT gives it.
* ``fast``: products of the same rank run as one batched product (:mod:`symbiosis.client.joint.stacks`). The order of
  sums differs, and LoRA's factor is rounded to the adapter's precision.

In both, what LoRA adds is added in its own precision and rounded once, as in PEFT.

Other adapters run their own code for their client's rows, in a greenlet that is suspended where the code calls the base
layer. So the base layer runs once for the rows of all clients.

Legend: N rows; n rows of one client; i in_features; o out_features; r rank.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from greenlet import getcurrent, greenlet
from peft.tuners.ia3 import layer as ia3
from peft.utils.other import AuxiliaryTrainingWrapper
from torch.nn import functional as F

from symbiosis.client.joint.attention import JointCache, walk
from symbiosis.client.joint.stacks import Slot, Stack, StackRows
from symbiosis.client.virtlayer import VirtConv1D, VirtLinear
from symbiosis.core.requests import Key
from symbiosis.errors import UsageError

Adapted = Mapping[str, tuple[Any, str]]
"""A client's tuner layers and the names of their active adapters, by the name of the module that they wrap. An empty
name stands for a layer whose own code is to run."""


class RowAdapters:
    """The adapters of one layer, by row.

    Args:
        layers: the clients' tuner layers and names of active adapters in the order of rows, or None.
        slots: the clients' slots in stacks, or None, in which case the products of a client are exact.
        sizes: n of each client.
    """

    def __init__(
        self, layers: Sequence[tuple[Any, str] | None], slots: Sequence[Slot | None], sizes: Sequence[int]
    ) -> None:
        self._layers = layers
        self._sizes = list(sizes)
        self._one_by_one: list[tuple[int, Any, Any, float]] = []
        self._own: list[tuple[int, Any]] = []
        self._before: list[tuple[int, torch.Tensor]] = []
        self._after: list[tuple[int, torch.Tensor]] = []
        stacks: dict[Stack, list[tuple[range, int, float]]] = {}
        ends = list(itertools.accumulate(sizes))
        for place, (found, slot) in enumerate(zip(layers, slots, strict=True)):
            if found is None:
                continue
            layer, name = found
            if not name:
                self._own.append((place, layer))
            elif isinstance(layer, ia3.Linear):
                (self._before if layer.is_feedforward else self._after).append((place, layer.ia3_l[name]))
            elif slot is None:
                self._one_by_one.append((place, layer.lora_A[name], layer.lora_B[name], layer.scaling[name]))
            else:
                rows = range(ends[place] - sizes[place], ends[place])
                stacks.setdefault(slot.stack, []).append((rows, slot.number, layer.scaling[name]))
        self._groups = [StackRows(stack, members, ends[-1]) for stack, members in stacks.items()]

    def __call__(self, x: torch.Tensor, layer: _JointLayer) -> torch.Tensor:
        """Return a layer's results for x, [N, …, i] → [N, …, o]."""
        codes = [_OwnCode(place, own, layer) for place, own in self._own]
        try:
            changed = self._begun(x, codes) if codes else {}
            if changed and cast(VirtLinear, layer).siblings is None:
                rows = x.split_with_sizes(self._sizes)
                x = torch.cat([changed.get(place, own) for place, own in enumerate(rows)])
                changed = {}
            y = layer.base(self._scaled(x, self._before, cast_first=True) if self._before else x)
            if self._after:
                y = self._scaled(y, self._after)
            if self._one_by_one:
                y = self._with_rows(x, y)
            if self._groups:
                y = self._with_groups(x, y)
            if changed:
                changed = self._apart(changed, layer)
            return self._ended(y, codes, changed) if codes else y
        finally:
            for code in codes:
                code.close()

    def over(self, sizes: Sequence[int]) -> Callable[[torch.Tensor, _JointLayer], torch.Tensor]:
        """Return the same adapters for matrices [1, 1, N, i] with other n of the clients, whose products are exact."""
        resized = RowAdapters(self._layers, [None] * len(sizes), sizes)
        return lambda x, layer: resized(x[0].transpose(0, 1), layer).transpose(0, 1)[None]

    def _begun(self, x: torch.Tensor, codes: Sequence[_OwnCode]) -> dict[int, torch.Tensor]:
        """Begin the own code of clients. Return the rows for the base layer of those that changed them."""
        rows = x.split_with_sizes(self._sizes)
        given = {code.place: code.begin(rows[code.place]) for code in codes}
        changed = {place: found for place, found in given.items() if found is not None and found is not rows[place]}
        for place, found in list(changed.items()):
            if not _alike(found, rows[place]):
                _drop(place, "the rows that an adapter gives its base layer have another shape or dtype than its own")
                del changed[place]
        return changed

    def _apart(self, changed: Mapping[int, torch.Tensor], layer: _JointLayer) -> dict[int, torch.Tensor]:
        """Return the base layer's results for rows that the layers beside it do not get."""
        results = layer.apart(changed)
        sizes = [self._sizes[place] for place in changed]
        return dict(zip(changed, results.split_with_sizes(sizes), strict=True))

    def _ended(self, y: torch.Tensor, codes: Sequence[_OwnCode], changed: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return y with the results of clients' own code, which gets the base layer's."""
        results = list(y.split_with_sizes(self._sizes))
        for code in codes:
            found = code.end(changed.get(code.place, results[code.place]))
            if found is not None:
                results[code.place] = found
        return torch.cat(results)

    def _scaled(
        self, x: torch.Tensor, vectors: Sequence[tuple[int, torch.Tensor]], *, cast_first: bool = False
    ) -> torch.Tensor:
        """Return x with the rows of IA3 clients scaled, after a cast to the vector's dtype if PEFT makes one."""
        rows = list(x.split_with_sizes(self._sizes))
        for place, vector in vectors:
            own = rows[place].to(vector.dtype) if cast_first else rows[place]
            rows[place] = (own * vector.flatten()).to(x.dtype)
        return torch.cat(rows)

    def _with_rows(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y plus what LoRA adds to the rows of its clients, client by client."""
        by_dtype: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        added: list[torch.Tensor | None] = [None] * len(self._sizes)
        for place, a, b, scaling in self._one_by_one:
            down = a._parameters["weight"]
            rows = by_dtype.get(down.dtype)
            if rows is None:
                rows = by_dtype[down.dtype] = x.to(down.dtype).split_with_sizes(self._sizes)
            added[place] = F.linear(F.linear(rows[place], down), b._parameters["weight"]) * scaling
        rows = y.split_with_sizes(self._sizes)
        return torch.cat(
            [one if more is None else (one + more).to(y.dtype) for one, more in zip(rows, added, strict=True)]
        )

    def _with_groups(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y plus what LoRA adds to the rows of its clients, by batched products."""
        first = self._groups[0]
        rows = x.to(first.dtype).view(len(x), -1)
        if len(self._groups) == 1 and first.is_whole:
            added = first.product(rows)
        else:
            dtype = functools.reduce(torch.promote_types, [group.dtype for group in self._groups])
            added = rows.new_zeros(len(x), y.shape[-1], dtype=dtype)
            for group in self._groups:
                group.add_to(added, rows if group.dtype is rows.dtype else x.to(group.dtype).view_as(rows))
        return (y + added.view(y.shape)).to(y.dtype)


class _OwnCode:
    """The forward pass of one client's tuner layer, which is suspended where it calls the base layer.

    The base layer is replaced only while the code runs: if the client's operation is cancelled, its model may be in use
    again before the walk ends. An error is the client's alone.
    """

    def __init__(self, place: int, own: Any, layer: _JointLayer) -> None:
        self.place = place
        self._own, self._layer = own, layer
        self._code = greenlet(own)
        self._result: torch.Tensor | None = None

    def begin(self, x: torch.Tensor) -> torch.Tensor | None:
        """Start it with the client's rows, and return the rows for the base layer. None if it needs no base layer, or
        has failed."""
        found = self._run(x)
        if not self._code.dead:
            return found
        self._result = found
        return None

    def end(self, y: torch.Tensor) -> torch.Tensor | None:
        """Return its result, given the base layer's; None if it has failed."""
        found = self._result if self._code.dead else self._run(y)
        if found is not None and not self._code.dead:
            _drop(self.place, "an adapter calls its base layer twice, which it did not when it was tried")
            return None
        if found is not None and not _alike(found, y):
            _drop(self.place, "the results of an adapter have another shape or dtype than those of its base layer")
            return None
        return found

    def close(self) -> None:
        """End it if it is suspended still, as after an error of the walk."""
        if not self._code.dead:
            self._code.throw()

    def _run(self, given: Any) -> torch.Tensor | None:
        """Run it until it ends or calls the base layer, and return its result or the rows for the base layer."""
        cache = cast(JointCache, walk.get())
        while True:
            with in_place_of_base(self._own, _suspended):
                found: Any = cache.for_client(self.place, self._code.switch, given)
            if found is None or self._code.dead:
                return found  # type: ignore[no-any-return]
            if len(found) == 1:
                return found[0]  # type: ignore[no-any-return]
            given = self._layer.request_of(self.place, *found)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _drop(place: int, why: str) -> None:
    """End the part of the client at a place in the walk."""
    error = UsageError(f"{why}; open the executor or the connection with joint='off'")
    cast(JointCache, walk.get()).drop(place, error)


def _suspended(*given: Any) -> Any:
    """Stand for the base layer in the own code of an adapter: hand its arguments to the walk."""
    return getcurrent().parent.switch(given)


@contextlib.contextmanager
def in_place_of_base(layer: Any, stand_in: Callable[..., Any], **more: Callable[..., Any]) -> Iterator[None]:
    """Replace what the base layer of a tuner layer computes, its requests, and ``more`` methods inside the ``with``
    block, on this thread."""
    base = layer.original_module if isinstance(layer, AuxiliaryTrainingWrapper) else layer.get_base_layer()
    replaced = {"forward": stand_in, "request": stand_in, **more}
    base.__dict__.update({name: _on_this_thread(new, getattr(base, name)) for name, new in replaced.items()})
    try:
        yield
    finally:
        for name in replaced:
            del base.__dict__[name]


def _on_this_thread(new: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is ``new`` on the calling thread, and ``method`` on others, where the tenant may call its
    model meanwhile."""
    thread = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == thread else method)(*args, **kwargs)

    return either


class _JointLayer:
    """Behaviour of the joint model's layers; ``adapters`` are those of the present walk."""

    adapters: Callable[[torch.Tensor, _JointLayer], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) if self.adapters is None else self.adapters(x, self)

    def base(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the base layer does to the rows of all clients."""
        return super().forward(x)  # type: ignore[misc,no-any-return]

    def apart(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return what it does to rows of the clients at some places that the layers beside it do not get, as those of
        OFT."""
        layer: Any = self
        before, layer.may_have_siblings = layer.may_have_siblings, False
        try:
            with _charged(layer, {place: len(own) for place, own in rows.items()}):
                return self.base(torch.cat(list(rows.values())))
        finally:
            layer.may_have_siblings = before

    def request_of(self, place: int, key: Key, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send a request for the client at a place, as :meth:`~symbiosis.client.virtlayer.VirtLayer.request` does."""
        layer: Any = self
        with _charged(layer, {place: 1}):
            return layer.request(key, x)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _charged(layer: Any, rows: Mapping[int, int]) -> Iterator[None]:
    """Have the rows of a layer's requests belong to the clients at some places, so many to each, inside the ``with``
    block. The others have no part, but a policy that would hold back these clients lets the walk go on for the
    others."""
    requester = layer._requester
    everyone = requester.joint
    if everyone is not None:
        names = list(everyone)
        parts = {names[place]: count / sum(rows.values()) for place, count in rows.items()}
        requester.joint = dict.fromkeys(names, 0.0) | parts
    try:
        yield
    finally:
        requester.joint = everyone


class JointLatents:
    """Behaviour of the joint model's attention that keeps latent vectors (DeepSeek). It expands those of all clients at
    once, to keys and values for all of their tokens."""

    layer_idx: int

    def expand_kv(self, *latents: torch.Tensor) -> Any:
        cache = walk.get(None)
        sizes = [n * length for n, length in cache.texts] if isinstance(cache, JointCache) else []
        layers = [layer for layer in self.children() if isinstance(layer, _JointLayer)]  # type: ignore[attr-defined]
        before = [layer.adapters for layer in layers]
        with _charged(layers[0], dict(enumerate(sizes))) if layers else contextlib.nullcontext():
            for layer in layers:
                if isinstance(layer.adapters, RowAdapters):
                    layer.adapters = layer.adapters.over(sizes)
            try:
                return super().expand_kv(*latents)  # type: ignore[misc]
            finally:
                for layer, adapters in zip(layers, before, strict=True):
                    layer.adapters = adapters


class EmbeddingAdapters(NamedTuple):
    """The adapters of an embedding: the tuner layer and the name of the active adapter of each client, or None, and n
    of each client."""

    layers: Sequence[tuple[Any, str] | None]
    sizes: list[int]


class _JointEmbedding:
    """Behaviour of the joint model's embeddings. PEFT's own layer gives a client's rows: it needs no base layer for
    them."""

    adapters: EmbeddingAdapters | None = None

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows: torch.Tensor = super().forward(ids, *args, **kwargs)  # type: ignore[misc]
        if self.adapters is None:
            return rows
        layers, sizes = self.adapters
        clients = zip(rows.split_with_sizes(sizes), layers, ids.split_with_sizes(sizes), strict=True)
        return torch.cat(
            [own if found is None else found[0](tokens, *args, **kwargs) for own, found, tokens in clients]
        )


@functools.cache
def _joint(kind: type[Any], cls: type[Any]) -> type[Any]:
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__})  # has eager_attention_forward


def make_joint(model: Any) -> dict[str, Any]:
    """Give the layers of a skeleton, in place, what they need for adapters by row. Return them by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        cls = type(module)
        if hasattr(module, "expand_kv"):
            module.__class__ = _joint(JointLatents, cls)  # type: ignore[arg-type]  # classes are hashable
        kind = _JointLayer if cls in (VirtLinear, VirtConv1D) else _JointEmbedding
        if kind is _JointLayer or isinstance(module, torch.nn.Embedding):
            module.__class__ = _joint(kind, cls)  # type: ignore[arg-type]
            found[name] = module
    return found


def adapters_of(
    layers: Mapping[str, Any], clients: Sequence[tuple[Adapted, Mapping[str, Slot]]], sizes: Sequence[int]
) -> dict[str, RowAdapters | EmbeddingAdapters | None]:
    """Return what the ``adapters`` of each layer are in a walk, by the layer's name.

    Args:
        layers: the joint model's layers, from :func:`make_joint`.
        clients: each client's tuner layers and slots by name, in the order of rows.
        sizes: n of each client.
    """
    used: set[str] = set().union(*(adapted for adapted, _ in clients))
    found: dict[str, RowAdapters | EmbeddingAdapters | None] = {}
    for name, layer in layers.items():
        if name not in used:
            found[name] = None
            continue
        tuners = [adapted.get(name) for adapted, _ in clients]
        if isinstance(layer, torch.nn.Embedding):
            found[name] = EmbeddingAdapters(tuners, list(sizes))
        else:
            found[name] = RowAdapters(tuners, [slots.get(name) for _, slots in clients], sizes)
    return found
