"""Packed weights: equal results, one copy of the values unless a client trains, and a check at start-up."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import symbiosis
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.executor import packing
from symbiosis.executor.packing import PackedWeight, pack
from symbiosis.testing import Comparison, compare, run_job, run_job_plain, tiny_model
from symbiosis.testing.zoo import zoo_model
from tests.helpers import (
    GRADIENTS,
    IDS,
    LOGITS,
    METHODS,
    SHORT,
    TRAINED,
    adamw,
    assert_close,
    command,
    lora,
    packs_bf16,
    until,
)

LINEAR = 15
"""Linear layers of the tiny Llama: seven in each of two blocks, and ``lm_head``."""
WITH_GRADIENTS = LINEAR - 3
"""Layers that are asked for gradients of their rows. Nothing below the first block's q, k and v is trained."""

needs_bf16 = pytest.mark.skipif(not packs_bf16(), reason="weights in bf16 are not packed on this processor")


@pytest.fixture(autouse=True)
def small_ones_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAST", 1)


def kept(model: Any) -> int:
    """Return how many packed weights are kept in the usual layout too."""
    found = [parameter for parameter in model.parameters() if isinstance(parameter, PackedWeight)]
    assert found
    return sum(weight._forms.plain is not None for weight in found)


def a_layer() -> nn.Linear:
    layer = nn.Linear(32, 48).requires_grad_(False)
    assert packing.pack(layer, [layer]) == 1
    return layer


# ------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("layers", ["linear", "mlp"])
@pytest.mark.parametrize("method", [*METHODS, None])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
async def test_results_are_those_of_plain_peft(architecture: str, method: str | None, layers: str) -> None:
    """GPT-2 has Conv1D in its blocks and a tied head, so nothing of it is packed."""
    config = METHODS[method](architecture) if method else None
    found = await compare(tiny_model(architecture), config, SHORT, base_layers=layers, packed=True)
    assert found.worst("logits") <= LOGITS, found
    assert found.worst("greedy") == 0, found
    if method:
        assert found.worst("gradient") <= GRADIENTS, found
        assert found.worst("adapter") <= TRAINED, found


@pytest.mark.parametrize(
    ("dtype", "logits", "gradients"),
    [
        (torch.float32, LOGITS, GRADIENTS),
        pytest.param(torch.bfloat16, 0.02, 0.05, marks=needs_bf16),
    ],
)
async def test_biases(dtype: torch.dtype, logits: float, gradients: float) -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True, dtype=dtype)
    expected = run_job_plain(model, lora(), SHORT)
    async with symbiosis.Executor(model, packed=True) as executor, executor.client(lora(), seed=0) as client:
        assert sum(isinstance(parameter, PackedWeight) for parameter in model.parameters()) == LINEAR
        found = Comparison.of(await run_job(client, SHORT), expected)
    assert found.worst("logits") <= logits, found
    assert found.worst("gradient") <= gradients, found


@pytest.mark.parametrize("joint", ["fast", "off"])
async def test_tenants_beside_each_other(base: Any, joint: str) -> None:
    expected = [run_job_plain(base, config(), SHORT, seed=seed) for seed, config in enumerate(METHODS.values())]
    async with symbiosis.Executor(copy.deepcopy(base), packed=True, joint=joint) as executor:
        clients = [await executor.client(config(), seed=seed).open() for seed, config in enumerate(METHODS.values())]
        outcomes = await asyncio.gather(*(run_job(client, SHORT) for client in clients))
        for outcome, wanted in zip(outcomes, expected, strict=True):
            assert_close(outcome, wanted)
        for client in clients:
            await client.close()


