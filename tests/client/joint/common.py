"""Models, texts, clients and comparisons that tests of joint decoding have in common."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model
from transformers import LogitsProcessor

from symbiosis import Client, Executor
from symbiosis.client.joint.attention import JointCache
from symbiosis.testing import tiny_model
from tests.helpers import LOGITS, ia3, lora, prefix

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


async def forever(client: Client) -> None:
    while True:
        await generate(client, tokens=50)


def expected_of(base: Any, seed: int, length: int = 6, tokens: int = 12, **options: Any) -> Any:
    model = plain(base, lora(), seed)
    ids = text(length, length).to(model.device)
    return model.generate(**{"input_ids": ids, "max_new_tokens": tokens, **OPTIONS, **options})


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


def bf16_adapter(model: Any) -> None:
    """Convert the weights of a model's adapter."""
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
