"""``--config FILE.toml``: arguments and options of a command from a file.

A key is the name of an argument, or of an option without its dashes, and a value means what it means on the command
line, where options win over the file. A value that is not valid is refused in either case. A table ``[limits]`` stands
for ``--limit name=number``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from symbiosis.errors import UsageError
from symbiosis.terminal.console import is_given, toml_in

LARGEST = 10**18
"""Largest number in a file; Python writes none of some thousand digits as text."""


def read(context: typer.Context, file: Path | None) -> Path | None:
    """Give the values of the file to the command, as its defaults, and return the file.

    Raises:
        UsageError: the file cannot be read, or a key or the form of a value is wrong.
    """
    if file is None:
        return None
    content = toml_in(file, f"--config {file}")
    parameters = parameters_of(context.command)
    where = f"--config {file}"
    values = checked(where, content, parameters, parameters.keys() - {"limit", "config", "help"})
    # The command line perhaps has a list in place of an empty one.
    converted(context, where, parameters, {key: value for key, value in values.items() if value})
    context.default_map = {parameters[key].name: value for key, value in values.items()}
    return file


def parameters_of(command: Any) -> dict[str, Any]:
    """Return the arguments and options of a command, by their keys in a file."""
    return {each.opts[0].lstrip("-"): each for each in command.params}


def checked(
    where: str, content: Mapping[str, Any], parameters: Mapping[str, Any], known: Iterable[str]
) -> dict[str, str | list[str]]:
    """Return the values of a table for a command, as texts, so that the same values are refused as on the command line.

    Args:
        where: names the table in errors.
        known: the keys that the table may have, beside ``limits`` for a command with that option.

    Raises:
        UsageError: a key or the form of a value is wrong.
    """
    known = sorted({*known, *(["limits"] if "limit" in parameters else [])})
    values: dict[str, str | list[str]] = {}
    for key, value in content.items():
        refuse_unknown(where, key, known)
        numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if any(isinstance(each, int) and abs(each) > LARGEST for each in numbers):
            raise UsageError(f"{where}: {key} has a number of more than 18 digits")
        if key == "limits":
            if not isinstance(value, dict):
                raise UsageError(f"{where}: limits is a table: [limits], then lines such as calls = 64")
            key, value = "limit", [f"{name}={number}" for name, number in value.items()]
        elif isinstance(value, dict):
            raise UsageError(f"{where}: {key} is a table; give a value as on the command line")
        several = parameters[key].nargs != 1 or getattr(parameters[key], "multiple", False)
        if isinstance(value, list) is not bool(several):
            raise UsageError(f"{where}: {key} is {value!r}; give a {'list of texts' if several else 'value'}")
        values[key] = [str(each) for each in value] if several else str(value)
    return values


def converted(
    context: typer.Context, where: str, parameters: Mapping[str, Any], values: Mapping[str, str | list[str]]
) -> dict[str, Any]:
    """Return values of :func:`checked` as the command gets them, by the names of its parameters.

    Raises:
        UsageError: the command does not take a value.
    """
    found = {}
    for key, value in values.items():
        try:
            found[parameters[key].name] = parameters[key].process_value(context, value)
        except typer.BadParameter as error:
            raise UsageError(f"{where}: {key} = {value}: {error.message}") from error
    return found


def refuse_unknown(where: str, key: str, known: Sequence[str], what: str = "key") -> None:
    """Raise UsageError for a key that is not known, with those that were perhaps meant."""
    if key not in known:
        near = difflib.get_close_matches(key, known)
        raise UsageError(f"{where}: unknown {what} {key!r}; {_known(near or list(known))}")


def value_of(context: typer.Context, name: str) -> Any:
    """Return the value of an option after its file was read again: from the command line, the file, or the default."""
    if is_given(context, name):
        return context.params[name]
    (parameter,) = (each for each in context.command.params if each.name == name)
    return parameter.process_value(context, parameter.get_default(context))


def _known(keys: list[str]) -> str:
    return f"did you mean {' or '.join(keys)}?" if len(keys) <= 3 else f"known are {', '.join(keys)}"


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        callback=read,
        is_eager=True,
        metavar="FILE.toml",
        help="File with arguments and options, by their names; those on the command line win.",
        show_default=False,
    ),
]
