"""A client builds a model from a share that a malicious provider has made: it accepts data and refuses code."""

from __future__ import annotations

import itertools
import json
from types import MappingProxyType
from typing import Any

import huggingface_hub
import pytest
import torch

import symbiosis
from symbiosis.client.bounded_build import bounded_build
from symbiosis.client.connect import tokenizer_of
from symbiosis.client.skeleton import Hollow
from symbiosis.core.share import Share
from symbiosis.errors import ShareError
from symbiosis.testing.zoo import ZOO, zoo_model
from tests.service import save_model

CODE = "raise SystemExit('the code of a provider was executed')"


@pytest.fixture
def share(base: Any) -> Share:
    return symbiosis.Executor(base).service.share()


def changed(share: Share, **entries: Any) -> Share:
    return Share(MappingProxyType({**share.description, **entries}), share.tensors, share.tokenizer)


@pytest.fixture
def no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """No question may be asked on the terminal."""

    def asked(*_: object) -> str:
        raise AssertionError("a question was asked")

    monkeypatch.setattr("builtins.input", asked)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = save_model(tmp_path_factory.mktemp("model"))
    return {file.name: file.read_bytes() for file in folder.glob("*token*")}


def test_a_tokenizer(tokenizer: dict[str, bytes]) -> None:
    assert tokenizer_of(tokenizer, "shm:///x")("what is a")["input_ids"]


@pytest.mark.parametrize(
    "name", ["tokenization_evil.py", "vocab.pkl", "pytorch_model.bin", "weights", "config.json", "Config.json"]
)
def test_files_that_are_not_a_tokenizer(tokenizer: dict[str, bytes], name: str) -> None:
    with pytest.raises(ShareError, match="no file of a tokenizer"):
        tokenizer_of({**tokenizer, name: CODE.encode()}, "shm:///x")


@pytest.mark.parametrize(
    "files",
    [
        {"\0.json": b""},
        {"a" * 300 + ".json": b""},
        {"tokenizer.json": b"[" * 100_000},
        {"tokenizer.json": b'{"normalizer": 7}'},
        {"tokenizer_config.json": b"3"},
        {"tokenizer_config.json": b'{"tokenizer_class": true}'},
    ],
    ids=["a name with NUL", "a long name", "a deep file", "another form", "a number", "a class that is none"],
)
def test_malformed_files_of_a_tokenizer(tokenizer: dict[str, bytes], files: dict[str, bytes]) -> None:
    with pytest.raises(ShareError, match="cannot be read"):
        tokenizer_of({**tokenizer, **files}, "shm:///x")


@pytest.mark.usefixtures("no_question")
@pytest.mark.parametrize("where", ["tokenization_evil.Evil", "someone/evil--tokenization_evil.Evil"])
def test_a_tokenizer_that_names_code(tokenizer: dict[str, bytes], where: str) -> None:
    settings = json.loads(tokenizer["tokenizer_config.json"])
    settings |= {"auto_map": {"AutoTokenizer": [where, where]}, "tokenizer_class": "EvilTokenizer"}
    files = {**tokenizer, "tokenizer_config.json": json.dumps(settings).encode()}
    with pytest.raises(ShareError, match="cannot be read"):
        tokenizer_of(files, "shm:///x")


@pytest.mark.parametrize("name", ["someone/kernels", "someone/kernels@main:attention", "flash_attention_2", 7])
def test_attention_that_is_not_installed(share: Share, name: Any) -> None:
    with pytest.raises(ShareError, match="uses the attention"):
        Hollow(changed(share, attention=name), torch.device("cpu"))


def paligemma(text: str) -> Any:
    options: Any = ZOO["PaliGemmaForConditionalGeneration"].options["text_config"]
    return zoo_model("PaliGemmaForConditionalGeneration", text_config={**options, "model_type": text})


def test_each_part_of_a_model_has_its_own_attention() -> None:
    """transformers falls back to another one in a part that does not support the model's."""
    model = paligemma(text="gemma2")
    share = symbiosis.Executor(model).service.share()
    built = Hollow(share, torch.device("cpu")).model
    for one in (model.config, built.config):
        assert one._attn_implementation == "sdpa"
        assert one.vision_config._attn_implementation == "sdpa"
        assert one.text_config._attn_implementation == "eager"
    other = paligemma(text="gemma")
    other.config.text_config._attn_implementation = "eager"
    shares = [symbiosis.Executor(each).service.share() for each in (paligemma(text="gemma"), other)]
    assert shares[0].description["fingerprint"] != shares[1].description["fingerprint"]
    with pytest.raises(ShareError, match="uses the attention 'someone/kernels'"):
        Hollow(changed(share, attention={"": "sdpa", "text_config": "someone/kernels"}), torch.device("cpu"))


