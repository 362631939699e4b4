"""Joint decoding: one walk of the model for all clients of a process that decode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from symbiosis.core.requests import Call, Results
from symbiosis.core.transport import Channel
from symbiosis.errors import UsageError

if TYPE_CHECKING:
    from symbiosis.client.joint.decoder import JointDecoder

MODES = ("auto", "exact", "fast", "off")
"""Ways to walk clients together; ``"auto"`` is ``"fast"``."""


def check_mode(mode: str) -> None:
    """Raise UsageError if there is no such mode."""
    if mode not in MODES:
        raise UsageError(f"joint is {mode!r}; choose one of {', '.join(MODES)}")


class Here(NamedTuple):
    """An executor of the same process, whose base layers can be part of a walk."""

    compute: Callable[[Call], Results]
    """Runs base layers immediately, without a queue."""
    submit: Callable[[Call], asyncio.Future[Results]]
    """Queues a call that has its ``work`` set, as the client of joint walks."""


def make_decoder(
    mode: str,
    connect: Callable[[], Awaitable[Channel]],
    may_join: Callable[[str], bool],
    walked: Callable[[str, str | None], None],
    here: Here | None = None,
    most_rows: float = math.inf,
) -> JointDecoder | None:
    """Return a decoder for a mode, or None for ``"off"``; see :class:`~symbiosis.client.joint.decoder.JointDecoder`."""
    if mode == "off":
        return None
    from symbiosis.client.joint.decoder import JointDecoder  # imports PEFT, which takes a second

    return JointDecoder(connect, may_join, walked, here, exact=mode == "exact", most_rows=most_rows)
