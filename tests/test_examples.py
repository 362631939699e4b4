"""The examples run, in processes of their own, and show what they promise."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from symbiosis.core.protocols import Policy
from symbiosis.testing import PolicyConformance

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "embed_in_service.py": ["alice: [", "mallory: 400", "bob: 400", '"mean_batch"', "trainer took", "has ended"],
    "own_policy.py": ["decode first", "finetune first", "trainer-2: ", "chat-3: "],
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
    assert result.stderr == ""
    for words in EXPECTED[name]:
        assert words in result.stdout


class TestOwnPolicy(PolicyConformance):
    """The policy of the example keeps the promises that are made for all."""

    def make_policy(self) -> Policy:
        policy: Policy = runpy.run_path(str(EXAMPLES / "own_policy.py"))["DecodeFirst"]()
        return policy
