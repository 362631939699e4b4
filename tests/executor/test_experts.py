"""Banks of experts: forward and backward passes compared with autograd, rows apart and together, hostile calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from symbiosis.core.requests import Batch, Call, Columns, Key, LayerSpec, Pass, Request, Slice, expected
from symbiosis.core.terms import Kind
from symbiosis.errors import RequestError, SplitError
from symbiosis.executor import experts
from symbiosis.executor.experts import is_bank
from symbiosis.executor.layers import BaseLayer, base_layer
from symbiosis.executor.runner import Runner
from symbiosis.executor.splitting import SplitModel
from tests.moe import MIXTURES, mixture

WIDTH, EXPERTS = 32, 4


def bank_of(name: str, dtype: torch.dtype = torch.float32) -> BaseLayer:
    split = SplitModel(mixture(name, dtype=dtype))
    return next(layer for layer in split.layers if layer.spec.experts)


def routing(rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(rows)])
    return chosen, torch.rand(rows, k, generator=generator).to(dtype)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_has_a_bank_in_each_block(name: str) -> None:
    model = mixture(name)
    split = SplitModel(model)
    banks = [spec for spec in split.specs if spec.experts]
    assert {(spec.in_features, spec.out_features, spec.experts, spec.linear) for spec in banks} == {
        (WIDTH, WIDTH, EXPERTS, False)
    }
    fused = {name for name, module in model.named_modules() if name.endswith("experts") and list(module.parameters())}
    assert {spec.name for spec in banks} == fused - {name for name in fused if "shared" in name}


@pytest.mark.parametrize("weights_in_fp32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_forward_and_backward(name: str, dtype: torch.dtype, weights_in_fp32: bool) -> None:
    """Results and gradients are bit-equal to the module's."""
    bank = bank_of(name, dtype)
    key = Key((bank.spec.layer,), Pass.FORWARD, weights_in_fp32, 2)
    x, dy = torch.randn(6, WIDTH, dtype=dtype), torch.randn(6, WIDTH, dtype=dtype)
    chosen, weights = routing(6, 2, torch.float32 if weights_in_fp32 else dtype)
    x.requires_grad_()
    weights.requires_grad_()
    y = bank.module(x, chosen, weights)
    wanted = torch.autograd.grad(y, (x, weights), dy)
    sent = (x.detach(), chosen, weights.detach())
    with torch.no_grad():
        (result,) = bank.run(key, sent)
        gradients = bank.run(key._replace(pass_=Pass.BACKWARD), (*sent, dy))
    assert torch.equal(result, y)
    assert all(torch.equal(one, other) for one, other in zip(gradients, wanted, strict=True))
    due = expected([bank.spec._replace(layer=0)], key._replace(layers=(0,), pass_=Pass.BACKWARD))
    assert due.rows((*sent, dy)) == 6
    assert due.answer == (Columns(WIDTH, dtype), Columns(2, weights.dtype))


