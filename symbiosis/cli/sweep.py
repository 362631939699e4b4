"""``symbiosis finetune --sweep``: runs with other options side by side, each in its own process, on one base model."""

from __future__ import annotations

import json
import re
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from symbiosis.cli.config import checked, converted, parameters_of
from symbiosis.cli.data import LOG_FILE
from symbiosis.cli.folder import (
    ADAPTER_FILE,
    JOB_FILE,
    OPTIONS_FILE,
    check_json,
    earlier_in,
    has_checkpoint,
    is_of,
    owned,
)
from symbiosis.cli.inputs import read_inputs
from symbiosis.errors import UsageError
from symbiosis.terminal import child
from symbiosis.terminal.console import console, is_given, toml_in, visible, writable, write_json
from symbiosis.terminal.progress import Steps
from symbiosis.terminal.signals import heeded

RESULTS_FILE = "results.json"
"""File in the folder of each run with its losses and results."""
_OWN = {"address", "sweep", "output", "json", "resume", "overwrite", "job"}
"""Parameters of the command that a run of the file cannot change."""
_READ = {"data", "peft", "validation", "key"}
"""Parameters that name files which a run reads."""


def sweep(context: typer.Context, file: Path, output: Path) -> None:
    """Run the command once for each table of a TOML file, all at once, and show and write the results.

    Args:
        context: the command, with the options that all runs have.
        file: a table for each run, with the options that it changes.
        output: each run writes to the folder of its name in it.

    Raises:
        UsageError: the file is wrong, the folders are in use or have earlier runs, or some runs failed.
        typer.Exit: a signal has stopped runs, or --json could not be written.
    """
    runs, told = _read(context, file), context.params["json"]
    for name, changes in runs.items():
        given = partial(_is_given, context, changes)
        try:
            read_inputs({**context.params, **changes}, given)
        except UsageError as wrong:
            raise UsageError(f"--sweep {file}: [{name}]: {wrong}") from wrong
        own = output / name / RESULTS_FILE, output / f"{name}.log"
        if told is not None and told.resolve() in [one.resolve() for one in own]:
            raise UsageError(f"--json {told}: run {name} writes this file itself; choose another one")
        check_json(told, (Path(changes[one]) for one in _READ & changes.keys()), output / name, replace=True)
    resume, job = context.params["resume"], context.params["job"]
    signals: list[int] = []
    with owned(output, job), heeded(signals.append):
        writable(told)
        again = not resume and is_of(output, job)
        logs_go_on = resume or again
        for name in runs:
            if not is_of(output / name, job) and not (resume and _has_begun(output / name)):
                # If the logs go on, results without a run are of one that failed in its first step.
                others = [] if logs_go_on else [output / name / RESULTS_FILE, output / f"{name}.log"]
                earlier_in(output / name, context.params["overwrite"], *others)
        if job is not None:
            write_json(output / JOB_FILE, {"job": job})
        before = {name: _written(output / name / RESULTS_FILE) for name in runs}
        done = [name for name in runs if again and _is_done(output / name, job)]
        logged = {name: _size(output / f"{name}.log") if logs_go_on else 0 for name in runs}
        commands = {name: _command(context, runs[name], output / name, again) for name in runs if name not in done}
        codes = _run(commands, output, signals, "ab" if logs_go_on else "wb")
        written = [name for name in runs if name in done or _written(output / name / RESULTS_FILE) != before[name]]
        results = {name: _results(output / name) for name in written}
        lost = False
        if told is not None:
            try:
                write_json(told, {"address": context.params["address"], "runs": results})
            except OSError as full:  # perhaps the disk, which may also be why runs have failed
                lost = True
                console(stderr=True).print(f"--json {told}: not written ({full})", markup=False, soft_wrap=True)
        _show(console(stderr=bool(signals)), results)  # Ctrl-C also ends a program that reads standard output
    # A run that had ended when the signal ended its process is complete.
    codes |= {name: 0 for name, result in results.items() if not result["stopped"] and "error" not in result}
    stopped = [name for name, code in codes.items() if any(code in (-each, 128 + each) for each in signals)]
    failed = [name for name, code in codes.items() if code and name not in stopped]
    if failed:
        reason = _reason(output / f"{failed[0]}.log", logged[failed[0]], codes[failed[0]])
        error = (
            f"{len(failed)} of {len(codes)} runs ended early ({', '.join(failed)}); {failed[0]}: {reason}; their logs "
            f"are in {output}, and --resume continues runs that have a checkpoint"
        )
        if not stopped:
            raise UsageError(error)
        console(stderr=True).print(escape(visible(error)), soft_wrap=True)
    if stopped:
        console(stderr=True).print(f"stopped: {', '.join(stopped)}; the same command with --resume continues")
        raise typer.Exit(128 + signals[0])
    if lost:
        raise typer.Exit(1)


def _run(commands: dict[str, list[str]], output: Path, signals: list[int], mode: Literal["ab", "wb"]) -> dict[str, int]:
    """Run the commands, pass signals on to them as they come, and return the exit status of each."""
    processes = {}
    before = {name: _written(output / name / LOG_FILE) for name in commands}
    with ExitStack() as stack:
        for name, command in commands.items():
            log = stack.enter_context((output / f"{name}.log").open(mode))
            # A session of its own: a terminal's Ctrl-C comes once.
            processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        _wait(processes, output, before, signals)
    return {name: process.returncode for name, process in processes.items()}


