"""Tests of the activity in an executor's status, and of the counts behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis.core.requests import Batch, Key, Pass, Request, Slice
from symbiosis.core.scheduler import THINKING
from symbiosis.core.terms import Kind
from symbiosis.executor.activity import activity_of, layers_text
from symbiosis.executor.counters import Counters
from symbiosis.executor.service import ACTIVITY_EVERY_S
from tests.helpers import BATCH, IDS, adamw, lora

F0, F1 = Key((0,), Pass.FORWARD), Key((1,), Pass.FORWARD)


def run(counters: Counters, arrived: float, *clients: str, key: Key = F0) -> None:
    """Count a batch with a request of each client."""
    requests = [Request(number, client, key, 2, Kind.PREFILL, arrived) for number, client in enumerate(clients)]
    slices = [Slice(request, 0, 2) for request in requests]
    counters.count(Batch(key, slices, "told", 2 * len(slices)), requests, arrived, arrived + 1, beside=THINKING)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            [*(f"model.layers.{block}.{leaf}" for block in range(4) for leaf in "abcdefg"), "lm_head"],
            "7 layers in each of 4 blocks, and lm_head",
        ),
        (["h.0.a", "h.1.a"], "1 layer in each of 2 blocks"),
        (["h.0.a", "h.1.a", "h.1.b"], "1 to 2 layers in each of 2 blocks"),
        (["h.3.a", "h.3.b"], "2 layers in 1 block"),
        (
            ["encoder.block.0.q", "encoder.block.1.q", "decoder.block.0.q", "decoder.block.1.q"],
            "1 layer in each of 2 blocks of encoder.block, and 1 layer in each of 2 blocks of decoder.block",
        ),
        (["classifier"], "classifier"),
        (list("abcd"), "4 other layers"),
        ([], ""),
    ],
)
def test_names_of_layers_for_people(names: list[str], text: str) -> None:
    assert layers_text(names) == text


def test_equal_layers_of_all_blocks_count_together() -> None:
    counters = Counters()
    names = ["model.layers.0.mlp.up", "model.layers.1.mlp.up", "lm_head"]
    for key in (F0, F1, Key((2,), Pass.FORWARD), Key((0,), Pass.BACKWARD)):
        run(counters, 0.0, "alice", "bob", key=key)
    layers = activity_of(counters.snapshot(names, {}), [], {})["layers"]
    name = "model.layers.*.mlp.up"
    assert list(layers) == [f"{name} forward", f"{name} backward", "lm_head forward"]
    assert layers[f"{name} forward"] == {
        "blocks": 2,
        "requests": 4,
        "batches": 2,
        "members": 4,
        "rows": 8,
        "wait_s": 0.0,
    }


def test_requests_for_the_same_layers_that_just_missed_each_other() -> None:
    counters = Counters()
    run(counters, 1.0, "alice")
    run(counters, 1.004, "bob")  # 4 ms after alice's
    run(counters, 1.1, "bob")  # of the same client
    run(counters, 1.2, "alice", key=F1)  # for another layer
    run(counters, 1.3, "alice", "bob")  # shared
    run(counters, 1.4, "alice")  # the one before was shared
    run(counters, 99.0, "bob")  # not at work at once
    apart = activity_of(counters.snapshot(["a", "b"], {}), [], {})["apart"]
    assert {bound: count for bound, count in apart.items() if count} == {"5 ms": 1}
    assert counters.snapshot(["a", "b"], {}).clients["alice"].unshared == {THINKING: {"told": 3}}


def test_causes_are_bounded() -> None:
    counters = Counters()
    request = Request(0, "alice", F0, 2, Kind.PREFILL, 0.0)
    for number in range(200):
        counters.count(Batch(F0, [Slice(request, 0, 2)], f"reason {number}", 2), [request], 0.0, 1.0, THINKING)
    unshared = counters.snapshot(["a"], {}).tenants["alice"].unshared[THINKING]
    assert len(unshared) < 30
    assert sum(unshared.values()) == 200


async def test_two_tenants_that_train_at_once(base: Any) -> None:
    """Every request is either in a shared batch, or counted with the reason why it is not."""
    for policy, shares in (("lockstep", True), ("no-lockstep", False)):
        async with symbiosis.Executor(base, policy=policy) as executor:
            async with executor.client(lora(), name="alice/1") as alice, executor.client(lora(), name="bob") as bob:
                optimizers = adamw(alice.model), adamw(bob.model)
                for _ in range(2):
                    await asyncio.gather(alice.train_step(BATCH, optimizers[0]), bob.train_step(BATCH, optimizers[1]))
                await asyncio.sleep(ACTIVITY_EVERY_S)
                activity = executor.status()["activity"]
                tenants = activity["tenants"]
                assert tenants.keys() == {"alice", "bob"}
                for name, tenant in tenants.items():
                    alone = sum(sum(reasons.values()) for reasons in tenant["unshared"].values())
                    assert (alone < tenant["requests"] / 2) is shares, f"{policy}, {name}: {tenant}"
                    assert tenant["clients"] == 1
                    assert tenant["passes"].keys() == {"forward", "backward"}
                assert activity["members"] == executor.statistics().members
                assert shares or sum(activity["apart"].values())


async def test_memory_of_tenants_in_other_processes(base: Any, tmp_path: Path) -> None:
    address = f"shm://{tmp_path}/s.sock"
    async with symbiosis.Executor(base) as executor:
        await executor.listen(address)
        async with symbiosis.connect(address) as remote:
            async with remote.client(name="alice/1") as client, remote.client(name="alice/2"):
                await client.forward(input_ids=IDS)
                await asyncio.sleep(ACTIVITY_EVERY_S)
                alice = (await remote.status())["activity"]["tenants"]["alice"]
                held = executor.status()["held_bytes"]
                assert alice["clients"] == 2
                assert 0 < alice["held_bytes"] <= held
                assert sum(executor.service.budget.by_client().values()) == alice["held_bytes"]
