"""Tests of the command line: help, lists, versions and errors."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import symbiosis
from symbiosis.__main__ import main
from symbiosis.bench.page import write_page
from symbiosis.bench.report import Report
from symbiosis.cli.commands import app
from symbiosis.core import registry
from symbiosis.errors import UsageError
from symbiosis.terminal.console import CommandGroup, write_json
from symbiosis.transports.keys import load_key
from tests.helpers import run_command
from tests.service import save_model


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_version(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"symbiosis {symbiosis.__version__}\n"


def test_help_names_the_commands(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "serve", "status", "keys", "finetune", "generate", "policies", "bench"):
        assert command in result.output


def test_help_needs_no_torch() -> None:
    """Importing torch takes seconds, so the command and its help must not import it."""
    code = (
        "import sys; from symbiosis.cli.commands import app; app(['demo', '--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "--policy" in result.stdout


def test_keys(tmp_path: Path) -> None:
    done = run_command("keys", "new", "alice", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    secret = tmp_path / "alice.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert load_key(secret).context is not None
    assert sorted(file.name for file in (tmp_path / "keys").iterdir()) == [
        "alice.public",
        "server.public",
        "server.secret",
    ]
    (tmp_path / "keys" / "eve.public").write_text("junk\n")
    done = run_command("keys", "list", cwd=tmp_path)
    assert done.stdout == "alice\n"
    assert "eve.public is ignored: " in done.stderr
    done = run_command("keys", "new", "alice", cwd=tmp_path)
    assert done.returncode == 1
    assert "alice.secret exists" in done.stderr
    done = run_command("keys", "new", "carl", "--keys", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_key(tmp_path / "carl.secret").context is not None
    assert (tmp_path / "carl.public").exists()
    done = run_command("keys", "new", "x" * 300, cwd=tmp_path)
    assert done.returncode == 1
    assert "a name has up to 64" in done.stderr
    done = run_command("keys", "list", "--keys", "nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "symbiosis keys new" in done.stderr


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["serve", "./nowhere", "--listen", "shm:///tmp/x.sock"], "there is no folder ./nowhere"),
        (["serve", str(Path(__file__).parent), "--listen", "shm:///tmp/x.sock"], "has no config.json"),
        (["serve", "nowhere", "--listen", "shm:///tmp/x.sock"], "no folder of this name, so it is a hub id"),
        (["serve", "nowhere", "--listen", "carrier-pigeon://x"], "unknown transport"),
        (["serve", "nowhere", "--listen", "shm:///tmp/x.sock", "--policy", "whim"], "unknown policy"),
        (
            ["serve", "nowhere", "--listen", "shm:///tmp/x.sock", "--limit", "arena=5"],
            "the names are calls, rows, arena_bytes",
        ),
        (["serve", "nowhere", "--listen", "tcp://127.0.0.1:0", "--keys", "nowhere"], "nowhere"),
        (["serve", "MODEL", "--listen", "shm:///tmp/x.sock", "--device", "nosuch"], "which this machine does not have"),
        (["status", "tcp://127.0.0.1:1"], "no executor answers"),
        (["status", "shm:///tmp/x.sock", "--key", "k.secret"], "no option key"),
        (["finetune", "shm:///tmp/x.sock", "--data", "none.txt", "--output", "out"], "cannot be read"),
    ],
)
def test_a_command_that_fails_prints_the_reason(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, command: list[str], reason: str, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if "MODEL" in command:
        command[1] = str(save_model(tmp_path / "model"))
    done = runner.invoke(app, command)
    assert done.exit_code == 1
    assert reason in done.stderr.replace("\n", " ")
    assert isinstance(done.exception, SystemExit)


def test_a_process_that_fails_prints_the_reason(tmp_path: Path) -> None:
    done = run_command("serve", "nowhere", "--listen", "shm:///tmp/x.sock", cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no folder nowhere, and " in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_bench_wire(tmp_path: Path) -> None:
    done = run_command("bench", "wire", "--rounds", "1", "--json", "wire.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "wire.json").read_text())
    assert {"shm_vs_echo", "tcp_1mb_vs_echo", "calls_per_s_shm"} <= set(found["headline"])
    assert all(row["call µs"] > 0 for row in found["rows"])


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_bench_loop(tmp_path: Path) -> None:
    command = ["bench", "loop", "--preset", "tiny", "--rounds", "1", "--json", "loop.json"]
    done = run_command(*command, cwd=tmp_path, within_s=280)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "loop.json").read_text())
    assert len(found["rows"]) == 4
    assert found["headline"]["largest_gap_ms"] == max(row["largest of all"] for row in found["rows"]) > 0


def test_a_report_has_its_whole_command(tmp_path: Path) -> None:
    command = "bench schedule --rounds 1 --policy lockstep --clients 4 --clients 8"
    done = CliRunner().invoke(app, [*command.split(), "--json", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    report = Report(**json.loads((tmp_path / "a.json").read_text()))
    assert report.command == f"symbiosis {command}"
    assert report.command in " ".join(done.output.split())
    report = Report("serve", "tiny", {}, transport="shm", options={"preset": "tiny"})
    assert report.command == "symbiosis bench serve --preset tiny --transport shm"
    report = Report("serve", "tiny", {}, options={"preset": "tiny", "varied": True, "joint": ["off"]})
    assert report.command == "symbiosis bench serve --preset tiny --varied --joint off"


def test_plots_of_two_runs_of_one_benchmark(tmp_path: Path) -> None:
    rows = [{"clients": count, "a tok/s": 1.0} for count in (1, 2)]
    for name in ("one", "two"):
        Report("serve", "tiny", {}, rows=rows).save(tmp_path / "benchmarks" / f"{name}.json")
    write_page(tmp_path / "page.md")
    assert sorted(file.name for file in (tmp_path / "benchmarks").glob("*.png")) == ["one.png", "two.png"]
    assert "(benchmarks/two.png)" in (tmp_path / "page.md").read_text()


@pytest.mark.thorough
def test_bench_schedule(tmp_path: Path) -> None:
    command = ["bench", "schedule", "--rounds", "1", "--clients", "4", "--clients", "40", "--json", "schedule.json"]
    done = run_command(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "schedule.json").read_text())
    assert {"us_per_request_40", "growth_4_to_40"} == set(found["headline"])
    assert {row["policy"] for row in found["rows"]} >= {"opportunistic", "co-serving", "temporal"}
    assert all(row["µs a request"] > 0 for row in found["rows"])


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
@pytest.mark.timeout(300)
def test_bench_memory(tmp_path: Path) -> None:
    command = ["bench", "memory", "--preset", "tiny", "--lengths", "128", "--lengths", "768", "--window", "64"]
    done = run_command(*command, "--json", "memory.json", cwd=tmp_path, within_s=280)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "memory.json").read_text())
    assert [row["tokens"] for row in found["rows"]] == [128, 768]
    last, headline = found["rows"][-1], found["headline"]
    assert headline["activation_ratio"] == last["windows MiB"] / last["HF+PEFT MiB"] < 0.4
    assert headline["activation_ratio_pruned"] < 0.95
    assert 0.8 < headline["activation_ratio_symbiosis"] < 1.2


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_peak_memory_counts_new_tensors_only() -> None:
    """A tensor that was freed meanwhile counts, a tensor from before does not. The test starts a new process."""
    code = (
        "import torch; from symbiosis.bench.peak_memory import PeakMemory; before = torch.ones(30, 2**18);"
        "watch = PeakMemory(torch.device('cpu')); a = torch.ones(20, 2**18); del a; b = torch.ones(10, 2**18);"
        "print(watch.peak() / 2**20)"
    )
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert float(done.stdout) == pytest.approx(20, abs=1)


def test_the_package_offers_what_it_exports() -> None:
    assert set(symbiosis.__all__) <= set(dir(symbiosis))
    assert symbiosis.Executor.__name__ == "Executor"
    assert symbiosis.Client.__name__ == "Client"
    with pytest.raises(AttributeError, match="no attribute 'Exekutor'"):
        _ = symbiosis.Exekutor


def test_policies_lists_options_and_defaults(runner: CliRunner) -> None:
    result = runner.invoke(app, ["policies"])
    assert result.exit_code == 0
    for word in (
        "no-lockstep",
        "lockstep",
        "opportunistic",
        "Opportunistic",
        "wait_ms.decode=10.0",
        "max_wait_ms=50.0",
    ):
        assert word in result.output


def test_policies_does_not_list_the_policy_inside_as_an_option(runner: CliRunner) -> None:
    result = runner.invoke(app, ["policies"])
    assert "policy=" not in result.output
    assert "fair, priority, rate-limit wrap another policy, written after a plus: --policy fair:" in result.output


class Installed:
    """A policy from another package. It has a second sentence."""

    def __init__(self, patience: int, zeal: float = 0.5) -> None: ...


def test_policies_lists_those_of_other_packages(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("mine", f"{__name__}:Installed", registry.POLICIES),
        EntryPoint("broken", "no_such_module:Policy", registry.POLICIES),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == registry.POLICIES else [])
    result = runner.invoke(app, ["policies"])
    assert result.exit_code == 0
    assert f"installed: {__name__}:Installed" in result.output
    assert "patience, zeal=0.5" in result.output
    assert "cannot be loaded" in result.output
    assert "no_such_module" in result.output


def _app_that(raises: BaseException) -> Any:
    broken = typer.Typer(cls=CommandGroup)

    @broken.callback()
    def root() -> None: ...

    @broken.command()
    def work() -> None:
        raise raises

    return broken


def test_an_error_of_symbiosis_is_one_line(runner: CliRunner) -> None:
    result = runner.invoke(_app_that(UsageError("no [such] thing; do that")), ["work"])
    assert result.exit_code == 1
    assert result.stderr == "error: no [such] thing; do that\n"
    assert result.stdout == ""


def test_a_missing_permission_is_one_line(runner: CliRunner) -> None:
    result = runner.invoke(_app_that(PermissionError(errno.EACCES, "Permission denied", "out/log.jsonl")), ["work"])
    assert result.exit_code == 1
    assert result.stderr == "error: out/log.jsonl: Permission denied\n"


def test_a_full_disk_is_one_line(runner: CliRunner) -> None:
    result = runner.invoke(_app_that(OSError(errno.ENOSPC, "No space left on device", "log.jsonl")), ["work"])
    assert result.exit_code == 1
    assert result.stderr == "error: log.jsonl could not be written: No space left on device\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["policies"]])
def test_a_full_disk_under_the_output_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "symbiosis", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output or a file of this command could not be written")
    assert "Traceback" not in done.stderr


def test_the_first_process_of_a_container_heeds_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(prog_name: str) -> None:
        os.kill(number, signal.SIGTERM)

    number, before = os.getpid(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("symbiosis.cli.commands.app", stopped)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 130


def test_ctrl_c_ends_quietly(runner: CliRunner) -> None:
    result = runner.invoke(_app_that(KeyboardInterrupt()), ["work"])
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_a_defect_shows_its_traceback(runner: CliRunner) -> None:
    result = runner.invoke(_app_that(ZeroDivisionError("a defect")), ["work"])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("arguments", [["demo", "--seed", "-1"], ["serve", "x", "--retry"], ["dmo"]])
def test_wrong_arguments(runner: CliRunner, arguments: list[str]) -> None:
    assert runner.invoke(app, arguments).exit_code == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_a_result_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / ".x.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "x.json", {"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_results_with_nan_and_infinity_are_valid_json(tmp_path: Path) -> None:
    """Python writes NaN and Infinity, which are not part of JSON."""
    report = Report("x", "", {}, rows=[{"mean": math.nan, "text": "é"}], headline={"ratio": math.inf})
    report.save(tmp_path / "new" / "x.json")
    text = (tmp_path / "new" / "x.json").read_text(encoding="utf-8")
    read = json.loads(text, parse_constant=pytest.fail)
    assert read["rows"] == [{"mean": None, "text": "é"}]
    assert read["headline"] == {"ratio": None}
