"""The name of a served model: clients in other processes learn a name and no path, and their adapters state it."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.client.skeleton import Hollow
from symbiosis.core.share import Share
from symbiosis.errors import ShareError, UsageError
from symbiosis.executor.share import public_name
from symbiosis.testing import tiny_model
from tests.helpers import IDS, command, in_thread, lora
from tests.service import save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("providers-own") / "llama-tiny")


@pytest.mark.parametrize("source", ["meta-llama/Llama-3.2-1B", "gpt2", "", "some_one/m.0"])
def test_a_hub_id_is_the_name(source: str) -> None:
    assert public_name(source) == source


@pytest.mark.parametrize("source", ["/srv/models/llama", "./llama", "../x/llama/", "~/llama", "a/b/llama"])
def test_of_a_folder_the_last_part_is_the_name(source: str) -> None:
    assert public_name(source) == "llama"


def test_a_folder_that_looks_like_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("models/llama") == "llama"


@pytest.mark.parametrize(("chosen", "name"), [(None, "llama-tiny"), ("acme/llama", "acme/llama")])
def test_no_path_is_sent(checkpoint: Path, chosen: str | None, name: str) -> None:
    executor = symbiosis.Executor.from_pretrained(checkpoint, model_name=chosen)
    share = executor.service.share()
    sent = json.dumps(dict(share.description)).encode() + b"".join(share.tokenizer.values())
    assert b"providers-own" not in sent
    assert str(checkpoint.parent).encode() not in json.dumps(executor.status()).encode()
    assert share.description["name"] == name


def test_paths_in_inner_configurations_are_not_sent() -> None:
    from symbiosis.testing.zoo import zoo_model

    model: Any = zoo_model("LlavaForConditionalGeneration")
    model.config.text_config._name_or_path = "/srv/secret/llama"
    model.config.vision_config._name_or_path = "/srv/secret/clip"
    assert "secret" not in json.dumps(dict(symbiosis.Executor(model).service.share().description))


def test_a_copied_checkpoint_is_the_same_model(checkpoint: Path) -> None:
    """The fingerprint, by which clients recognize the model after a reconnect, depends on no path and no name."""
    one = symbiosis.Executor.from_pretrained(checkpoint).service.share().description
    elsewhere = save_model(checkpoint.parent.parent / "elsewhere", tiny_model("llama"))
    other = symbiosis.Executor.from_pretrained(elsewhere, model_name="copy").service.share().description
    assert one["fingerprint"] == other["fingerprint"]
    assert one["weights"] == other["weights"]
    assert (one["name"], other["name"]) == ("llama-tiny", "copy")


async def test_an_adapter_states_the_name(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT finds the base model by it where the tenant has a model of that name, and otherwise says what is missing."""
    async with symbiosis.Executor.from_pretrained(checkpoint) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base, base.client(lora(), seed=0) as client:
            client.save_adapter(tmp_path / "adapter")
            logits = (await client.forward(input_ids=IDS)).logits
            assert client.model.config.name_or_path == "llama-tiny"
    saved = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert json.loads(saved)["base_model_name_or_path"] == "llama-tiny"
    assert "providers-own" not in saved + (tmp_path / "adapter" / "README.md").read_text()
    with pytest.raises(OSError, match=r"llama-tiny|huggingface"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with pytest.raises(OSError, match=r"llama-tiny|huggingface"):
        AutoTokenizer.from_pretrained("llama-tiny")
    monkeypatch.chdir(checkpoint.parent)
    assert AutoTokenizer.from_pretrained("llama-tiny")("the cat")["input_ids"]
    loaded: Any = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(loaded.eval()(input_ids=IDS).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("tokens", [None, 66])
async def test_resized_embeddings_are_saved(checkpoint: Path, tmp_path: Path, tokens: int | None) -> None:
    """Plain PEFT finds out in the checkpoint's folder that a vocabulary was resized. The tenant has no such folder,
    and asks for the embeddings of an opened model."""
    plain: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), lora(target_modules=["q_proj"]))
    plain.get_base_model().resize_token_embeddings(tokens)
    plain.save_pretrained(tmp_path / "plain")
    async with symbiosis.Executor.from_pretrained(checkpoint, base_layers="*_proj") as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with (
            symbiosis.connect(f"shm://{tmp_path}/s") as base,
            base.client(lora(target_modules=["q_proj"])) as client,
        ):
            client.model.get_base_model().resize_token_embeddings(tokens)
            client.save_adapter(tmp_path / "client")

        def save() -> None:
            with symbiosis.open_model(f"shm://{tmp_path}/s") as model:
                model.resize_token_embeddings(tokens)
                adapted = get_peft_model(model, lora(target_modules=["q_proj"]))
                adapted.save_pretrained(tmp_path / "opened", save_embedding_layers=tokens is not None)

        await in_thread(save)
    for who in ("client", "opened"):
        expected, saved = (load_file(tmp_path / each / SAFETENSORS_WEIGHTS_NAME) for each in ("plain", who))
        assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in expected.items()}


async def test_two_providers_of_one_model_keep_their_names_and_tokenizers(checkpoint: Path, tmp_path: Path) -> None:
    given = AutoModelForCausalLM.from_pretrained(checkpoint)
    async with symbiosis.Executor.from_pretrained(checkpoint) as one, symbiosis.Executor(given, model_name="b") as two:
        addresses = [f"shm://{tmp_path}/one", f"shm://{tmp_path}/two"]
        for executor, address in zip((one, two), addresses, strict=True):
            await executor.listen(address)
        async with symbiosis.connect(addresses[0]) as first, symbiosis.connect(addresses[1]) as last:
            async with first.client() as alice, last.client() as bob:
                assert alice.model.config.name_or_path == "llama-tiny"
                assert bob.model.config.name_or_path == "b"
                assert first.tokenizer()("the cat")["input_ids"]
                with pytest.raises(UsageError, match="tokenizer"):
                    last.tokenizer()


async def test_a_tokenizer_keeps_all_its_chat_templates(checkpoint: Path, tmp_path: Path) -> None:
    """transformers writes those after the first into a folder, and a client takes no names of files with folders."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "rag": "RAG {{ messages[0].content }}"}
    tokenizer.save_pretrained(folder)
    async with symbiosis.Executor.from_pretrained(folder) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base:
            messages = [{"role": "user", "content": "the cat"}]
            made = base.tokenizer().apply_chat_template(messages, chat_template="rag", tokenize=False)
    assert made == "RAG the cat"


async def test_a_tokenizer_is_that_of_the_models_subfolder(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "all" / "sub")
    async with symbiosis.Executor.from_pretrained(folder.parent, subfolder="sub") as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base:
            assert base.tokenizer()("the cat") == AutoTokenizer.from_pretrained(folder)("the cat")


@pytest.mark.parametrize("name", ["x" * 257, "two\nlines", 7])
def test_names_that_are_refused(base: Any, name: Any) -> None:
    with pytest.raises(UsageError, match=r"model_name is .*at most 256 printable characters"):
        symbiosis.Executor(copy.deepcopy(base), model_name=name)
    share = symbiosis.Executor(base).service.share()
    described = Share({**share.description, "name": name}, share.tensors, share.tokenizer)
    with pytest.raises(ShareError, match=r"name of the executor's model"):
        Hollow(described, torch.device("cpu"))


def test_the_command_takes_a_name() -> None:
    assert "--name" in command("serve", "--help").output
