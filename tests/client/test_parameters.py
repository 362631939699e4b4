"""Parameters and placeholders are shared until a tenant trains them or writes into them, which makes them its own."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

import symbiosis
from symbiosis.client.parameters import SharedParameter, fetch_of, placeholder, shared_parameter
from symbiosis.errors import PlaceholderError, UsageError
from tests.helpers import BATCH, IDS, in_thread, lora

T = TypeVar("T")

ORIGINAL = torch.arange(6.0).reshape(2, 3)


def make(kind: str) -> tuple[torch.Tensor, SharedParameter]:
    original = ORIGINAL.clone()
    if kind == "shared":
        return original, shared_parameter(original)
    return original, placeholder(original.shape, original.dtype, original.device, original.clone)


def by_method(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(True)


def by_attribute(parameter: nn.Parameter) -> None:
    parameter.requires_grad = True


def by_copy(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.copy_(ORIGINAL + 1)
        parameter.copy_(ORIGINAL)


def by_load_state_dict(parameter: nn.Parameter) -> None:
    module = nn.Module()
    module.register_parameter("p", parameter)
    module.load_state_dict({"p": ORIGINAL + 1})
    module.load_state_dict({"p": ORIGINAL})


@pytest.mark.parametrize("how", [by_method, by_attribute, by_copy, by_load_state_dict], ids=lambda how: how.__name__)
@pytest.mark.parametrize("kind", ["shared", "placeholder"])
def test_becomes_its_own(kind: str, how: Callable[[nn.Parameter], None]) -> None:
    original, parameter = make(kind)
    _, neighbour = make(kind)
    assert not parameter.own
    assert parameter.is_placeholder is (kind == "placeholder")
    how(parameter)
    assert parameter.own
    assert not parameter.is_placeholder
    assert torch.equal(parameter, ORIGINAL)
    with torch.no_grad():
        parameter.add_(1)
    assert torch.equal(original, ORIGINAL)
    assert not neighbour.own


def test_shared_memory_and_version_counters() -> None:
    """A tenant's change of its own copy must not be an in-place change for the autograd of another tenant."""
    original = ORIGINAL.clone()
    one, two = shared_parameter(original), shared_parameter(original)
    assert one.data_ptr() == two.data_ptr() == original.data_ptr()
    x = torch.ones(2, 3, requires_grad=True)
    y = (x * two).sum()
    one.requires_grad_(True)
    with torch.no_grad():
        one.add_(1)
    y.backward()
    assert torch.equal(x.grad, ORIGINAL)


def test_a_placeholder_has_no_storage_and_shows_as_nan() -> None:
    _, parameter = make("placeholder")
    assert parameter.untyped_storage().nbytes() == 4
    assert torch.isnan(parameter).all()
    assert torch.isnan(torch.ones(3) @ parameter.t()).all()
    assert isinstance(parameter, nn.Parameter)
    assert not parameter.requires_grad


