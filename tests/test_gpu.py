"""The same on CUDA: equivalence with plain PEFT there, and clients on the CPU of an executor on the GPU."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.testing import ARCHITECTURES, Comparison, Job, compare, run_job, run_job_plain, tiny_model
from tests.helpers import BATCH, IDS, METHODS, adamw, ia3, lora

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]

CUDA = torch.device("cuda")
TRAINED = 1e-2
"""Kernels on a GPU choose another blocking, and another order of sums, for another number of rows."""


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_alone(architecture: str, method: str, base_layers: str) -> None:
    model = tiny_model(architecture).to(CUDA)
    comparison = await compare(model, METHODS[method](architecture), base_layers=base_layers)
    assert comparison.worst("logits") <= 1e-5, comparison
    assert comparison.worst("greedy") == 0, comparison
    assert comparison.worst("sampled") == 0, comparison
    assert comparison.worst("gradient") <= 1e-4, comparison
    assert comparison.worst("adapter") <= TRAINED, comparison


@pytest.mark.parametrize("method", METHODS)
async def test_among_others(method: str) -> None:
    model = tiny_model().to(CUDA)
    config = METHODS[method]()
    expected = run_job_plain(model, config, seed=3)
    async with symbiosis.Executor(model) as executor:
        async with executor.client(copy.deepcopy(config), seed=3) as client, executor.client(ia3()) as other:
            optimizer = adamw(other.model)
            stop = asyncio.Event()

            async def train() -> None:
                while not stop.is_set():
                    await other.train_step(BATCH, optimizer)

            task = asyncio.create_task(train())
            comparison = Comparison.of(await run_job(client), expected)
            stop.set()
            await task
    assert comparison.worst("logits") <= 1e-4, comparison
    assert comparison.worst("gradient") <= 1e-3, comparison
    assert comparison.worst("adapter") <= TRAINED, comparison


@pytest.mark.parametrize("method", METHODS)
async def test_client_on_the_cpu(method: str) -> None:
    """The executor on the GPU, the client's own share on the CPU: rows travel, results agree with plain PEFT on CPU."""
    model = tiny_model()
    config = METHODS[method]()
    expected = run_job_plain(model, config, Job(steps=5), seed=3)
    async with symbiosis.Executor(model, device="cuda") as executor:
        async with executor.client(config, seed=3, device="cpu") as client:
            assert {p.device.type for p in client.model.parameters()} == {"cpu"}
            comparison = Comparison.of(await run_job(client, Job(steps=5)), expected)
    assert comparison.worst("logits") <= 1e-4, comparison
    assert comparison.worst("gradient") <= 1e-3, comparison
    assert comparison.worst("losses") <= 1e-3, comparison


async def test_device_and_dtype_options(base: Any) -> None:
    async with symbiosis.Executor(base, device="cuda", dtype=torch.bfloat16) as executor:
        assert executor.device.type == "cuda"
        async with executor.client(lora()) as client:
            logits = (await client.forward(input_ids=IDS.to(CUDA))).logits
            assert logits.dtype is torch.bfloat16
            assert logits.device.type == "cuda"
            await client.train_step(BATCH, adamw(client.model))  # the batch is moved


async def test_cancelled_under_work(base: Any) -> None:
    async with symbiosis.Executor(base, device="cuda") as executor, executor.client(lora()) as client:
        for moment in range(6):
            task = asyncio.create_task(client.train_step(BATCH, adamw(client.model)))
            for _ in range(10 * moment):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await client.train_step(BATCH, adamw(client.model))


async def test_memory_goes_back(base: Any) -> None:
    async with symbiosis.Executor(base, device="cuda") as executor:
        async with executor.client(lora()) as client:
            await client.train_step(BATCH, adamw(client.model))
        del client
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            async with executor.client(lora()) as client:
                await client.train_step(BATCH, adamw(client.model))
            del client
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
