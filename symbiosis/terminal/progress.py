"""Progress of work with a known number of steps: bars on a terminal, and a line every few seconds elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUIET_S = 5.0
"""Seconds between two lines about one task, where there is no terminal."""


class Steps:
    """Shows one bar for each task. Use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}
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

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` steps of a task are done."""
        if self._console.is_terminal:
            if task not in self._bars:
                self._bars[task] = self._progress.add_task(escape(task), total=total, note="")
            self._progress.update(self._bars[task], completed=done, total=total, note=escape(note))
            return
        now = time.monotonic()
        if done == total or now - self._printed.get(task, now - QUIET_S) >= QUIET_S:
            self._printed[task] = now
            self._console.print(escape(f"{task}: {done}/{total} {note}".rstrip()), soft_wrap=True)
