"""What tests of runs of ``symbiosis finetune`` have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.service import Service

COLOURS = ("red", "green", "blue")


LORA = "r=8,alpha=16,dropout=0.1,targets=all-linear"


def options(service: Service, data: Path, output: Path, *more: Any) -> list[str]:
    lora = () if {"--ia3", "--prefix", "--peft"} & {*more} else ("--lora", LORA)
    given = *lora, "--learning-rate", "0.02", "--every", "5", *map(str, more)
    return ["finetune", service.address, "--data", str(data), "--output", str(output), *given]


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
