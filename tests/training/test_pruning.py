"""Pruned activations keep less memory for backward, and the gradients are the same."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import symbiosis
from symbiosis.testing import ARCHITECTURES, tiny_model
from symbiosis.training import pruning
from symbiosis.training.pruning import pruned
from tests.helpers import BATCH, GRADIENTS, METHODS, adamw, lora
from tests.training.test_windows import Gradients, difference, plain, quiet, undropped


def held_bytes(packed: list[Any], model: nn.Module | None = None) -> int:
    """Return the bytes of tensors that the hooks hold. Each storage counts once, and the model's parameters do not
    count.
    """
    storages: dict[int, int] = {}
    parameters = set() if model is None else {p.untyped_storage().data_ptr() for p in model.parameters()}
    for thing in packed:
        for attribute in ("tensor", "_bytes"):
            tensor = thing if isinstance(thing, torch.Tensor) else getattr(thing, attribute, None)
            if tensor is not None and tensor.untyped_storage().data_ptr() not in parameters:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Saved tensors of a forward pass in the form that the hooks gave them."""
    seen: list[Any] = []
    pack = pruning._Graph.pack

    def noted(self: Any, tensor: torch.Tensor) -> Any:
        seen.append(pack(self, tensor))
        return seen[-1]

    monkeypatch.setattr(pruning._Graph, "pack", noted)
    return seen


def plainly_saved(fn: Callable[[], Any], model: nn.Module) -> int:
    """Return the bytes that autograd saves for ``fn`` without hooks."""
    seen: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.detach() if tensor.grad_fn is not None else tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return held_bytes(seen, model)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_gradients_of_a_training_step(architecture: str, method: str) -> None:
    """Gradients are bit-equal, except where a LayerNorm's output is computed again from its statistics."""
    model, config = quiet(architecture), undropped(method, architecture)
    expected = plain(model, config, BATCH)
    async with symbiosis.Executor(model) as executor, executor.client(copy.deepcopy(config), seed=0) as client:
        gradients = Gradients(client.model)
        assert await client.train_step(BATCH, gradients, prune=True) == expected[0]  # type: ignore[arg-type]
    assert difference(gradients.found, expected[1]) <= (GRADIENTS if architecture.startswith("gpt") else 0)


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
async def test_bf16_and_dropout(base_layers: str) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora(target_modules=["q_proj", "v_proj"])).train()
    torch.manual_seed(4)
    adapted(**BATCH).loss.backward()
    expected = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
    async with symbiosis.Executor(model, base_layers=base_layers) as executor:
        async with executor.client(lora(target_modules=["q_proj", "v_proj"]), seed=0) as client:
            client.manual_seed(4)
            gradients = Gradients(client.model)
            await client.train_step(BATCH, gradients, prune=True)  # type: ignore[arg-type]
    assert difference(gradients.found, expected) == 0


async def test_layer_norms_in_bf16() -> None:
    """CPUs save a LayerNorm's mean and deviation in bf16, too few bits to compute its output from."""
    model, config = quiet("gpt2", dtype=torch.bfloat16), undropped("lora", "gpt2")
    expected = plain(model, config, BATCH)
    async with symbiosis.Executor(model) as executor, executor.client(copy.deepcopy(config), seed=0) as client:
        gradients = Gradients(client.model)
        assert await client.train_step(BATCH, gradients, prune=True) == expected[0]  # type: ignore[arg-type]
    assert difference(gradients.found, expected[1]) == 0


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.65), (torch.bfloat16, 0.46)])
def test_fewer_bytes_are_kept(packed: list[Any], dtype: torch.dtype, most: float) -> None:
    """A Llama with LoRA in every layer keeps gate and up instead of SiLU and product, no norm, and no copy in fp32."""
    model = tiny_model(dtype=dtype, hidden_size=64, intermediate_size=192, num_key_value_heads=4)
    adapted = peft.get_peft_model(model, lora(lora_dropout=0.0, r=1)).train()
    ids = torch.randint(3, 64, (1, 60))
    whole = plainly_saved(lambda: adapted(input_ids=ids).logits.sum(), adapted)
    with pruned():
        adapted(input_ids=ids).logits.sum()
    assert held_bytes(packed, adapted) <= most * whole


