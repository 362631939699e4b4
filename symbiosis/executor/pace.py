"""Estimates how long a batch will take, from earlier batches."""

from __future__ import annotations

from collections.abc import Sequence

from symbiosis.core.requests import Key, Pass
from symbiosis.executor.layers import BaseLayer

_FIRST_S = 5e-11
"""Seconds that a multiplication and addition are expected to take before anything was measured."""
_MANY = 32
"""Rows from which on a batch's time is that of its arithmetic, and not that of reading the weights."""
_PART = 0.25
"""Weight of the latest measurement."""
_LARGEST = 4.0
"""Largest multiple of the expected time that is learned. Longer times come from a machine that was suspended."""
_NORMS = Pass.NORMS  # on Python 3.11 a member looked up on its class takes six times as long


class Pace:
    """Seconds per multiplication, learned from batches of many rows.

    The time of such a batch is in proportion to its rows times the weights of its layers. A batch of few rows takes
    longer than this estimate. If one takes less, the estimate is too high and is lowered. The policies, which depend on
    the exact time, learn a line for each key (:mod:`symbiosis.policies.latency`).

    A call for norms multiplies nothing. The first one of a layer reads its weights, and later ones copy what it has
    found. So nothing is learned from it, and it counts as if it had many rows.
    """

    def __init__(self, layers: Sequence[BaseLayer]) -> None:
        self._weights = [layer.size // max(layer.spec.experts, 1) for layer in layers]
        """Weights of each layer; of a bank, those of one expert."""
        self._each_s = _FIRST_S

    def expects(self, key: Key, rows: int) -> float:
        """Return the expected seconds of a batch."""
        if key.pass_ is _NORMS and rows < _MANY:
            rows = _MANY
        return self._work(key, rows) * self._each_s

    def learn(self, key: Key, rows: int, seconds: float) -> None:
        """Note how many seconds a batch took."""
        if key.pass_ is _NORMS:
            return
        each_s = seconds / self._work(key, rows)
        if rows >= _MANY:
            self._each_s += _PART * (min(each_s, _LARGEST * self._each_s) - self._each_s)
        else:
            self._each_s = min(each_s, self._each_s)

    def _work(self, key: Key, rows: int) -> int:
        return rows * (key.choices or 1) * sum([self._weights[layer] for layer in key.layers])
