"""``symbiosis generate`` against a served model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TextStreamer

from symbiosis.cli import generate
from symbiosis.cli.data import PromptFormat
from tests.cli.runs import COLOURS, options
from tests.helpers import command, run_command
from tests.service import Service


@pytest.fixture(scope="module")
def adapter(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that has learned three answers."""
    folder = tmp_path_factory.mktemp("adapter")
    pairs = [{"prompt": f"thing {n % 3}", "completion": COLOURS[n % 3]} for n in range(24)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    plain = "--lora", "r=8,alpha=16,targets=all-linear", "--learning-rate", 0.01
    done = command(*options(service, folder / "data.jsonl", folder / "a", "--steps", 120, "--batch", 12, *plain))
    assert done.exit_code == 0, done.stderr
    return folder / "a"


def test_an_adapter_answers_as_it_has_learned(service: Service, adapter: Path, checkpoint: Path) -> None:
    done = command(
        "generate", service.address, "--adapter", str(adapter), "--prompt", "thing 1", "--max-new-tokens", "9"
    )
    assert done.stdout.strip() == "green"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), str(adapter))
    ids = torch.tensor([PromptFormat.load(adapter).prompt(tokenizer, {"prompt": "thing 1"})])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True) == "green"


@pytest.mark.parametrize(
    ("kept", "complaint"),
    [(False, "cannot be loaded onto this model"), (True, "no place for 14 of its tensors, such as base_model.model.")],
    ids=["other-layers", "more-layers"],
)
def test_an_adapter_of_another_model_is_refused(
    service: Service, adapter: Path, tmp_path: Path, kept: bool, complaint: str
) -> None:
    other = shutil.copytree(adapter, tmp_path / "other")
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("layers.1.", "layers.7."): tensor.clone() for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file({**(tensors if kept else {}), **renamed}, other / "adapter_model.safetensors")
    done = command("generate", service.address, "--adapter", str(other), "--prompt", "thing 1")
    assert done.exit_code == 1
    assert complaint in " ".join(done.stderr.split())


def test_many_prompts_go_to_a_file(service: Service, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("thing 0\n\nthing 2\n", encoding="utf-8")
    output = tmp_path / "texts.jsonl"
    done = command(
        *("generate", service.address, "--adapter", str(adapter), "--prompts", str(tmp_path / "prompts.txt")),
        *("--max-new-tokens", "9", "--output", str(output), "--temperature", "0.01", "--n", "2", "--top-k", "5"),
        *("--top-p", "0.9", "--seed", "1"),
    )
    assert done.exit_code == 0, done.stderr
    made = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    wanted = [("thing 0", "red")] * 2 + [("thing 2", "blue")] * 2
    assert [(one["prompt"], one["completion"]) for one in made] == wanted
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "thing 0"}), encoding="utf-8")
    done = command(
        *("generate", service.address, "--adapter", str(adapter), "--prompts", str(tmp_path / "prompts.jsonl")),
        *("--max-new-tokens", "9", "--stop", "ed"),
    )
    assert done.stdout == "r\n"
    done = command(
        *("generate", service.address, "--adapter", str(adapter), "--prompt", "thing 0", "--output", "-"),
        *("--max-new-tokens", "9", "--stop", "x", "--stop", "d"),
    )
    assert json.loads(done.stdout)["completion"] == "re"


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (["a b", " c", "END", "x"], "a b c"),
        (["a E", "N", "Dx", " y"], "a "),
        (["a E", "N", " b"], "a EN b"),
        (["a ", "EN"], "a EN"),
        (["a sto", "p b", "END"], "a "),
    ],
)
def test_what_is_printed_ends_before_a_stop_string(parts: list[str], shown: str, capsys: Any) -> None:
    class Model:
        generation_config = SimpleNamespace(eos_token_id=None)

        def generate(self, input_ids: torch.Tensor, streamer: Any, **others: Any) -> torch.Tensor:
            for part in parts:
                streamer.on_finalized_text(part)
            streamer.on_finalized_text("", stream_end=True)
            return torch.zeros(1, 2, dtype=torch.int64)

    class Tokenizer:
        pad_token_id, eos_token_id = 0, None

        def __call__(self, *_: Any, **others: Any) -> dict[str, list[int]]:
            return {"input_ids": []}

        def decode(self, *_: Any, **others: Any) -> str:
            return "".join(parts)

    options = {"max_new_tokens": 9, "stop_strings": ["END", "stop"]}
    assert generate._Writer(Model(), Tokenizer(), None, options, "").write([1], shown=True) == shown
    assert capsys.readouterr().out == f"{shown}\n"


