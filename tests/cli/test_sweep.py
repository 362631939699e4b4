"""``symbiosis finetune --sweep``: runs side by side."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from symbiosis.cli import sweep
from symbiosis.cli.sweep import _show
from symbiosis.terminal.console import console
from tests.cli.runs import options
from tests.helpers import command
from tests.service import Service


def test_a_sweep_runs_side_by_side(service: Service, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    fast = 'learning-rate = 0.05\nlog-to = []\nbatch = "2"\nia3 = false\n'
    file.write_text('[small]\nlora = "r=2"\n[fast]\n' + fast, encoding="utf-8")
    output, told = tmp_path / "out", tmp_path / "out.json"
    done = command(*options(service, data, output, "--steps", 4, "--sweep", file, "--json", told))
    assert done.exit_code == 0, done.output
    runs = json.loads(told.read_text(encoding="utf-8"))["runs"]
    assert {name: run["steps"] for name, run in runs.items()} == {"small": 4, "fast": 4}
    ranks = [json.loads((output / name / "adapter_config.json").read_text("utf-8"))["r"] for name in ("small", "fast")]
    assert ranks == [2, 8]
    assert "small" in done.stdout
    assert "fast" in done.stdout


@pytest.mark.thorough
def test_a_run_of_a_sweep_without_a_whole_checkpoint_begins_again_unless_it_had_ended(
    service: Service, data: Path, tmp_path: Path
) -> None:
    file, output = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text("[small]\nlora = 'r=2'\n", encoding="utf-8")
    given = options(service, data, output, "--steps", 2, "--sweep", file)
    assert command(*given).exit_code == 0
    (output / "small" / "checkpoint-2" / "rng_state.pth").unlink()
    written = (output / "small" / "adapter_model.safetensors").stat()
    done = command(*given, "--resume")
    assert done.exit_code == 1
    assert "no whole checkpoint" in " ".join(done.stderr.split())
    assert (output / "small" / "adapter_model.safetensors").stat() == written
    (output / "small" / "adapter_model.safetensors").unlink()
    done = command(*given, "--resume")
    assert done.exit_code == 0, done.output
    assert (output / "small" / "checkpoint-2" / "rng_state.pth").exists()


def test_a_run_that_failed_in_its_first_step_does_not_block_a_resume(
    service: Service, data: Path, tmp_path: Path
) -> None:
    """It has left its results and its log, and no options."""
    file, results = tmp_path / "sweep.toml", tmp_path / "out" / "one" / "results.json"
    file.write_text("[one]\nseed = 1\n", encoding="utf-8")
    results.parent.mkdir(parents=True)
    results.write_text('{"error": "the loss of step 1 is nan", "losses": [], "stopped": false}', encoding="utf-8")
    (tmp_path / "out" / "one.log").write_text("error: the loss of step 1 is nan\n", encoding="utf-8")
    done = command(*options(service, data, tmp_path / "out", "--steps", 1, "--sweep", file, "--resume"))
    assert done.exit_code == 0, done.output
    assert json.loads(results.read_text(encoding="utf-8"))["steps"] == 1


def test_the_lost_sweep_of_a_job_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that had begun finds by itself how it goes on, also one whose method has no checkpoints to resume from. One
    that had ended stays. Runs that are not the job's are refused, before the sweep has begun and later."""
    file, output, peft = tmp_path / "sweep.toml", tmp_path / "out", tmp_path / "peft.json"
    peft.write_text('{"peft_type": "ADALORA", "total_step": 9}', encoding="utf-8")
    file.write_text(f"[begun]\npeft = '{peft}'\n[new]\nseed = 1\n", encoding="utf-8")
    given = ["finetune", "shm:///nowhere", "--data", str(data), "--output", str(output), "--sweep", str(file)]
    commands: list[list[str]] = []
    monkeypatch.setattr("symbiosis.terminal.child.command", lambda given: [commands.append(given), "false"][1:])
    output.mkdir()
    (output / "new.log").write_text("of an earlier run\n", encoding="utf-8")
    assert "would replace new.log" in " ".join(command(*given, "--job", "one").stderr.split())
    assert not commands
    (output / "new.log").unlink()
    for overwrites in (False, True):  # as the runs that had begun find themselves, it holds for those that had not
        done = command(*given, "--job", "one")
        assert "2 of 2 runs ended early" in done.stderr, done.stderr
        assert [ran[ran.index("--job") + 1] for ran in commands] == ["one", "one"]
        assert ["--overwrite" in ran for ran in commands] == [overwrites, overwrites]
        assert not any("--resume" in ran for ran in commands)
        commands.clear()
    assert "would replace begun.log" in " ".join(command(*given, "--job", "two").stderr.split())
    run = output / "begun"
    run.mkdir()
    (run / "finetune.json").write_text('{"job": "one"}', encoding="utf-8")
    os.utime(run / "finetune.json", (1, 1))
    ended = {"losses": [1.0], "validation": [], "steps": 1, "stopped": False, "adapter": str(run)}
    (run / "results.json").write_text(json.dumps(ended), encoding="utf-8")
    done = command(*given, "--job", "one")
    assert "1 of 2 runs ended early (new)" in done.stderr, done.stderr
    assert [Path(ran[ran.index("--output") + 1]).name for ran in commands] == ["new"]
    (run / "finetune.json").write_text('{"job": null}', encoding="utf-8")  # the tenant has begun it by hand since
    assert "would replace finetune.json" in " ".join(command(*given, "--job", "one").stderr.split())


