"""The executor computes products with a base layer's weight. Code that needs the values of the weight is refused."""

from __future__ import annotations

import asyncio
import copy
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME as FILE
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import symbiosis
from symbiosis.client.parameters import SharedParameter
from symbiosis.client.virtlayer import VirtLayer, is_missing
from symbiosis.errors import CannotWaitError, ClientClosedError, PlaceholderError
from symbiosis.testing import tiny_model
from tests.fused import LOSSES, Chunked, step
from tests.helpers import IDS, adamw, crowd, lora
from tests.moe import mixture

I, O, N = 6, 10, 4  # in_features, out_features, rows  # noqa: E741


class Layers(nn.Module):
    """A model with one layer of each kind, and with biases that are not zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(I, O, bias=False)
        self.biased = nn.Linear(I, O)
        self.conv = Conv1D(O, I)
        self.column = nn.Linear(1, O)
        nn.init.normal_(self.conv.bias)


@pytest.fixture
async def executor() -> AsyncIterator[symbiosis.Executor]:
    async with symbiosis.Executor(Layers()) as executor:
        yield executor


@pytest.fixture
async def client(executor: symbiosis.Executor) -> AsyncIterator[symbiosis.Client]:
    async with executor.client() as client:
        yield client


def weight_of(model: Any, kind: str) -> torch.Tensor:
    """Return the weight of a layer as [o, i]."""
    weight = model.get_submodule(kind).weight
    return weight.t() if kind == "conv" else weight


def addmm_(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found = torch.ones(N, O)
    found[1:3].addmm_(x[1:3], w.t(), beta=2, alpha=3)
    return found


Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FORWARD: dict[str, Form] = {
    "F.linear": lambda x, w: F.linear(x, w),
    "F.linear with bias": lambda x, w: F.linear(x, w, torch.arange(float(O))),
    "F.linear by name": lambda x, w: F.linear(input=x, weight=w, bias=None),
    "@ t()": lambda x, w: x @ w.t(),
    "@ T": lambda x, w: x @ w.T,
    "matmul mT": lambda x, w: torch.matmul(x, other=w.mT),
    "mm transpose": lambda x, w: x.mm(w.transpose(0, 1)),
    "mm permute": lambda x, w: torch.mm(x, mat2=w.permute(1, 0)),
    "linalg": lambda x, w: torch.linalg.matmul(x, w.t()),
    "addmm": lambda x, w: torch.addmm(torch.ones(O), x, w.t(), beta=2, alpha=3),
    "addmm that ignores its input": lambda x, w: torch.addmm(torch.full((O,), torch.nan), x, w.t(), beta=0, alpha=3),
    "addmm_": addmm_,
    "data": lambda x, w: x @ w.data.t(),
    "detach": lambda x, w: x @ w.detach().t(),
    "clone": lambda x, w: x @ w.clone().t().contiguous(),
    "a copy": lambda x, w: x @ copy.deepcopy(w).t(),
    "a copy of a part": lambda x, w: x @ copy.copy(w)[3:7].t(),
    "casts": lambda x, w: x.double() @ w.to(torch.float64).t(),
    "cast to what it is": lambda x, w: x.float() @ w.float().type_as(x).t(),
    "vector": lambda x, w: x[0] @ w.t(),
    "three dimensions": lambda x, w: x.view(2, 2, I) @ w.t(),
    "not contiguous": lambda x, w: x.t().contiguous().t()[::2] @ w.t(),
    "a part": lambda x, w: x @ w[3:7].t(),
    "one row": lambda x, w: x @ w[3:4].t(),
    "no row": lambda x, w: x @ w[3:3].t(),
    "no x": lambda x, w: x[:0] @ w.t(),
    "some columns": lambda x, w: x[:, 1:4] @ w[2:, 1:4].T,
    "a part of a part, cast": lambda x, w: x.double() @ w.T[:, 2:8].double()[:, 1:3],
    "chunks": lambda x, w: torch.cat([x @ part.t() for part in w.split(3)], -1),
    "chunks turned": lambda x, w: torch.cat([x @ part for part in w.t().chunk(4, dim=1)], -1),
}
"""Multiply x [n, i] by the transpose of w [o, i]."""
BACKWARD: dict[str, Form] = {
    "@": lambda y, w: y @ w,
    "F.linear turned": lambda y, w: F.linear(y, w.t()),
    "a part": lambda y, w: y[:, 2:5] @ w[2:5],
    "parts added": lambda y, w: y[:, :4] @ w[:4] + y[:, 4:] @ w[4:],
    "some columns": lambda y, w: y @ w[:, 1:3],
}
"""Multiply y [n, o] by w [o, i]."""


def check(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert type(mine) is torch.Tensor
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("waits", ["fiber", "thread"])
@pytest.mark.parametrize("kind", ["linear", "biased", "conv"])
@pytest.mark.parametrize("form", [*FORWARD, *(f"{name} (back)" for name in BACKWARD)])
async def test_products(executor: Any, client: Any, form: str, kind: str, waits: str) -> None:
    """The product equals that of the plain weight, and so does its gradient with respect to the rows."""
    multiply = BACKWARD[form[: -len(" (back)")]] if "(back)" in form else FORWARD[form]
    mine = torch.randn(N, O if "(back)" in form else I, requires_grad=True)
    theirs = mine.detach().clone().requires_grad_()
    expected = multiply(theirs, weight_of(executor.service.resident().model, kind))
    dy = torch.randn_like(expected)
    if waits == "fiber":
        y = await client.run(lambda: multiply(mine, weight_of(client.model, kind)))
        check(y, expected)
        await client.backward(y, gradient=dy)
    else:

        def work() -> torch.Tensor:
            y = multiply(mine, weight_of(client.model, kind))
            y.backward(dy)
            return y

        check(await asyncio.to_thread(work), expected)
    expected.backward(dy)
    assert mine.grad is not None
    check(mine.grad, theirs.grad)  # type: ignore[arg-type]
    for mode in (torch.no_grad, torch.inference_mode):

        def without_grad(mode: Any = mode) -> torch.Tensor:
            with mode():
                return multiply(mine, weight_of(client.model, kind))

        check(await client.run(without_grad), expected.detach())


@pytest.mark.parametrize("weight", [lambda w: w.t(), lambda w: w[2:5].t()], ids=["whole", "part"])
async def test_one_column(executor: Any, client: Any, weight: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The weight is [o, 1], so its strides do not show whether it is transposed."""
    x = torch.randn(N, 1)
    expected = x @ weight(executor.service.resident().model.column.weight)
    check(await client.run(lambda: x @ weight(client.model.column.weight)), expected)


