"""The actor of one executor. It starts ``symbiosis serve``, reports its address, and ends with it.

Ray starts the actor again when its process, its executor or its node has ended. The executor ends with the actor.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.request
from typing import Any

import ray

from symbiosis.cluster.plan import reason
from symbiosis.terminal import child

REPORT_EVERY_S = 0.5
"""Seconds between two reports to the directory."""
PAUSE_S = 5.0
"""Seconds before an executor is started again that ended before it served."""
DRAIN_S = 20.0
"""Seconds for an executor to end after SIGTERM. ``symbiosis serve`` takes 15 at most."""


class ExecutorActor:
    """One process of ``symbiosis serve``.

    Args:
        model: the name of its model.
        command: arguments of ``symbiosis serve``, but for the address.
        directory: the actor that is told what happens.
    """

    def __init__(self, name: str, model: str, command: list[str], directory: Any) -> None:
        context = ray.get_runtime_context()
        self._name, self._directory = name, directory
        self._report: dict[str, Any] = {
            "model": model,
            "node": context.get_node_id(),
            "address": "",
            "pid": None,
            "state": "loading",
            "error": "",
        }
        self._child: Any = None
        self._draining = False
        threading.Thread(target=self._run, args=(command,), daemon=True).start()

    def drain(self) -> None:
        """Ask the executor to end when all walks have ended, wait for that, and end the actor for good."""
        self._draining = True
        if self._child is not None:
            child.stop(self._child, DRAIN_S)
        ray.actor.exit_actor()

    def _run(self, command: list[str]) -> None:
        try:
            error = self._serve(command)
        except Exception as wrong:  # noqa: BLE001 (the operator gets it)
            error = f"{type(wrong).__name__}: {wrong}"
        if self._draining:
            return
        served = self._report["state"] == "serving"
        self._report |= {"state": "failed", "error": error}
        self._tell()
        time.sleep(0.5 if served else PAUSE_S)  # the report leaves this process before it ends
        os._exit(1)  # Ray starts the actor again

    def _serve(self, command: list[str]) -> str:
        """Run ``symbiosis serve``, and return why it has ended."""
        host = ray.util.get_node_ip_address()
        port, health = _free_port(host), _free_port("127.0.0.1")
        self._report["address"] = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        options = ["--listen", self._report["address"], "--metrics", f"127.0.0.1:{health}"]
        self._child = child.start(["serve", *command, *options])
        self._report["pid"] = self._child.pid
        threading.Thread(target=self._watch, args=(f"http://127.0.0.1:{health}/ready",), daemon=True).start()
        status, last = child.follow(self._child)
        return reason(last, status)

    def _watch(self, ready: str) -> None:
        while self._child.poll() is None:
            answers = _answers(ready)
            if answers and self._report["state"] == "loading":
                self._report["state"] = "serving"
            if answers or self._report["state"] == "loading":  # without reports, an executor that hangs counts as lost
                self._tell()
            time.sleep(REPORT_EVERY_S)

    def _tell(self) -> None:
        if not self._draining:
            self._directory.report.remote(self._name, dict(self._report))


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of this host without the environment's proxy."""


def _answers(url: str) -> bool:
    try:
        with _direct.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])
