"""Mixtures of experts: clients get what plain transformers + PEFT gives, and hold no expert."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.client.experts import VirtExperts
from symbiosis.client.virtlayer import is_missing
from symbiosis.errors import PlaceholderError, PrivacyError
from symbiosis.testing import Comparison, Job, compare, run_job, run_job_plain
from tests.helpers import CAUSAL, IDS, SHORT, adamw, assert_close, crowd
from tests.moe import MIXTURES, mixture

JOB = Job(steps=2, new_tokens=4)


def attention_lora(**options: Any) -> LoraConfig:
    """Return LoRA for layers that every mixture here has."""
    return LoraConfig(r=4, target_modules=["o_proj", "out_proj"], init_lora_weights=False, task_type=CAUSAL, **options)


@pytest.mark.parametrize("name", MIXTURES)
async def test_alone_bit_equal(name: str) -> None:
    comparison = await compare(mixture(name), attention_lora(), JOB)
    if name == "llama4":  # only rows that are not zero are sent, so products have another number of rows
        assert comparison.worst() <= 1e-6, comparison
    else:
        assert comparison.bit_equal, comparison


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen3-moe"])
async def test_alone_in_bf16(name: str) -> None:
    """Routing weights keep their precision on the way, so a client rounds where the plain model does."""
    comparison = await compare(mixture(name, dtype=torch.bfloat16), attention_lora(), JOB)
    assert comparison.bit_equal, comparison


@contextlib.asynccontextmanager
async def served(model: Any, scheme: str, folder: Path) -> AsyncIterator[tuple[symbiosis.Executor, Any]]:
    """Yield an executor, and what makes clients of it over ``shm://`` or ``tcp://``."""
    async with symbiosis.Executor(model) as executor:
        listener = await executor.listen(f"shm://{folder}/socket" if scheme == "shm" else "tcp://127.0.0.1:0")
        async with symbiosis.connect(listener.address) as base:
            yield executor, base


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize("name", ["mixtral", "llama4", "deepseek-v3"])
async def test_beside_others_in_another_process(name: str, scheme: str, tmp_path: Path) -> None:
    model = mixture(name)
    expected = run_job_plain(model, attention_lora(), SHORT)
    async with served(copy.deepcopy(model), scheme, tmp_path) as (executor, base):
        others = [(attention_lora(), "train"), (None, "generate")]
        async with crowd(executor, others), base.client(attention_lora(), seed=0) as client:
            banks = [module for module in client.model.modules() if isinstance(module, VirtExperts)]
            assert banks
            assert all(is_missing(parameter) for bank in banks for parameter in bank.parameters())
            assert_close(await run_job(client, SHORT), expected)


async def test_rows_of_several_tenants_share_a_bank() -> None:
    model = mixture("mixtral")
    expected = [run_job_plain(model, attention_lora(), SHORT, seed=seed) for seed in range(3)]

    async def tenant(executor: symbiosis.Executor, seed: int) -> Any:
        async with executor.client(attention_lora(), seed=seed) as client:
            return await run_job(client, SHORT)

    async with symbiosis.Executor(model, policy="lockstep") as executor:
        outcomes = await asyncio.gather(*[tenant(executor, seed) for seed in range(3)])
        assert executor.statistics().mean_batch > 1.5
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert_close(outcome, wanted)


