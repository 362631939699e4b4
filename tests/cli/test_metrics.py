"""``symbiosis serve --metrics``: what a scrape shows, health, readiness, and the dashboard that uses the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import symbiosis
from symbiosis.cli import metrics
from symbiosis.cli.metrics import MAX_TENANTS, ExecutorCollector, MetricsServer
from symbiosis.core.requests import Batch, Key, Pass, Request, Slice
from symbiosis.core.scheduler import ALONE
from symbiosis.core.terms import Kind
from symbiosis.errors import UsageError
from symbiosis.executor.counters import Counters
from symbiosis.testing import tiny_model
from tests.helpers import adamw, command, lora
from tests.service import Service, free_port, save_model

DASHBOARD = Path(__file__).parents[2] / "examples" / "deploy" / "grafana.json"
IDS = torch.arange(3, 19).reshape(2, 8)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


def value(text: str, name: str, **labels: str) -> float:
    found = [one.value for one in samples(text) if one.name == f"symbiosis_{name}" and one.labels == labels]
    assert len(found) == 1, f"{name} {labels} has the samples {found}"
    return found[0]


async def scrape(executor: symbiosis.Executor) -> str:
    port = free_port()
    server = MetricsServer(f"127.0.0.1:{port}")
    try:
        server.serve(executor)
        status, text = await asyncio.to_thread(get, f"http://127.0.0.1:{port}/metrics")
    finally:
        server.close()
    assert status == 200
    return text


async def work(executor: symbiosis.Executor) -> None:
    """Two tenants fine-tune and generate."""

    async def tune() -> None:
        async with executor.client(lora(), name="alice/tuning", seed=0) as client:
            optimizer = adamw(client.model)
            for _ in range(3):
                await client.train_step({"input_ids": IDS, "labels": IDS}, optimizer)

    async def generate() -> None:
        async with executor.client(name="bob", seed=0) as client:
            await client.generate(input_ids=IDS[:1], max_new_tokens=6, min_new_tokens=6, do_sample=False)

    await asyncio.gather(tune(), generate())


async def test_a_scrape_shows_what_ran() -> None:
    async with symbiosis.Executor(tiny_model("llama"), policy="co-serving:slo_ms=10000,ttft_ms=10000") as executor:
        await work(executor)
        counts = executor.statistics()
        text = await scrape(executor)
        assert value(text, "requests_total") == counts.requests
        assert value(text, "tenant_requests_total", tenant="alice") == counts.clients["alice/tuning"].requests
        for reason, batches in counts.reasons.items():
            assert value(text, "batches_total", reason=reason) == batches
            assert value(text, "wait_seconds_total", reason=reason) == pytest.approx(counts.waits[reason])
        assert sum(counts.waits.values()) == pytest.approx(sum(one.wait_s for one in counts.clients.values()))
        # 3 steps of 16 tokens; a prompt of 8 tokens, of which the head sees one; 5 tokens that follow the first one
        assert value(text, "tokens_total", tenant="alice", kind="finetune") == pytest.approx(48)
        assert 7 < value(text, "tokens_total", tenant="bob", kind="prefill") <= 8
        assert value(text, "tokens_total", tenant="bob", kind="decode") == pytest.approx(5)
        assert value(text, "batch_run_seconds_count") == counts.batches
        assert value(text, "batch_run_seconds_sum") == pytest.approx(counts.run_s)
        waited = sum(value(text, "request_wait_seconds_count", kind=kind.name.lower()) for kind in Kind)
        assert waited == counts.requests
        kept = value(text, "slo_tokens_total", tenant="bob", slo="kept")
        assert kept == 5  # the first token, and those that another token follows
        assert value(text, "slo_tokens_total", tenant="bob", slo="missed") == 0
        status = executor.status()
        assert value(text, "base_bytes") == status["served_bytes"]
        assert value(text, "held_bytes") + value(text, "free_bytes") == executor.service.budget.total
        assert "process_resident_memory_bytes" in text


async def test_a_scrape_shows_the_service_that_fair_counts_and_what_is_not_shared() -> None:
    async with symbiosis.Executor(tiny_model("llama"), policy="fair:output=3,weights.bob=2+no-lockstep") as executor:
        await work(executor)
        counts = executor.statistics()
        text = await scrape(executor)
        charged = executor.engine.scheduler.policy.service()["bob"]
    bob = counts.tenants["bob"].tokens
    assert value(text, "tenant_service_total", tenant="bob") == pytest.approx(charged)
    head = 0.25  # more than its part of the weights; of a prompt, it computes the last row alone
    assert (1 - head) * bob["prefill"] + 3 * bob["decode"] < 2 * charged < bob["prefill"] + 3 * bob["decode"]
    alice = value(text, "tenant_service_total", tenant="alice")
    assert alice > counts.tenants["alice"].tokens["finetune"] > 0, "the backward pass counts too"
    unshared = sum(one.value for one in samples(text) if one.name == "symbiosis_unshared_requests_total")
    assert unshared == counts.requests > 0, "no-lockstep shares nothing"


async def test_tokens_of_joint_walks_count() -> None:
    options: Any = {"input_ids": IDS[:1], "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    async with symbiosis.Executor(tiny_model("llama")) as executor:
        async with executor.client(name="alice") as alice, executor.client(name="bob") as bob:
            while not any(client.joint for client in executor.statistics().clients.values()):
                executor.reset_statistics()
                await asyncio.gather(alice.generate(**options), bob.generate(**options))
            counts = executor.statistics()
        for tenant in (counts.tenants[name] for name in ("alice", "bob")):  # the joint model may make walks of its own
            assert tenant.tokens["decode"] == pytest.approx(5)
            assert sum(tenant.waits.values()) == pytest.approx(tenant.wait_s)


def run_request(counters: Counters, client: str) -> None:
    request = Request(0, client, Key((0,), Pass.FORWARD), 2, Kind.PREFILL, arrived=0.0)
    counters.count(Batch(request.key, [Slice(request, 0, 2)], "full", 2), [request], 1.0, 2.0, beside=ALONE)


def test_counts_of_forgotten_clients_stay_with_their_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symbiosis.executor.counters.MAX_CLIENTS", 3)
    monkeypatch.setattr("symbiosis.executor.counters.MAX_LEFT", 2)
    counters = Counters()
    for number in range(10):
        run_request(counters, f"alice/{number}")
    found = counters.snapshot(["layer"], {"alice/0": (2, 1), "": (4, 0)})
    assert len(found.clients) == 3
    assert found.tenants["alice"].requests == 10
    assert found.tenants["alice"].tokens["prefill"] == 20
    assert found.tenants["alice"].waits == {"full": 10.0}
    assert (found.tenants["alice"].slo_kept, found.tenants["alice"].slo_missed) == (2, 1)
    assert (found.tenants["other"].slo_kept, found.tenants["other"].slo_missed) == (4, 0)
    assert found.tenants["alice"].unshared == {"alone": {"full": 10}}
    assert found.tenants["alice"].passes == {"forward": 10}
    for number in range(10):
        run_request(counters, f"tenant-{number}")
    found = counters.snapshot(["layer"], {})
    assert len(found.tenants) <= 2 * 3 + 1
    assert sum(tenant.requests for tenant in found.tenants.values()) == 20
    assert counters._left.keys() == {"alice", "tenant-0", "other"}


def test_labels_are_bounded() -> None:
    counters = Counters()
    status: Any = dict.fromkeys(metrics._GAUGES, 0)
    status |= {"name": "n", "model": "m", "policy": "p", "clients": [], "draining": False}
    collector = ExecutorCollector(lambda: (status, counters.snapshot(["layer"], {}), {"alice"}))
    for number in range(MAX_TENANTS + 20):
        run_request(counters, f"tenant-{number}")
    run_request(counters, "alice")
    requests = next(family for family in collector.collect() if family.name == "symbiosis_tenant_requests")
    assert len(requests.samples) == MAX_TENANTS + 2
    assert {one.labels["tenant"]: one.value for one in requests.samples}["alice"] == 1, "who has a key has a label"
    assert {one.labels["tenant"]: one.value for one in requests.samples}["other"] == 20


async def test_every_metric_of_the_dashboard_exists() -> None:
    async with symbiosis.Executor(tiny_model("llama"), policy="fair+co-serving:slo_ms=10000") as executor:
        await work(executor)
        executor.service.rejected("BusyError")
        known = {one.name: one.labels.keys() for one in samples(await scrape(executor))}
    dashboard = json.loads(DASHBOARD.read_text())
    used = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert len(used) > 15
    for expression in used:
        names = set(re.findall(r"\b(?:symbiosis|process)_\w+", expression))
        assert names, expression
        assert names <= known.keys(), f"{expression} uses {names - known.keys()}, which no scrape shows"
        labels = {label for found in re.findall(r"by \(([\w, ]+)\)", expression) for label in found.split(", ")}
        assert all(labels <= known[name] for name in names), f"{expression} groups by {labels}"


async def test_an_executor_that_loads_hangs_or_shuts_down_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ANSWER_S", 0.2)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = MetricsServer(f"127.0.0.1:{port}")
    found = {}

    def ask(*paths: str) -> None:
        for path in paths:
            found[path] = get(url + path)[0]

    try:
        await asyncio.to_thread(ask, "/health", "/ready", "/metrics")
        assert found == {"/health": 200, "/ready": 503, "/metrics": 503}, "the model is not loaded yet"
        async with symbiosis.Executor(tiny_model("llama")) as executor:
            server.serve(executor)
            await asyncio.to_thread(ask, "/health", "/ready", "/metrics", "/other")
            assert found == {"/health": 200, "/ready": 200, "/metrics": 200, "/other": 404}
            asking = threading.Thread(target=ask, args=("/health", "/ready", "/metrics"))
            asking.start()
            asking.join(30)  # the event loop hangs meanwhile
            assert found == {"/health": 503, "/ready": 503, "/metrics": 503, "/other": 404}
            assert await executor.drain(0)
            await asyncio.to_thread(ask, "/health", "/ready", "/metrics")
            assert found == {"/health": 200, "/ready": 503, "/metrics": 200, "/other": 404}, "it shuts down"
            assert value(await asyncio.to_thread(lambda: get(url + "/metrics")[1]), "draining") == 1
    finally:
        server.close()


@pytest.mark.thorough
def test_slow_peers_take_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take all file descriptors and threads of the executor, and with them those of tenants."""
    monkeypatch.setattr(metrics, "REQUEST_WITHIN_S", 1.0)
    port = free_port()
    server = MetricsServer(f"127.0.0.1:{port}")
    before = threading.active_count()
    try:
        slow = [socket.create_connection(("127.0.0.1", port), 5.0) for _ in range(40)]
        for _ in range(30):
            for one in slow:
                with contextlib.suppress(OSError):  # it was closed
                    one.sendall(b"G")  # one byte at a time, without end
            assert threading.active_count() <= before + 2 * metrics.MAX_REQUESTS, "a thread and a timer for each"
            time.sleep(0.1)
        for one in slow:
            one.close()
        assert get(f"http://127.0.0.1:{port}/health")[0] == 200
    finally:
        server.close()


