"""Where the walks of a client begin.

Clients do not tell, and do not always ask for layers in the order of the layer table: it lists Phi-3's ``o_proj``
before its ``qkv_proj``, and the shared expert of Qwen2-MoE after the experts.
"""

from __future__ import annotations

from symbiosis.core.requests import Key, Pass


class WalkStarts:
    """Tells which requests of one client, or thread, begin a walk: those that the present walk has made already, and
    those for a forward pass after a backward pass. A model that goes through a layer twice (ALBERT) has several walks
    for one.

    Requests for one layer are different if they differ in the pass, as DoRA's for the norms of a weight, in the
    precision, or in whether they are for its siblings, too. So a walk has a limited number of requests.
    """

    __slots__ = ("_backward", "_made")

    def __init__(self) -> None:
        self._made = 0
        """The requests of the present walk, with a bit for each that is possible."""
        self._backward = False

    def begins(self, key: Key) -> bool:
        """Note the key of the next request, and return whether it begins a walk."""
        backward = key.pass_.is_backward
        bit = again = _bit(key, key.layers[0]) << (len(key.layers) > 1)
        if len(key.layers) > 1:  # they were asked one by one before they were known to be siblings
            again |= _bit(key, key.layers[-1])
        if self._made & again or (self._backward and not backward):
            self._made = 0
        begins = not self._made
        self._made |= bit
        self._backward = backward
        return begins


def _bit(key: Key, layer: int) -> int:
    """Return the bit for a request for one layer; the next one is for the layer with its siblings."""
    return 1 << (((layer * len(Pass) + key.pass_) * 2 + key.fp32) * 2)
