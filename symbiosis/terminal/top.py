"""What an executor does now, for ``symbiosis top`` and ``symbiosis demo --watch``.

An executor's status has counts since its start. :func:`read` checks them, :func:`between` makes rates of two of them,
:func:`why_unshared` says why requests share no batches, and :func:`view` shows all this. None of them reads a clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from symbiosis.errors import WireError
from symbiosis.terminal.console import brief, visible

MOST = 10_000
"""Largest number of names in a table of an executor's status."""
LONGEST = 300
"""Characters of a text of an executor that are shown."""
SHOWN = 40
"""Tenants and groups of layers that are shown, the busiest first."""

FEW = 2
"""Groups of layers, and sentences, that are shown however many tenants there are, if there is room for one tenant."""

_EACH = "each name"
_TENANT: dict[str, Any] = {
    **dict.fromkeys(("clients", "held_bytes", "requests", "members", "rows", "wait_s", "joint", "service"), float),
    **dict.fromkeys(("slo_kept", "slo_missed"), float),
    **{name: {_EACH: float} for name in ("tokens", "waits", "passes", "alone")},
    "unshared": {_EACH: {_EACH: float}},
}
_LAYERS = dict.fromkeys(("blocks", "requests", "batches", "members", "rows", "wait_s"), float)
_ACTIVITY = {
    **dict.fromkeys(("at", "batches", "members", "run_s"), float),
    "tenants": {_EACH: _TENANT},
    "layers": {_EACH: _LAYERS},
    "apart": {_EACH: float},
}
_STATUS = {**dict.fromkeys(("name", "model", "policy", "served_layers"), str), "load": float, "activity": _ACTIVITY}

_BESIDE = {
    "alone": "no other client was at work",
    "thinking": "the other clients were computing their own part of the model",
    "elsewhere": "the other clients waited for other layers, or for another pass or precision",
    "passed over": "the policy left out a request for the same layers",
}
_REASONS = {
    "at-once": "it never waits",
    "deadline": "the request was due",
    "full": "the batch was full",
    "no-client-thinking": "no client could join",
    "no-gain": "it did not expect that a wait saves time",
    "policy-error": "its decision was refused",
}
"""Meaning of the built-in policies' reasons to run a batch."""


def read(status: Any) -> dict[str, Any]:
    """Return the part of an executor's status that is shown, with texts that a terminal can print.

    Raises:
        WireError: it is malformed.
    """
    found: dict[str, Any] = _read(status, _STATUS, "status")
    return found


def _read(value: Any, shape: Any, name: str) -> Any:
    if shape is float:
        if type(value) not in (int, float, type(None)) or not 0 <= (value or 0) < 1e18:
            raise WireError(f"the executor sent {value!r:.50} as {name}, which is not a number from 0 on")
        return value or 0
    if shape is str:
        return _clean(value or "")
    value = {} if value is None else value
    if type(value) is not dict or len(value) > MOST or not all(type(key) is str for key in value):
        raise WireError(f"the executor sent a malformed {name} in its status")
    if _EACH in shape:
        return {_clean(key): _read(item, shape[_EACH], name) for key, item in value.items()}
    return {key: _read(value.get(key), each, key) for key, each in shape.items()}


def _clean(text: object) -> str:
    return visible(str(text)[:LONGEST]).replace("\n", " ").replace("\t", " ")  # names may differ in their spaces


