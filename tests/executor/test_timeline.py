"""Tests of traces, which record when batches and clients ran."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import symbiosis
from symbiosis.core.requests import Batch, Key, Pass, Request, Slice
from symbiosis.core.terms import JOINT, Kind
from symbiosis.errors import UsageError
from symbiosis.executor import timeline as timelines
from symbiosis.executor.timeline import Timeline
from tests.helpers import BATCH, IDS, adamw, lora


def lines(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return events by the name of their line."""
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event.get("ph") == "X":
            found[names[event["tid"]]].append(event)
    return found


async def test_batches_and_clients(base: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    async with symbiosis.Executor(base, max_rows=8) as executor:
        async with executor.client(lora(), name="alice") as alice, executor.client(name="bob") as bob:
            executor.reset_statistics()
            with executor.trace(file):
                await asyncio.gather(alice.train_step(BATCH, adamw(alice.model)), bob.forward(input_ids=IDS))
            statistics = executor.statistics()
            await bob.forward(input_ids=IDS)  # no longer traced
    traced = lines([event for event in json.loads(file.read_text()) if event])
    batches = traced["batches"]
    assert len(batches) == statistics.batches
    assert sum(event["args"]["rows"] for event in batches) == statistics.rows
    assert sum(event["args"]["members"] for event in batches) == statistics.members
    assert {event["args"]["reason"] for event in batches} == set(statistics.reasons)
    assert any(event["name"].endswith("self_attn.q_proj") for event in batches)
    for client in ("alice", "bob"):
        mine = sorted(traced[client], key=lambda event: float(event["ts"]))
        assert {event["cat"] for event in mine} >= {"thinking", "running"}
        assert sum(event["args"]["rows"] for event in mine if event["cat"] == "running") > 0
        assert all(event["dur"] >= 0 for event in mine)
        for before, after in pairwise(mine):  # batches do not overlap
            assert after["ts"] >= before["ts"] + before["dur"] - 1.0


async def test_a_joint_walk_does_not_think_while_its_requests_run(base: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    async with symbiosis.Executor(base) as executor, executor.client(name="a") as a, executor.client(name="b") as b:

        async def write() -> None:
            await asyncio.gather(*(client.generate(input_ids=IDS[:1], max_new_tokens=16) for client in (a, b)))

        await write()
        executor.reset_statistics()
        with executor.trace(file):
            await write()
        assert executor.statistics().clients["a"].joint > 0
    traced = lines([event for event in json.loads(file.read_text()) if event])
    thinking = [event for event in traced[JOINT] if event["cat"] == "thinking"]
    running = [event for event in traced["a"] if event["cat"] == "running"]
    assert thinking
    for one in thinking:
        for other in running:
            assert one["ts"] + one["dur"] <= other["ts"] + 1.0 or other["ts"] + other["dur"] <= one["ts"] + 1.0


async def test_lone_requests_are_traced(base: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        await client.forward(input_ids=IDS)
        await asyncio.sleep(0.6)
        executor.reset_statistics()
        with executor.trace(file):
            await client.forward(input_ids=IDS)
            assert executor.statistics().reasons["lone"] > 0
    batches = lines([event for event in json.loads(file.read_text()) if event])["batches"]
    assert {event["args"]["reason"] for event in batches} >= {"lone"}


async def test_one_trace_at_a_time_in_a_writable_file(base: Any, tmp_path: Path) -> None:
    async with symbiosis.Executor(base) as executor:
        with pytest.raises(UsageError, match="cannot write a trace"), executor.trace(tmp_path / "nowhere" / "t.json"):
            pass
        with executor.trace(tmp_path / "a.json"):
            with pytest.raises(UsageError, match="already"), executor.trace(tmp_path / "b.json"):
                pass
        with executor.trace(tmp_path / "b.json"):
            pass
    assert not (tmp_path / "nowhere").exists()
    assert json.loads((tmp_path / "b.json").read_text())


def _ran(timeline: Timeline, request: Request, start: int, stop: int, began: float) -> None:
    batch = Batch(request.key, [Slice(request, start, stop)], "test", stop - start)
    timeline.ran(batch, [request] if stop == request.rows else [], began, began + 1.0)


def test_waits_between_the_slices_of_a_request(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", ["layer"], 0.0)
    request = Request(0, "alice", Key((0,), Pass.FORWARD), 24, Kind.PREFILL, 1.0)
    for number, began in enumerate((2.0, 5.0, 6.0)):
        _ran(timeline, request, 8 * number, 8 * number + 8, began)
    timeline.close()
    events = lines([event for event in json.loads((tmp_path / "t.json").read_text()) if event])["alice"]
    waits = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in events if event["cat"] == "waiting"]
    assert waits == [(1.0, 1.0), (3.0, 2.0), (6.0, 0.0)]


def test_events_from_before_the_trace_are_cut_at_its_start(tmp_path: Path) -> None:
    """One request was queued before and in a batch that was running. Another one was queued before and ran later."""
    timeline = Timeline(tmp_path / "t.json", ["layer"], 10.0)
    for client, began in (("alice", 9.5), ("bob", 12.0)):
        _ran(timeline, Request(0, client, Key((0,), Pass.FORWARD), 8, Kind.DECODE, 7.0), 0, 8, began)
    timeline.close()
    traced = lines([event for event in json.loads((tmp_path / "t.json").read_text()) if event])
    times = {
        client: [(event["cat"], event["ts"] / 1e6, event["dur"] / 1e6) for event in events]
        for client, events in traced.items()
    }
    assert times == {
        "batches": [("batch", 0.0, 0.5), ("batch", 2.0, 1.0)],
        "alice": [("waiting", 0.0, 0.0), ("running", 0.0, 0.5)],
        "bob": [("waiting", 0.0, 2.0), ("running", 2.0, 1.0)],
    }


def test_a_full_trace_is_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "MAX_EVENTS", 10)
    timeline = Timeline(tmp_path / "t.json", ["layer"], 0.0)
    for number in range(10):
        _ran(timeline, Request(number, "alice", Key((0,), Pass.FORWARD), 8, Kind.DECODE, 0.0), 0, 8, 1.0 * number)
    timeline.close()
    events = [event for event in json.loads((tmp_path / "t.json").read_text()) if event]
    assert len(events) == 11
    assert events[-1]["name"] == "the trace is full and ends here"
    assert caplog.text.count("later events are not in it") == 1


def test_clients_that_leave_free_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_CLIENTS", 10)
    timeline = Timeline(tmp_path / "t.json", ["layer"], 0.0)
    for number in range(100):
        timeline.walk_began(f"client-{number}", 1.0 * number)
        _ran(timeline, Request(number, f"client-{number}", Key((0,), Pass.FORWARD), 9, Kind.DECODE, 0.0), 0, 8, 1.0)
        timeline.walk_began(f"client-{number}", 1.0 * number)
        timeline.walk_began(f"other-{number}", 1.0 * number)
    timeline.close()
    assert max(len(timeline._lines), len(timeline._cut), len(timeline._thinks_since)) <= 10
    events = json.loads((tmp_path / "t.json").read_text())
    numbers = [event["tid"] for event in events if event.get("name") == "thread_name"]
    assert len(set(numbers)) == 201  # no two clients share a line


async def test_a_full_disk_ends_the_trace_only(base: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with symbiosis.Executor(base) as executor, executor.client() as client:
        with executor.trace("/dev/full"):
            for _ in range(6):
                await asyncio.wait_for(client.forward(input_ids=IDS), 20)
        await asyncio.wait_for(client.forward(input_ids=IDS), 20)
    assert "the trace cannot be continued" in caplog.text
