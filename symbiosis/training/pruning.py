"""Pruned activations: autograd keeps what the adapter's gradients need, and nothing that follows from it.

Autograd saves nothing for frozen weights. Saved-tensor hooks show every tensor that it does save, together with the
node that made it. No model code is changed, and a tensor whose node is unknown is kept unchanged.

* Tensors that follow from kept tensors are computed again in backward: products such as SiLU·up, activations, outputs
  of norms, keys and values that were repeated for each query head.
* Tensors that were cast from a narrower dtype, as norms do in bf16, are kept in that dtype.
* One bit per element is kept of a ReLU's output and of a boolean mask.

After FlexLLM, section 5.2 (graph pruning, rematerialization, lossless compression), which does it on a compiled graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_Recipe = Callable[[], torch.Tensor]
"""Returns a tensor that was not kept."""


@contextlib.contextmanager
def pruned(*inputs: Any) -> Iterator[None]:
    """Have forward passes keep fewer activations meanwhile. Their gradients stay the same.

    Recomputation repeats the same operations, so gradients are bit-equal. ``nn.LayerNorm`` is the exception: its output
    is computed from the saved mean and deviation and may differ in the last bit. Supports one backward pass, without
    ``create_graph``.

    Args:
        inputs: what the forward passes get from outside: tensors, also in lists or dictionaries.
    """
    graph = _Graph(tensor.grad_fn for tensor in tree_leaves(inputs) if isinstance(tensor, torch.Tensor))
    with torch.autograd.graph.saved_tensors_hooks(graph.pack, _unpack):
        try:
            yield
        finally:
            graph.forget()


class _Kept:
    """A saved tensor. Hooks switch off torch's check for later in-place changes, so the check is made here."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # a node that held its own output would never be freed
        self.version = tensor._version

    def __call__(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was modified by an in-place operation"
            )
        return self.tensor


class _Narrow(_Kept):
    """A saved tensor in the narrower dtype that it was cast from, without loss."""

    __slots__ = ("dtype",)

    def __init__(self, tensor: torch.Tensor, narrow: torch.dtype) -> None:
        super().__init__(tensor.to(narrow))
        self.dtype = tensor.dtype

    def __call__(self) -> torch.Tensor:
        return super().__call__().to(self.dtype)


