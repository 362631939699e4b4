"""Joint decoding: tenants that are walked together get what plain PEFT gives each of them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from symbiosis import Executor
from symbiosis.client.fibers import current_fiber
from symbiosis.testing.zoo import random_model
from tests.client.joint.common import (
    OPTIONS,
    TARGETS,
    assert_equal,
    bf16_adapter,
    check_each_tenant,
    expected_of,
    forever,
    generate,
    model_of,
    plain,
    ready,
    some_clients,
    text,
    texts,
)
from tests.helpers import LOGITS, ia3, lora


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "qwen3", "mixtral", "lfm2"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
async def test_each_tenant_gets_what_plain_peft_gives(architecture: str, mode: str) -> None:
    await check_each_tenant(architecture, True, mode)


async def test_a_tenant_alone_walks_alone_and_is_bit_equal_to_plain_peft() -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with Executor(base) as executor, executor.client(lora(), name="alice", seed=0) as alice:
        out = await generate(alice)
        counts = executor.statistics().clients["alice"]
    assert (counts.joint, counts.alone) == (0, {"no other client decodes": 11})
    assert_equal(out, expected_of(plain_base, 0), tolerance=0.0)


async def test_in_bf16_a_joint_walk_gives_the_bits_of_a_walk_alone() -> None:
    base = model_of("llama", torch.bfloat16)
    plain_base = copy.deepcopy(base)
    async with some_clients(4, base, joint="exact") as (executor, clients):
        outs = await asyncio.gather(*(generate(client, 3 + 4 * n) for n, client in enumerate(clients)))
        assert all(executor.statistics().clients[client.name].joint >= 10 for client in clients)
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number, 3 + 4 * number), tolerance=0.0)


@pytest.mark.parametrize("mode", ["exact", "fast"])
async def test_beams_and_several_texts_are_walked_with_other_tenants(mode: str) -> None:
    """Clients have stacks in common, with different numbers of rows, which change between two operations."""
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    cases: list[dict[str, Any]] = [
        {"num_beams": 3},
        {},
        {"num_return_sequences": 2, "do_sample": True},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"position_ids": None, **texts(6, 4, 2)},
    ]
    async with some_clients(len(cases), base, joint=mode) as (executor, clients):
        for turn in range(2):
            given = cases[turn:] + cases[:turn]
            for number, client in enumerate(clients):
                client.manual_seed(number)
            outs = await asyncio.gather(
                *(generate(client, tokens=20, **options) for client, options in zip(clients, given, strict=True))
            )
            for number, (out, options) in enumerate(zip(outs, given, strict=True)):
                model = plain(plain_base, lora(), number)
                torch.manual_seed(number)
                options = {"input_ids": text(6, 6), "max_new_tokens": 20, **OPTIONS, **options}
                assert_equal(out, model.generate(**options))
        counts = executor.statistics().clients
    for client in clients:
        assert counts[client.name].joint > 4 * sum(counts[client.name].alone.values()), counts[client.name]


async def test_rows_of_several_texts_are_counted_for_their_client() -> None:
    async with some_clients(2) as (executor, (one, three)):
        outs = await asyncio.gather(generate(one, tokens=20), generate(three, tokens=20, **texts(6, 0, 3)))
        counts = executor.statistics()
    assert [len(out.sequences) for out in outs] == [1, 3]
    tokens = [counts.clients[client.name].tokens["decode"] for client in (one, three)]
    assert tokens == pytest.approx([19, 3 * 19])
    assert counts.clients[three.name].joint >= 15


@pytest.mark.parametrize("mode", ["exact", "fast"])
async def test_vectors_narrower_than_the_base_model(mode: str) -> None:
    """PEFT multiplies what a base layer gives in its own dtype."""
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with Executor(base, joint=mode) as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(ia3(), name=str(number), seed=number))
            for number in range(2)
        ]
        await ready(executor, clients)
        for client in clients:
            bf16_adapter(client.model)
        outs = await asyncio.gather(*map(generate, clients))
        assert executor.statistics().clients["0"].joint >= 8
    for number, out in enumerate(outs):
        model = plain(plain_base, ia3(), number)
        bf16_adapter(model)
        assert_equal(out, model.generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS))


async def test_whole_mlps_are_served_in_joint_walks_too() -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    kinds = [lora(target_modules=TARGETS), None, lora(target_modules=["gate_proj"])]
    async with Executor(base, base_layers="mlp") as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(kind, name=f"tenant-{number}", seed=number))
            for number, kind in enumerate(kinds)
        ]
        await ready(executor, clients[:2])
        outs = await asyncio.gather(*(generate(client, 4 + number) for number, client in enumerate(clients)))
        counts = [executor.statistics().clients[client.name] for client in clients]
    assert counts[0].joint >= 10
    assert counts[2].joint == 0
    assert any("served whole" in reason for reason in counts[2].alone)
    for number, (kind, out) in enumerate(zip(kinds, outs, strict=True)):
        model = plain(plain_base, kind, number)
        assert_equal(out, model.generate(input_ids=text(4 + number, 4 + number), max_new_tokens=12, **OPTIONS))


async def test_an_adapter_that_is_trained_between_two_tokens_takes_effect_at_once() -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    batch = {"input_ids": text(9), "labels": text(9)}
    config = lora(lora_dropout=0.0)

    def token(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        with torch.no_grad():
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        return out.logits[:, -1], out.past_key_values

    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(executor.client(config, name=name, seed=seed))
            for seed, name in enumerate(("first", "second"))
        ]
        await ready(executor, [first, second])
        optimizer = torch.optim.SGD([p for p in first.model.parameters() if p.requires_grad], lr=0.05)
        other = asyncio.ensure_future(forever(second))
        got, cache, ids = [], None, text(5)
        for _ in range(8):
            logits, cache = await first.run(token, first.model.eval(), ids, cache)
            got.append(logits)
            ids = logits.argmax(-1, keepdim=True)
            await first.train_step(batch, optimizer)
        assert executor.statistics().clients["first"].joint >= 5
        other.cancel()
        await asyncio.wait([other])
    model = plain(plain_base, config, 0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    cache, ids = None, text(5)
    for logits in got:
        right, cache = token(model.eval(), ids, cache)
        assert (logits - right).abs().max() <= LOGITS * right.abs().max()
        ids = right.argmax(-1, keepdim=True)
        model.train()(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


async def test_positions_are_the_usual_ones_although_last_bits_differ() -> None:
    """Clients that give no positions are walked jointly. Rows of others in a batch change the last bits of a trial."""

    class Jitter(torch.nn.Module):
        def __init__(self, norm: torch.nn.Module) -> None:
            super().__init__()
            self.norm, self.calls = norm, [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0] += 1
            return self.norm(x) * (1 + self.calls[0] % 3 * 1e-6)

    @torch.no_grad()
    def decode(model: Any) -> None:
        ids, cache = text(5), None
        for _ in range(20):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    base = model_of("llama")
    base.model.norm = Jitter(base.model.norm)
    async with Executor(base) as executor, executor.client(name="a") as a, executor.client(name="b") as b:
        for _ in range(2):
            await asyncio.gather(*(client.run(decode, client.model) for client in (a, b)))
        counts = executor.statistics().clients
    assert all(counts[name].joint >= 19 for name in "ab"), counts


class Outer(PreTrainedModel, GenerationMixin):
    """A model that gives each of its calls to a language model inside."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.language_model = LlamaForCausalLM(config)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.language_model(input_ids, **options)


async def test_a_language_model_inside_a_model() -> None:
    base = random_model(Outer, model_of("llama").config)
    base.generation_config.eos_token_id = None
    plain_base = copy.deepcopy(base)
    config = lora(target_modules=["q_proj", "v_proj"])
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(executor.client(config, seed=number)) for number in range(2)]
        await ready(executor, clients)
        outs = await asyncio.gather(*map(generate, clients))
        assert all(executor.statistics().clients[client.name].joint >= 8 for client in clients)
    for number, out in enumerate(outs):
        model = plain(plain_base, config, number)
        assert_equal(out, model.generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS))


async def test_no_task_begins_in_a_fiber() -> None:
    """A loop with eager tasks, which came with Python 3.12, would run it there."""
    fibers: list[object] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        fibers.append(current_fiber())
        return asyncio.Task(coroutine, loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(factory)
    async with some_clients(2) as (_, clients):
        await asyncio.gather(*map(generate, clients))
    assert fibers
    assert all(fiber is None for fiber in fibers)
