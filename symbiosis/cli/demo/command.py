"""The ``symbiosis demo`` command: its options, and what happens one after another."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from symbiosis.core.registry import make_policy
from symbiosis.errors import UsageError
from symbiosis.terminal.console import console

if TYPE_CHECKING:
    from symbiosis.cli.demo.jobs import Plan
    from symbiosis.cli.demo.report import Report
    from symbiosis.cli.demo.serve import Served


class Precision(StrEnum):
    """In what precision the base model is served."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Base model: a folder or hub id. By default a small Llama, trained once and cached."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="What to fine-tune on: a .jsonl file of prompt and completion (the loss is on the completion) or a "
            ".txt file; each of the two tenants gets one half. By default text that ships with CPython."
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Batching policy, with options if need be; `symbiosis policies` lists them.")
    ] = "opportunistic",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps (default: 120; 30 with --model).", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a training batch.")] = 4,
    sequence: Annotated[
        int | None, typer.Option(min=8, help="Tokens in a training sequence (default: 96).", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the plot.")] = Path("demo-output"),
    json: Annotated[Path | None, typer.Option(help="Also write all results to this file.")] = None,
    device: Annotated[str, typer.Option(help="Where base model and tenants run, such as cpu or cuda.")] = "cpu",
    dtype: Annotated[
        Precision | None,
        typer.Option(help="Precision of the base model (default: the checkpoint's).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of adapters, dropout and data order.")] = 0,
) -> None:
    """Four tenants on one base model at once: two fine-tune, two generate; checked against plain transformers + PEFT.

    Ends with exit status 1 if a tenant does not get what plain transformers + PEFT gives.
    """
    started = time.monotonic()
    out = console()
    make_policy(policy)  # a typing mistake should show at once, not after a minute of training
    _check_outputs(output, json)
    out.print("symbiosis demo: four tenants, one base model", style="bold")
    with _quiet_libraries():
        from symbiosis.cli.demo.plan import Settings, make_plan

        settings = Settings(
            model=model,
            data=data,
            policy=policy,
            steps=steps or (120 if model is None else 30),
            batch=batch,
            sequence=sequence,
            device=device,
            dtype=None if dtype is None else dtype.value,
            seed=seed,
        )
        plan = make_plan(settings, out)
        for note in plan.notes:
            out.print(escape(note), style="dim")
        report = _run(plan, out)
        _finish(report, out, output / "demo.png", json)
    out.print(f"[dim]took {time.monotonic() - started:.0f} s[/]")
    report.check()


def _check_outputs(output: Path, json: Path | None) -> None:
    """Find out before the work, not after it, that results cannot be written."""
    for option, folder in (("--output", output), ("--json", json.parent if json is not None else output)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{option}: cannot make the folder {folder} ({error.strerror}); choose another") from error
        if not os.access(folder, os.W_OK):
            raise UsageError(f"{option}: the folder {folder} cannot be written to; choose another")
    if json is not None and json.is_dir():
        raise UsageError(f"--json: {json} is a folder; give the name of a file")


def _run(plan: Plan, out: Console) -> Report:
    from symbiosis.cli.demo.live import Board
    from symbiosis.cli.demo.report import Report
    from symbiosis.cli.demo.serve import serve
    from symbiosis.terminal.loop import run

    out.print(f"\n[bold]one executor, four tenants at once[/] ({escape(plan.label)}, {escape(plan.policy)})")
    served: Served = run(serve(plan, Board(out, plan).watch))
    _run_plain(plan, out)
    return Report(plan, served)


def _run_plain(plan: Plan, out: Console) -> None:
    """The same jobs again, without symbiosis."""
    from symbiosis.cli.demo import plain
    from symbiosis.cli.demo.live import Steps

    out.print("\n[bold]the same jobs with plain transformers + PEFT, one after another, a base model each[/]")
    with Steps(out) as progress:
        for job in plan.trainings:
            what, count = f"{job.name} fine-tunes ({job.method})", len(job.batches)
            plain.train(
                plan, job, lambda loss, job=job, what=what, count=count: progress(  # type: ignore[misc]
                    what, len(job.plain_losses), count, f"loss {loss:.3f}"
                )
            )  # fmt: skip
        for generation in plan.generations:
            what, count = f"{generation.name} generates ({generation.method})", len(generation.outputs)
            plain.generate(
                plan, generation, lambda job=generation, what=what, count=count: progress(  # type: ignore[misc]
                    what, len(job.plain_outputs), count
                )
            )  # fmt: skip
    out.print()


def _finish(report: Report, out: Console, picture: Path, json: Path | None) -> None:
    """Tables, picture, JSON: all of it also when something does not agree."""
    from symbiosis.cli.demo.plot import save_plot

    report.print(out)
    save_plot(report, picture)
    out.print(f"plot: {escape(str(picture))}", soft_wrap=True)
    if json is not None:
        report.save_json(json)
        out.print(f"results: {escape(str(json))}", soft_wrap=True)


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep progress bars and advice of transformers out of the display."""
    import warnings

    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module=r"peft\.")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
