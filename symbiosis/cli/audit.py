"""``symbiosis audit``: show what a provider could learn from a tenant's traffic under each privacy scheme."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from symbiosis.errors import UsageError
from symbiosis.terminal.console import PLOTS, console, writable, write_and_show, write_json
from symbiosis.terminal.loop import run

if TYPE_CHECKING:
    from symbiosis.privacy.audit.result import Audit

_HIDDEN_STEP = 8
"""Divisor of the width: the audit's model has four heads, and rotary embeddings of pairs of numbers in each."""


def audit(
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            help="Privacy scheme, with options, such as noise-pool:size=16; repeat to compare several. Default: none "
            "and all built-in schemes.",
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(min=32, help=f"Width of the model, a multiple of {_HIDDEN_STEP}.")] = 128,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts that the tenant generates for, each twice.")] = 20,
    repeats: Annotated[int, typer.Option(min=2, help="Repetitions of one further prompt.")] = 64,
    lots: Annotated[
        int, typer.Option(min=8, help="Sets of random traffic to compare with; more sets make smaller finds visible.")
    ] = 12,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**32 - 1, help="Seed of model, adapter and texts. Masks are never seeded."),
    ] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the result: a .png, .svg or .pdf file.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", help="Also write the tables into this Markdown file, between its two marks."),
    ] = None,
) -> None:
    """Play the provider: record a tenant's requests under each privacy scheme, and show which attacks on them succeed.

    The tenant has a small random model and a LoRA on up_proj, in this process. For each attack that did better than on
    random traffic, the tables show the cosine with the truth and the recovered fraction.

    Examples:

        symbiosis audit

        symbiosis audit --scheme none --scheme noise-pool:size=16 --scheme local-pads --plot audit.png

        symbiosis audit --into docs/privacy.md --json audit.json
    """
    from symbiosis.privacy.audit.report import as_data, split_page, write_into
    from symbiosis.privacy.audit.report import plot as draw
    from symbiosis.privacy.audit.run import SCHEMES
    from symbiosis.privacy.audit.run import audit as run_audit
    from symbiosis.privacy.audit.workload import Workload
    from symbiosis.terminal.machine import machine

    if into is not None:
        split_page(into)  # raises before the work if the page has no place for the tables
    if hidden % _HIDDEN_STEP:
        nearest = hidden // _HIDDEN_STEP * _HIDDEN_STEP
        raise UsageError(f"--hidden is {hidden}; give a multiple of {_HIDDEN_STEP}, such as {nearest}")
    if plot is not None and plot.suffix not in PLOTS:
        raise UsageError(f"--plot {plot}: give a file that ends in {', '.join(PLOTS)}")
    writable(json, plot, into)
    plan = Workload(hidden=hidden, intermediate=2 * hidden, prompts=prompts, repeats=repeats, seed=seed)
    with console().status("building a model") as status:
        result = run(run_audit(scheme or SCHEMES, plan, baselines=lots, progress=status.update))
    write_and_show(
        (json, lambda file: write_json(file, {**as_data(result), "machine": machine()})),
        (plot, lambda file: draw(file, result)),
        (into, lambda file: write_into(file, result)),
        show=lambda: _show(result),
    )


def _show(result: Audit) -> None:
    from symbiosis.privacy.audit.report import cost_table, summary, verdict

    out = console()
    out.print(_table("the best attack for each goal: cosine with the truth, (recovered), attack", *summary(result)))
    out.print(_table("costs relative to bare rows", *cost_table(result)))
    for scheme in result.costs:
        out.print(f"{scheme}: {verdict(result, scheme)}")


def _table(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    table = Table(*headings, title=title)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    return table
