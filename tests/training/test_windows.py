"""Training steps in windows give the gradients of the whole sequence, as plain transformers + PEFT computes them."""

from __future__ import annotations

import asyncio
import copy
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.integrations.neftune import activate_neftune

import symbiosis
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.testing import ARCHITECTURES, tiny_model
from symbiosis.testing.zoo import random_model, zoo_inputs, zoo_model
from symbiosis.training import windows
from tests.helpers import BATCH, CAUSAL, GRADIENTS, IDS, METHODS, adamw, crowd, lora, prefix, until
from tests.moe import mixture

LENGTH = 19
TEXTS = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def batch(kind: str = "plain") -> dict[str, torch.Tensor]:
    """Return two texts, with some tokens without a label, and with padding on one side if requested."""
    made = {"input_ids": TEXTS, "labels": TEXTS.clone()}
    made["labels"][0, 6:9] = -100
    made["labels"][1, 12:] = -100  # some windows have no label at all
    if kind != "plain":
        made["attention_mask"] = torch.ones_like(TEXTS)
        padding = slice(0, 3) if kind == "left" else slice(LENGTH - 3, LENGTH)
        made["attention_mask"][0, padding] = 0
        made["labels"][0, padding] = -100
        if kind == "left":
            made["labels"][0, 3] = -100  # otherwise the last padding token would have to predict this one
            made["position_ids"] = (made["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return made


class Gradients:
    """A replacement for an optimizer that records the gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.found: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        self.found = {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}

    def zero_grad(self) -> None:
        self._model.zero_grad()


def quiet(architecture: str, **options: Any) -> Any:
    """Return a model without dropout of its own."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if architecture.startswith("gpt") else {}
    return tiny_model(architecture, **off, **options)


def undropped(method: str, architecture: str) -> Any:
    return METHODS[method](architecture, **({"lora_dropout": 0.0} if method == "lora" else {}))


def plain(model: Any, config: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients of plain PEFT on the whole sequence."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config)).train()
    loss = adapted(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    assert found.keys() == expected.keys()
    assert all(gradient.any() for gradient in expected.values())
    return max(float((found[name] - e).abs().max() / e.abs().max()) for name, e in expected.items())


async def in_windows(
    model: Any, config: Any, inputs: dict[str, Any], *sizes: int | None, **options: Any
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Return the loss and gradients of a client for each size of window."""
    found = []
    async with symbiosis.Executor(model) as executor, executor.client(copy.deepcopy(config), seed=0) as client:
        gradients = Gradients(client.model)
        for size in sizes:
            loss = await client.train_step(inputs, gradients, window=size, **options)  # type: ignore[arg-type]
            found.append((loss, gradients.found))
    return found


@pytest.mark.parametrize(
    ("method", "kind"),
    [*((method, "plain") for method in METHODS), ("lora", "left"), ("lora", "right"), ("prefix", "left")],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_gradients_equal_those_of_the_whole_sequence(architecture: str, method: str, kind: str) -> None:
    """Windows have one token, numbers that do not divide the length, or all but one token. Gemma 2 sees 8 tokens."""
    model, config = quiet(architecture), undropped(method, architecture)
    expected = plain(model, config, batch(kind))
    for loss, gradients in await in_windows(model, config, batch(kind), 1, 5, 8, LENGTH - 1):
        assert loss == pytest.approx(expected[0], rel=1e-6)
        assert difference(gradients, expected[1]) <= GRADIENTS


@pytest.mark.parametrize("window", [LENGTH, LENGTH + 1])
async def test_one_window_is_the_whole_sequence(window: int) -> None:
    """The loss and gradients are bit-equal."""
    expected = plain(quiet("llama"), undropped("lora", "llama"), batch())
    [(loss, gradients)] = await in_windows(quiet("llama"), undropped("lora", "llama"), batch(), window)
    assert loss == expected[0]
    assert difference(gradients, expected[1]) == 0


CONFIGS = {
    "loha": peft.LoHaConfig(task_type=CAUSAL, r=4, target_modules=["q_proj", "down_proj"], init_weights=False),
    "oft": peft.OFTConfig(task_type=CAUSAL, r=0, oft_block_size=4, target_modules=["q_proj"], init_weights=False),
    "vera": peft.VeraConfig(task_type=CAUSAL, r=4, target_modules=["q_proj"], init_weights=False),
    "norms": peft.LNTuningConfig(task_type=CAUSAL, target_modules=["input_layernorm", "norm"]),
    "modules-to-save": lora(lora_dropout=0.0, modules_to_save=["lm_head", "embed_tokens"]),
    "upper-block": lora(lora_dropout=0.0, layers_to_transform=[1], target_modules=["v_proj"]),
    "keys-and-values": lora(lora_dropout=0.0, target_modules=["k_proj", "v_proj"]),
    "tokens": lora(lora_dropout=0.0, trainable_token_indices=TEXTS[0, :3].tolist()),
}


@pytest.mark.filterwarnings("ignore:Unsupported layer type.*RMSNorm")
@pytest.mark.parametrize("name", CONFIGS)
async def test_other_methods(name: str) -> None:
    model = quiet("llama")
    expected = plain(model, CONFIGS[name], batch())
    [(loss, gradients)] = await in_windows(model, CONFIGS[name], batch(), 5)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert difference(gradients, expected[1]) <= GRADIENTS


_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("Qwen2", {**_SMALL, "intermediate_size": 64, "num_key_value_heads": 2}),
    "Mistral, sliding": ("Mistral", {**_SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 6}),
    "OPT, ReLU": ("OPT", {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "GPT-NeoX": ("GPTNeoX", {**_SMALL, "intermediate_size": 64}),
    "Phi-3, fused": ("Phi3", {**_SMALL, "intermediate_size": 64, "num_key_value_heads": 2}),
    "OLMo 2, normed late": ("Olmo2", {**_SMALL, "intermediate_size": 64}),
    "GPT-OSS, sinks and experts": (
        "GptOss",
        {**_SMALL, "intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "Bloom, ALiBi": ("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


_IN_FP32 = ("Bloom, ALiBi", "GPT-OSS, sinks and experts")  # parts of these models compute in no wider dtype


@pytest.mark.parametrize("name", MODELS)
async def test_other_models(name: str) -> None:
    """Models with other norms, activations, positions and layouts. They run in fp64 where possible, which shows that
    the gradients are equal except for rounding.
    """
    prefix_, options = MODELS[name]
    config = getattr(transformers, f"{prefix_}Config")(**options)
    torch.manual_seed(3)
    model = getattr(transformers, f"{prefix_}ForCausalLM")(config).eval()
    tolerance = GRADIENTS
    if name not in _IN_FP32:
        model, tolerance = model.double(), 1e-12
    adapter = lora(lora_dropout=0.0)
    expected = plain(model, adapter, batch("right"))
    for loss, gradients in await in_windows(model, adapter, batch("right"), 5, 8):
        assert loss == pytest.approx(expected[0], rel=1e-6)  # transformers computes it in fp32
        assert difference(gradients, expected[1]) <= tolerance


async def test_eager_attention() -> None:
    model = quiet("llama")
    model.set_attn_implementation("eager")
    expected = plain(model, undropped("lora", "llama"), batch())
    [(loss, gradients)] = await in_windows(model, undropped("lora", "llama"), batch(), 5)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert difference(gradients, expected[1]) <= GRADIENTS


async def test_whole_mlps_as_base_layers() -> None:
    """The executor runs backward from the inputs of MLPs, which are kept or computed again from the norm's inputs."""
    model, config = quiet("llama"), lora(lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    expected = plain(model, config, batch())
    async with symbiosis.Executor(model, base_layers="mlp") as executor, executor.client(config, seed=0) as client:
        gradients = Gradients(client.model)
        await client.train_step(batch(), gradients, window=5)  # type: ignore[arg-type]
    assert difference(gradients.found, expected[1]) <= GRADIENTS


async def test_from_another_process_or_host() -> None:
    """The same client runs over tcp://, and the executor cuts requests into slices."""
    model, config = quiet("llama"), undropped("lora", "llama")
    expected = plain(model, config, batch())
    async with symbiosis.Executor(model, max_rows=3) as executor:
        address = (await executor.listen("tcp://127.0.0.1:0", insecure=True)).address
        async with symbiosis.connect(address, insecure=True) as base, base.client(config, seed=0) as client:
            gradients = Gradients(client.model)
            await client.train_step(batch(), gradients, window=5)  # type: ignore[arg-type]
    assert difference(gradients.found, expected[1]) <= GRADIENTS


async def test_items_in_the_batch() -> None:
    """``num_items_in_batch``, as Trainer gives it, divides the sum of all windows."""
    inputs = {**batch(), "num_items_in_batch": torch.tensor(100)}
    expected = plain(quiet("llama"), undropped("ia3", "llama"), inputs)
    [(loss, gradients)] = await in_windows(quiet("llama"), undropped("ia3", "llama"), inputs, 5)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert difference(gradients, expected[1]) <= GRADIENTS


async def test_embeddings_instead_of_tokens() -> None:
    model = quiet("llama")
    inputs = {**batch(), "inputs_embeds": model.get_input_embeddings()(TEXTS).detach()}
    del inputs["input_ids"]
    expected = plain(model, undropped("lora", "llama"), inputs)
    [(loss, gradients)] = await in_windows(model, undropped("lora", "llama"), inputs, 5)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert difference(gradients, expected[1]) <= GRADIENTS


@pytest.mark.parametrize("method", ["lora", "prefix"])
async def test_embeddings_that_are_trained(method: str) -> None:
    """A part of the tenant's own computes the embeddings, and runs backward once, after the last window."""
    model, config = quiet("llama"), undropped(method, "llama")
    texts, part = model.get_input_embeddings()(TEXTS).detach(), torch.nn.Linear(32, 32, bias=False)
    torch.nn.init.eye_(part.weight)
    labels = batch()["labels"]

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}
        part.zero_grad()
        return found

    expected = plain(model, config, {"inputs_embeds": part(texts), "labels": labels})
    of_part = gradients()
    async with symbiosis.Executor(model) as executor, executor.client(copy.deepcopy(config), seed=0) as client:
        step = Gradients(client.model)
        inputs = {"inputs_embeds": part(texts), "labels": labels}
        loss = await client.train_step(inputs, step, window=5)  # type: ignore[arg-type]
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert difference(step.found, expected[1]) <= GRADIENTS
    assert difference(gradients(), of_part) <= GRADIENTS


async def test_bf16() -> None:
    """The gradients are as close to fp32 as those of plain PEFT in bf16 (mean over tensors of the relative error)."""
    long = {"input_ids": torch.randint(3, 64, (1, 200)), "labels": torch.randint(3, 64, (1, 200))}
    model = tiny_model(dtype=torch.bfloat16, max_position_embeddings=256)
    config = undropped("lora", "llama")
    exact = plain(copy.deepcopy(model).float(), config, long)[1]

    def error(found: dict[str, torch.Tensor]) -> float:
        return float(torch.stack([(found[n].float() - e).norm() / e.norm() for n, e in exact.items()]).mean())

    expected = plain(model, config, long)
    [(loss, gradients)] = await in_windows(model, config, long, 16)
    assert loss == pytest.approx(expected[0], rel=1e-3)
    assert error(gradients) <= 1.2 * error(expected[1])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
async def test_dropout_is_the_same_when_a_window_is_run_again(architecture: str) -> None:
    """Results are compared with plain PEFT that runs the same windows once, keeps all graphs, and runs backward at the
    end.
    """
    config = lora(architecture, lora_dropout=0.5)
    model = tiny_model(architecture)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config)).train()
    torch.manual_seed(7)
    cache, total = DynamicCache(config=model.config), torch.zeros(())
    following = torch.nn.functional.pad(batch()["labels"][:, 1:], (0, 1), value=-100)
    for begin in range(0, LENGTH, 5):
        part = slice(begin, begin + 5)
        logits = adapted(input_ids=TEXTS[:, part], past_key_values=cache, use_cache=True).logits
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), following[:, part].flatten(), ignore_index=-100, reduction="sum"
        )
    loss = total / (following != -100).sum()
    loss.backward()
    after = torch.rand(3)
    async with symbiosis.Executor(model) as executor, executor.client(config, seed=0) as client:
        client.manual_seed(7)
        gradients = Gradients(client.model)
        assert await client.train_step(batch(), gradients, window=5) == pytest.approx(  # type: ignore[arg-type]
            loss.item(), rel=1e-6
        )
        assert torch.equal(await client.run(torch.rand, 3), after)  # the stream is in the state after one forward pass
    expected = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
    assert difference(gradients.found, expected) <= GRADIENTS


async def test_an_optimizer_step_and_earlier_gradients() -> None:
    """As without windows, earlier gradients from ``backward`` count, and all gradients are cleared in the end."""
    config = undropped("lora", "llama")
    trained = []
    for window in (None, 4):
        async with symbiosis.Executor(quiet("llama")) as executor, executor.client(config, seed=0) as client:
            optimizer = torch.optim.SGD([p for p in client.model.parameters() if p.requires_grad], lr=0.5)
            await client.backward((await client.forward(**BATCH)).loss)
            await client.train_step(batch(), optimizer, window=window)
            assert all(p.grad is None for p in client.model.parameters())
            trained.append({n: p.detach().clone() for n, p in client.model.named_parameters() if p.requires_grad})
    assert difference(trained[1], trained[0]) <= GRADIENTS


async def test_among_others() -> None:
    model, config = quiet("llama"), undropped("lora", "llama")
    expected = plain(model, config, batch())
    others = [(lora(), "train"), (prefix(), "train"), (None, "generate")]
    async with symbiosis.Executor(model) as executor, crowd(executor, others):
        async with executor.client(config, seed=0) as client:
            gradients = Gradients(client.model)
            for window in (3, 7):
                await client.train_step(batch(), gradients, window=window)  # type: ignore[arg-type]
                assert difference(gradients.found, expected[1]) <= GRADIENTS


async def test_requests_have_a_windows_rows_and_are_fine_tuning() -> None:
    """Co-serving needs small requests that no policy takes for a prefill."""
    seen: list[tuple[Kind, int]] = []
    async with symbiosis.Executor(quiet("llama")) as executor, executor.client(lora()) as client:
        request = client._requester.request

        def watched(key: Any, kind: Kind, tensors: Any, name: str) -> Any:
            seen.append((kind, tensors[0].shape[0]))
            return request(key, kind, tensors, name)

        client._requester.request = watched  # type: ignore[method-assign]
        await client.train_step(batch(), adamw(client.model), window=4)
        assert {kind for kind, _ in seen} == {Kind.FINETUNE}
        assert max(rows for _, rows in seen) == 2 * 4
        for training, kind in ((True, Kind.FINETUNE), (False, Kind.PREFILL)):
            client.model.train(training)
            seen.clear()
            with torch.no_grad():
                await client.forward(input_ids=IDS)
            assert {kind for kind, _ in seen} == {kind}


async def test_keys_and_values_are_freed_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Any]] = []
    start = windows.Past.__init__

    def noted(self: Any, length: int) -> None:
        start(self, length)
        held.append(weakref.ref(self))

    monkeypatch.setattr(windows.Past, "__init__", noted)
    async with symbiosis.Executor(quiet("llama")) as executor, executor.client(lora()) as client:
        optimizer = adamw(client.model)
        await client.train_step(batch(), optimizer, window=4)
        held.clear()
        gc.collect()
        gc.disable()
        try:
            await client.train_step(batch(), optimizer, window=4)
            assert len(held) == 4
            assert all(reference() is None for reference in held)
        finally:
            gc.enable()


