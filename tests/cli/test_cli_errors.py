"""Common mistakes on the command line end in one line that says what to do, before any work is done."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import symbiosis
from symbiosis.cli.commands import app
from symbiosis.errors import RefusedError
from symbiosis.executor.service import ExecutorService
from symbiosis.terminal.console import visible
from symbiosis.testing import tiny_model
from symbiosis.transports import peer
from tests.helpers import in_thread, lora


def _error(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.output.startswith("error:"), result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("option", ["r=0", "r=-3", "alpha=0", "dropout=7", "r=x", "s=1"])
def test_invalid_lora_options(tmp_path: Path, option: str) -> None:
    (tmp_path / "t.txt").write_text("words " * 100)
    files = "--data", str(tmp_path / "t.txt"), "--output", str(tmp_path / "o")
    assert "--lora" in _error("finetune", "shm:///nowhere.sock", *files, "--lora", option)


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("words " * 100)
    data = "finetune", "shm:///nowhere.sock", "--data", str(tmp_path / "t.txt")
    assert "cannot write to" in _error(*data, "--output", str(tmp_path / "t.txt"))
    output = "--output", str(tmp_path / "o")
    assert "cannot write to" in _error(*data, *output, "--json", str(tmp_path / "t.txt" / "losses.json"))
    assert "it is a folder" in _error(*data, *output, "--json", str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"], ids=["empty", "a pointer"])
def test_weights_that_were_not_downloaded(tmp_path: Path, content: bytes) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    found = _error("serve", str(tmp_path), "--listen", f"shm://{tmp_path}/s")
    assert "cannot be loaded; give a folder with a transformers model" in found


@pytest.mark.parametrize("device", ["nosuch", "cpu:x"])
def test_benchmarks_on_a_missing_device(device: str) -> None:
    found = _error("bench", "overhead", "--preset", "tiny", "--rounds", "1", "--device", device)
    assert "which this machine does not have" in found


def test_benchmarks_whose_result_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    assert "it is a folder" in _error("bench", "schedule", "--rounds", "1", "--clients", "4", "--json", str(tmp_path))
    assert "it is a folder" in _error("bench", "all", "--output", str(tmp_path))


def test_all_benchmarks_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    assert _error("bench", "all", "--output", str(tmp_path / "page.md")) == "error: bench wire ended with status 1"


@pytest.mark.parametrize("limit", ["arena_bytes=99999999999999999999", "calls=0", "calls", "patience=3"])
def test_invalid_limits(limit: str) -> None:
    assert f"limit {limit!r}" in _error("serve", "model", "--listen", "shm:///nowhere.sock", "--limit", limit)


async def test_unusable_adapters(tmp_path: Path) -> None:
    """The executor listens on a socket, because an adapter is checked against its model."""
    model = tiny_model()
    other = symbiosis.Executor(tiny_model(hidden_size=64))
    async with other, other.client(lora()) as client:
        client.save_adapter(tmp_path / "other")
    for name, text in (("empty", "{}"), ("broken", "{"), ("bare", json.dumps({"peft_type": "LORA"}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(text)
        if name != "bare":
            (tmp_path / name / "adapter_model.safetensors").write_bytes(b"")
    address = f"shm://{tmp_path}/e.sock"
    async with symbiosis.Executor(model) as executor:
        await executor.listen(address)
        found: dict[str, Any] = {}
        for name in ("empty", "broken", "bare", "other"):
            found[name] = await in_thread(_with_adapter, address, tmp_path / name)
    assert all("--adapter" in error for error in found.values()), found
    assert "no weights in it" in found["bare"]
    assert "size mismatch" in found["other"]


def _with_adapter(address: str, folder: Path) -> str:
    from symbiosis.cli.generate import _with_adapter as load

    with symbiosis.open_model(address) as base, pytest.raises(symbiosis.errors.UsageError) as error:
        load(base, folder)
    return str(error.value)


LOADS = """
import sys, time
from symbiosis import host
def load(*_, **__):
    print("loading", flush=True)
    time.sleep(60)
host.Executor.from_pretrained = load
from symbiosis.__main__ import main
sys.argv = ["symbiosis", "serve", "model", "--listen", "shm:///nowhere.sock"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_model_that_loads_can_be_interrupted(number: signal.Signals) -> None:
    serving = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOADS, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert serving.stdout is not None
    await asyncio.wait_for(serving.stdout.readline(), 60)
    serving.send_signal(number)
    _, errors = await asyncio.wait_for(serving.communicate(), 20)
    assert serving.returncode == 130
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from symbiosis.__main__ import main
main()
"""


def test_imports_can_be_interrupted() -> None:
    """The interrupt arrives during the first second, before the command has started."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130
    assert done.stderr == "interrupted\n"


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize("what", ["status", "json", "names", "refused"])
async def test_a_terminal_obeys_no_text_of_an_executor(
    base: Any, what: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "[/x]\x1b]0;title\x07\x1b[2J\x9b2J"
    shown: dict[Any, Any] = {evil: evil, "clients": [evil], "bytes": b"\xff"}

    async with symbiosis.Executor(base) as executor:
        listener = await executor.listen("tcp://127.0.0.1:0" if scheme == "tcp" else f"shm://{tmp_path}/s.sock")
        monkeypatch.setattr(ExecutorService, "status", lambda _: {b"\xff": 1} if what == "names" else shown)
        if what == "refused":
            monkeypatch.setattr(peer.Peer, "_hello", lambda self, _: self.refuse(RefusedError(evil)))
        options = ["--json"] if what == "json" else []
        done = await in_thread(CliRunner().invoke, app, ["status", listener.address, *options])
    assert done.exit_code == (what in ("names", "refused")), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert not any(character in done.output for character in "\x1b\x07\x9b")
    assert what == "names" or "title" in done.output


def test_control_characters_are_made_visible() -> None:
    assert visible("a\tb\nc\r\x1b[2J é") == "a\tb\nc\\x0d\\x1b[2J é"
