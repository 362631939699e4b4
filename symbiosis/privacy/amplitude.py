"""The amplitude of the noise: how it follows from ``scale`` or ``accuracy``, and when it changes.

Masked rows are x + n with noise of half-width A = scale · rms(x), rounded up to a power of two. Results have an error
of A's size in the last bit, so a larger scale hides more and costs accuracy.

The executor sees A. Amplitudes that followed every request would identify requests for the same text, so an amplitude
stays as long as it is acceptable. A scheme that has the public weights starts at typical sizes of the public model's
rows and wraps larger rows. ``docs/decisions/0031-amplitudes-that-stay.md`` has the evidence.

Legend: n rows.
"""

from __future__ import annotations

import math

import torch

from symbiosis.core.requests import Key
from symbiosis.core.terms import Kind
from symbiosis.errors import PrivacyError
from symbiosis.privacy.typical_sizes import TypicalSizes

DEFAULT_SCALE = 256.0
WRAPPED_SCALE = 2048.0
"""Default scale of schemes that wrap. They use a quarter of it for typical rows, and logits are then about as accurate
as with :data:`DEFAULT_SCALE` under the other schemes."""
SPAN = 16.0
"""An amplitude stays while it suffices and is at most so many times larger than required. This bounds the loss of
accuracy."""
_MAX_SCALE = 2.0**20
_WRAPPED_SPAN = 1024.0
"""Rows that are wrapped may be so many times larger than the amplitude suffices for. Nearly the whole product is then
recomputed by the tenant. In fp64 the factor is 1, because its numbers take most of 64 bits."""
_MAX_AMPLITUDE = 2.0**80
"""Limit of amplitudes, and of their inverses: products with larger ones would overflow in fp32."""


def error_per_scale(width: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest error of results for each unit of scale, for rows of ``width`` columns.

    The error is relative to the norm of the row that the amplitude is made for, times the rms of the weight. Measured
    in fp32: 0.25e-6 to 1.3e-6 at widths of 64 to 4096, and 2.7 times as much at 53,248.
    """
    error = 1.5e-6 * math.sqrt(max(1.0, width / 4096))
    return error * 2.0**-29 if dtype is torch.float64 else error


class Amplitudes:
    """The amplitudes of one client, one for each key and kind of work.

    Without ``typical``, an amplitude starts at what the first request requires. With ``typical``, it starts in the
    middle of the acceptable range for typical rows and moves in steps of :data:`SPAN`: down for smaller rows, which
    would lose accuracy, and up only for rows that are too large to be wrapped.

    Args:
        scale: ratio of an amplitude to the rms of the largest row: the least one without ``typical``, and the largest
            one (up to rounding to powers of two) with ``typical``.
        typical: typical sizes of the public model's rows, for schemes that wrap.
        dtype: dtype of masked rows.
    """

    def __init__(self, scale: float, typical: TypicalSizes | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.least = scale if typical is None else scale / SPAN
        """Least ratio of an amplitude to the rms of the largest row; with ``typical``, of rows up to typical ones."""
        self._typical = typical
        self._wrapped_span = 1.0 if dtype is torch.float64 else _WRAPPED_SPAN
        self._initial = 2.0 ** math.ceil(math.log2(scale))
        self._current: dict[tuple[Key, Kind], float] = {}
        """Amplitudes; with ``typical``, relative to the initial amplitude of each key."""

    def choose(self, key: Key, kind: Kind, rows: int, required: float) -> float:
        """Return the amplitude for a request of ``rows`` rows.

        Args:
            required: the power of two that the request requires; 0 if all its rows are zero.
        """
        current = self._current.get((key, kind))
        if self._typical is None:
            if not required:
                return current or self._initial
            if current is None or not current / SPAN <= required <= current:
                current = self._current[key, kind] = required
            return current
        size = self._typical.size(key)
        if key.pass_.is_backward:  # training losses are means over tokens, typical sizes are of a sum
            size /= rows
        initial = _power_of_two(size * self.least * math.sqrt(SPAN))
        current = current or 1.0
        if required and not current / SPAN <= required / initial <= current * self._wrapped_span:
            steps = math.ceil(math.log2(required / initial) / math.log2(SPAN))
            current = self._current[key, kind] = SPAN**steps
        return current * initial


def _power_of_two(size: float) -> float:
    """Return the power of two at or above a size, within the limits of amplitudes."""
    fraction, exponent = math.frexp(size)
    return min(max(math.ldexp(1.0, exponent - (fraction == 0.5)), 1 / _MAX_AMPLITUDE), _MAX_AMPLITUDE)


def required_amplitude(x: torch.Tensor, scale: float) -> float | None:
    """Return the power of two at or above ``scale`` times the rms of the largest row of x [n, width].

    The result is 0 if all rows are zero, and None if a row is not finite or its amplitude would exceed the limit.
    """
    norms = torch.linalg.vector_norm(x, dim=None if x.shape[0] == 1 else 1)
    norm = (norms if norms.ndim == 0 else norms.amax()).item()
    size = norm * scale / math.sqrt(x.shape[1])
    if math.isnan(size) or size > _MAX_AMPLITUDE:
        return None
    if size == 0.0:  # the squares of very small numbers are zero
        size = x.abs().amax().item() * scale
    return _power_of_two(size) if size else 0.0


def scale_for(
    name: str, scale: float | None, accuracy: float | None, dtype: torch.dtype = torch.float32, width: int = 1
) -> float:
    """Return the scale that an option ``scale`` states, or that follows from an option ``accuracy``.

    An accuracy is the largest error of a request's results: rms over their columns, relative to the norm of the
    request's largest row times the rms of the weight. Schemes without the public weights may exceed it after larger
    rows, by the ratio of those rows and at most by :data:`SPAN`, because amplitudes stay.

    Args:
        name: name of the scheme, for errors.
        dtype: dtype of masked rows.
        width: columns of the widest rows.

    Raises:
        PrivacyError: both options are given, or one of them is out of range.
    """
    if scale is not None and accuracy is not None:
        raise PrivacyError(f"{name}: give scale or accuracy, not both; each follows from the other")
    if accuracy is not None:
        if not isinstance(accuracy, int | float) or not 0 < accuracy < 1:
            raise PrivacyError(f"{name}: accuracy is {accuracy!r}; give the relative error you accept, such as 1e-4")
        limit = error_per_scale(width, dtype)
        if accuracy < limit:
            precision = "fp64" if dtype is torch.float64 else "fp32"
            raise PrivacyError(
                f"{name}: accuracy={accuracy:g} leaves no room for noise; the limit is {limit:.1e} for rows in "
                f"{precision} that are up to {width:,} columns wide"
            )
        return min(accuracy / limit, _MAX_SCALE)
    scale = DEFAULT_SCALE if scale is None else scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1 <= scale <= _MAX_SCALE:
        raise PrivacyError(f"{name}: scale is {scale!r}; give a number from 1 to {_MAX_SCALE:.0f}")
    return float(scale)


def check_positive_integers(name: str, **options: object) -> None:
    """Check options of the scheme ``name``.

    Raises:
        PrivacyError: an option is not an integer of at least 1.
    """
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PrivacyError(f"{name}: {option} is {value!r}; give a whole number of at least 1")
