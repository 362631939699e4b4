"""The code in the documentation does what the text says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.helpers import Conformance

ROOT = Path(__file__).parent.parent


def blocks(file: Path, language: str) -> list[str]:
    """Return the blocks of code in a Markdown file."""
    return re.findall(rf"```{language}\n(.*?)```", file.read_text(encoding="utf-8"), re.DOTALL)


def code(file: str) -> list[str]:
    """Return the Python blocks of a Markdown file."""
    return blocks(ROOT / file, "python")


def check_readme_example(folder: Path, *, after: str = "") -> None:
    """Check that the example runs, after other code, and prints a line for each tenant."""
    (folder / "example.py").write_text(after + code("README.md")[0])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / "example.py")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"alice: loss \d", result.stdout)
    assert re.search(r"bob: loss \d", result.stdout)


def test_readme_example(tmp_path: Path) -> None:
    check_readme_example(tmp_path)


def test_toml_examples_can_be_read() -> None:
    found = [text for file in ROOT.glob("docs/**/*.md") for text in blocks(file, "toml")]
    assert all(tomllib.loads(text) for text in found)
    assert len(found) > 2


class TestContributingPolicy(Conformance):
    """The policy in CONTRIBUTING passes the kit."""

    def make_policy(self) -> Any:
        namespace: dict[str, Any] = {}
        exec(code("CONTRIBUTING.md")[0], namespace)
        return namespace["FullestFirst"]()
