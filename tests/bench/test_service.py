"""Executors in other processes, for benchmarks."""

from __future__ import annotations

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
