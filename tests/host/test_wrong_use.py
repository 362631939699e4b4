"""Common mistakes of a tenant or a provider each give an error that says what to do. Writes affect the writer only."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

import symbiosis
from symbiosis.errors import CannotWaitError, PlaceholderError, RequestError, UsageError
from symbiosis.testing import tiny_model

IDS = torch.arange(1, 9)[None]
BATCH = {"input_ids": IDS, "labels": IDS}


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj"], **options)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: symbiosis.Executor("llama"), "from_pretrained"),
        (lambda: symbiosis.Executor(tiny_model(), dtype="bf17"), "dtype is 'bf17'"),
        (lambda: symbiosis.Executor(tiny_model(), base_layers=None), "base_layers is None"),
        (lambda: symbiosis.Executor(tiny_model(), base_layers=5), "base_layers is 5"),
        (lambda: symbiosis.Executor(tiny_model(), dtype=5), "dtype is 5"),
        (lambda: symbiosis.Executor(tiny_model(), max_rows="8"), "max_rows is '8'"),
        (lambda: symbiosis.Executor.from_pretrained("/nowhere", joint="yes"), "joint is 'yes'"),
    ],
)
def test_executor(make: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        make()


def test_dtype_by_name() -> None:
    assert symbiosis.Executor(tiny_model(), dtype="bfloat16").layers[0].dtype is torch.bfloat16


@pytest.mark.parametrize("name", [7, uuid.UUID(int=7), "\ud800", "a\nb", "n" * 129])
async def test_names_that_another_host_could_not_be_told(name: Any) -> None:
    async with symbiosis.Executor(tiny_model()) as executor:
        with pytest.raises(UsageError, match=r"^name is .*; give a text of 1 to 128 printable characters"):
            executor.client(name=name)
        async with executor.client(name="n" * 128):
            assert executor.status()["clients"]


async def test_client() -> None:
    async with symbiosis.Executor(tiny_model()) as executor:
        with pytest.raises(UsageError, match="peft_config is"):
            await executor.client({"r": 4}).open()
        async with executor.client(lora()) as client:
            optimizer = torch.optim.AdamW([p for p in client.model.parameters() if p.requires_grad])
            with pytest.raises(UsageError, match="takes a batch"):
                await client.train_step(optimizer, BATCH)
            with pytest.raises(UsageError, match="not a tensor"):
                await client.backward(1.0)
            with pytest.raises(UsageError, match="is asynchronous"):
                await client.run(client.forward, input_ids=IDS)
            for resize in (client.model.resize_token_embeddings, copy.deepcopy(client.model).resize_token_embeddings):
                assert resize(64).num_embeddings == resize().num_embeddings == resize(60, 8).num_embeddings == 64
                with pytest.raises(PlaceholderError, match=r"has 64 tokens and cannot be resized to 99.*token_indices"):
                    resize(99)
            with pytest.raises(PlaceholderError, match="base weights"):
                client.model.add_adapter("other", lora(init_lora_weights="pissa"))
            with pytest.raises(CannotWaitError, match=r"run\(fn, ...\)"):
                client.model.add_adapter("other", lora(use_dora=True))
            await client.run(client.model.add_adapter, "other", lora(use_dora=True))
            logits = (await client.forward(input_ids=IDS)).logits
            await client.backward(logits, torch.ones_like(logits))
        async with executor.client() as bare:
            with pytest.raises(UsageError, match="nothing in the model"):
                await bare.train_step(BATCH, optimizer)
            with pytest.raises(
                PlaceholderError, match="to merge an adapter, save it and load it where the base model is"
            ):
                get_peft_model(bare.model, lora()).merge_and_unload()


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.fill_(3),
        lambda weight: weight.__setitem__(0, 5.0),
        lambda weight: torch.nn.init.constant_(weight, 2.0),
    ],
)
async def test_writes_are_the_writers_own(write: Callable[[torch.Tensor], Any]) -> None:
    async with symbiosis.Executor(tiny_model()) as executor, executor.client() as writer, executor.client() as other:
        before = (await other.forward(input_ids=IDS)).logits
        with torch.no_grad():
            write(writer.model.model.norm.weight)
        assert torch.equal((await other.forward(input_ids=IDS)).logits, before)
        assert not torch.equal((await writer.forward(input_ids=IDS)).logits, before)


@pytest.mark.parametrize("average", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}], ids=["SWA", "EMA"])
async def test_averages_of_weights(average: dict[str, Any]) -> None:
    """An average of the whole model is refused, and the error says what to average, which works as in plain PEFT."""

    def trainable(model: torch.nn.Module) -> torch.nn.ParameterList:
        return torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad)

    model = tiny_model()
    torch.manual_seed(0)
    plain = get_peft_model(copy.deepcopy(model), lora()).train()
    async with symbiosis.Executor(model) as executor, executor.client(lora(), seed=0) as client:
        whole = AveragedModel(client.model, **average)
        with pytest.raises(PlaceholderError, match=r"copy_ needs.*AveragedModel\(nn\.ParameterList\("):
            whole.update_parameters(client.model)
        mine, theirs = (AveragedModel(trainable(tuned), **average) for tuned in (client.model, plain))
        optimizers = [torch.optim.AdamW(trainable(tuned)) for tuned in (client.model, plain)]
        for _ in range(3):
            await client.train_step(BATCH, optimizers[0])
            plain(**BATCH).loss.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            mine.update_parameters(trainable(client.model))
            theirs.update_parameters(trainable(plain))
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[name], tensor)


@pytest.mark.parametrize("head", ["encoder", "with the client"])
async def test_a_vocabulary_of_the_clients_own_is_resized(head: str) -> None:
    """The embeddings are the client's, so they are resized as in plain transformers, for this client alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=64, **sizes)).eval() if head == "encoder" else tiny_model()
    layers = ["*_proj"] if head != "encoder" else "linear"
    plain = copy.deepcopy(model)
    async with symbiosis.Executor(model, base_layers=layers) as executor, executor.client() as client:
        for tenants in (plain, client.model):
            torch.manual_seed(1)
            tenants.resize_token_embeddings(99)
        with torch.no_grad():
            expected = plain(torch.tensor([[3, 97, 5]]))[0]
            assert torch.equal((await client.forward(torch.tensor([[3, 97, 5]])))[0], expected)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 64