def test_settings_of_the_model_apply_except_those_of_sampling(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(**settings: Any) -> str:
        monkeypatch.setattr(generate, "check_decoder", lambda base: base.generation_config.update(**settings))
        done = command("generate", service.address, "--prompt", "thing", "--max-new-tokens", "12", *given)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    given: list[str] = []
    greedy = text()
    assert greedy == text(do_sample=True, temperature=50.0, top_p=0.9, top_k=90)
    assert greedy != text(repetition_penalty=0.01)
    given = ["--temperature", "50"]
    assert greedy == text(top_k=1)
    assert greedy == text(top_p=1e-6)
    assert greedy != text()
    for option, value in (("--top-k", "1"), ("--top-p", "1e-6")):
        given = ["--temperature", "50", option, value]
        assert greedy == text(), option
    given = ["--temperature", "50", "--seed", "1"]
    seeded = text()
    assert seeded == text()
    given[-1] = "2"
    assert seeded != text()


def test_empty_lines_of_prompts_are_told(service: Service, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("thing\n\nthing\n", encoding="utf-8")
    given = "generate", service.address, "--max-new-tokens", "1", "--output", "-", "--prompts", str(prompts)
    done = command(*given)
    assert done.exit_code == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert "there are 2 prompts in 3 lines" in " ".join(done.stderr.split())
    prompts.write_text("thing\nthing\n", encoding="utf-8")
    assert "lines" not in command(*given).stderr


def test_a_prompt_from_standard_input(service: Service) -> None:
    given = "generate", service.address, "--prompt", "-", "--output", "-", "--max-new-tokens", "1"
    done = run_command(*given, input="thing\nother\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "thing\nother"


def test_prompts_from_standard_input(service: Service) -> None:
    given = "generate", service.address, "--prompts", "-", "--output", "-", "--max-new-tokens", "1"
    done = run_command(*given, input="thing\nother\n")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["thing", "other"]
    assert not Path("-").exists()


STRIPS = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), STRIPS])
def test_lines_that_are_printed_keep_their_first_spaces(decoder: Any, capsys: Any) -> None:
    """Some decoders leave out spaces at the beginning of a text, and tokens are decoded line by line."""
    pieces = ["▁def", "\n", "▁▁▁▁", "x", "\n", "▁y"]
    inner = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, merges=[]))
    inner.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    ids = tokenizer.convert_tokens_to_ids(pieces)

    class Model:
        generation_config = SimpleNamespace(eos_token_id=None)

        def generate(self, input_ids: torch.Tensor, streamer: Any, **others: Any) -> torch.Tensor:
            streamer.put(input_ids)
            for one in ids:
                streamer.put(torch.tensor([one]))
            streamer.end()
            return torch.tensor([[0, *ids]])

    made = generate._Writer(Model(), tokenizer, None, {"max_new_tokens": 9}, "").write([0], shown=True)
    assert made == "def\n    x\n y"
    assert capsys.readouterr().out == f"{made}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_a_full_disk_tells_how_many_texts_are_in_the_file(service: Service, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n", encoding="utf-8")
    done = command("generate", service.address, "--prompts", str(prompts), "--output", "/dev/full")
    assert done.exit_code == 1
    text = " ".join(done.stderr.split())
    assert "0 of 2 texts were written" in text
    assert "error: /dev/full could not be written: No space left on device" in text


def test_an_empty_file_is_removed_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def naming(path: Path) -> Iterator[None]:
        yield
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(generate, "naming", naming)
    with pytest.raises(OSError, match="No space left"), generate._opened(tmp_path / "texts.jsonl"):
        pass
    assert not (tmp_path / "texts.jsonl").exists()


