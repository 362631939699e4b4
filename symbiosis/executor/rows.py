"""Merge and split: a base layer sees one matrix of rows, whoever they belong to (D1).

Position in a sequence does not matter to a layer that works row by row, so batch and sequence are flattened and nothing
is padded. Both functions are pure; cut and merge in any way, each request gets what it would have got alone.

Legend: n, n_i rows; f features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["merge", "split"]


def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gather matrices [n_i, f] into one [Σ n_i, f]. One part alone is passed through without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Scatter a matrix [Σ n_i, f] into matrices [n_i, f]. One part alone is passed through without a copy.

    Several parts are copies, not views: they belong to different tenants, who must not see one another's rows through
    the storage, keep it alive, or bump the version counter that autograd checks.
    """
    if len(counts) == 1:
        return [rows]
    return torch.split_with_sizes_copy(rows, list(counts))  # type: ignore[func-returns-value, return-value]