async def test_out_argument(executor: Any, client: Any) -> None:
    x, weight = torch.randn(N, I), executor.service.resident().model.linear.weight
    for out in (torch.empty(N, O), torch.empty(N, 2 * O)[:, :O], torch.empty(0)):
        result = await client.run(lambda out=out: torch.mm(x, client.model.linear.weight.t(), out=out))
        assert result is out
        check(out, x @ weight.t())


async def test_consecutive_parts_are_one_request(executor: Any, client: Any) -> None:
    """A change of the rows between two parts is noticed, and no result is kept that the code cannot use any more."""
    x = torch.randn(N, I)

    def chunks() -> torch.Tensor:
        return torch.cat([x @ part.t() for part in client.model.linear.weight.split(3)], -1)

    await client.run(chunks)
    assert executor.statistics().layers["linear forward"].requests == 1

    def change() -> tuple[torch.Tensor, torch.Tensor]:
        weight = client.model.linear.weight
        first = x @ weight[:5].t()
        x.mul_(2)
        return first, x @ weight[:5].t()

    first, second = await client.run(change)
    check(2 * first, second)

    def change_the_result() -> tuple[torch.Tensor, torch.Tensor]:
        weight = client.model.linear.weight
        first = x @ weight[:5].t()
        return first.clone(), [first.mul_(2), x @ weight[:5].t()][1]

    check(*await client.run(change_the_result))
    await client.run(chunks)
    assert client._requester.here.kept.is_empty

    def let_go() -> bool:
        rows = x.clone()
        rows @ client.model.linear.weight[:5].t()
        assert not client._requester.here.kept.is_empty
        del rows
        return client._requester.here.kept.is_empty

    assert await client.run(let_go)