def between(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what an executor did between two states from :func:`read`, as plain data.

    Without an earlier state, or if the executor has started again since, it is what happened since its start.
    """
    counts, then = now["activity"], (before or {}).get("activity", {})
    if then and then["at"] > counts["at"]:
        then = {}
    elif then and then["batches"] > counts["batches"]:  # its counters were reset
        then = {"at": then["at"]}
    past: dict[str, Any] = _minus(counts, then)
    seconds = max(past["at"], 1e-9)
    service = sum(tenant["service"] for tenant in past["tenants"].values())
    tenants = {
        name: {
            **{gauge: counts["tenants"][name][gauge] for gauge in ("clients", "held_bytes")},
            "requests": tenant["requests"],
            "rows_per_s": tenant["rows"] / seconds,
            "tokens_per_s": {kind: tokens / seconds for kind, tokens in tenant["tokens"].items() if tokens},
            "requests_per_batch": _part(tenant["members"], tenant["requests"]),
            "unshared": _part(_unshared(tenant), tenant["requests"]),
            "wait_ms": _part(1e3 * tenant["wait_s"], tenant["requests"]),
            "waits": {why: _part(wait, tenant["wait_s"]) for why, wait in tenant["waits"].items() if wait},
            "slo_kept": _part(tenant["slo_kept"], tenant["slo_kept"] + tenant["slo_missed"]),
            "service": _part(tenant["service"], service if len(past["tenants"]) > 1 else 0),
        }
        for name, tenant in past["tenants"].items()
        if tenant["requests"] or counts["tenants"][name]["clients"]
    }
    stacks = {name.partition(".*.")[0] for name in counts["layers"] if ".*." in name}
    layers = {
        name: {
            "name": _layers_name(name, counts["layers"][name]["blocks"], whole=len(stacks) > 1),
            "batches_per_s": layer["batches"] / seconds,
            "requests_per_batch": _part(layer["members"], layer["batches"]),
            "rows_per_batch": _part(layer["rows"], layer["batches"]),
            "wait_ms": _part(1e3 * layer["wait_s"], layer["requests"]),
        }
        for name, layer in past["layers"].items()
        if layer["batches"]
    }
    return {
        **{name: now[name] for name in ("name", "model", "served_layers", "policy", "load")},
        "seconds": past["at"],
        "requests_per_batch": _part(past["members"], past["batches"]),
        "why": why_unshared(past),
        "tenants": tenants,
        "layers": layers,
    }


def _layers_name(name: str, blocks: float, whole: bool) -> str:
    """Return the name of equal layers of all blocks for people: ``mlp.up_proj in each of 4 blocks, forward``."""
    path, _, pass_ = name.partition(" ")
    _, inside, short = path.partition(".*.") if "…" not in path else ("", "", "")  # a whole walk
    where = "" if not inside else " in 1 block" if blocks == 1 else f" in each of {blocks:.0f} blocks"
    return f"{short if inside and not whole else path}{where}, {pass_}"


def _minus(now: Any, then: Any) -> Any:
    if isinstance(now, dict):
        return {name: _minus(value, then.get(name)) for name, value in now.items()} if then else now
    return max(now - (then or 0), 0)


def _part(value: float, whole: float) -> float | None:
    return value / whole if whole else None


def _unshared(tenant: Mapping[str, Any]) -> float:
    return float(sum(sum(reasons.values()) for reasons in tenant["unshared"].values()))


def why_unshared(past: Mapping[str, Any]) -> list[str]:
    """Return sentences that say how many requests shared a batch and why the others did not, from counts."""
    tenants = {name: tenant for name, tenant in past["tenants"].items() if tenant["requests"]}
    requests = sum(tenant["requests"] for tenant in tenants.values())
    if not requests:
        return ["No request was answered."]
    causes: dict[tuple[str, str], float] = {}
    for tenant in tenants.values():
        for beside, reasons in tenant["unshared"].items():
            for reason, count in reasons.items():
                cause = beside, "" if beside == "alone" else reason
                causes[cause] = causes.get(cause, 0) + count
    alone = sum(causes.values())
    found = [f"{_percent(1 - alone / requests)} of the requests shared a batch."]
    for (beside, reason), count in sorted(causes.items(), key=lambda cause: -cause[1])[:3]:
        if count >= requests / 10:
            meaning = f"{_REASONS[reason]} ({reason})" if reason in _REASONS else reason
            why = f"; the policy's reason: {meaning}" if reason else ""
            found.append(f"{_percent(count / requests)} did not: {_BESIDE.get(beside, beside)}{why}.")
    if alone >= requests / 2 and len(tenants) > 1 and past["layers"]:
        found.append(_how_far_apart(past["apart"], tenants))
        queued, ran = sum(tenant["wait_s"] for tenant in tenants.values()), past["run_s"]
        found.append(
            f"On average a request was queued for {brief(1e3 * queued / requests)} ms, and a batch ran for "
            f"{brief(1e3 * ran / max(past['batches'], 1))} ms."
        )
    for name, tenant in list(tenants.items())[:SHOWN]:
        own = sum(tenant["alone"].values())
        if own > tenant["joint"]:
            why = max(tenant["alone"], key=tenant["alone"].__getitem__)
            found.append(f"{name} decoded {own:.0f} tokens outside joint walks: {why}.")
    return found


def _how_far_apart(apart: Mapping[str, float], tenants: Mapping[str, Any]) -> str:
    """Return a sentence on when clients asked for the same layers."""
    total = sum(apart.values())
    if not total:
        passes = {name: sorted(filter(tenant["passes"].get, tenant["passes"])) for name, tenant in tenants.items()}
        asked = "; ".join(f"{name}: {', '.join(own)}" for name, own in list(passes.items())[:4])
        return f"No two clients asked for the same layers in the same pass and precision within 10 s ({asked})."
    quarter, half = (
        next(bound for bound, reached in zip(apart, accumulate(apart.values()), strict=True) if reached >= part * total)
        for part in (0.25, 0.5)
    )
    return f"Of the requests for the same layers, a quarter came {quarter} or less after another client's, half {half}."


def fitted(past: Mapping[str, Any], out: Console, height: int, title: str = "") -> RenderableType:
    """Return a :func:`view` with as much of its parts as ``height`` lines of a console have room for."""
    most = {"tenants": len(past["tenants"]), "layers": len(past["layers"]), "sentences": len(past["why"])}
    most = {name: min(SHOWN, count) for name, count in most.items()}
    while True:
        shown = view(past, title, **most)
        over = len(out.render_lines(shown, pad=False)) - height
        # The first of these that is larger gives way.
        order = ("layers", FEW), ("sentences", FEW), ("tenants", 1), ("layers", 0), ("sentences", 0)
        cut = next((name for name, least in order if most[name] > least), None)
        if over <= 0 or cut is None:
            return shown
        most[cut] -= max(1, min(over // 8, most[cut] // 2))  # rows of several lines each


def view(
    past: Mapping[str, Any], title: str = "", tenants: int = SHOWN, layers: int = SHOWN, sentences: int = SHOWN
) -> RenderableType:
    """Return what to show of an executor, from :func:`between`.

    Args:
        past: what it did.
        title: its name, in a line of its own.
        tenants: number of tenants, the busiest first.
        layers: number of groups of layers, the busiest first.
        sentences: number of sentences on shared batches and joint walks.
    """
    batch = past["requests_per_batch"]
    about = [
        f"{past['name']} {past['model']}: {past['served_layers']}".lstrip(),
        f"policy {past['policy']}",
        f"load {past['load']:.2f}, {'no batches' if batch is None else f'{batch:.2f} requests per batch'}, "
        f"in the last {brief(past['seconds'])} s",
        *past["why"][:sentences],
    ]
    rows = []
    for name, tenant in sorted(past["tenants"].items(), key=lambda item: -item[1]["rows_per_s"])[:tenants]:
        shared = None if tenant["unshared"] is None else 1 - tenant["unshared"]
        rows.append(
            {
                "tenant": name,
                "tokens/s": _largest(tenant["tokens_per_s"], _number),
                "rows/s": _number(tenant["rows_per_s"]),
                "batch": _number(tenant["requests_per_batch"]),
                "shared": _percent(shared),
                "wait in ms, and why": f"{_number(tenant['wait_ms'])} {_largest(tenant['waits'], _percent)}".strip(),
                "SLO kept": _percent(tenant["slo_kept"]),
                "service": _percent(tenant["service"]),
                "memory": f"{_number(tenant['held_bytes'] / 2**20)} MiB" if tenant["held_bytes"] else "",
            }
        )
    busiest = sorted(past["layers"].values(), key=lambda group: -group["batches_per_s"])[:layers]
    groups = [
        {
            "layers": group["name"],
            "batches/s": _number(group["batches_per_s"]),
            "batch": _number(group["requests_per_batch"]),
            "rows per batch": _number(group["rows_per_batch"]),
            "wait in ms": _number(group["wait_ms"]),
        }
        for group in busiest
    ]
    tables = [
        _Lines(lines, most - len(lines), what)
        for lines, most, what in (
            (rows, len(past["tenants"]), "tenants"),
            (groups, len(past["layers"]), "groups of layers"),
        )
        if lines
    ]
    return Group(*([Text(title, "bold")] if title else []), *map(Text, about), *tables)


@contextlib.contextmanager
def screen(console: Console) -> Iterator[Callable[[RenderableType], object]]:
    """Yield a function that shows something in place of what it showed before; below it, where there is no terminal."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, auto_refresh=False) as live:
        yield partial(live.update, refresh=True)


class _Lines:
    """A table with a line for each row. If the console is too narrow, the first column is cut to a third of it, and
    columns on the right are left out.

    Args:
        rows: their cells by column. Columns without content are left out.
        more: how many further rows there are.
        what: what the rows are, in plural.
    """

    def __init__(self, rows: list[dict[str, str]], more: int, what: str) -> None:
        self.rows = rows
        self.more = f"… and {more} {what} more" if more else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown = [heading for heading in self.rows[0] if any(row[heading] for row in self.rows)]
        wide = options.update(width=1000)
        table = self._table(shown)
        whole = width = console.measure(table, options=wide).maximum
        while width > options.max_width and len(shown) > 1:
            table = self._table(shown, options.max_width // 3)
            width = console.measure(table, options=wide).maximum
            if width > options.max_width:
                shown.pop()
        yield table
        hidden = [self.more, f"a width of {whole} shows all columns" if width < whole else ""]
        if any(hidden):
            yield Text("; ".join(filter(None, hidden)))

    def _table(self, shown: list[str], widest: int | None = None) -> Table:
        """Return a table of some columns; ``widest``: characters of the first one."""
        columns = [Column(heading, no_wrap=True) for heading in shown]
        columns[0].max_width = widest
        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in self.rows:
            table.add_row(*(Text(row[heading]) for heading in shown))
        return table


def _largest(parts: Mapping[str, float], form: Callable[[float], str]) -> str:
    """Return the two largest of some numbers as text."""
    largest = sorted(parts.items(), key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {form(number)}" for name, number in largest if number >= 0.005)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.0f} %"
