"""Where the walks of a client begin.

Clients do not tell, and do not always ask for layers in the order of the layer table: it lists Phi-3's ``o_proj``
before its ``qkv_proj``, and the shared expert of Qwen2-MoE after the experts.
"""

from __future__ import annotations

from symbiosis.core.requests import Key


class WalkStarts:
    """Tells which requests of one client, or thread, begin a walk: those for a layer that the present walk has asked
    for already, and those for a forward pass after a backward pass."""

    __slots__ = ("_asked", "_latest")

    def __init__(self) -> None:
        self._asked = 0
        """What the present walk has asked for: a bit for each layer and direction."""
        self._latest: Key | None = None

    def begins(self, key: Key) -> bool:
        """Note the key of the next request, and return whether it begins a walk."""
        layer, backward, latest = key.layers[0], key.pass_.is_backward, self._latest
        bit = 1 << (2 * layer + backward)
        if latest is not None:
            # An adapter may ask for one layer in several ways, as DoRA does for the norms of its weight.
            again = self._asked & bit and (key == latest or layer != latest.layers[0])
            if again or (latest.pass_.is_backward and not backward):
                self._asked = 0
        begins = not self._asked
        self._asked |= bit
        self._latest = key
        return begins
