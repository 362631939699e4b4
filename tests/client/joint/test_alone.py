"""Clients that cannot take part in joint walks walk alone, with the same result, and say why."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers

from symbiosis import Executor
from symbiosis.core.terms import JOINT, Kind
from symbiosis.errors import RefusedError, UsageError
from symbiosis.testing.zoo import random_model, zoo_model
from tests.client.joint.common import assert_equal, expected_of, generate, model_of, plain, some_clients, text
from tests.helpers import LOGITS, lora


async def test_a_model_that_operations_of_other_clients_call_at_once() -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    @torch.no_grad()
    def decode(models: Sequence[Any], ids: torch.Tensor) -> list[torch.Tensor]:
        caches, found = [None for _ in models], []
        for _ in range(12):
            for number, model in enumerate(models):
                out = model(input_ids=ids if caches[number] is None else ids[:, -1:], past_key_values=caches[number])
                caches[number] = out.past_key_values
            found.append(out.logits[:, -1])
            ids = torch.cat([ids, found[-1].argmax(-1, keepdim=True)], 1)
        return found

    async with some_clients(3, base) as (executor, clients):
        for client in clients:
            client.model.eval()
        found = await asyncio.gather(
            *(client.run(decode, [client.model, clients[2].model], text(5, n)) for n, client in enumerate(clients[:2]))
        )
        counts = executor.statistics().clients
    assert counts[clients[0].name].joint >= 8
    assert counts[clients[2].name].alone["an operation of another client calls its model"] >= 20
    for number, logits in enumerate(found):
        right = decode([plain(plain_base, lora(), 2)], text(5, number))
        for one, other in zip(logits, right, strict=True):
            assert (one - other).abs().max() <= LOGITS * other.abs().max()


async def test_off_means_that_everybody_walks_alone() -> None:
    async with some_clients(2, joint="off") as (executor, clients):
        await asyncio.gather(*map(generate, clients))
        assert all(count.joint == 0 and not count.alone for count in executor.statistics().clients.values())


ALONE: dict[str, tuple[str, Callable[..., Any]]] = {
    "static cache": ("its cache is a StaticCache", lambda c: {"cache_implementation": "static"}),
    "attentions": ("the argument output_hidden_states", lambda c: {"output_hidden_states": True}),
}


@pytest.mark.parametrize(
    ("options", "reason", "tolerance"),
    [
        ({"privacy": "noise-pool:size=3"}, "a privacy scheme", 1e-4),  # noise is added and subtracted
        ({"kind": Kind.DECODE}, "a kind of its own", LOGITS),
    ],
)
async def test_a_client_that_never_takes_part_walks_alone_and_says_why(
    options: Any, reason: str, tolerance: float
) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with (
        some_clients(2, base) as (executor, clients),
        executor.client(lora(), name="apart", seed=2, **options) as apart,
    ):
        *_, out = await asyncio.gather(*map(generate, [*clients, apart]))
        counts = executor.statistics().clients
    assert (counts["apart"].joint, counts["apart"].alone.keys()) == (0, {reason})
    assert all(counts[client.name].joint > 5 for client in clients)
    assert_equal(out, expected_of(plain_base, 2), tolerance)


@pytest.mark.parametrize("case", ALONE)
async def test_what_cannot_be_joint_walks_alone_and_says_why(case: str) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    reason, options = ALONE[case]
    async with some_clients(3, base) as (executor, clients):
        outs = await asyncio.gather(
            *(generate(client, tokens=20) for client in clients[:2]), generate(clients[2], **options(clients[2]))
        )
        counts = executor.statistics().clients
    assert counts[clients[2].name].joint == 0
    assert reason in counts[clients[2].name].alone
    assert counts[clients[0].name].joint >= 15
    got, right = outs[2], expected_of(plain_base, 2, **options(None))
    assert got.sequences.tolist() == right.sequences.tolist()
    for number, out in enumerate(outs[:2]):
        assert_equal(out, expected_of(plain_base, number, tokens=20))


async def test_positions_that_are_not_integers_leave_the_others_theirs() -> None:
    """Both positions in one tensor would have the dtype of the first: bf16 has no 1001."""
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    @torch.no_grad()
    def decode(model: Any, dtype: torch.dtype) -> torch.Tensor:
        model.eval()
        out, found = model(input_ids=text(5), use_cache=True), []
        for number in range(8):
            ids, position = out.logits[:, -1:].argmax(-1), torch.tensor([[1001 + number]], dtype=dtype)
            out = model(input_ids=ids, position_ids=position, past_key_values=out.past_key_values)
            found.append(out.logits[:, -1])
        return torch.stack(found)

    dtypes = [torch.bfloat16, torch.int64, torch.int32]
    async with some_clients(3, base) as (executor, clients):
        outs = await asyncio.gather(
            *(one.run(decode, one.model, dtype) for one, dtype in zip(clients, dtypes, strict=True))
        )
        counts = [executor.statistics().clients[client.name] for client in clients]
    assert (counts[0].joint, counts[0].alone.keys()) == (0, {"tokens or positions that are not integers"})
    assert counts[1].joint >= 6
    for number, (out, dtype) in enumerate(zip(outs, dtypes, strict=True)):
        right = decode(plain(plain_base, lora(), number), dtype)
        assert (out - right).abs().max() <= LOGITS * right.abs().max()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
async def test_a_model_whose_positions_depend_on_the_longest_text_is_not_walked_jointly(kind: str) -> None:
    """The language model lies inside the model; the other tenant's text would change this one's logits."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 16, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = zoo_model("LlavaForConditionalGeneration").config
    config.text_config.max_position_embeddings = 16
    config.text_config.rope_parameters = rope
    base = random_model(transformers.LlavaForConditionalGeneration, config)
    async with Executor(base) as executor, executor.client() as a, executor.client() as b:
        for _ in range(3):
            await asyncio.gather(*(client.generate(input_ids=text(4) % 50, max_new_tokens=4) for client in (a, b)))
        counts = executor.statistics().clients
    for client in (a, b):
        assert counts[client.name].joint == 0
        assert any("longest text of a batch" in reason for reason in counts[client.name].alone)