@pytest.mark.parametrize("behind", ["numpy", "data"])
async def test_rows_that_change_without_a_new_version(executor: Any, client: Any, behind: str) -> None:
    """No product of the rows from before the change is used for the next part."""

    def work(weight: torch.Tensor) -> torch.Tensor:
        x, parts = torch.ones(N, I), []
        same_memory = x.numpy()
        for part in weight.split(3):
            parts.append(x @ part.t())
            if behind == "numpy":
                same_memory *= 2
            else:
                x.data.mul_(2)
        return torch.cat(parts, -1)

    with torch.no_grad():
        expected = work(executor.service.resident().model.linear.weight)
    check(await client.run(work, client.model.linear.weight), expected)


async def test_backward_of_each_part(executor: Any, client: Any) -> None:
    """Each part has a graph of its own, which is freed after its backward pass."""

    def work(weight: torch.Tensor) -> torch.Tensor:
        x = torch.ones(N, I, requires_grad=True)
        for part in weight.split(3):
            (x @ part.t()).square().mean().backward()
        assert x.grad is not None
        return x.grad

    expected = work(executor.service.resident().model.linear.weight.detach())
    check(await asyncio.to_thread(work, client.model.linear.weight), expected)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
async def test_a_copy_of_a_placeholder_is_a_placeholder(client: Any, how: Callable[[Any], Any]) -> None:
    """The copy remains a placeholder until the tenant makes it its own."""
    weight = how(client.model.linear.weight)
    assert weight is not client.model.linear.weight
    assert weight.is_placeholder
    with pytest.raises(PlaceholderError, match=r"^linear: mul needs the values"):
        weight * 2
    weight.requires_grad_(True)
    assert weight.isfinite().all()
    assert client.model.linear.weight.is_placeholder


async def test_autocast(executor: Any, client: Any) -> None:
    x = torch.randn(N, I)

    def work(model: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            weight, bias = model.biased.weight, model.biased.bias
            return [x @ weight.t(), F.linear(x, weight, bias), x.bfloat16() @ weight[2:4].bfloat16().t()]

    for mine, theirs in zip(await client.run(work, client.model), work(executor.service.resident().model), strict=True):
        assert mine.dtype is theirs.dtype is torch.bfloat16
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside-others"])
@pytest.mark.parametrize("loss", LOSSES)
async def test_fused_losses_train_as_plain_peft_does(loss: str, alone: bool) -> None:
    model, config = tiny_model(), lora(lora_dropout=0.0, target_modules=["q_proj", "down_proj"])
    torch.manual_seed(1)
    plain = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config)).train()
    state = {name: p.detach().clone() for name, p in plain.named_parameters() if p.requires_grad}
    optimizer = adamw(plain, lr=1e-2)
    expected = []
    for _ in range(4):
        value = step(plain, LOSSES[loss])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    assert expected[-1] < expected[0]
    others = [] if alone else [(lora(), "train"), (None, "generate")]
    async with symbiosis.Executor(model) as executor, crowd(executor, others), executor.client(config) as client:
        client.model.train().load_state_dict(state, strict=False)
        optimizer = adamw(client.model, lr=1e-2)
        found = []
        for _ in range(4):
            value = await client.run(step, client.model, LOSSES[loss])
            await client.backward(value)
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.item())
    assert found == pytest.approx(expected, rel=1e-5)
    assert torch._C._is_fwd_grad_enabled()


async def test_backward_inside_a_fiber_is_refused_for_a_placeholder(client: Any) -> None:
    def work() -> None:
        x = torch.ones(N, I, requires_grad=True)
        Chunked.apply(x, client.model.linear.weight, torch.arange(N)).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(CannotWaitError, match="inside a fiber"):
        await client.run(work)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "mul": lambda w: w * 2,
    "add": lambda w: 1 + w[2:4],
    "sum": lambda w: w.sum(),
    "norm": lambda w: torch.linalg.norm(w, dim=1),
    "svd": lambda w: torch.linalg.svd(w.double()),
    "einsum": lambda w: torch.einsum("oi,ni->no", w, torch.ones(N, I)),
    "cat": lambda w: torch.cat([w.t(), torch.ones(I, 1)], 1),
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "indices": lambda w: w[[1, 2]],
    "on the left": lambda w: w @ torch.ones(I, N),
    "every second row": lambda w: torch.ones(N, I) @ w[::2].t(),
    "batch": lambda w: torch.ones(2, N, I).bmm(w.t().expand(2, I, O)),
    "integers": lambda w: w.to(torch.int64),
    "into something else": lambda w: torch.zeros(O, I).copy_(w.detach()),
    "in place": lambda w: w.clone().add_(1),
    "[...] =": lambda w: w.data.__setitem__(0, 1.0),
    "round the parameter": lambda w: torch.neg_(w),
    "foreach": lambda w: torch._foreach_zero_([w.data]),
    "out": lambda w: torch.mul(torch.ones(O, I), 2, out=w),
    "sign": lambda w: w.sign(),
    "sgn": lambda w: torch.sgn(w[2:4]),
    "copysign": lambda w: torch.ones(O, I).copysign(w),
    "heaviside": lambda w: torch.heaviside(w, torch.zeros(())),
    "nan_to_num": lambda w: torch.nan_to_num(w),
    "nan_to_num_": lambda w: torch.nan_to_num_(w.detach()),
    "nansum": lambda w: w.nansum(),
    "nanmean": lambda w: w.nanmean(0),
    "nanmedian": lambda w: torch.nanmedian(w, 1),
    "nanquantile": lambda w: w.nanquantile(0.5, 0),
    "fmax": lambda w: torch.fmax(torch.zeros(()), w),
    "fmin": lambda w: w.fmin(torch.zeros(())),
    "number": lambda w: w[0, 0].item(),
    "array": lambda w: w.detach().numpy(),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "sparse": lambda w: w.to_sparse().sum(),
    "trained": lambda w: torch.ones(N, I) @ nn.Parameter(w.detach()).t(),
}


