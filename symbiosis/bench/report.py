"""The result of a benchmark: a table, headline figures, JSON, Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from symbiosis.terminal.console import brief, write_json
from symbiosis.terminal.machine import machine as describe_machine


@dataclass
class Report:
    """One benchmark's result. ``rows`` are flat; ``headline`` has the figures with goals."""

    name: str
    preset: str
    """Preset of the model; empty if the benchmark has none."""
    goals: dict[str, str]
    """Goals in words, by headline key."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    headline: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=describe_machine)
    transport: str = ""
    """Transport, if the executor is a process of its own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options that were given, by name: values, or lists of values. The preset and the transport need not be here."""

    @property
    def command(self) -> str:
        """The command that makes this report."""
        words = [f"symbiosis bench {self.name}"]
        for name, value in ({"preset": self.preset, "transport": self.transport} | self.options).items():
            option = f"--{name.replace('_', '-')}"
            for each in value if isinstance(value, list) else [value]:
                words += [option] if each is True else [f"{option} {each}"] if each not in ("", None, False) else []
        return " ".join(words)

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
        """Write the report as JSON: ``name``, ``machine``, ``rows``, ``headline``, goals and notes."""
        write_json(file, asdict(self))

    def markdown(self) -> str:
        lines = [f"### `{self.command}`", ""]
        columns = list(self.rows[0])
        lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(_text(value) for value in row.values()) + " |" for row in self.rows]
        lines += ["", "| headline | measured | goal |", "| --- | --- | --- |"]
        lines += [f"| `{key}` | {_text(value)} | {self.goals.get(key, '')} |" for key, value in self.headline.items()]
        return "\n".join([*lines, "", *self.notes, ""])


def ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Return the median of pairwise ratios. Pairs are adjacent, so a slow minute of the machine cancels."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return brief(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
