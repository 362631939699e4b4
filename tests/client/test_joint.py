"""Joint decoding: tenants that are walked together get what plain PEFT gives each of them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import json
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from peft import get_peft_model
from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessor, LogitsProcessorList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import symbiosis
from symbiosis import Client, Executor
from symbiosis.client.joint.attention import JointCache, JointError
from symbiosis.client.joint.decoder import JointDecoder
from symbiosis.client.joint.turn import Turn
from symbiosis.core.registry import make_transport
from symbiosis.core.terms import JOINT, Kind
from symbiosis.errors import BusyError, ExecutorClosedError, RefusedError, UsageError
from symbiosis.policies import Fair, NoLockstep, RateLimit
from symbiosis.testing import tiny_model
from symbiosis.testing.zoo import random_model, zoo_model
from tests.helpers import LOGITS, ia3, lora, prefix, until

_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "tie_word_embeddings": False}),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def model_of(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    if architecture not in _MORE:
        model = tiny_model(architecture, dtype=dtype, tie_word_embeddings=False)
        model.generation_config.eos_token_id = None  # texts end when the test says so
        return model
    name, options = _MORE[architecture]
    config = getattr(transformers, f"{name}Config")(**{**_TINY, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(seed))


def texts(length: int, seed: int, count: int) -> dict[str, torch.Tensor]:
    """Return ids and attention mask of texts of this length and shorter ones, padded on the left."""
    ids = text(length, seed).repeat(count, 1)
    mask = torch.ones_like(ids)
    for row in range(count):
        pads = row % (length - 1)
        ids[row, :pads], mask[row, :pads] = 0, 0
        ids[row, pads:] = text(length - pads, seed + 100 * row)
    return {"input_ids": ids, "attention_mask": mask}


def plain(base: Any, config: Any, seed: int) -> Any:
    """Return the model of a plain PEFT job whose adapter is that of a client with this seed."""
    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    return (model if config is None else get_peft_model(model, copy.deepcopy(config))).eval()


def written(out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return out.sequences, torch.stack(out.logits)


OPTIONS = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}


async def ready(executor: Executor, clients: Sequence[Client]) -> None:
    """Decode until the joint model is made, and count from zero."""
    joint = 0
    async with asyncio.timeout(60):
        while clients and joint < len(clients):
            ids = text(3).to(executor.device)
            await asyncio.gather(*(client.generate(input_ids=ids, max_new_tokens=4) for client in clients))
            counts = executor.statistics().clients
            joint = sum(counts[client.name].joint > 0 for client in clients)
    executor.reset_statistics()


def assert_equal(got: Any, expected: Any, tolerance: float = LOGITS) -> None:
    assert got.sequences.tolist() == expected.sequences.tolist()
    logits, right = torch.stack(got.logits), torch.stack(expected.logits)
    assert (logits - right).abs().max() <= tolerance * right.abs().max()


def tenants_of(architecture: str) -> list[Any]:
    """Return adapters of many kinds: ranks, targets, scalings, IA3, prefix tuning, and none."""
    targets = {"gpt2": ["c_attn", "c_proj"]}.get(architecture, TARGETS)
    more = {"gpt2": ["c_fc"], "mixtral": ["lm_head"], "lfm2": ["w1"]}.get(architecture, ["gate_proj", "lm_head"])
    embedding = {"gpt2": "wte"}.get(architecture, "embed_tokens")
    kinds: list[Any] = [
        lora(architecture, target_modules=targets, r=4),
        None,
        lora(architecture, target_modules=[*targets, *more], r=16, use_rslora=True),
        lora(architecture, target_modules=targets[:1], r=1, lora_alpha=3),
        lora(architecture, target_modules=[*targets[:2], embedding], r=2),
    ]
    if architecture != "lfm2":
        kinds += [prefix(architecture)]
    if architecture in ("llama", "gpt2", "gemma2", "qwen3"):
        kinds += [ia3(architecture)]
    return kinds


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "qwen3", "mixtral", "lfm2"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
async def test_each_tenant_gets_what_plain_peft_gives(architecture: str, mode: str) -> None:
    await check_each_tenant(architecture, True, mode)


async def check_each_tenant(
    architecture: str, sample: bool, mode: str, device: str = "cpu", tolerance: float = LOGITS
) -> None:
    """Compare each tenant of a joint walk, which has one to three texts, with a plain PEFT job on the same device."""
    base = model_of(architecture).to(device)
    plain_base = copy.deepcopy(base)
    kinds = tenants_of(architecture)

    def inputs(number: int) -> dict[str, torch.Tensor]:
        given = texts(3 + 5 * number, number, 1 + number % 3)
        return {name: tensor.to(device) for name, tensor in given.items()}

    async with Executor(base, joint=mode) as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(kind, name=f"tenant-{number}", seed=number))
            for number, kind in enumerate(kinds)
        ]
        await ready(executor, clients)

        async def write(number: int, client: Client) -> Any:
            await asyncio.sleep(0.01 * number)  # prompts arrive in the middle of other texts
            client.manual_seed(number)
            return await client.generate(**inputs(number), max_new_tokens=16 - number, do_sample=sample, **OPTIONS)

        outs = await asyncio.gather(*(write(number, client) for number, client in enumerate(clients)))
        counts = [executor.statistics().clients[client.name] for client in clients]
    for number, (kind, out) in enumerate(zip(kinds, outs, strict=True)):
        model = plain(plain_base, kind, number)
        torch.manual_seed(number)
        expected = model.generate(**inputs(number), max_new_tokens=16 - number, do_sample=sample, **OPTIONS)
        assert_equal(out, expected, tolerance)
    assert sum(count.joint for count in counts) > sum(sum(count.alone.values()) for count in counts), counts


@contextlib.asynccontextmanager
async def some_clients(count: int, base: Any = None, **options: Any) -> Any:
    """Yield an executor and clients with LoRA that have decoded jointly."""
    base = model_of("llama") if base is None else base
    async with Executor(base, **options) as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(lora(), name=f"tenant-{number}", seed=number))
            for number in range(count)
        ]
        await ready(executor, clients if options.get("joint") != "off" else [])
        yield executor, clients


async def generate(client: Client, length: int = 6, tokens: int = 12, **options: Any) -> Any:
    ids = text(length, length).to(client.model.device)
    return await client.generate(**{"input_ids": ids, "max_new_tokens": tokens, **OPTIONS, **options})


async def _forever(client: Client) -> None:
    while True:
        await generate(client, tokens=50)


def expected_of(base: Any, seed: int, length: int = 6, tokens: int = 12, **options: Any) -> Any:
    model = plain(base, lora(), seed)
    ids = text(length, length).to(model.device)
    return model.generate(**{"input_ids": ids, "max_new_tokens": tokens, **OPTIONS, **options})


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
            _half(client.model)
        outs = await asyncio.gather(*map(generate, clients))
        assert executor.statistics().clients["0"].joint >= 8
    for number, out in enumerate(outs):
        model = plain(plain_base, ia3(), number)
        _half(model)
        assert_equal(out, model.generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS))


async def test_a_model_that_operations_of_other_clients_call_at_once() -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    @torch.no_grad()
    def decode(models: Sequence[Any], ids: torch.Tensor) -> list[torch.Tensor]:
        caches, found = [None for _ in models], []
        for _ in range(12):
            for number, model in enumerate(models):
                out = model(input_ids=ids if caches[number] is None else ids[:, -1:], past_key_values=caches[number])
                caches[number] = out.past_key_values
            found.append(out.logits[:, -1])
            ids = torch.cat([ids, found[-1].argmax(-1, keepdim=True)], 1)
        return found

    async with some_clients(3, base) as (executor, clients):
        for client in clients:
            client.model.eval()
        found = await asyncio.gather(
            *(client.run(decode, [client.model, clients[2].model], text(5, n)) for n, client in enumerate(clients[:2]))
        )
        counts = executor.statistics().clients
    assert counts[clients[0].name].joint >= 8
    assert counts[clients[2].name].alone["an operation of another client calls its model"] >= 20
    for number, logits in enumerate(found):
        right = decode([plain(plain_base, lora(), 2)], text(5, number))
        for one, other in zip(logits, right, strict=True):
            assert (one - other).abs().max() <= LOGITS * other.abs().max()


class InNextWalk(LogitsProcessor):
    """Calls a function from within the joint walk of a client's next token, once its text has ten tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        self._act, self._ready, update = act, False, JointCache.update

        def updating(cache: JointCache, *args: Any, **kwargs: Any) -> Any:
            if self._ready:
                self._ready = False
                self._act()
            return update(cache, *args, **kwargs)

        monkeypatch.setattr(JointCache, "update", updating)

    def __call__(self, ids: Any, scores: Any) -> Any:
        self._ready = self._ready or ids.shape[1] == 10
        return scores


