"""Joint decoding with each PEFT method that a client can have."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from symbiosis import Client, Executor
from symbiosis.client.joint.adapters import in_place_of_base
from symbiosis.core.requests import Request
from symbiosis.errors import UsageError
from symbiosis.policies import Opportunistic
from symbiosis.testing import tiny_model
from symbiosis.testing.zoo import zoo_model
from tests.client.joint.common import OPTIONS, InNextWalk, assert_equal, generate, model_of, plain, ready, text, texts
from tests.client.test_methods import AGREE, CLOSE, TASK, config
from tests.helpers import LOGITS, lora

METHODS: dict[str, Callable[[], Any]] = {
    **AGREE,
    **CLOSE,
    "pvera-sampling": lambda: config("Pvera", r=4, target_modules=["q_proj"], sample_at_inference=True, **TASK),
    "tied-tokens": lambda: config("TrainableTokens", token_indices=[3, 4], **TASK),
    "tied-head": lambda: lora(target_modules=["q_proj"], target_parameters=["lm_head.weight"], lora_dropout=0.0),
    "own-head": lambda: lora(modules_to_save=["lm_head"]),
    "own-embedding": lambda: lora(modules_to_save=["embed_tokens"]),
    "own-norm": lambda: lora(modules_to_save=["norm"]),
    "own-tokens": lambda: lora(trainable_token_indices=[3, 4]),
}
ALONE = {
    "hra": "an adapter that needs more than what its base layer gives (hra HRALinear)",
    "hra-orthogonal": "an adapter that needs more than what its base layer gives (hra HRALinear)",
    "pvera-sampling": "an adapter that draws random numbers (pvera Linear)",
    "tied-head": "an adapter that changes its base layer (lora ParamWrapper)",
    "own-norm": "a LlamaRMSNorm of its own at model.layers.0.input_layernorm",
    "activated-lora": "forward hooks",
    "lora-replicated-layers": "a configuration of its own",
    "ln-tuning": "an adapter on LlamaRMSNorm, which is no base layer",
    "adaption-prompt": "AdaptedAttention in place of LlamaAttention at model.layers.0.self_attn",
}
"""Methods whose clients walk alone, and why."""
PROMPTS = ("prompt", "p-tuning")
"""Methods whose forward passes, in PEFT, give a mask and no positions."""


async def opened(executor: Executor, stack: contextlib.AsyncExitStack, configs: Sequence[Any]) -> list[Client]:
    """Return clients with these adapters, which have numbers for names and seeds."""
    return [
        await stack.enter_async_context(executor.client(copy.deepcopy(config), name=str(number), seed=number))
        for number, config in enumerate(configs)
    ]


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("method", METHODS)
async def test_each_tenant_gets_what_plain_peft_gives(method: str) -> None:
    """Two tenants have the method, with one and two texts, and one has plain LoRA."""
    base = tiny_model("llama", tie_word_embeddings=method.startswith("tied"))
    base.generation_config.eos_token_id = None
    plain_base = copy.deepcopy(base)
    configs = [METHODS[method](), lora(), METHODS[method]()]

    def inputs(number: int) -> dict[str, torch.Tensor]:
        return texts(4 + 5 * number, number, 1 if method in PROMPTS else 1 + number // 2)

    def change(model: Any) -> None:
        """Make a copy of a base layer differ from it."""
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            if method.startswith("own") and parameter.requires_grad:
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)

    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = await opened(executor, stack, configs)

        for client in clients:
            change(client.model)

        async def write(number: int) -> Any:
            clients[number].manual_seed(number)
            return await clients[number].generate(**inputs(number), max_new_tokens=12, **OPTIONS)

        for _ in range(3):
            outs = await asyncio.gather(*map(write, range(3)))
        counts = executor.statistics().clients
    for number in (0, 2):
        count = counts[str(number)]
        if method in ALONE:
            assert not count.joint
            assert ALONE[method] in count.alone
        else:
            assert count.joint > 8, count
    for number, out in enumerate(outs):
        model = plain(plain_base, configs[number], number)
        change(model)
        torch.manual_seed(number)
        with torch.no_grad():
            right = model.generate(**inputs(number), max_new_tokens=12, **OPTIONS)
        assert_equal(out, right, 10 * LOGITS if method in CLOSE else LOGITS)


async def _decode_with_others(act: Callable[[Any], None], config: Any) -> tuple[Any, Callable[[], Any], int]:
    """Decode with one tenant with this adapter, which does something to its model after five tokens, and with two
    others, whose results must not change. Return the first's logits, a function that returns plain PEFT's, and the
    first's tokens from joint walks."""
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    def decode(model: Any) -> list[torch.Tensor]:
        ids, cache, found = texts(5, 0, 1)["input_ids"], None, []
        for number in range(12):
            if number == 5:
                act(model)
            with torch.no_grad():
                out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            found.append(out.logits[:, -1])
        return found

    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        first, *others = await opened(executor, stack, (config, lora(), lora()))
        await ready(executor, [first, *others])
        got, *outs = await asyncio.gather(
            first.run(decode, first.model),
            *(generate(other, tokens=24) for other in others),
            return_exceptions=True,
        )
        joint = executor.statistics().clients["0"].joint
    for number, out in enumerate(outs, start=1):
        model = plain(plain_base, lora(), number)
        assert_equal(out, model.generate(**texts(6, 6, 1), max_new_tokens=24, **OPTIONS))
    return got, lambda: decode(plain(plain_base, config, 0)), joint


