"""What a :class:`~symbiosis.privacy.Wiretap` records."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import JOINT, Kind
from symbiosis.errors import RequestError, UsageError
from symbiosis.privacy import Wiretap
from tests.helpers import IDS, in_thread


@pytest.mark.parametrize("thread", [False, True])
async def test_refused_calls(base: Any, thread: bool) -> None:
    async with symbiosis.Executor(base) as executor:
        address = (await executor.listen("inproc://wiretap")).address
        with Wiretap(executor) as tap:
            channel: Any = await make_transport(address).connect(address, "client")
            call = Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.ones(1, channel.layers[0].in_features + 1),))
            with pytest.raises(RequestError):
                await (in_thread(channel.call, call) if thread else channel.send(call))
            channel.close()
        (seen,) = tap.seen
        assert (seen.client, seen.key, seen.results) == ("client", call.key, None)
        assert torch.equal(seen.tensors[0], call.tensors[0])


async def test_joint_walks(base: Any) -> None:
    """They are recorded if they begin while the wiretap is open. Otherwise it cannot be opened."""
    async with symbiosis.Executor(base) as executor, executor.client() as one, executor.client() as two:
        with Wiretap(executor) as tap:
            await asyncio.gather(*[each.generate(input_ids=IDS, max_new_tokens=30) for each in (one, two)])
        assert {seen.client for seen in tap.seen} == {JOINT}
        with pytest.raises(UsageError, match="were walked jointly before"), Wiretap(executor):
            pass