@pytest.mark.usefixtures("no_question")
def test_a_configuration_that_names_code(share: Share) -> None:
    config = {
        **share.description["config"],
        "auto_map": {"AutoModelForCausalLM": "someone/evil--modeling.Evil"},
        "attn_implementation": "someone/kernels",
        "_attn_implementation_internal": "someone/kernels",
        "experts_implementation": "someone/kernels",
    }
    model = Hollow(changed(share, config=config), torch.device("cpu")).model
    assert type(model).__module__.startswith("transformers.")
    assert model.config._attn_implementation == share.description["attention"]
    assert not hasattr(model.config, "auto_map")


@pytest.mark.parametrize(
    "entries",
    [
        {"architecture": "AutoModelForCausalLM"},
        {"architecture": "__version__"},
        {"architecture": "NoSuchModel"},
        {"model_type": "no-such-type"},
        {"dtype": "manual_seed"},
        {"layers": [["x"]]},
        {"layers": [[0, "model.embed_tokens", 1 << 40, 1 << 40, "float32", False, True]]},
        {"layers": [[0, "model.embed_tokens", 32, 64, "float32", False, True]]},
        {"layers": [[0, "lm_head", "32", "64", "float32", False, True]]},
        {"layers": [[0, "lm_head", 32, 64, "int64", False, True]]},
        {"layers": [[0, "lm_head", 32, 64, "float32", False, False, 4, 2]]},
        {"layers": [[0, "model.norm", 32, 32, "float32", False, False, 4, 2]]},
        {"layers": [[0, "model.layers.0.mlp", 32, 32, "float32", False, False, 1 << 62, 1]]},
        {"layers": [[0, "model.layers.0", 32, 32, "float32", False, False, 4, 5]]},
        {"layers": [[0, "lm_head", 32, 64, "float32", False, True], [1, "lm_head", 32, 64, "float32", False, True]]},
        {"layers": None},
        {"config": [1, 2]},
        {"tied": ["x"]},
        {"tied": {"lm_head.weight": ["x"]}},
        {"buffers": 1},
        {"generation_config": [1]},
        {"generation_config": {"watermarking_config": {"a": 1}}},
    ],
)
def test_descriptions_that_are_not_of_a_model(share: Share, entries: dict[str, Any]) -> None:
    with pytest.raises(ShareError):
        Hollow(changed(share, **entries), torch.device("cpu"))


@pytest.mark.parametrize("number", [10**7, 10**15])
def test_a_configuration_of_a_model_without_end(share: Share, number: int) -> None:
    config = {**share.description["config"], "num_hidden_layers": number}
    config.pop("layer_types", None)
    with pytest.raises(ShareError, match="its share allows 1000"):
        Hollow(changed(share, config=config), torch.device("cpu"))


def test_modules_of_a_model_are_counted() -> None:
    with bounded_build({}, 1):
        torch.nn.ModuleList(torch.nn.Identity() for _ in range(1000))
    with pytest.raises(ShareError, match="too large a model"), bounded_build({}, 1):
        torch.nn.ModuleList(torch.nn.Identity() for _ in itertools.count())


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("detr", "DetrForObjectDetection"), ("upernet", "UperNetForSemanticSegmentation")],
)
def test_a_configuration_that_names_another_model(
    share: Share, model_type: str, architecture: str, hub_requests: list[Any]
) -> None:
    """transformers would ask the hub whether it has that model."""
    config = {"model_type": model_type, "backbone": "someone/anything", "use_timm_backbone": False}
    with pytest.raises(ShareError):
        Hollow(changed(share, config=config, model_type=model_type, architecture=architecture), torch.device("cpu"))
    assert not hub_requests
    assert not huggingface_hub.constants.HF_HUB_OFFLINE, "other code of the process may ask"


def test_a_tokenizer_is_read_without_code_and_hub(tokenizer: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these options transformers would ask on standard input whether to run code."""
    import transformers

    given: dict[str, Any] = {}
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda _, **options: given.update(options) or "read"
    )
    assert tokenizer_of(tokenizer, "shm:///x") == "read"
    assert given == {"trust_remote_code": False, "local_files_only": True}


def test_a_configuration_with_too_many_labels_is_refused() -> None:
    """transformers makes a name for each."""
    with pytest.raises(ShareError, match="num_labels 2000000000"), bounded_build({"sub": {"num_labels": 2 * 10**9}}, 1):
        pass
