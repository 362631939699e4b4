"""A tenant that is cancelled, fails or leaves in the middle of a joint walk does not disturb the others."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from symbiosis import Client, Executor
from symbiosis.errors import ClientClosedError
from tests.client.joint.common import (
    OPTIONS,
    InNextWalk,
    assert_equal,
    expected_of,
    generate,
    model_of,
    plain,
    ready,
    some_clients,
    text,
)
from tests.helpers import ia3, lora


@pytest.mark.parametrize("kind", [ia3, lora])
async def test_a_cancelled_tenant_may_delete_its_adapter_at_once(
    kind: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    processors = LogitsProcessorList([InNextWalk(monkeypatch, lambda: going.cancel())])

    async def write_and_delete(client: Client) -> None:
        try:
            await generate(client, logits_processor=processors)
        finally:
            client.model.delete_adapter("default")

    async with Executor(base, joint="exact") as executor, contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(executor.client(kind(), name=str(number), seed=number))
            for number in range(4)
        ]
        await ready(executor, clients)
        going = asyncio.ensure_future(write_and_delete(clients[0]))
        outs = await asyncio.gather(*map(generate, clients[1:]))
        with pytest.raises(asyncio.CancelledError):
            await going
    for number, out in enumerate(outs, start=1):
        assert_equal(
            out, plain(plain_base, kind(), number).generate(input_ids=text(6, 6), max_new_tokens=12, **OPTIONS)
        )


@pytest.mark.parametrize("what", ["cancelled", "closed", "failed"])
async def test_a_tenant_that_goes_in_the_middle_does_not_disturb_the_others(what: str) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    class Fail(LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            if ids.shape[1] == 10:
                if what == "failed":
                    raise ValueError("my own mistake")
                asyncio.get_running_loop().call_soon(go)  # while the next token is under way
            return scores

    async with some_clients(4, base) as (_, clients):
        going = asyncio.ensure_future(generate(clients[1], logits_processor=LogitsProcessorList([Fail()])))
        closing: list[Any] = []

        def go() -> None:
            if what == "cancelled":
                going.cancel()
            else:
                closing.append(asyncio.ensure_future(clients[1].close()))

        others = [clients[0], *clients[2:]]
        outs = await asyncio.gather(going, *map(generate, others), return_exceptions=True)
        await asyncio.gather(*closing)
        assert isinstance(outs[0], BaseException)
        kinds = {"cancelled": asyncio.CancelledError, "failed": ValueError, "closed": ClientClosedError}
        assert isinstance(outs[0], kinds[what]), outs[0]
        assert bool(closing) is (what == "closed")
        again = await asyncio.gather(*map(generate, others))
        if what != "closed":
            assert_equal(await generate(clients[1]), expected_of(plain_base, 1))
    for number, out, later in zip((0, 2, 3), outs[1:], again, strict=True):
        assert_equal(out, expected_of(plain_base, number))
        assert_equal(later, expected_of(plain_base, number))


async def test_nothing_of_a_tenant_is_kept_after_its_text_and_after_it_has_left() -> None:

    async def write(client: Client) -> weakref.ref[torch.Tensor]:
        return weakref.ref((await generate(client)).past_key_values.layers[0].keys)

    async with some_clients(3) as (_, clients):
        keys, *_ = await asyncio.gather(*map(write, clients))
        adapter = weakref.ref(next(p for p in clients[0].model.parameters() if p.requires_grad))
        await clients[0].close()
        clients[0]._model = clients[0]._seat = None
        gc.collect()
        assert keys() is None
        assert adapter() is None


async def test_the_executor_closes_in_the_middle() -> None:
    async with some_clients(3) as (executor, clients):
        texts = [asyncio.ensure_future(generate(client, tokens=100)) for client in clients]
        await asyncio.sleep(0.02)
        await executor.close()
        errors = await asyncio.gather(*texts, return_exceptions=True)
    assert all("was shut down" in str(error) for error in errors), errors


async def test_a_wrong_token_of_one_tenant_fails_that_tenant_alone() -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)

    def decode(model: Any) -> None:
        cache = model(input_ids=text(4), use_cache=True).past_key_values
        for token in (5, 6, 1_000_000):
            model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)

    async with some_clients(3, base) as (executor, clients):
        bad = asyncio.ensure_future(clients[1].run(torch.no_grad()(decode), clients[1].model))
        outs = await asyncio.gather(generate(clients[0]), bad, generate(clients[2]), return_exceptions=True)
        assert isinstance(outs[1], IndexError)
        assert executor.statistics().clients[clients[1].name].joint >= 1
    assert_equal(outs[0], expected_of(plain_base, 0))
    assert_equal(outs[2], expected_of(plain_base, 2))
