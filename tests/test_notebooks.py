"""The notebooks run from the first cell to the last. Their assertions are the test."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"


def test_three_notebooks() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.ipynb")) == ["attack_a_scheme", "two_adapters", "write_a_policy"]


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [file.stem for file in FOLDER.glob("*.ipynb")])
def test_notebook(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert any("assert " in cell.source for cell in notebook.cells)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
