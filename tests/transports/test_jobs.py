"""Jobs of tenants give what plain PEFT gives, over each transport, also while executors end and others take over."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

import symbiosis
from symbiosis.core.transport import Listener
from symbiosis.errors import RefusedError
from symbiosis.testing import ARCHITECTURES, Comparison, Job, run_job, run_job_plain, tiny_model
from symbiosis.transports import lanes
from tests.helpers import (
    BATCH,
    IDS,
    METHODS,
    SHORT,
    adamw,
    assert_close,
    crowd,
    ia3,
    in_thread,
    lora,
    prefix,
    restart,
    until,
)


@dataclass(frozen=True)
class Site:
    """Where executors listen, and how they and tenants do so."""

    address: str
    listening: dict[str, Any] = field(default_factory=dict)
    connecting: dict[str, Any] = field(default_factory=dict)

    async def listen(self, executor: symbiosis.Executor) -> Listener:
        return await executor.listen(self.address, **self.listening)


@pytest.fixture
def site_of(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Site]:
    monkeypatch.setattr(lanes, "WITHIN_S", 10.0)  # so that lanes whose other side is gone end within the test
    monkeypatch.setattr(lanes, "MEET_WITHIN_S", 3.0)
    return {
        "shm": Site(f"shm://{tmp_path}/socket"),
        "tcp": Site("tcp://127.0.0.1:0"),
        "tls": Site("tcp://127.0.0.1:0", {"keys": keys}, {"key": keys / "alice.secret"}),
        "dist": Site("dist://127.0.0.1:0", {"insecure": True}),
    }.__getitem__


@pytest.fixture(params=["shm", "tcp", "tls", "dist"])
def site(request: pytest.FixtureRequest, site_of: Callable[[str], Site]) -> Site:
    return site_of(request.param)


JOB = Job(steps=8)
# The architecture is the transport's concern only in the shapes of rows, so one transport has them all.
PLACES = [
    *(("shm", architecture) for architecture in ARCHITECTURES),
    *((kind, "llama") for kind in ("tcp", "tls", "dist")),
]


@pytest.mark.parametrize("method", [*METHODS, None])
@pytest.mark.parametrize(("kind", "architecture"), PLACES)
async def test_coroutines_alone_bit_equal(
    kind: str, architecture: str, method: str | None, site_of: Callable[[str], Site]
) -> None:
    model, site = tiny_model(architecture), site_of(kind)
    config = METHODS[method](architecture) if method else None
    expected = run_job_plain(model, copy.deepcopy(config), JOB)
    async with symbiosis.Executor(model) as executor:
        listener = await site.listen(executor)
        async with (
            symbiosis.connect(listener.address, **site.connecting) as base,
            base.client(config, seed=0) as client,
        ):
            outcome = await run_job(client, JOB)
    comparison = Comparison.of(outcome, expected)
    assert comparison.bit_equal, comparison


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
@pytest.mark.parametrize(("kind", "architecture"), PLACES)
async def test_synchronous_code_alone_bit_equal(
    kind: str, architecture: str, base_layers: str, site_of: Callable[[str], Site]
) -> None:
    model, site = tiny_model(architecture), site_of(kind)
    expected = run_job_plain(model, lora(architecture), JOB)
    async with symbiosis.Executor(model, base_layers=base_layers) as executor:
        listener = await site.listen(executor)

        def tenant() -> Any:
            with symbiosis.open_model(listener.address, **site.connecting) as opened:
                return run_job_plain(opened, lora(architecture), JOB)

        comparison = Comparison.of(await in_thread(tenant), expected)
        assert comparison.bit_equal, comparison
        assert executor.statistics().requests > 100


async def test_bfloat16(site: Site) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    expected = run_job_plain(model, lora())
    async with symbiosis.Executor(model) as executor:
        listener = await site.listen(executor)
        async with (
            symbiosis.connect(listener.address, **site.connecting) as base,
            base.client(lora(), seed=0) as client,
        ):
            comparison = Comparison.of(await run_job(client), expected)
    assert comparison.bit_equal, comparison


async def test_among_others(base: Any, site: Site) -> None:
    """Three tenants use the transport, beside five in the executor's process."""
    configs = [make("llama") for make in METHODS.values()]
    expected = [run_job_plain(base, copy.deepcopy(config), SHORT, seed=seed) for seed, config in enumerate(configs)]
    others = [(lora(), "train"), (ia3(), "train"), (prefix(), "generate"), (lora(), "generate"), (None, "generate")]
    async with symbiosis.Executor(base) as executor:
        listener = await site.listen(executor)
        async with symbiosis.connect(listener.address, **site.connecting) as remote:

            async def watched(seed: int, config: Any) -> Any:
                async with remote.client(config, seed=seed) as client:
                    return await run_job(client, SHORT)

            async with crowd(executor, others):
                outcomes = await asyncio.gather(*[watched(seed, config) for seed, config in enumerate(configs)])
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert_close(outcome, wanted)


