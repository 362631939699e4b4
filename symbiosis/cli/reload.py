"""SIGHUP: read the file of ``serve --config`` again, and apply limits while tenants are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import typer

from symbiosis.cli.config import read, value_of
from symbiosis.core.registry import make_policy
from symbiosis.errors import UsageError
from symbiosis.log import get_logger

if TYPE_CHECKING:
    from symbiosis import Executor
    from symbiosis.transports.limits import Limits

log = get_logger(__name__)

MAX_LIMIT = 1 << 40


def limits_of(given: list[str]) -> Limits:
    """Return the limits in texts such as ``calls=64``.

    Raises:
        UsageError: a name or a number is not valid.
    """
    from symbiosis.transports.limits import Limits

    known = [field.name for field in fields(Limits)]
    found: dict[str, int] = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in known or not number.isascii() or not number.isdigit() or not number.strip("0"):
            names = ", ".join(known)
            raise UsageError(f"limit {text!r:.300}: the names are {names}; the number is 1 or more")
        if len(number) > 20 or int(number) > MAX_LIMIT:
            raise UsageError(f"limit {text!r:.300}: at most {MAX_LIMIT}")
        found[name] = int(number)
    return Limits(**found)


class Reloader:
    """The limits of ``symbiosis serve``, and how they change when its file has changed.

    Args:
        context: the command; what its line says wins over the file.
        early: the signals that came before there was an executor.
    """

    def __init__(self, context: typer.Context, early: Sequence[int] = ()) -> None:
        self.early = early
        self._context = context
        self._started: dict[str, Any] = dict(context.default_map or {})
        """The values of the file at the start."""
        self._limits, self._max_bytes = self._wanted()

    def apply(self, executor: Executor) -> None:
        """Read the file again, apply its limits and log what has changed. A file that is wrong changes nothing."""
        before = dict(self._context.default_map or {})
        try:
            read(self._context, self._context.params["config"])
            if before and not self._context.default_map:  # it is perhaps being written
                raise UsageError("the file is empty")
            make_policy(value_of(self._context, "policy"))
            limits, max_bytes = self._wanted()
            executor.limit(limits, max_bytes)
        except UsageError as error:
            self._context.default_map = before
            log.error("limits not reloaded", file=str(self._context.params["config"]), why=str(error))
            return
        now: dict[str, Any] = dict(self._context.default_map or {})
        known = sorted(self._started.keys() | now.keys())
        others = [key for key in known if self._started.get(key) != now.get(key)]
        if restart := [key for key in others if key not in ("limit", "max_bytes")]:
            log.warning("changes need a restart", keys=", ".join(restart))
        old = {**asdict(self._limits), "max_bytes": self._max_bytes}
        new = {**asdict(limits), "max_bytes": max_bytes}
        changed = {name: f"{old[name]} → {new[name]}" for name in new if old[name] != new[name]}
        log.info("limits reloaded", **(changed or {"changed": "nothing"}))
        self._limits, self._max_bytes = limits, max_bytes

    def _wanted(self) -> tuple[Limits, int]:
        return limits_of(value_of(self._context, "limit") or []), value_of(self._context, "max_bytes")
