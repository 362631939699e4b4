"""The ``symbiosis demo`` command: its options, and what happens one after another."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from symbiosis.core.registry import make_policy
from symbiosis.errors import BrokenError
from symbiosis.terminal.console import console, writable, write_and_show, write_json

if TYPE_CHECKING:
    from symbiosis.cli.demo.jobs import DemoJob, JobResult
    from symbiosis.cli.demo.results import Data


def demo(
    policy: Annotated[
        str, typer.Option(help="Batching policy, with options if need be; `symbiosis policies` lists them.")
    ] = "opportunistic",
    output: Annotated[Path, typer.Option(help="Folder for the plot.")] = Path("demo-output"),
    json: Annotated[Path | None, typer.Option(help="Also write all results to this file, as JSON.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of adapters, dropout and data order.")] = 0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show what tenants and layers do, as `symbiosis top` does.")
    ] = False,
) -> None:
    """Four tenants generate, fine-tune and generate again on one base model at once, and then with plain PEFT in turn.

    The base model has 19.7 million parameters. It is trained on this machine the first time, in about a minute. The
    command compares losses, texts, throughput and memory of both ways. It ends with exit status 1 if losses or texts
    are not those of plain transformers + PEFT.
    """
    started = time.monotonic()
    out = console()
    make_policy(policy)  # so that a mistake shows before the work
    writable(output, folder=True)
    writable(json)
    results = _run(out, policy, seed, watch)
    from symbiosis.cli.demo.results import plot, show

    write_and_show(
        (json, lambda file: write_json(file, results)),
        (output / "demo.png", lambda file: plot(results, file)),
        show=lambda: show(out, results),
    )
    out.print(f"plot: {output / 'demo.png'}", markup=False, soft_wrap=True)
    if json is not None:
        out.print(f"results: {json}", markup=False, soft_wrap=True)
    out.print(f"took {time.monotonic() - started:.0f} s", style="dim")
    if problems := [problem for tenant in results["tenants"] for problem in tenant["problems"]]:
        raise BrokenError("not what plain transformers + PEFT gives:\n  " + "\n  ".join(problems))


def _run(out: Console, policy: str, seed: int, watch: bool) -> Data:
    """Run the jobs in both ways, and return the results."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from symbiosis.cli.demo.base_model import LIMIT_S, STEPS, STEPS_FILE, base_model
    from symbiosis.cli.demo.jobs import make_jobs, run_plain, run_shared
    from symbiosis.cli.demo.results import summarize
    from symbiosis.terminal.loop import run
    from symbiosis.terminal.machine import OtherLoad
    from symbiosis.terminal.progress import Steps

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")  # of each other's old names
    with Steps(out) as steps:
        folder = base_model(lambda done, total, loss: steps("base model", done, total, f"training; loss {loss:.2f}"))
    trained = int((folder / STEPS_FILE).read_text(encoding="ascii"))
    if trained < STEPS:
        out.print(
            f"the base model was trained for {trained} of {STEPS} steps only, the most that this machine made in "
            f"{LIMIT_S:g} s; to train it anew, delete {folder}",
            soft_wrap=True,
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    jobs = make_jobs(tokenizer, seed)

    def show(job: DemoJob, run: JobResult) -> None:
        total = len(job.batches) + 2 * len(job.prompts)
        done = len(run.losses) + len(run.before) + len(run.after)
        steps(f"{job.name:<5} {job.method:<13}", done, total, f"loss {run.losses[-1]:.2f}" if run.losses else "")

    others = OtherLoad()
    out.print("\nfour tenants at once on one executor", style="bold")
    if watch:
        base, mean_batch = run(run_shared(folder, policy, jobs, lambda job, run: None, out))
    else:
        with Steps(out) as steps:
            base, mean_batch = run(run_shared(folder, policy, jobs, show))
    out.print("\nthe same jobs with plain transformers + PEFT, in turn", style="bold")
    with Steps(out) as steps:
        plain_base = sum(run_plain(folder, job, show) for job in jobs)
    results = summarize(policy, tokenizer, jobs, mean_batch, {"shared": base, "plain": plain_base}, others.part())
    return results | {"base_steps": trained}
