"""VirtLayers: their appearance to PEFT, their requests, siblings, autograd, and wrong use."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import BertConfig, BertForMaskedLM

import symbiosis
from symbiosis.client import siblings
from symbiosis.client.virtlayer import VirtLayer, VirtLinear
from symbiosis.errors import PlaceholderError, RequestError, UsageError
from symbiosis.testing import Comparison, Job, run_job, run_job_plain, tiny_model
from symbiosis.testing.zoo import zoo_model
from tests.helpers import BATCH, IDS, in_thread, lora


@pytest.fixture
async def client(base: Any) -> AsyncIterator[symbiosis.Client]:
    async with symbiosis.Executor(base) as executor, executor.client(name="tenant") as client:
        client.executor = executor  # type: ignore[attr-defined]
        yield client


def requests(client: Any, of: str = "") -> dict[str, int]:
    layers = client.executor.statistics().layers
    return {name: layer.requests for name, layer in layers.items() if of in name}


class TestAsPeftSeesIt:
    async def test_shape_dtype_device_and_type(self, client: Any) -> None:
        layer = client.model.model.layers[0].self_attn.k_proj
        assert isinstance(layer, VirtLinear)
        assert isinstance(layer, nn.Linear)
        assert (layer.in_features, layer.out_features) == (32, 16)
        assert layer.weight.shape == (16, 32)
        assert layer.weight.dtype is torch.float32
        assert layer.weight.device == torch.device("cpu")
        assert isinstance(layer.weight, nn.Parameter)
        assert not layer.weight.requires_grad
        assert torch.isnan(layer.weight).all()
        assert "in_features=32, out_features=16" in repr(layer)

    async def test_numbers_of_parameters(self, base: Any) -> None:
        """print_trainable_parameters prints the same as in plain PEFT."""
        import peft

        plain = peft.get_peft_model(copy.deepcopy(base), lora()).get_nb_trainable_parameters()
        async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
            assert client.model.get_nb_trainable_parameters() == plain

    async def test_names_of_parameters(self, base: Any) -> None:
        names = list(dict(base.named_parameters()))
        keys = list(base.state_dict())
        async with symbiosis.Executor(base) as executor, executor.client() as client:
            assert list(dict(client.model.named_parameters())) == names
            weights = {f"{spec.name}.weight" for spec in executor.layers}
            assert list(client.model.state_dict()) == [key for key in keys if key not in weights]

    async def test_to_moves_without_filling_memory(self, client: Any) -> None:
        layer = client.model.lm_head
        client.model.to(torch.float64)
        assert layer.weight.dtype is torch.float64
        assert layer.weight.shape == (64, 32)
        assert layer.weight.untyped_storage().nbytes() == 8
        client.model.to(torch.float32)
        assert (await client.forward(input_ids=IDS)).logits.dtype is torch.float32


class TestSiblings:
    """q, k and v, and gate and up, read the same rows: after the first pass each group makes one request."""

    async def test_forward_requests(self, client: Any) -> None:
        for passes in range(1, 4):
            client.executor.reset_statistics()
            await client.forward(input_ids=IDS)
            found = requests(client)
            assert sum(found.values()) == (15 if passes == 1 else 2 * 4 + 1), found
        assert "model.layers.0.self_attn.q_proj+k_proj+v_proj forward" in found
        assert "model.layers.1.mlp.gate_proj+up_proj forward" in found
        assert not any(name.startswith("model.layers.0.mlp.up_proj forward") for name in found)

    async def test_with_adapters_on_some(self, base: Any) -> None:
        """Layers q and v stay siblings of k when they have LoRA."""
        async with symbiosis.Executor(base) as executor, executor.client(lora(target_modules=["q_proj"])) as client:
            await client.forward(input_ids=IDS)
            executor.reset_statistics()
            await client.forward(input_ids=IDS)
            assert "model.layers.0.self_attn.q_proj+k_proj+v_proj forward" in executor.statistics().layers

    async def test_unused_results_of_siblings_are_dropped(self, client: Any) -> None:
        """A pass calls only one sibling several times: every result is right, and no other result is kept."""
        layer = client.model.model.layers[0].self_attn.q_proj
        served = client.executor.service.resident().model.model.layers[0].self_attn.q_proj
        await client.forward(input_ids=IDS)
        for _ in range(6):
            y = await client.run(layer, torch.ones(3, 32))
            torch.testing.assert_close(y, served(torch.ones(3, 32)))
            assert not client._requester.here.siblings.fetched

    async def test_a_group_whose_members_ask_for_different_passes_ends(self) -> None:
        """A layer whose bias is the tenant's own asks for the product alone, in each of several operations."""
        async with symbiosis.Executor(tiny_model(attention_bias=True)) as executor, executor.client() as client:
            await client.forward(input_ids=IDS)
            attention = client.model.model.layers[0].self_attn
            for layer in (attention.q_proj, attention.v_proj):
                layer.bias.requires_grad_(True)
            for _ in range(4):
                executor.reset_statistics()
                await client.forward(input_ids=IDS)
            found = [name for name in executor.statistics().layers if "layers.0.self_attn.k_proj" in name]
            assert found == ["model.layers.0.self_attn.k_proj forward"]

    async def test_an_input_that_changed_in_place_is_sent_again(self, client: Any) -> None:
        attention = client.model.model.layers[0].self_attn
        base = client.executor.service.resident().model.model.layers[0].self_attn
        await client.forward(input_ids=IDS)

        def change() -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                x = torch.ones(3, 32)
                q = attention.q_proj(x)
                x.mul_(2)
                return q, attention.k_proj(x)

        q, k = await client.run(change)
        with torch.no_grad():
            torch.testing.assert_close(q, base.q_proj(torch.ones(3, 32)))
            torch.testing.assert_close(k, base.k_proj(2 * torch.ones(3, 32)))

    @pytest.mark.parametrize("repeat", [1, 5])
    async def test_same_input_called_twice(self, client: Any, repeat: int) -> None:
        """A layer that reads the same tensor twice in succession gets the same result twice."""
        attention = client.model.model.layers[0].self_attn

        def twice() -> list[torch.Tensor]:
            x = torch.ones(3, 32)
            return [layer(x) for _ in range(repeat) for layer in (attention.q_proj, attention.q_proj, attention.k_proj)]

        served = client.executor.service.resident().model.model.layers[0].self_attn
        results = await client.run(twice)
        for number, result in enumerate(results):
            layer = served.k_proj if number % 3 == 2 else served.q_proj
            torch.testing.assert_close(result, layer(torch.ones(3, 32)))

    @pytest.mark.parametrize("how", ["call", "multiply"])
    async def test_a_layer_and_its_copy_are_not_siblings(self, client: Any, how: str) -> None:
        """A policy model and its copy, the reference, call the same layer with the same hidden state."""
        model, copied = client.model, copy.deepcopy(client.model)
        x = torch.ones(3, 32)

        def work() -> list[torch.Tensor]:
            with torch.no_grad():
                if how == "call":
                    return [model.lm_head(x), copied.lm_head(x)]
                return [x @ model.lm_head.weight.t(), x @ copied.lm_head.weight.t()]

        for _ in range(3):
            one, two = await client.run(work)
            assert torch.equal(one, two)
            await client.forward(input_ids=IDS)
        assert model.lm_head.siblings is copied.lm_head.siblings is None

    async def test_siblings_belong_to_one_copy(self, client: Any) -> None:
        """Layer q of a copy and k of the original are not siblings. Layers of the same copy are."""
        one = client.model.model.layers[0].self_attn
        two = copy.deepcopy(client.model).model.layers[0].self_attn

        def both(x: torch.Tensor) -> None:
            for layer in (one.q_proj, two.k_proj, one.k_proj, one.v_proj, two.q_proj, two.k_proj):
                layer(x)

        for _ in range(3):
            await client.run(both, torch.ones(3, 32))
        assert one.k_proj.siblings.members == [one.k_proj, one.v_proj]
        assert two.k_proj.siblings.members == [two.q_proj, two.k_proj]

    async def test_a_group_has_as_many_members_as_a_request(self, client: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(siblings, "MAX_SIBLINGS", 2)
        attention = client.model.model.layers[0].self_attn
        expected = (await client.forward(input_ids=IDS)).logits
        for _ in range(2):
            assert torch.equal((await client.forward(input_ids=IDS)).logits, expected)
        assert attention.q_proj.siblings.members == [attention.q_proj, attention.k_proj]
        assert attention.v_proj.siblings is None

    async def test_threads_that_share_a_model(self, client: Any) -> None:
        """Each thread finds its own results, also while the threads detect siblings."""
        model, base = client.model, client.executor.service.resident().model
        with torch.no_grad():
            expected = [base(input_ids=IDS + n).logits for n in range(4)]
        start = threading.Barrier(4)

        def work(n: int) -> float:
            worst = 0.0
            start.wait()
            with torch.no_grad():
                for _ in range(20):
                    worst = max(worst, float((model(input_ids=IDS + n).logits - expected[n]).abs().max()))
            return worst

        assert max(await asyncio.gather(*[asyncio.to_thread(work, n) for n in range(4)])) < 1e-5
        attention = model.model.layers[0].self_attn
        assert len(attention.q_proj.siblings.members) == 3
        assert attention.q_proj.siblings is attention.k_proj.siblings is attention.v_proj.siblings

    async def test_threads_never_get_the_rows_of_another_thread(
        self, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This holds wherever a thread is interrupted."""
        attention = client.model.model.layers[0].self_attn
        await client.forward(input_ids=IDS)
        monkeypatch.setattr(siblings, "_MISSES", 10**9)

        def answer(key: Any, kind: Any, tensors: tuple[torch.Tensor, ...], name: str) -> tuple[torch.Tensor, ...]:
            return tuple(
                tensors[0][:, :1].expand(-1, client._requester.channel.layers[n].out_features) for n in key.layers
            )

        monkeypatch.setattr(client._requester, "request", answer)

        def work(n: int) -> bool:
            with torch.no_grad():
                x = torch.full((1, 32), float(n))
                for _ in range(1500):
                    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
                        if layer(x)[0, 0] != n:
                            return False
            return True

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            assert all(await asyncio.gather(*[asyncio.to_thread(work, n) for n in range(4)]))
        finally:
            sys.setswitchinterval(interval)


class TestAutograd:
    @pytest.mark.parametrize("architecture", ["llama", "gpt2"])
    async def test_gradient_of_one_layer(self, architecture: str) -> None:
        """The gradient equals that of the base layer, for contiguous and other inputs of one to four dimensions."""
        model = tiny_model(architecture)
        name = "model.layers.0.mlp.up_proj" if architecture == "llama" else "transformer.h.0.mlp.c_fc"
        module = model.get_submodule(name)
        async with symbiosis.Executor(model) as executor, executor.client() as client:
            layer = client.model.get_submodule(name)
            for x in (
                torch.randn(32),
                torch.randn(3, 32),
                torch.randn(2, 3, 32),
                torch.randn(2, 2, 3, 32),
                torch.randn(32, 3).t(),
                torch.randn(2, 4, 32)[:, -1:],
                torch.randn(1, 32).expand(4, 32),
            ):
                mine = x.clone(memory_format=torch.preserve_format).requires_grad_()
                theirs = x.clone(memory_format=torch.preserve_format).requires_grad_()
                y = await client.run(layer, mine)
                expected = module(theirs)
                torch.testing.assert_close(y, expected)
                assert y.shape == expected.shape
                dy = torch.randn_like(expected)
                await client.backward(y, gradient=dy)
                expected.backward(dy)
                torch.testing.assert_close(mine.grad, theirs.grad)

    async def test_inplace_on_the_result(self, client: Any) -> None:
        """The output of a VirtLayer may be changed in place, like that of nn.Linear."""
        layer = client.model.model.layers[0].mlp.up_proj
        x = torch.randn(3, 32, requires_grad=True)

        def work() -> torch.Tensor:
            y = layer(x)
            y *= 2
            return y.sum()  # type: ignore[no-any-return]

        await client.backward(await client.run(work))
        weight = client.executor.service.resident().model.model.layers[0].mlp.up_proj.weight
        torch.testing.assert_close(x.grad, (2 * weight.sum(0)).expand(3, 32))

    async def test_no_graph_without_gradients(self, client: Any) -> None:
        layer = client.model.lm_head
        for x, grad in ((torch.randn(2, 32), True), (torch.randn(2, 32, requires_grad=True), False)):

            def work(x: torch.Tensor = x, grad: bool = grad) -> torch.Tensor:
                with torch.set_grad_enabled(grad):
                    y: torch.Tensor = layer(x)
                return y

            assert not (await client.run(work)).requires_grad

    async def test_no_rows(self, client: Any) -> None:
        layer = client.model.lm_head
        x = torch.empty(0, 32, requires_grad=True)
        y = await client.run(layer, x)
        assert y.shape == (0, 64)
        await client.backward(y.sum())
        assert x.grad is not None
        assert x.grad.shape == (0, 32)

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
    async def test_double_backward_is_refused(self, client: Any) -> None:
        """Second-order gradients would need another service: they raise an error and never give a wrong number."""
        x = torch.randn(2, 32, requires_grad=True)
        y = (await client.run(client.model.lm_head, x)).pow(2).sum()
        await client.backward(y, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            await client.backward(x.grad.sum())

    async def test_inference_mode(self, client: Any) -> None:
        def work() -> torch.Tensor:
            with torch.inference_mode():
                y: torch.Tensor = client.model(input_ids=IDS).logits
            return y

        assert torch.equal(await client.run(work), (await client.forward(input_ids=IDS)).logits)


WRONG: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "width": (lambda: torch.zeros(2, 31), r"lm_head: input is \[2, 31\]; its last dimension must be 32"),
    "dtype": (
        lambda: torch.zeros(2, 32, dtype=torch.float64),
        r"lm_head: input is torch\.float64, but the base model is served in torch\.float32.*cast the input.*autocast",
    ),
    "integers": (lambda: torch.zeros(2, 32, dtype=torch.int64), r"input is torch\.int64"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_input(client: Any, wrong: str) -> None:
    make, complaint = WRONG[wrong]
    with pytest.raises(RequestError, match=complaint):
        await client.run(client.model.lm_head, make())
    assert torch.isfinite((await client.forward(input_ids=IDS)).logits).all()


async def test_weights_that_the_tenant_ties() -> None:
    """The tenant's lm_head computes with the embeddings, and no longer with the executor's weight."""
    plain = tiny_model(tie_word_embeddings=False)
    async with symbiosis.Executor(copy.deepcopy(plain)) as executor, executor.client() as untied:
        for model in (plain, untied.model, copy.deepcopy(untied.model)):
            model.lm_head.weight = model.model.embed_tokens.weight
            logits = await untied.run(lambda model=model: model(input_ids=IDS).logits)
            assert torch.equal(logits, plain(input_ids=IDS).logits)


class Tied(nn.Module):
    """Two layers have one weight and one bias, which is the model's own too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.bias = self.second.bias = self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) * self.bias


@pytest.mark.parametrize("trained", ["bias", "first.weight", "second.weight"])
@pytest.mark.parametrize("copied", [False, True])
async def test_layers_with_one_parameter(trained: str, copied: bool) -> None:
    """A parameter of several modules is one parameter in a client too, whichever of them trains it."""
    plain = Tied()

    def learn(model: nn.Module) -> list[torch.Tensor]:
        assert len(list(model.parameters())) == 2
        parameter = model.get_parameter(trained)
        parameter.requires_grad_(True)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(torch.linspace(-1, 1, 96).view(3, 32)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    async with symbiosis.Executor(copy.deepcopy(plain)) as executor, executor.client() as client:
        model = copy.deepcopy(client.model) if copied else client.model
        torch.testing.assert_close(await asyncio.to_thread(learn, model), learn(plain))


def _load(layer: Any, other: Any) -> None:
    layer.load_state_dict(other.state_dict())


def _load_in_a_list(layer: Any, other: Any) -> None:
    nn.ModuleList([layer]).load_state_dict(nn.ModuleList([other]).state_dict())


def _copy(layer: Any, other: Any) -> None:
    with torch.no_grad():
        layer.weight.copy_(other.weight)


def _take_data(layer: Any, other: Any) -> None:
    layer.weight.data = other.weight.data


def _take(layer: Any, other: Any) -> None:
    layer.weight = other.weight


@pytest.mark.parametrize("put", [_load, _load_in_a_list, _copy, _take_data, _take])
async def test_a_weight_of_another_layer(client: Any, put: Callable[[Any, Any], None]) -> None:
    """A placeholder has no values that another layer could take. That of a copy of a layer is the layer's own."""
    expected = (await client.forward(input_ids=IDS)).logits
    first, second = (block.mlp.gate_proj for block in client.model.model.layers)
    with pytest.raises(PlaceholderError, match=r"layers\.1\.\S+ cannot take the weight of model\.layers\.0\."):
        put(second, first)
    put(second, copy.deepcopy(second))
    assert torch.equal((await client.forward(input_ids=IDS)).logits, expected)


@pytest.mark.parametrize("copied", [False, True])
async def test_a_bias_of_another_layer(copied: bool) -> None:
    def changed(model: Any) -> Any:
        first, second = (block.self_attn.v_proj for block in model.model.layers)
        second.bias = first.bias
        return copy.deepcopy(model) if copied else model

    model = tiny_model(attention_bias=True)
    async with symbiosis.Executor(copy.deepcopy(model)) as executor, executor.client() as client:
        logits = (await client.run(changed(client.model), input_ids=IDS)).logits
    torch.testing.assert_close(logits, changed(model)(input_ids=IDS).logits, rtol=0, atol=1e-6)


async def test_parameters_of_a_masked_language_model_have_their_names(tmp_path: Path) -> None:
    """BERT's head and the layer inside share their bias."""
    plain = BertForMaskedLM(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    async with symbiosis.Executor(plain) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base, base.client() as client:
            names = [name for name, _ in client.model.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]


async def test_pickling_is_refused(client: Any) -> None:
    with pytest.raises(TypeError, match=r"stands for a base layer of the executor.*client\.save_adapter"):
        pickle.dumps(client.model)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(client.model.lm_head, "/dev/null")


async def test_pickling_an_opened_model_is_refused(tmp_path: Any) -> None:
    def dump() -> None:
        with symbiosis.open_model(f"shm://{tmp_path}/s") as model:
            pickle.dumps(model)

    async with symbiosis.Executor(tiny_model()) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        with pytest.raises(TypeError, match=r"opened model cannot be pickled.*save_pretrained of the PEFT model"):
            await asyncio.to_thread(dump)


async def test_deepcopy_of_a_model_is_served_by_the_same_client(client: Any) -> None:
    copied = copy.deepcopy(client.model)
    expected = (await client.forward(input_ids=IDS)).logits
    for _ in range(3):
        assert torch.equal((await client.run(copied, input_ids=IDS)).logits, expected)
    assert copied.lm_head is not client.model.lm_head
    assert copied.lm_head._requester is client.model.lm_head._requester


class TestServedWhole:
    async def test_a_module_without_changes_inside_is_served_whole(self, base: Any) -> None:
        async with symbiosis.Executor(base, base_layers="mlp") as executor:
            async with executor.client(lora(target_modules=["q_proj"])) as client:
                await client.train_step(BATCH, torch.optim.SGD(client.model.parameters(), lr=0.1))
                found = set(executor.statistics().layers)
                assert "model.layers.0.mlp forward" in found
                assert "model.layers.1.mlp backward" in found
                assert not any("gate_proj" in name for name in found)
            executor.reset_statistics()
            async with executor.client(lora(target_modules=["up_proj"], layers_to_transform=[0])) as client:
                await client.forward(input_ids=IDS)
                found = set(executor.statistics().layers)
                assert "model.layers.0.mlp forward" not in found
                assert "model.layers.1.mlp forward" in found
                assert any("layers.0.mlp.up_proj" in name for name in found)

    async def test_a_module_with_active_dropout_is_not_served_whole(self) -> None:
        """GPT-2's MLP has a dropout: in training mode the client computes it, in evaluation mode the executor."""
        model = tiny_model("gpt2")
        async with symbiosis.Executor(model, base_layers="mlp") as executor, executor.client() as client:
            await client.forward(input_ids=IDS)
            assert "transformer.h.0.mlp forward" in executor.statistics().layers
            executor.reset_statistics()
            client.model.train()
            await client.forward(input_ids=IDS)
            assert "transformer.h.0.mlp forward" not in executor.statistics().layers

    @pytest.mark.parametrize("how", ["hook", "pre-hook", "backward hook", "forward"])
    async def test_hooks_inside_are_called(self, base: Any, how: str) -> None:
        """The module runs in the client as long as a layer inside has a hook, or a forward of the tenant's."""

        def double(model: Any) -> Any:
            layer = model.model.layers[0].mlp.act_fn
            if how == "hook":
                return layer.register_forward_hook(lambda module, x, y: 2 * y)
            if how == "pre-hook":
                return layer.register_forward_pre_hook(lambda module, x: (2 * x[0],))
            if how == "backward hook":
                return layer.register_full_backward_hook(lambda module, dx, dy: (2 * dx[0],))
            layer.forward = lambda x, plain=layer.forward: 2 * plain(x)
            return None

        def gradient(model: Any) -> torch.Tensor:
            rows = torch.linspace(-1, 1, 18 * 32).view(2, 9, 32).requires_grad_()
            model(inputs_embeds=rows).logits.square().mean().backward()
            assert rows.grad is not None
            return rows.grad

        plain = copy.deepcopy(base)
        unchanged = gradient(plain)
        double(plain)
        expected = gradient(plain)
        assert not torch.allclose(expected, unchanged)
        async with symbiosis.Executor(base, base_layers="mlp") as executor, executor.client() as client:
            handle = double(client.model)
            torch.testing.assert_close(await asyncio.to_thread(gradient, client.model), expected)
            if handle is not None:
                handle.remove()
                torch.testing.assert_close(await asyncio.to_thread(gradient, client.model), unchanged)

    async def test_hooks_of_the_provider_are_called_by_the_executor(self, base: Any) -> None:
        model = copy.deepcopy(base)
        model.model.layers[0].mlp.act_fn.register_forward_hook(lambda module, x, y: 2 * y)
        async with symbiosis.Executor(copy.deepcopy(model), base_layers="mlp") as executor:
            async with executor.client() as client:
                for tenant in (client.model, copy.deepcopy(client.model)):
                    executor.reset_statistics()
                    logits = (await client.run(tenant, input_ids=IDS)).logits
                    torch.testing.assert_close(logits, model(input_ids=IDS).logits)
                    assert "model.layers.0.mlp forward" in executor.statistics().layers

    async def test_number_of_layers(self, base: Any) -> None:
        async with symbiosis.Executor(base, base_layers="mlp") as executor, executor.client() as client:
            assert sum(isinstance(module, VirtLayer) for module in client.model.modules()) == 17


class Transposing(nn.Module):
    """Calls a layer with a bias on tensors of several shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        shapes = (x, x.transpose(0, 1), x[:, -1:], x[None].transpose(1, 2), x[0], x[0].clone().t().contiguous().t())
        return [self.linear(shaped) for shaped in shapes]


@pytest.mark.parametrize("gradients", [False, True])
async def test_bf16_is_rounded_where_the_plain_layer_rounds(gradients: bool) -> None:
    """torch adds the bias inside the product, or to the rounded product: that depends on the strides of the input."""
    torch.manual_seed(0)
    model = Transposing().to(torch.bfloat16)
    x = torch.randn(5, 7, 32, dtype=torch.bfloat16, requires_grad=gradients)
    async with symbiosis.Executor(copy.deepcopy(model)) as executor, executor.client() as client:
        found = await client.run(client.model, x)
    for one, other in zip(found, model(x), strict=True):
        assert torch.equal(one, other), (one.shape, (one - other).abs().max())


@pytest.mark.parametrize("how", ["unfrozen", "modules_to_save"])
async def test_own_weights_inside_a_module_that_is_served_whole(how: str) -> None:
    """With a pattern, the layers inside are no base layers, and the module runs in the client once one is changed."""
    model = tiny_model()
    config = lora(target_modules=["q_proj"], modules_to_save=["mlp"]) if how == "modules_to_save" else None

    def change(adapted: Any) -> None:
        if config is None:
            adapted.model.layers[0].mlp.down_proj.weight.requires_grad_(True)

    job = Job(steps=3, new_tokens=4, prepare=change)
    expected = run_job_plain(model, config, job)
    async with symbiosis.Executor(copy.deepcopy(model), base_layers=["*.self_attn.*_proj", "*.mlp"]) as executor:
        async with executor.client(config, seed=0) as client:
            found = await run_job(client, job)
    assert any("mlp" in name for name in found.gradients)
    assert Comparison.of(found, expected).worst() <= 1e-5


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning", "ignore:.*trace:Warning")
@pytest.mark.parametrize(
    "write_down",
    [
        lambda model: torch.jit.trace(model, (IDS,), strict=False),  # type: ignore[no-untyped-call]
        lambda model: torch.export.export(model, (IDS,)),
        lambda model: torch.jit.script(model.model.layers[0].self_attn.q_proj),
    ],
    ids=["trace", "export", "script"],
)
async def test_tracing_is_refused(base: Any, tmp_path: Path, write_down: Callable[[Any], object]) -> None:
    """A trace would lack the base layers. In the executor's process it would hold those, and with them the weights."""
    complaint = r"q_proj: this model cannot be traced or exported.*save the adapter"

    def opened() -> torch.Tensor:
        with symbiosis.open_model(f"shm://{tmp_path}/s") as model:
            with pytest.raises(UsageError, match=complaint):
                write_down(model)
            logits: torch.Tensor = model(IDS).logits
            return logits

    async with symbiosis.Executor(copy.deepcopy(base)) as executor, executor.client() as client:
        with pytest.raises(UsageError, match=complaint):
            await client.run(write_down, client.model)
        await executor.listen(f"shm://{tmp_path}/s")
        expected = base(IDS).logits
        assert torch.equal(await in_thread(opened), expected)
        assert torch.equal((await client.forward(IDS)).logits, expected)


def _remove(layer: Any) -> None:
    layer.bias = None


def _prune(layer: Any) -> None:
    prune.random_unstructured(layer, "bias", amount=0.5)


@pytest.mark.parametrize(
    ("name", "layer", "change", "base_layers"),
    [
        ("OPTForCausalLM", "model.decoder.layers.0.fc1", _remove, "linear"),
        ("OPTForCausalLM", "model.decoder.layers.0.fc1", _prune, "linear"),
        ("GPT2LMHeadModel", "transformer.h.0.mlp.c_fc", _prune, "mlp"),
        ("GPTNeoForCausalLM", "transformer.h.0.mlp.c_fc", _remove, ["*.mlp"]),
    ],
)
async def test_a_bias_that_the_tenant_removes_or_prunes(
    name: str, layer: str, change: Callable[[Any], None], base_layers: Any
) -> None:
    base = zoo_model(name)
    with torch.no_grad():
        base.get_submodule(layer).bias.normal_()
    right = copy.deepcopy(base)
    async with symbiosis.Executor(base, base_layers=base_layers) as executor, executor.client(seed=0) as client:
        before = (await client.forward(input_ids=IDS)).logits
        client.manual_seed(3)
        await client.run(lambda: change(client.model.get_submodule(layer)))
        found = (await client.forward(input_ids=IDS)).logits
    torch.manual_seed(3)
    change(right.get_submodule(layer))
    torch.testing.assert_close(found, right.eval()(input_ids=IDS).logits, rtol=0, atol=1e-5)
    assert not torch.allclose(found, before, atol=1e-3)


async def test_dropout_that_the_tenant_switches_on_inside_a_module_that_is_served_whole() -> None:
    base = tiny_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    right = copy.deepcopy(base)

    def loss(model: Any) -> Any:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        return model(input_ids=IDS, labels=IDS).loss

    async with symbiosis.Executor(base, base_layers="mlp") as executor, executor.client(seed=0) as client:
        client.manual_seed(3)
        found = await client.run(loss, client.model)
    torch.manual_seed(3)
    torch.testing.assert_close(found, loss(right), rtol=1e-5, atol=0)


async def test_preparation_does_not_change_buffers() -> None:
    """Batch norms note the mean of what they see in training."""

    class Noted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.inner(x)

    base = tiny_model()
    base.model.norm = Noted(base.model.norm)
    async with symbiosis.Executor(base) as executor, executor.client(privacy="noise-pool:size=4") as client:
        await client.precompute()
        assert client.model.model.norm.seen.item() == 0
        await client.forward(input_ids=IDS)
        assert client.model.model.norm.seen.item() == 1
