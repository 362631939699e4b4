"""The benchmark of round trips over the transports."""

from __future__ import annotations

import asyncio

import pytest

from symbiosis.bench.wire import wire


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["shm", "tcp", "dist"])
async def test_it_ends_when_it_is_cancelled(transport: str) -> None:
    """Its processes end too, or the warning of one that goes on would fail the test."""
    told: list[str] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None

        def progress(text: str) -> None:
            told.append(text)
            task.cancel()

        await wire(transports=(transport,), rounds=1, progress=progress)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(main())
    assert len(told) == 1
