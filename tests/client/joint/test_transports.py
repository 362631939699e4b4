"""Joint walks of the tenants of another process, over a connection of their own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis import Client, Executor
from symbiosis.client.joint.attention import JointError
from symbiosis.client.joint.decoder import JointDecoder
from symbiosis.core.registry import make_transport
from symbiosis.errors import BusyError, ExecutorClosedError
from tests.client.joint.common import assert_equal, expected_of, generate, model_of, texts
from tests.helpers import lora, until


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_clients_of_one_process_are_walked_together_over_a_transport(transport: str, tmp_path: Path) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack:
        where = f"shm://{tmp_path}/joint.sock" if transport == "shm" else "tcp://127.0.0.1:0"
        listener = await executor.listen(where)
        served = await stack.enter_async_context(symbiosis.connect(listener.address))
        clients = [
            await stack.enter_async_context(served.client(lora(), name=f"tenant-{number}", seed=number))
            for number in range(3)
        ]
        patient = await stack.enter_async_context(served.client(lora(), name="patient", slo_ms=500, seed=3))
        for _ in range(3):
            outs = await asyncio.gather(*map(generate, [*clients, patient]))
        walks = served.walks()
        assert all(walks[client.name]["joint"] >= 10 for client in clients), walks
        assert walks["patient"].keys() == {"terms of its own"}
        assert len(executor.service.clients) == 5
    for number, out in enumerate(outs):
        assert_equal(out, expected_of(plain_base, number))


async def test_decoding_over_a_transport_never_counts_as_fine_tuning(tmp_path: Path) -> None:
    """A joint walk of more than 64 rows would; a client that comes last walks alone."""
    async with Executor(model_of("llama")) as executor, contextlib.AsyncExitStack() as stack:
        listener = await executor.listen(f"shm://{tmp_path}/joint.sock")
        served = await stack.enter_async_context(symbiosis.connect(listener.address))
        clients = [await stack.enter_async_context(served.client(name=str(number))) for number in range(3)]
        counts = (40, 24, 9)
        for _ in range(2):
            await asyncio.gather(
                *(generate(client, **texts(12, 0, count)) for client, count in zip(clients, counts, strict=True))
            )
        walks = served.walks()
        tokens = [client.tokens for client in executor.statistics().clients.values()]
    assert sum(count.get("a joint walk has up to 64 rows", 0) for count in walks.values()) >= 5, walks
    assert not any(kinds["finetune"] for kinds in tokens), tokens


async def test_a_connection_that_is_opened_again(tmp_path: Path) -> None:
    async with Executor(model_of("llama")) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/joint.sock")
        served = symbiosis.connect(listener.address)
        for turn in ("first", "again"):
            one, two = served.client(name=f"one-{turn}"), served.client(name=f"two-{turn}")
            async with served, one, two:
                for _ in range(3):
                    await asyncio.gather(generate(one), generate(two))
                assert served.walks()[one.name]["joint"] >= 10, served.walks()


async def test_a_base_whose_close_is_cancelled_leaves_the_executor(tmp_path: Path) -> None:
    async with Executor(model_of("llama")) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/joint.sock")
        served = await symbiosis.connect(listener.address).__aenter__()
        one, two = [await served.client(name=name).open() for name in ("one", "two")]
        while "joint" not in served.walks().get("one", {}):
            await asyncio.gather(generate(one), generate(two))
        closing = asyncio.create_task(served.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await until(lambda: not executor.service.clients)


@pytest.mark.parametrize("parts", [[None], ["0", "1,lm_head"]], ids=["whole", "in parts"])
async def test_joint_walks_go_on_after_an_outage(parts: list[str | None], tmp_path: Path) -> None:
    """Of a model in parts, the executor of the last part is lost."""
    base, where = model_of("llama"), [f"shm://{tmp_path}/{number}.sock" for number in range(len(parts))]
    plain_base = copy.deepcopy(base)
    served = symbiosis.connect(",".join(where), retry=0)

    async def serve(stack: contextlib.AsyncExitStack, part: str | None, address: str) -> None:
        executor = await stack.enter_async_context(Executor(copy.deepcopy(base), layers=part))
        await executor.listen(address)

    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        for part, address in zip(parts[:-1], where, strict=False):
            await serve(stack, part, address)
        for turn in ("before", "after"):
            async with contextlib.AsyncExitStack() as last:
                await serve(last, parts[-1], where[-1])
                if turn == "before":
                    await stack.enter_async_context(served)
                one, two = [served.client(lora(), name=f"{turn}-{seed}", seed=seed) for seed in (0, 1)]
                async with one, two:
                    while "joint" not in served.walks().get(one.name, {}):
                        outs = await asyncio.gather(generate(one), generate(two))
            for seed, out in enumerate(outs):
                assert_equal(out, expected_of(plain_base, seed))


class Fleeting:
    """A channel that ends before its ``left``-th call from now; None for never."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def send(self, call: Any) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.channel.close()
        return self.channel.send(call)


