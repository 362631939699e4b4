"""The benchmark of round trips over the transports."""

from __future__ import annotations

import pytest

from symbiosis.bench.wire import wire
from tests.helpers import check_ends_when_cancelled


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["shm", "tcp", "dist"])
async def test_it_ends_when_it_is_cancelled(transport: str) -> None:
    """Its processes end too, or the warning of one that goes on would fail the test."""
    await check_ends_when_cancelled(lambda progress: wire(transports=(transport,), rounds=1, progress=progress))
