"""Banks of experts: modules that hold the weights of all experts of a mixture, and send each row through some of them.

A *bank* takes rows, the experts that each row goes through, and their routing weights, and gives a row for a row. The
router, which chooses the experts, stays with the client. Rows of several clients for the same expert share its
products. Backward recomputes, and returns the gradients of rows and of routing weights.

transformers has three forms of banks. Most take the experts and weights as arguments. JetMoe's take rows that are
sorted by their expert, and the number of rows of each. Llama 4's takes a grid with t rows for each expert, one
expert after another. A row that is not for this expert is zero. This module makes the grid from the rows that are not
zero.

Legend: n rows; i in_features; o out_features; k experts for each row; e experts in the bank; t rows for each expert.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from symbiosis.errors import SplitError

_INDEX = re.compile(r"index|indices|experts")
_WEIGHTS = re.compile(r"weights|scores")
_MOST = 4
"""Largest size of a grid of rows by expert, in multiples of the rows."""
_SIZES = re.compile(r"expert_sizes?|tokens_per_expert")


def is_bank(module: nn.Module) -> bool:
    """Return whether a module has the interface of a bank of experts, and fused weights.

    :func:`probe` tells whether it is one.
    """
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(isinstance(child, nn.Linear) for child in module.modules()) or not any(True for _ in module.parameters()):
        return False
    names = [*inspect.signature(module.forward).parameters]
    if len(names) == 3:
        return bool(_INDEX.search(names[1]) and _WEIGHTS.search(names[2]))
    if len(names) == 2:
        return bool(_SIZES.search(names[1])) and experts_of(module) > 1
    return len(names) == 1 and experts_of(module) > 1 and bool(own) and all(p.ndim == 3 for p in own)


def experts_of(module: nn.Module) -> int:
    """Return the number of experts of a bank, by its attributes; 0 if they do not say."""
    counts = [getattr(module, name, None) for name in ("total_experts", "num_experts")]
    return next((count for count in counts if type(count) is int), 0)


_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "top_k")
"""Names that models give to the number of experts of a row."""


def choices_of(module: nn.Module, config: Any) -> int:
    """Return the largest number of experts that a row of a bank goes through, by the model's configuration; the number
    of all experts if that does not say."""
    if len(inspect.signature(module.forward).parameters) < 3:
        return 1
    experts = experts_of(module)
    places = [config, getattr(config, "ffn_config", None), module]
    found = [getattr(place, name, None) for place in places for name in _CHOICES]
    return min(next((count for count in found if type(count) is int and count > 0), experts), experts)


def run(module: nn.Module, experts: int, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return a bank's results [n, o] for rows [n, i], their experts [n, k] and routing weights [n, k].

    A number of an expert that does not exist counts for the nearest that does: reading it would cost a wait for the
    device, and a kernel that reads beyond the weights would end the process.
    """
    chosen = chosen.clamp(0, experts - 1)
    if len(inspect.signature(module.forward).parameters) == 3:
        y: torch.Tensor = module(x, chosen, weights)
        return y.reshape(x.shape[0], -1)
    k = chosen.shape[1]
    results = _by_place(module, experts, x.repeat_interleave(k, 0), chosen.reshape(-1))
    return (results * weights.reshape(-1, 1)).view(x.shape[0], k, -1).sum(1).to(x.dtype)


def _by_place(module: nn.Module, experts: int, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the results for rows [n, i] that go through one expert each. The bank takes sorted rows [n, i] and the
    number of rows of each expert, or a grid [e·t, i]."""
    ordered, order = torch.sort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=experts)
    if len(inspect.signature(module.forward).parameters) == 2:
        y: torch.Tensor = module(x[order], counts.tolist())
        return y.new_empty(len(x), y.shape[1]).index_copy(0, order, y)
    first = counts.cumsum(0) - counts
    place = torch.arange(len(x), device=x.device) - first[ordered]
    deepest = int(counts.max())
    # If all rows are for one expert, the grid has as many times their memory as there are experts.
    depth = min(deepest, max(_MOST * len(x) // experts, 1))
    parts = []
    for start in range(0, deepest, depth):
        here = ((place >= start) & (place < start + depth)).nonzero()[:, 0]
        at = ordered[here], place[here] - start
        grid = x.new_zeros(experts, depth, x.shape[1]).index_put(at, x[order[here]])
        parts.append((order[here], module(grid.flatten(0, 1)).view(experts, depth, -1)[at]))
    y = torch.cat([part for _, part in parts])
    return torch.empty_like(y).index_copy(0, torch.cat([rows for rows, _ in parts]), y)


def probe(name: str, module: nn.Module) -> tuple[int, int, torch.dtype]:
    """Return the number of features in and out and the dtype of a bank, after trying it on random rows.

    Raises:
        SplitError: it does not give a row for a row, or its rows depend on one another.
    """
    what = f"{name} ({type(module).__name__})"
    experts = experts_of(module)
    if experts < 1:
        raise SplitError(f"{what} cannot be a base layer: it does not say how many experts it has")
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor([[0, experts - 1], [experts - 1, 0], [experts // 2, 0]], device=weight.device)
    weights = torch.rand(3, 2, generator=generator, device="cpu").to(weight.device, weight.dtype)
    for width in _widths(module):
        x = torch.randn(3, width, generator=generator, device="cpu").to(weight.device, weight.dtype)
        try:
            together = run(module, experts, x, chosen, weights)
            alone = torch.cat(
                [run(module, experts, x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(3)]
            )
            zeros = run(module, experts, x * 0, chosen, weights)
        except (RuntimeError, IndexError, ValueError):  # the width is another one
            continue
        if together.shape != alone.shape or together.ndim != 2:
            continue
        if not torch.allclose(together.float(), alone.float(), rtol=2e-2, atol=1e-3):
            raise SplitError(f"{what} cannot be a base layer: its rows depend on one another")
        if len(inspect.signature(module.forward).parameters) == 1 and zeros.any():
            raise SplitError(f"{what} cannot be a base layer: rows of zeros do not give zeros")
        return width, together.shape[1], weight.dtype
    raise SplitError(f"{what} cannot be a base layer: it does not run on rows, their experts and routing weights")


def _widths(module: nn.Module) -> Iterable[int]:
    """Yield the numbers of features that a bank may take, the most likely first."""
    named = [getattr(module, name, None) for name in ("hidden_dim", "hidden_size")]
    sizes = [size for parameter in module.parameters() for size in reversed(parameter.shape)]
    return dict.fromkeys(size for size in [*named, *sizes] if type(size) is int and size > 0)
