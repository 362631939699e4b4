"""What rows are for follows from the call of the model: a prompt's walk is a prefill to its end, and all training is
fine-tuning.
"""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import symbiosis
from symbiosis.client.kinds import Kinds
from symbiosis.core.requests import Request
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.policies import CoServing, NoLockstep
from symbiosis.policies.starts import Starts
from symbiosis.testing import tiny_model
from symbiosis.testing.zoo import zoo_inputs, zoo_model
from tests.helpers import adamw, lora

IDS = torch.arange(3, 10)[None]


class Notes(NoLockstep):
    """A policy that serves requests in order and records the kind and the number of their rows."""

    lone_at_once = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Kind, int]] = []

    def submitted(self, request: Request) -> None:
        self.seen.append((request.kind, request.rows))
        super().submitted(request)

    def taken(self) -> list[tuple[Kind, int]]:
        seen, self.seen = self.seen, []
        return seen


def opt() -> Any:
    """A model whose MLP flattens sequences to matrices."""
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    return transformers.OPTForCausalLM(config).eval()


@pytest.mark.parametrize(
    "make", [lambda: tiny_model("llama"), lambda: tiny_model("gpt2"), opt], ids=["llama", "gpt2", "opt"]
)
async def test_generation(make: Any) -> None:
    notes = Notes()
    async with symbiosis.Executor(make(), policy=notes) as executor, executor.client() as client:
        length = IDS.shape[1]
        options = {"do_sample": False, "min_new_tokens": 3, "max_new_tokens": 3, "logits_to_keep": 1}
        for _ in range(2):
            await client.generate(input_ids=IDS, **options)
            seen = notes.taken()
            prompt = [rows for kind, rows in seen if kind is Kind.PREFILL]
            assert seen[: len(prompt)] == [(Kind.PREFILL, rows) for rows in prompt]
            assert set(prompt[:-1]) == {length}
            assert prompt[-1] in (1, length)  # some models run the head for the last token only
            assert set(seen[len(prompt) :]) == {(Kind.DECODE, 1)}
            assert (len(seen) - len(prompt)) % 2 == 0


class Walks(Notes):
    """Records with which requests walks begin, too."""

    def __init__(self) -> None:
        super().__init__()
        self.begin: list[bool] = []
        self._starts = Starts()

    def submitted(self, request: Request) -> None:
        self.begin.append(self._starts.begins(request))
        super().submitted(request)


@pytest.mark.parametrize(
    "name", ["Phi3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM"]
)
async def test_layers_in_another_order_than_that_of_the_table(name: str) -> None:
    """Or, in DeepSeek, a layer that is asked for rows of all earlier tokens. A policy sees as many walks as there are
    tokens."""
    notes, model = Walks(), zoo_model(name)
    model.generation_config.eos_token_id = None
    async with symbiosis.Executor(model, policy=notes) as executor, executor.client() as client:
        for _ in range(2):
            notes.seen.clear()
            notes.begin.clear()
            await client.generate(input_ids=IDS, do_sample=False, min_new_tokens=4, max_new_tokens=4)
    each, odd = divmod(len(notes.seen), 4)
    assert not odd
    assert [kind for kind, _ in notes.seen] == [Kind.PREFILL] * each + [Kind.DECODE] * 3 * each
    assert notes.begin == [True, *[False] * (each - 1)] * 4


async def test_tokens_that_co_serving_counts() -> None:
    model, policy = zoo_model("Phi3ForCausalLM"), CoServing(slo_ms=10_000, ttft_ms=60_000)
    model.generation_config.eos_token_id = None
    async with symbiosis.Executor(model, policy=policy) as executor, executor.client(name="one") as client:
        for texts in (1, 2):
            await client.generate(input_ids=IDS, do_sample=False, min_new_tokens=5, max_new_tokens=5)
            assert policy.slo()["one"] == (4 * texts, 0)  # without the last token of a text


@pytest.mark.parametrize("reentrant", [True, False])
async def test_checkpointed_training(reentrant: bool) -> None:
    """Reentrant checkpointing runs its forward pass without gradients."""
    notes = Notes()
    async with symbiosis.Executor(tiny_model("llama"), policy=notes) as executor, executor.client(lora()) as client:
        model = client.model
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        await client.train_step({"input_ids": IDS, "labels": IDS}, adamw(model))
        assert {kind for kind, _ in notes.taken()} == {Kind.FINETUNE}