@needs_bf16
async def test_a_masked_client_of_a_model_in_bf16() -> None:
    """Its rows are computed in fp32, with the usual layout."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    async with (
        symbiosis.Executor(model, packed=True) as executor,
        executor.client(privacy="noise-pool:size=3") as client,
    ):
        logits = (await client.forward(input_ids=IDS)).logits
        assert (logits - expected).abs().max() <= 0.02 * expected.abs().max()
        assert kept(model) == LINEAR
    assert kept(model) == 0


async def test_the_model_itself_still_works(base: Any) -> None:
    with torch.no_grad():
        expected = base(input_ids=IDS).logits
        async with symbiosis.Executor(base, packed=True):
            logits = base(input_ids=IDS).logits
    assert (logits - expected).abs().max() <= LOGITS * expected.abs().max()
    assert kept(base) == 0


# -------------------------------------------------------------------------------------------------------------- copies


async def test_there_is_one_copy_until_a_client_trains_and_after_the_last_has_left(base: Any) -> None:
    before = [weakref.ref(module.weight) for module in base.modules() if isinstance(module, nn.Linear)]
    async with symbiosis.Executor(base, packed=True) as executor:
        gc.collect()
        assert not any(weight() is not None for weight in before)
        async with executor.client(lora(), name="decodes") as decodes:
            await decodes.generate(IDS[:1], max_new_tokens=3)
            assert kept(base) == 0
            one, two = [await executor.client(lora(), name=name).open() for name in ("one", "two")]
            for client in (one, two):
                await client.train_step({"input_ids": IDS, "labels": IDS}, adamw(client.model))
            assert kept(base) == WITH_GRADIENTS
            await one.close()
            await decodes.generate(IDS[:1], max_new_tokens=3)
            assert kept(base) == WITH_GRADIENTS
            await two.close()
            assert kept(base) == 0
            await decodes.generate(IDS[:1], max_new_tokens=3)


async def test_clients_of_other_processes_count_too(base: Any, tmp_path: Path) -> None:
    async with symbiosis.Executor(base, packed=True) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s.sock")
        async with symbiosis.connect(listener.address) as remote, remote.client(lora()) as client:
            await client.train_step({"input_ids": IDS, "labels": IDS}, adamw(client.model))
            assert kept(base) == WITH_GRADIENTS
        await until(lambda: kept(base) == 0)


async def test_a_call_of_a_client_that_has_left_keeps_no_weights(base: Any) -> None:
    """A thread of the client may call while the event loop closes it."""
    async with symbiosis.Executor(base, packed=True) as executor:
        spec, service = executor.layers[0], executor.service

        def back() -> Call:
            return Call(Key((0,), Pass.BACKWARD), Kind.FINETUNE, (torch.zeros(4, spec.out_features),))

        service.join("late", local=True).close()
        assert executor.engine.at_once("late", back(), Kind.FINETUNE) is None
        session = service.join("other", local=True)
        await session.submit(back())
        assert kept(base) == 1
        session.close()
        assert kept(base) == 0


async def test_the_usual_layout_counts_like_the_memory_of_clients(base: Any, tmp_path: Path) -> None:
    """Where there is no room for it, each backward pass makes it anew, with the same results."""
    batch = {"input_ids": IDS, "labels": IDS}
    losses = []
    async with symbiosis.Executor(base, packed=True) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s.sock")
        budget = executor.service.budget
        before = budget.held
        for room in (budget.total, before + (1 << 20) + (1 << 17)):
            budget.total = room
            async with symbiosis.connect(listener.address) as remote, remote.client(lora(), seed=0) as client:
                optimizer = adamw(client.model)
                losses.append([(await client.train_step(batch, optimizer)) for _ in range(3)])
                weights = [p for p in base.parameters() if isinstance(p, PackedWeight) and p._forms.plain is not None]
                assert (len(weights) == WITH_GRADIENTS) == (len(losses) == 1)
                counted = sum(4 * weight.numel() for weight in weights)
                assert counted == executor.engine._unpacked.bytes <= budget.held - before - (1 << 20)
            await until(lambda: budget.held == before)
        assert kept(base) == 0
    assert losses[0] == losses[1]


def test_a_weight_that_an_embedding_has_too_is_not_packed() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    assert packing.pack(model, [module for module in model.modules() if isinstance(module, nn.Linear)]) == LINEAR - 1
    assert not isinstance(model.lm_head.weight, PackedWeight)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_small_weights_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LEAST", 32 * 32)
    layers = nn.Sequential(nn.Linear(32, 31), nn.Linear(32, 32)).requires_grad_(False)
    assert packing.pack(layers, layers) == 1
    assert isinstance(layers[1].weight, PackedWeight)


async def test_an_executor_packs_the_weights_that_it_loads(base: Any, tmp_path: Path) -> None:
    base.save_pretrained(tmp_path)
    for options, packed in (({}, LINEAR), ({"packed": False}, 0)):
        async with symbiosis.Executor.from_pretrained(tmp_path, **options) as executor:
            assert executor.service.status()["packed_layers"] == packed
    async with symbiosis.Executor(base) as executor:
        assert executor.service.status()["packed_layers"] == 0


# ------------------------------------------------------------------------------------------------------- as a tensor


def test_a_packed_weight_is_read_like_any_other() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48)
    values = layer.weight.detach().clone()
    packing.pack(layer.requires_grad_(False), [layer])
    weight: Any = layer.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == (values.shape, values.dtype, "cpu")
    assert weight.detach().clone().equal(values)
    assert weight[3, 4] == values[3, 4]
    assert (weight.t() + 1).equal(values.t() + 1)
    assert weight.to(torch.float64).equal(values.double())
    assert repr(values[:1])[8:40] in repr(weight[:1])
    assert weight._forms.plain is None
    twin = copy.deepcopy(layer)
    assert type(twin.weight) is nn.Parameter
    assert twin.weight.equal(values)


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3), ()])
def test_products_of_any_shape(rows: tuple[int, ...]) -> None:
    layer = a_layer()
    twin, x = copy.deepcopy(layer), torch.randn(*rows, 32)
    torch.testing.assert_close(layer(x), twin(x))
    wide = torch.randn(*rows, 64)[..., ::2]
    torch.testing.assert_close(layer(wide), twin(wide))
    assert layer(torch.randn(0, 32)).shape == (0, 48)
    torch.testing.assert_close(F.linear(input=x, weight=layer.weight), F.linear(x, twin.weight))
    torch.testing.assert_close(x @ layer.weight.t(), x @ twin.weight.t())


def test_products_with_gradients_and_under_autocast() -> None:
    layer = a_layer()
    twin = copy.deepcopy(layer)
    gradients = []
    for one in (layer, twin):
        x = torch.linspace(-1, 1, 64).reshape(2, 32).requires_grad_()
        one(x).square().sum().backward()
        gradients.append(x.grad)
        with torch.autocast("cpu", torch.bfloat16):
            assert one(x).dtype is torch.bfloat16
    torch.testing.assert_close(*gradients)


def test_the_usual_layout_that_was_made_in_inference_mode_can_be_trained_with() -> None:
    layer = a_layer()
    layer.weight.keep(lambda size: True)
    with torch.inference_mode():
        made = layer.weight.plain()
    assert layer.weight.plain() is made
    layer(torch.ones(1, 32, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2.0),
        lambda weight: weight.zero_(),
        lambda weight: weight.copy_(torch.ones(48, 32)),
        lambda weight: weight.data.mul_(2.0),
        lambda weight: weight.__setitem__(0, 1.0),
        lambda weight: torch.add(torch.ones(48, 32), 1.0, out=weight),
        lambda weight: torch._foreach_mul_([weight], 2.0),
    ],
)
def test_a_packed_weight_cannot_be_written_to(write: Any) -> None:
    weight = a_layer().weight
    before = weight.clone()
    with pytest.raises(UsageError, match="packed and cannot be written to"), torch.no_grad():
        write(weight)
    assert weight.equal(before)


async def test_a_client_gets_a_copy_of_a_weight_that_it_trains(base: Any) -> None:
    expected = base.lm_head.weight.detach().clone()
    async with symbiosis.Executor(base, packed=True) as executor, executor.client(lora()) as client:
        weight = client.model.get_output_embeddings().weight
        weight.requires_grad_(True)
        assert torch.equal(weight.detach(), expected)


async def test_identity_and_share_are_those_of_the_model(base: Any) -> None:
    async with symbiosis.Executor(copy.deepcopy(base)) as one, symbiosis.Executor(base, packed=True) as other:
        assert one.service.identity().weights == other.service.identity().weights
        assert one.service.share().description == other.service.share().description


# ------------------------------------------------------------------------------------------------------------ check


@pytest.mark.parametrize("problem", ["missing", "raises", "wrong product", "wrong values"])
async def test_operators_that_do_not_work_are_not_used(
    base: Any, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Any:
        raise (AttributeError if problem == "missing" else RuntimeError)("no such operator")

    if problem in ("missing", "raises"):
        monkeypatch.setattr(packing, "_packed", fail)
    elif problem == "wrong product":
        monkeypatch.setattr(packing, "_multiply", lambda x, packed, bias: F.linear(x, packed.to_dense(), bias) + 1)
    else:
        pack = packing._packed
        monkeypatch.setattr(packing, "_packed", lambda weight: pack(weight.flip(0)))
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        expected = base(input_ids=IDS).logits
        async with symbiosis.Executor(base, packed=True) as executor, executor.client() as client:
            assert executor.service.status()["packed_layers"] == 0
            assert torch.equal((await client.forward(input_ids=IDS)).logits, expected)
    assert "weights of torch.float32 are not packed" in caplog.text


def test_symbiosis_serve_has_a_switch() -> None:
    assert "--no-packed" in command("serve", "--help").output


def test_layers_with_a_product_of_their_own_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's would unpack the whole weight each time."""
    monkeypatch.setattr(packing, "LEAST", 0)
    model = zoo_model("FalconForCausalLM")
    assert any(isinstance(module, torch.nn.Linear) for module in model.transformer.h.modules())
    assert not pack(model, list(model.transformer.h.modules()))
