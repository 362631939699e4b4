"""The results of the demo as plain data, and as tables and a picture that are made of the data."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from symbiosis.cli.demo.jobs import DemoJob
from symbiosis.terminal.machine import machine

TOLERANCE = 1e-3
"""Largest relative difference of two losses that counts as equal."""
TIE = 1e-2
"""Largest difference of two tokens' logits at which either may follow."""
BUSY = 0.1
"""Part of the processors' time in other programs from which the throughput of both ways cannot be compared."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # readers with colour blindness can tell them apart
WAYS = {"shared": "four tenants at once", "plain": "plain jobs in turn; memory: side by side"}
"""The two ways in which the jobs ran, and their names in the table."""

Data = dict[str, Any]


def summarize(
    policy: str, tokenizer: Any, jobs: list[DemoJob], mean_batch: float, bases: dict[str, int], others: float
) -> Data:
    """Return all results, given the bytes of the executor's base model and of all plain jobs' base models, and the part
    of the processors' time that other programs used.

    Times are in seconds, sizes in bytes.
    """
    tenants = [_tenant(job, tokenizer) for job in jobs]
    began, ended = (pick(mark for job in jobs for mark in job.shared.marks) for pick in (min, max))
    seconds = {"shared": ended - began, "plain": sum(job.plain.marks[-1] - job.plain.marks[0] for job in jobs)}
    sizes = {way: bases[way] + sum(sum(tenant[way]["memory"].values()) for tenant in tenants) for way in WAYS}
    return {
        "throughput_ratio": seconds["plain"] / seconds["shared"],
        "memory_ratio": sizes["shared"] / sizes["plain"],
        "agrees": not any(tenant["problems"] for tenant in tenants),
        "policy": policy,
        "seconds": seconds,
        "bytes": sizes,
        "base_bytes": bases,
        "mean_batch": mean_batch,
        "used_by_others": others,
        "machine": machine(),
        "tenants": tenants,
    }


def _tenant(job: DemoJob, tokenizer: Any) -> Data:
    """Return a tenant's results, and what differs from plain transformers + PEFT by more than rounding."""
    told = {name: getattr(job, name) for name in ("name", "method", "learns", "tokens", "difference", "gaps")}
    for way, run in (("shared", job.shared), ("plain", job.plain)):
        before, after = (tokenizer.batch_decode(texts, skip_special_tokens=True) for texts in (run.before, run.after))
        told[way] = asdict(run) | {"before": before, "after": after}
    texts = zip(job.gaps, *(told[way]["before"] + told[way]["after"] for way in WAYS), strict=True)
    problems = [f"{ours!r} in place of {plain!r}" for gap, ours, plain in texts if not gap <= TIE]
    if job.difference > TOLERANCE:
        problems.insert(0, f"losses differ by {job.difference:.1e}, relative to plain PEFT's")
    return told | {"problems": [f"{job.name} ({job.method}): {problem}" for problem in problems]}


def show(out: Console, results: Data) -> None:
    """Print a sample and the tables."""
    first = results["tenants"][0]
    out.print(f"\n[bold]a text of {first['name']}[/], before and after training on {first['learns']}:")
    for when in ("before", "after"):
        out.print(f"  {' '.join(first['shared'][when][0].split())}", markup=False)
    table = Table("tenant", "PEFT", "learns from", "loss", "difference", "texts", box=box.SIMPLE_HEAD)
    for tenant in results["tenants"]:
        ties, count = sum(gap > 0 for gap in tenant["gaps"]), len(tenant["gaps"])
        verdict = f"all {count} equal" if not ties else f"{count - ties} equal, {ties} with tied tokens"
        losses = tenant["shared"]["losses"]
        table.add_row(
            *(tenant[name] for name in ("name", "method", "learns")),
            f"{sum(losses[:5]) / len(losses[:5]):.2f} → {sum(losses[-5:]) / len(losses[-5:]):.2f}",
            f"{tenant['difference']:.0e}",
            "[red]differ[/]" if tenant["problems"] else verdict,
        )
    out.print(table)
    table = Table("", "seconds", "tokens/s", "mean batch", "memory", box=box.SIMPLE_HEAD)
    tokens = sum(tenant["tokens"] for tenant in results["tenants"])
    for (way, name), batch in zip(WAYS.items(), (results["mean_batch"], 1), strict=True):
        seconds, size = results["seconds"][way], results["bytes"][way]
        table.add_row(name, f"{seconds:.1f}", f"{tokens / seconds:.0f}", f"{batch:.2f}", f"{size / 1e6:.0f} MB")
    ratios = [f"{results[name]:.2f}×" for name in ("throughput_ratio", "memory_ratio")]
    table.add_row("ratio", "", ratios[0], "", ratios[1], style="bold")
    out.print(table)
    if (others := results["used_by_others"]) > BUSY:
        out.print(
            f"other programs used {others:.0%} of the processors, so throughput means little; try on an idle machine",
            style="yellow",
        )


def plot(results: Data, file: Path) -> None:
    """Draw what ran when, and the losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), dpi=120, layout="constrained")
    times, losses = figure.subplots(2, height_ratios=[1, 1.2])
    figure.suptitle(
        f"Four tenants on one base model: {results['throughput_ratio']:.1f}× the throughput of plain jobs in turn, "
        f"{results['memory_ratio']:.2f}× the memory of plain jobs side by side"
    )
    tenants = results["tenants"]
    rows = [(way, tenant) for way in WAYS for tenant in tenants]
    for row, (way, tenant) in enumerate(rows):
        began = min(each[way]["marks"][0] for each in tenants)
        parts = [(start - began, end - start) for start, end in itertools.pairwise(tenant[way]["marks"])]
        times.broken_barh(parts, (row - 0.4, 0.8), facecolors=[COLOURS[0], COLOURS[1], COLOURS[0]])
    times.set_yticks(range(len(rows)), [f"{way}: {tenant['name']}" for way, tenant in rows])
    times.invert_yaxis()
    times.set(title="When each job generates (blue) and trains (orange)", xlabel="seconds")
    for tenant, colour in zip(tenants, COLOURS, strict=True):
        label = f"{tenant['name']}: {tenant['method']}"
        losses.plot(tenant["plain"]["losses"], color=colour, alpha=0.3, linewidth=5)
        losses.plot(tenant["shared"]["losses"], color=colour, linewidth=1.3, label=label)
    losses.set(title="Training losses (wide lines: plain PEFT)", xlabel="step", ylabel="nats per token")
    losses.legend(fontsize=9)
    figure.savefig(file, format="png")
