"""Merge and split: a base layer sees one matrix of rows of all tenants.

The position in a sequence does not matter to a layer that works row by row, so batch and sequence are flattened and
nothing is padded. Both functions are pure. However requests are cut and merged, each gets the results that it would get
alone.

Legend: n, n_i rows; f features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["merge", "split"]


def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices [n_i, f] as one matrix [Σ n_i, f]. A single matrix is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return a matrix [Σ n_i, f] as matrices [n_i, f]. A single matrix is returned without a copy.

    Several parts are copies, not views, because they belong to different tenants. A tenant must not reach another
    tenant's rows through the storage, keep them alive, or change the version counter that autograd checks.
    """
    if len(counts) == 1:
        return [rows]
    return torch.split_with_sizes_copy(rows, list(counts))  # type: ignore[func-returns-value, return-value]
