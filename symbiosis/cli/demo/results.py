"""The results of the demo as plain data, and as tables and a picture that are made of the data."""

from __future__ import annotations

import itertools
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from symbiosis.cli.demo.jobs import Job, Run

TOLERANCE = 1e-3
"""Largest relative difference of two losses that counts as equal."""
TIE = 1e-2
"""Largest difference of two tokens' logits at which either may follow."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # readers with colour blindness can tell them apart
WAYS = {"shared": "four tenants at once", "plain": "plain jobs in turn; memory: side by side"}
"""The two ways in which the jobs ran, and their names in the table."""

Data = dict[str, Any]


def summarize(policy: str, tokenizer: Any, jobs: list[Job], mean_batch: float, bases: dict[str, int]) -> Data:
    """Return all results. Times are in seconds, sizes in bytes.

    Args:
        mean_batch: requests in a batch of the executor.
        bases: bytes of the executor's base model, at most, and of the plain jobs' base models together.
    """

    def told(run: Run) -> Data:
        before, after = (tokenizer.batch_decode(texts, skip_special_tokens=True) for texts in (run.before, run.after))
        return asdict(run) | {"before": before, "after": after}

    tenants = [
        {name: getattr(job, name) for name in ("name", "method", "learns", "tokens", "difference", "gaps")}
        | {way: told(getattr(job, way)) for way in WAYS}
        for job in jobs
    ]
    began, ended = (pick(mark for job in jobs for mark in job.shared.marks) for pick in (min, max))
    seconds = {"shared": ended - began, "plain": sum(job.plain.marks[-1] - job.plain.marks[0] for job in jobs)}
    sizes = {way: bases[way] + sum(sum(tenant[way]["memory"].values()) for tenant in tenants) for way in WAYS}
    return {
        "throughput_ratio": seconds["plain"] / seconds["shared"],
        "memory_ratio": sizes["shared"] / sizes["plain"],
        "agrees": not any(map(problems, tenants)),
        "policy": policy,
        "seconds": seconds,
        "bytes": sizes,
        "base_bytes": bases,
        "mean_batch": mean_batch,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "tenants": tenants,
    }


def problems(tenant: Data) -> list[str]:
    """Return what differs from plain transformers + PEFT by more than rounding."""
    who = f"{tenant['name']} ({tenant['method']})"
    found = []
    if tenant["difference"] > TOLERANCE:
        found.append(f"{who}: losses differ by {tenant['difference']:.1e}, relative to plain PEFT's")
    texts = [tenant[way]["before"] + tenant[way]["after"] for way in WAYS]
    for gap, ours, plain in zip(tenant["gaps"], *texts, strict=True):
        if not gap <= TIE:
            found.append(f"{who}: {ours!r} in place of {plain!r}")
    return found


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
            "[red]differ[/]" if problems(tenant) else verdict,
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


def plot(results: Data, file: Path) -> None:
    """Draw what ran when, the losses, and the memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), dpi=120, layout="constrained")
    axes = figure.subplot_mosaic([["time", "time"], ["loss", "memory"]], height_ratios=[1, 1.2])
    figure.suptitle(
        f"Four tenants on one base model: {results['throughput_ratio']:.1f}× the throughput of plain jobs in turn, "
        f"{results['memory_ratio']:.2f}× the memory of plain jobs side by side"
    )
    tenants = results["tenants"]
    rows = [(way, tenant) for way in WAYS for tenant in tenants]
    for row, (way, tenant) in enumerate(rows):
        began = min(each[way]["marks"][0] for each in tenants)
        parts = [(start - began, end - start) for start, end in itertools.pairwise(tenant[way]["marks"])]
        axes["time"].broken_barh(parts, (row - 0.4, 0.8), facecolors=[COLOURS[0], COLOURS[1], COLOURS[0]])
    axes["time"].set_yticks(range(len(rows)), [f"{way}: {tenant['name']}" for way, tenant in rows])
    axes["time"].invert_yaxis()
    axes["time"].set(title="When each job generates (blue) and trains (orange)", xlabel="seconds")
    for tenant, colour in zip(tenants, COLOURS, strict=True):
        label = f"{tenant['name']}: {tenant['method']}"
        axes["loss"].plot(tenant["plain"]["losses"], color=colour, alpha=0.3, linewidth=5)
        axes["loss"].plot(tenant["shared"]["losses"], color=colour, linewidth=1.3, label=label)
    axes["loss"].set(title="Training losses (wide lines: plain PEFT)", xlabel="step", ylabel="nats per token")
    for part, label in (("bytes", "adapters, AdamW, activations"), ("base_bytes", "base model")):
        axes["memory"].bar(list(WAYS), [results[part][way] / 1e6 for way in WAYS], 0.6, label=label)
    axes["memory"].set(title="Memory of the four jobs, plain ones side by side", ylabel="MB")
    for panel in ("loss", "memory"):
        axes[panel].legend(fontsize=9)
    figure.savefig(file, format="png")
