"""The commands of ``symbiosis``. They import torch when they need it, so ``--help`` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from symbiosis._version import __version__
from symbiosis.bench.commands import app as bench
from symbiosis.bench.plan import plan
from symbiosis.bench.simulate import simulate
from symbiosis.cli.audit import audit
from symbiosis.cli.cluster import app as cluster
from symbiosis.cli.cluster import submit
from symbiosis.cli.compat import compat
from symbiosis.cli.demo.command import demo
from symbiosis.cli.finetune import finetune
from symbiosis.cli.generate import generate
from symbiosis.cli.keys import app as keys
from symbiosis.cli.policies import policies
from symbiosis.cli.serve import serve, status
from symbiosis.cli.top import top
from symbiosis.terminal.console import CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(serve)
app.command()(finetune)
app.command()(generate)
app.command()(status)
app.command()(top)
app.command()(policies)
app.command()(simulate)
app.command()(plan)
app.command()(audit)
app.command()(compat)
app.command(context_settings={"allow_interspersed_args": False})(submit)
app.add_typer(cluster, name="cluster")
app.add_typer(keys, name="keys")
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"symbiosis {__version__}")
        raise typer.Exit


@app.callback()
def symbiosis(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Many tenants fine-tune and serve their own PEFT adapters on one shared, frozen base model."""
