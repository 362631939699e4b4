"""Small random models of the tested architectures, built in milliseconds without a download."""

from __future__ import annotations

from typing import Any

import torch

from symbiosis.errors import UnknownNameError
from symbiosis.testing.zoo import random_model

_COMMON = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "gpt2": ("GPT2", _GPT),
    "gemma2": ("Gemma2", {**_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "gpt_bigcode": ("GPTBigCode", _GPT),
}

ARCHITECTURES = tuple(_CONFIGS)
"""Architectures that :func:`tiny_model` builds."""


def tiny_model(
    architecture: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Any:
    """Return a causal language model with random weights, in evaluation mode: 2 blocks, width 32, 64 tokens.

    Biases are random too (``transformers`` initializes them with zeros), so that a missing or doubled bias shows.

    Args:
        architecture: name in :data:`ARCHITECTURES`.
        seed: seed of the weights. The caller's random state is kept.
        dtype: dtype of the weights.
        **overrides: fields of the configuration (``num_hidden_layers=4``, ``tie_word_embeddings=True``…).

    Raises:
        UnknownNameError: the architecture is not in :data:`ARCHITECTURES`.
    """
    import transformers

    if architecture not in _CONFIGS:
        raise UnknownNameError(f"unknown architecture {architecture!r}; known are {', '.join(ARCHITECTURES)}")
    prefix, options = _CONFIGS[architecture]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **options, **overrides})
    model_class = getattr(transformers, "GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")
    return random_model(model_class, config, seed=seed).to(dtype)
