"""What the demo shows while it works: bars and a live table on a terminal, plain lines now and then anywhere else."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from symbiosis import Executor, Statistics
from symbiosis.cli.demo.jobs import Generation, Plan, Tenant, Training

QUIET_S = 5.0
"""Between two plain lines about the same thing."""
REFRESH_S = 0.25


class Steps:
    """Progress of things that happen one after another: a bar each, or a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: dict[str, TaskID] = {}
        self._printed = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, what: str, done: int, of: int, note: str = "") -> None:
        """``done`` out of ``of`` steps of ``what`` are done."""
        if not self._console.is_terminal:
            now = time.monotonic()
            if done in (0, of) or now - self._printed > QUIET_S:
                self._printed = now
                self._console.print(escape(f"{what}: {done}/{of} {note}".rstrip()), soft_wrap=True)
            return
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(what, total=of, note="")
        self._progress.update(self._bars[what], completed=done, total=of, note=note)


class Board:
    """A line per tenant, and one for the executor, as long as :meth:`watch` runs."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        self._plan = plan

    async def watch(self, executor: Executor) -> None:
        """Show until cancelled, and once more then."""
        if not self._console.is_terminal:
            await self._lines(executor)
            return
        with Live(self._table(executor.statistics()), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    live.update(self._table(executor.statistics()), refresh=True)
                    await asyncio.sleep(REFRESH_S)
            finally:
                live.update(self._table(executor.statistics()), refresh=True)

    async def _lines(self, executor: Executor) -> None:
        try:
            while True:
                await asyncio.sleep(QUIET_S)
                self._print_lines(executor.statistics())
        finally:
            self._print_lines(executor.statistics())

    def _print_lines(self, statistics: Statistics) -> None:
        for tenant in self._plan.tenants:
            cells = self._cells(tenant, statistics)
            line = "  {:<6} {:<10} {:<14} {:>9}  loss {:>6}  {:>6} tokens/s  batch {}".format(*cells[:7])
            self._console.print(escape(line.rstrip()), soft_wrap=True)
        self._console.print(escape(f"  {_totals(statistics)}"), soft_wrap=True)

    def _table(self, statistics: Statistics) -> Group:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        for heading in ("tenant", "job", "PEFT"):
            table.add_column(heading, no_wrap=True, style="bold" if heading == "tenant" else "")
        for heading in ("step", "loss", "tokens/s", "mean batch"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("now", ratio=1, no_wrap=True, overflow="ellipsis", style="cyan")
        for tenant in self._plan.tenants:
            table.add_row(*(Text(cell) for cell in self._cells(tenant, statistics)))
        return Group(table, Text(_totals(statistics), style="dim"))

    def _cells(self, tenant: Tenant, statistics: Statistics) -> tuple[str, ...]:
        client = statistics.clients.get(tenant.name)
        batch = f"{client.mean_batch:.2f}" if client else "–"
        rate = f"{tenant.rate:.0f}" if tenant.tokens else "–"
        if isinstance(tenant, Training):
            losses = tenant.losses
            step, loss = f"{len(losses)}/{len(tenant.batches)}", f"{losses[-1]:.3f}" if losses else "–"
            return tenant.name, "fine-tunes", tenant.method, step, loss, rate, batch, sparkline(losses)
        assert isinstance(tenant, Generation)
        text = " ".join(self._plan.decode(tenant.current[-30:]).split())
        return tenant.name, "generates", tenant.method, f"text {tenant.rounds + 1}", "–", rate, batch, text


def _totals(statistics: Statistics) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(statistics.reasons.items()))
    return (
        f"executor: {statistics.batches} batches, each of {statistics.mean_batch:.2f} requests and "
        f"{statistics.mean_rows:.0f} rows on average ({reasons or 'none yet'})"
    )


def sparkline(values: list[float], width: int = 24) -> str:
    """A curve in one line of text: the means of ``width`` pieces, from the lowest to the highest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if not high > low:  # one value, a flat line, or NaN
        return "▄" * width
    return "".join("▁▂▃▄▅▆▇█"[int((mean - low) / (high - low) * 7.99)] for mean in means)
