"""A served model with a chat template, and training data for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.chat_model import save_chat_model
from tests.cli.runs import COLOURS
from tests.service import Service


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="package")
def service(checkpoint: Path) -> Iterator[Service]:
    with Service(checkpoint, f"shm://{checkpoint.parent}/s.sock") as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    pairs = [{"prompt": f"thing {n % 3}", "completion": COLOURS[n % 3]} for n in range(24)]
    file.write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    return file
