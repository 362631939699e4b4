"""Fingerprints by which executors, replicas and tenants recognize a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import symbiosis
from symbiosis.core.requests import LayerSpec
from symbiosis.executor.fingerprint import layer_fingerprints, weights_fingerprint
from symbiosis.testing import tiny_model
from symbiosis.testing.formats import FORMATS, model_in


def described(model: nn.Module) -> dict[str, object]:
    return dict(symbiosis.Executor(model).service.share().description)


def test_each_layer_has_a_fingerprint_of_its_own() -> None:
    model, changed = tiny_model(), tiny_model()
    with torch.no_grad():
        changed.get_submodule("model.layers.1.mlp.up_proj").weight[-1, -1] += 1
    one, other = described(model), described(changed)
    names = [layer[1] for layer in one["layers"]]  # type: ignore[attr-defined]
    differ = [
        name
        for name, *pair in zip(names, one["layer_weights"], other["layer_weights"], strict=True)
        if len(set(pair)) > 1
    ]
    assert differ == ["model.layers.1.mlp.up_proj"]
    assert one["weights"] != other["weights"]
    assert one["fingerprint"] != other["fingerprint"]


def test_what_tenants_hold_is_part_of_the_fingerprint() -> None:
    model, changed = tiny_model(), tiny_model()
    with torch.no_grad():
        changed.get_submodule("model.norm").weight[0] += 1
    one, other = described(model), described(changed)
    assert one["weights"] == other["weights"]
    assert one["fingerprint"] != other["fingerprint"]


def test_another_version_of_transformers_serves_the_same_model() -> None:
    model = tiny_model()
    model.config.transformers_version = model.generation_config.transformers_version = "4.0.0"
    assert described(model)["fingerprint"] == described(tiny_model())["fingerprint"]


def test_nf4_weights_in_another_dtype_are_others() -> None:
    """Their codes and scales are the same, but dequantized numbers are rounded to the dtype."""
    model, other = (model_in("LlamaForCausalLM", FORMATS["bitsandbytes NF4"]) for _ in range(2))
    assert described(model)["weights"] == described(other)["weights"]
    other.get_submodule("model.layers.1.mlp.up_proj").weight.quant_state.dtype = torch.bfloat16
    assert described(model)["weights"] != described(other)["weights"]


def _int8_scales(weight: Any) -> torch.Tensor:
    return weight.SCB


def _offset_of_scales(weight: Any) -> torch.Tensor:
    return weight.quant_state.offset


def _scales_of_scales(weight: Any) -> torch.Tensor:
    return weight.quant_state.state2.absmax


@pytest.mark.parametrize(
    ("format_", "part"),
    [
        ("bitsandbytes int8", _int8_scales),
        ("bitsandbytes NF4 with bf16", _offset_of_scales),
        ("bitsandbytes NF4 with bf16", _scales_of_scales),
    ],
)
def test_other_scales_are_another_model(format_: str, part: Callable[[Any], torch.Tensor]) -> None:
    """Codes may be the same, as after IA3 was merged."""
    model, other = (model_in("LlamaForCausalLM", FORMATS[format_]) for _ in range(2))
    assert described(model)["weights"] == described(other)["weights"]
    part(other.get_submodule("model.layers.1.mlp.up_proj").weight).mul_(2)
    assert described(model)["weights"] != described(other)["weights"]


def test_a_forward_pass_changes_no_fingerprint() -> None:
    """bitsandbytes keeps its scales elsewhere then."""
    model = model_in("LlamaForCausalLM", FORMATS["bitsandbytes int8"])
    before = described(model)
    model(input_ids=torch.arange(9)[None])
    assert model.model.layers[1].mlp.up_proj.weight.SCB is None
    assert described(model) == before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell mapped memory")
def test_a_mapped_file_is_not_read_whole(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(8192, 4096, dtype=torch.bfloat16)}, tmp_path / "weights.safetensors")

    def mapped() -> int:
        found = re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    module = nn.Linear(4096, 8192, bias=False, device="meta", dtype=torch.bfloat16)
    module.weight = nn.Parameter(load_file(tmp_path / "weights.safetensors")["weight"], requires_grad=False)
    spec = LayerSpec(0, "layer", 4096, 8192, torch.bfloat16, False, True, 0, 0)
    weights_fingerprint([])
    before = mapped()
    layer_fingerprints([(spec, module)])
    assert mapped() - before < 20 << 20, "eight pages are read, and the kernel may map up to 2 MiB around each"
    module.weight.sum()
    assert mapped() - before > 60 << 20, "the measurement finds pages that are read"