def runs_as(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shell script take the place of each run of a sweep."""
    monkeypatch.setattr("symbiosis.terminal.child.command", lambda arguments: ["sh", "-c", script])


def test_progress_is_not_that_of_an_earlier_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, output = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text("[new]\nseed = 1\n[waits]\nseed = 2\n", encoding="utf-8")
    for name in ("new", "waits"):
        (output / name).mkdir(parents=True)
        (output / name / "log.jsonl").write_text('{"loss": 0.5, "step": 66, "max_steps": 66}\n', encoding="utf-8")
        os.utime(output / name / "log.jsonl", (1, 1))
    line = json.dumps({"loss": 0.25, "step": 7, "max_steps": 7})
    runs_as(f"echo '{line}' > '{output}/new/log.jsonl'", monkeypatch)
    given = "--data", str(data), "--output", str(output), "--sweep", str(file), "--overwrite"
    done = command("finetune", "shm:///nowhere.sock", *given)
    assert done.exit_code == 0, done.output
    assert "new: 7/7 loss 0.250" in done.stderr
    assert "66/66" not in done.stderr


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", r"ended by signal 9 \(Killed[^)]*\)"),
        ("echo 5/66; echo step five; kill -9 $$", r"ended by signal 9 \(Killed[^)]*\), after: step five"),
        ("echo error: no memory; exit 1", "error: no memory"),
        ("exit 3", "ended with status 3"),
    ],
)
def test_why_a_run_has_ended(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    """The log has an earlier attempt, which is not why this one has ended."""
    file, output = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text("[a]\nseed = 1\n", encoding="utf-8")
    output.mkdir()
    (output / "a.log").write_text("stopped after step 5\n", encoding="utf-8")
    runs_as(script, monkeypatch)
    given = "--data", str(data), "--output", str(output), "--sweep", str(file), "--resume"
    done = command("finetune", "shm:///nowhere.sock", *given)
    assert done.exit_code == 1
    assert re.search(rf"1 of 1 runs ended early \(a\); a: {reason}; their logs are in", " ".join(done.stderr.split()))


def test_runs_that_have_failed_come_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have no adapter, unless they had one before."""
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "adapter_model.safetensors").touch()
    run = {"steps": 2, "losses": [3.0, 2.0]}
    results = {
        "diverged": {**run, "validation": [{"loss": 1.0}], "error": "the loss is nan", "adapter": str(tmp_path / "a")},
        "good": {**run, "validation": [{"loss": 2.0}], "adapter": str(tmp_path / "good")},
    }
    _show(console(), results)
    good, diverged = capsys.readouterr().out.splitlines()[-3:-1]
    assert good.split()[0] == "good"
    assert [diverged.split()[0], diverged.split()[-1]] == ["diverged", "–"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
@pytest.mark.parametrize(("script", "failed"), [("echo error: no memory; exit 1", True), ("true", False)])
def test_a_full_disk_does_not_hide_which_runs_have_failed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, failed: bool
) -> None:
    file, told = tmp_path / "sweep.toml", tmp_path / "out.json"
    file.write_text("[a]\nseed = 1\n", encoding="utf-8")
    (tmp_path / ".out.json.part").symlink_to("/dev/full")
    runs_as(script, monkeypatch)
    given = "--data", str(data), "--output", str(tmp_path / "out"), "--sweep", str(file), "--json", str(told)
    done = command("finetune", "shm:///nowhere.sock", *given)
    assert done.exit_code == 1
    text = " ".join(done.stderr.split())
    assert f"--json {told}: not written ([Errno 28] No space left on device" in text
    assert ("1 of 1 runs ended early (a); a: error: no memory" in text) == failed
    assert "validation" in done.stdout, "the table is shown"


