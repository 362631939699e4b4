"""Packed weights that are kept in the usual layout too, while a client needs them in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from symbiosis.core.budget import Budget
from symbiosis.core.requests import Key, Pass
from symbiosis.executor.layers import BaseLayer

_OWNER = "packed weights in the usual layout"
"""Owner of the bytes of the budget that such weights take."""
_BACKWARD = Pass.BACKWARD  # on Python 3.11 a member looked up on its class takes six times as long


class Unpacked:
    """Copies of packed weights in the usual layout, which backward passes and passes in fp32 need. A copy stays until
    the last client with such passes leaves, if the budget has room. Otherwise each batch makes its own copy.

    Args:
        layers: the base layers.
        budget: has the room.

    Attributes:
        bytes: bytes of these copies that count in the budget.
    """

    def __init__(self, layers: Sequence[BaseLayer], budget: Budget) -> None:
        self.bytes = 0
        self._layers = layers
        self._budget = budget
        self._clients: set[str] = set()

    def asked(self, client: str, key: Key) -> None:
        """Note that a client has a request for this key."""
        if key.pass_ is _BACKWARD or key.fp32:
            self._clients.add(client)

    def keep(self, key: Key, *, counted: bool) -> None:
        """Let the weights that a batch needs in the usual layout stay in it.

        Args:
            key: the batch's key.
            counted: whether the copies count in the budget. Copies for a client's own thread do not.
        """
        if key.pass_ is _BACKWARD or key.fp32:
            for index in key.layers:
                for weight in self._layers[index].packed:
                    weight.keep(self._room if counted else lambda size: True)

    def left(self, client: str, when_idle: Callable[[Callable[[], object]], object]) -> None:
        """Forget a client. Free the copies after the last one, when the executor is idle."""
        if client in self._clients:
            self._clients.remove(client)
            when_idle(self._release)

    def _room(self, size: int) -> bool:
        if not self._budget.take(_OWNER, size):
            return False
        self.bytes += size
        return True

    def _release(self) -> None:
        if not self._clients:
            for layer in self._layers:
                for weight in layer.packed:
                    weight.release()
            held, self.bytes = self.bytes, 0
            self._budget.give_back(_OWNER, held)
