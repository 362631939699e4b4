"""Several nodes of Ray on this machine, and commands that run beside them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

COMMAND = [sys.executable, "-m", "symbiosis"]
COMMAND_S = 240.0
"""Seconds for one command, or for one event. Two executors that start beside other tests on two slow cores have taken
more than 120."""


class Nodes:
    """A head without CPUs and three nodes of two CPUs; the first two have the label ``pool=a``.

    Args:
        folder: Ray's. Its path is short, because it is a part of names of sockets.
    """

    def __init__(self, folder: str, host: str | None) -> None:
        from ray.cluster_utils import Cluster

        options = {} if host is None else {"node_ip_address": host}
        self._options = {"num_cpus": 2, **options}
        # With the usual ports, only one of two heads on this machine would take jobs.
        ports = {"dashboard_port": 0, "dashboard_agent_listen_port": None}
        head = {"num_cpus": 0, "include_dashboard": True, **ports, **options}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.environment = {
            **os.environ,
            "RAY_ADDRESS": self._cluster.address,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self.nodes = [self._cluster.add_node(**self._options, labels={"pool": pool}) for pool in "aab"]

    def add(self) -> None:
        self.nodes.append(self._cluster.add_node(**self._options))

    def kill(self, node: Any) -> None:
        """Kill a node's Ray with ``kill -9``, and wait until all that it has started has ended."""
        started = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        assert not psutil.wait_procs(started, timeout=20)[1]

    def of(self, process: psutil.Process) -> Any:
        """Return the node of a process."""
        above = {parent.pid for parent in process.parents()}
        (found,) = (node for node in self.nodes if node.all_processes["raylet"][0].process.pid in above)
        return found

    def close(self) -> None:
        self._cluster.shutdown()

    def symbiosis(self, *arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command, and check its exit status, unless that is None."""
        done = subprocess.run(
            [*COMMAND, *arguments], env=self.environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert status in (None, done.returncode), done.stdout + done.stderr
        return done

    def executors(self) -> list[dict[str, Any]]:
        """Return what ``cluster status --json`` tells of all executors."""
        state = json.loads(self.symbiosis("cluster", "status", "--json", status=None).stdout)
        return [each for model in state["models"].values() for each in model["executors"]]


def processes(*words: str) -> list[psutil.Process]:
    """Return the processes that this one has started, directly or not, with these words in their command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if set(words) <= set(process.cmdline()):
                found.append(process)
    return found


def until(holds: Callable[[], Any], within_s: float) -> Any:
    end = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def started(monkeypatch: pytest.MonkeyPatch, host: str | None = None) -> Iterator[Nodes]:
    """Start nodes, and check that no process is left when they have ended."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    (Path(folder) / "ray").mkdir()
    before = psutil.Process().children(recursive=True)
    nodes = Nodes(folder, host)
    try:
        yield nodes
    finally:
        left = [process for process in psutil.Process().children(recursive=True) if process not in before]
        nodes.close()
        _, left = psutil.wait_procs(left, timeout=20)
        for process in left:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert not left
