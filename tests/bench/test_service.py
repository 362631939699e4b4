"""Executors in other processes, for benchmarks."""

from __future__ import annotations

import os
import signal

import pytest

from symbiosis.bench.service import served
from symbiosis.errors import SymbiosisError


def test_an_executor_that_cannot_start_says_why() -> None:
    with pytest.raises(SymbiosisError, match="no module matches 'bogus'"), served("wire", "shm", "lockstep", "bogus"):
        pass


def test_ctrl_c_ends_the_command_and_not_the_executor_before_its_tenants() -> None:
    with served("wire", "shm", "lockstep", "linear") as executor:
        os.kill(executor.pid, signal.SIGINT)
        assert executor.gap_ms() >= 0
