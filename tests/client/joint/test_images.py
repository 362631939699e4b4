"""Joint decoding with models of images and text."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig

from symbiosis import Client, Executor
from symbiosis.testing.zoo import random_model, zoo_inputs, zoo_model
from tests.client.joint.common import OPTIONS, assert_equal, plain, ready, text
from tests.helpers import LOGITS

QWEN = "Qwen2VLForConditionalGeneration"


def model_of(name: str) -> Any:
    base = _qwen() if name == QWEN else zoo_model(name)
    base.generation_config.eos_token_id = None
    return base


def _qwen() -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    reads = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    sight = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config={**reads, **heads, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None},
        vision_config=sight,
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=58,
        vision_end_token_id=59,
    )
    return random_model(transformers.Qwen2VLForConditionalGeneration, config)


def inputs_of(base: Any, number: int) -> dict[str, Any]:
    """Return what a tenant asks about: an image, in a text whose length depends on ``number``."""
    if not isinstance(base, transformers.Qwen2VLForConditionalGeneration):
        inputs = zoo_inputs(base, "image and text", number)
        return {name: value[:1] for name, value in inputs.items() if name != "labels"}
    ids = torch.cat([text(4 + number, number) % 50, torch.tensor([[58, *[60] * 16, 59, 5]])], 1)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(64, 96, generator=torch.Generator().manual_seed(number)),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
        "mm_token_type_ids": (ids == 60).long(),
    }


def _mllama() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    reads = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1], "bos_token_id": 1}
    sight = {"hidden_size": 32, "attention_heads": 4, "num_hidden_layers": 1, "num_global_layers": 1}
    size = {"image_size": 16, "patch_size": 8, "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1}
    config = transformers.MllamaConfig(
        text_config={**reads, **heads, "rope_parameters": rope, "eos_token_id": None},
        vision_config={**sight, **size, "vision_output_dim": 64, "intermediate_layers_indices": [0]},
    )
    base = random_model(transformers.MllamaForConditionalGeneration, config)
    for name, parameter in base.named_parameters():
        if name.endswith("gate"):
            parameter.data.fill_(1.0)
    return base


async def test_tenants_with_an_image_in_layers_of_cross_attention() -> None:
    """Llama 3.2 Vision skips these layers if the cache has no image. Without a mask, its tokens look like a text's."""
    base = _mllama()
    plain_base = copy.deepcopy(base)

    @torch.no_grad()
    def decode(model: Any, number: int) -> torch.Tensor:
        pixels = torch.randn(1, 1, 1, 3, 16, 16, generator=torch.Generator().manual_seed(number))
        one = torch.ones(1, 1, dtype=torch.long)
        image = {"pixel_values": pixels, "aspect_ratio_ids": one, "aspect_ratio_mask": one[None]}
        given = {**image, "cross_attention_mask": torch.ones(1, 6, 1, 1)} if number % 2 else {}
        out, found = model.eval()(input_ids=text(6, number), **given, use_cache=True), []
        for _ in range(8):
            out = model(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values)
            found.append(out.logits[:, -1])
        return torch.stack(found)

    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(executor.client(name=str(number))) for number in range(4)]
        await ready(executor, clients)
        outs = await asyncio.gather(*(client.run(decode, client.model, n) for n, client in enumerate(clients)))
        counts = executor.statistics().clients
    for number, out in enumerate(outs):
        right = decode(plain_base, number)
        assert (out - right).abs().max() <= LOGITS * right.abs().max()
        if number % 2:
            assert counts[str(number)].alone.keys() == {"its cache has other inputs than tokens"}
        else:
            assert counts[str(number)].joint >= 6


@pytest.mark.parametrize(
    "name", ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "SmolVLMForConditionalGeneration", QWEN]
)
async def test_texts_about_images_are_walked_jointly(name: str) -> None:
    await check_texts_about_images(name)


async def test_a_model_with_the_text_in_it_is_read_whatever_its_class_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlavaModel, "main_input_name", "pixel_values")
    await check_texts_about_images("LlavaForConditionalGeneration")


