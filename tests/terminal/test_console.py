"""Output files of commands: what is written, and in which order."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from symbiosis.bench.page import write_page as write_benchmarks
from symbiosis.cli.folder import check_json
from symbiosis.errors import UsageError
from symbiosis.privacy.audit.costs import SchemeCosts
from symbiosis.privacy.audit.limit import Limit
from symbiosis.privacy.audit.report import BEGIN, END, write_into
from symbiosis.privacy.audit.result import Audit, Observation
from symbiosis.privacy.audit.scores import Score
from symbiosis.privacy.audit.workload import Workload
from symbiosis.terminal.console import writable, write_and_show, write_text
from symbiosis.testing.compat_page import write_page
from tests.helpers import command

MACHINES = '[machines.a]\ngpu = "a100"\n'
SIMULATE = ("simulate", "--requests", "2", "--policy", "lockstep")
GRID = ("--grid", "--load", "steady:answer=4", "--policy", "no-lockstep")


async def _audit(*_: Any, **__: Any) -> Audit:
    bare = Observation("none", "", {"as is": {"activations": Score(0.99, 0.98, 1e-6)}})
    limits = {"as is": {"activations": Limit([Score(0.01 * (number % 3), 0.0) for number in range(12)], 1e-5)}}
    costs = {"none": SchemeCosts(1.0, math.nan, 1.0, 0.0, 0.0)}
    return Audit(Workload(), [bare], bare, costs, limits, 1e-5, 12, 0.9, {"none": "none"})


def _write_audit(page: Path) -> None:
    write_into(page, asyncio.run(_audit()))


async def _compat(*_: Any) -> tuple[list[Any], list[Any]]:
    return [], []


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (("bench", "schedule", "--rounds", "1", "--clients", "4", "--policy", "lockstep"), {"json": "o.json"}),
        (SIMULATE, {"json": "o.json", "plot": "o.png"}),
        ((*SIMULATE, *GRID), {"json": "o.json", "plot": "o.png"}),
        (("plan", "llama-3.1-8b", "--machines", "machines.toml", "--tenants", "1 decode"), {"json": "o.json"}),
        (("audit",), {"json": "o.json", "plot": "o.png", "into": "page.md"}),
        (("compat",), {"json": "o.json", "page": "o.md"}),
    ],
)
def test_results_are_written_although_they_cannot_be_shown(
    arguments: tuple[str, ...], files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after ``| head``, or if standard output goes to a full disk."""

    def fails(console: Console, *texts: Any, **options: Any) -> None:
        if not console.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("symbiosis.privacy.audit.run.audit", _audit)
    monkeypatch.setattr("symbiosis.cli.compat._try", _compat)
    monkeypatch.setattr(Console, "print", fails)
    monkeypatch.chdir(tmp_path)
    Path("machines.toml").write_text(MACHINES)
    Path("page.md").write_text(f"{BEGIN}{END}")
    done = command(*arguments, *(word for option, file in files.items() for word in (f"--{option}", file)))
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    for file in files.values():
        assert Path(file).stat().st_size > 100, file


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
@pytest.mark.parametrize("write", [write_benchmarks, lambda page: write_page(page, [], []), _write_audit])
def test_a_page_that_cannot_be_written_stays(write: Callable[[Path], object], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(before := f"of the user {BEGIN}{END}")
    page.chmod(0o640)
    (tmp_path / ".page.md.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write(page)
    assert page.read_text() == before
    write(page)
    assert page.read_text() != before
    assert page.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_what_a_link_names_stays_if_it_cannot_be_replaced(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_text("before")
    link.symlink_to(target)
    (tmp_path / ".target.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        write_text(link, "after")
    assert error.value.filename == str(link)
    assert target.read_text() == "before"
    write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    target.unlink()
    write_text(link, "again")
    assert link.is_symlink()
    assert target.read_text() == "again"


def test_results_go_to_a_pipe_that_is_open() -> None:
    """A shell makes ``/dev/fd/63`` of ``>(program)``."""
    read, write = os.pipe()
    path = Path(f"/dev/fd/{write}")
    writable(path)
    write_text(path, "result")
    os.close(write)
    with os.fdopen(read) as stream:
        assert stream.read() == "result"
    with pytest.raises(UsageError, match=f"cannot write to /dev/fd/{write}: Bad file descriptor"):
        writable(path)


def test_a_file_that_is_open_keeps_what_was_written(tmp_path: Path) -> None:
    """Such as /dev/stdout that goes to a file."""
    with (tmp_path / "out.txt").open("w") as stream:
        print("before", file=stream, flush=True)
        path = Path(f"/dev/fd/{stream.fileno()}")
        writable(path)
        write_text(path, "result\n")
        check_json(path, [], tmp_path, replace=False)
        print("after", file=stream, flush=True)
    assert (tmp_path / "out.txt").read_text() == "before\nresult\nafter\n"


def test_a_file_that_cannot_be_written_costs_no_other_one_and_no_table(tmp_path: Path) -> None:
    done: list[object] = []

    def failing(error: BaseException) -> Callable[..., None]:
        def fail(*given: object) -> None:
            done.extend(given or ["shown"])
            raise error

        return fail

    one, other = tmp_path / "one", tmp_path / "other"
    files = (one, failing(OSError("full"))), (None, done.append), (other, done.append)
    with pytest.raises(OSError, match="full"):
        write_and_show(*files, show=failing(SystemExit(1)))
    assert done == [one, other, "shown"]
