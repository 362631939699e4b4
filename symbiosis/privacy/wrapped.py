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
from symbiosis.privacy.amplitude import SPAN
from symbiosis.privacy.keystream import BITS
from symbiosis.privacy.masks import Asked
from symbiosis.privacy.own_weights import OwnWeights

__all__ = ["Turns", "unwrap", "wrap"]

_MOST_IN_FP64 = 2.0 ** (64 - 53) - 2
"""Amplitudes that fit into an int64 in steps of :data:`BITS` bits, with room for the noise."""
_CHUNK = 64
"""Rows whose wrapped numbers are made up for at a time: of more, nearly every column of the weight has some."""


class Turns(NamedTuple):
    """The numbers of a matrix that were wrapped."""

    where: torch.Tensor
    """[m, 2]: rows and columns."""
    values: torch.Tensor
    """[m]: what they lack, ±2A."""


def wrap(
    asked: Asked, x: torch.Tensor, noise: torch.Tensor, amplitude: float, least: float
) -> tuple[torch.Tensor, Turns | None]:
    """x + noise [n, width], on the grid and within ±A; and what was wrapped.

    Args:
        noise: whole numbers of as many bits as the dtype holds; see :meth:`Keystream.integers`.
        least: how far the amplitude is above the rows at least, which says how large their numbers can be.

    Raises:
        PrivacyError: that is so little that a number might not fit into 64 bits.
    """
    bits = BITS[asked.dtype]
    step = amplitude * 2.0 ** (1 - bits)
    most = math.sqrt(asked.width) / least  # of a row that is all in one number, by its amplitude
    if most > _MOST_IN_FP64 and asked.dtype is torch.float64:
        scale = math.ceil(SPAN * math.sqrt(asked.width) / _MOST_IN_FP64)
        raise PrivacyError(
            f"the scale is too small for rows of {asked.width:,} numbers in fp64; give {scale} or more, or a larger "
            "accuracy"
        )
    wide = torch.int64 if most > 32 else noise.dtype
    total = x.to("cpu").mul(1 / step).round_().to(wide).add_(noise)
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
