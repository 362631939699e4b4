"""``symbiosis policies``: lists what ``--policy`` and ``Executor(policy=…)`` accept."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from rich import box
from rich.markup import escape
from rich.table import Table

from symbiosis.core.registry import POLICIES, make_policy, names
from symbiosis.terminal.console import console


@dataclass
class _Row:
    name: str
    origin: str
    """``built in``, or the entry point's value."""
    cls: str
    options: str
    description: str
    around: bool = False
    """Whether the policy wraps another policy."""


def policies() -> None:
    """List the batching policies, built in and installed, with their options."""
    table = Table(box=box.SIMPLE_HEAD, title="batching policies", title_justify="left")
    for heading in ("name", "class", "options and their defaults", "what it does"):
        table.add_column(heading, overflow="fold")
    rows = _rows()
    for row in rows:
        cls = row.cls if row.origin == "built in" else f"{row.cls} (installed: {row.origin})"
        table.add_row(*map(escape, (row.name, cls, row.options, row.description)))
    out = console()
    out.print(table)
    out.print("Choose one with its options: --policy opportunistic:wait_ms=20,max_wait_ms=100")
    around = ", ".join(row.name for row in rows if row.around)
    out.print(f"{around} wrap another policy, written after a plus: --policy fair:weights.alice=2+co-serving:slo_ms=50")


def _rows() -> list[_Row]:
    installed = {entry.name: entry for entry in entry_points(group=POLICIES)}
    return [_row(name, installed.get(name)) for name in names(POLICIES)]


def _shown(name: str, default: object) -> str:
    """Return options as they are written after --policy."""
    if isinstance(default, Mapping):
        return ", ".join(f"{name}.{key}={value}" for key, value in default.items())
    return f"{name}={default}"


def _row(name: str, entry: EntryPoint | None) -> _Row:
    origin = entry.value if entry is not None else "built in"
    try:
        cls = entry.load() if entry is not None else type(make_policy(name))
    except Exception as error:  # noqa: BLE001 - another package may raise anything when it is imported
        return _Row(name, origin, "cannot be loaded", "", str(error))
    known = dict(inspect.signature(cls).parameters)
    around = known.pop("policy", None) is not None  # not written as an option
    options = ", ".join(
        option.name if option.default is option.empty else _shown(option.name, option.default)
        for option in known.values()
    )
    first = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    return _Row(name, origin, getattr(cls, "__name__", repr(cls)), options or "none", first, around)