@pytest.mark.parametrize("kind", [ia3, lora])
async def test_a_cancelled_tenant_may_delete_its_adapter_at_once(
    kind: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    processors = LogitsProcessorList([InNextWalk(monkeypatch, lambda: going.cancel())])

    async def write_and_delete(client: Client) -> None:
        try:
            await generate(client, logits_processor=processors)
        finally:
            client.model.delete_adapter("default")

    async with Executor(base, joint="exact") as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(kind(), name=str(number), seed=number))
            for number in range(4)
        ]
        await ready(executor, clients)
        going = asyncio.ensure_future(write_and_delete(clients[0]))
        outs = await asyncio.gather(*map(generate, clients[1:]))
        with pytest.raises(asyncio.CancelledError):
            await going
    for number, out in enumerate(outs, start=1):
        assert_equal(
            out, plain(plain_base, kind(), number).generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS)
        )


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


async def test_off_means_that_everybody_walks_alone() -> None:
    async with some_clients(2, joint="off") as (executor, clients):
        await asyncio.gather(*map(generate, clients))
        assert all(count.joint == 0 and not count.alone for count in executor.statistics().clients.values())


@pytest.mark.parametrize("what", ["cancelled", "closed", "failed"])
async def test_a_tenant_that_goes_in_the_middle_does_not_disturb_the_others(what: str) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    class Fail(LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            if ids.shape[1] == 10:
                if what == "failed":
                    raise ValueError("my own mistake")
                asyncio.get_running_loop().call_soon(go)  # while the next token is under way
            return scores

    async with some_clients(4, base) as (_, clients):
        going = asyncio.ensure_future(generate(clients[1], logits_processor=LogitsProcessorList([Fail()])))
        closing: list[Any] = []

        def go() -> None:
            if what == "cancelled":
                going.cancel()
            else:
                closing.append(asyncio.ensure_future(clients[1].close()))

        others = [clients[0], *clients[2:]]
        outs = await asyncio.gather(going, *map(generate, others), return_exceptions=True)
        await asyncio.gather(*closing)
        assert isinstance(outs[0], BaseException)
        kinds = {"cancelled": asyncio.CancelledError, "failed": ValueError}
        assert isinstance(outs[0], kinds.get(what, Exception)), outs[0]
        again = await asyncio.gather(*map(generate, others))
        if what != "closed":
            assert_equal(await generate(clients[1]), expected_of(plain_base, 1))
    for number, out, later in zip((0, 2, 3), outs[1:], again, strict=True):
        assert_equal(out, expected_of(plain_base, number))
        assert_equal(later, expected_of(plain_base, number))


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
        other = asyncio.ensure_future(_forever(second))
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


ALONE: dict[str, tuple[str, Callable[..., Any]]] = {
    "static cache": ("its cache is a StaticCache", lambda c: {"cache_implementation": "static"}),
    "attentions": ("the argument output_hidden_states", lambda c: {"output_hidden_states": True}),
}


@pytest.mark.parametrize(
    ("options", "reason", "tolerance"),
    [
        ({"privacy": "noise-pool:size=3"}, "a privacy scheme", 1e-4),  # noise is added and subtracted
        ({"kind": Kind.DECODE}, "a kind of its own", LOGITS),
    ],
)
async def test_a_client_that_never_takes_part_walks_alone_and_says_why(
    options: Any, reason: str, tolerance: float
) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with (
        some_clients(2, base) as (executor, clients),
        executor.client(lora(), name="apart", seed=2, **options) as apart,
    ):
        *_, out = await asyncio.gather(*map(generate, [*clients, apart]))
        counts = executor.statistics().clients
    assert (counts["apart"].joint, counts["apart"].alone.keys()) == (0, {reason})
    assert all(counts[client.name].joint > 5 for client in clients)
    assert_equal(out, expected_of(plain_base, 2), tolerance)


@pytest.mark.parametrize("case", ALONE)
async def test_what_cannot_be_joint_walks_alone_and_says_why(case: str) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    reason, options = ALONE[case]
    async with some_clients(3, base) as (executor, clients):
        outs = await asyncio.gather(
            *(generate(client, tokens=20) for client in clients[:2]), generate(clients[2], **options(clients[2]))
        )
        counts = executor.statistics().clients
    assert counts[clients[2].name].joint == 0
    assert reason in counts[clients[2].name].alone
    assert counts[clients[0].name].joint >= 15
    got, right = outs[2], expected_of(plain_base, 2, **options(None))
    assert got.sequences.tolist() == right.sequences.tolist()
    for number, out in enumerate(outs[:2]):
        assert_equal(out, expected_of(plain_base, number, tokens=20))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
async def test_a_model_whose_positions_depend_on_the_longest_text_is_not_walked_jointly(kind: str) -> None:
    """The language model lies inside the model; the other tenant's text would change this one's logits."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 16, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = zoo_model("LlavaForConditionalGeneration").config
    config.text_config.max_position_embeddings = 16
    config.text_config.rope_parameters = rope
    base = random_model(transformers.LlavaForConditionalGeneration, config)
    async with Executor(base) as executor, executor.client() as a, executor.client() as b:
        for _ in range(3):
            await asyncio.gather(*(client.generate(input_ids=text(4) % 50, max_new_tokens=4) for client in (a, b)))
        counts = executor.statistics().clients
    for client in (a, b):
        assert counts[client.name].joint == 0
        assert any("longest text of a batch" in reason for reason in counts[client.name].alone)


async def test_changes_of_a_model_are_noticed_between_two_tokens() -> None:
    """A hook, a disabled adapter and autocast take effect for the very next token."""
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    def decode(model: Any) -> list[torch.Tensor]:
        ids, cache, found = text(5), None, []
        for number in range(12):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                norm = model.base_model.model.model.norm
                if number == 2:
                    stack.callback(setattr, norm, "weight", norm.weight)
                    norm.weight = torch.nn.Parameter(norm.weight.data * 2, requires_grad=False)
                if 3 <= number < 5:
                    stack.enter_context(model.disable_adapter())
                if 6 <= number < 8:
                    hook = norm.register_forward_hook(lambda module, args, out: 2 * out)
                    stack.callback(hook.remove)
                if number == 8:
                    stack.callback(setattr, model.config, "use_cache", True)
                    model.config.use_cache = False
                if number == 9:
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                if number == 10:
                    model.base_model.model.lm_head.lora_A.default.weight.data.mul_(3)
                out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[:, -1].float())
            ids = found[-1].argmax(-1, keepdim=True)
        return found

    config = lora(target_modules=["q_proj", "lm_head"])
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(executor.client(config, name=name, seed=seed))
            for seed, name in enumerate(("first", "second"))
        ]
        await ready(executor, [first, second])
        got, _ = await asyncio.gather(first.run(decode, first.model), generate(second, tokens=40))
        counts = executor.statistics().clients["first"]
    right = decode(plain(plain_base, config, 0))
    for number, (one, other) in enumerate(zip(got, right, strict=True)):
        tolerance = 0.05 if number >= 9 else LOGITS  # bf16 from there on
        assert (one - other).abs().max() <= tolerance * other.abs().max(), number
    assert counts.alone["forward hooks"] == 2
    assert counts.alone["a configuration of its own"] == 1
    assert counts.alone["a torch mode, such as autocast or a hook"] == 1
    assert counts.alone["a weight of its own at model.norm"] == 1
    assert counts.joint >= 4


async def test_a_client_takes_part_again_after_a_call_for_hidden_states() -> None:
    """transformers leaves hooks on the layers, which do nothing in other calls."""
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with some_clients(2, base) as (executor, clients):
        states = await clients[0].run(clients[0].model, text(5), output_hidden_states=True)
        assert len(states.hidden_states) == 3
        outs = await asyncio.gather(*(generate(client, tokens=20) for client in clients))
        counts = executor.statistics().clients[clients[0].name]
    assert counts.joint >= 15
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number, tokens=20))


async def test_positions_are_the_usual_ones_although_last_bits_differ() -> None:
    """Clients that give no positions are walked jointly. Rows of others in a batch change the last bits of a trial."""

    class Jitter(torch.nn.Module):
        def __init__(self, norm: torch.nn.Module) -> None:
            super().__init__()
            self.norm, self.calls = norm, itertools.count()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * (1 + next(self.calls) % 3 * 1e-6)

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


async def test_a_copy_of_a_model_walks_alone() -> None:
    async with some_clients(2) as (executor, clients):
        twin = copy.deepcopy(clients[0].model)
        ids = text(6, 6)
        both = await asyncio.gather(
            clients[0].run(twin.generate, input_ids=ids, max_new_tokens=8, pad_token_id=0),
            generate(clients[1], tokens=20),
        )
        assert (
            clients[0].name not in executor.statistics().clients
            or not executor.statistics().clients[clients[0].name].joint
        )
        assert both[0].tolist() == (await generate(clients[0], tokens=8)).sequences.tolist()


async def test_nothing_of_a_tenant_is_kept_after_its_text_and_after_it_has_left() -> None:

    async def write(client: Client) -> weakref.ref[torch.Tensor]:
        return weakref.ref((await generate(client)).past_key_values.layers[0].keys)

    async with some_clients(3) as (_, clients):
        keys, *_ = await asyncio.gather(*map(write, clients))
        adapter = weakref.ref(next(p for p in clients[0].model.parameters() if p.requires_grad))
        await clients[0].close()
        clients[0]._model = clients[0]._seat = None
        gc.collect()
        assert keys() is None
        assert adapter() is None


async def test_a_client_with_a_recorder_walks_alone() -> None:
    """A recorder must see all that leaves the client."""
    calls = []

    class Recorder:
        def __init__(self, channel: Any) -> None:
            self.channel = channel

        def __getattr__(self, name: str) -> Any:
            return getattr(self.channel, name)

        def send(self, call: Any) -> Any:
            calls.append(call)
            return self.channel.send(call)

    async with some_clients(3) as (executor, clients):
        clients[0].wrap_channel(Recorder)
        await asyncio.gather(*map(generate, clients))
        assert executor.statistics().clients[clients[1].name].joint >= 10
        assert executor.statistics().clients[clients[0].name].joint == 0
    assert sum(call.tensors[0].shape[0] == 1 for call in calls) >= 11 * 5


async def test_the_executor_closes_in_the_middle() -> None:
    async with some_clients(3) as (executor, clients):
        texts = [asyncio.ensure_future(generate(client, tokens=100)) for client in clients]
        await asyncio.sleep(0.02)
        await executor.close()
        errors = await asyncio.gather(*texts, return_exceptions=True)
    assert all("was shut down" in str(error) for error in errors), errors


async def test_tokens_that_come_after_the_end_end_at_once() -> None:
    turn, loop = Turn(lambda steps: None, math.inf), asyncio.get_running_loop()
    steps: list[Any] = [SimpleNamespace(reply=loop.create_future(), structure=(), alone="") for _ in range(3)]
    turn.arrive(steps[0])
    turn.close(ExecutorClosedError("it was shut down"))
    for step in steps[1:]:
        turn.arrive(step)
    for step in steps:
        with pytest.raises(ExecutorClosedError):
            await asyncio.wait_for(step.reply, 1)
    assert len({id(step.reply.exception()) for step in steps}) == 3, "each client has an error of its own"


@pytest.mark.parametrize(
    ("rows", "joint"), [((40, 40), ()), ((64, 1), ()), ((100, 8, 9), (1, 2)), ((8, 60, 9), (0, 2))]
)
async def test_clients_that_do_not_fit_into_a_walk_walk_alone_and_say_why(rows: Any, joint: Any) -> None:
    loop, walks = asyncio.get_running_loop(), []
    turn = Turn(walks.append, 64)
    steps: list[Any] = [
        SimpleNamespace(reply=loop.create_future(), structure=(), alone="", ids=torch.zeros(count, 1)) for count in rows
    ]
    other = SimpleNamespace(reply=loop.create_future(), structure=("another",), alone="", ids=torch.zeros(1, 1))
    for step in (*steps, other):
        turn.arrive(step)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert walks == ([[steps[number] for number in joint]] if joint else [])
    alone = [step for number, step in enumerate(steps) if number not in joint]
    assert {step.alone for step in alone} == {"a joint walk has up to 64 rows"}
    assert other.alone == "no other client was ready"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_clients_of_one_process_are_walked_together_over_a_transport(transport: str, tmp_path: Path) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        where = f"shm://{tmp_path}/joint.sock" if transport == "shm" else "tcp://127.0.0.1:0"
        listener = await executor.listen(where)
        served = await stack.enter_async_context(symbiosis.connect(listener.address))
        clients = [
            await stack.enter_async_context(served.client(lora(), name=f"tenant-{number}", seed=number))
            for number in range(3)
        ]
        patient = await stack.enter_async_context(served.client(lora(), name="patient", slo_ms=500, seed=3))
        for _ in range(3):
            outs = await asyncio.gather(*map(generate, [*clients, patient]))
        walks = served.walks()
        assert all(walks[client.name]["joint"] >= 10 for client in clients), walks
        assert walks["patient"].keys() == {"terms of its own"}
        assert len(executor.service.clients) == 5
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number))


async def test_decoding_over_a_transport_never_counts_as_fine_tuning(tmp_path: Path) -> None:
    """A joint walk of more than 64 rows would; a client that comes last walks alone."""
    async with Executor(model_of("llama")) as executor, contextlib.AsyncExitStack() as stack:
        listener = await executor.listen(f"shm://{tmp_path}/joint.sock")
        served = await stack.enter_async_context(symbiosis.connect(listener.address))
        clients = [await stack.enter_async_context(served.client(name=str(number))) for number in range(3)]
        counts = (40, 24, 9)
        for _ in range(2):
            await asyncio.gather(
                *(generate(client, **texts(12, 0, count)) for client, count in zip(clients, counts, strict=True))
            )
        walks = served.walks()
        tokens = [client.tokens for client in executor.statistics().clients.values()]
    assert sum(count.get("a joint walk has up to 64 rows", 0) for count in walks.values()) >= 5, walks
    assert not any(kinds["finetune"] for kinds in tokens), tokens


async def test_a_connection_that_is_opened_again(tmp_path: Path) -> None:
    async with Executor(model_of("llama")) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/joint.sock")
        served = symbiosis.connect(listener.address)
        for turn in ("first", "again"):
            one, two = served.client(name=f"one-{turn}"), served.client(name=f"two-{turn}")
            async with served, one, two:
                for _ in range(3):
                    await asyncio.gather(generate(one), generate(two))
                assert served.walks()[one.name]["joint"] >= 10, served.walks()


async def test_joint_walks_go_on_after_an_outage(tmp_path: Path) -> None:
    base, where = model_of("llama"), f"shm://{tmp_path}/joint.sock"
    plain_base = copy.deepcopy(base)
    served = symbiosis.connect(where, retry=0)
    async with contextlib.AsyncExitStack() as stack:
        for turn in ("before", "after"):
            async with asyncio.timeout(60), Executor(copy.deepcopy(base)) as executor:
                await executor.listen(where)
                if turn == "before":
                    await stack.enter_async_context(served)
                one, two = [served.client(lora(), name=f"{turn}-{seed}", seed=seed) for seed in (0, 1)]
                async with one, two:
                    while "joint" not in served.walks().get(one.name, {}):
                        outs = await asyncio.gather(generate(one), generate(two))
            for seed, out in enumerate(outs):
                assert_equal(out, expected_of(plain_base, seed))


class Fleeting:
    """A channel that ends before its ``left``-th call from now; None for never."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def send(self, call: Any) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.channel.close()
        return self.channel.send(call)


@pytest.mark.parametrize("when", ["between walks", "before a walk's first call", "in a walk"])
@pytest.mark.parametrize("again", ["at once", "with a further client"])
async def test_a_joint_channel_that_ends_is_opened_again(when: str, again: str) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    channels: list[Fleeting] = []
    walks: Counter[str | None] = Counter()
    refused = again != "at once"

    async def join(name: str) -> Any:
        return await make_transport(executor.service.address).connect(executor.service.address, name)

    async def join_joint() -> Any:
        nonlocal refused
        if channels and refused:
            refused = False
            raise BusyError("the limit of clients is reached")
        channels.append(Fleeting(await join(f"joint-{len(channels)}")))
        return channels[-1]

    def client_of(number: int) -> Client:
        return Client(join, lora(), name=f"tenant-{number}", seed=number, joint=decoder)

    async def decode(clients: Sequence[Client]) -> Any:
        walks.clear()
        return await asyncio.gather(*map(generate, clients), return_exceptions=True)

    decoder = JointDecoder(join_joint, lambda name: True, lambda name, why: walks.update([why]), exact=False)
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        clients = [await stack.enter_async_context(client_of(number)) for number in range(3)]
        while None not in walks:
            await decode(clients)
        if when == "between walks":
            channels[0].close()
        else:
            channels[0].left = 5 if when == "in a walk" else 0
        outs = await decode(clients)
        if when.startswith("in"):
            assert all("was closed" in str(out) for out in outs), outs
        else:
            assert walks["the connection of joint walks has ended"] == len(clients), walks
            for seed, out in enumerate(outs):
                assert_equal(out, expected_of(plain_base, seed))
        if again != "at once":
            await decode(clients)
            outs = await decode(clients)
            assert walks.keys() == {"a joint walk failed: BusyError: the limit of clients is reached"}
            for seed, out in enumerate(outs):
                assert_equal(out, expected_of(plain_base, seed))
            clients.append(await stack.enter_async_context(client_of(3)))
        while None not in walks:
            outs = await decode(clients)
        assert len(channels) == 2
        for seed, out in enumerate(outs):
            assert_equal(out, expected_of(plain_base, seed))
        await decoder.close(ExecutorClosedError("it was shut down"))


async def test_a_model_that_cannot_be_walked_jointly_costs_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any) -> None:
        raise JointError("it is a test")

    monkeypatch.setattr("symbiosis.client.joint.model._check", refuse)
    async with Executor(model_of("llama")) as executor, contextlib.AsyncExitStack() as stack:
        listener = await executor.listen(f"shm://{tmp_path}/joint.sock")
        served = await stack.enter_async_context(symbiosis.connect(listener.address))
        for owner in (executor, served):
            clients = [await stack.enter_async_context(owner.client(lora())) for _ in range(2)]
            await asyncio.gather(*map(generate, clients))
            names = {client.name for client in clients}
            walks = served.walks() if owner is served else executor.statistics().clients
            assert all("it is a test" in str(walks[name]) for name in names), walks
            await until(lambda: not any(JOINT in name for name in executor.service.clients))


