"""Training texts: what is read from files, which errors name the line, and what batches hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from symbiosis.cli.data import IGNORED, Corpus, docstrings, read_corpus, topics
from symbiosis.errors import UsageError
from symbiosis.testing import tiny_model

PAIRS = [{"prompt": f"What is {n} plus one?", "completion": f"{n} plus one is {n + 1}."} for n in range(12)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights, and a tokenizer of bytes whose only special token is an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(["<end>", *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=0, bos_token_id=None, max_position_embeddings=128)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a", "completion": ', "line 2: not JSON (Expecting value at column 31)"),
        ('["a", "b"]', "line 2: a list, not an object"),
        ('{"prompt": "a", "answer": "b"}', "line 2: no 'completion', only 'prompt', 'answer'"),
        ('{"prompt": "a", "completion": 3}', "line 2: 'completion' is a int, not a string"),
        ('{"prompt": " ", "completion": "b"}', "line 2: 'prompt' is empty"),
    ],
)
def test_wrong_lines(tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(f"{json.dumps(PAIRS[0])}\n{line}\n{json.dumps(PAIRS[1])}\n", encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_corpus(file)
    assert f"{file}, {complaint}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.jsonl", None, "cannot be read (No such file or directory)"),
        ("data.csv", b"a,b\n", "--data takes a .jsonl file"),
        ("latin.txt", b"one\ntwo caf\xe9\n", "line 2: not UTF-8"),
        ("empty.jsonl", b"\n", "no pairs of prompt and completion"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_corpus(file)
    assert str(file) in str(caught.value)
    assert complaint in str(caught.value)


def test_too_little_text(tiny: Path) -> None:
    from transformers import AutoTokenizer

    corpus = Corpus("little.txt", documents=["Just this."])
    with pytest.raises(UsageError, match="are too few to train on; at least 192 are needed"):
        corpus.batches(AutoTokenizer.from_pretrained(tiny), steps=1, size=1, length=96, seed=0)


def test_the_loss_covers_the_completion_only(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    corpus = Corpus("pairs", pairs=[("ask", "answer"), ("ask ", "ab")])
    (batch,) = corpus.batches(tokenizer, steps=1, size=2, length=32, seed=0)
    rows = sorted(
        zip(*(batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")), strict=True), key=str
    )
    texts = set()
    for ids, labels, mask in rows:
        seen = [token for token, here in zip(ids, mask, strict=True) if here]
        learned = [token for token in labels if token != IGNORED]
        texts.add((tokenizer.decode(seen), tokenizer.decode(learned)))
        assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    assert texts == {("ask\nanswer<end>", "answer<end>"), ("ask ab<end>", "ab<end>")}
    assert corpus.shortened == 0


def test_long_pairs_lose_the_beginning_of_the_prompt(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    corpus = Corpus("pairs", pairs=[("x" * 20, "yes"), ("q", "z" * 20)])
    batches = corpus.batches(tokenizer, steps=2, size=1, length=10, seed=0)
    assert corpus.shortened == 2
    texts = {tokenizer.decode(batch["input_ids"][0]) for batch in batches}
    assert texts == {"xxxxx\nyes<end>", "\n" + "z" * 9}
    assert all((batch["labels"] != IGNORED).any() for batch in batches)


def test_batches_depend_on_the_seed_alone(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    corpus = Corpus("topics", documents=topics()[:3])
    first, again, other = (corpus.batches(tokenizer, steps=3, size=2, length=16, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, other, strict=True))
    assert first[0]["labels"].shape == (2, 16)


def test_line_separators_inside_strings_do_not_break_lines(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a\u2028b", "completion": "c"}\r\n{"prompt": "d", "completion": "e"}', encoding="utf-8")
    assert read_corpus(file).pairs == [("a\u2028b", "c"), ("d", "e")]


def test_shipped_texts() -> None:
    assert sum(map(len, topics())) > 200_000
    assert any("Turtle" in text for text in docstrings("turtle"))
    assert all(">>>" in text for text in docstrings("_pydecimal", ">>>"))
    assert docstrings("no_such_module") == []
    assert docstrings("sys") == []
