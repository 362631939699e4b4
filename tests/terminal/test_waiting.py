"""Commands have OpenMP's threads wait passively before torch is imported, which reads that once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_more_descriptors_than_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("resource.setrlimit", refused)
    loop.allow_descriptors()