@pytest.mark.parametrize("texts", [0, 1])
def test_an_interrupted_file_tells_what_is_in_it(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: int
) -> None:
    made: list[str] = []

    def write(self: Any, ids: list[int], shown: bool) -> str:
        if len(made) == texts:
            raise KeyboardInterrupt
        made.append("text")
        return made[0]

    monkeypatch.setattr(generate._Writer, "write", write)
    prompts, output = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("one\ntwo\nthree\n", encoding="utf-8")
    done = command("generate", service.address, "--prompts", str(prompts), "--output", str(output))
    assert done.exit_code == 130
    assert f"{texts} of 3 texts were written" in " ".join(done.stderr.split())
    assert output.exists() is (texts > 0)  # the same command may be given again where nothing is lost
    if texts:
        assert len(output.read_text(encoding="utf-8").splitlines()) == texts


def test_what_does_not_suit_an_adapter_is_refused(service: Service, adapter: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "thing 0"}]}), encoding="utf-8")
    done = command("generate", service.address, "--adapter", str(adapter), "--prompts", str(prompts))
    assert done.exit_code == 1
    assert "data of the form 'pairs', not on conversations; give each prompt as a text" in done.stderr
    prompts.write_text(json.dumps({"instruction": "thing 0"}), encoding="utf-8")
    done = command("generate", service.address, "--adapter", str(adapter), "--prompts", str(prompts))
    assert done.exit_code == 1
    assert "data of the form 'pairs', not on instructions; give each prompt as a text" in done.stderr
    done = command("generate", service.address, "--adapter", str(adapter.parent), "--prompt", "thing 0")
    assert done.exit_code == 1
    assert "it has folders with adapters: a\n" in done.stderr


