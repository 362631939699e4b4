"""Base layers: forward and backward passes compared with autograd, and modules that cannot be base layers."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from symbiosis.core.requests import Key, LayerSpec, Pass, expected
from symbiosis.errors import RequestError, SplitError
from symbiosis.executor import fp32_products
from symbiosis.executor.layers import base_layer, is_linear
from symbiosis.executor.packing import pack


def conv(out_features: int, in_features: int) -> Conv1D:
    layer = Conv1D(out_features, in_features)
    nn.init.normal_(layer.bias)
    return layer


def only(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (result,) = results
    return result


MODULES = {
    "linear": lambda: nn.Linear(5, 7),
    "linear-no-bias": lambda: nn.Linear(5, 7, bias=False),
    "conv1d": lambda: conv(7, 5),
    "mlp": lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_norms(kind: str, dtype: torch.dtype) -> None:
    module = MODULES[kind]().to(dtype).requires_grad_(False)
    layer = base_layer(0, "name", module)
    wanted = module.weight.double().norm(dim=1 if kind == "linear" else 0)
    for fp32 in (False, dtype is torch.bfloat16):
        key = Key((0,), Pass.NORMS, fp32)
        rows = torch.full((3, 5), torch.nan, dtype=torch.float32 if fp32 else dtype)
        assert expected([layer.spec], key).rows([rows]) == 3
        got = only(layer.run(key, (rows,)))
        assert got.dtype is rows.dtype
        torch.testing.assert_close(
            got.double(), wanted.expand(3, 7), rtol=1e-2 if got.dtype is torch.bfloat16 else 1e-6, atol=0
        )


@pytest.mark.parametrize("kind", ["linear", "conv1d", "packed"])
def test_norms_are_computed_part_by_part(kind: str) -> None:
    """torch converts a whole matrix to fp32 before it computes norms. A head of 2 GiB would take 4 more for one row."""

    class Parts(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.linalg_vector_norm.out:
                self.largest = max(self.largest, args[0].numel())
            return func(*args, **(kwargs or {}))

    module: Any = (conv if kind == "conv1d" else nn.Linear)(2000, 1000).to(torch.bfloat16).requires_grad_(False)
    wanted = module.weight.double().norm(dim=0 if kind == "conv1d" else 1)
    if kind == "packed" and not pack(module, [module]):
        pytest.skip("weights in bf16 are not packed on this CPU")
    layer = base_layer(0, "name", module)
    with Parts() as parts:
        got = only(layer.run(Key((0,), Pass.NORMS, True), (torch.zeros(1, layer.spec.in_features),)))
    torch.testing.assert_close(got[0].double(), wanted, rtol=1e-5, atol=0)
    assert 0 < parts.largest <= fp32_products._BLOCK


def test_a_layer_that_is_served_whole_has_no_norms() -> None:
    layer = base_layer(0, "name", MODULES["mlp"]())
    with pytest.raises(RequestError, match="served whole; it has no single bias or weight"):
        expected([layer.spec], Key((0,), Pass.NORMS))
    with pytest.raises(SplitError, match="is not linear"):
        layer.run(Key((0,), Pass.NORMS), (torch.zeros(1, 5),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", MODULES)
def test_forward_and_backward(kind: str, dtype: torch.dtype) -> None:
    """Results are bit-equal to those of the module on a matrix of rows, and to its gradient."""
    module = MODULES[kind]().to(dtype).requires_grad_(False)
    layer = base_layer(3, "name", module)
    assert layer.spec == LayerSpec(3, "name", 5, 7, dtype, kind in ("linear", "conv1d"), kind != "mlp")
    x, dy = torch.randn(4, 5, dtype=dtype), torch.randn(4, 7, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(only(layer.run(Key((0,), Pass.FORWARD), (x,))), module(x))
    needs_grad = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(module(needs_grad), needs_grad, dy)
    with torch.no_grad():
        got = only(layer.run(Key((0,), Pass.BACKWARD), (dy,) if layer.spec.linear else (x, dy)))
    assert torch.equal(got, dx)
    assert not got.requires_grad
    if layer.spec.linear:
        bias = module.bias if module.bias is not None else torch.zeros(7, dtype=dtype)
        with torch.no_grad():
            without = only(layer.run(Key((0,), Pass.FORWARD_WITHOUT_BIAS), (x,))) + bias
        torch.testing.assert_close(
            without, only(layer.run(Key((0,), Pass.FORWARD), (x,))), atol=4 * torch.finfo(dtype).eps, rtol=0.02
        )
    else:
        with pytest.raises(SplitError, match="name is served whole"):
            layer.run(Key((0,), Pass.FORWARD_WITHOUT_BIAS), (x,))
    assert "5 → 7" in repr(layer)


class RoundsFirst(nn.Linear):
    """Rounds before it adds the bias, like FalconLinear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Clipping(nn.Linear):
    """Gives the product for small rows only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-10, 10))


class Growing(nn.Linear):
    """Has a parameter more."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class Dropping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


def hooked() -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, args, y: y * 2)
    return layer


def watched() -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


def cast_before() -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    return layer


def replaced(layer: Any) -> Any:
    forward = type(layer).forward
    layer.forward = types.MethodType(lambda self, x: forward(self, x) * 2, layer)
    return layer