async def test_cancelled_between_windows() -> None:
    """The client can be used afterwards, and its forward passes do not count as fine-tuning."""
    async with symbiosis.Executor(quiet("llama")) as executor, executor.client(undropped("lora", "llama")) as client:
        task = asyncio.create_task(client.train_step(batch(), adamw(client.model), window=1))
        await until(lambda: executor.statistics().requests >= 60)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not client._requester.finetuning
        client.model.zero_grad()
        await client.train_step(batch(), adamw(client.model), window=6)


@pytest.mark.parametrize("window", [0, -3, True, 2.0, "4"])
async def test_invalid_windows(base: Any, window: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
        with pytest.raises(UsageError, match=r"window is .*; give a whole number of tokens, 1 or more"):
            await client.train_step(BATCH, adamw(client.model), window=window)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": None}, "has no labels"),
    "shape": ({"labels": TEXTS[:, 1:]}, r"labels are \[2, 18\]"),
    "mask": ({"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}, "attention_mask is .*must be"),
    "tensor": ({"head_mask": torch.ones(2)}, "head_mask cannot be cut into windows"),
    "cache": ({"past_key_values": DynamicCache()}, "past_key_values=.* cannot be combined with `window`"),
    "no cache": ({"use_cache": False}, "use_cache=False cannot be combined with `window`"),
    "ignored": ({"ignore_index": 0}, "ignore_index=0 cannot be combined with `window`"),
    "packed": ({"position_ids": (torch.arange(LENGTH) % 10).expand(2, -1)}, "a row of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_batches_that_cannot_be_cut(base: Any, name: str) -> None:
    changed, reason = REFUSED[name]
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
        optimizer = adamw(client.model)
        with pytest.raises(UsageError, match=reason):
            await client.train_step({**batch(), **changed}, optimizer, window=4)
        await client.train_step(batch(), optimizer, window=4)


@pytest.mark.parametrize("window", [4, 100])
@pytest.mark.parametrize("shape", [(LENGTH,), (0, LENGTH), (2, 0), (LENGTH, 32)])
async def test_batches_without_rows_or_tokens(base: Any, shape: tuple[int, ...], window: int) -> None:
    """Embeddings must have a batch, tokens and a width too, and at least one row."""
    name, wanted = ("inputs_embeds", "batch, tokens, width") if 32 in shape else ("input_ids", "batch, tokens")
    tensor = torch.zeros(shape, dtype=torch.float32 if 32 in shape else torch.long)
    wrong = {name: tensor, "labels": tensor.long()}
    expected = rf"{name} is {re.escape(str(list(shape)))}; to be run in windows it must be \[{wanted}\], with a row"
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
        optimizer = adamw(client.model)
        with pytest.raises(UsageError, match=expected):
            await client.train_step(wrong, optimizer, window=window)
        await client.train_step(batch(), optimizer, window=window)
    with pytest.raises(UsageError, match=expected):
        symbiosis.backward_in_windows(base, wrong, window)


async def test_padding_that_must_predict_a_token() -> None:
    """In Gemma 2's eager attention, a row that may see no token gets the mean of all tokens, including later ones."""
    inputs = batch("left")
    inputs["labels"][0, 3] = 5
    async with symbiosis.Executor(quiet("gemma2")) as executor, executor.client(lora()) as client:
        with pytest.raises(UsageError, match="first token after padding the label -100"):
            await client.train_step(inputs, adamw(client.model), window=4)


@pytest.mark.parametrize(
    "name",
    [
        *("PROMPT_TUNING", "P_TUNING", "ADAPTION_PROMPT", "ADALORA", "LILY", "SHADOW", "PVERA"),
        *("VeLoRA", "MonteCLoRA", "checkpointing"),
    ],
)
async def test_methods_that_need_the_whole_sequence(base: Any, name: str) -> None:
    config: Any = {
        "PVERA": peft.PveraConfig(task_type=CAUSAL, target_modules=["q_proj"], generator_seed=1),
        "VeLoRA": lora(velora_config=peft.VeloraConfig()),
        "MonteCLoRA": lora(monteclora_config=peft.MontecloraConfig()),
        "PROMPT_TUNING": peft.PromptTuningConfig(task_type=CAUSAL, num_virtual_tokens=3),
        "P_TUNING": peft.PromptEncoderConfig(task_type=CAUSAL, num_virtual_tokens=3),
        "ADAPTION_PROMPT": peft.AdaptionPromptConfig(task_type=CAUSAL, adapter_len=3, adapter_layers=2),
        "ADALORA": peft.AdaLoraConfig(task_type=CAUSAL, total_step=9, target_modules=["q_proj"]),
        "LILY": peft.LilyConfig(task_type=CAUSAL, target_modules=["q_proj"]),
        "SHADOW": peft.ShadowConfig(task_type=CAUSAL),
        "checkpointing": lora(),
    }[name]
    async with symbiosis.Executor(base) as executor, executor.client(config) as client:
        if name == "checkpointing":
            client.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        kind = "LORA" if name in ("VeLoRA", "MonteCLoRA") else name
        with pytest.raises(UsageError, match=rf"{kind}.*leave `window` out"):
            await client.train_step(batch(), adamw(client.model), window=4)
        await client.train_step(batch(), adamw(client.model))


async def test_noise_that_depends_on_the_length_of_the_sequence(base: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as client:
        activate_neftune(client.model, 5.0)
        with pytest.raises(UsageError, match=r"NEFTune.*leave `window` out"):
            await client.train_step(batch(), adamw(client.model), window=4)
        await client.train_step(batch(), adamw(client.model))


@pytest.mark.parametrize("second", [False, True], ids=["added to the model", "second active adapter"])
async def test_all_active_adapters_are_looked_at(base: Any, second: bool) -> None:
    whole = lora(velora_config=peft.VeloraConfig())
    async with symbiosis.Executor(base) as executor, executor.client(lora() if second else None) as client:
        model: Any = client.model
        model.add_adapter("b", whole) if second else model.add_adapter(whole)
        if second:
            await client.train_step(batch(), adamw(model), window=4)
            model.base_model.set_adapter(["default", "b"])
        with pytest.raises(UsageError, match=r"LORA.*leave `window` out"):
            await client.train_step(batch(), adamw(model), window=4)
        if not second:
            model.disable_adapters()
            model.get_input_embeddings().weight.requires_grad_(True)
            await client.train_step(batch(), adamw(model), window=4)


_TINY = {**_SMALL, "intermediate_size": 64}
_BART = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}
_TEXT_EXPERTS = {
    **_TINY,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    "output_router_logits": True,  # its part of the loss, 0.002, is too small to show in the loss of one text
}
_IMAGES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "a loss of the same token": ("BartForCausalLM", _BART, "the loss of BartForCausalLM is not the mean over next tok"),
    "tokens that see later ones": (
        "BertLMHeadModel",
        {**_TINY, "initializer_range": 0.3},
        "results in BertLMHeadModel depend on later tokens",
    ),
    "positions that depend on the length": (
        "Phi3ForCausalLM",
        {**_TINY, "original_max_position_embeddings": 16, "rope_parameters": _LONGROPE},
        "with more than 16 tokens, the attention of Phi3ForCausalLM depends on the length of the text, which has 19",
    ),
    "frequencies that grow with the length": (
        "LlamaForCausalLM",
        {**_TINY, "max_position_embeddings": 18, "rope_parameters": _DYNAMIC},
        "with more than 18 tokens, the attention of LlamaForCausalLM depends on the length",
    ),
    "tokens chosen from the whole text": (
        "DogeForCausalLM",
        {**_TINY, "keep_window_size": 4},
        "with more than 4 tokens, the attention of DogeForCausalLM",
    ),
    "the loss of a router of texts beside images": (
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": _TEXT_EXPERTS, "vision_config": _IMAGES},
        "the loss of Qwen3VLMoeForConditionalGeneration is not the mean",
    ),
}


def small(class_name: str, **options: Any) -> Any:
    model_class = getattr(transformers, class_name)
    return random_model(model_class, model_class.config_class(**options))


@pytest.mark.parametrize("name", UNFIT)
async def test_models_that_need_the_whole_sequence(name: str) -> None:
    """They would be trained for another loss, or with other attention than the whole text has."""
    class_name, options, expected = UNFIT[name]
    adapter = lora(target_modules="all-linear")
    model = small(class_name, **options).to(torch.bfloat16 if class_name == "BartForCausalLM" else torch.float32)
    # With some adapters, the two losses of a random Bart are the same by chance.
    async with symbiosis.Executor(model) as executor, executor.client(adapter, seed=0) as client:
        with pytest.raises(UsageError, match=rf"{expected}.*leave `window` out"):
            await client.train_step(batch(), adamw(client.model), window=5)
        await client.train_step(batch(), adamw(client.model))


async def test_a_router_loss_that_the_batch_asks_for() -> None:
    adapter = lora(target_modules=["q_proj"])
    async with symbiosis.Executor(mixture("olmoe")) as executor, executor.client(adapter) as client:
        with pytest.raises(UsageError, match=r"the loss of OlmoeForCausalLM is not .*leave `window` out"):
            await client.train_step({**batch(), "output_router_logits": True}, adamw(client.model), window=5)
        await client.train_step({**batch(), "output_router_logits": False}, adamw(client.model), window=5)


async def test_texts_short_enough_for_positions_that_depend_on_the_length() -> None:
    options = {**_TINY, "max_position_embeddings": LENGTH, "rope_parameters": _DYNAMIC}
    model, adapter = small("LlamaForCausalLM", **options), lora(lora_dropout=0.0)
    expected = plain(model, adapter, batch())
    [(loss, gradients)] = await in_windows(model, adapter, batch(), 5)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert difference(gradients, expected[1]) <= GRADIENTS
    longer = prefix(num_virtual_tokens=1)  # positions begin after the prefix
    async with symbiosis.Executor(model) as executor, executor.client(longer) as client:
        with pytest.raises(UsageError, match=f"length of the text, which has {LENGTH + 1}, so"):
            await client.train_step(batch(), adamw(client.model), window=5)


@pytest.mark.parametrize("kind", ["plain", "right"])
async def test_texts_after_an_image(kind: str) -> None:
    """Qwen-VL keeps by how much the latest image has shifted positions, for texts in a cache."""
    text = {**_TEXT_EXPERTS, "output_router_logits": False}
    model = small("Qwen3VLForConditionalGeneration", text_config=text, vision_config=_IMAGES)
    adapter = lora(lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    expected = plain(model, adapter, batch(kind))
    async with symbiosis.Executor(model) as executor, executor.client(adapter, seed=0) as client:
        client.model.get_base_model().model.rope_deltas = shifted = torch.tensor([[-4], [-4]])
        gradients = Gradients(client.model)
        loss = await client.train_step(batch(kind), gradients, window=5)
        assert client.model.get_base_model().model.rope_deltas is shifted
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert difference(gradients.found, expected[1]) <= GRADIENTS


async def test_token_types_by_which_tokens_see_later_ones() -> None:
    """A batch without such a type can be run in windows, which must not hide the other case."""
    async with symbiosis.Executor(zoo_model("Gemma3ForConditionalGeneration")) as executor:
        async with executor.client(lora(lora_dropout=0.0)) as client:
            inputs = {**batch(), "input_ids": TEXTS % 50, "token_type_ids": torch.zeros_like(TEXTS)}
            await client.train_step(inputs, adamw(client.model), window=5)
            inputs["token_type_ids"][:, 12:16] = 1
            with pytest.raises(UsageError, match="depend on later tokens"):
                await client.train_step(inputs, adamw(client.model), window=5)


async def test_the_trial_leaves_modes_and_random_numbers_alone(base: Any) -> None:
    """The model is tried in the first step only, and the second one has the same loss."""
    async with symbiosis.Executor(base) as executor, executor.client(lora(lora_dropout=0.5)) as client:
        dropouts = [module for module in client.model.modules() if isinstance(module, torch.nn.Dropout)]
        client.model.train()
        dropouts[0].eval()
        losses = []
        for _ in range(2):
            client.manual_seed(1)
            losses.append(await client.train_step(batch(), Gradients(client.model), window=5))  # type: ignore[arg-type]
        assert [module.training for module in dropouts] == [False] + [True] * (len(dropouts) - 1)
        assert losses[0] == losses[1]


async def test_models_without_a_cache_of_keys_and_values() -> None:
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    )
    async with symbiosis.Executor(mamba) as executor:
        async with executor.client(lora(target_modules=["in_proj"])) as client:
            with pytest.raises(UsageError, match=r"MambaForCausalLM.*cannot be run in windows"):
                await client.train_step(batch(), adamw(client.model), window=4)


async def test_models_that_ignore_the_cache() -> None:
    class Forgetful(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, past_key_values: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, use_cache=False, **kwargs)

    model = Forgetful(quiet("llama").config).eval()
    async with symbiosis.Executor(model) as executor, executor.client(lora()) as client:
        with pytest.raises(UsageError, match="does not put all keys and values into the given cache"):
            await client.train_step(batch(), adamw(client.model), window=4)


@pytest.mark.parametrize("window", [5, LENGTH])
async def test_synchronous_code(base: Any, tmp_path: Path, window: int) -> None:
    """Windows over a connection, without asyncio, give the gradients of plain PEFT."""

    def gradients(model: Any, run: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        tuned = peft.get_peft_model(model, lora(lora_dropout=0.0))
        loss = run(tuned)
        found = {name: p.grad.clone() for name, p in tuned.named_parameters() if p.grad is not None}
        return {"loss": torch.tensor(loss), **found}

    def plainly(model: Any) -> float:
        loss = model(**batch()).loss
        loss.backward()
        return float(loss.item())

    def there(address: str) -> dict[str, torch.Tensor]:
        with symbiosis.open_model(address) as model:
            return gradients(model, lambda tuned: symbiosis.backward_in_windows(tuned, batch(), window))

    expected = gradients(copy.deepcopy(base), plainly)
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        found = await asyncio.to_thread(there, listener.address)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=float(GRADIENTS * value.abs().max()), rtol=0), name


def test_wrong_use_in_synchronous_code(base: Any) -> None:
    with pytest.raises(UsageError, match="window is 0"):
        symbiosis.backward_in_windows(base, batch(), 0)


async def test_a_batch_without_tokens_has_no_windows() -> None:
    """Speech, for example: before, the window had no effect, and the tenant was not told."""
    model = zoo_model("WhisperForConditionalGeneration")
    async with symbiosis.Executor(model) as executor, executor.client(lora(target_modules=["q_proj"])) as client:
        with pytest.raises(UsageError, match=r"input_features, .* has no tokens to be run in windows; leave `window`"):
            await client.train_step(zoo_inputs(model, "mel", 0), adamw(client.model), window=4)
