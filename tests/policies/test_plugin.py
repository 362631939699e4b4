"""A policy in a package of its own is installed in another folder, listed, configured, tested and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from symbiosis import open_model
from symbiosis.core.registry import make_transport
from tests.helpers import IDS, run_command
from tests.service import Service, save_model

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "policy_package"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package with pip, from a copy because a build writes files beside the sources; return the folder."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(folder / "installed"), str(folder / "source")], check=True, timeout=120)
    return folder / "installed"


def search_path(installed: Path) -> str:
    """Return a PYTHONPATH with the installed policy and the symbiosis that is tested."""
    return os.pathsep.join([str(installed), str(ROOT)])


def symbiosis(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, env={**os.environ, "PYTHONPATH": search_path(installed), "COLUMNS": "200"})


def test_the_policy_is_listed_with_its_options(installed: Path) -> None:
    done = symbiosis(installed, "policies")
    assert done.returncode == 0, done.stderr
    assert "patient-tuning" in done.stdout
    assert "patience_ms=800.0, rows=64" in done.stdout


def test_the_options_of_the_policy_are_checked(installed: Path) -> None:
    done = symbiosis(installed, "serve", "nowhere", "--listen", "shm:///tmp/x.sock", "--policy", "patient-tuning:row=3")
    assert done.returncode != 0
    assert "patience_ms, rows" in done.stderr


@pytest.mark.thorough
def test_the_policy_passes_its_own_tests(installed: Path) -> None:
    """The conformance kit is one of these tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PACKAGE / "test_patient_tuning.py")],
        env={**os.environ, "PYTHONPATH": search_path(installed)},
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_policy_serves(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path(installed))
    address, trace = f"shm://{tmp_path}/s.sock", tmp_path / "batches.json"
    options = ["--policy", "patient-tuning:rows=32", "--trace", str(trace)]
    folder = save_model(tmp_path / "model")
    with Service(folder, address, *options, fresh=True) as service:
        assert "patient-tuning" in make_transport(address).look(address).status["policy"]
        with open_model(address, name="alice") as model:
            logits = model(input_ids=IDS).logits
        assert service.stop() == 0
    expected = AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    batches = [event for event in json.loads(trace.read_text()) if event.get("cat") == "batch"]
    assert "tuning" in {event["args"]["reason"] for event in batches}  # only this policy gives this reason


def test_the_tutorial_shows_this_code() -> None:
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "docs" / "policies.md").read_text(), re.DOTALL)
    files = "patient_tuning.py", "test_patient_tuning.py", "pyproject.toml"
    assert blocks == [(PACKAGE / name).read_text() for name in files]
