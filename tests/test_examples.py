"""The examples run in processes of their own and print the expected output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOISE = re.compile(r"torchao|_pytree|kernels-community")
"""What torchao and bitsandbytes print when transformers finds them installed."""
EXPECTED = {
    "embed_in_service.py": ["alice: [", "mallory: 400", "bob: 400", '"mean_batch"', "trainer took", "has ended"],
}


def test_every_example_is_tested() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if not NOISE.search(line)] == []
    for words in EXPECTED[name]:
        assert words in result.stdout
