"""Executors in other processes, for benchmarks."""

from __future__ import annotations

import os
import signal

import pytest

from symbiosis.bench.service import served
from symbiosis.errors import SymbiosisError


@pytest.mark.parametrize(
    ("policy", "base_layers", "why"),
    [("bogus", "linear", "unknown policy 'bogus'"), ("lockstep", "bogus", "no module matches 'bogus'")],
)
def test_an_executor_that_cannot_start_says_why(policy: str, base_layers: str, why: str) -> None:
    with pytest.raises(SymbiosisError, match=why), served("wire", "shm", policy, base_layers):
        pass


def test_ctrl_c_ends_the_command_and_not_the_executor_before_its_tenants() -> None:
    with served("wire", "shm", "lockstep", "linear") as executor:
        os.kill(executor.pid, signal.SIGINT)
        assert executor.gap_ms() >= 0
