"""Fixed-point sums that wrap around: a row plus uniform noise is exactly uniform, whatever the row is.

With the amplitude A and δ = 2A / 2²⁴, x is rounded to a grid, q = x / δ. The noise n is a uniform signed integer of 24
bits, and s = q + n, wrapped into 24 bits, is sent as s·δ. As n is uniform and used once, s is uniform. The numbers that
were wrapped, one of several hundred, are corrected with a few columns of the public weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from symbiosis.core.requests import Results
from symbiosis.errors import PrivacyError
from symbiosis.privacy.keystream import BITS, grid_step
from symbiosis.privacy.masks import MaskedKey
from symbiosis.privacy.own_weights import OwnWeights

_LARGEST = {dtype: 2.0 ** (64 - bits) - 2 for dtype, bits in BITS.items()}
"""Largest number, as a multiple of the amplitude, whose fixed-point value with :data:`BITS` bits and noise fits into
int64."""
_LARGEST_INT32 = 2.0 ** (32 - BITS[torch.float32]) - 2
"""The same for an int32, the dtype of noise for fp32 rows."""
_CHUNK_ROWS = 64
"""Rows that are corrected together. Of more rows, nearly every column of the weight would be needed."""


class Wrapped(NamedTuple):
    """The numbers of a matrix that were wrapped."""

    positions: torch.Tensor
    """[m, 2]: row and column of each."""
    missing: torch.Tensor
    """[m]: what each lacks, a multiple of 2A."""


def wrap(key: MaskedKey, x: torch.Tensor, noise: torch.Tensor, amplitude: float) -> tuple[torch.Tensor, Wrapped | None]:
    """Return x + noise [n, width] on the grid and within ±amplitude, and the numbers that were wrapped, if any.

    Args:
        noise: integers of as many bits as the key's dtype holds; see :meth:`Keystream.integers`.

    Raises:
        PrivacyError: a number does not fit into 64 bits.
    """
    step = amplitude * grid_step(key.dtype)
    device, x = x.device, x.to("cpu")
    largest = torch.linalg.vector_norm(x, math.inf).item() / amplitude
    if largest > _LARGEST[key.dtype]:
        raise PrivacyError(
            f"a row of {key.width:,} numbers has one that is {largest:.3g} times as large as its noise; nothing was "
            "sent. Give a larger scale, or a larger accuracy"
        )
    wide = torch.int64 if largest > _LARGEST_INT32 else noise.dtype
    total = x.mul(1 / step).round_().to(wide).add_(noise)
    spare = 8 * wide.itemsize - BITS[key.dtype]
    wrapped = total.bitwise_left_shift(spare).bitwise_right_shift_(spare)
    missing = total.sub_(wrapped)
    sent = wrapped.to(key.dtype).mul_(step).to(device)
    positions = missing.nonzero()
    if not positions.shape[0]:
        return sent, None
    return sent, Wrapped(positions, missing[positions[:, 0], positions[:, 1]].to(key.dtype).mul_(step))


def unwrap(own: OwnWeights, key: MaskedKey, results: Results, wrapped: Wrapped) -> None:
    """Add to the results of wrapped rows, in place, what they lack."""
    rows = results[0].shape[0]
    for start in range(0, rows, _CHUNK_ROWS):
        end = min(rows, start + _CHUNK_ROWS)
        row = wrapped.positions[:, 0]
        here = (row >= start) & (row < end)
        positions, missing = wrapped.positions[here], wrapped.missing[here]
        if not positions.shape[0]:
            continue
        columns, which = torch.unique(positions[:, 1], return_inverse=True)
        values = missing.new_zeros(end - start, columns.shape[0])
        values[positions[:, 0] - start, which] = missing
        for spec, result in zip(key.layers, results, strict=True):
            result[start:end] += own.sparse_product(key, spec, columns, values).to(result.device)
