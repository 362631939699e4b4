"""Where the walks of each client begin, as a policy sees it."""

from __future__ import annotations

from symbiosis.core.requests import Request
from symbiosis.core.terms import Kind
from symbiosis.core.walk_starts import WalkStarts

_MAX_CLIENTS = 4096
_FINETUNE = Kind.FINETUNE  # on Python 3.11 a member looked up on its class takes six times as long


class Starts:
    """Tells which requests begin a walk of their client; see :class:`~symbiosis.core.walk_starts.WalkStarts`. Prompts
    and tokens begin walks after each other, too. Fine-tuning, which another thread may do, has walks of its own."""

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
