"""``symbiosis compat``: a slice of the table, verdicts on models and methods that do not agree, and the page."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

import symbiosis
from symbiosis.errors import (
    CannotWaitError,
    ClientClosedError,
    PlaceholderError,
    RequestError,
    UnknownNameError,
)
from symbiosis.testing import Job, run_job, run_job_plain, tiny_model
from symbiosis.testing.compare import Outcome, difference_of, logits_of
from symbiosis.testing.compat import (
    BROAD,
    EQUAL,
    METHODS,
    NOT_PLAIN,
    REFUSED,
    WRONG,
    Cell,
    ServedPart,
    cells_of,
    load,
    shares_of,
    try_cell,
)
from symbiosis.testing.compat_page import write_page
from symbiosis.testing.formats import FORMATS, FP32, IN_FORMATS, split_name
from symbiosis.testing.zoo import SMALL, ZOO, zoo_inputs, zoo_model
from tests.helpers import command, packs_bf16

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft.*", "ignore::FutureWarning", "ignore::RuntimeWarning")

SLICE = (
    "FalconForCausalLM",
    "MixtralForCausalLM",
    "MambaForCausalLM",
    "T5ForConditionalGeneration",
    "BertForSequenceClassification",
    "SiglipForImageClassification",
    "LlavaForConditionalGeneration",
)
NOT_IN_PLAIN = {
    ("FalconForCausalLM", "prefix tuning"),
    ("MambaForCausalLM", "prefix tuning"),
    ("SiglipForImageClassification", "prefix tuning"),
}


@pytest.mark.parametrize("transport", ["inproc", pytest.param("shm", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("method", BROAD)
@pytest.mark.parametrize("name", SLICE)
async def test_models(name: str, method: str, transport: str) -> None:
    model, reads = load(name)
    cell = await try_cell(name, model, reads, method, transport)
    assert cell.verdict == (NOT_PLAIN if (name, method) in NOT_IN_PLAIN else EQUAL), cell


@pytest.mark.parametrize(
    ("method", "transport", "verdict"),
    [
        ("PiSSA", "inproc", REFUSED),
        ("LoRA, lm_head", "shm", EQUAL),
        ("LoRA, lm_head saved", "inproc", EQUAL),
        ("LoRA, lm_head saved", "shm", REFUSED),
        ("POLY", "shm", EQUAL),
        ("DoRA", "shm", EQUAL),
        ("HRA", "shm", EQUAL),
        ("EVA", "inproc", EQUAL),
        ("DEFT", "inproc", EQUAL),
        ("ADAMSS", "shm", REFUSED),
        ("VeRA", "shm", EQUAL),
    ],
)
async def test_methods(method: str, transport: str, verdict: str) -> None:
    model, reads = load("LlamaForCausalLM")
    cell = await try_cell("LlamaForCausalLM", model, reads, method, transport)
    assert cell.verdict == verdict, cell


@pytest.mark.parametrize("format_", [format_ for format_ in FORMATS if format_ != "torchao int4"])
async def test_formats(format_: str) -> None:
    if format_ == "bitsandbytes NF4 with bf16" and not packs_bf16():
        pytest.skip("this model differs on processors without instructions for bf16; docs/status.md has the figures")
    name = f"Qwen3MoeForCausalLM in {format_}"
    model, reads = load(name)
    assert shares_of(name, model, reads).served > 0.9
    for method, transport in (("LoRA", "shm"), ("IA3", "inproc")):
        cell = await try_cell(name, model, reads, method, transport)
        fails = (format_, method) == ("bitsandbytes NF4 with bf16", "IA3")  # PEFT multiplies fp32 and bf16
        assert cell.verdict == (NOT_PLAIN if fails else EQUAL), cell


async def test_plain_torchao_int4_has_no_gradients_on_a_cpu() -> None:
    name = "LlamaForCausalLM in torchao int4"
    model, reads = load(name)
    assert shares_of(name, model, reads).served > 0.9
    assert (await try_cell(name, model, reads, "LoRA", "inproc")).verdict == NOT_PLAIN
    cell = await try_cell(name, model, reads, "none", "shm")
    assert cell.verdict == EQUAL, cell


async def test_limits_of_a_format_are_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from symbiosis.executor.layers import LinearLayer

    def forward(self: Any, tensors: Any, **_: Any) -> torch.Tensor:
        return torch.nn.functional.linear(tensors[0], self.module.weight * 1.02)

    monkeypatch.setattr(LinearLayer, "forward", forward)
    name = "LlamaForCausalLM in bf16"
    assert (await try_cell(name, *load(name), "none", "inproc")).verdict == WRONG


def test_names_with_formats() -> None:
    assert split_name("GPT2LMHeadModel in bf16") == ("GPT2LMHeadModel", "bf16")
    assert split_name("./model in a folder") == ("./model in a folder", None)
    assert split_name("GPT2LMHeadModel in int3") == ("GPT2LMHeadModel in int3", None)
    assert all(split_name(name)[1] for name in IN_FORMATS)


@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo_runs(name: str) -> None:
    model = zoo_model(name)
    with torch.no_grad():
        output = model(**zoo_inputs(model, ZOO[name].reads, 0))
    assert torch.isfinite(output.loss)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000


HEAD = r"vision_(model|tower)\.head"
UNUSED = {
    "SiglipForImageClassification": HEAD,
    "PaliGemmaForConditionalGeneration": HEAD,
    "Gemma3ForConditionalGeneration": HEAD,
    "LlavaForConditionalGeneration": r"vision_tower\.encoder\.layers\.2",  # it reads the layer before the last
    "WavLMForCTC": "gru_rel_pos_linear",  # which counts for gradients alone
}
"""Linear layers that do not count for logits."""
FAST = (*SLICE, "BartForConditionalGeneration", "ConvNextForImageClassification", "Gemma3ForConditionalGeneration")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.thorough) for n in ZOO])
def test_every_linear_layer_counts(name: str) -> None:
    """A layer whose results are wrong is found, also in the cell without an adapter."""
    model = zoo_model(name)
    inputs = {key: value for key, value in zoo_inputs(model, ZOO[name].reads, 0).items() if key != "labels"}
    found = set()
    with torch.no_grad():
        expected = logits_of(model(**inputs))
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.Linear | Conv1D):
                module.weight.neg_()
                if difference_of(logits_of(model(**inputs)), expected) <= FP32.computed:
                    found.add(path)
                module.weight.neg_()
    assert {path for path in found if not re.search(UNUSED.get(name, "^$"), path)} == set()
    assert bool(found) is (name in UNUSED), "a model whose layers count now leaves the list"


BELOW = {
    **dict.fromkeys(("MambaForCausalLM", "FalconMambaForCausalLM"), (0.85, "conv1d", "dt_proj")),
    "RwkvForCausalLM": (0.7, "output", "value"),
    "SiglipForImageClassification": (0.85, "MultiheadAttention", "Siglip"),
    "ConvNextForImageClassification": (0.65, "Conv2d"),
    **dict.fromkeys(("Wav2Vec2ForCTC", "HubertForCTC", "WavLMForCTC"), (0.5, "Conv1d")),
    "WhisperForConditionalGeneration": (0.85, "Conv1d"),
    "Gemma3ForConditionalGeneration": (0.85, "MultiheadAttention"),
    "Mistral3ForConditionalGeneration": (0.85, "Conv2d"),
}
"""Models of which less than 90 % is served at this size: the least part, and what the table says of the rest."""


@pytest.mark.parametrize("name", ZOO)
def test_nearly_all_weights_are_served(name: str) -> None:
    """The convolutions of these small models are a larger part of them than in real ones."""
    shares = shares_of(name, *load(name))
    least, *reasons = BELOW.get(name, (0.9,))
    assert shares.served >= least, shares
    for reason in reasons:
        assert any(str(reason) in text for text in shares.unserved), shares.unserved
    assert (name in BELOW) is (shares.served < 0.9), "a model that is served now leaves the list"


@pytest.mark.parametrize("method", ["LoRA", "DoRA", "HRA", "DEFT", "AdaLoRA"])
async def test_bf16(method: str) -> None:
    name = "LlamaForCausalLM in bf16"
    cell = await try_cell(name, *load(name), method, "inproc")
    assert cell.verdict == EQUAL, cell


@pytest.mark.parametrize("method", ["LoRA", "DoRA", "HRA", "DEFT"])
async def test_bf16_is_as_close_to_fp32_as_in_plain_peft(method: str) -> None:
    """The methods whose limits in bf16 are wide round in other places, and no more than plain PEFT does."""
    narrow = load("LlamaForCausalLM")[0].bfloat16()
    wide = copy.deepcopy(narrow).float()  # the same weights
    config = METHODS[method]("CAUSAL_LM", wide)
    job = Job(steps=1, new_tokens=0)
    exact, plain = run_job_plain(wide, config, job), run_job_plain(narrow, config, job)
    async with symbiosis.Executor(narrow) as executor, executor.client(copy.deepcopy(config), seed=0) as client:
        ours = await run_job(client, job)

    def distance(found: Outcome, what: Callable[[Outcome], torch.Tensor]) -> float:
        return float((what(found) - what(exact)).norm() / what(exact).norm())

    def logits(outcome: Outcome) -> torch.Tensor:
        assert outcome.logits is not None
        return outcome.logits.double()

    def gradients(outcome: Outcome) -> torch.Tensor:
        return torch.cat([outcome.gradients[name].double().flatten() for name in sorted(outcome.gradients)])

    for what in (logits, gradients):
        assert 0 < distance(ours, what) < 1.25 * distance(plain, what) < 0.05


async def test_a_router_in_bf16_chooses_as_in_the_plain_model() -> None:
    name = "LongcatFlashForCausalLM in bf16"
    cell = await try_cell(name, *load(name), "LoRA", "inproc")
    assert cell.verdict == EQUAL, cell


async def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from symbiosis.executor.layers import LinearLayer

    def forward(self: Any, tensors: Any, **_: Any) -> torch.Tensor:
        return torch.nn.functional.linear(tensors[0], self.module.weight * 1.001)

    monkeypatch.setattr(LinearLayer, "forward", forward)
    cell = await try_cell("LlamaForCausalLM", *load("LlamaForCausalLM"), "LoRA", "inproc")
    assert cell.verdict == WRONG
    assert "tensors differ" in cell.detail


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("LlamaForCausalLM", "prefix tuning"),
        ("LlamaForCausalLM in bf16", "IA3"),
        ("LlamaForCausalLM in bitsandbytes NF4 with bf16", "LoRA"),
        ("LlamaForCausalLM in bitsandbytes int8", "LoRA"),
    ],
)
async def test_a_client_that_trains_nothing_is_found(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    async def only_forward(client: symbiosis.Client, batch: Any, _: torch.optim.Optimizer) -> float:
        loss: float = (await client.forward(**batch)).loss.item()
        return loss

    if "bitsandbytes" in name:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(symbiosis.Client, "train_step", only_forward)
    cell = await try_cell(name, *load(name), method, "inproc")
    assert cell.verdict == WRONG, cell
    assert cell.detail.endswith("what training changed differs by 1")


async def test_an_unexpected_error_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from symbiosis.executor.runner import Runner

    monkeypatch.setattr(Runner, "run_alone", lambda *_: 1 / 0)
    monkeypatch.setattr(Runner, "time", lambda *_: 1e-3)
    cell = await try_cell("LlamaForCausalLM", *load("LlamaForCausalLM"), "none", "inproc")
    assert cell.verdict == WRONG


@pytest.mark.parametrize("name", ["Wav2Vec2ForCTC", "HubertForCTC", "WavLMForCTC"])
async def test_adapters_of_speech_models_are_saved_and_loaded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also those with an adapted head, which PEFT saves with the model's embeddings unless told otherwise."""
    loaded = []
    load_adapter = symbiosis.Client.load_adapter
    monkeypatch.setattr(
        symbiosis.Client, "load_adapter", lambda *given, **options: loaded.append(load_adapter(*given, **options))
    )
    cell = await try_cell(name, *load(name), "LoRA", "inproc")
    assert cell.verdict == EQUAL, cell
    assert loaded == [None]


