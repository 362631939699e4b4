"""The demo's base model: a Llama and its tokenizer, trained once on the topics of Python's ``help()``, and cached."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from symbiosis.errors import UsageError

Batch = dict[str, torch.Tensor]
Progress = Callable[[int, int, float], None]
"""Called with the step, the number of steps and the loss."""

CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 896,
    "intermediate_size": 2432,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 7,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
STEPS, BATCH, LENGTH = 300, 8, 96
LIMIT_S = 75.0
"""Seconds after which training ends early."""
STEPS_FILE = "steps"
"""File in the model's folder with the number of steps that it was trained."""


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/symbiosis``, or ``~/.cache/symbiosis`` if the variable has no absolute path."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "symbiosis"


def base_model(progress: Progress) -> Path:
    """Return the folder of the model that this file trains. Train it if it is not in the cache.

    Raises:
        UsageError: the cache cannot be written.
    """
    folder = cache_folder() / f"demo-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        workplace = tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent)
    except OSError as error:
        raise UsageError(f"cannot cache the demo's model: {error}; set XDG_CACHE_HOME to another folder") from error
    with workplace as partial:
        _train(Path(partial) / "model", progress)
        with contextlib.suppress(OSError):  # another process has made it in the meantime
            (Path(partial) / "model").rename(folder)
    return folder


def _train(folder: Path, progress: Progress) -> None:
    from transformers import GPT2Tokenizer, LlamaConfig, LlamaForCausalLM

    texts = list(topics.values())
    # The end of a text is token 0 of this byte-level BPE tokenizer.
    tokenizer = GPT2Tokenizer().train_new_from_iterator(texts, CONFIG["vocab_size"], show_progress=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    batches = make_batches(texts, tokenizer, steps=STEPS, size=BATCH, length=LENGTH, seed=0)
    done = fit(model, batches, progress, bf16_is_fast())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / STEPS_FILE).write_text(str(done), encoding="ascii")


def make_batches(texts: list[str], tokenizer: Any, *, steps: int, size: int, length: int, seed: int) -> list[Batch]:
    """Return one batch for each step: ``input_ids`` and ``labels``, both [size, length], from random places."""
    ids = torch.tensor(tokenizer(tokenizer.eos_token.join(texts))["input_ids"])
    starts = torch.randint(len(ids) - length, (steps, size, 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": rows, "labels": rows} for rows in ids[starts + torch.arange(length)]]


def bf16_is_fast() -> bool:
    """Return whether this CPU multiplies faster in bfloat16 than in float32.

    Products take 0.4 of the time on CPUs that have instructions for it, and six times as long on others.
    """

    def seconds(dtype: torch.dtype) -> float:
        rows, weight = torch.ones(256, 640, dtype=dtype), torch.ones(640, 1728, dtype=dtype)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            rows @ weight
            times.append(time.perf_counter() - began)
        return min(times)

    return seconds(torch.bfloat16) < seconds(torch.float32)


def fit(model: Any, batches: list[Batch], progress: Progress, bf16: bool) -> int:
    """Train with a rate that rises, stays and falls. Training ends early, with a rate that has fallen, at ``LIMIT_S``.
    Return the number of steps. With ``bf16``, products are in bfloat16.
    """
    blocks = [tensor for tensor in model.model.layers.parameters() if tensor.ndim == 2]
    embeddings = list(model.model.embed_tokens.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": blocks, "lr": 4e-4, "weight_decay": 0.1},
            {"params": embeddings, "lr": 6e-3, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    started = time.monotonic()
    for step, batch in enumerate(batches):
        done = max(step / len(batches), (time.monotonic() - started) / LIMIT_S)
        if done >= 1:
            return step
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        model.zero_grad()
        loss.backward()
        part = min(1.0, (step + 1) / 20, max(0.02, (1 - done) / 0.6))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * part
        optimizer.step()
        progress(step + 1, len(batches), loss.item())
    return len(batches)
