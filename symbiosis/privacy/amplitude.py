"""How large the noise is: scale, accuracy, and the power of two that is seen of a request's size.

Masked rows are x + n with noise of half-width A = scale · rms(x), rounded up to a power of two. The result of x + n
carries an error of A's size in the last bit, so a larger scale hides more and costs accuracy.

A is seen. If it followed every call, the amplitudes over the layers of a model would tell which requests are for the
same text, so it stays where it is while it will do; and whoever has the public weights has it begin where the public
model's own rows would, and wraps larger ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from symbiosis.core.requests import Key
from symbiosis.core.terms import Kind
from symbiosis.errors import PrivacyError
from symbiosis.privacy.usual import Usual

__all__ = [
    "DEFAULT_SCALE",
    "SPAN",
    "WRAPPED_SCALE",
    "Levels",
    "Size",
    "error_per_scale",
    "scale_for",
    "size_of",
    "whole",
]

DEFAULT_SCALE = 256.0
WRAPPED_SCALE = 2048.0
"""For who has the public weights: the most, of which a quarter is usual. Logits are about as accurate then as with the
other default under the other schemes. With 256 they were off by 4.5e-5, and more was wrapped."""
_ERROR = 1.5e-6
_WIDE = 4096


def error_per_scale(width: int, dtype: torch.dtype = torch.float32) -> float:
    """Error of results for each unit of scale, at most, relative to what a row of the size that the amplitude is made
    for comes to (its norm times the weight's rms). In fp32 0.25e-6 to 1.3e-6 were measured at widths of 64 to 4096; and
    times 2.7 from there to 53,248, a little less than the square root of the width says."""
    error = _ERROR * math.sqrt(max(1.0, width / _WIDE))
    return error * 2.0**-29 if dtype is torch.float64 else error


_MOST_SCALE = 2.0**20
_MOST = 2.0**80
"""Amplitudes beyond ±80 powers of two would leave no room for products in fp32."""


class Size(NamedTuple):
    """How large the rows of a request are."""

    amplitude: float
    """A power of two; 0 if all rows are zero."""
    finite: bool


SPAN = 16.0
"""An amplitude stays while it is enough, and at most so many times as large as it would have to be. That is what it may
cost in accuracy, at the worst."""
_ABOVE = 1024.0
"""And so many times as large as amplitudes are enough for, rows may be that are wrapped: it costs the tenant nearly the
whole product then. With fp64's numbers, which take most of 64 bits, once."""


class Levels:
    """The amplitudes of one client: for each key, and each kind of work (prompts have first tokens, which some models
    make hundreds of times as large as others; decoding has not).

    They begin with what the client's first requests need, which is seen of them. Or, where it is known how large rows
    usually are, in the middle of what will do for those, and go from there in steps of :data:`SPAN`: down for rows that
    are smaller, which would be inaccurate otherwise. Not up for rows that are larger, unless they are so by
    :data:`_ABOVE`: who has the weights wraps what is larger, and nothing is to be seen of it.

    Args:
        scale: how far above the rows an amplitude is: at least, if the first request tells; at most, beyond rounding
            up to powers of two, with ``usual``.
        usual: how large rows usually are.
        dtype: of masked rows.
    """

    def __init__(self, scale: float, usual: Usual | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.least = scale if usual is None else scale / SPAN
        """How far above the rows an amplitude is, at least; of those that are not larger than usual, with ``usual``."""
        self._above = 1.0 if dtype is torch.float64 else _ABOVE
        self._usual = usual
        self._first = 2.0 ** math.ceil(math.log2(scale))
        self._levels: dict[tuple[Key, Kind], float] = {}

    def at(self, key: Key, kind: Kind, rows: int, needed: float) -> float:
        """What to take for ``rows`` rows that need an amplitude of ``needed``, which is a power of two, or 0 for rows
        that are all zero."""
        level = self._levels.get((key, kind))
        if self._usual is None:
            if not needed:
                return level or self._first
            if level is None or not level / SPAN <= needed <= level:
                level = self._levels[key, kind] = needed
            return level
        size = self._usual.size(key)
        if key.pass_.is_backward:  # of a loss that is a mean over tokens
            size /= rows
        middle = _power(size * self.least * math.sqrt(SPAN))
        level = level or 1.0
        if needed and not level / SPAN <= needed / middle <= level * self._above:
            steps = math.ceil(math.log2(needed / middle) / math.log2(SPAN))
            level = self._levels[key, kind] = SPAN**steps
        return level * middle


def _power(size: float) -> float:
    """The power of two at or above a size."""
    fraction, exponent = math.frexp(size)
    return min(max(math.ldexp(1.0, exponent - (fraction == 0.5)), 1 / _MOST), _MOST)


def size_of(x: torch.Tensor, scale: float) -> Size:
    """The amplitude for rows [n, width]: the power of two at or above ``scale`` times the largest row's rms."""
    norms = torch.linalg.vector_norm(x, dim=None if x.shape[0] == 1 else 1)
    norm = (norms if norms.ndim == 0 else norms.amax()).item()
    size = norm * scale / math.sqrt(x.shape[1])
    if size > _MOST or size != size:
        return Size(0.0, False)
    if size == 0.0:  # or so small that its square is
        size = x.abs().amax().item() * scale
        if size == 0.0:
            return Size(0.0, True)
    return Size(_power(size), True)


def scale_for(
    name: str, scale: float | None, accuracy: float | None, dtype: torch.dtype = torch.float32, width: int = 1
) -> float:
    """The scale that was asked for, or that follows from an accuracy.

    An accuracy is the greatest error of a request's results, root mean square over their columns, relative to what
    its largest row comes to (its norm times the weight's rms). It is kept while amplitudes are as the request needs
    them; after larger rows it may be missed by as many times as those were larger, up to :data:`SPAN` times, by schemes
    without the public weights at hand.

    Args:
        dtype: of the rows.
        width: columns of the widest rows.

    Raises:
        PrivacyError: both are given, or neither means anything.
    """
    if scale is not None and accuracy is not None:
        raise PrivacyError(f"{name}: give scale or accuracy, not both; the one follows from the other")
    if accuracy is not None:
        if not isinstance(accuracy, int | float) or not 0 < accuracy < 1:
            raise PrivacyError(f"{name}: accuracy is {accuracy!r}; give the relative error you accept, such as 1e-4")
        limit = error_per_scale(width, dtype)
        if accuracy < limit:
            precision = "fp64" if dtype is torch.float64 else "fp32"
            raise PrivacyError(
                f"{name}: accuracy={accuracy:g} leaves no room for noise; with rows in {precision}, up to {width:,} "
                f"columns wide, {limit:.1e} is the limit"
            )
        return min(accuracy / limit, _MOST_SCALE)
    scale = DEFAULT_SCALE if scale is None else scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1 <= scale <= _MOST_SCALE:
        raise PrivacyError(f"{name}: scale is {scale!r}; give a number from 1 to {_MOST_SCALE:.0f}")
    return float(scale)


def whole(name: str, **values: object) -> None:
    """Check that options are whole numbers from 1 on.

    Raises:
        PrivacyError: one is not.
    """
    for option, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PrivacyError(f"{name}: {option} is {value!r}; give a whole number, 1 or more")
