"""The file of ``symbiosis cluster up``: models, and what each of their executors needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from symbiosis.cli.config import checked, parameters_of, refuse_unknown
from symbiosis.cli.options import host_and_port
from symbiosis.cli.reload import limits_of
from symbiosis.cli.serve import serve
from symbiosis.cluster.plan import ClusterPlan, Model
from symbiosis.core.registry import make_policy
from symbiosis.errors import UsageError
from symbiosis.terminal.console import toml_in

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOT_HERE = {"listen", "layers", "config", "trace", "metrics", "log-format", "dist-backend", "limit", "help"}
"""Options of ``serve`` that the cluster gives itself, or that name one file for all executors."""


def _is_number(least: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value >= least


def _is_count(value: Any) -> bool:
    return _is_number(1)(value) and isinstance(value, int)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _is_labels(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


_OWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "replicas": (_is_count, "a whole number from 1 on"),
    "parts": (_is_texts, 'a list such as ["0-15", "16-31,lm_head"]'),
    "num-cpus": (_is_number(1e-4), "a number above 0"),  # Ray counts in steps of 0.0001
    "num-gpus": (_is_number(0), "a number from 0 on"),
    "memory": (_is_count, "a number of bytes"),
    "nodes": (_is_labels, 'a table of labels of nodes, such as { accelerator-type = "H100" }'),
}
"""Keys that ``serve`` does not have: what each value must be, and its description."""


def read_plan(file: Path) -> ClusterPlan:
    """Return what a file describes.

    A key above the tables ``[[model]]`` holds for each model that does not have it.

    Raises:
        UsageError: the file cannot be read, or a key or a value is wrong.
    """
    content = toml_in(file, str(file))
    tables = content.pop("model", None)
    if not isinstance(tables, list) or not tables or not all(isinstance(each, dict) for each in tables):
        raise UsageError(f'{file}: give each model a table [[model]], with name = "llama" and model = "FOLDER"')
    directory = str(content.pop("directory", "127.0.0.1:7070"))
    wrong = f"{file}: directory is {directory!r}; write HOST:PORT, such as 0.0.0.0:7070"
    host, port = host_and_port(directory, wrong, least=1)
    models = tuple(_model(f"{file}, model {number + 1}", {**content, **table}) for number, table in enumerate(tables))
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise UsageError(f"{file}: two models are called {max(names, key=names.count)}; give each a name of its own")
    return ClusterPlan(models, host, port)


def _model(where: str, table: Mapping[str, Any]) -> Model:
    command = _serve_command()
    parameters = parameters_of(command)
    for key in table:
        refuse_unknown(where, key, sorted({"limits", *_OWN, *(parameters.keys() - _NOT_HERE)}))
    own = {key: table[key] for key in _OWN if key in table}
    for key, value in own.items():
        right, what = _OWN[key]
        if not right(value):
            raise UsageError(f"{where}: {key} is {value!r}; give {what}")
    rest = {key: value for key, value in table.items() if key not in own}
    values = checked(where, rest, parameters, parameters.keys())
    name = str(values.get("name", ""))
    if "model" not in values or not _NAME.fullmatch(name):
        raise UsageError(
            f"{where}: give model, a folder or hub id, and name, of up to 64 of the characters A-Z a-z 0-9 . _ -"
        )
    arguments, context = [str(values.pop("model"))], typer.Context(command)
    try:
        for key, value in values.items():
            arguments += _options(parameters[key], value, context)
        command.make_context("serve", [*arguments, "--listen", "tcp://127.0.0.1:0"])
    except typer.BadParameter as error:
        raise UsageError(f"{where}: {error.format_message()}") from error
    make_policy(str(values.get("policy", "opportunistic")))
    limits_of(list(values.get("limit", ())))
    resources = {"CPU": own.get("num-cpus", 1), "GPU": own.get("num-gpus", 0), "memory": own.get("memory", 0)}
    return Model(
        name,
        tuple(arguments),
        tuple(own.get("parts", ())),
        own.get("replicas", 1),
        {kind: float(amount) for kind, amount in resources.items() if amount},
        own.get("nodes", {}),
    )


def _options(parameter: Any, value: str | list[str], context: typer.Context) -> list[str]:
    """Return an option of ``serve`` as the command line has it."""
    option = parameter.opts[0]
    if getattr(parameter, "is_flag", False):
        return [option] if parameter.process_value(context, value) else list(parameter.secondary_opts[:1])
    return [f"{option}={each}" for each in (value if isinstance(value, list) else [value])]


def _serve_command() -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    return typer.main.get_command(app)