async def test_statistics_and_a_trace_show_each_tenant(tmp_path: Path) -> None:
    async with some_clients(3) as (executor, clients):
        with executor.trace(tmp_path / "trace.json"):
            await asyncio.gather(*map(generate, clients))
        statistics = executor.statistics()
        assert sorted(statistics.clients) == executor.service.clients == [client.name for client in clients]
        rows = {count.rows for count in statistics.clients.values()}
        assert len(rows) == 1, "equal texts have equal rows"
        assert statistics.rows == sum(count.rows for count in statistics.clients.values())
        assert statistics.mean_batch > 2
    events = json.loads((tmp_path / "trace.json").read_text())[:-1]
    lines = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    ran = Counter(event["tid"] for event in events if event.get("cat") == "running")
    assert len({ran[lines[client.name]] for client in clients}) == 1
    assert ran[lines[JOINT]] == 0


async def test_fair_charges_each_tenant_of_a_joint_walk() -> None:
    policy = Fair(quantum=16)
    async with some_clients(4, policy=policy) as (executor, clients):
        before, own = [policy.served(client.name) for client in clients], policy.served(JOINT)
        outs = await asyncio.gather(*(generate(client, tokens=8 * (n + 1)) for n, client in enumerate(clients)))
        assert executor.statistics().clients[clients[3].name].joint >= 20
        charged = [policy.served(client.name) - start for client, start in zip(clients, before, strict=True)]
        assert policy.served(JOINT) == own
    assert charged == sorted(charged)
    assert charged[0] > 0.5 * (6 + 2 * 7)  # lone requests are free
    assert all(out.sequences.shape[1] == 6 + 8 * (n + 1) for n, out in enumerate(outs))


