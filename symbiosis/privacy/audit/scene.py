"""The scene that the audit plays: a small base model, and a tenant with an adapter who generates and fine-tunes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from peft import LoraConfig

from symbiosis.client.client import Client
from symbiosis.core.requests import Call, LayerSpec
from symbiosis.core.transport import Channel
from symbiosis.privacy.audit.evidence import Place
from symbiosis.privacy.audit.goals import Truth

__all__ = ["Plan", "Recorder", "Stage", "build", "give_adapter", "lora", "play", "text", "visit"]


class Stage(IntEnum):
    """What the tenant is at."""

    WARM = 0
    """A first walk, in which siblings are not known yet."""
    GENERATE = 1
    REPEAT = 2
    """One prompt over and over."""
    TRAIN = 3


@dataclass(frozen=True)
class Plan:
    """How large the model is, and how much the tenant does."""

    hidden: int = 128
    intermediate: int = 256
    blocks: int = 2
    vocabulary: int = 512
    rank: int = 8
    prompts: int = 20
    """Different ones; each is sent twice."""
    length: int = 16
    """Tokens of a prompt, and of a training sequence."""
    new_tokens: int = 8
    repeats: int = 64
    """Of the one prompt that is sent over and over."""
    steps: int = 8
    """Training steps, of two sequences."""
    seed: int = 0


_LARGE, _TIMES = 4, 3.0
"""Features of an MLP that are large, and how large, in units of others."""


def build(plan: Plan) -> Any:
    """A Llama of random weights in fp32, scaled so that activations neither vanish nor explode and that gates are open
    and shut. As in trained ones, norms weigh features differently, and each MLP has a few features that are far larger
    than others, for few tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=plan.vocabulary,
        hidden_size=plan.hidden,
        intermediate_size=plan.intermediate,
        num_hidden_layers=plan.blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif "embed" in name:
                    parameter.normal_()
                else:
                    parameter.normal_(std=1.2 / math.sqrt(parameter.shape[1]))
            for layer in model.model.layers:
                direction = torch.randn(plan.hidden)
                for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
                    weight[:_LARGE] += _TIMES * direction / direction.norm()
    return model.eval()


def text(plan: Plan, sequences: int, generator: torch.Generator) -> torch.Tensor:
    """[sequences, length] token ids, some of them frequent and most of them rare (Zipf)."""
    weights = 1.0 / torch.arange(5, 5 + plan.vocabulary, dtype=torch.float64)
    return torch.multinomial(weights, sequences * plan.length, True, generator=generator).view(sequences, plan.length)


def lora(plan: Plan) -> LoraConfig:
    """The adapter that the audit looks for: on every up_proj."""
    return LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=["up_proj"])


def give_adapter(model: Any, plan: Plan) -> None:
    """Fill a client's LoRA with a random adapter, ΔW a third as large as W."""
    generator = torch.Generator().manual_seed(plan.seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                size = 1.0 if "lora_A" in name else 0.4
                parameter.normal_(std=size / math.sqrt(parameter.shape[1]), generator=generator)


class Recorder:
    """Goes around a client's channel, above its mask, and keeps what the tenant meant."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.stage = Stage.WARM
        self.walk = 0
        self.calls: list[tuple[Place, torch.Tensor, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, call: Call) -> Any:
        self._keep(call)
        return self._channel.send(call)

    def call(self, call: Call) -> Any:
        self._keep(call)
        return self._channel.call(call)

    def _keep(self, call: Call) -> None:
        self.calls.append((Place.of(call.key), call.tensors[-1].detach().clone(), int(self.stage), self.walk))

    @contextmanager
    def at(self, stage: Stage) -> Iterator[None]:
        """One of the tenant's operations."""
        self.stage = stage
        self.walk += 1
        yield


@dataclass
class Played:
    """What came of it on the tenant's side."""

    truth: Truth
    prompts: dict[int, int] = field(default_factory=dict)
    """Walk → prompt, of those that generate."""
    texts: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[prompts, length]."""


async def play(client: Client, layers: list[LayerSpec], plan: Plan) -> Played:
    """Generate for prompts, each twice, in any order; send one over and over; then fine-tune."""
    model = client.model
    give_adapter(model, plan)
    recorder = client.wrap_channel(Recorder)
    read: list[torch.Tensor] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, arguments: read.append(arguments[0].flatten().clone())
    )
    generator = torch.Generator().manual_seed(plan.seed + 2)
    texts = text(plan, plan.prompts, generator)
    order = torch.randperm(2 * plan.prompts, generator=generator) % plan.prompts
    adapter = _adapter(model, layers)
    prompts: dict[int, int] = {}
    with recorder.at(Stage.WARM):
        await client.forward(input_ids=text(plan, 1, generator))
    for prompt in order.tolist():
        with recorder.at(Stage.GENERATE):
            prompts[recorder.walk] = prompt
            await _generate(client, plan, texts[prompt][None])
    for _ in range(plan.repeats):
        with recorder.at(Stage.REPEAT), torch.no_grad():
            await client.forward(input_ids=texts[:1])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(plan.steps):
        ids = text(plan, 2, generator)
        with recorder.at(Stage.TRAIN):
            await client.train_step({"input_ids": ids, "labels": ids}, optimizer)
    hook.remove()
    client.wrap_channel(lambda _: recorder._channel)
    return Played(_truth(recorder, torch.cat(read), adapter), prompts, texts)


async def visit(client: Client, plan: Plan, prompt: torch.Tensor) -> None:
    """What somebody does who opens a client for one text [length]."""
    give_adapter(client.model, plan)
    await _generate(client, plan, prompt[None])


async def _generate(client: Client, plan: Plan, ids: torch.Tensor) -> None:
    await client.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=plan.new_tokens,
        min_new_tokens=plan.new_tokens,
        do_sample=False,
    )


def _adapter(model: Any, layers: list[LayerSpec]) -> dict[int, torch.Tensor]:
    found = {}
    for spec in layers:
        if spec.name.endswith("up_proj"):
            module = model.base_model.model.get_submodule(spec.name)
            found[spec.layer] = module.get_delta_weight("default").detach().clone()
    return found


def _truth(recorder: Recorder, tokens: torch.Tensor, adapter: dict[int, torch.Tensor]) -> Truth:
    rows: dict[Place, list[torch.Tensor]] = {}
    stage: dict[Place, list[int]] = {}
    walk: dict[Place, list[int]] = {}
    for place, x, at, number in recorder.calls:
        rows.setdefault(place, []).append(x)
        stage.setdefault(place, []).extend([at] * len(x))
        walk.setdefault(place, []).extend([number] * len(x))
    joined = {place: torch.cat(parts) for place, parts in rows.items()}
    first = max((place for place in joined if 0 in place.layers and not place.backward), key=lambda p: len(joined[p]))
    return Truth(
        joined,
        {place: torch.tensor(numbers) for place, numbers in stage.items()},
        {place: torch.tensor(numbers) for place, numbers in walk.items()},
        tokens[-len(joined[first]) :],
        adapter,
    )
