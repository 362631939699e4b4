"""Consoles and output files of commands, and how commands end in an error."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer
import typer.core
from rich.console import Console
from rich.markup import escape

from symbiosis.errors import SymbiosisError, UsageError

PLOTS = (".png", ".svg", ".pdf")
"""Formats of plots, by the end of a file's name."""


class _Messages(Console):
    """A console on standard error, which goes on without output when nothing can be written there. Rich would end the
    process. But Ctrl-C also ends a ``tee`` that gets the messages of a run, and the run still has to be saved; so it
    has if the disk of a log file is full."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError):  # a file without a descriptor
            discard([self.file.fileno()])


def discard(descriptors: Iterable[int]) -> None:
    """Let writes to these file descriptors have no effect."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)


def console(*, stderr: bool = False) -> Console:
    """Return a console on the present standard output (or error)."""
    made = _Messages(stderr=True, highlight=False) if stderr else Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 110  # rich assumes 80 columns for files and logs
    return made


def brief(number: float) -> str:
    """Return a number with three digits or, from 100 on, without decimals."""
    return f"{number:.3g}" if abs(number) < 100 else f"{number:,.0f}"


def visible(text: object) -> str:
    """Return a text in which control characters, but for line breaks and tabs, are written as ``\\x1b``. A terminal
    obeys such characters, and texts of another process may contain them."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", str(text))


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def toml_in(file: Path, where: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises UsageError, which begins with ``where``, if it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: cannot be read as TOML ({error})") from error


def writable(*paths: Path | None, folder: bool = False) -> None:
    """Check that files, or files in folders, can be written. Makes missing folders, and passes over None.

    Raises:
        UsageError: one cannot be written.
    """
    for path in filter(None, paths):
        try:
            if folder:
                _check_folder(path)
            else:
                _check_file(path)
        except OSError as error:
            raise UsageError(f"cannot write to {path}: {error.strerror or error}") from error


def _check_file(file: Path) -> None:
    number = descriptor(file)
    if number is not None:
        os.fstat(number)
    elif file.is_dir():
        raise IsADirectoryError("it is a folder")
    elif not file.exists() or file.is_file():
        _check_folder(_target(file).parent)
    elif not os.access(file, os.W_OK):  # a pipe or a device
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(f"{error.filename} is a file") from error
    with tempfile.TemporaryFile(dir=folder):
        pass


def descriptor(file: Path) -> int | None:
    """Return the descriptor of this process that a path such as ``/dev/stdout`` or ``/dev/fd/63`` names, if it does."""
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d{1,9})", str(file))
    return int(found[1]) if found else {"/dev/stdout": 1, "/dev/stderr": 2}.get(str(file))


def _target(file: Path) -> Path:
    """Return the file that a link names, or the file itself."""
    return Path(os.path.realpath(file))


def write_json(file: Path, value: Any) -> None:
    """Write a result as JSON, as :func:`write_text` does. NaN and infinities become null."""
    write_text(file, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text to a file, and make its folder.

    A regular file that exists, perhaps behind a link, is replaced once all is written. What is already open, such as
    ``/dev/stdout``, gets the text after what was written there.
    """
    with naming(file):
        number = descriptor(file)
        if number is not None or (file.exists() and not file.is_file()):
            with open(file if number is None else number, "w", encoding="utf-8", closefd=number is None) as stream:
                stream.write(text)
            return
        target = _target(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        try:
            part.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
        except OSError:
            part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Let errors have the name of a file, which Python gives to those of opening it, and not to those of writing."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def write_and_show(*files: tuple[Path | None, Callable[[Path], object]], show: Callable[[], object]) -> None:
    """Write the files of a result, and then show it, because a closed standard output ends the command.

    Each is done although an earlier one fails. The first error is raised in the end.

    Args:
        files: files, or None for those that are not wanted, and the functions that write them.
        show: prints the result.
    """
    errors: list[OSError | SymbiosisError | SystemExit] = []
    steps: list[Callable[[], object]] = [partial(write, file) for file, write in files if file is not None]
    for step in (*steps, show):
        try:
            step()
        except (OSError, SymbiosisError, SystemExit) as error:  # rich ends the process if its output is closed
            errors.append(error)
    if errors:
        raise errors[0]


def finite(value: Any) -> Any:
    """Return plain data with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the command line has an option, so that its value is no default and not from a file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


_TALKATIVE = ("bitsandbytes", "torchao", "torch.utils._pytree")
"""Loggers that warn of what a machine does not have whenever transformers finds torchao and bitsandbytes installed."""


class CommandGroup(typer.core.TyperGroup):
    """Commands whose expected errors end in one red line on standard error, without a traceback.

    Exit status: 0; 1 after an error of symbiosis; 2 for wrong arguments; 130 after Ctrl-C.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:
            if isinstance(error, PermissionError) and error.filename:
                _report(f"{error.filename}: {error.strerror}")
                sys.exit(1)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = error.filename or "standard output or a file of this command"
            _report(f"{where} could not be written: {error.strerror}")
            sys.exit(1)

    def invoke(self, ctx: Any) -> Any:
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            return super().invoke(ctx)
        except SymbiosisError as error:
            _report(error)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            console(stderr=True).print("interrupted")
            raise typer.Exit(130) from interrupt


def _report(error: object) -> None:
    console(stderr=True).print(f"[bold red]error:[/] [red]{escape(visible(error))}[/]", soft_wrap=True)
