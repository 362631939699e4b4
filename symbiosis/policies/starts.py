"""Where the walks of each client begin, as a policy sees it."""

from __future__ import annotations

from symbiosis.core.requests import Request
from symbiosis.core.terms import Kind
from symbiosis.core.walk_starts import WalkStarts

_MAX_CLIENTS = 4096


class Starts:
    """Tells which requests begin a walk of their client; see :class:`~symbiosis.core.walk_starts.WalkStarts`. Rows of
    another kind begin one, too."""

    def __init__(self) -> None:
        self._clients: dict[str, tuple[Kind, WalkStarts]] = {}
        """The kind of each client's latest request, and its walks of this kind."""

    def begins(self, request: Request) -> bool:
        """Note the next request of a client, and return whether it begins a walk."""
        known = self._clients.get(request.client)
        if known is None or known[0] is not request.kind:
            if len(self._clients) >= _MAX_CLIENTS:
                self._clients.clear()
            known = self._clients[request.client] = request.kind, WalkStarts()
        return known[1].begins(request.key)
