"""Clients that work beside what a benchmark measures."""

from __future__ import annotations

import asyncio

import pytest

from symbiosis.bench.jobs import end
from symbiosis.errors import LayerError


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
