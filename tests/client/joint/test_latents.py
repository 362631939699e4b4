"""Joint decoding with models that keep latent vectors, and expand them to keys and values for each token (DeepSeek)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import symbiosis
from symbiosis import Client, Executor
from symbiosis.core.requests import Request
from symbiosis.policies import NoLockstep
from symbiosis.testing.zoo import random_model, zoo_model
from tests.client.joint.common import OPTIONS, InNextWalk, assert_equal, generate, plain, ready, text, texts
from tests.client.joint.test_methods import opened
from tests.client.test_methods import TASK, config
from tests.helpers import LOGITS, ia3, lora

EXPANDS = {"q_proj", "q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"}
"""Layers of attention; ``kv_b_proj`` expands the latent vectors."""


def model_of(name: str) -> Any:
    if name == "YoutuForCausalLM":
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}
        widths = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 12, "max_position_embeddings": 128}
        base = random_model(transformers.YoutuForCausalLM, transformers.YoutuConfig(**sizes, **heads, **widths))
    else:
        base = zoo_model(name)
    base.generation_config.eos_token_id = None
    return base


def targets_of(base: Any) -> list[str]:
    return sorted(EXPANDS & {name.rpartition(".")[2] for name, _ in base.named_modules()})


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(
    "name", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "LongcatFlashForCausalLM", "YoutuForCausalLM"]
)
async def test_each_tenant_gets_what_plain_peft_gives(name: str, mode: str) -> None:
    """Texts of several lengths, also several of one tenant, and adapters on the layer that expands, or not."""
    base = model_of(name)
    plain_base = copy.deepcopy(base)
    targets = targets_of(base)
    configs = [
        lora(target_modules=targets),
        None,
        lora(target_modules=targets, r=2, use_rslora=True),
        lora(target_modules=["o_proj"]),
        ia3(target_modules=["kv_b_proj"], feedforward_modules=[]),
        ia3(target_modules=["kv_b_proj"], feedforward_modules=["kv_b_proj"]),
        lora(target_modules=["kv_b_proj"], use_dora=True),
        config("LoHa", init_weights=False, target_modules=["kv_b_proj"], **TASK),
        config("BOFT", boft_block_size=4, init_weights=False, target_modules=["kv_b_proj"], **TASK),
        lora(target_modules=["kv_b_proj"]),
    ]

    def inputs(number: int) -> dict[str, torch.Tensor]:
        return texts(4 + 3 * number, number, 1 + number % 3)

    async with Executor(base, joint=mode) as executor, contextlib.AsyncExitStack() as stack:
        clients = await opened(executor, stack, configs)
        await ready(executor, clients)
        outs = await asyncio.gather(
            *(client.generate(**inputs(number), max_new_tokens=10, **OPTIONS) for number, client in enumerate(clients))
        )
        counts = executor.statistics().clients
    for number, out in enumerate(outs):
        assert counts[str(number)].joint >= 7, counts[str(number)].alone
        model = plain(plain_base, configs[number], number)
        with torch.no_grad():
            assert_equal(out, model.generate(**inputs(number), max_new_tokens=10, **OPTIONS))


async def test_a_base_model_with_eager_attention() -> None:
    """Its function is looked up in the module of the class of the attention."""
    base = model_of("DeepseekV3ForCausalLM")
    base.set_attn_implementation("eager")
    plain_base = copy.deepcopy(base)
    config = lora(target_modules=targets_of(base))
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = await opened(executor, stack, [config] * 2)
        await ready(executor, clients)
        outs = await asyncio.gather(*map(generate, clients))
        counts = executor.statistics().clients
    for number, out in enumerate(outs):
        assert counts[str(number)].joint >= 9, counts[str(number)].alone
        model = plain(plain_base, config, number)
        with torch.no_grad():
            assert_equal(out, model.generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS))


class Parts(NoLockstep):
    """A policy that serves requests in order, and records the parts of requests of joint walks."""

    lone_at_once = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, dict[str, float]]] = []

    def submitted(self, request: Request) -> None:
        if request.joint:
            self.seen.append((request.key.layers[0], request.rows, dict(request.clients)))
        super().submitted(request)


async def test_each_tenant_is_charged_for_its_own_tokens() -> None:
    """Of the vectors that are expanded, a tenant has as many as its texts have tokens."""
    parts = Parts()
    base = model_of("YoutuForCausalLM")
    async with Executor(base, policy=parts) as executor, contextlib.AsyncExitStack() as stack:
        clients = await opened(executor, stack, [None, lora(target_modules=["kv_b_proj"])])
        await ready(executor, clients)
        parts.seen.clear()
        await asyncio.gather(
            clients[0].generate(input_ids=text(30), max_new_tokens=8, **OPTIONS),
            clients[1].generate(**texts(5, 0, 2), max_new_tokens=8, **OPTIONS),
        )
        expanding = {spec.layer for spec in executor.layers if spec.name.endswith("kv_b_proj")}
    expanded = set()
    for layer, rows, found in parts.seen:
        if layer in expanding:
            tokens = found["0"] * rows, found["1"] * rows / 2
            expanded.add(tuple(map(round, tokens)))
            assert tokens == pytest.approx(tuple(map(round, tokens)))
        else:
            assert (rows, found) == (3, pytest.approx({"0": 1 / 3, "1": 2 / 3}))
    assert len(expanded) >= 6
    assert {one - other for one, other in expanded} <= {25 - 1, 25, 25 + 1}  # one text may begin a token later
    assert expanded <= {(30 + n, 5 + m) for n in range(1, 8) for m in range(1, 8)}


async def test_a_tenant_that_fails_disturbs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    base = model_of("DeepseekV3ForCausalLM")
    plain_base = copy.deepcopy(base)
    config = lora(target_modules=["kv_b_proj"])
    processors = transformers.LogitsProcessorList([InNextWalk(monkeypatch, lambda: going.cancel())])
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = await opened(executor, stack, [config] * 3)
        await ready(executor, clients)
        going = asyncio.ensure_future(generate(clients[0], logits_processor=processors))
        outs = await asyncio.gather(*map(generate, clients[1:]))
        with contextlib.suppress(asyncio.CancelledError):
            await going
        again = await generate(clients[0])
        counts = executor.statistics().clients
    assert going.cancelled()
    assert all(counts[str(number)].joint >= 4 for number in range(3)), counts
    for number, out in enumerate([again, *outs]):
        model = plain(plain_base, config, number)
        with torch.no_grad():
            right = model.generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS)
        assert_equal(out, right, LOGITS)


async def test_tenants_of_another_process(tmp_path: Path) -> None:
    """Their walks may expand more rows than a decode request of another process has."""
    base = model_of("YoutuForCausalLM")
    plain_base = copy.deepcopy(base)
    async with Executor(base) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(listener.address) as served, contextlib.AsyncExitStack() as stack:
            clients: list[Client] = [await stack.enter_async_context(served.client(seed=seed)) for seed in range(2)]
            for _ in range(3):  # while the first texts are written, no joint walk is possible yet
                outs = await asyncio.gather(
                    *(client.generate(input_ids=text(70), max_new_tokens=8, **OPTIONS) for client in clients)
                )
            assert all(counts["joint"] >= 7 for counts in served.walks().values()), served.walks()
    with torch.no_grad():
        right = plain_base.generate(input_ids=text(70), max_new_tokens=8, **OPTIONS)
    for out in outs:
        assert_equal(out, right)
