"""Small mixtures of experts: 4 experts, width 32, two blocks."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_FOUR = {"num_experts": 4, "moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": 4}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", _LOCAL),
    "olmoe": ("Olmoe", _FOUR),
    "gpt-oss": ("GptOss", _LOCAL),
    "granite-moe": ("GraniteMoe", _LOCAL),
    "qwen2-moe": ("Qwen2Moe", {**_FOUR, "shared_expert_intermediate_size": 24}),
    "qwen3-moe": ("Qwen3Moe", _FOUR),
    "qwen3-next": (
        "Qwen3Next",
        {
            **_FOUR,
            "shared_expert_intermediate_size": 24,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
        },
    ),
    "deepseek-v3": ("DeepseekV3", _DEEPSEEK),
    "glm4-moe": ("Glm4Moe", {**_DEEPSEEK, "n_shared_experts": 1}),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    ),
    "minimax": ("MiniMax", {**_LOCAL, "block_size": 16}),
    "phimoe": ("Phimoe", _LOCAL),
    "llama4": ("Llama4", {**_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}),
}
"""Prefix of the classes, and options of the configuration."""


def mixture(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Return a causal language model with random weights, in evaluation mode."""
    prefix, options = MIXTURES[name]
    text = "Text" if prefix == "Llama4" else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**_SMALL, **options, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 3:  # some are not initialized
                    parameter.normal_(std=0.1)
    return model.to(dtype).eval()
