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
        self._printed: dict[str, tuple[float, str]] = {}
        """When a line about a task was last printed, in seconds, and this line."""
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
        now, text = time.monotonic(), f"{task}: {done}/{total} {note}".rstrip()
        before, printed = self._printed.get(task, (now - QUIET_S, ""))
        if text != printed and (done == total or now - before >= QUIET_S):
            self._printed[task] = now, text
            self._console.print(escape(text), soft_wrap=True)