@pytest.mark.parametrize("method", ["dora", "lokr"])
async def test_an_adapter_that_changes_between_two_tokens_takes_effect_at_once(method: str) -> None:
    """DoRA then asks for more than its base layer's results, in the middle of the joint walk."""

    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.data.mul_(1.5)

    got, right, joint = await _decode_with_others(change, METHODS[method]())
    assert joint >= 10
    for one, other in zip(got, right(), strict=True):
        assert (one - other).abs().max() <= 10 * LOGITS * other.abs().max()


async def test_several_active_adapters() -> None:
    def change(model: Any) -> None:
        model.add_adapter("second", lora(init_lora_weights="gaussian", target_modules=["q_proj", "down_proj"]))
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "second" in name:
                parameter.data.copy_(torch.randn_like(parameter) / 10)
        model.base_model.set_adapter(["default", "second"])
        model.eval()

    got, right, joint = await _decode_with_others(change, lora())
    assert joint >= 10
    for one, other in zip(got, right(), strict=True):
        assert (one - other).abs().max() <= LOGITS * other.abs().max()


async def test_an_error_of_an_adapters_code_is_its_tenants_alone() -> None:
    def change(model: Any) -> None:
        layer = model.base_model.model.model.layers[1].mlp.down_proj
        layer.lokr_w1["default"].data = torch.ones(3, 3)

    got, right, joint = await _decode_with_others(change, AGREE["lokr"]())
    assert isinstance(got, RuntimeError)
    with pytest.raises(RuntimeError) as caught:
        right()
    assert str(got) == str(caught.value)
    assert joint >= 4


async def test_a_cancelled_tenant_goes_on_while_its_adapters_code_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    config = AGREE["lokr"]()
    again: list[asyncio.Task[Any]] = []

    def restart() -> None:
        going.cancel()
        again.append(asyncio.ensure_future(generate(clients[0])))

    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = await opened(executor, stack, 3 * [config])
        await ready(executor, clients)
        processors = LogitsProcessorList([InNextWalk(monkeypatch, restart)])
        going = asyncio.ensure_future(generate(clients[0], logits_processor=processors))
        outs = await asyncio.gather(*map(generate, clients[1:]))
        await asyncio.wait([going])
        outs.insert(0, await again[0])
        assert going.cancelled()
        assert all(executor.statistics().clients[client.name].joint >= 4 for client in clients)
    for number, out in enumerate(outs):
        right = plain(plain_base, config, number).generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS)
        assert_equal(out, right)


async def test_a_head_with_results_of_another_size_disturbs_nobody() -> None:
    def change(model: Any) -> None:
        torch.manual_seed(0)
        model.base_model.model.lm_head.modules_to_save["default"] = torch.nn.Linear(32, 10, bias=False).eval()

    got, right, _ = await _decode_with_others(change, lora(modules_to_save=["lm_head"]))
    for one, other in zip(got, right(), strict=True):
        assert (one - other).abs().max() <= LOGITS * other.abs().max()


async def test_a_forward_of_the_tenants_own_runs_while_adapters_are_disabled() -> None:
    def change(model: Any) -> None:
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        layer.forward = MethodType(lambda self, *args, **kwargs: 2 * type(self).forward(self, *args, **kwargs), layer)
        model.base_model.disable_adapter_layers()

    got, right, joint = await _decode_with_others(change, lora())
    assert joint >= 10
    for one, other in zip(got, right(), strict=True):
        assert (one - other).abs().max() <= LOGITS * other.abs().max()


async def test_a_second_dora_adapter() -> None:
    def change(model: Any) -> None:
        torch.manual_seed(5)
        model.add_adapter("second", CLOSE["dora"]())
        model.base_model.set_adapter("second")
        model.eval()

    got, right, joint = await _decode_with_others(change, CLOSE["dora"]())
    assert joint >= 9
    for one, other in zip(got, right(), strict=True):
        assert (one - other).abs().max() <= 10 * LOGITS * other.abs().max()


async def test_embeddings_of_positions_of_a_tenants_own() -> None:
    """OPT's get several tensors."""
    base = zoo_model("OPTForCausalLM")
    base.generation_config.eos_token_id = None
    plain_base = copy.deepcopy(base)
    configs = [lora(), lora(), lora(modules_to_save=["embed_positions"])]
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = await opened(executor, stack, configs)
        await ready(executor, clients[:2])
        outs = await asyncio.gather(*(generate(client) for client in clients))
        counts = executor.statistics().clients
    assert [counts[str(number)].joint >= 8 for number in range(3)] == [True, True, False], counts
    assert not any("a joint walk failed" in count.alone for count in counts.values())
    for number, out in enumerate(outs):
        model = plain(plain_base, configs[number], number)
        assert_equal(out, model.generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS))