async def test_fair_does_not_stop_a_joint_walk_of_tenants_that_were_served_unequally() -> None:
    policy = Fair(quantum=2)
    async with Executor(model_of("llama"), policy=policy) as executor, contextlib.AsyncExitStack() as stack:
        flood = [await stack.enter_async_context(executor.client(lora(), name=f"flood/{n}")) for n in range(3)]
        polite = [await stack.enter_async_context(executor.client(lora(), name="polite"))]
        await ready(executor, [flood[0], *polite])
        others = [asyncio.ensure_future(_forever(client)) for client in flood]
        started = time.monotonic()
        await generate(*polite, tokens=40)
        assert time.monotonic() - started < 20
        for other in others:
            other.cancel()
        await asyncio.wait(others)
        counts = executor.statistics().clients
    assert counts["polite"].joint > 0
    assert any("the policy holds it back" in counts[client.name].alone for client in flood)


async def test_a_tenant_above_its_rate_does_not_hold_up_the_others() -> None:
    policy = RateLimit(tokens_per_s=1e6, tenants={"slow": 1.0}, burst_s=1.0)
    async with some_clients(2, policy=policy) as (executor, clients), executor.client(lora(), name="slow") as slow:

        def counts(client: Client) -> tuple[int, Counter[str]]:
            found = executor.statistics().clients.get(client.name)
            return (0, Counter()) if found is None else (found.joint, Counter(found.alone))

        tasks = [asyncio.ensure_future(_forever(client)) for client in (*clients, slow)]
        await until(lambda: counts(slow)[1]["the policy holds it back"] > 0, 60)
        joint = [counts(client)[0] for client in clients]
        await until(lambda: all(counts(client)[0] > now + 48 for client, now in zip(clients, joint, strict=True)), 60)
        assert sum(counts(slow)[1].values()) + counts(slow)[0] < 48  # the others are not in step with it
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_joint_request_has_the_most_urgent_terms_of_its_tenants() -> None:
    class Watch(NoLockstep):
        seen: ClassVar[list[Any]] = []

        def submitted(self, request: Any) -> None:
            if request.joint:
                self.seen.append((request.joint, request.terms))

    base = model_of("llama")
    async with Executor(base, policy=Watch()) as executor, contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        clients = [
            await enter(executor.client(name="low", priority=-2, slo_ms=900)),
            await enter(executor.client(name="high", priority=3, ttft_ms=700)),
            await enter(executor.client(name="soon", slo_ms=400)),
        ]
        await ready(executor, clients)
        await asyncio.gather(*map(generate, clients))
    terms = next(terms for names, terms in Watch.seen if set(names) == {"low", "high", "soon"})
    assert terms == (3, 400, 700, None)