def test_texts_end_where_the_adapter_has_learned_to_end_them(
    service: Service, adapter: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The end of an answer may be several tokens, and the tokenizer's end token need not be the model's."""
    made = shutil.copytree(adapter, tmp_path / "a")
    form = json.loads((made / "prompt_format.json").read_text(encoding="utf-8"))
    (made / "prompt_format.json").write_text(json.dumps({**form, "end": "ed"}), encoding="utf-8")
    prompts, output = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("thing 0", encoding="utf-8")
    done = command(
        *("generate", service.address, "--adapter", str(made), "--prompts", str(prompts), "--output", str(output))
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(output.read_text(encoding="utf-8"))["completion"] == "r"
    printed = command("generate", service.address, "--adapter", str(made), "--prompt", "thing 0")
    assert printed.stdout == "r\n"
    (made / "prompt_format.json").write_text(json.dumps({**form, "end": "d"}), encoding="utf-8")  # one token
    printed = command("generate", service.address, "--adapter", str(made), "--prompt", "thing 0")
    assert printed.stdout == "re\n"
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7]))
    writer = generate._Writer(model, AutoTokenizer.from_pretrained(checkpoint), None, {}, "")
    assert writer._options["eos_token_id"] == [0, 7]


def test_a_checkpoint_is_an_adapter(service: Service, data: Path, tmp_path: Path) -> None:
    made = tmp_path / "a"
    assert command(*options(service, data, made, "--steps", 1)).exit_code == 0
    form = PromptFormat.load(made)
    assert form.name == "pairs"
    assert PromptFormat.load(made / "checkpoint-1") == form


def test_chat_remembers_the_conversation(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_prompts(monkeypatch)
    done = chat(service, "hi\nmore\n\n", "--max-new-tokens", "3")
    assert done.exit_code == 0, done.stderr
    assert len(seen) == 2
    assert len(seen[1]) > len(seen[0])
    assert seen[1][: len(seen[0])] == seen[0]


def test_errors_of_a_chat_template(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They name the record, and come before the user has typed."""

    def fails(self: Any, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("no system message")
        return "hi"

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", fails)
    done = chat(service, "hi\n\n", "--system", "be brief")
    assert done.exit_code == 1
    assert "chat template fails: ValueError: no system message" in " ".join(done.stderr.split())
    assert "you:" not in done.stderr
    records = ({"messages": [{"role": role, "content": "hi"}]} for role in ("user", "system"))
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    done = command("generate", service.address, "--prompts", str(tmp_path / "prompts.jsonl"))
    assert done.exit_code == 1
    assert "prompts.jsonl: prompt 2: the model's chat template fails" in " ".join(done.stderr.replace("│", "").split())


def test_an_interrupted_answer_stays_in_the_conversation(
    service: Service, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_prompts(monkeypatch)
    put, came = TextStreamer.put, []

    def interrupt(self: Any, value: Any) -> None:
        put(self, value)
        came.append(value)
        if len(came) == 4:  # the prompt and three tokens
            raise KeyboardInterrupt

    monkeypatch.setattr(TextStreamer, "put", interrupt)
    done = chat(service, "hi\nmore\n\n", "--max-new-tokens", "6")
    assert done.exit_code == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    said = tokenizer.decode(torch.cat([one.flatten() for one in came[1:4]]), skip_special_tokens=True)
    assert said
    assert tokenizer.decode(seen[1]) == f"{tokenizer.decode(seen[0])}{said}<end><user>more<assistant>"
    assert done.stdout.splitlines()[0] == said


def test_an_adapter_chats_as_it_has_learned(
    service: Service, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = [("system", "be brief"), ("user", "hi"), ("assistant", "red")]
    record = json.dumps({"messages": [{"role": role, "content": text} for role, text in conversation]})
    (tmp_path / "data.jsonl").write_text("\n".join([record] * 8), encoding="utf-8")
    assert command(*options(service, tmp_path / "data.jsonl", tmp_path / "a", "--steps", 25)).exit_code == 0
    seen = watch_prompts(monkeypatch)
    given = "--adapter", str(tmp_path / "a"), "--system", "be brief", "--max-new-tokens", "6"
    done = chat(service, "hi\n\n", *given)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == "red"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(seen[0]) == "<system>be brief<user>hi<assistant>"
    without = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    (tmp_path / "prompts.jsonl").write_text(f"{record}\n{without}", encoding="utf-8")
    done = command("generate", service.address, "--prompts", str(tmp_path / "prompts.jsonl"), *given[2:])
    assert done.exit_code == 0, done.stderr
    assert seen == seen[:1] * 3, "a system message is put before messages that have none"


def watch_prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which the prompts of texts are added as they are generated."""
    seen: list[list[int]] = []
    write = generate._Writer.write

    def watched(self: Any, ids: list[int], shown: bool) -> str:
        seen.append(ids)
        return write(self, ids, shown)

    monkeypatch.setattr(generate._Writer, "write", watched)
    return seen


def chat(service: Service, typed: str, *given: str) -> Any:
    from typer.testing import CliRunner

    from symbiosis.cli.commands import app

    return CliRunner().invoke(app, ["generate", service.address, "--chat", *given], input=typed)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "give one of --prompt, --prompts and --chat"),
        (["--prompt", "x", "--chat"], "give one of --prompt, --prompts and --chat"),
        (["--prompt", "x", "--n", "2"], "need --temperature"),
        (["--prompts", "absent.txt"], "absent.txt: cannot be read (No such file or directory)"),
        (["--chat", "--output", "answers.jsonl"], "--chat prints one answer to each message"),
        (["--prompt", "x", "--output", "pyproject.toml"], "--output pyproject.toml: the file exists"),
        (["--prompt", "x", "--temperature", "1e-300"], "--temperature 1e-300: give 0, or a number from 1e-06 to 1e+06"),
        (["--prompt", "x", "--temperature", "inf"], "--temperature inf: give 0"),
        (["--prompt", "\udcff"], r"--prompt: \udcff is an unpaired surrogate"),
        (["--prompt", "x", "--stop", "\udcff"], r"--stop: \udcff is an unpaired surrogate"),
        (["--prompt", "x", "--stop", ""], "--stop is empty"),
        (["--prompt", "x", "--system", "s"], "--system goes with --chat"),
    ],
)
def test_wrong_options_of_generate(given: list[str], complaint: str) -> None:
    done = command("generate", "shm:///nowhere.sock", *given)
    assert done.exit_code == 1
    assert complaint in done.stderr