@pytest.mark.parametrize("kind", ["shared", "placeholder"])
def test_freezing_does_not_make_a_copy(kind: str) -> None:
    _, parameter = make(kind)
    parameter.requires_grad_(False)
    parameter.requires_grad = False
    assert not parameter.own


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["shared", "placeholder"])
def test_deepcopy(kind: str, own: bool) -> None:
    """The copy of a shared parameter is shared. The copy of a tenant's own parameter is a separate one."""
    original, parameter = make(kind)
    if own:
        parameter.requires_grad_(True)
    copied = copy.deepcopy(parameter)
    assert isinstance(copied, SharedParameter)
    assert copied.own is own
    assert copied.requires_grad is own
    memo: dict[int, object] = {}
    assert copy.deepcopy(parameter, memo) is copy.deepcopy(parameter, memo)
    copied.requires_grad_(True)
    assert torch.equal(copied, ORIGINAL)
    with torch.no_grad():
        copied.mul_(2)
    if own or kind == "shared":
        assert torch.equal(parameter, ORIGINAL)
    assert torch.equal(original, ORIGINAL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_moves_as_parameters_do(dtype: torch.dtype) -> None:
    """After module.to(dtype), the tenant's own copy has the new dtype."""
    for kind in ("shared", "placeholder"):
        module = nn.Module()
        original, parameter = make(kind)
        module.register_parameter("p", parameter)
        module.to(dtype)
        assert module.p.dtype is dtype
        assert original.dtype is torch.float32
        if kind == "shared":
            assert torch.equal(module.p, ORIGINAL.to(dtype))
            module.p.requires_grad_(True)
            assert torch.equal(module.p, ORIGINAL.to(dtype))


def test_saved_as_a_plain_parameter() -> None:
    _, parameter = make("shared")
    file = io.BytesIO()
    torch.save({"p": parameter}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["p"]
    assert type(loaded) in (nn.Parameter, torch.Tensor)
    assert torch.equal(loaded, ORIGINAL)


WRITES = {
    "+=": lambda w: w.__iadd__(1),
    "*=": lambda w: w.__imul__(2),
    "/=": lambda w: w.__itruediv__(2),
    "neg_": lambda w: w.neg_(),
    "addcmul_": lambda w: w.addcmul_(w, w),
    "masked_fill_": lambda w: w.masked_fill_(ORIGINAL > 1, 9.0),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([0]), 7.0),
    "clamp_min_": lambda w: w.clamp_min_(3.0),
    "random_": lambda w: w.random_(),
    "pow_": lambda w: w.pow_(2),
    "init": lambda w: nn.init.trunc_normal_(w),
    "[...] =": lambda w: w.__setitem__(0, 5.0),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("kind", ["shared", "placeholder"])
def test_writes_are_the_tenants_own(kind: str, how: str) -> None:
    original, parameter = make(kind)
    with torch.no_grad():
        WRITES[how](parameter)
    assert parameter.own
    assert torch.equal(original, ORIGINAL)
    assert not torch.equal(parameter, ORIGINAL)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_state_dict_can_be_loaded_again(how: str) -> None:
    """Saved weights are loaded again: shared parameters stay shared, and placeholders stay placeholders."""
    module = nn.Module()
    original, shared = make("shared")
    _, hole = make("placeholder")
    trained = shared_parameter(torch.ones(3))
    trained.requires_grad_(True)
    for name, parameter in (("shared", shared), ("hole", hole), ("trained", trained)):
        module.register_parameter(name, parameter)
    if how == "deepcopy":
        state = copy.deepcopy(module.state_dict())
    else:
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        state = torch.load(file)
    with torch.no_grad():
        trained.add_(1)
    module.load_state_dict(state)
    assert torch.equal(trained, torch.ones(3))
    assert not shared.own
    assert hole.is_placeholder
    with pytest.raises(PlaceholderError, match="in place of a base layer"), torch.no_grad():
        shared.copy_(state["hole"])
    assert torch.equal(original, shared)


def test_values_that_a_tenant_assigned_are_kept() -> None:
    for kind in ("shared", "placeholder"):
        _, parameter = make(kind)
        parameter.data = torch.full((2, 3), 5.0)
        assert parameter.own
        parameter.requires_grad_(True)
        assert parameter.eq(5).all()


def test_the_same_values_in_another_dtype_are_shared_still() -> None:
    for kind in ("shared", "placeholder"):
        _, parameter = make(kind)
        parameter.data = parameter.data
        parameter.data = parameter.data.to(torch.float64)
        assert not parameter.own


def test_a_shallow_copy_is_shared_too() -> None:
    original, parameter = make("shared")
    copied = copy.copy(parameter)
    with torch.no_grad():
        copied.mul_(3)
    assert torch.equal(original, ORIGINAL)
    assert torch.equal(parameter, ORIGINAL)


def by_training(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(2, 3)
    torch.optim.SGD([parameter], lr=1.0).step()


@pytest.mark.parametrize("write", [by_training, lambda p: p.data.mul_(2), lambda p: p.detach()[0].add_(1)])
@pytest.mark.parametrize("kind", ["shared", "placeholder"])
def test_a_parameter_made_from_a_shared_one_is_the_tenants_own(
    kind: str, write: Callable[[nn.Parameter], object]
) -> None:
    original, parameter = make(kind)
    made = nn.Parameter(parameter)
    assert made.requires_grad
    assert torch.equal(made, ORIGINAL)
    write(made)
    assert not torch.equal(made, ORIGINAL)
    assert torch.equal(original, ORIGINAL)
    assert not parameter.own
    again = nn.Parameter(made, requires_grad=False)  # of one's own, torch makes no copy
    assert again.data_ptr() == made.data_ptr()
    assert not again.requires_grad


async def test_what_makes_parameters_of_a_models_weights(base: Any) -> None:
    weight = base.get_input_embeddings().weight.detach().clone()
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        embeddings = client.model.get_input_embeddings()
        for source in (embeddings.weight, client.model.state_dict()["model.embed_tokens.weight"]):
            assert torch.equal(nn.Embedding.from_pretrained(source).weight, weight)
        norm = nn.utils.parametrizations.weight_norm(client.model.model.norm)
        torch.testing.assert_close(norm.weight, base.model.norm.weight)


def test_a_parameter_made_from_a_weight_that_stays_with_the_executor() -> None:
    meta = torch.empty(2, 3, device="meta")
    hole = placeholder(meta.shape, meta.dtype, torch.device("cpu"), fetch_of(meta, "lm_head"))
    with pytest.raises(PlaceholderError, match="lm_head: its weight stays with the executor"):
        nn.Parameter(hole)


@contextlib.asynccontextmanager
async def models(model: Any, way: str, folder: Path) -> AsyncIterator[Callable[[Callable[[Any], T]], Awaitable[T]]]:
    """Yield what runs a function of a client's model on a thread: of a client in the executor's process that can decode
    jointly, of one that cannot, or of an opened model."""
    async with symbiosis.Executor(model, joint="off" if way == "alone" else "auto") as executor:
        if way != "shm":
            async with executor.client() as client:
                yield lambda work: in_thread(work, client.model)
            return
        await executor.listen(f"shm://{folder}/s")

        def opened(work: Callable[[Any], T]) -> T:
            with symbiosis.open_model(f"shm://{folder}/s") as model:
                return work(model)

        yield lambda work: in_thread(opened, work)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("way", ["joint", "alone", "shm"])
async def test_training_with_nothing_trainable(base: Any, way: str, tmp_path: Path) -> None:
    """The first backward pass of a trainer says what to do, also if it divides the loss before."""

    def train(model: Any) -> None:
        arguments = TrainingArguments(
            str(tmp_path / "out"), max_steps=2, gradient_accumulation_steps=2, report_to=[], use_cpu=True
        )
        with pytest.raises(UsageError, match=r"^nothing in the model is trainable.*get_peft_model"):
            Trainer(model=model, args=arguments, train_dataset=[{"input_ids": IDS[0], "labels": IDS[0]}] * 4).train()

    async with models(base, way, tmp_path) as run:
        await run(train)


@pytest.mark.parametrize("way", ["joint", "alone", "shm"])
@pytest.mark.parametrize("what", ["a loop", "a frozen adapter", "Trainer"])
async def test_nothing_trainable_with_checkpointing(base: Any, way: str, what: str, tmp_path: Path) -> None:
    """Inputs with gradients give the loss one, so the backward pass runs; the optimizer's step says what to do."""

    def train(model: Any) -> None:
        if what == "a frozen adapter":
            model = get_peft_model(model, lora()).requires_grad_(False)
        model.train().enable_input_require_grads()
        if what == "Trainer":
            options = {"max_steps": 2, "gradient_checkpointing": True, "report_to": [], "use_cpu": True}
            data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
            step: Any = Trainer(model, TrainingArguments(str(tmp_path / "out"), **options), train_dataset=data).train
        else:
            step = torch.optim.AdamW(model.parameters()).step
            model(**BATCH).loss.backward()
        with pytest.raises(UsageError, match="has no trainable parameter"):
            step()

    async with models(base, way, tmp_path) as run:
        await run(train)


@pytest.mark.parametrize("way", ["joint", "alone", "shm"])
@pytest.mark.parametrize("training", [False, True])
async def test_windows_with_nothing_trainable(base: Any, way: str, training: bool, tmp_path: Path) -> None:
    def train(model: Any) -> None:
        with pytest.raises(UsageError, match=r"^nothing in the model is trainable"):
            symbiosis.backward_in_windows(model.train(training), BATCH, 4)

    async with models(base, way, tmp_path) as run:
        await run(train)


@pytest.mark.parametrize("way", ["joint", "alone", "shm"])
async def test_a_head_of_the_tenant_learns_from_a_frozen_model(base: Any, way: str, tmp_path: Path) -> None:
    head = nn.Linear(base.config.hidden_size, 1)

    def gradient(model: Any) -> torch.Tensor:
        hidden = model.train()(IDS, output_hidden_states=True).hidden_states[-1]
        (found,) = torch.autograd.grad(head(hidden).square().mean(), head.weight)
        return found

    expected = gradient(copy.deepcopy(base).requires_grad_(False))
    async with models(base, way, tmp_path) as run:
        assert torch.equal(await run(gradient), expected)


async def test_optimizers_of_other_models(base: Any) -> None:
    """They step beside a client's model that has nothing to train, in whatever way they have their gradients."""
    master = torch.ones(3)
    master.grad = torch.ones(3)
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        client.model.train().enable_input_require_grads()
        await client.forward(**BATCH)
        torch.optim.SGD([master], lr=1.0).step()
        assert not master.any()
        with pytest.raises(UsageError, match="has no trainable parameter"):
            torch.optim.SGD(client.model.parameters()).step()


@pytest.mark.parametrize("way", ["joint", "alone", "shm"])
async def test_results_of_a_frozen_model_are_tensors_like_any_other(base: Any, way: str, tmp_path: Path) -> None:
    def use(model: Any) -> None:
        output = model.train()(**BATCH)
        assert type(output.logits) is torch.Tensor
        assert not output.logits.requires_grad
        assert output.logits.numpy().shape == (*IDS.shape, base.config.vocab_size)
        assert torch.equal(copy.deepcopy(output).loss, output.loss)
        torch.save(output.loss, tmp_path / "loss")
        assert type(torch.load(tmp_path / "loss")) is torch.Tensor

    async with models(base, way, tmp_path) as run:
        await run(use)


@pytest.mark.parametrize("way", ["alone", "shm"])
async def test_a_training_step_with_a_frozen_adapter(base: Any, way: str, tmp_path: Path) -> None:
    """Inputs with gradients, as for checkpointing, give the loss one."""
    async with symbiosis.Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        await executor.listen(f"shm://{tmp_path}/s")
        connected = await stack.enter_async_context(symbiosis.connect(f"shm://{tmp_path}/s"))
        client = await stack.enter_async_context((executor if way == "alone" else connected).client(lora()))
        client.model.requires_grad_(False).enable_input_require_grads()
        optimizer = torch.optim.AdamW(client.model.parameters())
        with pytest.raises(UsageError, match=r"^the optimizer has no trainable parameter: nothing in the model"):
            await client.train_step(BATCH, optimizer)


async def test_a_training_step_of_what_is_not_a_parameter_of_the_model(base: Any) -> None:
    vector = torch.zeros(base.config.hidden_size, requires_grad=True)
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        client.model.model.layers[1].register_forward_hook(lambda module, args, out: out + vector)
        for window in (None, 4):
            before = vector.detach().clone()
            await client.train_step(BATCH, torch.optim.SGD([vector], lr=1.0), window=window)
            assert not torch.equal(vector, before)


@pytest.mark.parametrize("way", ["joint", "alone", "shm"])
async def test_a_loop_of_the_tenants_own_with_nothing_trainable(base: Any, way: str, tmp_path: Path) -> None:
    """A model is in evaluation mode when it was opened."""

    def train(model: Any) -> None:
        with pytest.raises(UsageError, match=r"^nothing in the model is trainable"):
            model(**BATCH).loss.backward()

    async with models(base, way, tmp_path) as run:
        await run(train)


@pytest.mark.parametrize("way", ["joint", pytest.param("shm", marks=pytest.mark.thorough)])
async def test_nothing_trainable_in_compiled_code(base: Any, way: str, tmp_path: Path) -> None:
    """The compiler looks at each function by itself once it has compiled the outer one too often."""

    def train(model: Any) -> None:
        torch.compiler.reset()
        compiled = torch.compile(model.train(), backend="eager")
        with torch._dynamo.config.patch(recompile_limit=1):
            for length in (9, 5, 3):
                loss = compiled(input_ids=IDS[:, :length], labels=IDS[:, :length]).loss
                with pytest.raises(UsageError, match=r"^nothing in the model is trainable"):
                    loss.backward()

    async with models(base, way, tmp_path) as run:
        await run(train)


async def test_backward_of_a_client_with_nothing_trainable(base: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        with pytest.raises(UsageError, match=r"^nothing in the model is trainable.*peft_config for the client"):
            await client.backward((await client.forward(**BATCH)).loss)


@pytest.mark.parametrize("way", ["joint", "alone", "shm"])
async def test_losses_are_left_alone(base: Any, way: str, tmp_path: Path) -> None:
    """Evaluation, and training of anything in the model or before it, get the loss that the model has computed."""

    def work(model: Any) -> list[float]:
        plain = model(**BATCH).loss
        assert not plain.requires_grad
        with torch.no_grad():
            assert not model.train()(**BATCH).loss.requires_grad
        found = [plain.item(), model(**BATCH).loss.item(), model(**BATCH)[0].item()]
        embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=embeddings, labels=IDS).loss.backward()
        assert embeddings.grad is not None
        model.model.norm.weight.requires_grad_(True)
        loss = model(**BATCH).loss
        loss.backward()
        assert model.model.norm.weight.grad.abs().max() > 0
        return [*found, loss.item()]

    expected = base(**BATCH).loss.item()
    async with models(base, way, tmp_path) as run:
        assert await run(work) == [expected] * 4


@pytest.mark.parametrize("way", ["joint", "shm"])
@pytest.mark.parametrize("reference", ["disabled", "disabled, first", "a frozen adapter"])
async def test_a_part_of_a_loss_may_have_nothing_to_train(base: Any, way: str, reference: str, tmp_path: Path) -> None:
    """Losses such as DPO's compare the model with itself without the adapter that is trained."""

    def gradients(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = get_peft_model(model, lora(lora_dropout=0.0)).train()
        model.add_adapter("reference", lora(lora_dropout=0.0))
        policy = None if "first" in reference else model(**BATCH).loss
        if "disabled" in reference:
            with model.disable_adapter():
                without = model(**BATCH).loss
        else:
            model.set_adapter("reference", inference_mode=True)
            without = model(**BATCH).loss
            model.set_adapter("default")
        ((model(**BATCH).loss if policy is None else policy) / without).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(copy.deepcopy(base))
    async with models(base, way, tmp_path) as run:
        found = await run(gradients)
    assert len(expected) == 28
    torch.testing.assert_close(found, expected)
