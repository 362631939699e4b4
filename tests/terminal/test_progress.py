"""Progress bars and lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from symbiosis.terminal import progress
from symbiosis.terminal.progress import Steps


def test_lines_come_at_the_first_step_then_every_few_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 6.0, 7.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    out = io.StringIO()
    with Steps(Console(file=out, width=80)) as steps:
        for done in (1, 2, 3):
            steps("[alice]", done, 4, f"loss {done}")
        steps("[alice]", 4, 4)
    assert out.getvalue().splitlines() == ["[alice]: 1/4 loss 1", "[alice]: 3/4 loss 3", "[alice]: 4/4"]


def test_a_terminal_gets_one_bar_for_each_task() -> None:
    out = io.StringIO()
    with Steps(Console(file=out, width=100, force_terminal=True)) as steps:
        steps("alice", 1, 2, "loss 5")
        steps("bob", 2, 2)
        steps("alice", 2, 2)
        assert len(steps._progress.tasks) == 2
    text = out.getvalue()
    for shown in ("alice", "1/2", "loss 5", "bob", "2/2"):
        assert shown in text
