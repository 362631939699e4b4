"""Child processes end with their parent, however that ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import psutil
import pytest

from symbiosis.terminal import child
from tests.helpers import command, until

SLEEPS = "import time; from symbiosis.bench.peak_memory import in_process; print('ready', flush=True); "
SLEEPS += "in_process(time.sleep, 600)"


GRID = ("--grid", "--load", "steady:answer=4", "--requests", "100", "--policy", "lockstep", "--policy", "no-lockstep")


@pytest.mark.parametrize("arguments", [("-m", "symbiosis", "simulate", *GRID), ("-c", SLEEPS)])
async def test_workers_end_with_their_parent(arguments: tuple[str, ...]) -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=STDOUT)
    assert parent.stdout is not None
    assert await parent.stdout.readline()
    await until(psutil.Process(parent.pid).children)
    workers = psutil.Process(parent.pid).children()
    parent.kill()
    _, left = psutil.wait_procs(workers, timeout=20)
    for worker in left:
        worker.kill()
    assert not left
    await parent.wait()


def test_each_of_all_benchmarks_is_such_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []

    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        begun.append(arguments)
        return subprocess.CompletedProcess(arguments, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert command("bench", "all", "--output", str(tmp_path / "page.md")).exit_code == 1
    assert begun == [child.command(["bench", "wire", "--json", str(tmp_path / "benchmarks" / "wire.json")])]
