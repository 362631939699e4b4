"""Joint decoding with each model of the zoo that generates texts."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import Any

import pytest
import torch

from symbiosis import Client, Executor
from symbiosis.testing.zoo import ZOO, zoo_inputs, zoo_model
from tests.client.joint.common import OPTIONS, assert_equal, plain, texts
from tests.helpers import LOGITS, lora

OWN_CODE = "its model has attention code of its own"
ALONE = {
    **dict.fromkeys(["BloomForCausalLM", "FalconForCausalLM", "XGLMForCausalLM"], OWN_CODE),
    **dict.fromkeys(["GPTJForCausalLM", "CodeGenForCausalLM", "GPTNeoForCausalLM"], OWN_CODE),
    "DiffLlamaForCausalLM": "its model gives other results for several rows",
    "JetMoeForCausalLM": "its experts take rows in an order of their own",
    "MiniMaxForCausalLM": "its cache is a MiniMaxCache",
    "RecurrentGemmaForCausalLM": "its cache has no states yet, or keeps earlier ones",
    "Llama4ForCausalLM": "its experts take rows in an order of their own",
    "PaliGemmaForConditionalGeneration": "the argument token_type_ids",
}
"""Why all tenants of a model walk alone."""
OTHER_CACHES = {"MptForCausalLM", "RwkvForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"}
"""Models that keep something else than ``past_key_values``; their calls pass the joint decoder by."""
_QUERIES = {"q_proj", "q_a_proj", "c_attn", "q_attn", "Wqkv", "qkv_proj", "query_key_value", "in_proj", "key"}
_TARGETS = _QUERIES | {"v_proj", "kv_proj"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.reads in ("text", "image and text")])
async def test_each_tenant_gets_what_plain_peft_gives(name: str) -> None:
    base = zoo_model(name)
    base.generation_config.eos_token_id = None
    plain_base = copy.deepcopy(base)
    modules = {path.rpartition(".")[2] for path, _ in base.named_modules() if "vision" not in path}
    config = lora("gpt2" if name == "GPT2LMHeadModel" else "llama", target_modules=sorted(_TARGETS & modules))

    def inputs(number: int) -> dict[str, Any]:
        if ZOO[name].reads == "text":
            return texts(3 + 27 * number, number, 1 + number)
        given = zoo_inputs(base, "image and text", number)
        return {key: value[:1] for key, value in given.items() if key != "labels"}

    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(copy.deepcopy(config), name=str(number), seed=number))
            for number in range(2)
        ]

        async def write(client: Client, number: int) -> Any:
            return await client.generate(**inputs(number), max_new_tokens=14 + number, **OPTIONS)

        await asyncio.gather(*map(write, clients, range(2)))
        executor.reset_statistics()
        outs = await asyncio.gather(*map(write, clients, range(2)))
        counts = [executor.statistics().clients[str(number)] for number in range(2)]
    if name in OTHER_CACHES:
        assert all(not count.joint and not count.alone for count in counts), counts
    elif name in ALONE:
        assert all(not count.joint and ALONE[name] in count.alone for count in counts), counts
    else:
        assert all(count.joint >= 8 for count in counts), counts
    for number, out in enumerate(outs):
        model = plain(plain_base, config, number)
        with torch.no_grad():
            right = model.generate(**inputs(number), max_new_tokens=14 + number, **OPTIONS)
        # The recurrence of Qwen3.5 enlarges rounding errors, also where clients walk alone and share batches.
        assert_equal(out, right, 3 * LOGITS if name == "Qwen3_5ForCausalLM" else LOGITS)
