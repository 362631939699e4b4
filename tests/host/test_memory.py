"""Memory of each side: the executor holds nothing of a tenant between requests, and a client holds no base weight."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import time
import weakref
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.client.parameters import SharedParameter
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import LayerError
from symbiosis.testing import tiny_model
from tests.helpers import BATCH, IDS, adamw, lora, prefix, until


def tensor_bytes() -> int:
    """Return the bytes of all tensor storages that are still referenced, each counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter, SharedParameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("max_rows", [8192, 4], ids=["whole", "sliced"])
@pytest.mark.parametrize("how", ["loop", "thread"])
async def test_rows_and_results_are_freed(base: Any, how: str, max_rows: int) -> None:
    """Weak references show that rows and results are freed as soon as the client has released them."""
    async with symbiosis.Executor(base, max_rows=max_rows) as executor, executor.client() as client:
        channel = client._channel
        assert channel is not None
        rows = torch.ones(9, 32)
        call = Call(Key((0, 1, 2), Pass.FORWARD), Kind.PREFILL, (rows,))
        results = await channel.send(call) if how == "loop" else await asyncio.to_thread(channel.call, call)
        references = [weakref.ref(tensor) for tensor in (rows, *results)]
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in (rows, *results)]
        assert all(reference() is not None for reference in references)
        del rows, call, results
        # A thread that has handed over its result may refer to it a moment longer.
        await until(lambda: all(gone() is None for gone in [*references, *storages]))


@pytest.mark.parametrize("how", ["cancelled", "failed", "failed at once", "closed"])
async def test_rows_of_requests_without_a_result(base: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest keeps log records, which refer to the traceback and so to the frames of the layer that failed.
    monkeypatch.setattr(logging.getLogger("symbiosis.executor.engine"), "disabled", True)
    async with symbiosis.Executor(base) as executor:
        client = await executor.client().open()
        channel = client._channel
        assert channel is not None
        rows = torch.ones(9, 32)
        reference = weakref.ref(rows)
        call = Call(Key((0,), Pass.FORWARD), Kind.PREFILL, (rows,))
        if how.startswith("failed"):
            executor.engine.layers[0].run = explode  # type: ignore[method-assign]
        if how == "failed at once":
            executor.engine.scheduler.turned(time.monotonic())
        reply = channel.send(call)
        assert reply.done() == (how == "failed at once")
        if how == "cancelled":
            channel.cancel(call)
            reply.cancel()
        elif how.startswith("failed"):
            with pytest.raises(LayerError):
                await reply
        else:
            await client.close()
            assert reply.exception() is not None
        del rows, call, reply
        await asyncio.sleep(0)
        if how != "failed at once":  # which leaves no cycles
            gc.collect()
        assert reference() is None
        await client.close()


def explode(*args: Any) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    "policy",
    [
        "no-lockstep",
        "co-serving",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("lockstep", "opportunistic")),
    ],
)
async def test_memory_does_not_grow_from_step_to_step(policy: str) -> None:
    """The bytes of all tensors in the process are equal after 3 steps and after 12."""
    model = tiny_model()
    async with symbiosis.Executor(model, policy=policy) as executor:
        async with executor.client(lora()) as a, executor.client(prefix()) as b:
            optimizers = [adamw(client.model) for client in (a, b)]

            async def rounds(number: int) -> int:
                for _ in range(number):
                    await asyncio.gather(a.train_step(BATCH, optimizers[0]), b.train_step(BATCH, optimizers[1]))
                    await asyncio.gather(
                        a.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3), b.forward(input_ids=IDS)
                    )
                return tensor_bytes()

            assert await rounds(3) == await rounds(9)


async def test_executor_alone_holds_its_weights_only() -> None:
    """After clients have joined and left, the executor holds as many bytes as before."""
    model = tiny_model()
    async with symbiosis.Executor(model) as executor:
        before = tensor_bytes()
        for _ in range(3):
            async with executor.client(lora()) as client:
                optimizer = adamw(client.model)
                await client.train_step(BATCH, optimizer)
            del client, optimizer
        assert tensor_bytes() == before


async def test_a_client_costs_its_adapter_and_no_base_layer() -> None:
    """A second client takes adapter, buffers and a random stream, far less than one copy of the base layers."""
    model = tiny_model(hidden_size=64, intermediate_size=256)
    base_bytes = sum(p.numel() * 4 for name, p in model.named_parameters() if "proj" in name or "lm_head" in name)
    config = lora(r=1, target_modules=["q_proj"])
    async with symbiosis.Executor(model) as executor, executor.client(copy.deepcopy(config)) as first:
        await first.forward(input_ids=IDS)
        before = tensor_bytes()
        async with executor.client(copy.deepcopy(config)) as second:
            adapter = sum(p.numel() * 4 for p in second.model.parameters() if p.requires_grad)
            extra = tensor_bytes() - before
            await second.forward(input_ids=IDS)
            assert adapter <= extra < adapter + 24_000  # a stream has two generator states of 5 kB
            assert extra < base_bytes / 8


async def test_frozen_parameters_are_shared_between_clients(base: Any) -> None:
    async with symbiosis.Executor(base) as executor, executor.client(lora()) as a, executor.client() as b:
        one = a.model.get_base_model().model.embed_tokens.weight
        two = b.model.model.embed_tokens.weight
        assert one.data_ptr() == two.data_ptr() == base.model.embed_tokens.weight.data_ptr()
        assert one is not two


async def test_large_requests_are_bounded_by_max_rows(base: Any) -> None:
    """No batch is larger than max_rows, for any sequence length."""
    seen: list[int] = []
    async with symbiosis.Executor(base, max_rows=16) as executor, executor.client() as client:
        for layer in executor.engine.layers:
            run = layer.run

            def watched(pass_: Any, tensors: Any, run: Any = run) -> Any:
                seen.extend(tensor.shape[0] for tensor in tensors)
                return run(pass_, tensors)

            layer.run = watched  # type: ignore[method-assign]
        ids = torch.randint(3, 64, (4, 50))
        expected = executor.service.resident().model(input_ids=ids).logits
        torch.testing.assert_close((await client.forward(input_ids=ids)).logits, expected)
    assert max(seen) == 16
