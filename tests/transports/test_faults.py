"""Jobs over bad connections: slow, cut, reordered, or corrupted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.core.registry import make_transport
from symbiosis.core.requests import Call, Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.errors import SymbiosisError, UsageError
from symbiosis.testing import Comparison, Job, run_job, run_job_plain
from symbiosis.testing.faults import Faults, FaultyProxy
from tests.helpers import IDS, lora
from tests.service import free_port

JOB = Job(steps=5, new_tokens=4)


@pytest.fixture(params=["shm", "tcp"])
def addresses(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Ports of the executor and of the proxy."""
    if request.param == "shm":
        return f"shm://{tmp_path}/executor.sock", f"shm://{tmp_path}/proxy.sock"
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(latency_s=0.001), id="slow", marks=pytest.mark.thorough),
        pytest.param(Faults(cut=0.02), id="cut", marks=pytest.mark.thorough),
        pytest.param(Faults(latency_s=0.0005, cut=0.01), id="both"),
    ],
)
@pytest.mark.parametrize("kind", ["coroutines", "synchronous"])
async def test_jobs_give_the_same_results(base: Any, addresses: tuple[str, str], faults: Faults, kind: str) -> None:
    expected = run_job_plain(base, lora(), JOB)
    async with symbiosis.Executor(base) as executor:
        await executor.listen(addresses[0])
        with FaultyProxy(*addresses, faults) as proxy:
            if kind == "coroutines":
                async with symbiosis.connect(proxy.address, retry=60.0) as remote:
                    client = await opened(lambda: remote.client(lora(), seed=0))
                    try:
                        outcome = await asyncio.wait_for(run_job(client, JOB), 90)
                    finally:
                        await client.close()
            else:
                outcome = await asyncio.wait_for(asyncio.to_thread(synchronous, proxy.address), 90)
            assert proxy.cuts > 0 or not faults.cut
    comparison = Comparison.of(outcome, expected)
    assert comparison.worst() < 1e-4, comparison
    assert comparison.worst("greedy") == comparison.worst("sampled") == 0


async def opened(make: Any) -> Any:
    for _ in range(50):
        try:
            return await make().open()
        except SymbiosisError:  # the connection is cut in the middle of its welcome
            await asyncio.sleep(0.05)
    raise AssertionError("no connection in 50 tries")


def synchronous(address: str) -> Any:
    torch.set_num_threads(1)
    for _ in range(50):
        try:
            with symbiosis.open_model(address, retry=60.0) as model:
                return run_job_plain(model, lora(), JOB)
        except SymbiosisError:
            continue
    raise AssertionError("no connection in 50 tries")


async def test_answers_out_of_order(base: Any, tmp_path: Path) -> None:
    addresses = f"shm://{tmp_path}/executor.sock", f"shm://{tmp_path}/proxy.sock"
    async with symbiosis.Executor(base, policy="no-lockstep") as executor:
        await executor.listen(addresses[0])
        with FaultyProxy(*addresses, Faults(reorder=True, spare=3)) as proxy:
            channel = await make_transport(addresses[1]).connect(addresses[1], "client")
            for turn in range(5):
                calls = [
                    Call(Key((0,), Pass.FORWARD), Kind.DECODE, (torch.full((1 + n % 3, 32), float(n + turn)),))
                    for n in range(20)
                ]
                replies = [channel.send(call) for call in calls]
                for call, reply in zip(calls, replies, strict=True):
                    (result,) = await asyncio.wait_for(reply, 20)
                    wanted = base.model.layers[0].self_attn.q_proj(call.tensors[0])
                    torch.testing.assert_close(result, wanted)
            channel.close()
        assert proxy.reordered


async def test_corruption_affects_no_other_client(base: Any, addresses: tuple[str, str]) -> None:
    """Flipped bits may cost a client its connection or its call; the executor and other clients are not affected."""
    expected, corrupted = base(input_ids=IDS).logits, 0
    async with symbiosis.Executor(base) as executor:
        await executor.listen(addresses[0])
        async with symbiosis.connect(addresses[0]) as remote, remote.client() as honest:
            for seed in range(10):
                with FaultyProxy(*addresses, Faults(corrupt=0.3, spare=2, seed=seed)) as proxy:

                    async def victim(address: str = proxy.address) -> None:
                        async with symbiosis.connect(address, retry=0.0) as remote, remote.client() as client:
                            for _ in range(3):
                                await client.forward(input_ids=IDS)

                    with contextlib.suppress(SymbiosisError, TimeoutError):
                        await asyncio.wait_for(victim(), 2)
                corrupted += proxy.corrupted
                torch.testing.assert_close((await honest.forward(input_ids=IDS)).logits, expected)
                addresses = addresses[0], other(addresses[1])
    assert corrupted > 0


def other(address: str) -> str:
    return address if address.startswith("shm") else f"tcp://127.0.0.1:{free_port()}"


def test_a_proxy_refuses_unknown_transports(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="different kinds"):
        FaultyProxy(f"shm://{tmp_path}/a", "tcp://127.0.0.1:1", Faults())
    with pytest.raises(UsageError, match="knows shm"):
        FaultyProxy("inproc://x", "inproc://y", Faults())


def test_a_proxy_without_an_address_closes_its_socket() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        proxy = FaultyProxy(address, address, Faults())
        with pytest.raises(OSError, match="in use"):
            proxy.__enter__()
    assert proxy._listening.fileno() == -1
