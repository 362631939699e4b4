"""Counts per layer and per client."""

from __future__ import annotations

import pytest

from symbiosis import Executor
from symbiosis.core.requests import Batch, Key, Pass, Request, Slice
from symbiosis.core.terms import Kind
from symbiosis.executor.counters import Counters
from symbiosis.executor.statistics import LayerStatistics
from symbiosis.testing import tiny_model
from tests.helpers import IDS, lora


def test_requests_for_one_bank_with_different_choices_are_added_up() -> None:
    counters = Counters()
    for id_, choices in enumerate([1, 2, 2]):
        request = Request(id_, "a", Key((0,), Pass.FORWARD, False, choices), 5, Kind.PREFILL, 0.0)
        counters.count(Batch(request.key, [Slice(request, 0, 5)], "full", 5), [request], 0.25, 0.5)
    statistics = counters.snapshot(["mlp.experts"], {})
    assert statistics.layers == {"mlp.experts forward": LayerStatistics(3, 3, 3, 15, 0.75)}
    assert statistics.requests == 3


def test_a_busy_client_keeps_its_counts_beside_many_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.executor.counters.MAX_CLIENTS", 3)
    counters = Counters()
    for number in range(10):
        for client in ("alice/job", f"c{number}"):
            request = Request(number, client, Key((0,), Pass.FORWARD), 1, Kind.PREFILL, 0.0)
            counters.count(Batch(request.key, [Slice(request, 0, 1)], "full", 1), [request], 0.25, 0.5)
    found = counters.snapshot(["layer"], {}).clients
    assert {name: client.requests for name, client in found.items()} == {"c8": 1, "alice/job": 10, "c9": 1}


def test_tenants_that_work_now_have_counts_of_their_own_beside_those_that_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("symbiosis.executor.counters.MAX_CLIENTS", 3)
    monkeypatch.setattr("symbiosis.executor.counters.MAX_LEFT", 2)
    counters = Counters()
    for number in range(10):
        request = Request(number, f"t{number}", Key((0,), Pass.FORWARD), 1, Kind.PREFILL, 0.0)
        counters.count(Batch(request.key, [Slice(request, 0, 1)], "full", 1), [request], 0.25, 0.5)
    found = {name: tenant.requests for name, tenant in counters.snapshot(["layer"], {}).tenants.items()}
    assert found == {"t0": 1, "t1": 1, "other": 5, "t7": 1, "t8": 1, "t9": 1}


async def test_counting_from_zero_keeps_the_load() -> None:
    """Tenants choose replicas by it."""
    async with Executor(tiny_model()) as executor:
        load = executor.engine.counters.load
        executor.reset_statistics()
        assert executor.engine.counters.load is load


@pytest.mark.parametrize("bias", ["none", "all"])
async def test_rows_count_as_tokens_whosever_the_biases_are(bias: str) -> None:
    async with Executor(tiny_model("gpt2")) as executor, executor.client(lora("gpt2", bias=bias), name="a") as client:
        executor.reset_statistics()
        await client.forward(input_ids=IDS)
        tokens = executor.statistics().clients["a"].tokens
    assert sum(tokens.values()) == pytest.approx(IDS.numel())
