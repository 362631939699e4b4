"""What is said of a model that cannot be loaded, and what is said before its weights are loaded."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
import transformers
from huggingface_hub import errors

from symbiosis import Executor
from symbiosis.errors import ShareError, SplitError, UsageError
from symbiosis.executor.loading import load_model
from symbiosis.testing.zoo import zoo_model
from tests.helpers import lora

ANSWER = Mock(headers={})


@pytest.mark.parametrize(
    ("cause", "offline", "reason"),
    [
        (errors.LocalEntryNotFoundError("x"), True, "the hub is not asked, because HF_HUB_OFFLINE is set"),
        (errors.LocalEntryNotFoundError("x"), False, "the hub cannot be reached"),
        (errors.RepositoryNotFoundError("x", response=ANSWER), False, "has no model of this name; log in"),
        (errors.GatedRepoError("x", response=ANSWER), False, "only to accounts that may have it"),
        (None, False, "the hub gives no model of this name"),
    ],
)
def test_why_a_hub_gives_no_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cause: Any, offline: bool, reason: str
) -> None:
    error = OSError("Check your internet connection")
    error.__cause__ = cause
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", Mock(side_effect=error))
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: offline)
    with pytest.raises(UsageError, match=reason) as found:
        load_model("some/model")
    assert str(found.value).startswith("there is no folder some/model, and ")
    assert ("internet" in str(found.value)) == (cause is None)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UsageError, match="is a file; give the folder"):
        load_model(file)


def test_no_model_is_named() -> None:
    with pytest.raises(UsageError, match="the model is empty"):
        load_model("")


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"base_layers": "*.nowhere"}, "base_layers: no module matches"),
        ({"base_layers": ["lm_head"], "layers": "0-1"}, "layers: there is no block 1"),
        ({"allow_weights": ["nose"]}, "allow_weights: 'nose' matches no linear base layer"),
    ],
)
def test_names_are_checked_before_weights_are_loaded(
    tmp_path: Path, base: Any, names: dict[str, Any], reason: str, shards: int
) -> None:
    base.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(SplitError, match=reason):
        Executor.from_pretrained(tmp_path, shards=shards, **names)
    with pytest.raises(SplitError, match=reason):
        Executor.from_pretrained(tmp_path, model_class=type(base), **names)


@pytest.mark.parametrize("names", [{"layers": "0"}, {"allow_weights": ["*.query_key_value"]}])
def test_names_of_linear_layers_of_a_class_of_their_own(tmp_path: Path, names: dict[str, Any]) -> None:
    """Falcon has a subclass of ``nn.Linear``, whose product cannot be compared before the weights are loaded."""
    model: Any = zoo_model("FalconForCausalLM")
    model.save_pretrained(tmp_path)
    served = {layer.name for layer in Executor.from_pretrained(tmp_path, **names).layers}
    assert served == {layer.name for layer in Executor(model, **names).layers}


def test_an_adapter_beside_a_model(base: Any, tmp_path: Path) -> None:
    base.save_pretrained(tmp_path)
    peft.get_peft_model(copy.deepcopy(base), lora()).save_pretrained(str(tmp_path))
    with pytest.raises(UsageError, match=r"has an adapter beside the model .*; merge it into the model, or move it"):
        load_model(tmp_path)


def test_weights_that_a_checkpoint_lacks(base: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are the same each time, whatever the program has drawn before."""
    base.save_pretrained(tmp_path)
    scores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loaded = load_model(tmp_path, transformers.LlamaForSequenceClassification)
        scores.append(loaded.score.weight)
        assert torch.equal(loaded.model.norm.weight, base.model.norm.weight)
    assert torch.equal(*scores)
    assert 0.5 < scores[0].std() / base.config.initializer_range < 1.5
    told = [record for record in caplog.records if record.getMessage().startswith("the checkpoint lacks weights")]
    assert [vars(record)["weights"] for record in told] == [["score.weight"]] * 2


def test_positions_that_a_checkpoint_lacks(tmp_path: Path) -> None:
    """transformers computes sinusoids, which published checkpoints of Pegasus lack."""
    model: Any = zoo_model("PegasusForConditionalGeneration")
    table = transformers.PegasusForConditionalGeneration(model.config).model.encoder.embed_positions.weight
    name = "model.encoder.embed_positions.weight"
    model.save_pretrained(tmp_path, state_dict={key: one for key, one in model.state_dict().items() if key != name})
    assert torch.equal(load_model(tmp_path).model.encoder.embed_positions.weight, table)


def test_a_class_whose_loading_has_no_information(base: Any, tmp_path: Path) -> None:
    """Qwen 2.5 Omni, for instance, works with what transformers returns."""

    class Own(transformers.LlamaForCausalLM):
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            model = super().from_pretrained(*args, **kwargs)
            model.loaded = True
            return model

    base.save_pretrained(tmp_path)
    assert load_model(tmp_path, Own).loaded


def test_own_code_of_a_checkpoint_comes_before_a_class_of_transformers(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients in other processes would build the class of transformers that has the same name."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "own_code"
    base.save_pretrained(folder)
    file = folder / "config.json"
    own = {"AutoModel": "own.LlamaModel", "AutoModelForCausalLM": "own.LlamaForCausalLM"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": own}))
    (folder / "own.py").write_text("import transformers\nclass LlamaForCausalLM(transformers.LlamaForCausalLM): pass\n")
    executor = Executor.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ShareError, match=r"class transformers_modules.own_code.*own\.LlamaForCausalLM is not one of"):
        executor.service.share()
    assert Executor.from_pretrained(folder, model_class=type(base)).service.share().tensors