class _Bits:
    """A boolean tensor with eight elements per byte; restored as ``dtype``."""

    __slots__ = ("_bytes", "_dtype", "_shape")

    def __init__(self, mask: torch.Tensor, dtype: torch.dtype) -> None:
        self._shape, self._dtype = mask.shape, dtype
        flat = torch.nn.functional.pad(mask.reshape(-1).view(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
        self._bytes = flat[:, 0].clone()
        for bit in range(1, 8):
            self._bytes |= flat[:, bit] << bit

    def __call__(self) -> torch.Tensor:
        flat = torch.stack([(self._bytes >> bit) & 1 for bit in range(8)], 1).view(-1)
        return flat[: self._shape.numel()].view(self._shape).to(self._dtype)


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    with torch.no_grad():
        value: torch.Tensor = packed()
    return value


class _Graph:
    """Knowledge of the graph while a forward pass builds it."""

    def __init__(self, ran: Iterable[Any]) -> None:
        self._held: dict[tuple[Any, int], _Recipe] = {}
        """Recipes of tensors that are kept already, by (node, output)."""
        self._saved: set[Any] = set(ran)
        """Nodes that have saved their result, if they are ReLUs."""
        self._masks: dict[int, tuple[weakref.ref[torch.Tensor], int, _Recipe]] = {}
        """By identity, because layers share masks: (mask, its version, its recipe)."""

    def forget(self) -> None:
        """Forget everything when the forward pass is over; the graph keeps what it needs."""
        self._held.clear()
        self._saved.clear()
        self._masks.clear()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Recipe:
        if tensor.dtype is torch.bool:
            return self._mask(tensor)
        node: Any = tensor.grad_fn
        if node is None:  # a parameter, or a tensor without a gradient
            return tensor if isinstance(tensor, torch.nn.Parameter) else _Kept(tensor)
        if node.name() == "ReluBackward0" and node not in self._saved:
            # The ReLU itself saves this tensor first, and needs only its signs.
            self._saved.add(node)
            return _Bits(tensor > 0, tensor.dtype)
        key = (node, tensor.output_nr)
        recipe = self._recipe(*key)
        if recipe is None:
            narrow = _cast_from(node)
            recipe = _Kept(tensor) if narrow is None else _Narrow(tensor, narrow)
            self._held[key] = recipe
        return recipe

    def _mask(self, mask: torch.Tensor) -> _Recipe:
        known, version, recipe = self._masks.get(id(mask), (None, 0, None))
        if recipe is None or known is None or known() is not mask or version != mask._version:
            expanded = mask.numel() > mask.untyped_storage().nbytes()
            recipe = _Kept(mask) if expanded else _Bits(mask, torch.bool)
            self._masks[id(mask)] = weakref.ref(mask), mask._version, recipe
        return recipe

    def _recipe(self, node: Any, output: int) -> _Recipe | None:
        """Return how to compute this output of a node from kept tensors, or None if that is not possible."""
        held = self._held.get((node, output))
        if held is not None or node is None or output:
            return held
        name = node.name()
        if name == "MulBackward0":
            return self._product(node)
        if name in _ACTIVATIONS:
            activation = _ACTIVATIONS[name]
            return lambda: activation(node)
        if name == "NativeLayerNormBackward0" and node._saved_result1.dtype.itemsize >= 4:
            return lambda: _layer_norm(node)  # CPUs save mean and deviation in 16 bits, too few to compute with
        if name == "ExtendBackward":  # keys and values in the cache
            return lambda: node.extended()
        step = _STEPS.get(name)
        source = None if step is None else self._recipe(*node.next_functions[0])
        if step is None or source is None:
            return None
        return lambda: step(node, source())

    def _product(self, node: Any) -> _Recipe | None:
        # A factor is saved if the other factor needs a gradient. A saved factor may itself be recomputed.
        left, right = node.next_functions
        a = (lambda: node._saved_self) if right[0] is not None else self._recipe(*left)
        b = (lambda: node._saved_other) if left[0] is not None else self._recipe(*right)
        if a is None or b is None:
            return None
        return lambda: a() * b()


def _cast_from(node: Any) -> torch.dtype | None:
    """Return the narrower floating-point dtype that the output of a node was cast from, or None."""
    if node.name() != "ToCopyBackward0":
        return None
    source, output = node.next_functions[0]
    narrow: torch.dtype = source._input_metadata[output].dtype
    wide: torch.dtype = node._input_metadata[0].dtype
    return narrow if (narrow, wide) in _EXACT else None


_EXACT = {(narrow, torch.float32) for narrow in (torch.bfloat16, torch.float16)}


def _layer_norm(node: Any) -> torch.Tensor:
    x: torch.Tensor = node._saved_input
    weight, bias = node._saved_weight, node._saved_bias
    y: torch.Tensor = (x - node._saved_result1) * node._saved_result2
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


_ACTIVATIONS: dict[str, Callable[[Any], torch.Tensor]] = {
    "SiluBackward0": lambda node: torch.nn.functional.silu(node._saved_self),
    "GeluBackward0": lambda node: torch.nn.functional.gelu(node._saved_self, approximate=node._saved_approximate),
}
"""Nodes that save their input, and how to compute their output from it."""


def _signed(dimension: int) -> int:
    """Return a dimension that a node reports as an unsigned number of 64 bits."""
    return dimension - 2**64 if dimension >= 2**63 else dimension


_STEPS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "ToCopyBackward0": lambda node, x: x.to(node._input_metadata[0].dtype),
    "CloneBackward0": lambda node, x: x,
    "ViewBackward0": lambda node, x: x.reshape(node._input_metadata[0].shape),
    "ReshapeAliasBackward0": lambda node, x: x.reshape(node._input_metadata[0].shape),
    "UnsafeViewBackward0": lambda node, x: x.reshape(node._input_metadata[0].shape),
    "ExpandBackward0": lambda node, x: x.expand(node._input_metadata[0].shape),
    "UnsqueezeBackward0": lambda node, x: x.unsqueeze(_signed(node._saved_dim)),
    "TransposeBackward0": lambda node, x: x.transpose(_signed(node._saved_dim0), _signed(node._saved_dim1)),
}
"""Nodes that save nothing, and how to compute their output from their input."""