@pytest.mark.parametrize("step", ["run_job", "_save_and_load"])
@pytest.mark.parametrize(
    ("error", "verdict"),
    [(RequestError, WRONG), (ClientClosedError, WRONG), (CannotWaitError, WRONG), (PlaceholderError, REFUSED)],
)
async def test_an_executor_that_fails_a_client_it_has_accepted_is_wrong(
    monkeypatch: pytest.MonkeyPatch, step: str, error: type[Exception], verdict: str
) -> None:
    async def fail(*_: object) -> None:
        raise error("why")

    monkeypatch.setattr(f"symbiosis.testing.compat.{step}", fail)
    cell = await try_cell("LlamaForCausalLM", *load("LlamaForCausalLM"), "LoRA", "inproc")
    assert cell.verdict == verdict
    assert "why" in cell.detail


async def test_a_slow_model_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain job seems to take an hour, by a clock of its own."""
    limits: list[float | None] = []
    timeout = asyncio.timeout
    monkeypatch.setattr("symbiosis.testing.compat.monotonic", iter([0.0, 3600.0]).__next__)
    monkeypatch.setattr(asyncio, "timeout", lambda delay: limits.append(delay) or timeout(delay))
    cell = await try_cell("LlamaForCausalLM", *load("LlamaForCausalLM"), "none", "inproc")
    assert cell.verdict == EQUAL, cell
    assert 72000.0 in limits


async def test_a_client_that_hangs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("symbiosis.testing.compat.run_job", hang)
    monkeypatch.setattr("symbiosis.testing.compat.WITHIN_S", 0.0)
    monkeypatch.setattr("symbiosis.testing.compat.monotonic", iter([0.0, 0.01]).__next__)
    cell = await try_cell("LlamaForCausalLM", *load("LlamaForCausalLM"), "none", "inproc")
    assert cell.verdict == WRONG
    assert cell.detail == "the client did not finish within 0 s; the plain job took 0.0 s"


def test_unknown_models() -> None:
    with pytest.raises(UnknownNameError, match="the zoo has no model 'Nothing'; it has LlamaForCausalLM"):
        zoo_model("Nothing")
    result = command("compat", "./nowhere")
    assert result.exit_code == 1
    assert "./nowhere: no class of the table, and no model" in " ".join(result.output.split())


def test_the_command_with_a_model_of_ones_own(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "mine")
    options = ["--method", "LoRA", "--method", "PiSSA", "--transport", "inproc", "--json", str(tmp_path / "found.json")]
    result = command("compat", str(tmp_path / "mine"), *options)
    assert result.exit_code == 0, result.output
    assert "1 equal, 1 refused" in result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [cell["verdict"] for cell in found["cells"]] == [EQUAL, REFUSED]
    assert found["shares"][0]["served"] == 1.0
    assert found["shares"][0]["served_bytes"] > found["shares"][0]["held_bytes"] > 0
    assert "are served once for all tenants; " in result.output
    assert "are with each tenant" in result.output
    assert found["machine"]["cores"]


def small(name: str) -> Any:
    """Return a small random model of a class of transformers."""
    if name in ZOO:
        return zoo_model(name)
    if name.startswith("Wav2Vec2"):
        return getattr(transformers, name)(zoo_model("Wav2Vec2ForCTC").config)
    sizes = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.BertConfig(num_attention_heads=4, **sizes)
    return getattr(transformers, name)(config)


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("LlavaForConditionalGeneration", True),
        ("Wav2Vec2ForCTC", True),
        ("BertModel", True),
        ("BertForMaskedLM", True),
        ("BertForNextSentencePrediction", False),
        ("Wav2Vec2ForSequenceClassification", False),
    ],
)
def test_other_kinds_of_models_of_ones_own(tmp_path: Path, name: str, tried: bool) -> None:
    small(name).save_pretrained(tmp_path / "mine")
    result = command("compat", str(tmp_path / "mine"), "--method", "LoRA", "--transport", "inproc")
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())  # lines end elsewhere in a folder with a longer name
    assert "are served once for all tenants; " in output
    assert ("1 equal" in output) is tried
    assert ("compat has no inputs for it" in output) is not tried


async def test_frames_are_masked_alike() -> None:
    """In training, with numpy's random numbers."""
    model = zoo_model("Wav2Vec2ForCTC", mask_time_prob=0.3, mask_time_length=2)
    before = numpy.random.get_state()[1].copy()  # type: ignore[union-attr]
    cell = await try_cell("Wav2Vec2ForCTC", model, "wave", "LoRA", "inproc")
    assert cell.verdict == EQUAL, cell
    assert (numpy.random.get_state()[1] == before).all()


