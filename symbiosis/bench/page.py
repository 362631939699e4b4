"""The page of all benchmarks: tables, plots, and their machines."""

from __future__ import annotations

import json
from pathlib import Path

from symbiosis.bench.report import Report
from symbiosis.terminal.console import write_text

_INTRO = """# Benchmarks

Written by `make bench`. Most times are measured in turn with those of a peer in one run, such as plain transformers +
PEFT, another policy, a raw echo, unmasked rows or the same work alone: see the columns and notes. Ratios of times are
medians over rounds unless a note says otherwise. `memory` and `finetune` measure memory once, in processes of their
own. Absolute times mean little on a shared machine.

"""


def write_page(file: Path) -> None:
    """Write Markdown to ``file``, and plots, from all results in the folder ``benchmarks`` beside it."""
    folder = file.parent / "benchmarks"
    parts = [_INTRO]
    for path in sorted(folder.glob("*.json"), key=lambda path: (not path.name.startswith("1b"), path.name)):
        report = Report(**json.loads(path.read_text()))
        machine = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in report.machine.items())
        parts.append(report.markdown() + f"\nMeasured on: {machine}.\n")
        plot = _plot(report, path.with_suffix(".png"))
        if plot is not None:
            parts.append(f"\n![{report.name} {report.preset}](benchmarks/{plot.name})\n")
        parts.append("\n")
    write_text(file, "".join(parts).rstrip() + "\n")


_PLOTS = {
    "clients": ("clients at once", " tok/s", "tokens a second"),
    "adapters": ("adapters at once", " tok/s", "tokens a second"),
    "tokens": ("tokens in a sequence", " MiB", "MiB of a training step"),
}
"""By column of the x axis: its label, the suffix of the columns of the y axis, and their label."""


def _plot(report: Report, path: Path) -> Path | None:
    """Draw rates over the number of tenants, or memory over length, for benchmarks that have these. Return the file."""
    by = next((column for column in _PLOTS if column in report.rows[0]), None)
    if by is None or len(report.rows) < 2:
        return None
    counts_what, ending, what = _PLOTS[by]
    columns = [column for column in report.rows[0] if column.endswith(ending)]
    if not columns:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    counts = [row[by] for row in report.rows]
    for column in columns:
        axes.plot(counts, [row[column] for row in report.rows], marker="o", label=column.removesuffix(ending))
    axes.set(xlabel=counts_what, ylabel=what, xticks=counts, ylim=(0, None))
    axes.set_title(f"{report.name}, {report.preset} ({report.machine.get('gpu') or report.machine['cpu']})")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    return path
