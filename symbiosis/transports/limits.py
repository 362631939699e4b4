"""Limits of one client, which an executor enforces and tells the client when it joins."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_REPLICAS = 64
"""Addresses of one model that a client takes."""


@dataclass(frozen=True)
class Limits:
    """Limits of one client, for :meth:`symbiosis.Executor.listen`. All are at least 1.

    Args:
        calls: outstanding calls. A client that exceeds this limit is not read until it is within it.
        rows: outstanding rows. A client that exceeds this limit, or the next one, is disconnected.
        arena_bytes: bytes of the memory that carries the client's tensors. An executor lowers it to an eighth of what
            its ``max_bytes`` leaves for the memory of connections.
        clients: open clients of one tenant at one address, over ``tcp://`` and ``dist://``. Status
            connections are counted apart: up to 64, or up to ``clients`` if that is more.
    """

    calls: int = 64
    rows: int = 1 << 20
    arena_bytes: int = 1 << 30
    clients: int = 64

    def within(self, largest: int) -> Limits:
        """Return these limits with at most ``largest`` bytes for the tensors of a client."""
        return replace(self, arena_bytes=min(self.arena_bytes, largest))
