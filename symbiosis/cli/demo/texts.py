"""Texts that ship with CPython, and how they become training batches."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import torch

Batch = dict[str, torch.Tensor]


def topics() -> list[str]:
    """Return the topics of ``help()``: some 420,000 characters of English, without underlines and drawn tables."""
    from pydoc_data.topics import topics as texts

    drawn = re.compile(r"\s*[+|]|[*=~^-]{3,}$")
    return [
        "\n".join(line for line in texts[name].split("\n") if not drawn.match(line)).strip() for name in sorted(texts)
    ]


def docstrings(module: str, contains: str = "") -> list[str]:
    """Return a module's docstrings that contain a string, read from its source; none if the module is missing."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        return []
    tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [text for text in found if text and contains in text]


def make_batches(texts: list[str], tokenizer: Any, *, steps: int, size: int, length: int, seed: int) -> list[Batch]:
    """Return one batch for each step: ``input_ids``, ``attention_mask`` and ``labels``, each [size, length]."""
    encoded = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts)
    ids = [token for tokens in encoded for token in (*tokens, tokenizer.eos_token_id)]
    rng = random.Random(seed)
    batches = []
    for _ in range(steps):
        starts = [rng.randrange(len(ids) - length + 1) for _ in range(size)]
        rows = torch.tensor([ids[start : start + length] for start in starts])
        batches.append({"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows.clone()})
    return batches
