"""Calls of a masked channel besides the call of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch

from symbiosis.core.requests import Results
from symbiosis.privacy.side_calls import SideCalls


class Reply:
    """A reply that is awaited like a future, and is none."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def __await__(self) -> Generator[Any, None, Results]:
        yield from asyncio.sleep(0).__await__()
        return self._results


async def test_replies_of_channels_need_not_be_futures() -> None:
    results = (torch.ones(2, 2),)
    channel: Any = SimpleNamespace(send=lambda call: Reply(results))
    call: Any = object()
    answer = SideCalls("client", 1, asyncio.get_running_loop()).send(channel, call)
    assert await asyncio.wait_for(asyncio.wrap_future(answer), 30) is results
