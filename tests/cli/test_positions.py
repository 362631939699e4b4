"""Sequences that are longer than a model's table of positions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import PrefixTuningConfig
from transformers import OPTConfig, OPTForCausalLM

from symbiosis.cli.positions import positions_of
from symbiosis.errors import UsageError
from symbiosis.testing import tiny_model
from tests.cli.chat_model import save_chat_model
from tests.helpers import command
from tests.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    checkpoint = save_chat_model(tmp_path_factory.mktemp("served") / "model", "gpt2", 64)
    settings = json.loads((checkpoint / "generation_config.json").read_text())
    (checkpoint / "generation_config.json").write_text(json.dumps({**settings, "num_beams": 2}))  # which cannot stream
    with Service(checkpoint, f"shm://{checkpoint.parent}/s.sock") as running:
        yield running


def test_which_models_have_a_limit() -> None:
    gpt2 = tiny_model("gpt2", max_position_embeddings=64)
    assert positions_of(gpt2) == 64
    assert positions_of(gpt2, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=10)) == 54
    with pytest.raises(UsageError, match="64 positions, too few for 63 virtual tokens"):
        positions_of(gpt2, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=63))
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    opt = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64))
    assert positions_of(opt) == 64
    assert positions_of(tiny_model("llama", max_position_embeddings=64)) is None


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(("method", "limit"), [([], 64), (["--prefix", "10"], 54)])
def test_training_cuts_to_the_positions(service: Service, tmp_path: Path, method: list[str], limit: int) -> None:
    pairs = [{"prompt": "x" * 50, "completion": "y" * long} for long in (3, 40)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    done = command(
        *("finetune", service.address, "--data", str(tmp_path / "train.jsonl"), "--output", str(tmp_path / "a")),
        *("--steps", "2", *method),
    )
    assert done.exit_code == 0, done.stderr
    assert f"longer than the model's {limit} positions and cut" in done.stderr


def test_generation_ends_at_the_positions(service: Service) -> None:
    # 63 tokens are read, and the last of 2 new ones is not.
    for long, new in ((63, 2), (64, 1)):
        done = command("generate", service.address, "--prompt", "x" * long, "--max-new-tokens", str(new))
        assert done.exit_code == 0, done.stderr
        assert "positions" not in done.stderr
    done = command("generate", service.address, "--prompt", "x" * 60)
    assert done.exit_code == 0, done.stderr
    assert "the text ends where the model's 64 positions end" in done.stderr
    done = command("generate", service.address, "--prompt", "x" * 65)
    assert done.exit_code == 1
    assert "the prompt has 65 tokens and the model 64 positions" in done.stderr


def test_a_prompt_that_is_too_long_is_refused_before_any_text_is_made(service: Service, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(["short", "x" * 65, "short"]), encoding="utf-8")
    asked = ("generate", service.address, "--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "1")
    done = command(*asked, "--output", str(tmp_path / "texts.jsonl"))
    assert done.exit_code == 1
    assert "prompts.txt: prompt 2 has 65 tokens and the model 64 positions" in done.stderr
    assert not (tmp_path / "texts.jsonl").exists()
    assert not command(*asked).stdout