@pytest.mark.parametrize("what", ["config.json", "folder", "architecture"])
def test_the_command_with_a_configuration(tmp_path: Path, what: str) -> None:
    """There are no weights, so a random model of the configuration is tried."""
    config = tiny_model("llama").config
    config.architectures = ["LlamaForSequenceClassification"] if what == "architecture" else None
    config.save_pretrained(tmp_path)
    given = tmp_path / "config.json" if what == "config.json" else tmp_path
    result = command("compat", str(given), "--method", "LoRA", "--transport", "inproc")
    assert result.exit_code == 0, result.output
    assert "1 equal" in result.output


def test_sizes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """An executor serves a checkpoint in its own precision; the trial is in fp32."""
    model = tiny_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "weights")
    model.config.save_pretrained(tmp_path / "configuration")
    for what in ("weights", "configuration"):
        arguments = ("compat", str(tmp_path / what), "--method", "none", "--transport", "inproc")
        result = command(*arguments, "--json", str(tmp_path / "found.json"))
        assert result.exit_code == 0, result.output
        sizes = json.loads((tmp_path / "found.json").read_text())["shares"][0]
        assert sizes["served_bytes"] == symbiosis.Executor(copy.deepcopy(model)).sharing.served


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization (gptq) needs weights; give"),
        ({"num_hidden_layers": 1000, "hidden_size": 65536}, "lower num_hidden_layers"),
    ],
)
def test_configurations_that_cannot_be_tried(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    config = tiny_model("llama").config.to_dict() | options
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = command("compat", str(tmp_path), "--method", "LoRA")
    assert result.exit_code == 1
    assert complaint in " ".join(result.output.split())


def test_a_truncated_checkpoint(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    for arguments in (("compat", str(tmp_path)), ("serve", str(tmp_path), "--listen", f"shm://{tmp_path}/s")):
        result = command(*arguments)
        assert result.exit_code == 1
        assert "error: " in result.output
        assert "deserializing header" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("T5ForConditionalGeneration", {}),
        ("ViTForImageClassification", {"image_size": 32, "num_channels": 1}),
        ("WhisperForConditionalGeneration", {"num_mel_bins": 8, "max_source_positions": 12}),
    ],
)
async def test_models_of_ones_own_that_read_other_than_text(tmp_path: Path, name: str, options: Any) -> None:
    zoo_model(name, **options).save_pretrained(tmp_path)
    cell = await try_cell(str(tmp_path), *load(str(tmp_path)), "LoRA", "inproc")
    assert cell.verdict == EQUAL, cell.detail


