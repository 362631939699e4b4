"""``symbiosis serve`` and ``symbiosis status``: commands of the provider."""

from __future__ import annotations

import asyncio
import gc
import json as json_module
import os
import signal
from contextlib import AsyncExitStack, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError

from symbiosis.cli.config import ConfigOption
from symbiosis.cli.options import AddressArgument, InsecureOption, KeyOption, options_of
from symbiosis.core.budget import LEAST_BYTES
from symbiosis.core.registry import is_several, make_policy, make_transport
from symbiosis.errors import UsageError
from symbiosis.terminal.console import brief, console, visible, writable
from symbiosis.terminal.loop import allow_descriptors, run, wait_passively
from symbiosis.terminal.signals import endings, without_terminal

if TYPE_CHECKING:
    from symbiosis.cli.metrics import MetricsServer
    from symbiosis.cli.reload import Reloader

PRODUCTS = 128
"""Products whose code oneDNN keeps. A product is one layer's shape, one pass and one number of rows
(docs/decisions/0025-kept-products.md)."""

LOADING_ERRORS = (
    *(OSError, ValueError, RuntimeError, ImportError, AssertionError, EOFError),
    *(SafetensorError, UnpicklingError),
)
"""What transformers raises for a checkpoint that it cannot load. torch asserts that there is CUDA."""


_optional = partial(typer.Option, show_default=False)


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The base model: a folder or hub id.", show_default=False)],
    listen: Annotated[
        list[str],
        typer.Option(
            help="Address to listen on; repeat for several: shm:///path.sock, tcp://0.0.0.0:7000, dist://host:7001."
        ),
    ],
    policy: Annotated[
        str, typer.Option(help="Batching policy, with options; `symbiosis policies` lists them.")
    ] = "opportunistic",
    base_layers: Annotated[
        str, typer.Option(help="What is served: linear, mlp (whole MLPs as well), or a module name pattern.")
    ] = "linear",
    keys: Annotated[
        Path | None,
        typer.Option(help="Folder with the tenants' public keys, for tcp:// and dist://; see `symbiosis keys`."),
    ] = None,
    insecure: InsecureOption = False,
    limit: Annotated[
        list[str] | None,
        _optional(
            help="Limit of one client (calls, rows, arena_bytes) or of one tenant (clients), as name=number; repeat "
            "for several. docs/providers.md explains them."
        ),
    ] = None,
    dist_backend: Annotated[
        str | None, _optional(help="Backend of dist://: nccl (the default on CUDA) or gloo.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of the base model, such as cpu or cuda.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precision to serve in, such as bf16 (default: the checkpoint's).")
    ] = None,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Largest number of rows in a batch; larger requests are served in slices.")
    ] = 8192,
    max_bytes: Annotated[
        int,
        typer.Option(min=LEAST_BYTES, help="Bytes that all tenants in other processes may take beside the weights."),
    ] = 8 << 30,
    packed: Annotated[
        bool,
        typer.Option(
            help="On a CPU, pack weights for products of few rows. They take twice the memory while tenants "
            "train. docs/providers.md explains it."
        ),
    ] = True,
    allow_weights: Annotated[
        list[str] | None,
        _optional(
            help="Base layer, by name or pattern, whose weight tenants may have too, to train it in full "
            "(modules_to_save), such as lm_head; repeat for several."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        _optional(
            help="Serve a part of the base layers: blocks, ranges of them and names or patterns, such as "
            "0-15,lm_head. Other executors serve the others, whose weights are not kept. Tenants name all addresses."
        ),
    ] = None,
    shards: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes of this host that hold a part of each base layer; started by this command, or by torchrun.",
        ),
    ] = 1,
    keep_weights: Annotated[
        bool | None,
        _optional(
            help="Hand out no weights but embeddings, heads and small tensors. By default for all but shm:// and dist://."
        ),
    ] = None,
    name: Annotated[
        str | None,
        _optional(
            help="Name of the model for tenants, which their adapters state as their base model (default: the hub id, "
            "or the last part of the folder's path)."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        _optional(help="Write what runs when to this file, in place of an earlier trace, for ui.perfetto.dev."),
    ] = None,
    metrics: Annotated[
        str | None,
        _optional(
            help="HOST:PORT for Prometheus: /metrics, /health and /ready over HTTP. It shows the names of tenants to "
            "all who can connect."
        ),
    ] = None,
    log_format: Annotated[
        Literal["console", "json"], typer.Option(help="Format of events on standard error.")
    ] = "console",
    config: ConfigOption = None,
) -> None:
    """Serve a base model to tenants in other processes, until Ctrl-C or SIGTERM.

    SIGHUP has the file of --config read again: limits and max-bytes change, and connected tenants keep working. Without
    --config, it ends the executor like SIGTERM.

    Tenants receive the model's configuration, tokenizer, embeddings and norms, and need no checkpoint.

    Example: symbiosis serve ./llama --listen shm:///tmp/symbiosis.sock --policy opportunistic

    Example: symbiosis serve --config serve.toml --listen tcp://127.0.0.1:7000
    """
    early: list[int] = []
    if config is not None:
        signal.signal(signal.SIGHUP, lambda number, _: early.append(number))  # until it can be obeyed
    wait_passively(*listen)
    limit_products()
    if shards > 1 and int(os.environ.get("RANK", "0")):
        from symbiosis import Executor

        Executor.run_shard(model, shards=shards, device=device, dtype=dtype)
        return
    allow_descriptors()
    make_policy(policy)
    from symbiosis.cli.metrics import MetricsServer
    from symbiosis.cli.reload import Reloader, limits_of

    limits = {"limits": limits_of(limit or [])}
    network: dict[str, Any] = {**limits, "keys": keys, "insecure": insecure}
    options = {"shm": limits, "tcp": network, "dist": {**network, "backend": dist_backend}}
    addresses = {address: options_of(**options.get(address.partition(":")[0], {})) for address in listen}
    # The first port that is opened, so that no address has the same one.
    with nullcontext() if metrics is None else closing(MetricsServer(metrics)) as server:
        with ExitStack() as checked:
            for address, given in addresses.items():
                checked.enter_context(make_transport(address, **given).check(address))
        if trace is not None:
            writable(trace)
            if trace.is_file():
                with trace.open("rb") as file:
                    if file.read(2) not in (b"", b"[\n"):
                        raise UsageError(f"--trace {trace}: the file exists, and is no trace; choose another one")
        from symbiosis.log import render

        render(log_format == "json")
        run(
            _serve(
                model,
                addresses,
                keep_weights,
                trace,
                server,
                None if config is None else Reloader(context, early),
                policy=policy,
                base_layers=base_layers,
                device=device,
                dtype=dtype,
                max_rows=max_rows,
                max_bytes=max_bytes,
                packed=packed,
                allow_weights=allow_weights or (),
                layers=layers,
                shards=shards,
                model_name=name,
            )
        )


