"""Which of the clients that are about to decode a token are walked together."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from symbiosis.client.joint.turn import Turn
from symbiosis.errors import ExecutorClosedError


async def test_tokens_that_come_after_the_end_end_at_once() -> None:
    turn, loop = Turn(lambda steps: None, math.inf), asyncio.get_running_loop()
    steps: list[Any] = [SimpleNamespace(reply=loop.create_future(), structure=(), alone="") for _ in range(3)]
    turn.arrive(steps[0])
    turn.close(ExecutorClosedError("it was shut down"))
    for step in steps[1:]:
        turn.arrive(step)
    for step in steps:
        with pytest.raises(ExecutorClosedError):
            await asyncio.wait_for(step.reply, 1)
    assert len({id(step.reply.exception()) for step in steps}) == 3, "each client has an error of its own"


@pytest.mark.parametrize(
    ("rows", "joint"), [((40, 40), ()), ((64, 1), ()), ((100, 8, 9), (1, 2)), ((8, 60, 9), (0, 2))]
)
async def test_clients_that_do_not_fit_into_a_walk_walk_alone_and_say_why(rows: Any, joint: Any) -> None:
    loop, walks = asyncio.get_running_loop(), []
    turn = Turn(walks.append, 64)
    steps: list[Any] = [
        SimpleNamespace(reply=loop.create_future(), structure=(), alone="", ids=torch.zeros(count, 1)) for count in rows
    ]
    other = SimpleNamespace(reply=loop.create_future(), structure=("another",), alone="", ids=torch.zeros(1, 1))
    for step in (*steps, other):
        turn.arrive(step)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert walks == ([[steps[number] for number in joint]] if joint else [])
    alone = [step for number, step in enumerate(steps) if number not in joint]
    assert {step.alone for step in alone} == {"a joint walk has up to 64 rows"}
    assert other.alone == "no other client was ready"
