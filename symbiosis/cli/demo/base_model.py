"""The demo's own base model: a small Llama and its tokenizer, trained once on text that ships with CPython.

Also a prefix-tuning adapter for it, so that one tenant can serve with an adapter that was trained elsewhere: with plain
transformers and PEFT, as everything in this file.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from symbiosis._version import __version__
from symbiosis.cli.data import Corpus, topics
from symbiosis.errors import UsageError

Progress = Callable[[str, int, int, float], None]
"""Called with what is trained, the step, the number of steps and the loss."""

RECIPE: dict[str, Any] = {
    "vocabulary": 1280,
    "hidden": 128,
    "intermediate": 256,
    "layers": 4,
    "batch": 5,
    "length": 96,
    "steps": 700,
    "muon": 3e-2,
    "adamw": 8e-3,
    "prefix": {"tokens": 16, "steps": 120, "adamw": 3e-2},
}
LIMIT_S = 60.0
"""Training hurries to its end when it takes longer than this."""


def cache_folder() -> Path:
    """Where things that can be made again are kept: ``$XDG_CACHE_HOME/symbiosis``, else ``~/.cache/symbiosis``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "symbiosis"


def base_model(adapter_corpus: Corpus, progress: Progress) -> Path:
    """The folder of the trained model, which is trained if this is the first time.

    The folder's name depends on everything that the result depends on. It is moved into place when it is complete, so
    a half-written one is never used.

    Raises:
        UsageError: the cache cannot be written.
    """
    folder = cache_folder() / f"demo-{_fingerprint(adapter_corpus)}"
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
        model = _train_base(unfinished, progress)
        _train_prefix(model, unfinished, adapter_corpus, progress)
        try:
            unfinished.replace(folder)
        except OSError:
            if not folder.is_dir():  # not made by another process meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def adapter_folder(folder: Path) -> Path:
    """Where the prefix-tuning adapter is, in a folder of :func:`base_model`."""
    return folder / "prefix"


def _fingerprint(corpus: Corpus) -> str:
    """Changes with the recipe, this file, symbiosis, transformers' major version and the texts (that is, CPython's)."""
    import transformers

    parts = [
        json.dumps(RECIPE, sort_keys=True),
        inspect.getsource(inspect.getmodule(_fingerprint) or Path),
        __version__,
        transformers.__version__.partition(".")[0],
        ".".join(platform.python_version_tuple()[:2]),
        *topics(),
        *corpus.documents,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _train_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer; token 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    end = "<|end|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=RECIPE["vocabulary"],
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=RECIPE["vocabulary"],
        hidden_size=RECIPE["hidden"],
        intermediate_size=RECIPE["intermediate"],
        num_hidden_layers=RECIPE["layers"],
        num_attention_heads=RECIPE["hidden"] // 32,
        num_key_value_heads=RECIPE["hidden"] // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _train_base(folder: Path, progress: Progress) -> Any:
    texts = topics()
    tokenizer = _train_tokenizer(texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _llama()
    # Muon needs about half the steps that AdamW alone needs; it is made for the matrices of the blocks.
    matrices = [parameter for name, parameter in model.named_parameters() if ".layers." in name and parameter.ndim == 2]
    others = [parameter for name, parameter in model.named_parameters() if ".layers." not in name or parameter.ndim < 2]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=RECIPE["muon"], weight_decay=0.1),
        torch.optim.AdamW(others, lr=RECIPE["adamw"], betas=(0.9, 0.95), weight_decay=0.0),
    ]
    corpus = Corpus("topics", documents=random.Random(0).sample(texts, len(texts)))
    batches = corpus.batches(tokenizer, steps=RECIPE["steps"], size=RECIPE["batch"], length=RECIPE["length"], seed=0)
    _fit(model, batches, optimizers, partial(progress, "base model"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.requires_grad_(False)


def _train_prefix(model: Any, folder: Path, corpus: Corpus, progress: Progress) -> None:
    from peft import PrefixTuningConfig, get_peft_model
    from transformers import AutoTokenizer

    recipe = RECIPE["prefix"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=recipe["tokens"])
        adapted = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.1)  # from N(0, 1) a small model takes long to recover
    batches = corpus.batches(tokenizer, steps=recipe["steps"], size=4, length=64, seed=0)
    trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=recipe["adamw"], weight_decay=0.0)
    _fit(adapted, batches, [optimizer], partial(progress, "prefix adapter"))
    adapted.save_pretrained(str(adapter_folder(folder)))


def _fit(
    model: Any,
    batches: list[dict[str, torch.Tensor]],
    optimizers: list[torch.optim.Optimizer],
    report: Callable[[int, int, float], None],
) -> None:
    """Warm up, hold, and decay to nearly nothing; ends early but decayed where ``LIMIT_S`` is near."""
    model.train()
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    started = time.monotonic()
    last = math.nan
    for step, batch in enumerate(batches):
        done = max(step / len(batches), (time.monotonic() - started) / LIMIT_S)
        if done >= 1:
            report(step, step, last)
            break
        factor = min(1.0, (step + 1) / 20) * max(0.02, min(1.0, (1 - done) / 0.6))
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, base in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        last = loss.item()
        report(step + 1, len(batches), last)
    model.eval()