DRAIN_S = 15.0
"""Seconds for which walks may end after the first signal. Service managers wait longer before they kill a process
(systemd 90 s, Kubernetes 30 s; `docker stop` 10 s, unless told more). A walk that does not end in time loses nothing:
its calls are sent again."""


def limit_products() -> None:
    """Limit the products whose code torch and oneDNN keep, unless the user has set a limit.

    Both read these variables at the process's first product in bf16 or fp16. By default they keep 1,024, and clients
    choose how many there are: each number of rows makes new ones.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(PRODUCTS))


async def _serve(
    model: str,
    addresses: dict[str, dict[str, Any]],
    keep_weights: bool | None,
    trace: Path | None,
    metrics: MetricsServer | None,
    reloader: Reloader | None,
    **settings: Any,
) -> None:
    from symbiosis import Executor

    out = console(stderr=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    ends = [number for number in endings() if number != signal.SIGHUP or reloader is None]
    for number in ends:  # loading blocks the event loop, so a signal ends the process at once
        signal.signal(number, signal.default_int_handler)
    with out.status(f"loading {escape(model)}"):
        try:
            executor = Executor.from_pretrained(model, **settings)
        except LOADING_ERRORS as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"{model}: cannot be loaded; give a folder with a transformers model, or a hub id ({reason})"
            ) from error
    for number in ends:
        loop.add_signal_handler(number, without_terminal(lambda _: stop.set()), number)
    async with executor, AsyncExitStack() as stack:
        if trace is not None:
            stack.enter_context(executor.trace(trace))
        opened = [
            (await executor.listen(address, keep_weights=keep_weights, **options)).address
            for address, options in addresses.items()
        ]
        if metrics is not None:
            metrics.serve(executor)
        if reloader is not None:
            loop.add_signal_handler(signal.SIGHUP, reloader.apply, executor)
            if reloader.early:
                reloader.apply(executor)
        gc.freeze()  # a full collection would stop the executor for 0.2 s (docs/decisions/0013-garbage-collection.md)
        served = escape(f"({executor.status()['served_layers']}; {executor.device}) on {', '.join(opened)}")
        out.print(f"serving [bold]{escape(model)}[/] {served}", soft_wrap=True)
        for line in executor.sharing.lines():
            out.print(escape(line), soft_wrap=True)
        asked, closed = asyncio.create_task(stop.wait()), asyncio.create_task(executor.wait_closed())
        await asyncio.wait([asked, closed], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if closed.done():
            closed.result()  # raises the reason
        closed.cancel()
        out.print(f"shutting down when all walks have ended, in {DRAIN_S:g} s at most; a second signal ends at once")
        drained = asyncio.create_task(executor.drain(DRAIN_S))
        for number in ends:
            loop.add_signal_handler(number, without_terminal(lambda _: drained.cancel()), number)
        await asyncio.wait([drained])


def status(
    address: AddressArgument,
    key: KeyOption = None,
    insecure: InsecureOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the state as JSON.")] = False,
) -> None:
    """Show the model, the policy and the counts of one or several executors. Exit status 1 if one does not answer."""
    shown = make_transport(address, **options_of(key=key, insecure=insecure)).look(address).status
    if json:
        typer.echo(json_module.dumps(shown, default=repr))
    several = is_several(address)
    states = shown["replicas"] if several else {address: shown}
    for each, state in {} if json else states.items():
        table = Table(box=None, show_header=False, title=escape(each) if several else None, title_justify="left")
        for name, value in state.items():
            if name == "activity":  # `symbiosis top` shows it
                continue
            table.add_row(
                f"[bold]{escape(visible(name.replace('_', ' ')))}[/]", escape(visible(_text(value))) or "none"
            )
        console().print(table)
    if several and any("error" in state for state in states.values()):
        raise typer.Exit(1)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return brief(value) if isinstance(value, float) else str(value)
