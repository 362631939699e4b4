"""A small checkpoint whose tokenizer has all bytes and a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from symbiosis.testing import tiny_model

TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% if one.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a beginning, an end and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<end>", "<begin>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", bos_token="<begin>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_chat_model(folder: Path, architecture: str = "llama", positions: int = 256) -> Path:
    """Save a model of random weights and the tokenizer."""
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": positions}
    tiny_model(architecture, eos_token_id=0, bos_token_id=1, **sizes).save_pretrained(folder)
    return folder
