"""Small mixtures of experts: 4 experts, width 32."""

from __future__ import annotations

from typing import Any

import torch

from symbiosis.testing.zoo import zoo_model

MIXTURES = {
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "granite-moe": "GraniteMoeForCausalLM",
    "qwen2-moe": "Qwen2MoeForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "glm4-moe": "Glm4MoeForCausalLM",
    "ernie4.5-moe": "Ernie4_5_MoeForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "llama4": "Llama4ForCausalLM",
}
"""Classes of transformers by a short name. All have one bank of experts in each block."""


def mixture(name: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Return a model with random weights, in evaluation mode."""
    return zoo_model(MIXTURES[name], **overrides).to(dtype)