def test_a_bank_that_takes_rows_by_place() -> None:
    """Llama 4 calls its bank with a row for each token and expert, most of them zero."""
    bank = bank_of("llama4")
    tokens, key = 5, Key((bank.spec.layer,), Pass.FORWARD, choices=1)
    x = torch.randn(tokens, WIDTH)
    chosen = torch.tensor([[0], [3], [3], [1], [3]])
    grid = torch.zeros(EXPERTS, tokens, WIDTH)
    grid[chosen[:, 0], torch.arange(tokens)] = x
    with torch.no_grad():
        wanted = bank.module(grid.view(-1, WIDTH)).view(EXPERTS, tokens, WIDTH)[chosen[:, 0], torch.arange(tokens)]
        (result,) = bank.run(key, (x, chosen, torch.ones(tokens, 1)))
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mixtral", "llama4"])
def test_rows_of_several_clients_in_slices(name: str) -> None:
    """Each request gets what it gets alone, however requests are cut and merged."""
    bank = bank_of(name)
    runner, k = Runner([bank]), 1 if name == "llama4" else 2
    for pass_ in (Pass.FORWARD, Pass.BACKWARD):
        key = Key((0,), pass_, choices=k)
        calls = []
        for seed, rows in enumerate((3, 5, 1)):
            tensors = (torch.randn(rows, WIDTH), *routing(rows, k, torch.float32, seed))
            calls.append(
                Call(key, Kind.FINETUNE, (*tensors, torch.randn(rows, WIDTH)) if pass_ is Pass.BACKWARD else tensors)
            )
        alone = [runner.run_alone(call) for call in calls]
        requests = [Request(i, f"client{i}", key, len(c.tensors[0]), Kind.FINETUNE, 0.0) for i, c in enumerate(calls)]
        for parts in ([(0, 0, 2), (1, 0, 4)], [(0, 2, 3), (1, 4, 5), (2, 0, 1)]):
            slices = [Slice(requests[i], start, stop) for i, start, stop in parts]
            runner.run(Batch(key, slices, "test", 6), [calls[i] for i, _, _ in parts])
        for call, wanted in zip(calls, alone, strict=True):
            assert call.results is not None
            for one, other in zip(call.results, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pass_", [Pass.FORWARD, Pass.BACKWARD])
def test_rows_with_many_choices_go_through_a_bank_in_parts(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = bank_of("mixtral")
    x, (chosen, weights) = torch.randn(9, WIDTH), routing(9, EXPERTS, torch.float32)
    tensors = (x, chosen, weights, torch.randn(9, WIDTH)) if pass_ is Pass.BACKWARD else (x, chosen, weights)
    call = Call(Key((0,), pass_, choices=EXPERTS), Kind.FINETUNE, tensors)
    whole = Runner([bank]).run_alone(call)
    rows: list[int] = []
    run = bank.run
    monkeypatch.setattr(bank, "run", lambda key, part: (rows.append(len(part[0])), run(key, part))[1])
    parts = Runner([bank], max_rows=2).run_alone(call)
    assert rows == [4, 4, 1], f"at most 2 · 8 rows, each counted {EXPERTS} times"
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_table_says_how_many_experts_a_row_has(name: str) -> None:
    assert bank_of(name).spec.choices == (1 if name == "llama4" else 2)


def test_a_grid_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all rows are for one expert, a grid with a place for each would have as many times the rows as experts."""
    bank = bank_of("llama4")
    rows: list[int] = []
    forward = type(bank.module).forward

    def counted(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_states))
        return forward(self, hidden_states)

    x, weights, key = torch.randn(90, WIDTH), torch.ones(90, 1), Key((bank.spec.layer,), Pass.FORWARD, choices=1)
    chosen = torch.cat([torch.zeros(80, 1, dtype=torch.long), torch.full((10, 1), 3)])
    with torch.no_grad():
        (wanted,) = bank.run(key, (x, chosen, weights))
        monkeypatch.setattr(type(bank.module), "forward", counted)
        monkeypatch.setattr(experts, "_MOST", 1)
        (found,) = bank.run(key, (x, chosen, weights))
    assert len(rows) > 1
    assert max(rows) <= 90
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_numbers_of_experts_that_do_not_exist_reach_no_memory() -> None:
    bank = bank_of("mixtral")
    x, weights = torch.randn(2, WIDTH), torch.ones(2, 1)
    key = Key((bank.spec.layer,), Pass.FORWARD, choices=1)
    with torch.no_grad():
        (hostile,) = bank.run(key, (x, torch.tensor([[1 << 62], [-(1 << 62)]]), weights))
        (nearest,) = bank.run(key, (x, torch.tensor([[EXPERTS - 1], [0]]), weights))
    assert torch.equal(hostile, nearest)


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        (Key((1,), Pass.FORWARD), "0 choices of experts for bank; each row goes through 1 to 2"),
        (Key((1,), Pass.FORWARD, choices=3), "3 choices of experts for bank"),
        (Key((0,), Pass.FORWARD, choices=1), "1 choices of experts for linear; only a bank"),
        (Key((0, 1), Pass.FORWARD, choices=1), "1 choices of experts for linear, bank"),
        (Key((1,), Pass.FORWARD_WITHOUT_BIAS, choices=1), "no single bias"),
    ],
    ids=str,
)
def test_keys_that_no_bank_has(key: Key, complaint: str) -> None:
    linear = LayerSpec(0, "linear", 8, 8, torch.float32, False, True)
    bank = LayerSpec(1, "bank", 8, 8, torch.float32, False, False, EXPERTS, 2)
    with pytest.raises(RequestError, match=complaint):
        expected([linear, bank], key)


class Mixing(nn.Module):
    """Has the interface of a bank, and mixes rows."""

    num_experts = EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8, 8))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        return hidden_states - hidden_states.mean(0)


class Narrow(Mixing):
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        return hidden_states.view(-1, 3, 5)


@pytest.mark.parametrize(
    ("module", "complaint"), [(Mixing(), "depend on one another"), (Narrow(), "does not run on rows")]
)
def test_modules_that_are_no_banks_stay_with_the_client(module: nn.Module, complaint: str) -> None:
    assert is_bank(module)
    with pytest.raises(SplitError, match=f"bank .*{complaint}"):
        base_layer(0, "bank", module)
    model = nn.Sequential(nn.Linear(8, 8), module)
    split = SplitModel(model)
    assert [spec.name for spec in split.specs] == ["0"]
    assert complaint in split.left_out["1"]


@pytest.mark.parametrize(
    "config", ["MixtralConfig", "OlmoeConfig", "GptOssConfig", "Qwen3MoeConfig", "DeepseekV3Config"]
)
def test_nearly_all_weights_of_real_sizes_are_served(config: str) -> None:
    """At least 95 %, counted on the meta device."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)())
    total = sum(parameter.numel() for parameter in model.parameters())
    served = sum(
        parameter.numel()
        for module in model.modules()
        if is_bank(module) or type(module) is nn.Linear
        for parameter in module.parameters()
    )
    assert served >= 0.95 * total
