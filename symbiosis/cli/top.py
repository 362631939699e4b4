"""``symbiosis top``: what an executor, or each of several, does now."""

from __future__ import annotations

import contextlib
import json as json_module
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from symbiosis.cli.options import AddressArgument, InsecureOption, KeyOption, options_of
from symbiosis.core.registry import addresses_in, is_several, make_transport
from symbiosis.errors import BusyError, ConnectionLostError, ExecutorClosedError
from symbiosis.terminal.console import console, visible
from symbiosis.terminal.signals import heeded
from symbiosis.terminal.top import between, fitted, read, screen, view

AWAY = (BusyError, ConnectionLostError, ExecutorClosedError)
"""Errors of an executor that may return."""
States = dict[str, dict[str, Any]]
"""What each executor is or did, by address; of one that does not answer the ``error``."""


def top(
    address: AddressArgument,
    key: KeyOption = None,
    insecure: InsecureOption = False,
    interval: Annotated[float, typer.Option(min=0.5, max=86_400, help="Seconds between two updates.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show one interval, and exit. Exit status 1 if an executor is away.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each interval.")] = False,
) -> None:
    """Show what tenants and layers do now, and why requests share no batches, until Ctrl-C.

    Over tcp:// and dist:// with a key it shows your own tenant alone.

    Example: symbiosis top shm:///tmp/symbiosis.sock --once
    """
    transport = make_transport(address, **options_of(key=key, insecure=insecure))
    several, out = is_several(address), console()

    def look() -> States:
        try:
            shown = transport.look(address).status
        except AWAY as error:
            return {each: {"error": visible(error)} for each in addresses_in(address)}
        states = shown["replicas"] if several else {address: shown}
        return {
            each: {"error": visible(state["error"])} if "error" in state else read(state)
            for each, state in states.items()
        }

    print_all: Callable[[RenderableType], object] = out.print
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    with (
        heeded(stop),
        contextlib.suppress(KeyboardInterrupt),
        nullcontext(print_all) if once or json else screen(out) as show,
    ):
        states, before = look(), States()
        if out.is_terminal and not once and not json:
            # What was done since the start, until there is something newer.
            show(_shown(_done(states, before), out, once))
        while True:
            time.sleep(interval)
            states, before = look(), states
            done = _done(states, before)
            if json:
                typer.echo(json_module.dumps(done))
            else:
                show(_shown(done, out, once))
            if once:
                break
    if signals and (once or signals[0] != signal.SIGINT):
        raise typer.Exit(128 + signals[0])
    if once and any("error" in state for state in states.values()):
        raise typer.Exit(1)


def _done(states: States, before: States) -> States:
    """Return what each executor did between two states, or the error."""
    return {each: state if "error" in state else between(state, before.get(each)) for each, state in states.items()}


def _shown(done: States, out: Console, once: bool) -> RenderableType:
    away = "is away" if once else "is away; trying again"

    def show(past: dict[str, Any], each: str) -> RenderableType:
        if out.is_terminal and not once:
            return fitted(past, out, out.height // len(done), each)
        return view(past, each)

    return Group(
        *(
            Text(f"{each} {away}: {past['error']}") if "error" in past else show(past, each)
            for each, past in done.items()
        )
    )
