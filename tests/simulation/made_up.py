"""Synthetic costs and traces for tests of the simulator and its command."""

from __future__ import annotations

from pathlib import Path

from symbiosis.simulation import Cost
from symbiosis.simulation.clients import backward, forward
from symbiosis.simulation.costs import Costs
from symbiosis.simulation.outcome import SLO

PATIENT = SLO(1e6, 1e6)


def costs(
    think: float = 1e-3,
    start: float = 1e-3,
    row: float = 1e-5,
    layers: int = 4,
    local: bool = False,
    joint: bool = False,
) -> Costs:
    keys, cost = forward(layers), Cost(start, row)
    return Costs(keys, backward(keys), layers, cost.of, lambda kind, rows: think, 0.0, "made up", local, joint)


def trace_file(folder: Path, *lines: str, header: str = "arrival_s,ContextTokens,GeneratedTokens") -> Path:
    file = folder / "trace.csv"
    file.write_text("\n".join([header, *lines]) + "\n")
    return file
