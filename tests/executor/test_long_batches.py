"""Batches that take long run beside the event loop, where other processes are served."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.core.requests import Batch, Call, Key, Pass, Request, Slice
from symbiosis.core.terms import Kind
from symbiosis.errors import ExecutorClosedError, LayerError, SymbiosisError, UsageError
from symbiosis.executor import aside
from symbiosis.executor.layers import BaseLayer, base_layer
from symbiosis.executor.pace import Pace
from symbiosis.executor.runner import Runner
from tests.helpers import BATCH, IDS, LOGITS, adamw, lora, until


class Gate:
    """Holds up batches of one layer until it is opened."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self.threads: list[int] = []
        self.error: BaseException | None = None

    def run(self, layer: BaseLayer, key: Key, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self.threads.append(threading.get_ident())
        self.entered.set()
        assert self.opened.wait(30), "the event loop did nothing while the batch ran"
        if self.error is not None:
            raise self.error
        return type(layer).run(layer, key, tensors)


def hold(executor: Any, monkeypatch: pytest.MonkeyPatch, layer: int = 0) -> Gate:
    gate, held = Gate(), executor.engine.layers[layer]
    monkeypatch.setattr(held, "run", lambda key, tensors: gate.run(held, key, tensors))
    return gate


@pytest.fixture(autouse=True)
def all_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "LONG_S", 0.0)