@pytest.mark.parametrize("window", [3, 100])
async def test_windows_in_synchronous_code(tmp_path: Path, window: int) -> None:
    """Windows are fine-tuning in evaluation mode too, the mode of a new model. A later prompt is a prefill again."""
    notes = Notes()

    def there(address: str) -> None:
        with symbiosis.open_model(address) as model:
            tuned = peft.get_peft_model(model, lora(lora_dropout=0.0)).eval()
            symbiosis.backward_in_windows(tuned, {"input_ids": IDS, "labels": IDS}, window)
            assert {kind for kind, _ in notes.taken()} == {Kind.FINETUNE}
            with torch.no_grad():
                tuned(IDS)
            assert {kind for kind, _ in notes.taken()} == {Kind.PREFILL}

    async with symbiosis.Executor(tiny_model("llama"), policy=notes) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        await asyncio.to_thread(there, listener.address)


async def test_a_model_is_opened_in_evaluation_mode(tmp_path: Path) -> None:
    """Every layer of the model is in evaluation mode, although the tenant did not ask for it."""
    notes = Notes()

    def there(address: str) -> None:
        with symbiosis.open_model(address) as model, torch.no_grad():
            assert not any(module.training for module in model.modules())
            model.generate(input_ids=IDS, do_sample=False, min_new_tokens=3, max_new_tokens=3)

    async with symbiosis.Executor(tiny_model("llama"), policy=notes) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        await asyncio.to_thread(there, listener.address)
        assert {kind for kind, _ in notes.taken()} == {Kind.PREFILL, Kind.DECODE}
        async with symbiosis.connect(listener.address) as service, service.client(lora()) as client:
            with torch.no_grad():
                await client.forward(input_ids=IDS)
            assert {kind for kind, _ in notes.taken()} == {Kind.PREFILL}


