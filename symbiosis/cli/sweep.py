"""``symbiosis finetune --sweep``: runs with other options side by side, each in its own process, on one base model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.table import Table

from symbiosis.cli.data import LOG_FILE
from symbiosis.errors import UsageError
from symbiosis.terminal.console import console, toml_in
from symbiosis.terminal.progress import Steps

RESULTS_FILE = "results.json"
"""File in the folder of each run with its losses and results."""
_OWN = {"address", "sweep", "output", "json", "resume", "overwrite"}
"""Parameters of the command that a run of the file cannot change."""


def sweep(context: typer.Context, file: Path, output: Path) -> tuple[dict[str, Any], str]:
    """Run the command once for each table of a TOML file, all at once.

    Return the results by the tables' names, and a text about runs that failed or were stopped; "" if there are none.

    Args:
        context: the command, with the options that all runs have.
        file: a table for each run, with the options that it changes.
        output: each run writes to the folder of its name in it.

    Raises:
        UsageError: the file is wrong.
    """
    commands = {name: _command(context, changes, output / name) for name, changes in _read(context, file).items()}
    with ExitStack() as stack:
        processes = {}
        for name, command in commands.items():
            log = stack.enter_context((output / f"{name}.log").open("wb"))
            processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        with _forwarding(list(processes.values())):
            _wait(processes, output)
    codes = {name: process.returncode for name, process in processes.items()}
    results = {name: _results(output / name) for name, code in codes.items() if code == 0}
    _show(results)
    failed = [name for name, code in codes.items() if code]
    problem = ""
    if failed:
        text = (output / f"{failed[0]}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        reason = next(
            (line.strip(" │") for line in reversed(text) if any(map(str.isalpha, line))), "no reason is known"
        )
        problem = (
            f"{len(failed)} of {len(codes)} runs ended early ({', '.join(failed)}); {failed[0]}: {reason}; "
            f"their logs are in {output}, and --resume continues runs that have a checkpoint"
        )
    return results, problem


def _read(context: typer.Context, file: Path) -> dict[str, dict[str, Any]]:
    runs = toml_in(file, f"--sweep {file}")
    known = {str(parameter.name) for parameter in context.command.params} - _OWN - {"help"}
    for name, changes in runs.items():
        if not isinstance(changes, dict) or Path(name).name != name:
            raise UsageError(f"--sweep {file}: {name!r} is no table; write [{name}] and its options, such as lora")
        unknown = [key for key in changes if key.replace("-", "_") not in known]
        if unknown:
            names = ", ".join(sorted(one.replace("_", "-") for one in known))
            raise UsageError(f"--sweep {file}: [{name}] has no option {unknown[0]!r}; there are {names}")
    if not runs:
        raise UsageError(f"--sweep {file}: there is no run in it; write a table such as [small] for each")
    return {name: {key.replace("-", "_"): value for key, value in runs[name].items()} for name in runs}


def _command(context: typer.Context, changes: dict[str, Any], folder: Path) -> list[str]:
    values = {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT" and name not in ("sweep", "json")
    }
    values |= {**changes, "output": folder, "json": folder / RESULTS_FILE}
    command = [sys.executable, "-m", "symbiosis.cli.main", str(context.info_name)]
    for parameter in context.command.params:
        value = values.get(str(parameter.name))
        for one in value if isinstance(value, list | tuple) else [value]:
            if parameter.param_type_name == "argument":
                command.append(str(one))
            elif one is True:
                command.append(parameter.opts[0])
            elif one is not None and one is not False:
                command += [parameter.opts[0], str(one)]
    return command


@contextmanager
def _forwarding(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Send Ctrl-C and SIGTERM on to the runs. They have sessions of their own, so a terminal's Ctrl-C comes once."""

    def forward(number: int, frame: Any) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: dict[str, subprocess.Popen[bytes]], output: Path) -> None:
    shown: dict[str, int] = {}
    with Steps(console(stderr=True)) as steps:
        while True:
            ended = all(process.poll() is not None for process in processes.values())
            for name in processes:
                entry = _last_step(output / name / LOG_FILE)
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


def _results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    return found


def _show(results: dict[str, Any]) -> None:
    """Print the runs, the one with the lowest validation loss, or else the lowest last loss, first."""

    def best(result: dict[str, Any]) -> float:
        return min((float(one["loss"]) for one in result["validation"]), default=float(result["losses"][-1]))

    table = Table("run", "steps", "loss", "validation", "adapter", box=box.SIMPLE_HEAD)
    for name, result in sorted(results.items(), key=lambda pair: best(pair[1])):
        losses = f"{result['losses'][0]:.3f} → {result['losses'][-1]:.3f}"
        tested = f"{best(result):.3f}" if result["validation"] else "–"
        table.add_row(name, str(result["steps"]), losses, tested, result["adapter"])
    console().print(table)