def test_the_name_of_joint_walks_is_nobody_elses() -> None:
    executor = Executor(model_of("llama"))
    with pytest.raises(UsageError, match="executor's own"):
        executor.client(name=JOINT)
    with pytest.raises(RefusedError, match="choose another"):
        executor.service.check_name(JOINT)
    with pytest.raises(UsageError, match="joint is 'yes'"):
        Executor(model_of("llama"), joint="yes")


async def test_a_wrong_token_of_one_tenant_fails_that_tenant_alone() -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    def decode(model: Any) -> None:
        cache = model(input_ids=text(4), use_cache=True).past_key_values
        for token in (5, 6, 1_000_000):
            model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)

    async with some_clients(3, base) as (executor, clients):
        bad = asyncio.ensure_future(clients[1].run(torch.no_grad()(decode), clients[1].model))
        outs = await asyncio.gather(generate(clients[0]), bad, generate(clients[2]), return_exceptions=True)
        assert isinstance(outs[1], IndexError)
        assert executor.statistics().clients[clients[1].name].joint >= 1
    assert_equal(outs[0], expected_of(plain_base, 0))
    assert_equal(outs[2], expected_of(plain_base, 2))


def _rescale(model: Any) -> None:
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.scaling = {name: 3 * value for name, value in layer.scaling.items()}


