"""Counts per layer and per client."""

from __future__ import annotations

from symbiosis.core.requests import Batch, Key, Pass, Request, Slice
from symbiosis.core.terms import Kind
from symbiosis.executor.statistics import Counters, LayerStatistics


def test_requests_for_one_bank_with_different_choices_are_added_up() -> None:
    counters = Counters()
    for id_, choices in enumerate([1, 2, 2]):
        request = Request(id_, "a", Key((0,), Pass.FORWARD, False, choices), 5, Kind.PREFILL, 0.0)
        counters.count(Batch(request.key, [Slice(request, 0, 5)], "full", 5), [request], 0.25, 0.5)
    statistics = counters.snapshot(["mlp.experts"], {})
    assert statistics.layers == {"mlp.experts forward": LayerStatistics(3, 3, 3, 15, 0.75)}
    assert statistics.requests == 3
