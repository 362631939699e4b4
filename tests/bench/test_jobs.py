"""Clients that work beside what a benchmark measures, and policies that fail in one."""

from __future__ import annotations

import asyncio

import pytest

from symbiosis.bench import schedule
from symbiosis.bench.jobs import end
from symbiosis.core.policy import Decision, View
from symbiosis.errors import LayerError, PolicyError
from symbiosis.policies import NoLockstep


async def test_a_client_that_has_failed_fails_the_benchmark() -> None:
    async def fail() -> None:
        raise LayerError("no memory")

    async def work() -> None:
        await asyncio.sleep(60)

    busy, failed = asyncio.create_task(work()), asyncio.create_task(fail())
    await asyncio.sleep(0)
    with pytest.raises(LayerError, match="no memory"):
        await end([busy, failed])
    assert busy.cancelled()
    await end([busy])


async def test_a_policy_that_fails_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(NoLockstep):
        def decide(self, view: View, now: float) -> Decision:
            raise ValueError

    monkeypatch.setattr(schedule, "make_policy", lambda spec: Broken())
    with pytest.raises(PolicyError, match="raised in decide"):
        await schedule.schedule(policies=("broken",), counts=(2,), rounds=1, progress=lambda text: None)
