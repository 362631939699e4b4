"""Tests of inproc://: addresses, calls from coroutines and threads, refused calls, and endings."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import ClientClosedError, ExecutorClosedError, RequestError, UsageError
from symbiosis.executor.service import KEYS

HEAD = 14
"""Index of lm_head, [n, 32] → [n, 64]."""


@pytest.fixture
async def executor(base: Any) -> AsyncIterator[symbiosis.Executor]:
    async with symbiosis.Executor(base, name="here") as executor:
        yield executor


def call(*tensors: torch.Tensor, layers: tuple[int, ...] = (HEAD,), pass_: Pass = Pass.FORWARD) -> Call:
    return Call(Key(layers, pass_), Kind.DECODE, tensors or (torch.ones(3, 32),))


async def connect(client: str = "c") -> Any:
    return await make_transport("inproc://here").connect("inproc://here", client)


async def test_a_call_whose_thread_no_longer_waits_is_not_sent(executor: symbiosis.Executor) -> None:
    channel = await connect()
    channel._threads._submit(call(), SimpleQueue())
    assert executor.engine.scheduler.outstanding == 0
    channel.close()


async def test_call_from_the_loop_and_from_a_thread(executor: symbiosis.Executor) -> None:
    channel = await connect()
    assert channel.client == "c"
    assert channel.device == torch.device("cpu")
    assert len(channel.layers) == HEAD + 1
    weight = executor.service.resident().model.lm_head.weight
    (y,) = await channel.send(call())
    assert torch.equal(y, torch.ones(3, 32) @ weight.t())
    assert torch.equal((await asyncio.to_thread(channel.call, call()))[0], y)
    (dx,) = await channel.send(call(torch.ones(3, 64), pass_=Pass.BACKWARD))
    assert torch.equal(dx, torch.ones(3, 64) @ weight)
    channel.close()


async def test_siblings_in_one_call(executor: symbiosis.Executor) -> None:
    channel = await connect()
    results = await channel.send(call(layers=(0, 1, 2)))
    assert [tuple(result.shape) for result in results] == [(3, 32), (3, 16), (3, 16)]
    channel.close()


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (call(torch.ones(3, 31)), r"lm_head.*\[n, 32\].*\[3, 31\]"),
        (call(torch.ones(3, 32, dtype=torch.float64)), r"torch\.float32.*torch\.float64"),
        (call(torch.ones(32)), r"\[32\]"),
        (call(torch.ones(1, 3, 32)), r"\[1, 3, 32\]"),
        (call(torch.ones(0, 32)), r"\[0, 32\]"),
        (call(torch.ones(3, 32), torch.ones(3, 32)), "lm_head"),
        (call(torch.ones(3, 32), pass_=Pass.BACKWARD), r"lm_head BACKWARD.*\[n, 64\]"),
        (call(torch.ones(3, 32, device="meta")), "meta"),
        (call(layers=(99,)), r"layers \(99,\); there are 15"),
        (call(layers=(-1,)), r"layers \(-1,\)"),
        (call(layers=()), r"layers \(\)"),
        (call(layers=(1, 0)), "ascending"),
        (call(layers=(0, 0)), "ascending"),
        (call(layers=(0, 6)), "same rows"),
        (call(torch.ones(3, 16), layers=(1, 2), pass_=Pass.BACKWARD), "forward pass"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_calls_of_the_wrong_shape(executor: symbiosis.Executor, bad: Call, complaint: str) -> None:
    """Such calls are refused before they are queued, from the loop and from a thread, and the channel continues."""
    channel = await connect("alice")
    with pytest.raises(RequestError, match=complaint) as caught:
        channel.send(bad)
    assert "'alice'" in str(caught.value)
    with pytest.raises(RequestError, match=complaint):
        await asyncio.to_thread(channel.call, bad)
    assert executor.engine.scheduler.outstanding == 0
    await channel.send(call())
    channel.close()


async def test_backward_of_a_whole_module_takes_two_matrices(base: Any) -> None:
    async with symbiosis.Executor(base, name="whole", base_layers="*.0.mlp"):
        channel = await make_transport("inproc://whole").connect("inproc://whole", "c")
        with pytest.raises(RequestError, match=r"\[n, 32\] torch.float32 and \[n, 32\]"):
            channel.send(call(layers=(0,), pass_=Pass.BACKWARD))
        with pytest.raises(RequestError, match="served whole"):
            channel.send(call(layers=(0,), pass_=Pass.FORWARD_WITHOUT_BIAS))
        (dx,) = await channel.send(call(torch.ones(3, 32), torch.ones(3, 32), layers=(0,), pass_=Pass.BACKWARD))
        assert dx.shape == (3, 32)
        channel.close()


async def test_cancel(executor: symbiosis.Executor) -> None:
    channel = await connect()
    mine = call()
    reply = channel.send(mine)
    channel.cancel(mine)
    channel.cancel(mine)
    channel.cancel(call())  # the call was never sent
    assert executor.engine.scheduler.outstanding == 0
    await asyncio.sleep(0.01)
    assert not reply.done()
    channel.close()


async def test_after_close(executor: symbiosis.Executor) -> None:
    channel = await connect("gone")
    waiting = channel.send(call())
    channel.close()
    channel.close()
    with pytest.raises(ClientClosedError, match="'gone'"):
        await waiting
    with pytest.raises(ClientClosedError, match="'gone'"):
        channel.send(call())
    with pytest.raises(ClientClosedError):
        await asyncio.to_thread(channel.call, call())
    with pytest.raises(ClientClosedError):
        channel.begin_walk()
    channel.end_walk()  # leaving a walk is always possible


async def test_after_the_executor_is_gone(base: Any) -> None:
    async with symbiosis.Executor(base, name="here"):
        channel = await connect()
    with pytest.raises(ExecutorClosedError, match="inproc://here"):
        channel.send(call())
    with pytest.raises(ExecutorClosedError):
        await asyncio.to_thread(channel.call, call())
    with pytest.raises(ExecutorClosedError, match="no executor listens on inproc://here"):
        await connect()


async def test_one_more_address(executor: symbiosis.Executor, base: Any) -> None:
    listener = await executor.listen("inproc://also-here")
    assert listener.address == "inproc://also-here"
    channel = await make_transport("inproc://also-here").connect("inproc://also-here", "c")
    await channel.send(call())
    await listener.close()
    with pytest.raises(ExecutorClosedError):
        channel.send(call())
    other = await connect("d")  # the first address still works
    await other.send(call())
    other.close()
    with pytest.raises(UsageError, match="in use"):
        await executor.listen("inproc://here")


async def test_another_loop_is_refused(executor: symbiosis.Executor) -> None:
    with pytest.raises(UsageError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(connect()))


async def test_a_listener_forgets_clients_that_left(executor: symbiosis.Executor) -> None:
    for number in range(20):
        (await connect(f"c{number}")).close()
    (listener,) = executor.service.listeners
    assert not listener._channels  # type: ignore[attr-defined]


async def test_a_tenant_cannot_fill_the_executors_memory_with_groups_of_siblings(base: Any) -> None:
    async with symbiosis.Executor(base) as executor:
        session = executor.service.join("mallory")
        mates = [spec.layer for spec in executor.layers if spec.in_features == executor.layers[0].in_features]
        for group in itertools.islice(itertools.chain(*(itertools.combinations(mates, n) for n in range(1, 9))), 9000):
            session.expects(Key(group, Pass.FORWARD))
        assert executor.service._expected.cache_info().currsize <= KEYS  # type: ignore[attr-defined]
        session.close()


async def test_a_listener_that_is_closed_twice_leaves_the_next_one_of_its_name(executor: symbiosis.Executor) -> None:
    old = await executor.listen("inproc://name")
    await old.close()
    new = await executor.listen("inproc://name")
    await old.close()
    channel = await make_transport("inproc://name").connect("inproc://name", "c")
    (y,) = await channel.send(call())
    assert y.shape == (3, 64)
    channel.close()
    await new.close()