@pytest.mark.parametrize("how", REFUSED)
async def test_code_that_needs_values_is_refused(executor: Any, client: Any, how: str) -> None:
    """The error names the layer, and the placeholder is unchanged."""
    weight = client.model.biased.weight
    with pytest.raises(
        PlaceholderError, match=r"^biased: \w+ needs the values.*stay with the executor; call the layer"
    ):
        await client.run(REFUSED[how], weight)
    assert weight.is_placeholder
    assert torch.isnan(weight).all()
    x = torch.ones(N, I)
    check(await client.run(lambda: x @ weight.t()), x @ executor.service.resident().model.biased.weight.t())


async def test_shapes_that_do_not_match(client: Any) -> None:
    """The error is torch's own."""
    for x in (torch.ones(N, I + 1), torch.ones(N, I, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same dtype"):
            await client.run(lambda x=x: x @ client.model.linear.weight.t())


async def test_operations_that_need_no_values(client: Any) -> None:
    weight = client.model.linear.weight
    assert weight.t().shape == (I, O)
    assert weight[2:4].float().device == torch.device("cpu")
    assert weight.untyped_storage().nbytes() == 4
    assert weight.double().untyped_storage().nbytes() == 8
    assert torch.isnan(weight[1:3]).all()
    assert torch.zeros_like(weight).eq(0).all()
    assert torch.empty_like(weight).shape == weight.new_empty(O, I).shape == (O, I)
    assert "nan" in repr(weight)
    assert torch.ones(2).double().to(weight).dtype is torch.float32
    assert isinstance(weight, nn.Parameter)


async def test_a_weight_of_the_tenants_own_is_multiplied_by_the_client(client: Any) -> None:
    layer = client.model.linear
    placeholder = layer.weight
    layer.weight.requires_grad_(True)
    assert layer.weight is placeholder
    assert type(placeholder) is SharedParameter  # its values and gradient use the client's memory
    (torch.ones(N, I) @ layer.weight.t()).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((O, I), float(N)))


@pytest.mark.parametrize("leaf", ["weight", "bias"])
async def test_values_that_are_assigned_are_computed_with(executor: Any, client: Any, leaf: str) -> None:
    """The executor's values hold no longer after ``layer.weight.data = …``."""
    theirs, x = executor.service.resident().model.biased, torch.ones(N, I)
    values = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    values[leaf] = torch.full_like(values[leaf], 0.5)
    getattr(client.model.biased, leaf).data = values[leaf]
    check(await client.run(client.model.biased, x), F.linear(x, **values))


async def test_a_layer_that_is_initialised_again_has_values(client: Any) -> None:
    nn.init.normal_(client.model.linear.weight)
    nn.init.zeros_(client.model.biased.weight)
    assert client.model.linear.weight.isfinite().all()
    assert client.model.biased.weight.eq(0).all()


async def test_products_of_a_copied_model(executor: Any, client: Any) -> None:
    x, weight = torch.ones(N, I), executor.service.resident().model.conv.weight
    copied = copy.deepcopy(client.model)
    client._model = None
    check(await client.run(lambda: x @ copied.conv.weight), x @ weight)


async def test_products_after_to(executor: Any, client: Any) -> None:
    """After client.model.to(float64), results have the precision of the base model."""
    x, weight = torch.ones(N, I, dtype=torch.float64), executor.service.resident().model.linear.weight.double()
    client.model.to(torch.float64)
    torch.testing.assert_close(
        await client.run(lambda: x @ client.model.linear.weight.t()), x @ weight.t(), rtol=1e-5, atol=1e-6
    )


async def test_tied_weights_are_real() -> None:
    model = tiny_model(tie_word_embeddings=True)
    async with symbiosis.Executor(model) as executor, executor.client() as client:
        x = torch.ones(N, 32)
        assert torch.equal(x @ client.model.lm_head.weight.t(), x @ model.lm_head.weight.t())


async def test_products_after_the_client_was_closed(executor: Any) -> None:
    async with executor.client() as client:
        weight = client.model.linear.weight
    with pytest.raises(ClientClosedError, match="linear"):
        torch.ones(N, I) @ weight.t()


async def test_a_state_dict_has_no_placeholders(executor: Any, client: Any) -> None:
    """It can be saved in any format and loaded again, and placeholders remain placeholders."""
    state = client.model.state_dict()
    assert "linear.weight" not in state
    assert not any(tensor.isnan().any() for tensor in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    assert safetensors.torch.load(safetensors.torch.save(state)).keys() == state.keys()
    file.seek(0)
    for kept in (torch.load(file, weights_only=True), copy.deepcopy(state)):
        client.model.load_state_dict(kept)
        assert client.model.linear.weight.is_placeholder
    x = torch.ones(N, I)
    check(await client.run(client.model.linear, x), executor.service.resident().model.linear(x))
    with pytest.raises(RuntimeError, match="Missing key"):
        Layers().load_state_dict(state)


@pytest.mark.parametrize("base_layers", ["linear", "mlp", ["*.mlp"]])
async def test_state_dicts_of_parts_have_no_placeholders(base_layers: Any, tmp_path: Any) -> None:
    """Each part of a model, adapted or copied, gives a state dict that can be saved and is loaded strictly."""
    async with symbiosis.Executor(tiny_model(), base_layers=base_layers) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with (
            symbiosis.connect(f"shm://{tmp_path}/s") as base,
            base.client(lora(target_modules=["q_proj"])) as client,
        ):
            wrapped = nn.ModuleDict({"model": client.model})
            copies = [copy.deepcopy(part) for part in client.model.modules() if not isinstance(part, VirtLayer)]
            for part in [*wrapped.modules(), *copy.deepcopy(wrapped).modules(), *copies]:
                state = part.state_dict()
                assert not any(tensor.isnan().any() for tensor in state.values())
                assert part.load_state_dict(state) == ([], [])
            with pytest.raises(RuntimeError, match=r"Missing key.*norm\.weight"):
                client.model.load_state_dict({})


@pytest.mark.parametrize("base_layers", ["linear", ["*.mlp"]])
async def test_placeholders_stay_such_when_a_model_is_cast(base_layers: Any, tmp_path: Any) -> None:
    """Those of a bank of experts, and those inside a module that is served whole, take no memory for their shape."""
    model = mixture("mixtral") if base_layers == "linear" else tiny_model()
    async with symbiosis.Executor(model, base_layers=base_layers) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base, base.client() as client:
            missing = {name for name, parameter in client.model.named_parameters() if is_missing(parameter)}
            state, logits = client.model.state_dict().keys(), (await client.forward(IDS)).logits
            for dtype in (torch.float64, torch.float32):
                client.model.to(dtype)
                cast = {name: parameter for name, parameter in client.model.named_parameters() if is_missing(parameter)}
                assert cast.keys() == missing
                assert all(parameter.dtype is dtype for parameter in cast.values())
                assert client.model.state_dict().keys() == state
            assert torch.equal((await client.forward(IDS)).logits, logits)
            with pytest.raises(PlaceholderError, match="its weights stay with the executor"):
                next(parameter for name, parameter in cast.items() if "mlp" in name).requires_grad_(True)


@pytest.mark.parametrize("part", ["lm_head", "mlp"])
async def test_an_adapter_with_a_saved_part_is_loaded(part: str, tmp_path: Any) -> None:
    """PEFT finds out from the state dict of its copy of the part what to load, and to save again."""
    model, config = tiny_model(), lora(target_modules=["q_proj"], modules_to_save=[part, "norm"])
    plain = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config)).eval()
    for name, parameter in plain.named_parameters():
        if f"{part}.modules_to_save" in name:
            nn.init.normal_(parameter)
    plain.save_pretrained(tmp_path)
    ids = torch.arange(3, 21).reshape(2, 9)
    async with symbiosis.Executor(model) as executor, executor.client() as client:
        loaded = peft.PeftModel.from_pretrained(client.model, tmp_path).eval()
        assert not any(tensor.isnan().any() for tensor in loaded.state_dict().values())
        with torch.no_grad():
            torch.testing.assert_close((await client.run(loaded, ids)).logits, plain(ids).logits)
        loaded.save_pretrained(tmp_path / "again")
        first, again = (safetensors.torch.load_file(folder / FILE) for folder in (tmp_path, tmp_path / "again"))
        torch.testing.assert_close(again, first, rtol=0, atol=0)


