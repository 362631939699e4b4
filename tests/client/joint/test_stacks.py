"""Memory of adapters and texts in joint walks: whose it is, and when another tenant gets it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io

import pytest
import torch

from symbiosis import Executor
from tests.client.joint.common import OPTIONS, assert_equal, generate, model_of, plain, ready, some_clients, text
from tests.helpers import lora


async def test_no_tensor_of_a_tenant_shares_memory_with_another_tenants() -> None:
    async with some_clients(3) as (executor, clients):
        outs = await asyncio.gather(
            *(generate(client, 4 + 3 * n, return_dict_in_generate=True) for n, client in enumerate(clients))
        )
        assert executor.statistics().clients[clients[0].name].joint >= 10
    storages = [
        {
            tensor.untyped_storage().data_ptr()
            for tensor in [
                *out.logits,
                *(t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)),
            ]
        }
        for out in outs
    ]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert not storages[one] & storages[other]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in outs[0].logits)


async def test_a_parameter_in_a_stack_has_a_storage_of_its_own_and_is_given_back() -> None:
    async with some_clients(3) as (_, clients):
        stacked = [p for p in clients[0].model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in stacked]
        file = io.BytesIO()
        torch.save([p.data for p in stacked], file)
        assert len(file.getvalue()) < 2 * sum(p.nbytes for p in stacked) + 1000 * len(stacked)
        assert all(p.untyped_storage().nbytes() < p.nbytes + 64 for p in stacked)
        pointers = [p.data_ptr() for p in stacked]
        await clients[0].close()
        assert all(p.data_ptr() != pointer for p, pointer in zip(stacked, pointers, strict=True))
        assert all(torch.equal(p, values) for p, values in zip(stacked, before, strict=True))


async def test_memory_of_a_tenant_that_has_left_is_not_used_again_while_something_refers_to_it() -> None:
    """A state dict and the graph of a loss refer to it. Later tenants get other memory, and this memory once it is
    free."""
    async with some_clients(2) as (executor, clients):
        first, second = clients
        kept = {name: p.detach() for name, p in first.model.named_parameters() if p.requires_grad}
        before = {name: tensor.clone() for name, tensor in kept.items()}
        places = {tensor.data_ptr() for tensor in kept.values()}
        loss = (await first.forward(input_ids=text(9), labels=text(9))).loss
        await first.close()
        for tries in range(2):
            async with executor.client(lora(), name=f"later-{tries}", seed=7) as later:
                for _ in range(2):
                    await asyncio.gather(generate(later), generate(second))
                theirs = {p.data_ptr() for p in later.model.parameters() if p.requires_grad}
                if not tries:
                    assert not theirs & places
                    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
                    kept.clear()
                    del loss
        assert theirs & places, "the memory is used again"


async def test_memory_of_an_adapter_that_something_else_refers_to_is_not_moved() -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(lora(), name=name, seed=seed))
            for seed, name in enumerate(("first", "second"))
        ]
        aliases = [p.detach() for name, p in clients[0].model.named_parameters() if "lora_B" in name]
        await ready(executor, clients)
        for alias in aliases:
            alias.zero_()
        out = await generate(clients[0])
    model = plain(plain_base, lora(), 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert_equal(out, model.generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS))


@pytest.mark.parametrize("when", ["before", "after"])
async def test_parameters_in_shared_memory_stay_there(when: str) -> None:
    """Another process may have them. Optimizer steps of either process take effect."""
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with Executor(base) as executor, executor.client(lora(), seed=0) as first, executor.client(lora()) as second:
        await ready(executor, [first, second] if when == "after" else [])
        parameters = [p for p in first.model.parameters() if p.requires_grad]
        for p in parameters:
            p.share_memory_()
        places = [p.data_ptr() for p in parameters]
        await ready(executor, [first, second])
        for p in parameters:
            p.data.mul_(1.5)
        out, _ = await asyncio.gather(generate(first), generate(second))
        assert [p.data_ptr() for p in parameters] == places
        assert executor.statistics().clients[first.name].joint >= 10
    assert all(p.is_shared() for p in parameters)
    model = plain(plain_base, lora(), 0)
    for p in model.parameters():
        if p.requires_grad:
            p.data.mul_(1.5)
    assert_equal(out, model.generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS))


async def test_a_parameter_to_which_other_tensors_refer_stays_where_it_is() -> None:
    """The tenant's own optimizer has views of the parameters, which a hook takes out of joint walks."""
    async with some_clients(2) as (executor, clients):
        await asyncio.gather(*map(generate, clients))
        parameters = [p for p in clients[0].model.parameters() if p.requires_grad]
        views = [p.data for p in parameters]
        hook = clients[0].model.base_model.model.model.norm.register_forward_hook(lambda *_: None)
        await asyncio.gather(*map(generate, clients))
        hook.remove()
        assert executor.statistics().clients[clients[0].name].alone["forward hooks"] > 5
        for view in views:
            view.add_(1)
        assert all(torch.equal(p, view) for p, view in zip(parameters, views, strict=True))
        (seat,) = [seat for seat in executor._joint._seats if seat.name == clients[0].name]
        assert not seat.slots
        await asyncio.gather(*map(generate, clients))
        assert seat.slots, "parameters that have stayed take part again"
        assert not seat._parked


async def test_stacks_without_clients_are_freed() -> None:
    async with some_clients(3) as (executor, clients):
        stacks = executor._joint.stacks
        assert any(stacks._stacks.values())
        for client in clients:
            await client.close()
        assert not any(stacks._stacks.values())


async def test_values_that_are_put_aside_and_back_find_their_slots_again() -> None:
    """As for an evaluation with averaged weights; a state dict of the tenant refers to some of them meanwhile."""
    async with some_clients(2) as (executor, clients):
        (seat,) = [seat for seat in executor._joint._seats if seat.name == clients[0].name]
        parameters = [p for p in clients[0].model.parameters() if p.requires_grad]
        for refers in (False, True):
            aside = [p.data for p in parameters]
            more = [p.data for p in parameters] if refers else []
            for p in parameters:
                p.data = p.data.clone()
            await asyncio.gather(*map(generate, clients))
            for p, before in zip(parameters, aside, strict=True):
                p.data = before
            del aside, before, more
            await asyncio.gather(*map(generate, clients))
            assert len(seat.slots) == len(parameters) // 2
            assert not seat._parked
        taken = [stack for stacks in executor._joint.stacks._stacks.values() for stack in stacks]
        for client in clients:
            await client.close()
        assert all(stack.is_empty() for stack in taken)
