"""``--config FILE.toml``: arguments and options of a command from a file.

A key is the name of an argument, or of an option without its dashes, and a value means what it means on the command
line, where options win over the file. A table ``[limits]`` stands for ``--limit name=number``.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from symbiosis.errors import UsageError


def read(context: typer.Context, file: Path | None) -> Path | None:
    """Give the values of the file to the command, as its defaults, and return the file.

    Raises:
        UsageError: the file cannot be read, or a key or the form of a value is wrong.
    """
    if file is None:
        return None
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {file}: {getattr(error, 'strerror', None) or error}") from error
    parameters = {each.opts[0].lstrip("-"): each for each in context.command.params}
    known = sorted(({"limits"} | parameters.keys()) - {"limit", "config", "help"})
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            near = difflib.get_close_matches(key, known)
            raise UsageError(f"--config {file}: unknown key {key!r}; {_known(near or known)}")
        if key == "limits":
            if not isinstance(value, dict):
                raise UsageError(f"--config {file}: limits is a table: [limits], then lines such as calls = 64")
            key, value = "limit", [f"{name}={number}" for name, number in value.items()]
        elif isinstance(value, dict):
            raise UsageError(f"--config {file}: {key} is a table; give a value as on the command line")
        several = parameters[key].nargs != 1 or getattr(parameters[key], "multiple", False)
        if isinstance(value, list) is not bool(several):
            raise UsageError(f"--config {file}: {key} is {value!r}; give a {'list of texts' if several else 'value'}")
        # As text, so that the same values are refused as on the command line.
        defaults[parameters[key].name] = [str(each) for each in value] if several else str(value)
    context.default_map = defaults
    return file


def value_of(context: typer.Context, name: str) -> Any:
    """Return the value of an option after its file was read again: from the command line, the file, or the default.

    Raises:
        UsageError: the value in the file is not valid.
    """
    source = context.get_parameter_source(name)
    if source is not None and source.name == "COMMANDLINE":
        return context.params[name]
    (parameter,) = (each for each in context.command.params if each.name == name)
    try:
        return parameter.process_value(context, parameter.get_default(context))
    except typer.BadParameter as error:
        raise UsageError(f"--config: {parameter.opts[0].lstrip('-')}: {error.format_message()}") from error


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
