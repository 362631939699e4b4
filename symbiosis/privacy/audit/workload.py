"""The workload of the audit: a small base model, and a tenant with an adapter that generates and fine-tunes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig

from symbiosis.client.client import Client
from symbiosis.core.requests import Call, LayerSpec
from symbiosis.core.transport import Channel
from symbiosis.privacy.audit.evidence import Place


@dataclass(frozen=True)
class Workload:
    """Size of the model, and amount of the tenant's work."""

    hidden: int = 128
    intermediate: int = 256
    blocks: int = 2
    vocabulary: int = 512
    rank: int = 8
    prompts: int = 20
    """Different prompts to generate for, each twice."""
    length: int = 16
    """Tokens of a prompt and of a training sequence."""
    new_tokens: int = 8
    """Tokens that are generated for each prompt."""
    repeats: int = 64
    """Forward passes over the repeated prompt."""
    steps: int = 8
    """Training steps of two sequences each."""
    seed: int = 0


_LARGE_FEATURES, _LARGE_FACTOR = 4, 3.0
"""Features of an MLP that are larger than others for few tokens, and by what factor."""


def build(plan: Workload) -> Any:
    """Return a Llama of random weights in fp32, scaled so that activations neither vanish nor explode.

    As in trained models, norms weigh features differently, and a few features of each MLP are far larger than others
    for few tokens.
    """
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
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(plan.seed)
        model = LlamaForCausalLM(config)
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
                weight[:_LARGE_FEATURES] += _LARGE_FACTOR * direction / direction.norm()
    return model.eval()


def text(plan: Workload, sequences: int, seed: int | torch.Generator) -> torch.Tensor:
    """Return [sequences, length] token ids, few of them frequent and most of them rare (Zipf's law).

    Args:
        seed: a generator, or a number that is added to the plan's seed.
    """
    generator = torch.Generator().manual_seed(plan.seed + seed) if isinstance(seed, int) else seed
    weights = 1.0 / torch.arange(5, 5 + plan.vocabulary, dtype=torch.float64)
    return torch.multinomial(weights, sequences * plan.length, True, generator=generator).view(sequences, plan.length)


def lora(plan: Workload) -> LoraConfig:
    """Return the configuration of the adapter that the attacks look for: LoRA on every up_proj."""
    return LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=["up_proj"])


def give_adapter(model: Any, plan: Workload) -> None:
    """Fill a client's LoRA with random numbers, so that ΔW is a third as large as W."""
    generator = torch.Generator().manual_seed(plan.seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                size = 1.0 if "lora_A" in name else 0.4
                parameter.normal_(std=size / math.sqrt(parameter.shape[1]), generator=generator)


@dataclass
class Truth:
    """The tenant's knowledge of its own traffic; rows are in the order of each stream."""

    rows: dict[Place, torch.Tensor]
    """[n, w] bare rows."""
    operation: dict[Place, torch.Tensor]
    """[n] number of the tenant's operation, such as one generation."""
    tokens: torch.Tensor
    """[n] token of each row of the first block."""
    adapter: dict[int, torch.Tensor]
    """Layer (an up_proj) → ΔW [o, i]."""
    rank: int
    """Rank of the adapter."""
    prompts: dict[int, int]
    """Operation → prompt, for operations that generate."""
    repeats: list[int]
    """Operations that are forward passes over the first prompt."""
    texts: torch.Tensor
    """[prompts, tokens] token ids of the prompts."""
    sent: list[torch.Tensor]
    """The matrices that were sent in place of bare rows, to all executors."""

    def by_operation(self, place: Place, x: torch.Tensor, operations: Iterable[int]) -> list[torch.Tensor]:
        """Return the rows of x [n, …] that belong to each of some operations at a place."""
        return [x[self.operation[place] == number] for number in operations]

    def generated(self, place: Place, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of x [n, …] that belong to each generation at a place."""
        return self.by_operation(place, x, self.prompts)

    def main_place(self, layer: int) -> Place:
        """Return, of the forward places of a layer, the one with the most rows.

        A layer has two places: alone, and together with its siblings once the client knows them.
        """
        places = [place for place in self.rows if layer in place.layers and not place.backward]
        return max(places, key=lambda place: len(self.rows[place]))


class Recorder:
    """A wrapper of a client's channel that records the bare rows of each call, and what they are sent as."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.operation = 0
        """Number of the tenant's present operation."""
        self.calls: list[tuple[Place, torch.Tensor, int]] = []
        """Place, bare rows and operation of each call."""
        self.sent: list[torch.Tensor] = []
        """The matrices that were sent in place of bare rows: to each executor, if rows are masked."""
        self._mask: Any = getattr(channel, "mask", None)
        if self._mask is not None:
            mask = self._mask.mask

            def noted(*arguments: Any) -> Any:
                masked = mask(*arguments)
                self.sent += [call.tensors[-1] for call in masked.calls]
                return masked

            self._mask.mask = noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def send(self, call: Call) -> Any:
        self._record(call)
        return self.channel.send(call)

    def call(self, call: Call) -> Any:
        self._record(call)
        return self.channel.call(call)

    def _record(self, call: Call) -> None:
        rows = call.tensors[-1].detach().clone()
        self.calls.append((Place.of(call.key), rows, self.operation))
        if self._mask is None:
            self.sent.append(rows)


async def play(client: Client, layers: Sequence[LayerSpec], plan: Workload) -> Truth:
    """Generate for prompts, each twice in random order; repeat one prompt; then fine-tune. Returns the truth."""
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
    ups = {spec.layer: model.base_model.model.get_submodule(spec.name) for spec in layers if "up_proj" in spec.name}
    adapter = {layer: module.get_delta_weight("default").detach().clone() for layer, module in ups.items()}
    await client.forward(input_ids=text(plan, 1, generator))  # the client learns which layers are siblings
    prompts = dict(enumerate(order.tolist(), 1))
    for number, prompt in prompts.items():
        recorder.operation = number
        await generate(client, texts[prompt], plan.new_tokens)
    repeats = [len(prompts) + number for number in range(1, plan.repeats + 1)]
    for number in repeats:
        recorder.operation = number
        with torch.no_grad():
            await client.forward(input_ids=texts[:1])
    recorder.operation += 1
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(plan.steps):
        ids = text(plan, 2, generator)
        await client.train_step({"input_ids": ids, "labels": ids}, optimizer)
    hook.remove()
    rows: dict[Place, list[torch.Tensor]] = {}
    operation: dict[Place, list[int]] = {}
    for place, x, number in recorder.calls:
        rows.setdefault(place, []).append(x)
        operation.setdefault(place, []).extend([number] * len(x))
    truth = Truth(
        {place: torch.cat(parts) for place, parts in rows.items()},
        {place: torch.tensor(numbers) for place, numbers in operation.items()},
        torch.cat(read),
        adapter,
        plan.rank,
        prompts,
        repeats,
        texts,
        recorder.sent,
    )
    truth.tokens = truth.tokens[-len(truth.rows[truth.main_place(0)]) :]
    return truth


async def generate(client: Client, prompt: torch.Tensor, tokens: int) -> None:
    """Generate exactly so many tokens for a prompt [length], by greedy search."""
    ids = prompt[None]
    await client.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
