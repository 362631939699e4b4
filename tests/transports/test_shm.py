"""Tests of ``shm://``: tenants in other processes, or in this process over the same socket."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import socket
import stat
import threading
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from peft import LoraConfig, get_peft_model

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Columns, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import (
    ClientClosedError,
    PlaceholderError,
    UsageError,
)
from symbiosis.testing import Comparison, run_job, run_job_plain, tiny_model
from symbiosis.transports import connection, wire
from symbiosis.transports.arena import Arena, Places
from symbiosis.transports.peer import Peer
from symbiosis.transports.stream import frame
from symbiosis.transports.stream_line import READ_AT_ONCE
from symbiosis.transports.wire import Type
from tests.helpers import (
    BATCH,
    IDS,
    adamw,
    in_thread,
    lora,
    open_descriptors,
    until,
)

T = TypeVar("T")


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"shm://{tmp_path}/s.sock"


async def test_more_messages_than_a_socket_holds(base: Any, address: str) -> None:
    """A client may send while the executor reads nothing, as in a long batch. Its messages wait, and none is lost."""
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        channel = await make_transport(address, retry=0.0).connect(address, "alice")
        for _ in range(1000):  # the event loop, on which the executor reads, does not run meanwhile
            channel.begin_walk()
            channel.end_walk()
        spec = channel.layers[0]
        rows = torch.randn(2, spec.in_features)
        (result,) = await channel.send(Call(Key((0,), Pass.FORWARD), Kind.DECODE, (rows,)))
        assert result.shape == (2, spec.out_features)
        assert executor.status()["clients"] == ["alice"]
        channel.close()


async def test_a_flood_is_read_in_parts(base: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read may return tens of thousands of messages. The executor handles a few of them before other tasks run."""
    order: list[str] = []
    rounds: Counter[int] = Counter()
    count = itertools.count()
    now = 0
    received = Peer.received

    def noted(self: Any, data: Any, frames: Any = ()) -> None:
        order.append(self.session.client if self.session else "?")
        rounds[now] += 1
        received(self, data, frames)

    def goes_round() -> None:
        nonlocal now
        now = next(count)
        asyncio.get_running_loop().call_soon(goes_round)

    goes_round()

    monkeypatch.setattr(Peer, "received", noted)
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as remote, remote.client(name="alice") as alice:
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as flood:
                flood.connect(address.removeprefix("shm://"))
                flood.sendall(frame(wire.pack_hello(wire.Hello("flood"))))
                await until(lambda: "flood" in executor.status()["clients"])
                stop = threading.Event()
                pings = frame(wire.pack(Type.BEGIN)) * 50_000

                def send() -> None:
                    with contextlib.suppress(OSError):
                        while not stop.is_set():
                            flood.sendall(pings)

                thread = threading.Thread(target=send)
                thread.start()
                await until(lambda: order.count("flood") > 1000)
                order.clear()
                for _ in range(3):
                    await alice.forward(input_ids=IDS)
                stop.set()
                flood.shutdown(socket.SHUT_RDWR)
                await in_thread(thread.join)
    assert order.count("alice") > 30
    assert order.count("flood") > 100
    assert max(rounds.values()) <= 2 * READ_AT_ONCE


async def test_threads_open_models_at_once(base: Any, address: str) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)

        def tenant() -> Any:
            with symbiosis.open_model(address) as model:
                return model(input_ids=IDS).logits.detach()

        results = await asyncio.gather(*(in_thread(tenant) for _ in range(6)))
        assert all(torch.equal(result, results[0]) for result in results)
        assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


async def test_copies_of_a_model_share_its_connection(base: Any, address: str) -> None:
    expected = base(input_ids=IDS).logits

    def tenant() -> tuple[torch.Tensor, torch.Tensor]:
        with symbiosis.open_model(address) as model, torch.no_grad():
            copied = copy.deepcopy(model)
            return model(input_ids=IDS).logits, copied(input_ids=IDS).logits

    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        one, two = await in_thread(tenant)
    assert torch.equal(one, expected)
    assert torch.equal(two, expected)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