async def test_parametrized_placeholders_are_left_out_too(client: Any) -> None:
    nn.utils.parametrize.register_parametrization(client.model.linear, "weight", nn.Identity(), unsafe=True)
    state = client.model.linear.state_dict()
    assert not any(tensor.isnan().any() for tensor in state.values())
    client.model.linear.load_state_dict(state)


async def test_a_trained_weight_is_in_the_state_dict(client: Any) -> None:
    client.model.linear.weight.requires_grad_(True)
    assert not client.model.state_dict()["linear.weight"].isnan().any()
    with pytest.raises(RuntimeError, match=r"Missing key.*linear\.weight"):
        client.model.load_state_dict({})


async def test_placeholders_are_not_saved_as_nan(client: Any) -> None:
    """A state dict leaves them out. A dictionary of parameters has them, and a file of NaN would be of no use."""
    for tensors in (dict(client.model.named_parameters()), [p.detach().clone() for p in client.model.parameters()]):
        with pytest.raises(PlaceholderError, match=r"save model.state_dict\(\)"):
            torch.save(tensors, io.BytesIO())


async def test_models_inside_refuse_to_be_saved_too(tmp_path: Any) -> None:
    """They would be saved without their base layers, and loaded with random ones."""
    async with symbiosis.Executor(tiny_model()) as executor, executor.client(lora()) as client:
        inside = client.model.base_model.model.model
        for model in (inside, copy.deepcopy(inside)):
            with pytest.raises(PlaceholderError, match=r"client\.save_adapter"):
                model.save_pretrained(tmp_path)


