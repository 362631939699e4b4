"""Training texts, and how they become batches."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from symbiosis.errors import UsageError

Batch = dict[str, torch.Tensor]
IGNORED = -100
"""Label of a token that does not count in the loss."""


@dataclass
class Corpus:
    """The training data of one tenant: documents, or pairs of prompt and completion.

    Attributes:
        name: name in reports.
        documents: running text, cut into sequences.
        pairs: (prompt, completion); only the completion counts in the loss.
    """

    name: str
    documents: list[str] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    shortened: int = 0
    """Number of pairs that were longer than a sequence and lost the beginning of their prompt."""

    def batches(self, tokenizer: Any, *, steps: int, size: int, length: int, seed: int) -> list[Batch]:
        """Yield one batch per step: ``input_ids``, ``attention_mask`` and ``labels``, each [size, at most length].

        Raises:
            UsageError: the text is too short.
        """
        make = self._pair_batches if self.pairs else self._window_batches
        return make(tokenizer, steps, size, length, random.Random(seed))

    def _window_batches(self, tokenizer: Any, steps: int, size: int, length: int, rng: random.Random) -> list[Batch]:
        ids = self._stream(tokenizer)
        if len(ids) < 2 * length:
            raise UsageError(
                f"{self.name}: {len(ids)} tokens are too few to train on; at least {2 * length} are needed "
                f"(two sequences of {length}); give more text, or shorter sequences with --sequence"
            )
        batches = []
        for _ in range(steps):
            starts = [rng.randrange(len(ids) - length + 1) for _ in range(size)]
            rows = torch.tensor([ids[start : start + length] for start in starts])
            batches.append({"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows.clone()})
        return batches

    def _stream(self, tokenizer: Any) -> list[int]:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return [token for text in self.documents for token in (*_encode(tokenizer, text), *end)]

    def _pair_batches(self, tokenizer: Any, steps: int, size: int, length: int, rng: random.Random) -> list[Batch]:
        examples = [_example(tokenizer, *pair, length) for pair in self.pairs]
        self.shortened = sum(cut for _, _, cut in examples)
        order: list[int] = []
        while len(order) < steps * size:
            epoch = list(range(len(examples)))
            rng.shuffle(epoch)
            order += epoch
        chosen = [order[step * size : (step + 1) * size] for step in range(steps)]
        return [_pad([examples[index][:2] for index in indices], tokenizer) for indices in chosen]


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def join(prompt: str, completion: str = "") -> tuple[str, str]:
    """Return prompt and completion for the model, on separate lines unless white space separates them."""
    apart = prompt[-1:].isspace() or completion[:1].isspace()
    return (prompt if apart else f"{prompt}\n"), completion


def _example(tokenizer: Any, prompt: str, completion: str, length: int) -> tuple[list[int], list[int], bool]:
    """Return token ids, labels, and whether they were shortened. The prompt is shortened before the completion."""
    prompt, completion = join(prompt, completion)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    before, after = _encode(tokenizer, prompt), [*_encode(tokenizer, completion), *end]
    if tokenizer.bos_token_id not in (None, tokenizer.eos_token_id):
        before = [tokenizer.bos_token_id, *before]
    cut = len(before) + len(after) > length
    after = after[: length - 1]  # the loss of a token needs a token before it
    before = before[max(0, len(before) + len(after) - length) :]
    return [*before, *after], [IGNORED] * len(before) + after, cut


def _pad(examples: Sequence[tuple[list[int], list[int]]], tokenizer: Any) -> Batch:
    width = max(len(ids) for ids, _ in examples)
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    return {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in examples]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in examples]),
        "labels": torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in examples]),
    }


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


def read_corpus(path: Path) -> Corpus:
    """Return the data in a file of pairs (``.jsonl``) or text (``.txt``).

    Raises:
        UsageError: the file cannot be read, or a line is wrong. The message says which line, and what to do.
    """
    if path.suffix.lower() not in (".jsonl", ".txt"):
        raise UsageError(f"{path}: --data takes a .jsonl file of prompt and completion, or a .txt file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
    if path.suffix.lower() == ".txt":
        return Corpus(path.name, documents=[text.strip()])
    # Not splitlines(), which would also break a line at a U+2028 inside a string.
    pairs = [_pair(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not pairs:
        raise UsageError(f"{path}: no pairs of prompt and completion in it")
    return Corpus(path.name, pairs=pairs)


def _pair(path: Path, number: int, line: str) -> tuple[str, str]:
    wanted = 'a line looks like {"prompt": "…", "completion": "…"}'
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); {wanted}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}, line {number}: a {type(value).__name__}, not an object; {wanted}")
    for key in ("prompt", "completion"):
        if key not in value:
            known = ", ".join(map(repr, value)) or "nothing"
            raise UsageError(f"{path}, line {number}: no {key!r}, only {known}; {wanted}")
        if not isinstance(value[key], str):
            raise UsageError(f"{path}, line {number}: {key!r} is a {type(value[key]).__name__}, not a string; {wanted}")
        if not value[key].strip():
            raise UsageError(f"{path}, line {number}: {key!r} is empty; fill it in or delete the line")
    return value["prompt"], value["completion"]