@contextlib.asynccontextmanager
async def serving(base: Any, folder: Path, transport: str = "shm", **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Yield an executor, and a connection to it as from another process."""
    async with symbiosis.Executor(base, **options) as executor:
        address = f"shm://{folder}/s.sock" if transport == "shm" else f"{transport}://127.0.0.1:0"
        listener = await executor.listen(address, **({"insecure": True} if transport == "dist" else {}))
        async with symbiosis.connect(listener.address) as remote:
            yield executor, remote


@pytest.mark.parametrize("max_rows", [8192, 3])
@pytest.mark.parametrize("transport", ["shm", "tcp", "dist"])
async def test_results_and_training_are_those_of_plain_peft(
    base: Any, tmp_path: Path, transport: str, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import get_peft_model

    plain: Any = copy.deepcopy(base)
    torch.manual_seed(0)
    plain = get_peft_model(plain, lora(lora_dropout=0.0))
    threads: set[int] = set()
    async with serving(base, tmp_path, transport, max_rows=max_rows) as (executor, remote):
        first = executor.engine.layers[0]
        run = first.run

        def noted(*arguments: Any) -> Any:
            threads.add(threading.get_ident())
            return run(*arguments)

        monkeypatch.setattr(first, "run", noted)
        async with remote.client(lora(lora_dropout=0.0), seed=0) as one, remote.client(lora(), seed=1) as other:
            optimizers = adamw(one.model), adamw(plain)
            for _ in range(3):
                await asyncio.gather(one.train_step(BATCH, optimizers[0]), other.forward(input_ids=IDS))
                plain.train()(**BATCH).loss.backward()
                optimizers[1].step()
                optimizers[1].zero_grad()
            got, expected = (await one.forward(input_ids=IDS)).logits, plain.eval()(input_ids=IDS).logits
            assert (got - expected).abs().max() <= 10 * LOGITS * expected.abs().max()
    assert threads - {threading.get_ident()}, "no batch ran beside the event loop"


async def test_the_event_loop_goes_on_and_one_batch_runs_at_a_time(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(base, tmp_path) as (executor, remote), remote.client() as one, remote.client() as other:
        gate = hold(executor, monkeypatch)
        first = asyncio.ensure_future(one.forward(input_ids=IDS))
        await until(gate.entered.is_set)
        second = asyncio.ensure_future(other.forward(input_ids=IDS))
        await until(lambda: executor.status()["outstanding"] == 2)
        before = executor.statistics().batches
        await asyncio.sleep(0.05)
        assert executor.statistics().batches == before
        assert not second.done()
        gate.opened.set()
        results = await asyncio.gather(first, second)
        torch.testing.assert_close(results[0].logits, results[1].logits)
        assert threading.get_ident() not in gate.threads


async def test_clients_of_this_process_alone_keep_batches_on_the_event_loop(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        gate = hold(executor, monkeypatch)
        gate.opened.set()
        await client.forward(input_ids=IDS)
        assert set(gate.threads) == {threading.get_ident()}


async def test_a_second_address_of_this_process_changes_nothing(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with symbiosis.Executor(base) as executor:
        await executor.listen("inproc://second-address")
        async with executor.client() as client:
            gate = hold(executor, monkeypatch)
            gate.opened.set()
            await client.forward(input_ids=IDS)
            assert set(gate.threads) == {threading.get_ident()}


async def test_a_short_call_waits_for_a_batch_whose_client_has_left(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(base, tmp_path) as (executor, remote), remote.client() as one, remote.client() as other:
        gate = hold(executor, monkeypatch)
        first = asyncio.ensure_future(one.forward(input_ids=IDS))
        await until(gate.entered.is_set)
        first.cancel()
        await until(lambda: executor.status()["outstanding"] == 0)
        monkeypatch.setattr(aside, "LONG_S", math.inf)
        second = asyncio.ensure_future(other.forward(input_ids=IDS))
        await until(lambda: executor.status()["outstanding"] == 1)
        assert len(gate.threads) == 1
        gate.opened.set()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first


@pytest.mark.parametrize("how", ["cancelled", "gone"])
async def test_memory_of_a_batch_counts_until_it_has_ended(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with serving(base, tmp_path) as (executor, remote):
        async with remote.client() as client:
            held = executor.status()["held_bytes"]
            gate = hold(executor, monkeypatch)
            task = asyncio.ensure_future(client.forward(input_ids=torch.ones(64, 64, dtype=torch.long)))  # 2 MiB
            await until(gate.entered.is_set)
            busy = executor.status()["held_bytes"]
            assert busy > held
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if how == "cancelled":
                await until(lambda: executor.status()["outstanding"] == 0)
                assert executor.status()["held_bytes"] == busy
                gate.opened.set()
                await until(lambda: executor.status()["held_bytes"] < busy)
                await client.forward(input_ids=IDS)
        if how == "gone":
            await until(lambda: not executor.status()["clients"])
            await asyncio.sleep(0.05)
            assert executor.status()["held_bytes"] >= busy - held
            gate.opened.set()
        await until(lambda: executor.status()["held_bytes"] < held)


@pytest.mark.parametrize("error", [RuntimeError, StopIteration, KeyboardInterrupt])
async def test_an_error_of_a_layer_reaches_the_client_and_the_next_batch_runs(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    async with serving(base, tmp_path) as (executor, remote), remote.client() as client:
        gate = hold(executor, monkeypatch)
        gate.opened.set()
        gate.error = error("a broken layer")
        with pytest.raises(LayerError, match="a broken layer"):
            await client.forward(input_ids=IDS)
        gate.error = None
        await client.forward(input_ids=IDS)


async def test_an_executor_that_closes_waits_for_the_batch_under_way(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s.sock")
        async with symbiosis.connect(listener.address, retry=0) as remote:
            client = await remote.client().open()
            gate = hold(executor, monkeypatch)
            task = asyncio.ensure_future(client.forward(input_ids=IDS))
            await until(gate.entered.is_set)
            asyncio.get_running_loop().call_later(0.1, gate.opened.set)
            await executor.close()
            assert gate.opened.is_set()
            with pytest.raises(SymbiosisError):
                await task
            await client.close()


async def test_an_executor_whose_close_was_cancelled_is_closed(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen(f"shm://{tmp_path}/s.sock")
        async with symbiosis.connect(listener.address, retry=0) as remote:
            client = await remote.client().open()
            gate = hold(executor, monkeypatch)
            task = asyncio.ensure_future(client.forward(input_ids=IDS))
            await until(gate.entered.is_set)
            closing = asyncio.ensure_future(executor.close())
            await asyncio.sleep(0.05)
            closing.cancel()
            with pytest.raises(UsageError):
                await executor.listen(f"shm://{tmp_path}/other.sock")
            with pytest.raises(ExecutorClosedError):
                await executor.client().open()
            gate.opened.set()
            with pytest.raises(SymbiosisError):
                await task
            await client.close()
        with pytest.raises(asyncio.CancelledError):
            await closing


def test_a_pace_recovers_from_a_machine_that_stood_still() -> None:
    pace = Pace([base_layer(0, "a", torch.nn.Linear(100, 10))])
    key = Key((0,), Pass.FORWARD)
    for _ in range(100):
        pace.learn(key, 1000, 0.1)
    pace.learn(key, 1000, 1000.0)
    assert pace.expects(key, 1000) == pytest.approx(0.175)
    pace.learn(key, 10, 0.0012)  # no more than 0.12 s for 1000
    assert pace.expects(key, 1000) == pytest.approx(0.12)


def test_a_pace_is_learned_from_batches_of_many_rows() -> None:
    pace = Pace([base_layer(0, "a", torch.nn.Linear(100, 10)), base_layer(1, "b", torch.nn.Linear(100, 30))])
    both = Key((0, 1), Pass.FORWARD)
    for _ in range(100):
        pace.learn(both, 1000, 2.0)
        pace.learn(Key((0,), Pass.FORWARD), 1, 7.0)
    assert pace.expects(both, 500) == pytest.approx(1.0)
    assert pace.expects(Key((1,), Pass.BACKWARD), 1000) == pytest.approx(1.5, rel=0.01)


def test_a_pace_learns_nothing_from_calls_for_norms() -> None:
    """The executor copies norms that it has. If that counted as products, long batches would stop the event loop."""
    pace = Pace([base_layer(0, "a", torch.nn.Linear(100, 10))])
    norms, forward = Key((0,), Pass.NORMS), Key((0,), Pass.FORWARD)
    for _ in range(100):
        pace.learn(forward, 1000, 1.0)
        pace.learn(norms, 1, 1e-6)
        pace.learn(norms, 1000, 1e-6)
    assert pace.expects(forward, 1000) == pytest.approx(1.0)
    assert pace.expects(norms, 1) == pytest.approx(0.032), "the first one reads all weights"


@pytest.mark.parametrize("cuts", [[(0, 5)], [(0, 2), (2, 5)]])
@pytest.mark.parametrize("others", [0, 1])
def test_results_go_where_the_caller_has_memory_for_them(cuts: list[tuple[int, int]], others: int) -> None:
    linear = torch.nn.Linear(4, 3)
    runner, key = Runner([base_layer(0, "a", linear)]), Key((0,), Pass.FORWARD)
    x, place = torch.randn(5, 4), torch.zeros(5, 3)
    call = Call(key, Kind.DECODE, (x,), answers=(place,))
    request = Request(0, "one", key, 5, Kind.DECODE, 0.0)
    for start, stop in cuts:
        slices, calls = [Slice(request, start, stop)], [call]
        for number in range(others):
            calls.append(Call(key, Kind.DECODE, (x[:2],)))
            slices.append(Slice(Request(number + 1, "other", key, 2, Kind.DECODE, 0.0), 0, 2))
        runner.run(Batch(key, slices, "full", stop - start + 2 * others), calls)
        for other in calls[1:]:
            assert other.results is not None
            torch.testing.assert_close(other.results[0], linear(x[:2]).detach())
    assert call.results is not None
    assert call.results[0] is place
    torch.testing.assert_close(place, linear(x).detach())


async def test_a_thread_waits_while_a_gpu_has_too_much_to_compute(base: Any) -> None:
    """Requests that skip the queue would keep a token of another client waiting until the GPU has run them all."""
    async with symbiosis.Executor(base) as executor, executor.client(name="alice"):
        engine = executor.engine
        key, tensors = engine.layers[0].sample()
        call = Call(key, Kind.FINETUNE, tensors)
        engine.device_clock = SimpleNamespace(ahead_s=1.0, done=lambda: ())  # type: ignore[assignment]
        assert engine.at_once("alice", call, Kind.FINETUNE) is None
        engine.device_clock = None
        assert engine.at_once("alice", call, Kind.FINETUNE) is not None