def _crop(model: Any) -> None:
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A.default.weight.data = layer.lora_A.default.weight.data[:2]
    layer.lora_B.default.weight.data = layer.lora_B.default.weight.data[:, :2].contiguous()


def _share(model: Any) -> None:
    first, second = [model.base_model.model.model.layers[n].self_attn.q_proj for n in (0, 1)]
    second.lora_A.default.weight = first.lora_A.default.weight
    first.lora_A.default.weight.data.mul_(2)


def _flatten(model: Any) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.data.flatten() for p in weights])
    for p, part in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.data = part.view(p.shape)
    model.flat = flat


def _half(model: Any) -> None:
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)


def _frequencies(model: Any) -> None:
    model.base_model.model.model.rotary_emb.inv_freq.mul_(0.5)


def _epsilon(model: Any) -> None:
    model.base_model.model.model.norm.variance_epsilon = 0.5


def _new_weight(model: Any) -> None:
    norm = model.base_model.model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight, requires_grad=False)
    norm.weight.data.mul_(2)


def _own_forward(model: Any) -> None:
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.forward = MethodType(lambda self, *args, **kwargs: 2 * type(self).forward(self, *args, **kwargs), layer)


def _own_dropout(model: Any) -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model.base_model.model.model.layers[0].self_attn.q_proj.lora_dropout["default"] = Double()