async def check_texts_about_images(name: str) -> None:
    """Adapters in a vision tower do not matter for that, not even on layers that the base executor does not serve."""
    base = model_of(name)
    plain_base = copy.deepcopy(base)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    inputs = [inputs_of(base, number) for number in range(3)]
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(copy.deepcopy(config), name=str(number), seed=number))
            for number in range(3)
        ]

        async def write(client: Client, given: dict[str, Any]) -> Any:
            return await client.generate(**given, max_new_tokens=20, **OPTIONS)

        await asyncio.gather(*(write(client, {"input_ids": text(4) % 50}) for client in clients))
        executor.reset_statistics()
        outs = await asyncio.gather(*map(write, clients, inputs))
        counts = [executor.statistics().clients[client.name] for client in clients]
    assert all(count.joint >= 15 for count in counts), counts
    for number, out in enumerate(outs):
        model = plain(plain_base, config, number)
        assert_equal(out, model.generate(**inputs[number], max_new_tokens=20, **OPTIONS))


@torch.no_grad()
def written(model: Any, inputs: dict[str, Any], first: int | None) -> torch.Tensor:
    """Return the logits of ten tokens that a loop writes. Positions begin with ``first``, or are left to the model."""
    cache = transformers.DynamicCache()
    output = model(**inputs, past_key_values=cache, use_cache=True)
    found = [output.logits[:, -1]]
    for number in range(10):
        given = {} if first is None else {"position_ids": torch.full((1, 1), first + number)}
        ids = found[-1].argmax(-1)[:, None]
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, **given)
        found.append(output.logits[:, -1])
    return torch.stack(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [QWEN, "PaliGemmaForConditionalGeneration"])
async def test_a_model_whose_positions_are_not_the_number_of_tokens_is_left_to_count_them(
    name: str, dtype: torch.dtype
) -> None:
    """Qwen2-VL keeps by how much an image has moved the positions after it, and PaliGemma counts from one."""
    base = model_of(name).to(dtype)
    inputs = [
        {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs_of(base, number).items()}
        for number in range(2)
    ]
    tolerance = LOGITS if dtype is torch.float32 else 0.01
    expected = [written(copy.deepcopy(base), one, None) for one in inputs]
    async with Executor(base) as executor, executor.client(name="a") as a, executor.client(name="b") as b:

        async def write(client: Client, number: int, first: int | None) -> torch.Tensor:
            return await client.run(written, client.model, inputs[number], first)

        for _ in range(2):
            found = await asyncio.gather(write(a, 0, None), write(b, 1, None))
            for one, other in zip(found, expected, strict=True):
                assert (one - other).abs().max() <= tolerance * other.abs().max()
        assert executor.statistics().clients["a"].alone["positions of its own"] > 0
        firsts = [one["input_ids"].shape[1] + 1 for one in inputs]
        await asyncio.gather(write(a, 0, firsts[0]), write(b, 1, firsts[1]))
        assert executor.statistics().clients["a"].joint > 0
        if name != QWEN:
            found = await asyncio.gather(write(a, 0, firsts[0]), write(b, 1, firsts[1]))
            for one, other in zip(found, expected, strict=True):
                assert (one - other).abs().max() <= tolerance * other.abs().max()


async def test_a_change_in_a_nested_configuration_is_noticed_between_two_tokens() -> None:
    base = model_of("Gemma3ForConditionalGeneration")

    @torch.no_grad()
    def decode(model: Any) -> list[bool]:
        ids, cache, found = text(8), None, []
        for number in range(12):
            model.config.text_config.output_hidden_states = number >= 6
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            found.append(out.get("hidden_states") is not None)
        return found

    right = decode(copy.deepcopy(base))
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(executor.client(name=str(number))) for number in range(2)]
        await ready(executor, clients)
        got, _ = await asyncio.gather(
            clients[0].run(decode, clients[0].model), clients[1].generate(input_ids=text(8), max_new_tokens=30)
        )
        assert executor.statistics().clients["0"].joint >= 3
    assert got == right == [False] * 6 + [True] * 6
