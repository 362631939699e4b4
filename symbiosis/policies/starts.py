"""Where the walks of a client begin, by the keys of its requests.

Clients do not tell, and do not always ask for layers in the order of the layer table: it lists Phi-3's ``o_proj``
before its ``qkv_proj``, and the shared expert of Qwen2-MoE after the experts.
"""

from __future__ import annotations

from symbiosis.core.requests import Key, Pass, Request
from symbiosis.core.terms import Kind

_MAX_CLIENTS = 4096
_BITS = 4 * len(Pass)
"""Possible requests for one layer."""
_FINETUNE = Kind.FINETUNE  # on Python 3.11 a member looked up on its class takes six times as long


class Starts:
    """Tells which requests begin a walk of their client; see :class:`WalkStarts`. A prompt after a token begins a walk,
    and so does a token after a prompt. Fine-tuning, which another thread may do, has walks of its own."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, bool], tuple[Kind, WalkStarts]] = {}
        """The kind of the latest request, and the walks of this kind, by client and by whether it is fine-tuning."""

    def begins(self, request: Request, over: bool = False) -> bool:
        """Note the next request of a client, and return whether it begins a walk, as it does if the one before is known
        to be over."""
        kind = request.kind
        client = request.client, kind is _FINETUNE
        known = self._clients.get(client)
        if known is None or known[0] is not kind or over:
            if known is None and len(self._clients) >= _MAX_CLIENTS:
                del self._clients[next(iter(self._clients))]
            known = self._clients[client] = kind, WalkStarts()
        return known[1].begins(request.key)


class WalkStarts:
    """Tells which requests of one client begin a walk: those that the present walk has made already, and those for a
    forward pass after a backward pass. A model that goes through a layer twice (ALBERT) has several walks for one.

    Requests for one layer are different if they differ in the precision, in the pass (as DoRA's for the norms of a
    weight), or in whether they are for its siblings too. So a walk has a limited number of requests.
    """

    __slots__ = ("_backward", "_made")

    def __init__(self) -> None:
        self._made = 0
        """The requests of the present walk, with a bit for each that is possible."""
        self._backward = False

    def begins(self, key: Key) -> bool:
        """Note the key of the next request, and return whether it begins a walk."""
        layers, pass_, fp32, _ = key
        backward = pass_.is_backward
        kind = 4 * pass_ + 2 * fp32
        if len(layers) == 1:
            bit = again = 1 << (_BITS * layers[0] + kind)
        else:  # they were asked one by one before they were known to be siblings
            bit = 1 << (_BITS * layers[0] + kind + 1)
            again = bit | 1 << (_BITS * layers[-1] + kind)
        if self._made & again or (self._backward and not backward):
            self._made = 0
        begins = not self._made
        self._made |= bit
        self._backward = backward
        return begins