@pytest.mark.parametrize("config", [None, lora(target_modules=["kv_b_proj"])], ids=["none", "lora"])
@pytest.mark.parametrize(("length", "kind"), [(20, Kind.DECODE), (70, Kind.PREFILL)])
async def test_tokens_of_another_process_that_expand_latent_vectors(
    length: int, kind: Kind, config: Any, tmp_path: Path
) -> None:
    """The executor does not believe that more than 64 rows are for one token, so such a token is stated to be a prompt,
    from its first request on, also in joint walks."""
    notes, model = Walks(), zoo_model("DeepseekV3ForCausalLM")
    model.generation_config.eos_token_id = None
    ids = torch.arange(length)[None] % 60 + 3
    async with symbiosis.Executor(model, policy=notes) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        async with (
            symbiosis.connect(listener.address) as base,
            base.client(config) as one,
            base.client(config) as other,
        ):
            options = {"input_ids": ids, "do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6}
            for clients in ([one], [one], *[[one, other]] * 4):
                before = len(notes.seen)
                await asyncio.gather(*(client.generate(**options) for client in clients))
                if clients == [one]:
                    each = len(notes.seen[before:]) // 6
                    found, begin = [found for found, _ in notes.seen[before:]], notes.begin[before:]
            assert found == [Kind.PREFILL] * each + [kind] * 5 * each
            assert begin == [True, *[False] * (each - 1)] * 6
            assert sum(counts.get("joint", 0) for counts in base.walks().values()) >= 8
            assert {found for found, rows in notes.seen[before:] if rows == 2} == {kind}


async def test_tokens_whose_latent_vectors_become_too_many(tmp_path: Path) -> None:
    """Each of them counts once, but for the one in which they do."""
    policy, model = CoServing(slo_ms=10_000, ttft_ms=60_000), zoo_model("DeepseekV3ForCausalLM")
    model.generation_config.eos_token_id = None
    async with symbiosis.Executor(model, policy=policy) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(listener.address) as base, base.client(name="one") as client:
            for tokens in (4, 40):
                before = policy.slo().get("one", (0, 0))[0]
                ids = torch.arange(50)[None] + 3
                await client.generate(input_ids=ids, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)
            kept, missed = policy.slo()["one"]
    assert 40 - 1 <= kept - before <= 40 + len(model.model.layers)
    assert not missed


async def test_many_texts_on_one_thread(tmp_path: Path) -> None:
    """The encoder's layers are asked for in the first walk of each text only."""
    notes, model = Walks(), zoo_model("T5ForConditionalGeneration")
    model.generation_config.eos_token_id = None

    def there(address: str) -> list[list[Kind]]:
        found = []
        with symbiosis.open_model(address) as opened, torch.no_grad():
            for _ in range(3):
                notes.seen.clear()
                opened.generate(input_ids=IDS, do_sample=False, min_new_tokens=3, max_new_tokens=3)
                found.append([kind for kind, _ in notes.seen])
        return found

    async with symbiosis.Executor(model, policy=notes) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        _, second, third = await asyncio.to_thread(there, listener.address)
    assert second == third
    assert second == [Kind.PREFILL] * (len(second) - 26) + [Kind.DECODE] * 26  # the second and third token


async def test_keys_that_change_between_texts(base: Any) -> None:
    """A tenant's own biases make all layers' keys others. Each token counts once still."""
    policy = CoServing(slo_ms=10_000, ttft_ms=60_000)
    async with symbiosis.Executor(opt(), policy=policy) as executor, executor.client(name="one") as client:
        for change in (False, True, False):
            if change:
                for name, parameter in client.model.named_parameters():
                    if name.endswith("bias"):
                        parameter.requires_grad_(True)
            before = policy.slo().get("one", (0, 0))[0]
            await client.generate(input_ids=IDS, do_sample=False, min_new_tokens=5, max_new_tokens=5)
    assert policy.slo()["one"] == (before + 4, 0)


class Flat(torch.nn.Module):
    """Layers for images that have no dimension for sequences, as those of Qwen2-VL."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rows = self.tower.encoder.layers[0].mlp.fc1
        rows(torch.zeros(50, rows.in_features))
        return self.tower(*args, **kwargs)


async def test_flat_rows_of_an_image(tmp_path: Path) -> None:
    notes, model = Notes(), zoo_model("LlavaForConditionalGeneration")
    model.generation_config.eos_token_id = None
    inputs = {name: value for name, value in zoo_inputs(model, "image and text", 0).items() if name != "labels"}
    texts = len(inputs["input_ids"])

    def there(address: str) -> None:
        with symbiosis.open_model(address) as opened, torch.no_grad():
            opened.model.vision_tower = Flat(opened.model.vision_tower)
            for _ in range(3):
                notes.seen.clear()
                opened.generate(**inputs, do_sample=False, min_new_tokens=3, max_new_tokens=3)
                assert (Kind.PREFILL, 50) in notes.seen
                assert {kind for kind, rows in notes.seen if rows > texts} == {Kind.PREFILL}
                assert {kind for kind, _ in notes.seen} == {Kind.PREFILL, Kind.DECODE}

    async with symbiosis.Executor(model, policy=notes) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s")
        await asyncio.to_thread(there, listener.address)


async def test_a_layer_that_is_asked_for_many_rows_with_each_token() -> None:
    """As the cross-attention of Idefics, or Doge's attention over the values of all earlier tokens."""
    notes, model = Walks(), tiny_model("llama")
    model.generation_config.eos_token_id = None
    async with symbiosis.Executor(model, policy=notes) as executor, executor.client() as client:
        layer = client.model.model.layers[0]
        o_proj, up_proj = layer.self_attn.o_proj, layer.mlp.up_proj
        o_proj.register_forward_hook(lambda *_: [up_proj(torch.zeros(1, 20, up_proj.in_features)), None][1])
        for _ in range(2):
            notes.seen.clear()
            await client.generate(input_ids=IDS, do_sample=False, min_new_tokens=4, max_new_tokens=4)
    kinds = [kind for kind, _ in notes.seen]
    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count(Kind.DECODE) == 3 * len(kinds) // 4


async def test_prefix_tuning_of_an_encoder_decoder_model() -> None:
    """The virtual tokens are in the cache before the first token is."""
    notes, model = Walks(), zoo_model("T5ForConditionalGeneration")
    model.generation_config.eos_token_id = None
    config = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)
    async with symbiosis.Executor(model, policy=notes) as executor, executor.client(config) as client:
        for _ in range(2):
            notes.seen.clear()
            notes.begin.clear()
            await client.generate(input_ids=IDS, do_sample=False, min_new_tokens=4, max_new_tokens=4)
    kinds = [kind for kind, _ in notes.seen]
    assert kinds == sorted(kinds, reverse=True)
    assert sum(notes.begin) == 4


