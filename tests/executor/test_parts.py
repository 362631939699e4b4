"""Parts of base layers: together they compute what the whole layer computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.core.requests import Key, Pass, Results
from symbiosis.errors import SplitError
from symbiosis.executor.layers import BaseLayer, base_layer
from symbiosis.executor.parts import Cut, part_of, range_of
from symbiosis.executor.splitting import SplitModel
from symbiosis.testing import tiny_model
from tests.helpers import examples
from tests.moe import MIXTURES, mixture

CPU = torch.device("cpu")


def parts_of(layer: BaseLayer, count: int) -> list[BaseLayer]:
    return [part_of(layer, rank, count, CPU, layer.spec.dtype) for rank in range(count)]


def divided(layer: BaseLayer, key: Key, tensors: Results, count: int) -> Results:
    """Return the results of all parts together, each from what its shard is sent."""
    cut, results = Cut([layer.spec], count), []
    for rank, part in enumerate(parts_of(layer, count)):
        call, shapes = cut.call(key, tensors, rank), cut.shapes(key, rank)
        assert shapes.rows(call) == len(tensors[0])
        found = part.run(key, call)
        assert [(one.shape[1], one.dtype) for one in found] == list(shapes.answer)
        results.append(found)
    return cut.together(key, results)


@given(size=st.integers(1, 100), count=st.integers(1, 20))
def test_ranges_are_even_and_leave_nothing_out(size: int, count: int) -> None:
    ranges = [range_of(size, rank, count) for rank in range(count)]
    assert [number for one in ranges for number in range(one.start, one.stop)] == list(range(size))
    sizes = {one.stop - one.start for one in ranges}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", ["linear", "conv", "falcon"])
def test_linear_layers(kind: str) -> None:
    """Every pass, for any number of parts, rows and features, in fp32 and bf16."""

    @examples_of(30)
    def check(o: int, i: int, rows: int, count: int, bias: bool, narrow: bool) -> None:
        count = min(count, o)
        dtype = torch.bfloat16 if narrow else torch.float32
        module: Any = Conv1D(o, i) if kind == "conv" else nn.Linear(i, o, bias=bias)
        if kind == "falcon":
            from transformers.models.falcon.modeling_falcon import FalconLinear

            module = FalconLinear(i, o, bias=bias)
        layer = base_layer(0, "layer", module.to(dtype))
        close = {"rtol": 2e-2, "atol": 2e-2} if narrow else {"rtol": 1e-5, "atol": 1e-5}
        for pass_ in Pass:
            for fp32 in (False, True):
                rows_of = torch.randn(rows, o if pass_.is_backward else i)
                call = (rows_of.to(torch.float32 if fp32 else dtype),)
                key = Key((0,), pass_, fp32)
                with torch.no_grad():
                    (found,), (whole,) = divided(layer, key, call, count), layer.run(key, call)
                torch.testing.assert_close(found, whole, **close)

    check()


def examples_of(most: int) -> Any:
    from hypothesis import settings

    def decorate(check: Any) -> Any:
        sizes = {
            "o": st.integers(1, 40),
            "i": st.integers(1, 40),
            "rows": st.integers(1, 9),
            "count": st.integers(1, 5),
        }
        return settings(max_examples=examples(most))(given(**sizes, bias=st.booleans(), narrow=st.booleans())(check))

    return decorate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(MIXTURES.keys() - {"dbrx"}))
def test_banks_of_experts(name: str, count: int, dtype: torch.dtype) -> None:
    """Each part has some of the experts; rows whose experts are all elsewhere give zeros."""
    bank = next(layer for layer in SplitModel(mixture(name, dtype=dtype)).layers if layer.spec.experts)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 7, bank.spec.in_features, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(bank.spec.experts, generator=generator)[: bank.spec.choices] for _ in x])
    chosen[3:] = chosen[3:4]
    chosen[0, 0], chosen[1, 0] = -5, 99  # as in a whole bank, these count for the nearest
    weights = torch.rand(chosen.shape, generator=generator)
    for pass_, call in ((Pass.FORWARD, (x, chosen, weights)), (Pass.BACKWARD, (x, chosen, weights, dy))):
        key = Key((0,), pass_, True, chosen.shape[1])
        with torch.no_grad():
            bank.spec = bank.spec._replace(layer=0)
            found, whole = divided(bank, key, call, count), bank.run(key, call)
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(found, whole, **close)


def test_all_of_a_banks_rows_may_be_elsewhere() -> None:
    bank = next(layer for layer in SplitModel(mixture("mixtral")).layers if layer.spec.experts)
    part = part_of(bank, 1, 2, CPU, torch.float32)
    x, chosen, weights = torch.randn(3, bank.spec.in_features), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    key = Key((0,), Pass.FORWARD, True, 1)
    assert not part.run(key, (x, chosen, weights))[0].any()
    assert not any(one.any() for one in part.run(key._replace(pass_=Pass.BACKWARD), (x, chosen, weights, x)))


@pytest.mark.parametrize(
    ("model", "base_layers", "complaint"),
    [
        (lambda: tiny_model(), "mlp", r"mlp \(LlamaMLP\) cannot be divided among shards: it is served whole"),
        (lambda: mixture("dbrx"), "linear", r"\(DbrxExperts\) cannot be divided: its parameters have no dimension"),
    ],
    ids=["mlp", "dbrx"],
)
def test_what_cannot_be_divided(model: Any, base_layers: str, complaint: str) -> None:
    with pytest.raises(SplitError, match=complaint):
        SplitModel(model(), base_layers, shard=(0, 2))


def test_a_layer_needs_an_output_or_an_input_for_each_part() -> None:
    """A gate of one output lies in one part."""
    gate = base_layer(0, "gate", nn.Linear(8, 1))
    assert [part_of(gate, rank, 4, CPU, torch.float32).spec.out_features for rank in range(4)] == [0, 0, 0, 1]
    with pytest.raises(SplitError, match=r"has 3 outputs; use fewer shards"):
        part_of(base_layer(0, "score", nn.Linear(3, 3)), 0, 4, CPU, torch.float32)
