"""``symbiosis audit``: what a provider could learn from a tenant's traffic, scheme by scheme."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from symbiosis.bench.simulate import PLOTS
from symbiosis.terminal.console import console, writable

if TYPE_CHECKING:
    from symbiosis.privacy.audit import Audit

__all__ = ["audit"]

_HIDDEN = 8
"""What the width is a multiple of: the audit's model has four heads, and rotates pairs of numbers in each."""


def audit(
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            help="Privacy scheme, with options, such as noise-pool:size=16; repeat to compare. By default none and all "
            "that are built in.",
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(min=32, help=f"Width of the model, a multiple of {_HIDDEN}.")] = 128,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts that the tenant generates for, each twice.")] = 20,
    repeats: Annotated[int, typer.Option(min=2, help="Of one more prompt, that is sent over and over.")] = 64,
    lots: Annotated[
        int, typer.Option(min=8, help="Lots of random traffic to compare with. The more, the less an attack may find.")
    ] = 12,
    seed: Annotated[int, typer.Option(help="Of the model, the adapter and the texts. Masks are never seeded.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw it, to this file: .png, .svg or .pdf.")] = None,
    into: Annotated[
        Path | None, typer.Option("--into", help="Also write the tables into this Markdown file, between its marks.")
    ] = None,
) -> None:
    """Play the provider: record a tenant's requests under each privacy scheme, attack them, and show what was got.

    A small random model and a tenant with a LoRA on up_proj, in this process. Of each attack is shown the cosine with
    the truth and the fraction recovered, if that is better than on random traffic.

    Examples:

        symbiosis audit

        symbiosis audit --scheme none --scheme noise-pool:size=16 --scheme local-pads --plot audit.png

        symbiosis audit --into docs/privacy.md --json audit.json
    """
    from symbiosis.privacy.audit import SCHEMES, Plan, around, as_data, write_into
    from symbiosis.privacy.audit import audit as audited
    from symbiosis.privacy.audit import plot as draw
    from symbiosis.terminal.loop import run
    from symbiosis.terminal.machine import machine

    if into is not None:
        around(into)  # that there is a place for it is worth knowing before
    _check(hidden, json, plot, into)
    plan = Plan(hidden=hidden, intermediate=2 * hidden, prompts=prompts, repeats=repeats, seed=seed)
    out = console()
    with out.status("building a model") as status:
        found = run(audited(scheme or SCHEMES, plan, baselines=lots, progress=status.update))
    _show(found)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(json_.dumps({**as_data(found), "machine": machine()}, indent=2, allow_nan=False) + "\n")
    if plot is not None:
        draw(plot, found)
    if into is not None:
        write_into(into, found)


def _check(hidden: int, json: Path | None, plot: Path | None, into: Path | None) -> None:
    """Before the work, which takes minutes.

    Raises:
        UsageError: there is no such model, or a result could not be written in the end.
    """
    from symbiosis.errors import UsageError

    if hidden % _HIDDEN:
        raise UsageError(f"--hidden is {hidden}; give a multiple of {_HIDDEN}, such as {hidden // _HIDDEN * _HIDDEN}")
    if plot is not None and plot.suffix not in PLOTS:
        raise UsageError(f"--plot {plot}: give a file that ends in {', '.join(PLOTS)}")
    for file in (json, plot, into):
        if file is not None:
            writable(file)


def _show(found: Audit) -> None:
    from symbiosis.privacy.audit import COSTS, summary, verdict

    headings, rows = summary(found)
    table = Table(title="the best attack for each goal: cosine with the truth, (recovered), attack")
    table.add_column(headings[0], overflow="fold")
    goals = len(headings) - 1 - len(COSTS)
    for heading in headings[1 : 1 + goals]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row[: 1 + goals])
    costs = Table(title="costs, beside bare rows")
    for heading in (headings[0], *headings[1 + goals :]):
        costs.add_column(heading, justify="left" if heading == headings[0] else "right", overflow="fold")
    seen: set[str] = set()
    for view, row in zip(found.views, rows, strict=True):
        if view.scheme not in seen:
            costs.add_row(view.scheme, *row[1 + goals :])
            seen.add(view.scheme)
    out = console()
    out.print(table)
    out.print(costs)
    for scheme in found.costs:
        out.print(f"{scheme}: {verdict(found, scheme)}")
