"""Tests of the comparison with vLLM. A stand-in with vLLM's interface takes its place."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from symbiosis.bench.vllm_peer import vllm_process
from symbiosis.errors import UsageError
from tests.helpers import command, until

STAND_IN = """
import json, sys, time

clock = [0.0]
time.perf_counter = lambda: clock[0]
print("vLLM writes this to standard output")

class SamplingParams:
    def __init__(self, max_tokens, **options):
        self.tokens = max_tokens

class LLM:
    def __init__(self, model, **options):
        if options["max_lora_rank"] > 8:
            raise ValueError("a rank of at most 8")
        self.options = {"model": model, **options}

    def generate(self, prompts, sampling, lora_request, use_tqdm):
        if sampling.tokens > 100:
            raise RuntimeError("too long")
        assert all(list(prompt) == ["prompt_token_ids"] for prompt in prompts)
        assert [lora.folder for lora in lora_request] == ["one", "two"][: len(prompts)]
        assert self.options["enforce_eager"] and self.options["max_loras"] == 2
        clock[0] += 0.02 * sampling.tokens * len(prompts)
"""
LORA = """
class LoRARequest:
    def __init__(self, name, number, folder):
        self.folder = folder
"""
OPTIONS = {"dtype": "bfloat16", "length": 48, "eager": True}
ADAPTERS = [Path("one"), Path("two")]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm" / "lora").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "vllm" / "lora" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "lora" / "request.py").write_text(LORA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("stand_in")
async def test_only_decoding_is_timed() -> None:
    """By the stand-in's clock, each token takes 20 ms, the one after the prompt included."""
    async with vllm_process(sys.executable, Path("base"), ADAPTERS, rank=8, **OPTIONS) as vllm:
        assert await vllm.decode([[1, 2]], 3) == pytest.approx(0.06)
        assert await vllm.decode([[1, 2], [3]], 5) == pytest.approx(0.2)


@pytest.mark.usefixtures("stand_in")
async def test_an_error_of_vllm_is_shown() -> None:
    with pytest.raises(UsageError, match="vLLM ended with status 1: ValueError: a rank of at most 8"):
        async with vllm_process(sys.executable, Path("base"), ADAPTERS, rank=16, **OPTIONS):
            pass
    with pytest.raises(UsageError, match="vLLM ended with status 1: RuntimeError: too long"):
        async with vllm_process(sys.executable, Path("base"), ADAPTERS, rank=8, **OPTIONS) as vllm:
            await vllm.decode([[1]], 100)


@pytest.mark.usefixtures("stand_in")
async def test_processes_of_vllm_end_with_it(tmp_path: Path) -> None:
    child = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open('PID', 'w'))"
    with (tmp_path / "vllm" / "__init__.py").open("a") as file:
        file.write(child.replace("PID", str(tmp_path / "pid")))
    async with vllm_process(sys.executable, Path("base"), ADAPTERS, rank=8, **OPTIONS):
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
    await until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return "(sleep) Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


async def test_no_interpreter() -> None:
    with pytest.raises(UsageError, match="/nowhere/python cannot be run: No such file"):
        async with vllm_process("/nowhere/python", Path("base"), ADAPTERS, rank=8, **OPTIONS):
            pass


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--peer", "vllm"], "write vllm=PYTHON"),
        (["--peer", "other=python"], "write vllm=PYTHON"),
        (["--peer", "vllm=python", "--varied"], "leave --varied and --transport out"),
        (["--peer", "vllm=python", "--transport", "shm"], "leave --varied and --transport out"),
        (["--varied", "--transport", "shm"], "clients in this process; leave --transport out"),
        (["--joint", "fast", "--transport", "tcp"], "clients in this process; leave --transport out"),
    ],
)
def test_wrong_use(arguments: list[str], why: str) -> None:
    result = command("bench", "serve", *arguments)
    assert result.exit_code != 0
    assert why in result.output


@pytest.mark.usefixtures("stand_in")
@pytest.mark.thorough
def test_bench_serve_beside_vllm(tmp_path: Path) -> None:
    unchecked = "\n".join(line for line in STAND_IN.splitlines() if "assert" not in line)
    (tmp_path / "vllm" / "__init__.py").write_text(unchecked)
    options = "--preset", "tiny", "--clients", "2", "--rounds", "1", "--peer", f"vllm={sys.executable}"
    result = command("bench", "serve", *options, "--json", str(tmp_path / "o.json"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["headline"]["vs_vllm_2"] > 0
    assert {"vLLM eager tok/s", "vLLM compiled tok/s"} <= set(found["rows"][0])