def test_a_sweep_that_gets_two_signals_is_stopped(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends by the last one."""

    def run(commands: dict[str, list[str]], output: Path, signals: list[int], mode: str) -> dict[str, int]:
        signals += [signal.SIGINT, signal.SIGTERM]
        return dict.fromkeys(commands, 128 + signal.SIGTERM)

    monkeypatch.setattr(sweep, "_run", run)
    (tmp_path / "sweep.toml").write_text("[a]\nseed = 1\n", encoding="utf-8")
    given = "--data", str(data), "--output", str(tmp_path / "out"), "--sweep", str(tmp_path / "sweep.toml")
    done = command("finetune", "shm:///nowhere.sock", *given)
    assert done.exit_code == 128 + signal.SIGINT
    assert "stopped: a; the same command with --resume continues" in " ".join(done.stderr.split())


@pytest.mark.thorough
def test_a_sweep_goes_on_and_replaces_nothing(service: Service, data: Path, tmp_path: Path) -> None:
    file, output, told = tmp_path / "sweep.toml", tmp_path / "out", tmp_path / "out.json"
    file.write_text("[small]\nlora = 'r=2'\n", encoding="utf-8")
    assert command(*options(service, data, output, "--steps", 4, "--sweep", file)).exit_code == 0
    log = (output / "small.log").read_bytes()
    file.write_text('[new]\nlora = "r=2"\n[small]\nlora = "r=4"\n', encoding="utf-8")
    done = command(*options(service, data, output, "--steps", 4, "--sweep", file))
    assert done.exit_code == 1
    assert f"--output {output}/small: the run would replace checkpoint-4" in done.stderr
    assert (output / "small.log").read_bytes() == log
    assert not (output / "new").exists(), "no run begins if one is refused"
    (output / "new").mkdir()
    (output / "new" / "README.md").write_text("mine", encoding="utf-8")
    (output / "new.log").write_text("mine", encoding="utf-8")
    for more in ((), ("--resume",)):
        done = command(*options(service, data, output, "--steps", 4, "--sweep", file, *more))
        assert done.exit_code == 1
        found = re.search(r"new: the run would replace README\.md(, new\.log)?;", " ".join(done.stderr.split()))
        assert found is not None, done.stderr
        assert found.group(1) == (None if more else ", new.log"), "a run that goes on adds to its log"
    (output / "new" / "README.md").unlink()
    (output / "new.log").unlink()
    done = command(*options(service, data, output, "--steps", 4, "--sweep", file, "--resume", "--json", told))
    assert done.exit_code == 1
    assert "1 of 2 runs ended early (small)" in done.stderr
    assert "peft was" in done.stderr
    assert [*json.loads(told.read_text(encoding="utf-8"))["runs"]] == ["new"], "a run without a checkpoint begins"
    assert (output / "small.log").read_bytes().startswith(log)


@pytest.mark.thorough  # two runs more
def test_runs_of_a_sweep_have_data_of_their_own(service: Service, data: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text(f"[one]\ndata = '{data}'\n[other]\nlora = 'r=2'\n", encoding="utf-8")
    given = (*("finetune", service.address, "--output", str(output), "--steps", "1", "--sweep", str(file)),)
    done = command(*given)
    assert done.exit_code == 1
    assert "[other]: --data is missing" in " ".join(done.stderr.split())
    file.write_text(f"[one]\ndata = '{data}'\n", encoding="utf-8")
    done = command(*given)
    assert done.exit_code == 0, done.output
    assert (output / "one" / "adapter_model.safetensors").is_file()
    done = command("finetune", service.address, "--output", str(output))
    assert done.exit_code == 1
    assert "--data is missing" in done.stderr


def test_two_sweeps_do_not_share_a_folder(service: Service, data: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.log").write_text("of the other sweep", encoding="utf-8")
    (tmp_path / "sweep.toml").write_text("[one]\nseed = 1\n", encoding="utf-8")
    with FileLock(tmp_path / "a" / ".lock"):
        done = command(*options(service, data, tmp_path / "a", "--overwrite", "--sweep", tmp_path / "sweep.toml"))
    assert done.exit_code == 1
    assert "another run writes to it" in done.stderr
    assert (tmp_path / "a" / "one.log").read_text(encoding="utf-8") == "of the other sweep"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[", "cannot be read as TOML"),
        ("", "there is no run in it"),
        ("lora = 3", "'lora' is no table"),
        ("[a]\nrank = 3", "[a]: unknown key 'rank'; known are"),
        ("[a]\noutput = 'x'", "[a]: unknown key 'output'; known are"),
        ("['../a']\nseed = 3", "[../a] cannot be the name of a folder"),
        ("['..']\nseed = 3", "[..] cannot be the name of a folder"),
        ("['a.log']\nseed = 3", "[a.log] cannot be the name of a folder"),
        ('["a\\u0000b"]\nseed = 3', "cannot be the name of a folder"),
        ("['']\nseed = 3", "[] cannot be the name of a folder"),
        (f"[{'a' * 300}]\nseed = 3", "cannot be the name of a folder"),
        ("[a]\nlearning_rate = 1", "[a]: unknown key 'learning_rate'; did you mean learning-rate?"),
        ("[a]\nlearning-rate = 'abc'", "[a]: learning-rate = abc: Input should be a valid number"),
        ("[a]\nlog-to = 'wandb'", "[a]: log-to is 'wandb'; give a list of texts"),
        ("[a]\nsteps = true", "[a]: steps = True: Input should be a valid integer"),
        ("[a]\nia3 = 2", "[a]: ia3 = 2: Input should be a valid boolean"),
        ("[a]\nbatch = 0", "[a]: batch = 0: Input should be greater than or equal to 1"),
        ("[a]\nlora = 'r=4'\n[b]\nlora = 'r=4'\nia3 = true", "[b]: --lora and --ia3 each name a PEFT method"),
        ("[a]\nseed = 1\n[b]\ndata = 'absent.jsonl'", "[b]: absent.jsonl: cannot be read"),
        ("[a]\nschedule = 'linear'\nresume = true", "[a]: unknown key 'resume'"),
    ],
)
def test_wrong_sweeps(data: Path, tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "sweep.toml").write_text(content, encoding="utf-8")
    done = command(
        *("finetune", "shm:///nowhere.sock", "--data", str(data), "--output", str(tmp_path / "a")),
        *("--sweep", str(tmp_path / "sweep.toml")),
    )
    assert done.exit_code == 1
    assert complaint in " ".join(done.stderr.split())
