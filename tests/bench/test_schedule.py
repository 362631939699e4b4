"""The benchmark of the scheduler and the policies."""

from __future__ import annotations

import asyncio

import pytest

from symbiosis.bench import schedule
from symbiosis.core.policy import Decision, View
from symbiosis.errors import PolicyError
from symbiosis.policies import NoLockstep


async def test_a_policy_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(NoLockstep):
        def decide(self, view: View, now: float) -> Decision:
            raise ValueError

    monkeypatch.setattr(schedule, "make_policy", lambda spec: Broken())
    with pytest.raises(PolicyError, match="raised in decide"):
        await schedule.schedule(policies=("broken",), counts=(2,), rounds=1, progress=lambda text: None)


async def test_it_ends_when_it_is_cancelled() -> None:
    told: list[str] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None

        def progress(text: str) -> None:
            told.append(text)
            task.cancel()

        await schedule.schedule(policies=("no-lockstep",), counts=(2,), rounds=1, progress=progress)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(main())
    assert len(told) == 1
