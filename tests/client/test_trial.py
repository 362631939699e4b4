"""Layers whose weights the model's own code reads are found before the model is served, and stay with the clients."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

import symbiosis
from symbiosis.client.trial import READS, weights_read
from symbiosis.executor.splitting import SplitModel
from symbiosis.testing import Job, compare, tiny_model
from symbiosis.testing.zoo import ZOO, zoo_inputs, zoo_model
from tests.helpers import IDS


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("MambaForCausalLM", {"backbone.layers.*.mixer.dt_proj"}),
        ("JambaForCausalLM", {"model.layers.*.mamba.dt_proj"}),
        ("RwkvForCausalLM", {"rwkv.blocks.*.attention.output", "rwkv.blocks.*.feed_forward.value"}),
        ("WavLMForCTC", {"wavlm.encoder.layers.*.attention.out_proj"}),
        ("WhisperForConditionalGeneration", set()),
        ("LlamaForCausalLM", set()),
        ("MixtralForCausalLM", set()),
        ("T5ForConditionalGeneration", set()),
    ],
)
def test_layers_of_real_models(name: str, reads: set[str]) -> None:
    model = zoo_model(name)
    found = weights_read(SplitModel(model).resident())
    linear = {layer for layer, module in model.named_modules() if type(module) is nn.Linear}
    assert set(found) == {layer for layer in linear if re.sub(r"\d+", "*", layer) in reads}
    assert {re.sub(r"\d+", "*", layer) for layer in found} == reads
    split = SplitModel(model, trial=weights_read)
    assert split.left_out == dict.fromkeys(found, READS)
    assert [spec.layer for spec in split.specs] == list(range(len(split.layers)))
    assert not found.keys() & {spec.name for spec in split.specs}


async def test_such_models_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        comparison = await compare(zoo_model("MambaForCausalLM"), None, Job(steps=0, new_tokens=4))
    assert comparison.bit_equal, comparison
    assert f"not served: backbone.layers.0.mixer.dt_proj, backbone.layers.1.mixer.dt_proj ({READS})" in caplog.text


async def test_attention_of_torch_reads_its_weights(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = zoo_model("SiglipForImageClassification")
    inputs = zoo_inputs(model, ZOO["SiglipForImageClassification"].reads, 0)
    async with symbiosis.Executor(model) as executor, executor.client() as client:
        (unserved,) = [one for one in executor.sharing.unserved if one.name.endswith("out_proj.weight")]
        assert unserved.reason == "nn.MultiheadAttention reads its weight"
        assert f"{unserved.name.removesuffix('.weight')} ({unserved.reason})" in caplog.text
        with torch.no_grad():
            assert torch.equal((await client.forward(**inputs)).logits, model(**inputs).logits)


def test_the_trial_changes_nothing() -> None:
    """Neither the model, nor torch's random numbers."""
    model = tiny_model()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = torch.get_rng_state()
    weights_read(SplitModel(model).resident())
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.linear.weight.exp()


def test_a_model_without_a_known_input_is_not_tried() -> None:
    assert weights_read(SplitModel(Unknown()).resident()) == {}


@pytest.mark.parametrize(
    "name", ["LlamaForSequenceClassification", "BertForQuestionAnswering", "RobertaForSequenceClassification"]
)
def test_heads_stay_with_the_tenants(name: str) -> None:
    model = zoo_model(name)
    split = SplitModel(model)
    heads = {layer for layer in split.left_out if split.left_out[layer].endswith("is the tenant's")}
    assert heads
    assert all(layer.startswith(("score", "classifier", "qa_outputs")) for layer in heads)
    assert not any(spec.name.startswith(("score", "classifier", "qa_outputs")) for spec in split.specs)
    assert {spec.name for spec in SplitModel(model, sorted(heads)).specs} == heads, "unless they are asked for"


async def test_a_head_is_trained_over_every_transport(tmp_path: Any) -> None:
    from peft import LoraConfig

    model = zoo_model("LlamaForSequenceClassification")
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    async with symbiosis.Executor(model) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base, base.client(config) as client:
            optimizer = torch.optim.AdamW([p for p in client.model.parameters() if p.requires_grad], lr=0.05)
            batch = {"input_ids": IDS, "labels": torch.tensor([0, 1])}
            losses = [await client.train_step(batch, optimizer) for _ in range(5)]
            assert losses[-1] < losses[0]
            assert any("score" in name for name, p in client.model.named_parameters() if p.requires_grad)


class Reading(nn.Module):
    """A part of a model that reads the weight of its first layer, and calls the second."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(x) * self.fc1.weight.abs().mean()


def test_only_layers_of_the_same_name_are_left_out() -> None:
    model, calls = tiny_model(), []
    for layer in model.model.layers:
        layer.mlp = Reading()
    model.model.norm.register_forward_hook(lambda *_: calls.append(1))
    found = weights_read(SplitModel(model).resident())
    assert set(found) == {"model.layers.0.mlp.fc1", "model.layers.1.mlp.fc1"}
    assert not calls, "hooks of the model's owner are not called"


def test_models_inside_are_tried_with_inputs_of_their_own() -> None:
    """Text alone does not walk the vision tower of a model that reads images too."""
    model = zoo_model("LlavaForConditionalGeneration")
    for name, _ in list(model.named_modules()):
        if "vision_tower" in name and name.endswith("mlp"):
            model.set_submodule(name, Reading())
    found = weights_read(SplitModel(model).resident())
    assert {re.sub(r"\.\d+\.", ".*.", name.partition("encoder.")[2]) for name in found} == {"layers.*.mlp.fc1"}