async def test_experts_are_adapted_in_the_executors_process_without_a_copy() -> None:
    """LoRA on the experts' parameters runs in the client, on the bank's own memory."""
    model = mixture("qwen3-moe")
    config = attention_lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    expected = run_job_plain(model, config, JOB)
    async with symbiosis.Executor(model) as executor, executor.client(config, seed=0) as client:
        assert Comparison.of(await run_job(client, JOB), expected).bit_equal
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        mine = [p for name, p in client.model.named_parameters() if name.endswith("gate_up_proj")]
        assert mine
        assert all(p.untyped_storage().data_ptr() in weights for p in mine)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    "options",
    [{"target_parameters": ["mlp.experts.gate_up_proj"]}, {"target_modules": "all-linear"}],
    ids=["target_parameters", "all-linear"],
)
async def test_experts_are_not_adapted_from_another_process(options: dict[str, Any], tmp_path: Path) -> None:
    config = LoraConfig(**{"target_modules": ["q_proj"], "task_type": CAUSAL, **options})
    async with served(mixture("qwen3-moe"), "shm", tmp_path) as (_, base):
        with pytest.raises(PlaceholderError, match=r"mlp\.experts.*not with the client.*executor's process"):
            async with base.client(config):
                pass


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
async def test_experts_are_not_saved_from_another_process(base_layers: str, tmp_path: Path) -> None:
    """The error names the layer and what to do. A client in the executor's process, which it names, trains a copy."""
    model = mixture("qwen3-moe")
    config = attention_lora(modules_to_save=["mlp"])
    async with symbiosis.Executor(copy.deepcopy(model), base_layers=base_layers) as executor:
        await executor.listen(f"shm://{tmp_path}/socket")

        def adapt() -> None:
            with symbiosis.open_model(f"shm://{tmp_path}/socket") as opened:
                with pytest.raises(PlaceholderError, match=r"^model\.layers\.0\.mlp.*is served whole.*--base-layers"):
                    get_peft_model(opened, config)

        await asyncio.to_thread(adapt)
        async with executor.client(config, seed=0) as client:
            found = await run_job(client, JOB)
    assert Comparison.of(found, run_job_plain(model, config, JOB)).bit_equal


async def test_an_expert_that_a_tenant_trains_is_its_own() -> None:
    model = mixture("mixtral")
    before = copy.deepcopy(model.state_dict())
    async with symbiosis.Executor(model) as executor, executor.client() as one, executor.client() as other:
        bank = next(module for module in one.model.modules() if isinstance(module, VirtExperts))
        bank.down_proj.requires_grad_(True)
        await one.train_step({"input_ids": IDS, "labels": IDS}, adamw(one.model, lr=0.1))
        assert not torch.equal(bank.down_proj, before["model.layers.0.mlp.experts.down_proj"])
        with torch.no_grad():
            assert torch.equal((await other.forward(input_ids=IDS)).logits, model(input_ids=IDS).logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


async def test_masked_rows_are_not_sent_to_a_bank() -> None:
    async with (
        symbiosis.Executor(mixture("mixtral")) as executor,
        executor.client(privacy="noise-pool:size=8") as client,
    ):
        with pytest.raises(PrivacyError, match=r"experts is a bank of experts, whose rows cannot be masked"):
            await client.forward(input_ids=IDS)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "olmoe"])
async def test_joint_decoding(name: str) -> None:
    """Tenants with adapters of their own decode in joint walks, and get their own tokens."""
    model = mixture(name)
    job = Job(steps=0, new_tokens=8, sequences=1)
    expected = [run_job_plain(model, attention_lora(), job, seed=seed) for seed in range(3)]

    async def tenant(executor: symbiosis.Executor, seed: int) -> Any:
        async with executor.client(attention_lora(), name=str(seed), seed=seed) as client:
            async with together:
                pass
            return await run_job(client, job)

    together = asyncio.Barrier(3)
    async with symbiosis.Executor(model) as executor:
        outcomes = await asyncio.gather(*[tenant(executor, seed) for seed in range(3)])
        assert sum(one.joint for one in executor.statistics().clients.values()) > 0
    for outcome, wanted in zip(outcomes, expected, strict=True):
        assert_close(outcome, wanted)


async def test_a_bank_that_takes_rows_by_place_is_walked_alone() -> None:
    model = mixture("llama4")
    async with symbiosis.Executor(model) as executor:
        async with executor.client(name="one") as one, executor.client(name="two") as two:
            ids = IDS[:1]
            greedy = {"input_ids": ids, "max_new_tokens": 6, "do_sample": False}
            texts = await asyncio.gather(one.generate(**greedy), two.generate(**greedy))
        assert torch.equal(*texts)
        assert torch.equal(texts[0], model.generate(**greedy))
        alone = executor.statistics().clients["two"].alone
        assert "its experts take rows in an order of their own" in alone, alone
