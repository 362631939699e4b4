"""What a command of a cluster ends when it fails, and what status shows, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra symbiosis-peft[ray]")

from ray.exceptions import RayError

from symbiosis.cluster import manage, running
from symbiosis.cluster.plan import ClusterPlan, ExecutorId, Model
from symbiosis.errors import UsageError


def test_an_executor_that_has_not_reported_for_a_while_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"state": "serving", "address": "tcp://a:1", "pid": 1, "node": "n", "error": ""}
    reports = {"llama/0/0": {**report, "age_s": 1.0}, "llama/0/1": {**report, "age_s": 11.0}}
    known = {"plan": ClusterPlan((Model("llama", ()),)), "reports": reports}
    monkeypatch.setattr(running, "asked", known.get)
    monkeypatch.setattr(running, "places", lambda: [ExecutorId("llama", 0, number) for number in range(3)])
    monkeypatch.setattr(running, "away", set)
    monkeypatch.setattr(running, "ray", SimpleNamespace(nodes=list))
    executors = running.status()["models"]["llama"]["executors"]
    assert [each["state"] for each in executors] == ["serving", "lost", "waiting"]


def test_a_command_ends_what_it_has_started_and_no_executor_of_another_command(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others = ExecutorId("llama", 0, 1), ExecutorId("llama", 0, 2)

    def group(bundles: Any, name: str, **_: Any) -> Any:
        if name == str(others):
            raise RayError("the name already exists")
        return SimpleNamespace(wait=lambda seconds: True)

    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: None))
    monkeypatch.setattr(manage, "ray", SimpleNamespace(remote=lambda kind: made))
    here = SimpleNamespace(asked=lambda *given: None, places=list, away=dict, directory=lambda: None)
    monkeypatch.setattr(manage, "running", here)
    monkeypatch.setattr(manage, "placement_group", group)
    monkeypatch.setattr(manage, "PlacementGroupSchedulingStrategy", lambda group, index: None)
    monkeypatch.setattr(manage, "_fitting", lambda model: ["node"])
    removed: list[ExecutorId] = []
    monkeypatch.setattr(manage.ClusterManager, "_remove", lambda self, places, drain: removed.extend(places))
    manager = object.__new__(manage.ClusterManager)
    with pytest.raises(UsageError, match="another command has just started llama/0/2"):
        manager._start(ClusterPlan((Model("llama", ()),)), [mine, others], 1.0)
    assert set(removed) == {mine}