def _reason(log: Path, begin: int, status: int) -> str:
    """Return why a run has ended. Its part of the log begins at a byte."""
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = (line.strip(" │") for line in reversed(text.splitlines()) if any(map(str.isalpha, line)))
    return child.reason(status, next(lines, ""))


def _read(context: typer.Context, file: Path) -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    parameters = parameters_of(context.command)
    options = (key for key, each in parameters.items() if isinstance(each, typer.core.TyperOption))
    known = [key for key in options if parameters[key].name not in _OWN | {"help"}]
    for name, changes in toml_in(file, f"--sweep {file}").items():
        if not isinstance(changes, dict):
            raise UsageError(f"--sweep {file}: {name!r} is no table; write [{name}] and its options, such as lora")
        if not re.fullmatch(r"\w[\w .+=,-]{0,99}", name) or name.endswith(".log"):
            raise UsageError(f"--sweep {file}: [{name}] cannot be the name of a folder for its run; choose another one")
        where = f"--sweep {file}: [{name}]"
        runs[name] = converted(context, where, parameters, checked(where, changes, parameters, known))
    if not runs:
        raise UsageError(f"--sweep {file}: there is no run in it; write a table such as [small] for each")
    return runs


def _command(context: typer.Context, changes: dict[str, Any], folder: Path, again: bool) -> list[str]:
    values = {
        name: value
        for name, value in context.params.items()
        if is_given(context, name) and name not in ("sweep", "json")
    }
    values |= {**changes, "output": folder, "json": folder / RESULTS_FILE}
    ended = (folder / ADAPTER_FILE).exists()
    if again or (values.get("resume") and not ended and not has_checkpoint(folder)):
        # This run is new, or ended before it had a whole checkpoint. The sweep has checked what it may replace. The
        # run of a job that was lost finds out by itself whether it resumes.
        values |= {"resume": False, "overwrite": True}
    command = [str(context.info_name)]
    for parameter in context.command.params:
        value = values.get(str(parameter.name))
        for one in value if isinstance(value, list | tuple) else [value]:
            if parameter.param_type_name == "argument":
                command.append(str(one))
            elif one is True:
                command.append(parameter.opts[0])
            elif one is not None and one is not False:
                command += [parameter.opts[0], str(one)]
    return child.command(command)


def _is_given(context: typer.Context, changes: dict[str, Any], name: str) -> bool:
    """Return whether a run has an option from its table or from the command line."""
    return name in changes or is_given(context, name)


def _has_begun(folder: Path) -> bool:
    """Return whether a run has written to its folder."""
    return (folder / OPTIONS_FILE).is_file()


def _is_done(folder: Path, job: str | None) -> bool:
    """Return whether a run of a job has ended and written its results."""
    if not is_of(folder, job) or _written(folder / RESULTS_FILE) <= _written(folder / OPTIONS_FILE):
        return False
    result = _results(folder)
    return not result["stopped"] and "error" not in result


def _wait(
    processes: dict[str, subprocess.Popen[bytes]], output: Path, before: dict[str, int], signals: list[int]
) -> None:
    """Show the progress of runs until they have ended. Logs that were written ``before`` are of earlier runs."""
    shown: dict[str, int] = {}
    passed = 0
    with Steps(console(stderr=True)) as steps:
        while True:
            ended = all(process.poll() is not None for process in processes.values())
            for number in signals[passed:]:
                passed += 1
                for process in processes.values():
                    process.send_signal(number)
                console(stderr=True).print("\nstopping the runs after their steps; again to stop at once")
            for name in processes:
                file = output / name / LOG_FILE
                entry = _last_step(file) if _written(file) != before[name] else None
                if entry is not None and shown.get(name) != entry["step"]:
                    shown[name] = entry["step"]
                    steps(name, entry["step"], entry["max_steps"], f"loss {entry['loss']:.3f}")
            if ended:
                return
            time.sleep(0.2)


def _last_step(file: Path) -> dict[str, Any] | None:
    """Return the last complete line about a step."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return None
    entries = (json.loads(line) for line in reversed(lines) if '"loss"' in line)
    return next((entry for entry in entries if "max_steps" in entry), None)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _written(file: Path) -> int:
    """Return when a file was written, in nanoseconds; 0 if there is none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    return found


def _show(out: Console, results: dict[str, Any]) -> None:
    """Print the runs, the one with the lowest validation loss, or else the lowest last loss, first, and those that have
    failed last. Not all of these have an adapter."""

    def best(result: dict[str, Any]) -> float:
        return min((float(one["loss"]) for one in result["validation"]), default=float(result["losses"][-1]))

    table = Table("run", "steps", "loss", "validation", "adapter", box=box.SIMPLE_HEAD)
    begun = {name: result for name, result in results.items() if result["losses"]}
    for name, result in sorted(begun.items(), key=lambda pair: ("error" in pair[1], best(pair[1]))):
        losses = f"{result['losses'][0]:.3f} → {result['losses'][-1]:.3f}"
        tested = f"{best(result):.3f}" if result["validation"] else "–"
        adapter = result["adapter"] if (Path(result["adapter"]) / ADAPTER_FILE).exists() else "–"
        table.add_row(name, str(result["steps"]), losses, tested, adapter)
    out.print(table)
