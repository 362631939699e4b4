"""Texts that ship with CPython, and how they become training batches."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from pydoc_data import topics as pydoc_topics
from typing import Any

import torch

Batch = dict[str, torch.Tensor]


def topics() -> list[str]:
    """Return the topics of ``help()``: some 500,000 characters of English."""
    return list(pydoc_topics.topics.values())


def docstrings(module: str) -> list[str]:
    """Return the docstrings in a module's source, or :func:`topics` where the module is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None:  # some Linux distributions package tkinter and turtle apart from Python
        return topics()
    nodes = ast.walk(ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")))
    found = [ast.get_docstring(node) for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return list(filter(None, found))


def make_batches(texts: list[str], tokenizer: Any, *, steps: int, size: int, length: int, seed: int) -> list[Batch]:
    """Return one batch for each step: ``input_ids`` and ``labels``, both [size, length], from random places."""
    ids = torch.tensor(tokenizer(tokenizer.eos_token.join(texts))["input_ids"])
    starts = torch.randint(len(ids) - length, (steps, size, 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": rows, "labels": rows} for rows in ids[starts + torch.arange(length)]]
