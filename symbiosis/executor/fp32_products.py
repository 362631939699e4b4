"""Products in fp32 with a weight of a narrower dtype, and its norms.

On a CPU the weight is converted block by block. A copy of the whole weight in fp32 would take twice its memory, and
more time to write and read again than the product of a few rows.

Legend: n rows; i, o columns and rows of the weight.
"""

from __future__ import annotations

import torch

_BLOCK = 1 << 19
"""Elements of the weight that are converted at a time: 2 MiB of fp32, which stay in a core's cache."""


def times_transposed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return X·Wᵀ, [n, i] · [o, i]ᵀ → [n, o], in X's dtype."""
    if weight.dtype is x.dtype:
        return x.mm(weight.t())
    if weight.device.type != "cpu":
        return x.mm(weight.t().to(x.dtype))
    y = x.new_empty(x.shape[0], weight.shape[0])
    start = 0
    for part in torch.split(weight, _rows(weight)):
        end = start + part.shape[0]
        torch.mm(x, part.to(x.dtype).t(), out=y[:, start:end])
        start = end
    return y


def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return X·W, [n, o] · [o, i] → [n, i], in X's dtype."""
    if weight.dtype is x.dtype:
        return x.mm(weight)
    if weight.device.type != "cpu":
        return x.mm(weight.to(x.dtype))
    y = x.new_zeros(x.shape[0], weight.shape[1])
    start = 0
    for part in torch.split(weight, _rows(weight)):
        end = start + part.shape[0]
        y.addmm_(x[:, start:end], part.to(x.dtype))
        start = end
    return y


def norms(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the norms of a weight's rows (``dim`` 1) or columns (``dim`` 0), in fp32 or in its own wider dtype."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    found = torch.empty(weight.shape[1 - dim], dtype=dtype, device=weight.device)
    size = max(1, _BLOCK // weight.shape[dim])
    # Results of their own would lie in the memory that the copy of a part has left, and keep the next one out of it.
    for part, result in zip(torch.split(weight, size, 1 - dim), torch.split(found, size), strict=True):
        torch.linalg.vector_norm(part, dim=dim, dtype=dtype, out=result)
    return found


def _rows(weight: torch.Tensor) -> int:
    return max(1, _BLOCK // weight.shape[1])
