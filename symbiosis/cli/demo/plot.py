"""The demo's picture: loss curves with and without symbiosis, how far they are apart, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from symbiosis.cli.demo.jobs import Footprint

if TYPE_CHECKING:
    from symbiosis.cli.demo.report import Agreement, Report

COLOURS = ("#0072b2", "#d55e00")  # told apart by colour-blind readers too
PARTS = (
    ("base", "base model", "#4d4d4d"),
    ("adapter", "adapters, buffers", "#0072b2"),
    ("gradients", "gradients", "#56b4e9"),
    ("optimizer", "AdamW state", "#009e73"),
    ("activations", "activations, KV caches", "#e69f00"),
)


def save_plot(report: Report, path: Path) -> None:
    """Draw it as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic(
        [["loss", "memory"], ["difference", "memory"]], width_ratios=[2, 1], height_ratios=[2, 1]
    )
    figure.suptitle(f"symbiosis demo: four tenants on one base model ({report.plan.label})", fontsize=14)
    _losses(axes["loss"], report)
    _differences(axes["difference"], report)
    _memory(axes["memory"], report)
    figure.savefig(path, format="png")


def _losses(axes: Any, report: Report) -> None:
    for job, colour in zip(report.plan.trainings, COLOURS, strict=False):
        steps = range(1, len(job.losses) + 1)
        axes.plot(steps, job.plain_losses, color=colour, alpha=0.3, linewidth=5, label=f"{job.name}: plain HF + PEFT")
        axes.plot(
            steps, job.losses, color=colour, linewidth=1.3, label=f"{job.name}: symbiosis ({job.method}; {job.text})"
        )
    axes.set(title="Training loss of the two tenants who fine-tune", ylabel="loss (nats a token)")
    _whole_steps(axes)
    axes.legend(fontsize=9)


def _differences(axes: Any, report: Report) -> None:
    for job, agreement, colour in zip(report.plan.trainings, report.agreements, COLOURS, strict=False):
        steps = range(1, len(agreement.differences) + 1)
        axes.plot(steps, agreement.differences, color=colour, linewidth=1.2, label=f"{job.name}: {_largest(agreement)}")
    tolerance = report.plan.tolerance
    axes.axhline(tolerance, color="black", linestyle="--", linewidth=1, label=f"tolerance: {tolerance:g}")
    axes.set(
        title="Difference from plain HF + PEFT at every step", xlabel="training step", ylabel="relative difference"
    )
    # Linear below one unit in the last place of a float32, so that zero has its place.
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(-5e-8, tolerance * 30)
    axes.set_yticks([0, 1e-6, 1e-4, 1e-2], ["0", "$10^{-6}$", "$10^{-4}$", "$10^{-2}$"])
    _whole_steps(axes)
    axes.legend(fontsize=9, loc="upper right", ncols=3)


def _largest(agreement: Agreement) -> str:
    return f"at most {agreement.largest:.0e}" if agreement.largest else "equal to the last bit"


def _whole_steps(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)


def _memory(axes: Any, report: Report) -> None:
    bars = (("one base\nfor all", report.shared), ("one base\na job", report.separate))
    for position, (_, footprint) in enumerate(bars):
        _stack(axes, position, footprint)
    most = max(footprint.total for _, footprint in bars)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set(title="Memory of the four tenants", ylabel="MB", xlim=(-0.6, 1.6), ylim=(0, most / 1e6 * 1.35))
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(reversed(labels), reversed(handles), strict=True))  # one entry a part, in the bars' order
    axes.legend(first.values(), first.keys(), fontsize=9, loc="upper center", ncols=1)


def _stack(axes: Any, position: int, footprint: Footprint) -> None:
    bottom = 0.0
    for attribute, label, colour in PARTS:
        height = getattr(footprint, attribute) / 1e6
        axes.bar(position, height, 0.62, bottom=bottom, color=colour, label=label)
        bottom += height
    axes.text(position, bottom, f"{bottom:.1f} MB", ha="center", va="bottom", fontsize=11, fontweight="bold")
