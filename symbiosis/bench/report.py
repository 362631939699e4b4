"""What a benchmark found: a table, headline figures, JSON, Markdown, plots."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from symbiosis.cli.console import write_json

__all__ = ["Report", "machine", "ratio"]


@dataclass
class Report:
    """One benchmark's result. ``rows`` are flat; ``headline`` are the figures that goals are set for."""

    name: str
    preset: str
    """Of the model; empty where there is none to choose."""
    goals: dict[str, str]
    """Headline key → what is aimed at, in words."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    headline: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    transport: str = ""
    """Where the executor is a process of its own."""

    @property
    def command(self) -> str:
        """What gives this report."""
        options = {"--preset": self.preset, "--transport": self.transport}
        return " ".join(
            [f"symbiosis bench {self.name}", *(f"{key} {value}" for key, value in options.items() if value)]
        )

    def print(self, console: Console) -> None:
        table = Table(title=self.command)
        for column in self.rows[0]:
            table.add_column(column, justify="left" if isinstance(self.rows[0][column], str) else "right")
        for row in self.rows:
            table.add_row(*(_text(value) for value in row.values()))
        console.print(table)
        for key, value in self.headline.items():
            goal = f"   (goal: {self.goals[key]})" if key in self.goals else ""
            console.print(f"[bold]{key}[/bold] = {_text(value)}{goal}", highlight=False)
        for note in self.notes:
            console.print(f"[dim]{note}[/dim]", highlight=False)

    def save(self, file: Path) -> None:
        """Write ``{"name", "machine", "rows", "headline"}`` and what explains them as JSON."""
        write_json(file, asdict(self))

    def markdown(self) -> str:
        lines = [f"### `{self.command}`", ""]
        columns = list(self.rows[0])
        lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(_text(value) for value in row.values()) + " |" for row in self.rows]
        lines += ["", "| headline | measured | goal |", "| --- | --- | --- |"]
        lines += [f"| `{key}` | {_text(value)} | {self.goals.get(key, '')} |" for key, value in self.headline.items()]
        return "\n".join([*lines, "", *self.notes, ""])


def ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of pairwise ratios: pairs are measured next to each other, so a slow spell of the machine cancels."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def machine() -> dict[str, Any]:
    """What this was measured on."""
    described = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