async def test_layers_beside_a_tenants_that_changes_their_input_still_share_requests() -> None:
    """OFT gives its base layer other rows than k_proj, between q_proj and v_proj, gets."""

    class Noting(Opportunistic):
        lone_at_once = False  # else it is not told of requests that nothing can share a batch with

        def submitted(self, request: Request) -> None:
            if request.joint:
                seen.append(request.clients)
            super().submitted(request)

    seen: list[Mapping[str, float]] = []
    base = model_of("llama")
    async with Executor(base, policy=Noting()) as executor, contextlib.AsyncExitStack() as stack:
        clients = await opened(executor, stack, (lora(), lora(), AGREE["oft"]()))
        await ready(executor, clients)
        await asyncio.gather(*(generate(client, tokens=24) for client in clients))
        tokens = executor.statistics().clients["0"].tokens["decode"]
        assert tokens == pytest.approx(23, abs=0.5), "a tenant is charged for its own rows"
        apart = [clients for clients in seen if 0.0 in clients.values()]
        assert apart
        assert all(clients["2"] == 1.0 and len(clients) > 1 for clients in apart), "others are not held back with it"
        await clients[2].close()
        executor.reset_statistics()
        await asyncio.gather(*(generate(client, tokens=24) for client in clients[:2]))
        statistics = executor.statistics()
    assert statistics.clients["0"].joint >= 20
    assert "model.layers.0.self_attn.q_proj+k_proj+v_proj forward" in statistics.layers
    assert "model.layers.0.self_attn.q_proj forward" not in statistics.layers


@pytest.mark.parametrize("how", ["twice", "other rows"])
async def test_an_adapter_that_calls_its_base_layer_in_another_way_disturbs_nobody(how: str) -> None:
    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        if how == "twice":
            return layer.base_layer(x) - layer.base_layer(x / 2)
        whole, half = layer.base_layer(torch.cat([x, x / 2])).chunk(2)
        return whole - half

    def change(model: Any) -> None:
        layer = model.base_model.model.model.layers[1].mlp.down_proj
        layer.forward = MethodType(forward, layer)
        layer.register_forward_hook(lambda *_: None).remove()  # has the model looked at again in the same operation

    got, right, joint = await _decode_with_others(change, lora(target_modules=["down_proj"]))
    for one, other in zip(got, right(), strict=True):
        assert (one - other).abs().max() <= LOGITS * other.abs().max()
    assert joint < 9


@pytest.mark.parametrize(
    "how",
    ["calls its base layer twice", "rows that an adapter gives", "results of an adapter", "raised StopIteration"],
)
async def test_an_adapter_that_changes_its_ways_ends_its_tenants_operation_alone(how: str) -> None:
    """It was tried before."""
    calls = itertools.count()

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        if how.startswith("raised") and next(calls) > 4:
            raise StopIteration  # a future cannot have it
        y: torch.Tensor = layer.base_layer(torch.cat([x, x]) if how.startswith("rows") and next(calls) > 4 else x)
        if how.startswith("calls") and next(calls) > 4:
            y = y - layer.base_layer(x / 2)
        return y.double() if how.startswith("results") and next(calls) > 4 else y[: len(x)]

    def change(model: Any) -> None:
        layer = model.base_model.model.model.layers[1].mlp.down_proj
        layer.forward = MethodType(forward, layer)
        layer.register_forward_hook(lambda *_: None).remove()  # has the model looked at again in the same operation

    got, _, joint = await _decode_with_others(change, lora(target_modules=["down_proj"]))
    if how.startswith("raised"):
        assert isinstance(got, RuntimeError)
    else:
        assert isinstance(got, UsageError)
        assert "with joint='off'" in str(got)
    assert how in str(got)
    assert joint >= 6


@pytest.mark.parametrize("method", ["dora", "oft"])
async def test_what_stands_for_a_base_layer_does_so_on_its_own_thread(method: str) -> None:
    """Another thread may call the model while an adapter's code runs, or is tried."""
    base, stood_in = model_of("llama"), []
    right = plain(copy.deepcopy(base), METHODS[method](), 0)(input_ids=text(12)).logits

    def stand_in(*given: Any) -> torch.Tensor:
        stood_in.append(given)
        return torch.zeros(1)

    async with Executor(base) as executor, executor.client(METHODS[method](), seed=0) as client:
        layer = client.model.base_model.model.model.layers[0].self_attn.q_proj
        with in_place_of_base(layer, stand_in, multiply=stand_in):
            got = await asyncio.to_thread(client.model, input_ids=text(12))
            assert not stood_in
            layer.get_base_layer()(text(12))
            assert len(stood_in) == 1
    assert (got.logits - right).abs().max() <= LOGITS * right.abs().max()
