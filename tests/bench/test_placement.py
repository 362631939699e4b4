"""``symbiosis bench placement``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from symbiosis.bench.models import PRESETS
from symbiosis.bench.placed import MachineCosts, Spent, WorkCosts, _Back, _There
from symbiosis.bench.placement import Figures, JobsInTurn
from symbiosis.bench.recorder import Curve
from symbiosis.bench.settings import Settings
from symbiosis.core.requests import Key, Pass
from symbiosis.core.terms import Kind
from symbiosis.policies import Opportunistic
from symbiosis.simulation import Cost
from symbiosis.simulation.clock import Clock, Cores, Thread
from symbiosis.simulation.executor import SimulatedExecutor
from symbiosis.simulation.simulation import Ask, Cluster, Hop, InWalk, Route, SimulatedClient
from tests.helpers import command

KEY = Key((0,), Pass.FORWARD)


def test_costs_add_up_to_the_processor_times() -> None:
    """Ten requests alone, and forty of four tenants in batches of four, where each batch takes 1.5 times as long."""
    curve = Curve([(1, 1.0), (4, 2.0)])
    alone = Spent(30.0, [(KEY, 1, 1.0)] * 10, 10, batches_s=20.0, executor_s=25.0, tenants_s=10.0)
    together = Spent(60.0, [(KEY, 4, 9.0)] * 10, 40, batches_s=60.0, executor_s=71.0, tenants_s=80.0)
    costs = WorkCosts.of(alone, together, {KEY: curve})
    assert (costs.threads, costs.slower, costs.tenant_s) == pytest.approx((2.0, 1.5, 2.0))
    assert costs.request_s == pytest.approx(0.2)  # 11 s = 10 batches of 0.3 s, and 40 requests
    assert costs.batch_s == pytest.approx(0.3)
    assert costs.together_s == 60.0
    assert costs.wait_s == pytest.approx(0.5)  # 30 s less 10 s of batches, 5 s besides, and 10 s of the tenant


def test_simulated_work_ends_with_the_tenants() -> None:
    """A limit of a wait that is over, one second after it began, does not count."""
    costs = WorkCosts(1e-4, 1e-5, 1e-5, 0.0, 1.0, 1.0, together_s=1.0)
    machine = MachineCosts([KEY], [], {KEY: Curve([(1, 1e-3), (2, 1e-3)])}, costs, costs, [0])
    settings = Settings(PRESETS["tiny"], torch.device("cpu"), "lockstep", "linear", 1, print)
    assert machine._run(settings, [range(PRESETS["tiny"].layers)], [[0], [0]], costs) < 0.5


def test_costs_of_one_tenant() -> None:
    """Batches of one request do not tell what of the executor's work is for the batch."""
    alone = Spent(30.0, [(KEY, 1, 1.0)] * 10, 10, batches_s=10.0, executor_s=15.0, tenants_s=20.0)
    costs = WorkCosts.of(alone, alone, {KEY: Curve([(1, 1.0)])})
    assert costs == WorkCosts(2.0, 0.25, 0.25, 0.0, 1.0, 1.0, 30.0)


async def test_bytes_of_tensor_parallelism_are_those_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    peer: Any = Peer()
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: {"lo": SimpleNamespace(bytes_sent=peer.sent)})
    settings = Settings(PRESETS["tiny"], torch.device("cpu"), "", "linear", 1, lambda _: None)
    steps = 3 * settings.preset.train_steps
    assert await JobsInTurn(peer, 3).measure(settings) == Figures(decode_s=6.0, train_s=5.0 * steps, bytes=30)


class Peer:
    """A job that sends 1,000 bytes for a prompt and 10 for the tokens after it."""

    sent = 0

    async def prefill(self) -> None:
        self.sent += 1000

    async def steps(self) -> float:
        self.sent += 10
        return 2.0

    async def train(self) -> float:
        self.sent += 100
        return 5.0


@pytest.mark.thorough
@pytest.mark.timeout(400)  # it starts seven processes of executors, and several tenants
def test_command(tmp_path: Path) -> None:
    result = command(
        *("bench", "placement", "--preset", "tiny", "--rounds", "1", "--tenants", "1"),
        *("--json", str(tmp_path / "found.json")),
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["placement"] for row in found["rows"]] == [
        "one executor",
        "a half of the layers on each of 2",
        "2 replicas",
        "2 replicas, half of the tenants on each",
        "2 shards",
        "tensor parallelism of transformers",
    ]
    assert all(row["decoded tok/s"] > 0 and row["bytes a token"] > 1000 for row in found["rows"])
    assert [row["MiB of each executor"].count("+") for row in found["rows"]] == [0, 1, 1, 1, 1, 1]
    names = [row["placement"] for row in found["rows"]]
    assert set(found["headline"]) == {
        *(f"{figure}: {name}" for name in names[1:] for figure in ("decode", "train")),
        *(f"{figure}: 2 shards / tensor parallelism" for figure in ("decode", "train")),
        *(f"{figure}, simulated / measured: {name}" for name in (names[1], names[3]) for figure in ("decode", "train")),
    }
    assert all(0.2 < ratio < 5 for ratio in found["headline"].values()), "with one tenant all placements are alike"


def test_answers_leave_before_the_next_batch() -> None:
    """The client whose answer is under way computes while the next batch runs, and shares the one after it."""
    clock = Clock()
    thread = Thread(Cores(clock, 2))
    executor = SimulatedExecutor(clock, Opportunistic(), layers=2, cost=Cost(1e-3, 1e-5).of, thread=thread)
    cluster = Cluster(clock)
    route = Route([Hop(executor, *(each(clock, thread, 1e-4, 1e-5) for each in (_There, _Back)))])
    ends = {}

    def calls(name: str, layers: int) -> SimulatedClient:
        yield InWalk(True)
        for layer in range(layers):
            ends[name, layer] = yield Ask(Key((layer,), Pass.FORWARD), 1, Kind.DECODE)

    cluster.add("a", calls("a", 1), route=route)
    cluster.add("b", calls("b", 2), at=5e-4, route=route)
    cluster.run()
    batch = 1e-3 + 1e-5
    ended = 1e-4 + 1e-5 + batch
    assert ends["a", 0] == pytest.approx(ended + 2e-5 + 1e-4), "b's call has come before a's answer"
    assert ends["b", 0] == pytest.approx(ended + 2e-5 + batch + 1e-5 + 1e-4)
