"""Tests on CUDA: equivalence with plain PEFT on the GPU, clients on the CPU with an executor on the GPU, and tensors
that stay on the GPU on their way between processes.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Batch, Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.policies import NoLockstep
from symbiosis.testing import ARCHITECTURES, Comparison, Job, compare, run_job, run_job_plain, tiny_model
from tests.client.joint.common import TARGETS, check_each_tenant, model_of
from tests.helpers import BATCH, IDS, METHODS, adamw, ia3, in_thread, lora
from tests.service import Service, free_port, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]

CUDA = torch.device("cuda")
TRAINED = 1e-2
"""Tolerances for clients among others: kernels on a GPU choose another blocking, and another order of sums, for another
number of rows.
"""


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
    """The executor is on the GPU and the client's share on the CPU: rows are copied, and results agree with plain PEFT
    on the CPU.
    """
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


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "qwen3", "mixtral", "lfm2"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
async def test_joint_decoding(architecture: str, sample: bool, mode: str) -> None:
    await check_each_tenant(architecture, sample, mode, "cuda", 1e-4)


async def test_a_mixture_of_experts() -> None:
    comparison = await compare(model_of("mixtral").to(CUDA), lora("mixtral", target_modules=TARGETS))
    assert comparison.worst("logits") <= 1e-5, comparison
    assert comparison.worst("gradient") <= 1e-4, comparison
    assert comparison.worst("greedy") == 0, comparison


@pytest.mark.parametrize("compiled", [False, True])
async def test_a_static_cache(base: Any, compiled: bool) -> None:
    """``generate`` with a static cache compiles plain models on a GPU. A client's is compiled only if it asks."""
    base = base.to(CUDA)
    options = {"input_ids": IDS[:1].to(CUDA), "max_new_tokens": 8, "do_sample": False}
    more = {"disable_compile": False} if compiled else {}
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as one, executor.client() as other:
        expected = [await client.generate(**options) for client in (one, other)]
        static = one.generate(**options, cache_implementation="static", **more)
        results = await asyncio.wait_for(asyncio.gather(static, other.generate(**options)), 120)
    assert all(map(torch.equal, results, expected))


async def test_a_client_computes_on_a_stream_of_its_own(base: Any) -> None:
    """Its stream stays its own while it waits, and its rows are written before the executor reads them."""
    base = base.to(CUDA)
    ids = IDS.to(CUDA)
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as one, executor.client(ia3()) as other:
        expected = [(await client.forward(input_ids=ids)).logits for client in (one, other)]
        usual = torch.cuda.current_stream()
        seen = []

        def aside() -> torch.Tensor:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(5):
                    torch.cuda._sleep(10**6)  # the rows of the first layer are late
                    logits = one.model(input_ids=ids).logits
                seen.append(torch.cuda.current_stream() == side)
            torch.cuda.current_stream().wait_stream(side)
            return logits

        async def look() -> None:
            for _ in range(200):
                await asyncio.sleep(0)
                seen.append(torch.cuda.current_stream() == usual)

        found, there, _ = await asyncio.gather(one.run(aside), other.forward(input_ids=ids), look())
    assert all(seen)
    torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(there.logits, expected[1], atol=1e-4, rtol=1e-4)


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


async def test_memory_is_freed(base: Any) -> None:
    async with symbiosis.Executor(base, device="cuda") as executor:
        async with executor.client(lora()) as client:
            await client.train_step(BATCH, adamw(client.model))
        del client
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            async with executor.client(lora()) as client:
                await client.train_step(BATCH, adamw(client.model))
            del client
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before


# --------------------------------------------------------------------------------------------------- between processes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gpu") / "model")


@pytest.fixture(scope="module")
def service(checkpoint: Path) -> Iterator[Service]:
    """An executor on the GPU in a process of its own: a process cannot open its own IPC handles."""
    with Service(checkpoint, f"shm://{checkpoint.parent}/s.sock", "--device", "cuda", fresh=True) as service:
        yield service


def plain(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint).to(CUDA)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
async def test_over_shm(service: Service, checkpoint: Path, kind: str, method: str) -> None:
    config = METHODS[method]()
    expected = run_job_plain(plain(checkpoint), copy.deepcopy(config))
    if kind == "coroutines":
        async with symbiosis.connect(service.address) as remote, remote.client(config, seed=0) as client:
            assert {parameter.device.type for parameter in client.model.parameters()} == {"cuda"}
            outcome = await run_job(client)
    else:

        def tenant() -> Any:
            with symbiosis.open_model(service.address) as model:
                assert model.device.type == "cuda"
                return run_job_plain(model, config)

        outcome = await in_thread(tenant)
    comparison = Comparison.of(outcome, expected)
    assert comparison.worst("logits") <= 1e-5, comparison
    assert comparison.worst("gradient") <= 1e-4, comparison
    assert comparison.worst("greedy") == 0, comparison
    assert comparison.worst("adapter") <= TRAINED, comparison


async def test_over_shm_from_the_cpu(service: Service, checkpoint: Path) -> None:
    expected = run_job_plain(plain(checkpoint).cpu(), lora(), Job(steps=5))
    async with symbiosis.connect(service.address) as remote, remote.client(lora(), seed=0, device="cpu") as client:
        comparison = Comparison.of(await run_job(client, Job(steps=5)), expected)
    assert comparison.worst("logits") <= 1e-4, comparison
    assert comparison.worst("gradient") <= 1e-3, comparison


