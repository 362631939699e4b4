"""``symbiosis cluster`` and ``symbiosis submit``: executors and fine-tuning on a cluster of Ray."""

from __future__ import annotations

import contextlib
import json as json_module
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer
from rich.markup import escape
from rich.table import Table

from symbiosis.cli.options import options_of
from symbiosis.errors import UsageError
from symbiosis.terminal.console import console, visible
from symbiosis.terminal.signals import heeded

if TYPE_CHECKING:
    from symbiosis.cluster.manage import ClusterManager

app = typer.Typer(
    no_args_is_help=True, help="Run executors on several machines, which Ray places, watches and starts again."
)

RayOption = Annotated[
    str,
    typer.Option("--ray", envvar="RAY_ADDRESS", help="Address of Ray, host:port, or auto for the one on this host."),
]
WithinOption = Annotated[float, typer.Option(min=1, help="Seconds for the directory and new executors to start.")]


@contextlib.contextmanager
def _cluster(ray: str) -> Iterator[ClusterManager]:
    _needs_ray()
    from symbiosis.cluster.manage import ClusterManager

    err = console(stderr=True)
    manager = ClusterManager(ray, lambda line: err.print(escape(visible(line)), soft_wrap=True))
    try:
        with heeded(_interrupt):
            yield manager
    finally:
        manager.close()


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


def _needs_ray() -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UsageError("a cluster needs Ray; pip install 'symbiosis-peft[ray]'") from error


@app.command()
def up(
    config: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="Models, replicas and resources.", show_default=False)
    ],
    ray: RayOption = "auto",
    within: WithinOption = 600.0,
) -> None:
    """Start the executors that a file describes, and print the address of each model for tenants.

    If one executor cannot serve, the command ends all of them. So do Ctrl-C and SIGTERM before they serve.

    Example: symbiosis cluster up cluster.toml
    """
    from symbiosis.cli.cluster_config import read_plan

    plan = read_plan(config)
    with _cluster(ray) as cluster:
        from symbiosis.cluster import running

        cluster.up(plan, within)
        for model in plan.models:
            console().print(f"{model.name}: {escape(running.url(plan, model.name))}", soft_wrap=True)


@app.command()
def status(
    ray: RayOption = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the state as JSON.")] = False,
) -> None:
    """Show the executors of a cluster. Exit status 1 if one of them does not serve, or a model or part has none.

    Example: symbiosis cluster status --json
    """
    with _cluster(ray):
        from symbiosis.cluster import running

        state = running.status()
    if json:
        typer.echo(json_module.dumps(state))
    executors = [each for model in state["models"].values() for each in model["executors"]]
    for name, model in {} if json else state["models"].items():
        columns = ("name", "layers", "state", "node", "address", "error")
        table = Table(*columns, box=None, title=escape(f"{name}: {model['address']}"), title_justify="left")
        for each in model["executors"]:
            table.add_row(*(escape(visible(each[column])) for column in columns))
        console().print(table)
    if any(each["state"] != "serving" for each in executors):
        raise typer.Exit(1)


@app.command()
def scale(
    model: Annotated[str, typer.Argument(help="The model's name.", show_default=False)],
    replicas: Annotated[int, typer.Argument(min=1, help="Executors of each part of it.", show_default=False)],
    ray: RayOption = "auto",
    within: WithinOption = 600.0,
) -> None:
    """Start or end executors of a model. Tenants of executors that end move to the others.

    Example: symbiosis cluster scale llama 3
    """
    with _cluster(ray) as cluster:
        cluster.scale(model, replicas, within)


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Name or IP address of the node, or its id.", show_default=False)],
    ray: RayOption = "auto",
    within: WithinOption = 600.0,
) -> None:
    """Start the executors of a node elsewhere, and then end them there. Their tenants go on.

    Example: symbiosis cluster drain node-7
    """
    with _cluster(ray) as cluster:
        cluster.drain(node, within)


@app.command()
def down(ray: RayOption = "auto") -> None:
    """End all executors of a cluster, when walks have ended. Ctrl-C and SIGTERM end them at once.

    Example: symbiosis cluster down
    """
    with _cluster(ray) as cluster:
        cluster.down()


def submit(
    command: Annotated[
        list[str], typer.Argument(metavar="finetune …", help="The command, with its options.", show_default=False)
    ],
    ray: RayOption = "auto",
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs that Ray reserves for the run.")] = 1.0,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs that Ray reserves for the run.")] = 0.0,
    detach: Annotated[bool, typer.Option("--detach", help="Print the job's id, and do not wait for its end.")] = False,
) -> None:
    """Run symbiosis finetune as a job of Ray, which resumes at another node if its own is lost.

    Data, keys and the folder of --output are on a file system that all nodes share. Options of submit come before the
    word finetune. Ctrl-C stops waiting; the job goes on.

    Example: symbiosis submit finetune http://head:7070/llama --key alice.secret --data train.jsonl --output alice
    """
    from symbiosis.cli.finetune import finetune

    if command[0] != "finetune":
        raise UsageError(f"{command[0]!r} cannot be submitted; write symbiosis submit finetune ADDRESS …")
    parser = typer.Typer()
    parser.command()(finetune)
    parsed: Any = typer.main.get_command(parser).make_context("finetune", command[1:])
    if parsed.params["data"] is None and parsed.params["sweep"] is None:
        raise UsageError("--data is missing; give a file with training data")
    with _cluster(ray) as cluster:
        dashboard = f"http://{cluster.context.address_info['webui_url']}"
    from symbiosis.cluster import jobs

    given, key = parsed.params, parsed.params["key"]
    job = {
        "arguments": ["--job", uuid4().hex, *command[1:]],
        "folder": str(Path.cwd()),
        "address": _absolute(given["address"]),
        "options": options_of(key=None if key is None else str(Path(key).absolute()), insecure=given["insecure"]),
        "retry": given["retry"],
    }
    number = jobs.submit(dashboard, {**job, "num_cpus": num_cpus, "num_gpus": num_gpus})
    typer.echo(number)
    if detach:
        return
    err = console(stderr=True)
    try:
        succeeded, printed = jobs.wait(dashboard, number, err.print)
    except KeyboardInterrupt:
        output = escape(str(given["output"]))
        err.print(f"the job goes on, and logs its steps below {output}; ray job stop {number} ends it", soft_wrap=True)
        raise
    typer.echo(visible(printed).rstrip())
    if not succeeded:
        raise typer.Exit(1)


def _absolute(address: str) -> str:
    """Return an address whose path, if it is that of a list, does not depend on the working directory."""
    path = address.removeprefix("file://")
    return address if path == address else f"file://{Path(path).absolute()}"