# ------------------------------------------------------------------------------------------ products in a wider dtype


@pytest.mark.parametrize("kind", ["linear", "biased", "conv"])
@pytest.mark.parametrize("privacy", ["none", "noise-pool:size=8"])
async def test_a_weight_that_is_converted_first_is_multiplied_in_fp32(kind: str, privacy: str) -> None:
    """In bf16 a mixture's router, or a loss, converts a weight to fp32 so that nothing is rounded to bf16."""
    x, dy = torch.randn(N, I), torch.randn(N, O)

    def products(model: Any) -> list[torch.Tensor]:
        weight = weight_of(model, kind).float()
        found = []
        for rows, by in ((x, weight.t()), (dy, weight)):
            given = rows.clone().requires_grad_()
            y = given @ by
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), given)] if privacy == "none" else [y.detach()]
        return found

    expected = products(Layers().bfloat16())
    async with symbiosis.Executor(Layers().bfloat16()) as executor, executor.client(privacy=privacy) as client:
        if privacy == "none":
            found = await asyncio.to_thread(products, client.model)
        else:
            found = await client.run(products, client.model)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, plain, rtol=1e-4 if privacy == "none" else 1e-2, atol=1e-4)
    assert not torch.equal(expected[0], expected[0].bfloat16().float()), "in bf16 it would be another result"


async def test_parts_under_autocast_are_products_of_the_layers_own_dtype() -> None:
    """A layer in bf16 is not multiplied in fp32 because autocast, which makes bf16, is given fp32."""
    x = torch.randn(N, I)

    def product(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, model.linear.weight)

    expected = product(Layers().bfloat16())
    async with symbiosis.Executor(Layers().bfloat16()) as executor, executor.client() as client:
        assert torch.equal(await client.run(product, client.model), expected)
