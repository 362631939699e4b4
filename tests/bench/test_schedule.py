"""The benchmark of the scheduler and the policies."""

from __future__ import annotations

import pytest

from symbiosis.bench import schedule
from symbiosis.core.policy import Decision, View
from symbiosis.errors import PolicyError
from symbiosis.policies import NoLockstep
from tests.helpers import check_ends_when_cancelled


async def test_a_policy_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(NoLockstep):
        def decide(self, view: View, now: float) -> Decision:
            raise ValueError

    monkeypatch.setattr(schedule, "make_policy", lambda spec: Broken())
    with pytest.raises(PolicyError, match="raised in decide"):
        await schedule.schedule(policies=("broken",), counts=(2,), rounds=1, progress=lambda text: None)


async def test_it_ends_when_it_is_cancelled() -> None:
    await check_ends_when_cancelled(
        lambda progress: schedule.schedule(policies=("no-lockstep",), counts=(2,), rounds=1, progress=progress)
    )
