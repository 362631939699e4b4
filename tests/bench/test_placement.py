"""``symbiosis bench placement``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import command


@pytest.mark.thorough
@pytest.mark.timeout(400)  # it starts nine executors and twelve tenants, each a process
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
    names = [row["placement"] for row in found["rows"]]
    assert set(found["headline"]) == {
        *(f"{figure}: {name}" for name in names[1:] for figure in ("decode", "train")),
        *(
            f"{figure}, simulated / measured: {name}"
            for name in (names[0], names[1], names[3])
            for figure in ("decode", "train")
        ),
    }
    assert all(0.2 < ratio < 5 for ratio in found["headline"].values()), "with one tenant all placements are alike"