async def test_tied_embeddings_are_part_of_the_clients_share(address: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, modules_to_save=["embed_tokens"])
    expected = run_job_plain(model, copy.deepcopy(config))
    async with symbiosis.Executor(model) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as base, base.client(config, seed=0) as client:
            comparison = Comparison.of(await run_job(client), expected)
    assert comparison.bit_equal, comparison


async def test_writes_of_a_tenant_stay_its_own(base: Any, address: str) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as remote, remote.client() as one, remote.client() as two:
            one.model.model.norm.weight.mul_(2)
            assert torch.equal(two.model.model.norm.weight, base.model.norm.weight)


async def test_base_weights_are_not_sent(base: Any, address: str) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as remote, remote.client() as client:
            weight = client.model.model.layers[0].self_attn.q_proj.weight
            assert weight.isnan().all()
            with pytest.raises(PlaceholderError, match="which is possible unless the weight is quantized"):
                weight.requires_grad_(True)
            held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in client.model.parameters()}
            shared = sum(tensor.nbytes for tensor in executor.service.share().tensors.values())
            assert sum(held.values()) <= shared + 16 * len(executor.layers)


# Lifecycle


async def test_the_socket_belongs_to_its_owner_and_is_removed_by_the_executor(
    base: Any, address: str, tmp_path: Path
) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        path = tmp_path / "s.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(UsageError, match="another executor listens there; stop it"):
            await executor.listen(address)
    assert not path.exists()


async def test_only_the_socket_of_a_killed_executor_is_replaced(base: Any, tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "s.sock"))
    stale.close()
    (tmp_path / "file").write_text("precious")
    async with symbiosis.Executor(base) as executor:
        await executor.listen(f"shm://{tmp_path}/s.sock")
        (tmp_path / "link.sock").symlink_to(tmp_path / "nowhere")
        with pytest.raises(UsageError, match="link to a file that does not exist"):
            await executor.listen(f"shm://{tmp_path}/link.sock")
        with pytest.raises(UsageError, match="is no socket"):
            await executor.listen(f"shm://{tmp_path}/file")
        with pytest.raises(UsageError, match="No such file"):
            await executor.listen(f"shm://{tmp_path}/nowhere/s.sock")
        with pytest.raises(UsageError, match="shm:///absolute"):
            await executor.listen("shm://relative.sock")
        with pytest.raises(UsageError, match="107 bytes"):
            await executor.listen(f"shm:///{'x' * 120}")
        with pytest.raises(UsageError, match="no option colour"):
            await executor.listen(f"shm://{tmp_path}/t.sock", colour="red")
    assert (tmp_path / "file").read_text() == "precious"


async def test_no_descriptor_is_left_open(base: Any, address: str) -> None:
    async def once() -> None:
        async with symbiosis.Executor(base) as executor:
            await executor.listen(address)
            async with symbiosis.connect(address) as remote, remote.client(lora()) as client:
                await client.train_step(BATCH, adamw(client.model))

    await once()
    before = open_descriptors()
    for _ in range(3):
        await once()
    assert open_descriptors() <= before


async def test_status_and_tokenizer(base: Any, address: str) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as remote:
            async with remote.client(name="alice"):
                status = await remote.status()
                assert status["clients"] == ["alice"]
                assert status["model"] == "LlamaForCausalLM"
            assert remote.config["hidden_size"] == 32
            with pytest.raises(UsageError, match="no tokenizer"):
                remote.tokenizer()


async def test_a_forked_child_gets_an_error_that_the_model_is_its_parents(base: Any, address: str) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)

        def tenant() -> tuple[int, bool]:
            with symbiosis.open_model(address) as model, torch.no_grad():
                expected = model(input_ids=IDS).logits
                child = os.fork()
                if child == 0:
                    try:
                        model(input_ids=IDS)
                    except ClientClosedError as error:
                        os._exit(7 if "process that opened it" in str(error) else 8)
                    os._exit(9)
                _, code = os.waitpid(child, 0)
                return os.waitstatus_to_exitcode(code), torch.equal(model(input_ids=IDS).logits, expected)

        assert await in_thread(tenant) == (7, True)