@pytest.mark.parametrize("format_", ["bitsandbytes NF4", "bitsandbytes int8"])
async def test_a_quantized_checkpoint_of_ones_own(tmp_path: Path, format_: str) -> None:
    """Its limits are those of the format, and its layers are as trainable as those of the table."""
    pytest.importorskip("bitsandbytes")
    load(f"LlamaForCausalLM in {format_}")[0].save_pretrained(tmp_path)
    cell = await try_cell(str(tmp_path), *load(str(tmp_path)), "LoRA", "inproc")
    assert cell.verdict == EQUAL, cell.detail


@pytest.mark.parametrize("option", ["--method", "--transport"])
def test_wrong_options(option: str) -> None:
    result = command("compat", "LlamaForCausalLM", option, "magic")
    assert result.exit_code == 1
    assert f"{option} 'magic': choose from" in result.output


def test_the_page(tmp_path: Path) -> None:
    cells = [
        Cell("MixtralForCausalLM", "LoRA", "inproc", EQUAL, "0"),
        Cell("MixtralForCausalLM", "LoRA", "shm", REFUSED, "not here"),
        Cell("MixtralForCausalLM", "IA3", "inproc", WRONG, "7 of 9 tensors differ"),
        Cell("MixtralForCausalLM", "HRA", "inproc", REFUSED, "not here"),
        Cell("T5ForConditionalGeneration in bf16", "LoRA", "shm", EQUAL, "0"),
        Cell("LlamaForCausalLM in bitsandbytes int8", "LoRA", "shm", EQUAL, "0"),
        Cell("./bert", "LoRA", "shm", EQUAL, "0"),
    ]
    shares = [
        ServedPart("MixtralForCausalLM", "text", 0.5, 10, 20, ("half of it",)),
        ServedPart("T5ForConditionalGeneration in bf16", "pairs", 1.0, 10, 20, ()),
        ServedPart("LlamaForCausalLM in bitsandbytes int8", "text", 1.0, 10, 20, ()),
        ServedPart("./bert", "masked", 1.0, 10, 20, ()),
    ]
    write_page(tmp_path / "page.md", shares, cells)
    page = (tmp_path / "page.md").read_text()
    assert "## In bf16\n\nLogits, gradients and losses within 0.01 of the largest number, what training" in page
    assert "| T5ForConditionalGeneration | 100% |  | equal |  |  |" in page
    assert "Encoder" not in page
    assert "## Masked language models\n\n| model | served |" in page
    assert "| ./bert | 100% |  | equal |  |  |" in page
    assert "tokens are not compared. bitsandbytes rounds the rows of a batch to integers; the exec" in page
    assert "Of 7 cells, 4 are equal, 2 are refused, 0 are not in plain PEFT, 1 are wrong." in page
    assert "| MixtralForCausalLM | 50% (1) |  | equal; refused (2) | **wrong** (3) |  |" in page
    assert "| HRA | refused (2) |" in page
    assert "1. not served: half of it\n2. not here\n3. 7 of 9 tensors differ\n" in page


def test_models_are_tried_with_four_methods_and_two_with_all() -> None:
    assert cells_of("BertForQuestionAnswering", None, ["shm"]) == [(method, "shm") for method in BROAD]
    assert len(cells_of("LlamaForCausalLM", None, ["inproc", "shm"])) == 2 * len(METHODS)
    assert cells_of("LlamaForCausalLM", ["IA3"], ["shm"]) == [("IA3", "shm")]