def test_relu_is_kept_as_bits(packed: list[Any]) -> None:
    x = torch.randn(33, 65, requires_grad=True)
    expected = torch.autograd.grad((functional.relu(x * 2) * 3).sum(), x)[0]
    with pruned():
        loss = (functional.relu(x * 2) * 3).sum()
    assert held_bytes([thing for thing in packed if isinstance(thing, pruning._Bits)]) == -(-33 * 65 // 8)
    assert held_bytes(packed) < 33 * 65  # no other tensor has that size
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_a_relu_outside_has_saved_its_result_before() -> None:
    x = torch.randn(33, 65, requires_grad=True)
    expected = torch.autograd.grad(functional.relu(x * 2).pow(2).sum(), x)[0]
    given = {"inputs_embeds": functional.relu(x * 2)}
    with pruned(given):
        loss = given["inputs_embeds"].pow(2).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_a_mask_is_kept_once(packed: list[Any]) -> None:
    """This holds for any number of layers that share the mask, and after any number of expansions."""
    x, mask, row = torch.randn(16, 64, requires_grad=True), torch.rand(16, 64) > 0.5, torch.rand(1, 64) > 0.5

    def loss() -> torch.Tensor:
        y = x
        for _ in range(9):
            y = (y + 1).masked_fill(mask, 0)
        return (y + 1).masked_fill(row.expand(16, 64), 0).sum()

    expected = torch.autograd.grad(loss(), x)[0]
    with pruned():
        found = loss()
    assert held_bytes(packed) == 16 * 64 // 8 + 64  # the expanded mask is kept unchanged
    assert torch.equal(torch.autograd.grad(found, x)[0], expected)


def test_a_mask_that_changes_is_kept_again() -> None:
    x, mask = torch.ones(2, 8, requires_grad=True), torch.zeros(2, 8, dtype=torch.bool)
    with pruned():
        y = (x * 1).masked_fill(mask, 0).sum()
        mask[0] = True
        y = y + (x * 1).masked_fill(mask, 0).sum()
    assert torch.equal(torch.autograd.grad(y, x)[0], torch.tensor([[1.0], [2.0]]).expand(2, 8))


def test_relu_whose_values_are_needed_too() -> None:
    x, w = torch.randn(7, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)

    def loss() -> torch.Tensor:
        y = functional.relu(x * 2)
        return (functional.linear(y, w) + y.pow(2).sum()).sum()

    expected = torch.autograd.grad(loss(), (x, w))
    with pruned():
        found = loss()
    for a, b in zip(torch.autograd.grad(found, (x, w)), expected, strict=True):
        assert torch.equal(a, b)


@given(st.lists(st.integers(0, 9), min_size=0, max_size=3), st.integers(0, 2**32 - 1))
def test_bits(shape: list[int], seed: int) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    assert torch.equal(pruning._Bits(mask, torch.bool)(), mask)
    assert torch.equal(pruning._Bits(mask, torch.float32)(), mask.float())


NETWORKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gated": lambda x, w: functional.linear(functional.silu(x * 1.5) * (x + 1), w),
    "gelu": lambda x, w: functional.linear(functional.gelu(x * 1.5, approximate="tanh") * x, w),
    "broadcast": lambda x, w: functional.linear(x * x[:1], w) * w.sum(),
    "views": lambda x, w: functional.linear((x * x.exp()).view(2, 4, 6).transpose(-2, -1).transpose(1, -1), w),
    "negative": lambda x, w: functional.linear((x * x.sin()).unsqueeze(-2).expand(8, 3, 6).reshape(-1, 6), w),
    "casts": lambda x, w: functional.linear((x.to(torch.bfloat16).float() ** 2).to(torch.bfloat16).float(), w),
    "in place": lambda x, w: functional.linear((x * 2).mul_(x.cos()).add_(1), w),
    "scalar in place": lambda x, w: functional.linear(functional.silu(x * 2).mul_(3), w),
    "own output": lambda x, w: functional.linear(x.tanh().sigmoid().exp().softmax(-1) * x.sqrt(), w),
    "slices": lambda x, w: functional.linear(torch.cat([(x * x.sin())[2:], x[:2]]), w),
    "split": lambda x, w: functional.silu((x @ w).chunk(2, -1)[0]) * (x @ w).chunk(2, -1)[1].sin() * x[:, :3],
    "layer norm": lambda x, w: functional.linear(functional.layer_norm(x, (6,), x[0], x[1]), w),
    "plain layer norm": lambda x, w: functional.linear(functional.layer_norm(x, (6,)), w),
    "mask": lambda x, w: functional.linear(x.masked_fill(x > 0.5, 0.0) * x, w),
    "scaled attention": lambda x, w: functional.scaled_dot_product_attention(
        (x * w).view(1, 2, 4, 6), (x + w).view(1, 2, 4, 6), x.view(1, 2, 4, 6)
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_any_graph(name: str) -> None:
    """Recomputed tensors are right, and tensors of unknown operations are kept."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(8, 6, generator=generator, requires_grad=True)
    w = torch.randn(6 if name == "split" else 1 if "attention" in name else 4, 6, generator=generator)
    w.requires_grad_()
    network = NETWORKS[name]
    expected = torch.autograd.grad(network(x + 0.1, w).pow(2).sum(), (x, w))
    with pruned():
        loss = network(x + 0.1, w).pow(2).sum()
    for found, wanted in zip(torch.autograd.grad(loss, (x, w)), expected, strict=True):
        if "layer norm" in name:
            torch.testing.assert_close(found, wanted)
        else:
            assert torch.equal(found, wanted)


def test_changes_after_saving_are_noticed() -> None:
    """The error is the one that torch raises without hooks."""
    x = torch.randn(4, requires_grad=True)
    with pruned():
        y = x + 1
        loss = (y.sin() * 1).sum()
        with torch.no_grad():
            y.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \[4\] that backward needs was modified"):
        loss.backward()


async def test_tensors_are_freed_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no reference cycle: neither through a node that saves its own output, nor through recomputation."""
    held: list[weakref.ref[Any]] = []
    start = pruning._Kept.__init__

    class Kept(pruning._Kept):
        __slots__ = ("__weakref__",)

        def __init__(self, tensor: torch.Tensor) -> None:
            start(self, tensor)
            held.append(weakref.ref(self))

    monkeypatch.setattr(pruning, "_Kept", Kept)
    async with symbiosis.Executor(tiny_model("gpt2")) as executor, executor.client(lora("gpt2")) as client:
        optimizer = adamw(client.model)
        await client.train_step(BATCH, optimizer, prune=True)
        held.clear()
        gc.collect()
        gc.disable()
        try:
            await client.train_step(BATCH, optimizer, prune=True)
            assert len(held) > 20
            assert all(reference() is None for reference in held)
        finally:
            gc.enable()