@pytest.mark.parametrize("on_thread", [False, True])
async def test_a_forked_child_cannot_use_its_parents_client(base: Any, address: str, on_thread: bool) -> None:
    """Its calls would have the places, the ids and the masks that the parent's next calls have."""

    def in_a_child(client: symbiosis.Client) -> int:
        child = os.fork()
        if child == 0:
            code = 9
            try:
                if on_thread:  # which would wait for the parent's event loop
                    client.model(input_ids=IDS)
                else:
                    asyncio.run(client.forward(input_ids=IDS))
            except ClientClosedError as error:
                code = 7 if "process that opened it" in str(error) else 8
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    async def tenant() -> tuple[int, bool]:
        async with symbiosis.connect(address) as remote, remote.client() as client:
            expected = (await client.forward(input_ids=IDS)).logits
            code = await asyncio.to_thread(in_a_child, client) if on_thread else in_a_child(client)
            again = (await client.forward(input_ids=IDS)).logits
            return code, torch.equal(again, expected)

    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        assert await in_thread(lambda: asyncio.run(tenant())) == (7, True)


# Restarts


async def test_coroutines_survive_a_lack_of_threads(base: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the client cannot start a thread to join again, it tries again later."""
    failures = 0

    async def joined(*arguments: Any) -> Any:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise RuntimeError("can't start new thread")
        return await connection.joined(*arguments)

    executors = [symbiosis.Executor(copy.deepcopy(base)) for _ in range(2)]
    await executors[0].start()
    await executors[0].listen(address)
    async with symbiosis.connect(address, retry=30.0) as remote, remote.client(seed=0) as client:
        expected = (await client.forward(input_ids=IDS)).logits
        monkeypatch.setattr("symbiosis.transports.channel.joined", joined)
        await executors[0].close()
        await executors[1].start()
        await executors[1].listen(address)
        output = await asyncio.wait_for(client.forward(input_ids=IDS), 30)
        assert failures == 2
        assert torch.equal(output.logits, expected)
    await executors[1].close()


# Arena


def test_an_arena_cannot_be_truncated() -> None:
    arena, descriptor = Arena.create(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1 << 21)
    (matrix,) = arena.matrices(64, 2, (Columns(3, torch.float32),))
    matrix.fill_(7)
    assert Arena(descriptor, 1 << 20).matrices(64, 2, (Columns(3, torch.float32),))[0].eq(7).all()
    os.close(descriptor)


def test_places_are_taken_once_and_merged_after_use() -> None:
    places = Places(1 << 13, 3 << 12)
    taken = [places.take(100) for _ in range(32)]
    assert len(set(taken)) == 32
    assert places.take(1) is None
    for place in taken[::2] + taken[1::2]:
        places.give_back(place, 100)
    assert places.unused
    assert places.take(1 << 12) == 1 << 13


def test_peft_on_an_opened_model(base: Any, address: str) -> None:
    """The test uses the public API only, with a server of the user's own on another thread."""
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with symbiosis.Executor(copy.deepcopy(base)) as executor:
            await executor.listen(address)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        with symbiosis.open_model(address) as model:
            tuned = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
            loss = tuned(**BATCH).loss
            loss.backward()
            assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)
    finally:
        done.set()
        thread.join(20)


async def test_a_burst_of_clients_while_the_executor_is_busy(base: Any, address: str) -> None:
    """All of the clients wait in the kernel's queue until the executor accepts them."""
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        burst = [socket.socket(socket.AF_UNIX) for _ in range(300)]
        for client in burst:  # the event loop, which would accept them, does not run meanwhile
            client.settimeout(1.0)
            client.connect(address.removeprefix("shm://"))
        burst[-1].sendall(frame(wire.pack_hello(wire.Hello("last"))))
        await until(lambda: executor.status()["clients"] == ["last"])
        for client in burst:
            client.close()
