"""``symbiosis bench placement``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import command


@pytest.mark.thorough
@pytest.mark.timeout(400)  # it starts eight executors and five tenants, each a process
def test_command(tmp_path: Path) -> None:
    result = command(
        *("bench", "placement", "--preset", "tiny", "--rounds", "1", "--tenants", "1"),
        *("--json", str(tmp_path / "found.json")),
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["placement"] for row in found["rows"]] == [
        "one executor",
        "a half of the layers on each of 2",
        "2 replicas",
        "2 replicas, half of the tenants on each",
        "2 shards",
    ]
    assert all(row["decoded tok/s"] > 0 and row["bytes a token"] > 1000 for row in found["rows"])
    assert [row["MiB of each executor"].count("+") for row in found["rows"]] == [0, 1, 1, 1, 1]
    assert set(found["headline"]) == {
        f"{figure}: {row['placement']}" for row in found["rows"][1:] for figure in ("decode", "train")
    }
