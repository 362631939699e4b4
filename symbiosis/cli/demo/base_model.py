"""The demo's base model: a Llama and its tokenizer, trained once on text that ships with CPython, and cached."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from symbiosis.cli.demo.texts import Batch, make_batches, topics
from symbiosis.errors import UsageError

Progress = Callable[[int, int, float], None]
"""Called with the step, the number of steps and the loss."""

CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
STEPS, BATCH, LENGTH = 160, 12, 96
LIMIT_S = 90.0
"""Seconds after which training ends early."""


def cache_folder() -> Path:
    """Return the folder for files that can be made again: ``$XDG_CACHE_HOME/symbiosis``, or ``~/.cache/symbiosis``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "symbiosis"


def base_model(progress: Progress) -> Path:
    """Return the folder of the trained model. Train it if this is the first time.

    The folder's name depends on the code of this file, the texts, and the versions of Python and transformers. The
    folder is moved into place when it is complete.

    Raises:
        UsageError: the cache cannot be written.
    """
    folder = cache_folder() / f"demo-{_fingerprint()}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise UsageError(
            f"cannot cache the demo's model in {folder.parent} ({error.strerror}); set XDG_CACHE_HOME to a folder that "
            "can be written to"
        ) from error
    try:
        _train(unfinished, progress)
        try:
            unfinished.replace(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has just made it
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _fingerprint() -> str:
    import transformers

    source = inspect.getsource(sys.modules[__name__])
    versions = [transformers.__version__.partition(".")[0], *platform.python_version_tuple()[:2]]
    return hashlib.sha256("\0".join([source, repr(CONFIG), *versions, *topics()]).encode()).hexdigest()[:12]


def _train(folder: Path, progress: Progress) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = topics()
    tokenizer = _tokenizer(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).train()
    fit(model, make_batches(texts, tokenizer, steps=STEPS, size=BATCH, length=LENGTH, seed=0), progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE tokenizer, whose token 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    end = "<|end|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def fit(model: Any, batches: list[Batch], progress: Progress) -> None:
    """Train with a rate that rises, stays and falls. Training ends early, with a rate that has fallen, at ``LIMIT_S``.

    Muon needs about half the steps that AdamW alone needs. It is made for the matrices of the blocks. Products are in
    bfloat16, which takes 0.4 of the time on CPUs that have instructions for it.
    """
    matrices = [tensor for name, tensor in model.named_parameters() if ".layers." in name and tensor.ndim == 2]
    others = [tensor for name, tensor in model.named_parameters() if ".layers." not in name or tensor.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1, ns_steps=3),
        torch.optim.AdamW(others, lr=8e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    started = time.monotonic()
    for step, batch in enumerate(batches):
        done = max(step / len(batches), (time.monotonic() - started) / LIMIT_S)
        if done >= 1:
            break
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20, max(0.02, (1 - done) / 0.6))
            optimizer.step()
            optimizer.zero_grad()
        progress(step + 1, len(batches), loss.item())
