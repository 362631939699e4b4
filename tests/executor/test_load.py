"""The load of an executor."""

from __future__ import annotations

import pytest

from symbiosis.executor.load import LOAD_S, RecentLoad


@pytest.mark.parametrize("pause", [0.0, LOAD_S, 3600.0])
def test_the_load_does_not_depend_on_the_time_before_a_pause(pause: float) -> None:
    """``now`` is the time since the machine has started."""
    load, now = RecentLoad(), 1e5
    load.ran(64, 0.1, now)
    now += pause
    for tenth in range(1, 150):
        now += 0.1
        load.ran(8192, 0.1, now)
        assert load.at(now) == pytest.approx(min(tenth / 10 / LOAD_S, 1.0), abs=0.05)
    assert load.at(now + LOAD_S) == 0