@pytest.mark.parametrize("joint", ["auto", "off"])
async def test_copies_of_a_clients_model(joint: str) -> None:
    notes, model = Notes(), tiny_model("llama")
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4, "logits_to_keep": 1}
    async with symbiosis.Executor(model, policy=notes, joint=joint) as executor, executor.client() as client:
        await client.generate(input_ids=IDS, **options)
        for copied in (copy.deepcopy(client.model), copy.copy(client.model)):
            notes.seen.clear()
            await client.run(copied.generate, input_ids=IDS, **options)
            kinds = [kind for kind, _ in notes.seen]
            assert kinds == sorted(kinds, reverse=True)
            assert kinds.count(Kind.PREFILL) in (9, 15), "one walk, in which siblings may be found"
            output = await client.run(copied.train(), input_ids=IDS, labels=IDS)
            with pytest.raises(UsageError, match="train"):
                output.loss.backward()


async def test_another_model_of_a_clients_class() -> None:
    async with symbiosis.Executor(tiny_model("llama")) as executor, executor.client() as client:
        own = type(client.model)(client.model.config).eval()
        assert own(IDS).logits.shape[:2] == IDS.shape


async def test_compiled_code() -> None:
    """The head's row of the prompt is one row of a token by its shape."""
    notes = Notes()
    async with symbiosis.Executor(tiny_model("llama"), policy=notes) as executor, executor.client() as client:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(client.model, backend="eager")
        await client.run(torch.no_grad()(compiled), input_ids=IDS, logits_to_keep=1)
        assert torch._dynamo.utils.counters["frames"]["ok"], "nothing was compiled"
    assert {rows for _, rows in notes.seen} == {len(IDS[0]), 1}
    assert {kind for kind, _ in notes.seen} == {Kind.PREFILL}


@pytest.mark.parametrize(
    "language",
    [
        {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "word_embed_proj_dim": 32},
        {"model_type": "t5", "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "decoder_start_token_id": 0},
    ],
    ids=["opt", "t5"],
)
async def test_generate_of_a_model_inside_the_model(language: dict[str, Any]) -> None:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    heads = "num_heads" if language["model_type"] == "t5" else "num_attention_heads"
    config = transformers.Blip2Config(
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        qformer_config={**tower, "encoder_hidden_size": 32, "vocab_size": 64},
        text_config={**language, heads: 4, "vocab_size": 64},
        num_query_tokens=2,
        image_token_index=60,
    )
    notes, model = Walks(), transformers.Blip2ForConditionalGeneration(config).eval()
    model.language_model.generation_config.eos_token_id = None
    inputs = {"input_ids": torch.tensor([[60, 60, 3, 4, 5]]), "pixel_values": torch.zeros(1, 3, 16, 16)}
    async with symbiosis.Executor(model, policy=notes) as executor, executor.client() as client:
        for _ in range(2):
            notes.seen.clear()
            notes.begin.clear()
            await client.generate(**inputs, do_sample=False, min_new_tokens=4, max_new_tokens=4)
    kinds = [kind for kind, _ in notes.seen]
    assert kinds == sorted(kinds, reverse=True)
    assert sum(notes.begin) == 4


def test_tokens_that_a_joint_walk_takes_do_not_change_what_is_known_of_latent_vectors() -> None:
    kinds = Kinds()
    kinds.most = 8
    few, many = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 9, 4)
    stated = []
    for rows in (few, many, None, None, few, few):
        with kinds.in_call(Kind.DECODE):
            stated.append(None if rows is None else kinds.kind_of(rows))
    assert stated == [Kind.DECODE, Kind.DECODE, None, None, Kind.PREFILL, Kind.DECODE]


async def test_fibers_of_two_clients_in_one_model() -> None:
    """One decodes with its model while the other reads a prompt with it."""
    notes, model = Notes(), tiny_model("llama")
    model.generation_config.eos_token_id = None
    async with symbiosis.Executor(model, policy=notes) as executor, executor.client() as one, executor.client() as two:
        options = {"input_ids": IDS[:, :3], "do_sample": False, "min_new_tokens": 20, "max_new_tokens": 20}
        await asyncio.gather(one.generate(**options), *(two.run(torch.no_grad()(one.model), IDS) for _ in range(3)))
    assert {kind for kind, rows in notes.seen if rows == IDS.shape[1]} == {Kind.PREFILL}
    assert [kind for kind, rows in notes.seen if rows == 1].count(Kind.DECODE) >= 19 * 9
