"""Models to measure with: Llama-shaped, with random weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Preset:
    """A model size and the work to measure on it."""

    name: str
    dtype: torch.dtype
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompt: int
    """Tokens of the prompt before decoding."""
    decode_steps: int
    """Decode steps in one measurement."""
    batch: int
    sequence: int
    """Shape of a training batch."""
    train_steps: int = 1
    """Training steps in one measurement of a placement."""

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        with torch.device("meta"):
            weights: int = LlamaForCausalLM(self.config()).num_parameters()
        return weights * self.dtype.itemsize

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=2048,
            pad_token_id=0,
        )


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "tiny",
            torch.float32,
            256,
            688,
            4,
            8,
            4,
            2048,
            prompt=16,
            decode_steps=40,
            batch=2,
            sequence=64,
            train_steps=8,
        ),
        Preset("100m", torch.float32, 768, 2048, 12, 12, 12, 32000, prompt=32, decode_steps=24, batch=2, sequence=128),
        Preset("1b", torch.bfloat16, 2048, 8192, 16, 32, 8, 32000, prompt=32, decode_steps=12, batch=1, sequence=128),
    )
}

PAPER_LORA = {
    "LoRA 1: r8 q": (8, ["q_proj"]),
    "LoRA 2: r64 q": (64, ["q_proj"]),
    "LoRA 3: r8 qkvo": (8, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "LoRA 4: r64 qkvo": (64, ["q_proj", "k_proj", "v_proj", "o_proj"]),
}
"""The adapters of Symbiosis, Table 2."""


def lora(rank: int = 8, modules: list[str] | None = None) -> LoraConfig:
    """Return a LoRA with random A and B, so that it changes results; LoRA 3 of the paper by default."""
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=modules or PAPER_LORA["LoRA 3: r8 qkvo"][1],
        init_lora_weights=False,
    )


def varied(number: int) -> PeftConfig | None:
    """Return one of eight kinds of adapter: LoRA of ranks 4 to 64 on several targets, IA3, prefix tuning, and none."""
    attention, mlp = PAPER_LORA["LoRA 3: r8 qkvo"][1], ["gate_proj", "up_proj", "down_proj"]
    kinds: list[PeftConfig | None] = [
        lora(8),
        lora(4, attention[:1]),
        lora(64, attention),
        lora(16, [*attention, *mlp]),
        IA3Config(init_ia3_weights=False, target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
        lora(32, [*attention[:2], "lm_head"]),
        None,
    ]
    return kinds[number % len(kinds)]


def build(preset: Preset, device: torch.device) -> LlamaForCausalLM:
    """Return a preset's model with random weights, scaled so that activations neither vanish nor explode."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(preset.dtype)
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(preset.config())
    finally:
        torch.set_default_dtype(default)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.uniform_(-0.03, 0.03, generator=generator)
            else:
                parameter.fill_(1.0)
    # Its buffers are computed when the module is made, so they have no values on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model.requires_grad_(False).eval()


def sharing(base: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model that shares its parameters."""
    return copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})


def plain_peft(base: torch.nn.Module, config: PeftConfig | None) -> Any:
    """Return plain PEFT on a model of its own that shares the frozen weights' memory."""
    model: Any = sharing(base)
    return (model if config is None else get_peft_model(model, config)).eval()