@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
async def test_training_after_inference_mode(base: Any, kind: str, site: Site) -> None:
    """Tensors that were made in inference mode cannot be written to, or trained with, outside of it."""
    gc.collect()  # models that other tests have opened, whose tensors would be used again
    async with symbiosis.Executor(base) as executor:
        address = (await site.listen(executor)).address
        if kind == "coroutines":
            async with symbiosis.connect(address, **site.connecting) as remote:
                async with remote.client(lora(), seed=0) as client:
                    with torch.inference_mode():
                        await client.forward(input_ids=IDS)
                    optimizer = adamw(client.model)
                    losses = [await client.train_step(BATCH, optimizer) for _ in range(2)]
                    assert losses[1] < losses[0]
        else:

            def tenant() -> None:
                with torch.inference_mode(), symbiosis.open_model(address, **site.connecting) as model:
                    model(input_ids=IDS)
                with symbiosis.open_model(address, **site.connecting) as model:
                    tuned = get_peft_model(model, lora())
                    with torch.inference_mode():
                        tuned(input_ids=IDS)
                    tuned(**BATCH).loss.backward()
                    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)

            await in_thread(tenant)


async def test_training_while_another_coroutine_holds_inference_mode(
    base: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with symbiosis.Executor(base) as executor:
        address = (await site.listen(executor)).address
        async with symbiosis.connect(address, **site.connecting) as remote, remote.client(lora(), seed=0) as client:
            run, seen = executor.engine.runner.run_alone, []
            monkeypatch.setattr(executor.engine.runner, "run_alone", lambda call: (seen.append(call), run(call))[1])
            step = asyncio.create_task(client.train_step(BATCH, adamw(client.model)))
            while not seen:  # noqa: ASYNC110 (`until` waits too long between two looks)
                await asyncio.sleep(0)
            with torch.inference_mode():
                await asyncio.wait([step], timeout=20)
            assert step.result() > 0
            assert not any(tensor.is_inference() for call in seen for tensor in call.tensors)


async def test_a_client_leaves_although_a_forked_process_has_its_socket(base: Any, site: Site) -> None:
    async with symbiosis.Executor(base) as executor:
        address = (await site.listen(executor)).address
        async with symbiosis.connect(address, **site.connecting) as remote:
            client = await remote.client().open()
            await client.forward(input_ids=IDS)
            reads, writes = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(writes)
                os.read(reads, 1)  # until the test has ended
                os._exit(0)
            try:
                await client.close()
                await until(lambda: executor.status()["clients"] == [])
            finally:
                os.close(writes)
                os.close(reads)
                await in_thread(os.waitpid, child, 0)


@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
async def test_survives_restarts(base: Any, kind: str, site: Site) -> None:
    """The executor ends during training and generation and is started again: the results are the same."""
    expected = run_job_plain(base, lora())
    executors = [symbiosis.Executor(copy.deepcopy(base)) for _ in range(4)]
    await executors[0].start()
    address = (await site.listen(executors[0])).address

    async def coroutine() -> Any:
        async with symbiosis.connect(address, retry=30.0, **site.connecting) as remote:
            async with remote.client(lora(), seed=0) as client:
                return await run_job(client)

    def synchronous() -> Any:
        with symbiosis.open_model(address, retry=30.0, **site.connecting) as model:
            return run_job_plain(model, lora())

    job = asyncio.create_task(coroutine() if kind == "coroutines" else in_thread(synchronous))
    await restart(address, executors, job, **site.listening)
    comparison = Comparison.of(await asyncio.wait_for(job, 60), expected)
    await executors[-1].close()
    assert comparison.bit_equal, comparison


async def test_another_model_at_the_same_address_is_refused(base: Any, site: Site) -> None:
    async with symbiosis.Executor(base) as executor:
        address = (await site.listen(executor)).address
        remote = symbiosis.connect(address, retry=10.0, **site.connecting)
        await remote.__aenter__()
        client = await remote.client().open()
        await client.forward(input_ids=IDS)
    async with symbiosis.Executor(tiny_model(seed=1)) as executor:
        await executor.listen(address, **site.listening)
        with pytest.raises(RefusedError, match="another model"):
            await asyncio.wait_for(client.forward(input_ids=IDS), 30)
        await remote.close()