@pytest.mark.parametrize("when", ["between walks", "before a walk's first call", "in a walk"])
@pytest.mark.parametrize("again", ["at once", "with a further client"])
async def test_a_joint_channel_that_ends_is_opened_again(when: str, again: str) -> None:
    base = model_of("llama")
    plain_base = copy.deepcopy(base)
    channels: list[Fleeting] = []
    walks: Counter[str | None] = Counter()
    refused = again != "at once"

    async def join(name: str) -> Any:
        return await make_transport(executor.service.address).connect(executor.service.address, name)

    async def join_joint() -> Any:
        nonlocal refused
        if channels and refused:
            refused = False
            raise BusyError("the limit of clients is reached")
        channels.append(Fleeting(await join(f"joint-{len(channels)}")))
        return channels[-1]

    def client_of(number: int) -> Client:
        return Client(join, lora(), name=f"tenant-{number}", seed=number, joint=lambda: decoder)

    async def decode(clients: Sequence[Client]) -> Any:
        walks.clear()
        return await asyncio.gather(*map(generate, clients), return_exceptions=True)

    decoder = JointDecoder(join_joint, lambda name: True, lambda name, why: walks.update([why]), exact=False)
    async with Executor(base) as executor, contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        clients = [await stack.enter_async_context(client_of(number)) for number in range(3)]
        while None not in walks:
            await decode(clients)
        if when == "between walks":
            channels[0].close()
        else:
            channels[0].left = 5 if when == "in a walk" else 0
        outs = await decode(clients)
        if when.startswith("in"):
            assert all("was closed" in str(out) for out in outs), outs
        else:
            assert walks["the connection of joint walks has ended"] == len(clients), walks
            for seed, out in enumerate(outs):
                assert_equal(out, expected_of(plain_base, seed))
        if again != "at once":
            await decode(clients)
            outs = await decode(clients)
            assert walks.keys() == {"a joint walk failed: BusyError: the limit of clients is reached"}
            for seed, out in enumerate(outs):
                assert_equal(out, expected_of(plain_base, seed))
            clients.append(await stack.enter_async_context(client_of(3)))
        while None not in walks:
            outs = await decode(clients)
        assert len(channels) == 2
        for seed, out in enumerate(outs):
            assert_equal(out, expected_of(plain_base, seed))
        await decoder.close(ExecutorClosedError("it was shut down"))


async def test_a_model_that_cannot_be_walked_jointly_costs_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any) -> None:
        raise JointError("it is a test")

    monkeypatch.setattr("symbiosis.client.joint.model._check", refuse)
    async with Executor(model_of("llama")) as executor, contextlib.AsyncExitStack() as stack:
        listener = await executor.listen(f"shm://{tmp_path}/joint.sock")
        served = await stack.enter_async_context(symbiosis.connect(listener.address))
        for owner in (executor, served):
            clients = [await stack.enter_async_context(owner.client(lora())) for _ in range(2)]
            await asyncio.gather(*map(generate, clients))
            names = {client.name for client in clients}
            walks = served.walks() if owner is served else executor.statistics().clients
            assert all("it is a test" in str(walks[name]) for name in names), walks
            await until(lambda: not executor.service.walks_jointly)
            await until(lambda: not any(name.endswith("-joint") for name in executor.service.clients))