async def test_a_copy_of_a_model_walks_alone() -> None:
    async with some_clients(2) as (executor, clients):
        twin = copy.deepcopy(clients[0].model)
        ids = text(6, 6)
        both = await asyncio.gather(
            clients[0].run(twin.generate, input_ids=ids, max_new_tokens=8, pad_token_id=0),
            generate(clients[1], tokens=20),
        )
        assert (
            clients[0].name not in executor.statistics().clients
            or not executor.statistics().clients[clients[0].name].joint
        )
        assert both[0].tolist() == (await generate(clients[0], tokens=8)).sequences.tolist()


async def test_a_client_with_a_recorder_walks_alone() -> None:
    """A recorder must see all that leaves the client."""
    calls = []

    class Recorder:
        def __init__(self, channel: Any) -> None:
            self.channel = channel

        def __getattr__(self, name: str) -> Any:
            return getattr(self.channel, name)

        def send(self, call: Any) -> Any:
            calls.append(call)
            return self.channel.send(call)

    async with some_clients(3) as (executor, clients):
        clients[0].wrap_channel(Recorder)
        await asyncio.gather(*map(generate, clients))
        assert executor.statistics().clients[clients[1].name].joint >= 10
        assert executor.statistics().clients[clients[0].name].joint == 0
    assert sum(call.tensors[0].shape[0] == 1 for call in calls) >= 11 * 5


def test_the_name_of_joint_walks_is_nobody_elses() -> None:
    executor = Executor(model_of("llama"))
    with pytest.raises(UsageError, match="executor's own"):
        executor.client(name=JOINT)
    with pytest.raises(RefusedError, match="choose another"):
        executor.service.check_name(JOINT)
    with pytest.raises(UsageError, match="joint is 'yes'"):
        Executor(model_of("llama"), joint="yes")
