"""Commands have OpenMP's threads wait passively before torch is imported, which reads that once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from symbiosis.core.registry import LISTS
from symbiosis.terminal import loop

SCRIPT = """
import os, sys
from symbiosis.terminal import loop

def wait_passively(*addresses):
    print("torch" in sys.modules, flush=True)
    os._exit(0)

loop.wait_passively = wait_passively
from symbiosis.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ["compat"],
        ["serve", "MODEL", "--listen", "shm:///SOCKET"],
        ["finetune", "shm:///SOCKET", "--data", "data.jsonl", "--output", "adapter"],
        ["generate", "shm:///SOCKET", "--prompt", "a"],
    ],
    ids=lambda command: command[0],
)
def test_torch_is_imported_afterwards(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("address", "waits"),
    [
        ("tcp://far:1,shm:///SOCKET", True),
        ("tcp://[::1]:1", True),
        *[(f"{each}head/list", True) for each in LISTS],
        ("tcp://far:1", False),
    ],
)
def test_threads_sleep_beside_processes_that_may_be_on_this_host(
    address: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    loop.wait_passively(address)
    assert os.environ == ({"OMP_WAIT_POLICY": "PASSIVE"} if waits else {})


def test_more_descriptors_than_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refused(*limits: object) -> None:
        asked.append(limits)
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("resource.setrlimit", refused)
    loop.allow_descriptors()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert asked == [(resource.RLIMIT_NOFILE, (most, most))]