@pytest.mark.parametrize(
    "address",
    ["9100", "host:", "127.0.0.1:none", "127.0.0.1:99999", f"a:{'1' * 5000}", ":9100", "http://127.0.0.1:9100"],
)
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        MetricsServer(address)


def test_a_port_in_use_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = command(
            *("serve", str(tmp_path / "absent"), "--listen", f"shm://{tmp_path}/s.sock"),
            *("--metrics", f"127.0.0.1:{port}"),
        )
    assert done.exit_code == 1
    assert "cannot listen there" in done.stderr


def test_served_model_is_scraped(tmp_path: Path) -> None:
    port = free_port()
    model = save_model(tmp_path / "model", num_hidden_layers=2)
    with Service(model, f"shm://{tmp_path}/s.sock", "--metrics", f"127.0.0.1:{port}") as running:
        with symbiosis.open_model(running.address, name="alice/1") as opened:
            opened(input_ids=IDS)
            status, text = get(f"http://127.0.0.1:{port}/metrics")
            assert status == 200
            assert value(text, "clients") == 1
            assert value(text, "tenant_requests_total", tenant="alice") > 0
        with socket.socket(socket.AF_UNIX) as malformed:
            malformed.connect(str(tmp_path / "s.sock"))
            malformed.sendall(b"\xff" * 12)
            malformed.settimeout(20)
            assert malformed.recv(1)
        assert value(get(f"http://127.0.0.1:{port}/metrics")[1], "rejections_total", why="WireError") == 1
        assert get(f"http://127.0.0.1:{port}/ready")[0] == 200
        assert running.stop() == 0