async def test_the_arena_on_the_gpu_grows_and_is_freed(service: Service, checkpoint: Path) -> None:
    """Many calls of all sizes run at once, on two streams. Afterwards the memory of the GPU is free again, if no other
    program takes more of it meanwhile."""
    layer = plain(checkpoint).model.layers[0].self_attn.q_proj
    free = torch.cuda.mem_get_info()[0]
    transport = make_transport(service.address)
    for _ in range(3):
        channel = await transport.connect(service.address, "client")
        xs = [torch.randn(1 + 60_000 * (number % 4), 32, device=CUDA) for number in range(24)]
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        replies = []
        for number, x in enumerate(xs):
            with torch.cuda.stream(streams[number % 2]):
                streams[number % 2].wait_stream(streams[0])
                replies.append(channel.send(Call(Key((0,), Pass.FORWARD), Kind.FINETUNE, (x,))))
        for x, reply in zip(xs, replies, strict=True):
            (result,) = await asyncio.wait_for(reply, 30)
            torch.testing.assert_close(result, layer(x), atol=1e-5, rtol=1e-4)
        channel.close()
        del channel, replies, result
    torch.cuda.synchronize()
    async with asyncio.timeout(20):
        while torch.cuda.mem_get_info()[0] < free - (300 << 20):  # noqa: ASYNC110 (the driver sends no event)
            await asyncio.sleep(0.1)


async def test_executor_on_the_gpu_killed_during_a_job(checkpoint: Path, tmp_path: Path) -> None:
    expected = run_job_plain(plain(checkpoint), lora(), Job(steps=20))
    with Service(checkpoint, f"shm://{tmp_path}/s.sock", "--device", "cuda", fresh=True) as service:
        async with symbiosis.connect(service.address, retry=60.0) as remote, remote.client(lora(), seed=0) as client:
            job = asyncio.create_task(run_job(client, Job(steps=20)))
            async with asyncio.timeout(60):
                while (await remote.status())["requests"] < 100:  # noqa: ASYNC110 (the count sends no event)
                    await asyncio.sleep(0.01)
            assert not job.done()
            await asyncio.to_thread(service.kill)
            await asyncio.to_thread(service.start)
            comparison = Comparison.of(await asyncio.wait_for(job, 90), expected)
    assert comparison.worst("adapter") <= TRAINED, comparison


_CALLS_LATE = """
import asyncio, sys, time, torch
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind

async def main(address):
    channel = await make_transport(address).connect(address, "late")
    x = torch.ones(4, 32, device="cuda")
    await channel.send(Call(Key((0,), Pass.FORWARD), Kind.DECODE, (x,)))
    torch.cuda._sleep(10**11)  # its rows are written in a minute
    channel.send(Call(Key((0,), Pass.FORWARD), Kind.DECODE, (x + 1,)))
    channel.flush()
    print("sent", flush=True)
    time.sleep(60)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_client_that_is_killed_before_its_rows_are_written_stops_nobody(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The executor's stream waits for an event of the killed process, whose context on the GPU is gone."""
    with Service(checkpoint, f"shm://{tmp_path}/s.sock", "--device", "cuda", fresh=True) as service:
        async with symbiosis.connect(service.address) as remote, remote.client(lora()) as client:
            await client.forward(input_ids=IDS.to(CUDA))
            late = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _CALLS_LATE, service.address, stdout=asyncio.subprocess.PIPE
            )
            assert late.stdout is not None
            assert await asyncio.wait_for(late.stdout.readline(), 60) == b"sent\n"
            late.kill()
            await late.wait()
            out = await asyncio.wait_for(client.forward(input_ids=IDS.to(CUDA)), 20)
            assert bool(torch.isfinite(await asyncio.wait_for(asyncio.to_thread(out.logits.cpu), 20)).all())


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
async def test_over_dist(checkpoint: Path, backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes two GPUs, one for each side; there is one")
    expected = run_job_plain(plain(checkpoint), lora())
    address = f"dist://127.0.0.1:{free_port()}"
    device = "cuda:1" if backend == "nccl" else "cuda"
    with Service(
        checkpoint, address, "--device", device, "--dist-backend", backend, "--insecure", fresh=True
    ) as service:
        async with symbiosis.connect(service.address) as remote:
            async with remote.client(lora(), seed=0, device="cuda") as client:
                comparison = Comparison.of(await run_job(client), expected)
    assert comparison.worst("logits") <= 1e-4, comparison
    assert comparison.worst("gradient") <= 1e-3, comparison


async def test_policies_get_the_time_of_the_device(base: Any) -> None:
    """The policy gets the time of the computation on the device, not that of the kernel launch."""
    seen: list[float] = []

    class Notes(NoLockstep):
        lone_at_once = False  # policies are told nothing of requests that run at once

        def ran(self, batch: Batch, seconds: float) -> None:
            seen.append(seconds)

    async with symbiosis.Executor(copy.deepcopy(base).to(CUDA), policy=Notes()) as executor:
        async with executor.client() as client, executor.client():
            run = executor.engine.runner.run

            def slowly(batch: Batch, calls: Any) -> None:
                torch.cuda._sleep(10**8)
                run(batch, calls)

            executor.engine.runner.run = slowly  # type: ignore[method-assign]
            await client.forward(input_ids=IDS.to(CUDA))
            torch.cuda.synchronize()
            executor.engine.runner.run = run  # type: ignore[method-assign]
            await client.forward(input_ids=IDS.to(CUDA))
    assert len(seen) > 3
    assert max(seen) > 1e-2  # 10^8 cycles at less than 10 GHz
