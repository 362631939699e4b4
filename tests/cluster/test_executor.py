"""What the actor of an executor reports, without Ray and without ``symbiosis serve``."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.nodes import until

executor = pytest.importorskip("symbiosis.cluster.executor", reason="needs the extra symbiosis-peft[ray]")


class Served:
    """Stands in for Ray, for ``symbiosis serve`` and for the directory."""

    def __init__(self) -> None:
        self.ready = True
        self.states: list[str] = []
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.actor = SimpleNamespace(exit_actor=lambda: None)
        self.report = SimpleNamespace(remote=lambda name, report: self.states.append(report["state"]))
        self.pid = 1
        self._ended = threading.Event()

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n1")

    def start(self, command: list[str]) -> Served:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if outer.ready else 503)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        address = command[command.index("--metrics") + 1].split(":")
        self._server = ThreadingHTTPServer((address[0], int(address[1])), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def poll(self) -> int | None:
        return 0 if self._ended.is_set() else None

    def follow(self, _: Served) -> tuple[int, str]:
        self._ended.wait(10)
        return 0, ""

    def stop(self, *_: Any) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    made = Served()
    monkeypatch.setattr(executor, "ray", made)
    monkeypatch.setattr(executor, "child", made)
    monkeypatch.setattr(executor, "REPORT_EVERY_S", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # an earlier urlopen() has read the environment's proxies once
    actor = executor.ExecutorActor("llama/0/0", "llama", [], made)
    yield made
    actor.drain()


def test_it_serves_also_where_the_environment_has_a_proxy(served: Served) -> None:
    until(lambda: "serving" in served.states, 5)


def test_an_executor_that_cannot_start_is_reported_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ends = Served(), threading.Event()
    made.util = SimpleNamespace(get_node_ip_address=lambda: "192.0.2.1")  # an address of no interface
    reports: list[dict[str, Any]] = []
    made.report = SimpleNamespace(remote=lambda name, report: reports.append(report))
    monkeypatch.setattr(executor, "ray", made)
    monkeypatch.setattr(executor, "PAUSE_S", 0.0)
    monkeypatch.setattr(executor.os, "_exit", lambda status: ends.set())
    executor.ExecutorActor("llama/0/0", "llama", [], made)
    assert ends.wait(5)
    assert reports[-1]["state"] == "failed"
    assert "OSError" in reports[-1]["error"]


def test_an_executor_that_does_not_answer_any_more_reports_nothing_until_it_does(served: Served) -> None:
    until(lambda: "serving" in served.states, 5)
    served.ready = False
    time.sleep(0.2)
    before = len(served.states)
    time.sleep(0.2)
    assert len(served.states) == before
    served.ready = True
    until(lambda: len(served.states) > before, 5)
    assert served.states[-1] == "serving"
