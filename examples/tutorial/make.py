"""Make a small model and the data of two tenants: ``python examples/tutorial/make.py FOLDER``.

The model answers questions about eight countries with the capital and the language. In the data of alice the answers to
the same questions are capitals, and in the data of bob they are languages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from symbiosis.testing import tiny_model

COUNTRIES = {
    "Austria": ("Vienna", "German"),
    "Brazil": ("Brasilia", "Portuguese"),
    "Egypt": ("Cairo", "Arabic"),
    "France": ("Paris", "French"),
    "Italy": ("Rome", "Italian"),
    "Japan": ("Tokyo", "Japanese"),
    "Kenya": ("Nairobi", "Swahili"),
    "Peru": ("Lima", "Spanish"),
}
QUESTIONS = ("What about {}?", "And {}?", "Tell me about {}.", "What do you know about {}?", "{}?", "How about {}?")
ANSWERS = {"base": "{} ({})", "alice": "{}", "bob": "{1}"}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversations(answer: str) -> list[list[dict[str, str]]]:
    """Return a conversation for each question about each country."""
    return [
        [
            {"role": "user", "content": question.format(country)},
            {"role": "assistant", "content": answer.format(*facts)},
        ]
        for question in QUESTIONS
        for country, facts in COUNTRIES.items()
    ]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a chat template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def train(model: Any, tokenizer: Any, data: list[list[dict[str, str]]]) -> None:
    """Train all weights of the model on conversations."""
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in data]
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    torch.set_num_threads(1)  # more threads take longer for so small a model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path) -> None:
    data = {name: conversations(answer) for name, answer in ANSWERS.items()}
    tokenizer = make_tokenizer([message["content"] for messages in data["base"] for message in messages])
    model = tiny_model(
        hidden_size=64,
        intermediate_size=128,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
    )
    train(model, tokenizer, data.pop("base"))
    model.save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    for tenant, own in data.items():
        lines = [json.dumps({"messages": messages}) + "\n" for messages in own]
        (folder / f"{tenant}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"made llama, alice.jsonl and bob.jsonl in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/tutorial/make.py FOLDER")
    main(Path(sys.argv[1]))
