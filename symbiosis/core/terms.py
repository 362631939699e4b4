"""Terms: what a client asks for, and what it gets.

A client states its wishes when it joins. :func:`effective` turns them, once, into the terms that hold for all of its
requests. The provider may grant any terms to a client. A client in another process may ask for a lower priority than
the default, never for a higher one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from symbiosis.errors import UsageError

MAX_PRIORITY = 1000


class Kind(IntEnum):
    """The purpose of a request's rows. Kinds ascend from the most urgent to the most patient."""

    DECODE = 0
    PREFILL = 1
    FINETUNE = 2


class Terms(NamedTuple):
    """Priority and latency targets of one client. A policy uses the fields that it knows."""

    priority: int = 0
    """Higher priorities are served first."""
    slo_ms: float | None = None
    """Latency target for each generated token, in milliseconds. None means the policy's default."""
    ttft_ms: float | None = None
    """Latency target for the first token, in milliseconds. None means the policy's default."""
    kind: Kind | None = None
    """The kind of all requests of the client. None means that the kind follows from the call."""

    def check(self, token_s: float = 0.0) -> Terms:
        """Return these terms.

        Args:
            token_s: seconds that one token takes in the base layers of an idle executor, where that is known.

        Raises:
            UsageError: a field has no valid value, or a latency target cannot be reached.
        """
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or abs(self.priority) > MAX_PRIORITY:
            raise UsageError(
                f"priority is {self.priority!r}; it must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        for name, value in (("slo_ms", self.slo_ms), ("ttft_ms", self.ttft_ms)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
            ):
                raise UsageError(f"{name} is {value!r}; it must be a number of milliseconds greater than 0")
            if value is not None and value < 1e3 * token_s:
                raise UsageError(
                    f"{name} is {value:g}, but one token takes {1e3 * token_s:.3g} ms in the base layers of the idle "
                    "executor; give a longer time"
                )
        if self.kind is not None and not isinstance(self.kind, Kind):
            raise UsageError(
                f"kind is {self.kind!r}; it must be one of {', '.join(f'Kind.{each.name}' for each in Kind)}, "
                f"from {Kind.__module__}"
            )
        return self

    def times(self, part: float) -> Terms:
        """Return the terms for a part of a walk: latency targets are for that part of the time."""
        slo_ms, ttft_ms = (None if target is None else target * part for target in (self.slo_ms, self.ttft_ms))
        return self._replace(slo_ms=slo_ms, ttft_ms=ttft_ms)


NO_TERMS = Terms()
MAX_NAME = 128
"""Most characters of a client's name."""
JOINT = "joint walks"
"""Name of the client that walks the model for several tenants of the executor's process. No tenant may have it."""


def is_name(name: object) -> bool:
    """Return whether a client may have this name: a text of 1 to :data:`MAX_NAME` printable characters."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()


@lru_cache(1 << 14)
def tenant_of(client: str) -> str:
    """Return the tenant of a client: ``alice`` for ``alice/notebook``, and the whole of a name without a slash."""
    return client.partition("/")[0]


def effective(wishes: Terms, default: Terms, *, trusted: bool) -> Terms:
    """Return the terms that hold for a client.

    Args:
        wishes: what the client, or the provider on its behalf, stated at joining.
        default: what the policy grants to a client of this name.
        trusted: whether the provider stated the wishes: then the priority is added to the default, and the wished
            targets hold. Otherwise the wishes may lower the priority, lengthen the default's targets, and set targets
            that the default does not have.
    """
    if trusted:
        return Terms(
            default.priority + wishes.priority,
            wishes.slo_ms or default.slo_ms,
            wishes.ttft_ms or default.ttft_ms,
            wishes.kind,
        )
    return Terms(
        default.priority + min(wishes.priority, 0),
        _longer(wishes.slo_ms, default.slo_ms),
        _longer(wishes.ttft_ms, default.ttft_ms),
        wishes.kind,
    )


def most_urgent(terms: Iterable[Terms]) -> Terms:
    """Return the terms of a request that serves several clients: the highest priority and the shortest targets."""
    terms = list(terms)
    return Terms(
        max((each.priority for each in terms), default=0),
        min((each.slo_ms for each in terms if each.slo_ms), default=None),
        min((each.ttft_ms for each in terms if each.ttft_ms), default=None),
    )


MOST_DECODED = 64
"""Largest decode request of an untrusted client, in rows: one token of 64 texts. A larger one counts as a prompt.
DeepSeek makes such requests: it expands the latent vectors of all earlier tokens for each new one."""


def kind_of(terms: Terms, stated: Kind, rows: int, *, backward: bool, trusted: bool) -> Kind:
    """Return the kind of a request.

    Args:
        terms: the client's effective terms.
        stated: the kind that the client states.
        rows: number of its rows.
        backward: whether it is for a backward pass.
        trusted: whether the provider stands for what the client states. Otherwise the client may state that its rows
            are more patient than they look, never more urgent.
    """
    kind = Kind.FINETUNE if backward else stated
    if kind is Kind.DECODE and not trusted and rows > MOST_DECODED:
        kind = Kind.PREFILL
    if terms.kind is None:
        return kind
    return terms.kind if trusted else max(kind, terms.kind)


def _longer(wish: float | None, default: float | None) -> float | None:
    """Return the wish, but no less than the default."""
    if wish is None or default is None:
        return wish or default
    return max(wish, default)
