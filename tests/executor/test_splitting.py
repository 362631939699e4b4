"""The executor serves base layers, and a client gets all other modules. No weight is copied, and none of a base layer
reaches a client.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from symbiosis.client.requester import Requester
from symbiosis.client.skeleton import make_skeleton
from symbiosis.client.virtlayer import VirtConv1D, VirtLayer, VirtLinear
from symbiosis.errors import PlaceholderError, SplitError, UsageError
from symbiosis.executor.splitting import SplitModel
from symbiosis.testing import ARCHITECTURES, tiny_model

BLOCK = 7
"""Number of linear layers in a Llama block."""


def skeleton_of(split: SplitModel, link: Requester | None = None) -> Any:
    return make_skeleton(split.model, split.resident().layers, link or Requester(), split.device)


def names(model: Any, base_layers: Any) -> list[str]:
    return [spec.name for spec in SplitModel(model, base_layers).specs]


def test_linear_is_every_linear_layer(base: Any) -> None:
    found = names(base, "linear")
    assert len(found) == 2 * BLOCK + 1
    assert found[-1] == "lm_head"
    assert found[0] == "model.layers.0.self_attn.q_proj"


def test_mlp_adds_whole_mlps(base: Any) -> None:
    found = names(base, "mlp")
    assert set(found) - set(names(base, "linear")) == {"model.layers.0.mlp", "model.layers.1.mlp"}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("lm_head", ["lm_head"]),
        (["lm_head", "*.0.*.q_proj"], ["model.layers.0.self_attn.q_proj", "lm_head"]),
        ("*.q_proj", ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        (("*.1.mlp",), ["model.layers.1.mlp"]),
    ],
    ids=str,
)
def test_patterns(base: Any, patterns: Any, expected: list[str]) -> None:
    assert names(base, patterns) == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layer_table(architecture: str) -> None:
    """Indices follow the order in which the model defines its layers. Widths are those of the modules."""
    model = tiny_model(architecture)
    split = SplitModel(model)
    assert [spec.layer for spec in split.specs] == list(range(len(split.specs)))
    for spec in split.specs:
        module = model.get_submodule(spec.name)
        with torch.no_grad():
            y = module(torch.zeros(2, spec.in_features))
        assert y.shape == (2, spec.out_features)
        assert spec.bias == (module.bias is not None)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_skeleton_shares_memory_and_holds_no_base_weight(architecture: str, base_layers: str, tied: bool) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    split = SplitModel(model, base_layers)
    skeleton = skeleton_of(split)
    served = {id(layer.module) for layer in split.layers if layer.spec.linear}
    mine = {
        parameter.untyped_storage().data_ptr()
        for module in model.modules()
        if id(module) not in served
        for parameter in module.parameters(recurse=False)
    }
    for name, module in skeleton.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            original = model.get_submodule(name).get_parameter(key)
            assert parameter.shape == original.shape, name
            assert parameter.dtype is original.dtype
            if isinstance(module, VirtLayer) and key == "weight" and parameter.is_placeholder:
                assert torch.isnan(parameter).all()
                assert parameter.untyped_storage().nbytes() <= 8
            else:
                assert parameter.untyped_storage().data_ptr() == original.untyped_storage().data_ptr(), name
                assert torch.equal(parameter, original)
                if not isinstance(module, VirtLayer):
                    assert parameter.untyped_storage().data_ptr() in mine
    for name, buffer in skeleton.named_buffers():
        original = model.get_buffer(name)
        assert buffer.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
        assert torch.equal(buffer, original)
    assert sum(isinstance(module, VirtLayer) for module in skeleton.modules()) == len(split.layers)
    assert type(skeleton).__name__ == type(model).__name__


def test_virt_layers_resemble_the_layers_that_they_replace() -> None:
    llama = skeleton_of(SplitModel(tiny_model("llama")))
    gpt2 = skeleton_of(SplitModel(tiny_model("gpt2")))
    assert isinstance(llama.lm_head, nn.Linear)
    assert isinstance(llama.lm_head, VirtLinear)
    assert isinstance(gpt2.transformer.h[0].attn.c_attn, VirtConv1D)
    mlp = skeleton_of(SplitModel(tiny_model("llama"), "mlp")).model.layers[0].mlp
    assert isinstance(mlp, type(tiny_model("llama").model.layers[0].mlp))
    assert isinstance(mlp, VirtLayer)


def test_two_skeletons_are_independent(base: Any) -> None:
    split = SplitModel(base)
    one, two = skeleton_of(split), skeleton_of(split)
    one.model.norm.weight.requires_grad_(True)
    with torch.no_grad():
        one.model.norm.weight.fill_(7)
    assert not torch.equal(two.model.norm.weight, one.model.norm.weight)
    assert torch.equal(two.model.norm.weight, base.model.norm.weight)
    assert one.config is not base.config
    one.generation_config.max_length = 5
    assert two.generation_config.max_length != 5


@pytest.mark.parametrize(
    ("base_layers", "error", "complaint"),
    [
        ("*.nowhere", SplitError, r"no module matches '\*\.nowhere'.*model\.layers\.0\.self_attn\.q_proj"),
        (["lm_head", "nope"], SplitError, "no module matches 'nope'"),
        ("model.norm", SplitError, "model.norm.*no linear layer inside"),
        ("model.layers.0", SplitError, "model.layers.0.*cannot be served whole"),
        ([], UsageError, r"base_layers is \[\]"),
        ("", UsageError, "base_layers is ''"),
        ([3], UsageError, r"base_layers is \[3\]"),
    ],
    ids=str,
)
def test_bad_choices(base: Any, base_layers: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        SplitModel(base, base_layers)


def test_a_model_without_base_layers() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))
    for base_layers in ("linear", "mlp"):
        with pytest.raises(SplitError, match=r"Sequential has no base layers to serve.*nn\.Linear"):
            SplitModel(model, base_layers)


def test_a_skeleton_cannot_be_saved(base: Any, tmp_path: Any) -> None:
    skeleton: Any = skeleton_of(SplitModel(base))
    for method in ("save_pretrained", "push_to_hub"):
        with pytest.raises(PlaceholderError, match=r"client\.save_adapter"):
            getattr(skeleton, method)(str(tmp_path))
    assert not list(tmp_path.iterdir())
    base.save_pretrained(str(tmp_path))  # the provider's own model can still be saved


def test_layers_inside_a_whole_module_are_served_too(base: Any) -> None:
    """With "mlp", the executor also serves the linear layers inside an MLP, to tenants with an adapter there."""
    inside = [name for name in names(base, "mlp") if ".mlp." in name]
    assert len(inside) == 6


def test_shared_modules_are_served_once() -> None:
    """One module under two names is one base layer."""
    linear = nn.Linear(4, 4)
    model = nn.Sequential(linear, nn.ReLU(), linear)
    split = SplitModel(model)
    assert len(split.specs) == 1
    skeleton = skeleton_of(split)
    assert skeleton[0] is skeleton[2]
    assert copy.deepcopy(skeleton)[0] is not skeleton[0]


def test_layers_of_every_walk(base: Any) -> None:
    linear = SplitModel(base, "linear")
    assert linear.token_layers() == list(range(2 * BLOCK + 1))
    whole = SplitModel(base, "mlp")
    names_ = [whole.specs[layer].name for layer in whole.token_layers()]
    assert len(names_) == 2 * 5 + 1
    assert "model.layers.0.mlp" in names_
    assert "model.layers.0.mlp.gate_proj" not in names_


def test_layers_of_every_walk_are_unknown_for_another_model() -> None:
    assert SplitModel(nn.Sequential(nn.Linear(2, 2))).token_layers() == []


def test_a_device_has_the_number_that_its_tensors_have() -> None:
    """Rows are compared with it: torch.device("cuda") is not torch.device("cuda:0"), as with cpu:0 and cpu."""
    split = SplitModel(tiny_model(), layers="0", device="cpu:0")
    assert {parameter.device for parameter in split.layers[0].module.parameters()} == {split.device}
