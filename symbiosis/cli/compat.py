"""``symbiosis compat``: which models and PEFT methods give what plain transformers + PEFT gives, and what is shared."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from symbiosis.errors import UsageError
from symbiosis.terminal.console import console, writable, write_and_show, write_json
from symbiosis.terminal.progress import Steps

if TYPE_CHECKING:
    from symbiosis.testing.compat import Cell, ServedPart


def compat(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders or hub ids of models of your own, configurations (a random model of this size is tried), or "
            "classes of transformers that the table knows, such as MixtralForCausalLM or 'LlamaForCausalLM in bf16'. "
            "Default: all that the table knows.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="PEFT method, as the table names it; repeat for several.", show_default=False),
    ] = None,
    transport: Annotated[
        list[str] | None, typer.Option(help="inproc or shm; repeat for both. Default: both.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="Also write a Markdown page to this file.")] = None,
) -> None:
    """Try models with PEFT methods against plain transformers + PEFT, and show what of each model is shared.

    Every cell is a job: logits, generation, gradients, three optimizer steps, and the adapter saved and loaded. Its
    result is equal, refused with a reason, impossible in plain PEFT too, or wrong. Exit status 1 if one is wrong.
    Models of the table are small and random. All take about a quarter of an hour on 2 cores.

    Examples:

        symbiosis compat ./llama

        symbiosis compat MixtralForCausalLM --method LoRA --transport shm
    """
    from symbiosis.terminal.loop import run, wait_passively

    wait_passively()
    from symbiosis.terminal.machine import machine
    from symbiosis.testing.compat import METHODS, TRANSPORTS, WRONG, as_data
    from symbiosis.testing.compat_page import write_page

    writable(json, page)
    for given, known, option in ((method, METHODS, "--method"), (transport, TRANSPORTS, "--transport")):
        for name in given or ():
            if name not in known:
                raise UsageError(f"{option} {name!r}: choose from {', '.join(map(repr, known))}")
    shares, cells = run(_try(models, method, transport or list(TRANSPORTS)))
    write_and_show(
        (json, lambda file: write_json(file, {**as_data(shares, cells), "machine": machine()})),
        (page, lambda file: write_page(file, shares, cells)),
        show=lambda: _show(shares, cells, sizes=models is not None),
    )
    if any(cell.verdict == WRONG for cell in cells):
        raise typer.Exit(1)


async def _try(
    models: list[str] | None, methods: list[str] | None, transports: list[str]
) -> tuple[list[ServedPart], list[Cell]]:
    import transformers

    from symbiosis.testing.compat import cells_of, load, shares_of, try_cell
    from symbiosis.testing.formats import IN_FORMATS
    from symbiosis.testing.zoo import ZOO

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")  # of each other's old names
    names = models or [*ZOO, *IN_FORMATS]
    work = {name: cells_of(name, methods, transports) for name in names}
    shares: list[ServedPart] = []
    cells: list[Cell] = []
    total = sum(map(len, work.values()))
    with Steps(console(stderr=True)) as steps:
        for name, pairs in work.items():
            steps("cells", len(cells), total, name)
            shares.append(shares_of(name, *load(name, dtype=None)))  # sizes are those of the checkpoint's precision
            model, reads = load(name)
            if not reads:
                total -= len(pairs)
                kind = type(model).__name__
                console(stderr=True).print(
                    f"{escape(name)} is a {kind}: compat has no inputs for it, so this says only what is served"
                )
            for one, over in pairs if reads else ():
                steps("cells", len(cells), total, f"{name}, {one}, {over}")
                cells.append(await try_cell(name, model, reads, one, over))
        steps("cells", total, total)
    return shares, cells


def _show(shares: list[ServedPart], cells: list[Cell], *, sizes: bool) -> None:
    from symbiosis.testing.compat import EQUAL, LEAST_SERVED, WRONG

    out = console()
    methods = list(dict.fromkeys(cell.method for cell in cells))
    table = Table("model", "served", *methods, title="equal to plain transformers + PEFT?")
    found: dict[tuple[str, str], set[str]] = {}
    for cell in cells:
        found.setdefault((cell.model, cell.method), set()).add(cell.verdict)
    for share in shares:
        verdicts = [found.get((share.model, method), set()) for method in methods]
        texts = [", ".join(sorted(verdict)) for verdict in verdicts]
        table.add_row(escape(share.model), f"{share.served:.0%}", *texts)
    out.print(table)
    for share in shares:
        if sizes:
            out.print(f"{escape(share.model)}: {share.sizes()}")
        for text in share.unserved if share.served < LEAST_SERVED else ():
            out.print(f"{escape(share.model)}, not served: {escape(text)}")
    told: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        if cell.verdict != EQUAL:
            told.setdefault((cell.verdict, cell.method, cell.detail), []).append(cell)
    for (verdict, method, detail), several in told.items():
        who = f"{several[0].model}, {several[0].transport}" + (
            f" and {len(several) - 1} more" if len(several) > 1 else ""
        )
        style = "bold red" if verdict == WRONG else "bold"
        out.print(f"[{style}]{verdict}[/]: {escape(method)} ({escape(who)}): {escape(detail)}")
    counts: Any = Counter(cell.verdict for cell in cells)
    if counts:
        out.print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
