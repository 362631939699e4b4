"""The arena in a GPU's memory, on a simulated GPU. ``test_gpu.py`` tests the calls of CUDA, which are replaced here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import symbiosis
from symbiosis.core.budget import CONNECTION_BYTES, COVERED_BYTES
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Columns, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import LayerError, UsageError, WireError
from symbiosis.testing import Comparison, run_job, run_job_plain
from symbiosis.transports import device
from symbiosis.transports.arena import Arena
from symbiosis.transports.device import BLOCK, FIRST, Segment
from symbiosis.transports.limits import Limits
from tests.helpers import IDS, in_thread, lora, until

CPU = torch.device("cpu")


class Event:
    """An event that counts its uses, and checks that the other side records it before this side waits for an answer."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.recorded = self.waited = 0

    def ipc_handle(self) -> bytes:
        return self.name.to_bytes(64, "little")

    def record(self, stream: object) -> None:
        self.recorded += 1

    def wait(self, stream: object) -> None:
        self.waited += 1


class Gpu:
    """Memory and events by handle, as CUDA's driver gives them to another process."""

    def __init__(self) -> None:
        self.memory: dict[bytes, torch.Tensor] = {}
        self.events: list[Event] = []
        self.room = 1 << 30

    def allocate(self, home: torch.device, size: int) -> tuple[torch.Tensor, bytes]:
        if size > self.room:
            raise UsageError("out of memory")
        handle = len(self.memory).to_bytes(64, "little")
        self.memory[handle] = torch.zeros(size, dtype=torch.uint8)
        return self.memory[handle], handle

    def map(self, home: torch.device, handle: bytes, size: int) -> torch.Tensor:
        assert self.memory[handle].shape == (size,)
        return self.memory[handle].view(-1)

    def event(self, home: torch.device, handle: bytes | None = None) -> Event:
        if handle is None:
            self.events.append(Event(len(self.events)))
            return self.events[-1]
        return self.events[int.from_bytes(handle, "little")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(device, "identity", lambda home: "GPU-0")
    monkeypatch.setattr(device, "find", lambda name: CPU if name == "GPU-0" else None)
    monkeypatch.setattr(device, "allocate", gpu.allocate)
    monkeypatch.setattr(device, "map_", gpu.map)
    monkeypatch.setattr(device, "event", gpu.event)
    monkeypatch.setattr(device, "stream", lambda home: None)
    return gpu


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"shm://{tmp_path}/s.sock"


@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
async def test_jobs_through_the_gpus_memory(base: Any, address: str, gpu: Gpu, kind: str) -> None:
    expected = run_job_plain(base, lora())
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        if kind == "coroutines":
            async with symbiosis.connect(address) as remote, remote.client(lora(), seed=0) as client:
                outcome = await run_job(client)
        else:

            def tenant() -> Any:
                with symbiosis.open_model(address) as model:
                    return run_job_plain(model, lora())

            outcome = await in_thread(tenant)
        requests = executor.statistics().requests
    comparison = Comparison.of(outcome, expected)
    assert comparison.bit_equal, comparison
    called, answered = gpu.events
    assert called.recorded == called.waited == answered.recorded == requests
    assert answered.waited >= requests
    assert [len(one) for one in gpu.memory.values()] == [FIRST]


async def test_the_arena_grows(base: Any, address: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small and large calls are made at once, of which most wait for room, or for a larger segment."""
    monkeypatch.setattr(device, "FIRST", BLOCK)
    async with symbiosis.Executor(base, policy="no-lockstep") as executor:
        await executor.listen(address)
        channel = await make_transport(address).connect(address, "client")
        layer = base.model.layers[0].self_attn.q_proj
        xs = [torch.randn(1 + 5000 * (number % 4), 32) for number in range(30)]
        calls = [Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,)) for x in xs]
        replies = [channel.send(call) for call in calls]
        channel.cancel(calls[7])
        for number, (x, reply) in enumerate(zip(xs, replies, strict=True)):
            if number != 7:
                (result,) = await asyncio.wait_for(reply, 20)
                torch.testing.assert_close(result, layer(x))
        sizes = [len(one) for one in gpu.memory.values()]
        assert sizes == [BLOCK, 2 * BLOCK]
        held = 2 * BLOCK + CONNECTION_BYTES - COVERED_BYTES
        await until(lambda: executor.service.budget.held == held)  # the segment counts until the client leaves
        channel.close()
        await until(lambda: executor.service.budget.held == 0)


@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
async def test_a_full_gpu_and_a_call_too_large(base: Any, address: str, gpu: Gpu, kind: str) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address, limits=Limits(arena_bytes=8 << 20))
        transport = make_transport(address)

        def call(rows: int) -> Call:
            return Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (torch.zeros(rows, 32),))

        if kind == "coroutines":
            channel = await transport.connect(address, "client")

            async def ask(rows: int) -> Any:
                return await asyncio.wait_for(channel.send(call(rows)), 20)
        else:
            channel = await in_thread(transport.connect_blocking, address, "client")

            async def ask(rows: int) -> Any:
                return await in_thread(channel.call, call(rows))

        gpu.room = 0
        with pytest.raises(UsageError, match="no room for this client's tensors: out of memory"):
            await ask(1)
        gpu.room = 1 << 30
        await ask(1)
        with pytest.raises(UsageError, match="send fewer tokens at once"):
            await ask(100_000)
        await ask(2)
        channel.close()


@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
async def test_a_segment_that_the_client_cannot_map(
    base: Any, address: str, gpu: Gpu, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container without the host's IPC, for example."""
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        transport, call = make_transport(address), Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (torch.zeros(1, 32),))
        monkeypatch.setattr(device, "map_", Mock(side_effect=RuntimeError("CUDA: invalid argument (1)")))
        channel: Any
        if kind == "coroutines":
            channel = await transport.connect(address, "client")
            answer = asyncio.wait_for(channel.send(call), 20)
        else:
            channel = await in_thread(transport.connect_blocking, address, "client")
            answer = in_thread(channel.call, call)
        with pytest.raises(UsageError, match="cannot map the executor's memory on cpu: CUDA: invalid argument"):
            await answer
        channel.close()


async def test_calls_of_increasing_size_one_by_one(base: Any, address: str, gpu: Gpu) -> None:
    """Each call is within the limit, because segments that have become too small are freed."""
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address, limits=Limits(arena_bytes=64 << 20))
        channel = await in_thread(make_transport(address).connect_blocking, address, "client")
        for rows in (1000, 140_000, 180_000, 240_000):  # 34, 44 and 59 MiB in each direction
            x = torch.ones(rows, 32)
            (y,) = await in_thread(channel.call, Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,)))
            assert y.shape == (rows, 32)
        channel.close()


