"""``symbiosis policies``: lists what ``--policy`` and ``Executor(policy=…)`` accept."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from rich import box
from rich.markup import escape
from rich.table import Table

from symbiosis.core.registry import POLICIES, find, names
from symbiosis.errors import UnknownNameError
from symbiosis.terminal.console import console


def policies() -> None:
    """List the batching policies, built in and installed, with their options."""
    table = Table(box=box.SIMPLE_HEAD, title="batching policies", title_justify="left")
    for heading in ("name", "class", "options and their defaults", "what it does"):
        table.add_column(heading, overflow="fold")
    around = []
    for name in names(POLICIES):
        cells, wraps = _described(name)
        table.add_row(*map(escape, (name, *cells)))
        around += [name] if wraps else []
    out = console()
    out.print(table)
    out.print("Choose one with its options: --policy opportunistic:wait_ms=20,max_wait_ms=100")
    out.print(
        f"{', '.join(around)} wrap another policy, written after a plus: "
        "--policy fair:weights.alice=2+co-serving:slo_ms=50"
    )


def _shown(name: str, default: object) -> str:
    """Return options as they are written after --policy."""
    if isinstance(default, Mapping):
        return ", ".join(f"{name}.{key}={value}" for key, value in default.items())
    return f"{name}={default}"


def _described(name: str) -> tuple[tuple[str, str, str], bool]:
    """Return class, options and description of a policy, and whether it wraps another one."""
    try:
        cls, package = find(POLICIES, name)
    except UnknownNameError as error:
        return ("cannot be loaded", "", str(error)), False
    origin = f" (installed: {package})" if package else ""
    known = dict(inspect.signature(cls).parameters)
    wraps = known.pop("policy", None) is not None  # not written as an option
    options = ", ".join(
        option.name if option.default is option.empty else _shown(option.name, option.default)
        for option in known.values()
    )
    first = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    return (f"{getattr(cls, '__name__', repr(cls))}{origin}", options or "none", first), wraps
