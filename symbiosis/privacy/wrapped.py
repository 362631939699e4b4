"""Sums in fixed point that wrap around: what is left of a row, when noise is added, is exactly uniform.

With A the amplitude and δ = 2A / 2²⁴, x is put on a grid, q = x / δ rounded; n is uniform in 24 bits with a sign; and
s = q + n, wrapped into 24 bits, goes out as s·δ. As n is uniform and used once, so is s, whatever x is. What is
wrapped, one number in several hundred, is made up for with a few columns of the public weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from symbiosis.errors import PrivacyError
from symbiosis.privacy.keystream import BITS
from symbiosis.privacy.masks import Asked
from symbiosis.privacy.own_weights import OwnWeights

__all__ = ["Turns", "unwrap", "wrap"]

_MOST = {dtype: 2.0 ** (64 - bits) - 2 for dtype, bits in BITS.items()}
"""Amplitudes that fit into an int64 in steps of :data:`BITS` bits, with room for the noise."""
_FITS = 2.0 ** (32 - BITS[torch.float32]) - 2
"""Into an int32, which noise in fp32 comes in."""
_CHUNK = 64
"""Rows whose wrapped numbers are made up for at a time: of more, nearly every column of the weight has some."""


class Turns(NamedTuple):
    """The numbers of a matrix that were wrapped."""

    where: torch.Tensor
    """[m, 2]: rows and columns."""
    values: torch.Tensor
    """[m]: what they lack, ±2A."""


def wrap(asked: Asked, x: torch.Tensor, noise: torch.Tensor, amplitude: float) -> tuple[torch.Tensor, Turns | None]:
    """x + noise [n, width], on the grid and within ±A; and what was wrapped.

    Args:
        noise: whole numbers of as many bits as the dtype holds; see :meth:`Keystream.integers`.

    Raises:
        PrivacyError: a number does not fit into 64 bits.
    """
    bits = BITS[asked.dtype]
    step = amplitude * 2.0 ** (1 - bits)
    x = x.to("cpu")
    largest = torch.linalg.vector_norm(x, math.inf).item() / amplitude
    if largest > _MOST[asked.dtype]:
        raise PrivacyError(
            f"a row of {asked.width:,} numbers has one {largest:.3g} times as large as its noise; nothing was sent. "
            "Give a larger scale, or a larger accuracy"
        )
    wide = torch.int64 if largest > _FITS else noise.dtype
    total = x.mul(1 / step).round_().to(wide).add_(noise)
    spare = wide.itemsize * 8 - bits
    wrapped = total.bitwise_left_shift(spare).bitwise_right_shift_(spare)
    turns = total.sub_(wrapped)
    sent = wrapped.to(asked.dtype).mul_(step).to(x.device)
    where = turns.nonzero()
    if not where.shape[0]:
        return sent, None
    return sent, Turns(where, turns[where[:, 0], where[:, 1]].to(asked.dtype).mul_(step))


def unwrap(own: OwnWeights, asked: Asked, results: tuple[torch.Tensor, ...], turns: Turns) -> None:
    """Add, in place, what the results of wrapped rows lack."""
    rows = results[0].shape[0]
    for start in range(0, rows, _CHUNK):
        end = min(rows, start + _CHUNK)
        here = (turns.where[:, 0] >= start) & (turns.where[:, 0] < end) if rows > _CHUNK else slice(None)
        at, some = turns.where[here], turns.values[here]
        if not at.shape[0]:
            continue
        columns, which = torch.unique(at[:, 1], return_inverse=True)
        factors = some.new_zeros(end - start, columns.shape[0])
        factors[at[:, 0] - start, which] = some
        for spec, result in zip(asked.layers, results, strict=True):
            result[start:end] += own.sparse(asked, spec, columns, factors).to(result.device)