async def test_a_converted_model() -> None:
    """It says that base layers are served in another dtype, and works again when it is converted back."""
    async with symbiosis.Executor(tiny_model()) as executor, executor.client() as client:
        client.model.to(torch.bfloat16)
        with pytest.raises(RequestError, match=r"is torch.bfloat16, but.*served in torch.float32.*to\(torch.float32\)"):
            await client.forward(input_ids=IDS)
        client.model.to(torch.float32)
        assert (await client.forward(input_ids=IDS)).logits.dtype is torch.float32


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
async def test_a_trainer_of_a_client_on_the_event_loop(tmp_path: Path) -> None:
    """In a fiber it is refused; the error names the way that gives plain PEFT's losses."""
    model = tiny_model()
    data = [{"input_ids": IDS[0] + shift, "labels": IDS[0] + shift} for shift in range(8)]

    def trainer_of(tuned: Any) -> Trainer:
        options = {"max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True}
        arguments = TrainingArguments(str(tmp_path), save_strategy="no", report_to=[], seed=0, **options)
        return Trainer(model=tuned, args=arguments, train_dataset=data)

    def losses(trainer: Trainer) -> list[float]:
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    torch.manual_seed(0)
    plain = trainer_of(get_peft_model(copy.deepcopy(model), lora()))
    plain.train()
    async with symbiosis.Executor(model) as executor, executor.client(lora(), seed=0) as client:
        trainer = trainer_of(client.model)
        with pytest.raises(CannotWaitError, match=r"await asyncio\.to_thread\(trainer\.train\)"):
            await client.run(trainer.train)
        trainer = trainer_of(client.model)
        await asyncio.wait_for(asyncio.to_thread(trainer.train), 60)
        assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)


async def test_writes_to_a_state_dict_are_the_writers_own() -> None:
    """An average over state dicts, which rounds, changes neither the provider's model nor other tenants."""
    model = tiny_model()
    async with symbiosis.Executor(model) as executor, executor.client() as writer, executor.client() as other:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        average = copy.deepcopy(writer.model)
        for mine, current in zip(average.state_dict().values(), writer.model.state_dict().values(), strict=True):
            mine.copy_(0.9 * mine + 0.7 * current)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        for one in (writer, other):
            assert torch.equal(one.model.model.norm.weight, before["model.norm.weight"])
        assert not torch.equal(average.model.norm.weight, before["model.norm.weight"])
        writer.model.state_dict()["model.norm.weight"].mul_(2)
        assert torch.equal(writer.model.model.norm.weight, 2 * before["model.norm.weight"])
        assert torch.equal(other.model.model.norm.weight, before["model.norm.weight"])