async def test_a_client_without_that_gpu_uses_the_hosts_memory(
    base: Any, address: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find", lambda name: None)
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as remote, remote.client() as client:
            await client.forward(input_ids=IDS)
    assert not gpu.memory


async def test_a_client_waits_for_writes_of_a_call_that_has_failed(
    base: Any, address: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may still have to write results of a part of its rows where the client's next call will be."""
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        channel = await make_transport(address).connect(address, "client")
        x = torch.ones(4, 32)
        await asyncio.wait_for(channel.send(Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,))), 20)
        _, answered = gpu.events
        before = answered.recorded
        monkeypatch.setattr(executor.engine.runner, "run", fails := Mock(side_effect=RuntimeError("no memory")))
        monkeypatch.setattr(executor.engine.runner, "run_alone", fails)
        with pytest.raises(LayerError):
            await asyncio.wait_for(channel.send(Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,))), 20)
        assert answered.recorded == before + 1
        channel.close()


def test_places_are_checked(gpu: Gpu) -> None:
    start, limit = 1 << 20, 2 * FIRST
    segment, content = Segment.create(CPU, start, Segment.size(1, limit))
    assert content[:2] == (start, FIRST)
    for place in (0, start - 64, start + FIRST - 64, start + FIRST, 1 << 62):
        with pytest.raises(WireError, match="not inside the client's memory"):
            segment.matrices(place, 2, (Columns(16, torch.float32),))
    segment.matrices(start + FIRST - 128, 2, (Columns(16, torch.float32),))
    for size in (0, limit + 1):
        with pytest.raises(WireError, match=f"may have {limit}"):
            Segment.size(size, limit)


def test_a_matrix_is_written_to_during_a_pass_over_another_one(gpu: Gpu) -> None:
    arena, descriptor = Arena.create(1 << 20)
    os.close(descriptor)
    segment, _ = Segment.create(CPU, 0, Segment.size(1, FIRST))
    for memory in (arena, segment):
        rows, results = memory.matrices(64, 2, (Columns(3, torch.float32), Columns(5, torch.float32)))
        rows.fill_(3)
        x = rows.detach().requires_grad_()
        y = (x * x).sum()
        results.fill_(1)
        (gradient,) = torch.autograd.grad(y, x)
        assert gradient.eq(6).all()


def test_segments_are_checked(gpu: Gpu) -> None:
    ours, good = Segment.create(CPU, 64, Segment.size(1, 2 * FIRST))
    for index, wrong in ((0, 0), (1, 0), (1, 1 << 40), (1, "x"), (2, b"x"), (3, b"")):
        bad = [*good]
        bad[index] = wrong
        with pytest.raises(WireError, match="malformed SEGMENT"):
            Segment.open(CPU, 64, 2 * FIRST, bad)
    theirs = Segment.open(CPU, 64, 2 * FIRST, good)
    ours.matrices(64, 1, (Columns(4, torch.float32),))[0].fill_(3)
    assert theirs.matrices(64, 1, (Columns(4, torch.float32),))[0].eq(3).all()
