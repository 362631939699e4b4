"""The results of the demo: tables, picture and JSON."""

from __future__ import annotations

import itertools
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from symbiosis.cli.demo.jobs import Job, Run

TOLERANCE = 1e-3
"""Largest relative difference of two losses that counts as equal."""
TIE = 1e-2
"""Largest difference of two tokens' logits at which either may follow."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # readers with colour blindness can tell them apart
_WAYS = ("shared", "plain")


class Results:
    """Compares the jobs at once with the plain jobs in turn.

    Args:
        mean_batch: requests in a batch of the executor.
        base, plain_base: bytes of the base model: the executor's, at most, and that of a plain job.
    """

    def __init__(
        self, policy: str, tokenizer: Any, jobs: list[Job], mean_batch: float, base: int, plain_base: int
    ) -> None:
        self.jobs, self._policy, self._tokenizer, self._mean_batch = jobs, policy, tokenizer, mean_batch
        self._runs = [job.shared for job in jobs], [job.plain for job in jobs]
        self._bases = base, plain_base * len(jobs)
        self._own = [sum(sum(run.memory.values()) for run in runs) for runs in self._runs]
        self._bytes = [base + own for base, own in zip(self._bases, self._own, strict=True)]
        self._began = min(run.marks[0] for run in self._runs[0])
        shared_s = max(run.marks[-1] for run in self._runs[0]) - self._began
        self._seconds = shared_s, sum(run.marks[-1] - run.marks[0] for run in self._runs[1])
        self.throughput_ratio = self._seconds[1] / self._seconds[0]
        self.memory_ratio = self._bytes[0] / self._bytes[1]

    def problems(self, job: Job) -> list[str]:
        """Return what differs from plain transformers + PEFT by more than rounding."""
        found = []
        if not job.difference <= TOLERANCE:
            found.append(f"losses differ by {job.difference:.1e}, relative to plain PEFT's")
        texts = zip(job.gaps, job.shared.before + job.shared.after, job.plain.before + job.plain.after, strict=True)
        found += [
            f"{self._decode(ours)!r} in place of {self._decode(plain)!r}"
            for gap, ours, plain in texts
            if not gap <= TIE
        ]
        return [f"{job.name} ({job.method}): {problem}" for problem in found]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def print(self, out: Console) -> None:
        """Print a sample and the tables."""
        first = self.jobs[0]
        out.print(f"\n[bold]a text of {first.name}[/], before and after training on {first.learns}:")
        for texts in (first.shared.before, first.shared.after):
            out.print(f"  {' '.join(self._decode(texts[0]).split())}", markup=False)
        table = Table("tenant", "PEFT", "learns from", "loss", "difference", "texts", box=box.SIMPLE_HEAD)
        for job in self.jobs:
            ties, count = sum(gap > 0 for gap in job.gaps), len(job.gaps)
            verdict = f"all {count} equal" if not ties else f"{count - ties} equal, {ties} with tied tokens"
            verdict = "[red]differ[/]" if self.problems(job) else verdict
            begins, ends = (sum(part) / len(part) for part in (job.shared.losses[:5], job.shared.losses[-5:]))
            losses = f"{begins:.2f} → {ends:.2f}"
            table.add_row(job.name, job.method, job.learns, losses, f"{job.difference:.0e}", verdict)
        out.print(table)
        table = Table("", "seconds", "tokens/s", "mean batch", "memory", box=box.SIMPLE_HEAD)
        tokens = sum(job.tokens for job in self.jobs)
        names = "four tenants at once", "plain jobs in turn; memory: side by side"
        batches = f"{self._mean_batch:.2f}", "1.00"
        for name, seconds, batch, size in zip(names, self._seconds, batches, self._bytes, strict=True):
            table.add_row(name, f"{seconds:.1f}", f"{tokens / seconds:.0f}", batch, f"{size / 1e6:.0f} MB")
        table.add_row("ratio", "", f"{self.throughput_ratio:.2f}×", "", f"{self.memory_ratio:.2f}×", style="bold")
        out.print(table)

    def data(self) -> dict[str, Any]:
        """Return everything as plain data. Times are in seconds, sizes in bytes."""
        import torch

        return {
            "throughput_ratio": self.throughput_ratio,
            "memory_ratio": self.memory_ratio,
            "agrees": not any(self.problems(job) for job in self.jobs),
            "policy": self._policy,
            "seconds": dict(zip(_WAYS, self._seconds, strict=True)),
            "bytes": dict(zip(_WAYS, self._bytes, strict=True)),
            "base_bytes": dict(zip(_WAYS, self._bases, strict=True)),
            "mean_batch": self._mean_batch,
            "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
            "tenants": [
                {name: getattr(job, name) for name in ("name", "method", "learns", "tokens", "difference", "gaps")}
                | {"shared": self._run_data(job.shared), "plain": self._run_data(job.plain)}
                for job in self.jobs
            ],
        }

    def _run_data(self, run: Run) -> dict[str, Any]:
        return asdict(run) | {when: [*map(self._decode, getattr(run, when))] for when in ("before", "after")}

    def plot(self, file: Path) -> None:
        """Draw what ran when, the losses, and the memory."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 6.4), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplot_mosaic([["time", "time"], ["loss", "memory"]], height_ratios=[1, 1.2])
        figure.suptitle(
            f"Four tenants on one base model: {self.throughput_ratio:.1f}× the throughput of plain jobs in turn, "
            f"{self.memory_ratio:.2f}× the memory of plain jobs side by side"
        )
        plain_s = [run.marks[-1] - run.marks[0] for run in self._runs[1]]
        begins = [*(run.marks[0] - self._began for run in self._runs[0]), *itertools.accumulate([0.0, *plain_s[:-1]])]
        for row, (run, begin) in enumerate(zip((*self._runs[0], *self._runs[1]), begins, strict=True)):
            for (start, end), part in zip(itertools.pairwise(run.marks), (0, 1, 0), strict=True):
                axes["time"].barh(row, end - start, left=begin + start - run.marks[0], color=_COLOURS[part])
        names = [f"{way}: {job.name}" for way in ("at once", "plain") for job in self.jobs]
        axes["time"].set_yticks(range(len(names)), names)
        axes["time"].invert_yaxis()
        axes["time"].set(title="When each job generates (blue) and trains (orange)", xlabel="seconds")
        for job, colour in zip(self.jobs, _COLOURS, strict=True):
            axes["loss"].plot(job.plain.losses, color=colour, alpha=0.3, linewidth=5)
            axes["loss"].plot(job.shared.losses, color=colour, linewidth=1.3, label=f"{job.name}: {job.method}")
        axes["loss"].set(title="Training losses (wide lines: plain PEFT)", xlabel="step", ylabel="nats per token")
        bases, own = ([size / 1e6 for size in sizes] for sizes in (self._bases, self._own))
        ways = ["at once", "plain, side by side"]
        axes["memory"].bar(ways, bases, 0.6, label="base model")
        axes["memory"].bar(ways, own, 0.6, bases, label="adapters, AdamW, activations")
        axes["memory"].set(title="Memory of the four jobs", ylabel="MB")
        for panel in ("loss", "memory"):
            axes[panel].legend(fontsize=9)
        figure.savefig(file, format="png")
