"""``symbiosis demo`` on a tiny model: the complete run, and every way in which it must refuse or fail."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from symbiosis.cli.commands import app
from symbiosis.cli.data import IGNORED, Corpus, docstrings, read_halves, topics
from symbiosis.cli.demo import base_model, plain
from symbiosis.cli.demo.base_model import cache_folder
from symbiosis.cli.demo.live import sparkline
from symbiosis.cli.demo.memory import total
from symbiosis.cli.demo.report import agreement
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


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, PAIRS)) + "\n\n", encoding="utf-8")
    return file


def demo(*arguments: Any) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["demo", *map(str, arguments)])


# ------------------------------------------------------------------------------------------------------- the whole demo


@pytest.fixture
def arguments(tiny: Path, pairs: Path, tmp_path: Path) -> list[Any]:
    return ["--model", tiny, "--data", pairs, "--steps", 3, "--output", tmp_path / "out"]


def test_the_whole_demo(arguments: list[Any], tmp_path: Path) -> None:
    results = tmp_path / "results" / "demo.json"
    result = demo(*arguments, "--json", results, "--policy", "lockstep")
    assert result.exit_code == 0, result.output
    for words in ("alice", "LoRA", "IA3", "agrees", "the same, all", "one base for all four", "samples"):
        assert words in result.stdout
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(results.read_text(encoding="utf-8"))
    assert told["agrees"] is True
    assert told["policy"] == "lockstep"
    assert [tenant["job"] for tenant in told["tenants"]] == ["fine-tune", "fine-tune", "generate", "generate"]
    for tenant in told["tenants"][:2]:
        assert len(tenant["losses"]) == len(tenant["plain_losses"]) == 3
        assert tenant["losses"] == pytest.approx(tenant["plain_losses"], rel=1e-5)
        assert tenant["losses"][0] != tenant["losses"][-1]
    for tenant in told["tenants"][2:]:
        assert all(sample["texts"] == [sample["plain_text"]] for sample in tenant["samples"])


def test_memory_of_four_tenants_includes_one_base(arguments: list[Any], tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    results = tmp_path / "demo.json"
    assert demo(*arguments, "--json", results).exit_code == 0
    told = json.loads(results.read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    base = total([*model.parameters(), *model.buffers()])
    assert told["memory"]["one_base"]["base"] == base
    assert told["memory"]["one_base_a_job"]["base"] == 4 * base
    for tenant in told["tenants"]:
        ours, theirs = tenant["memory"], tenant["plain_memory"]
        assert ours["base"] == 0
        for part in ("gradients", "optimizer", "activations"):
            assert ours[part] == theirs[part], part
        # A client has the buffers of its share, and one number for each placeholder.
        assert theirs["adapter"] <= ours["adapter"] <= theirs["adapter"] + 1024


def test_text_in_another_precision(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "book.TXT"
    text.write_text("\n\n".join(topics()[:2]), encoding="utf-8")
    results = tmp_path / "demo.json"
    result = demo(
        "--model", tiny, "--data", text, "--steps", 2, "--dtype", "bfloat16", "--output", tmp_path, "--json", results
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(results.read_text(encoding="utf-8"))["dtype"] == "bfloat16"


# -------------------------------------------------------------------------------------------- when results do not agree


def test_a_wrong_loss_fails_the_demo(arguments: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = plain.train

    def differently(plan: Any, job: Any, step_done: Any) -> None:
        train(plan, job, step_done)
        if job.name == "bob":
            job.plain_losses[1] *= 1.01

    monkeypatch.setattr(plain, "train", differently)
    results = tmp_path / "demo.json"
    result = demo(*arguments, "--json", results)
    assert result.exit_code == 1
    assert "bob (IA3): the loss at step 2 is" in result.stderr
    assert "alice" not in result.stderr
    told = json.loads(results.read_text(encoding="utf-8"))
    assert told["agrees"] is False
    bob = told["tenants"][1]
    assert f"{bob['losses'][1]:.6f}" in result.stderr
    assert f"{bob['plain_losses'][1]:.6f}" in result.stderr
    assert (tmp_path / "out" / "demo.png").exists()


def test_a_wrong_text_fails_the_demo(arguments: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    generate = plain.generate

    def differently(plan: Any, job: Any, text_done: Any) -> None:
        generate(plan, job, text_done)
        job.plain_gaps[0] = 2.0 if job.name == "carol" else 1e-6

    monkeypatch.setattr(plain, "generate", differently)
    result = demo(*arguments)
    assert result.exit_code == 1
    assert "carol (none): the text after" in result.stderr
    assert "dave" not in result.stderr, "two tied tokens are not an error"
    assert "where two tokens tie" in result.stdout


def test_the_gap_is_at_the_first_difference() -> None:
    scores = tuple(torch.tensor([row]) for row in ([1.0, 2.0, 4.0], [0.0, 5.0, 3.0]))
    assert plain._gap(scores, [2, 1], [2, 1]) is None
    assert plain._gap(scores, [2, 1], [2, 2]) == 2.0
    assert plain._gap(scores, [2, 1], [2]) == math.inf


def test_agreement() -> None:
    compared = agreement([1.0, 2.0, 3.0], [1.0, 2.5, 3.0], tolerance=0.1)
    assert (compared.worst, compared.largest, compared.agrees) == (1, pytest.approx(0.2), False)
    assert agreement([1.0], [1.0], tolerance=1e-9).agrees
    assert not agreement([math.nan, 1.0], [math.nan, 1.0], tolerance=0.1).agrees, "NaN losses are not a success"


# -------------------------------------------------------------------------------------------------------- wrong options


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
    result = demo("--data", file, "--output", tmp_path)
    assert result.exit_code == 1
    assert f"{file}, {complaint}" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.jsonl", None, "cannot be read (No such file or directory)"),
        ("data.csv", b"a,b\n", "--data takes a .jsonl file"),
        ("latin.txt", b"one\ntwo caf\xe9\n", "line 2: not UTF-8"),
        ("one.jsonl", b'{"prompt": "a", "completion": "b"}\n', "1 pairs are too few"),
        ("empty.jsonl", b"\n", "no pairs of prompt and completion"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_halves(file)
    assert str(file) in str(caught.value)
    assert complaint in str(caught.value)


def test_too_little_text(tiny: Path, tmp_path: Path) -> None:
    for content in ("Just this.", ""):
        file = tmp_path / "little.txt"
        file.write_text(content, encoding="utf-8")
        result = demo("--model", tiny, "--data", file, "--output", tmp_path)
        assert result.exit_code == 1
        assert "are too few to train on; at least 192 are needed" in result.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model", "/no/such/folder"], "--model /no/such/folder: cannot be loaded"),
        (["--device", "quantum"], "--device quantum: torch cannot use it here"),
        (["--device", "meta"], "--device meta: there is nothing to compute with"),
        (["--sequence", "4096"], "--sequence 4096: the model reads at most 128 tokens"),
        (["--policy", "opportunistic:patience=3"], "has no option 'patience=3'"),
    ],
)
def test_wrong_options(arguments: list[Any], options: list[str], complaint: str) -> None:
    result = demo(*arguments, *options)
    assert result.exit_code == 1
    assert complaint in result.stderr


def test_results_that_cannot_be_written_show_before_the_work(arguments: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for options in (
        ["--output", tmp_path / "file" / "x"],
        ["--json", tmp_path],
        ["--json", tmp_path / "file" / "x.json"],
    ):
        result = demo(*arguments, *options)
        assert result.exit_code == 1
        assert str(options[0]) in result.stderr
        assert "alice" not in result.output


def test_a_tokenizer_of_another_model(arguments: list[Any], tiny: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "mixed"
    shutil.copytree(tiny, folder)
    tiny_model(vocab_size=64).save_pretrained(folder)
    result = demo(*arguments, "--model", folder)
    assert result.exit_code == 1
    assert "its tokenizer has tokens that the model, with 64, has not" in result.stderr


# ----------------------------------------------------------------------------------------------------------------- data


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


def test_halves_are_disjoint_and_lose_nothing(pairs: Path, tmp_path: Path) -> None:
    first, second = read_halves(pairs)
    assert [*first.pairs, *second.pairs] == [(pair["prompt"], pair["completion"]) for pair in PAIRS]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(map(str, range(100))), encoding="utf-8")
    first, second = read_halves(text)
    assert first.documents[0] + second.documents[0] == text.read_text(encoding="utf-8")


def test_line_separators_inside_strings_do_not_break_lines(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a\u2028b", "completion": "c"}\r\n{"prompt": "d", "completion": "e"}', encoding="utf-8")
    first, second = read_halves(file)
    assert first.pairs == [("a\u2028b", "c")]
    assert second.pairs == [("d", "e")]


def test_shipped_texts() -> None:
    assert sum(map(len, topics())) > 200_000
    assert any("Turtle" in text for text in docstrings("turtle"))
    assert all(">>>" in text for text in docstrings("_pydecimal", ">>>"))
    assert docstrings("no_such_module") == []
    assert docstrings("sys") == []


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([math.nan, 1.0]) == "▄▄"
    assert len(sparkline([float(n) for n in range(1000)])) == 24


# ------------------------------------------------------------------------------------------------------------ the cache


@pytest.fixture
def small_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe: dict[str, Any] = {
        "vocabulary": 300,
        "hidden": 64,
        "intermediate": 64,
        "layers": 1,
        "batch": 2,
        "length": 32,
    }
    recipe |= {"steps": 2, "prefix": {**base_model.RECIPE["prefix"], "steps": 1}}
    for key, value in recipe.items():
        monkeypatch.setitem(base_model.RECIPE, key, value)
    return tmp_path / "cache" / "symbiosis"


CORPUS = Corpus("adapter", documents=docstrings("textwrap"))


def nothing(what: str, step: int, steps: int, loss: float) -> None: ...


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_model_is_trained_once_and_cached(small_recipe: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen: list[tuple[str, int, int]] = []
    folder = base_model.base_model(CORPUS, lambda what, step, steps, loss: seen.append((what, step, steps)))
    assert seen == [("base model", 1, 2), ("base model", 2, 2), ("prefix adapter", 1, 1)]
    assert folder.parent == small_recipe
    seen.clear()
    assert base_model.base_model(CORPUS, lambda what, step, steps, loss: seen.append((what, step, steps))) == folder
    assert not seen
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("The “with” statement")["input_ids"]) == "The “with” statement"
    assert AutoModelForCausalLM.from_pretrained(folder).config.eos_token_id == tokenizer.eos_token_id == 0
    assert list(small_recipe.iterdir()) == [folder]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_half_written_model_is_never_used(small_recipe: Path) -> None:
    def interrupt(what: str, step: int, steps: int, loss: float) -> None:
        if what == "prefix adapter":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        base_model.base_model(CORPUS, interrupt)
    assert list(small_recipe.iterdir()) == []
    assert base_model.base_model(CORPUS, nothing).is_dir()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_two_processes_may_train_at_the_same_time(small_recipe: Path) -> None:
    def other_process(what: str, step: int, steps: int, loss: float) -> None:
        if what == "prefix adapter":
            made.append(base_model.base_model(CORPUS, nothing))

    made: list[Path] = []
    assert base_model.base_model(CORPUS, other_process) == made[0]
    assert list(small_recipe.iterdir()) == made


def test_training_hurries_when_time_is_up(small_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "LIMIT_S", 1e-9)
    seen: list[tuple[int, int]] = []
    batches = [{"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}] * 3
    base_model._fit(tiny_model(), batches, [], lambda step, steps, loss: seen.append((step, steps)))
    assert seen == [(0, 0)]


def test_a_cache_that_cannot_be_written(small_recipe: Path) -> None:
    small_recipe.parent.write_text("in the way", encoding="utf-8")
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME"):
        base_model.base_model(CORPUS, nothing)


def test_relative_cache_homes_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == Path.home() / ".cache" / "symbiosis"


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_while_tenants_work(tiny: Path, pairs: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the command with exit status 130 and without a traceback, at any moment."""
    command = [sys.executable, "-m", "symbiosis.cli.main", "demo", "--model", str(tiny), "--data", str(pairs)]
    command += ["--steps", "3000", "--output", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
    )
    assert process.stdout is not None
    try:
        deadline = time.monotonic() + 90
        while "four tenants at once" not in process.stdout.readline():
            assert time.monotonic() < deadline
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # makes the process print the stacks of its threads
            pytest.fail(f"the command goes on after Ctrl-C: {process.communicate()[1][-8000:]}")
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