def _sharp(*args: Any, scaling: float, **options: Any) -> Any:
    return sdpa_attention_forward(*args, scaling=3 * scaling, **options)


def _attention(model: Any) -> None:
    AttentionInterface.register("sharp", _sharp)
    AttentionMaskInterface.register("sharp", sdpa_mask)
    model.base_model.model.set_attn_implementation("sharp")


CHANGES = [
    _rescale,
    _crop,
    _share,
    _flatten,
    _half,
    _frequencies,
    _epsilon,
    _new_weight,
    _own_forward,
    _own_dropout,
    _attention,
]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("change", CHANGES)
async def test_what_a_tenant_does_to_its_own_model_takes_effect(change: Callable[[Any], None], mode: str) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with some_clients(3, base, joint=mode) as (_, clients):
        change(clients[1].model)
        outs = await asyncio.gather(*map(generate, clients))
        if change is _flatten:
            clients[1].model.flat.mul_(1.5)
            again = await asyncio.gather(*map(generate, clients))
    model = plain(plain_base, lora(), 1)
    change(model)
    options = {"input_ids": text(6, 6), "max_new_tokens": 12, **OPTIONS}
    assert_equal(outs[1], model.generate(**options), tolerance=0.02 if change is _half else LOGITS)
    if change is _flatten:
        model.flat.mul_(1.5)
        assert_equal(again[1], model.generate(**options))
    assert_equal(outs[0], expected_of(plain_base, 0))
    assert_equal(outs[2], expected_of(plain_base, 2))