class Routing(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("module", "answer"),
    [
        (nn.Linear(2, 2), True),
        (conv(2, 2), True),
        (RoundsFirst(2, 2), True),
        (Odd(2, 2), False),
        (Clipping(2, 2), False),
        (Routing(2, 2), False),
        (Growing(2, 2), False),
        (Dropping(2, 2), False),
        (Scaled(2, 2), False),
        (hooked(), False),
        (watched(), True),
        (cast_before(), False),
        (replaced(nn.Linear(2, 2)), False),
        (replaced(conv(2, 2)), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False),
        (nn.Embedding(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2)), False),
        (nn.Bilinear(2, 2, 2), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_is_linear(module: nn.Module, answer: bool) -> None:
    assert is_linear(module) is answer


@pytest.mark.parametrize(("module", "answer"), [(RoundsFirst, True), (Odd, True), (Growing, False), (Scaled, False)])
def test_a_subclass_without_weights_may_be_linear(module: Any, answer: bool) -> None:
    with torch.device("meta"):
        assert is_linear(module(2, 2)) is answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_subclass_of_linear_computes_with_its_own_forward(dtype: torch.dtype) -> None:
    """So a client alone has the bits of the plain model: bf16 is rounded in another place than nn.Linear rounds it."""
    module = RoundsFirst(64, 32).to(dtype).requires_grad_(False)
    layer = base_layer(0, "name", module)
    x = torch.randn(5, 64, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(only(layer.run(Key((0,), Pass.FORWARD), (x,))), module(x))
        assert torch.equal(
            only(layer.run(Key((0,), Pass.FORWARD_WITHOUT_BIAS), (x,))), nn.functional.linear(x, module.weight)
        )
        assert torch.equal(only(layer.run(Key((0,), Pass.BACKWARD), (module(x),))), module(x) @ module.weight)


class Centred(nn.Module):
    """A module whose rows depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        return y - y.mean(0)


class Folding(Centred):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).sum(0, keepdim=True)


class Pair(Centred):
    def forward(self, x: torch.Tensor) -> Any:
        return self.proj(x), x


class DropsByFunction(Centred):
    """Has dropout that no module of it shows, as Seed-OSS does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.proj(x), 0.5, self.training)


class Counts(Centred):
    """Has a buffer that it replaces in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps = self.steps + 1
        return self.proj(x)


class SmallInTraining(Centred):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * (2e-4 if self.training else 1e-4)


class NeedsMore(Centred):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * mask


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        (Centred(), "its rows depend on one another"),
        (Folding(), "does not give a row for a row"),
        (Pair(), "does not"),
        (NeedsMore(), "does not run on a matrix of rows"),
        (DropsByFunction(), "has another result in training"),
        (SmallInTraining(), "has another result in training"),
        (nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), "has another result in training"),
        (nn.LayerNorm(5), "no linear layer inside"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_that_cannot_be_served_whole(module: nn.Module, complaint: str) -> None:
    with pytest.raises(SplitError, match=complaint) as caught:
        base_layer(0, "block.mlp", module)
    assert "block.mlp" in str(caught.value)
    assert type(module).__name__ in str(caught.value)
    assert all(not buffer.is_floating_point() or buffer.unique().numel() == 1 for buffer in module.buffers())


def test_probing_leaves_buffers_as_they_are() -> None:
    module = Counts()
    base_layer(0, "mlp", module)
    assert module.steps == 0
    with torch.inference_mode():
        normed = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    with pytest.raises(SplitError, match="cannot be served whole"):
        base_layer(0, "mlp", normed)
    assert torch.equal(normed[1].running_mean, torch.zeros(5))


def test_probing_draws_no_random_numbers_and_keeps_the_mode() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5)).train()
    before = torch.get_rng_state()
    base_layer(0, "mlp", module)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training


@pytest.mark.parametrize("block", [1, 16, 1 << 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "linear-no-bias", "conv1d"])
def test_passes_in_fp32(kind: str, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in fp32 are multiplied by the weight as it is served, of any dtype, in blocks of any size."""
    monkeypatch.setattr(fp32_products, "_BLOCK", block)
    module: Any = MODULES[kind]().to(dtype).requires_grad_(False)
    layer = base_layer(0, "name", module)
    weight = module.weight.double() if kind != "conv1d" else module.weight.double().t()
    bias = 0 if module.bias is None else module.bias.double()
    x, dy = torch.randn(4, 5), torch.randn(4, 7)
    with torch.no_grad():
        for pass_, rows, wanted in (
            (Pass.FORWARD, x, x.double() @ weight.t() + bias),
            (Pass.FORWARD_WITHOUT_BIAS, x, x.double() @ weight.t()),
            (Pass.BACKWARD, dy, dy.double() @ weight),
        ):
            result = only(layer.run(Key((0,), pass_, fp32=True), (rows,)))
            assert result.dtype is torch.float32
            assert torch.allclose(result.double(), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_are_computed_on_the_calling_thread() -> None:
    """On a GPU, the autograd engine has a thread of its own, which may be waiting for these gradients."""
    engine_threads = []

    class Relu(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.relu()
            if y.requires_grad:
                y.register_hook(lambda _: engine_threads.append(torch._C._is_multithreading_enabled()))
            return y

    layer = base_layer(0, "mlp", nn.Sequential(nn.Linear(5, 9), Relu(), nn.Linear(9, 7)))
    engine_threads.clear()
    layer.run(Key((0,), Pass.BACKWARD), (torch.randn(4, 5), torch.randn(4, 7)))
    assert engine_threads == [False]


def test_modules_without_a_pass_in_fp32() -> None:
    layer = base_layer(0, "mlp", MODULES["mlp"]())
    for pass_ in (Pass.FORWARD, Pass.BACKWARD):
        with pytest.raises(SplitError, match="no pass in fp32"):
            layer.run(Key((0,), pass_, fp32=True), (torch.randn(4, 5),))
        with pytest.raises(RequestError, match="no pass in fp32"):
            expected([layer.spec], Key((0,), pass_, fp32=True))
