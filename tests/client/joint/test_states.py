"""Joint decoding with models that keep states: linear attention, state spaces and short convolutions."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import Any

import pytest
import torch
import transformers

from symbiosis import Client, Executor
from symbiosis.testing.zoo import zoo_model
from tests.client.joint.common import OPTIONS, assert_equal, plain, text
from tests.helpers import LOGITS, lora, until


def model_of(name: str) -> Any:
    base = zoo_model(name)
    base.generation_config.eos_token_id = None
    return base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["Lfm2ForCausalLM", "Qwen3_5ForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM", "JambaForCausalLM"]
)
async def test_each_tenant_gets_what_plain_peft_gives(name: str, dtype: torch.dtype) -> None:
    """Texts of several lengths; the third client comes in the middle of the others' texts."""
    base = model_of(name).to(dtype)
    plain_base = copy.deepcopy(base)
    config = lora(target_modules=["q_proj", "v_proj", "out_proj"] if "Lfm2" in name else ["q_proj", "v_proj"])
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(copy.deepcopy(config), name=str(seed), seed=seed))
            for seed in range(3)
        ]

        async def write(number: int, tokens: int) -> Any:
            ids = text(2 + 5 * number, number)
            return await clients[number].generate(input_ids=ids, max_new_tokens=tokens, **OPTIONS)

        await asyncio.gather(*(write(number, 20) for number in range(3)))
        executor.reset_statistics()
        first = [asyncio.ensure_future(write(number, 24)) for number in range(2)]
        await until(lambda: any(counts.joint for counts in executor.statistics().clients.values()))
        outs = [await write(2, 12), *await asyncio.gather(*first)]
        counts = executor.statistics().clients
    assert all(counts[str(number)].joint >= 8 for number in range(3)), counts
    for out, number, tokens in zip(outs, (2, 0, 1), (12, 24, 24), strict=True):
        model = plain(plain_base, config, number)
        right = model.generate(input_ids=text(2 + 5 * number, number), max_new_tokens=tokens, **OPTIONS)
        assert_equal(out, right, LOGITS if dtype is torch.float32 else 0.01)


async def test_a_cache_that_keeps_earlier_states_walks_alone() -> None:
    base = model_of("Lfm2ForCausalLM")
    plain_base = copy.deepcopy(base)
    async with Executor(base) as executor, executor.client(name="a") as a, executor.client(name="b") as b:
        cache = transformers.DynamicCache(config=base.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        out, _ = await asyncio.gather(
            a.generate(input_ids=text(5), max_new_tokens=12, past_key_values=cache, **OPTIONS),
            b.generate(input_ids=text(5), max_new_tokens=24, **OPTIONS),
        )
        counts = executor.statistics().clients["a"]
    assert counts.joint == 0
    assert "its cache has no states yet, or keeps earlier ones" in counts.alone
    assert_equal(out, plain_base.generate(input_ids=text(5), max_new_tokens=12, **OPTIONS))


async def test_states_of_another_shape_disturb_no_other_tenant() -> None:
    base = model_of("Lfm2ForCausalLM")
    plain_base = copy.deepcopy(base)

    @torch.no_grad()
    def spoil(model: Any) -> None:
        cache = transformers.DynamicCache(config=model.config)
        model(input_ids=text(5), past_key_values=cache, use_cache=True)
        for _ in range(6):
            model(input_ids=text(1), past_key_values=cache, use_cache=True)
        states = next(layer.conv_states for layer in cache.layers if hasattr(layer, "conv_states"))
        states[0] = states[0].repeat(3, 1, 1)
        model(input_ids=text(1), past_key_values=cache, use_cache=True)

    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(executor.client(name=str(number))) for number in range(3)]

        async def write(client: Client) -> Any:
            return await client.generate(input_ids=text(5), max_new_tokens=24, **OPTIONS)

        await asyncio.gather(*map(write, clients))
        outs = await asyncio.gather(
            *map(write, clients[:2]), clients[2].run(spoil, clients[2].model), return_exceptions=True
        )
        assert executor.statistics().clients["0"].joint > 20
    assert isinstance(outs[2], RuntimeError)
    for out in outs[:2]:
        assert_equal(out, plain_base.generate(input_ids=text(5), max_new_tokens=24, **OPTIONS))
