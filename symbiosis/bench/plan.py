"""``symbiosis plan``: which placements of a model fit on machines, and which is the fastest in simulation."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from symbiosis.core.registry import make_policy
from symbiosis.errors import UsageError
from symbiosis.terminal.console import console, toml_in, writable, write_and_show, write_json

if TYPE_CHECKING:
    from symbiosis.simulation.machines import Fleet
    from symbiosis.simulation.plan import Candidate, Rates

_TENANTS = re.compile(r"(\d{1,9})\s+(decode|finetune)$")
_MOST = 1_000_000
_GIB = 1 << 30


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder with the config.json of a dense model such as Llama, or llama-3.1-8b, llama-2-13b, "
            "qwen2.5-14b, qwen2.5-32b or gemma-2-27b. Weights are taken to be in bf16."
        ),
    ],
    machines: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="TOML file with the machines and the links between them; see docs/plan.md.",
        ),
    ],
    tenants: Annotated[
        str, typer.Option(help="Numbers of tenants that generate and that fine-tune.")
    ] = "8 decode, 2 finetune",
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache of a tenant that generates.")] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Tokens of a fine-tuning step.")] = 512,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA of each tenant, on the attention layers.")] = 8,
    clients: Annotated[
        str | None,
        typer.Option(help="Machine on which tenants compute. By default the one that has their first layers."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Batching policy, with options.")] = "opportunistic",
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
) -> None:
    """Show the placements of a model on some machines: one executor, replicas, parts of the layers, shards of the
    weights, and combinations of these.

    Rates come from a simulation with the figures of the machines, in which all tenants work without pause. Memory
    follows from the shapes of the model; activations are an estimate.

    Examples:

        symbiosis plan llama-3.1-8b --machines machines.toml --tenants "8 decode, 2 finetune"

        symbiosis plan ./my-llama --machines machines.toml --tenants "100 decode" --clients workers
    """
    from symbiosis.simulation.costs import shape_of
    from symbiosis.simulation.machines import read_fleet
    from symbiosis.simulation.placement import SimulatedModel, TenantWork
    from symbiosis.simulation.plan import plan as placements

    writable(json)
    make_policy(policy)  # report mistakes before the work
    counts = _counts(tenants)
    fleet = read_fleet(toml_in(machines, f"--machines {machines}"))
    if clients is not None and clients not in fleet.machines:
        raise UsageError(f"--clients {clients}: there is no such machine; there are {', '.join(fleet.machines)}")
    work = TenantWork(counts["decode"], counts["finetune"], context, rows, rank)
    base = SimulatedModel.of(shape_of(model))
    with console().status("simulating") as status:
        found = placements(
            fleet, base, work, lambda: make_policy(policy), clients, lambda text: status.update(f"simulating {text}")
        )
    told = {"model": model, "tenants": asdict(work), "simulated": True, "placements": _data(found)}
    write_and_show((json, lambda file: write_json(file, told)), show=lambda: _show(model, tenants, fleet, found))


def _counts(text: str) -> dict[str, int]:
    """Return the numbers of tenants in a text such as ``8 decode, 2 finetune``.

    Raises:
        UsageError: the text has another form.
    """
    counts = {"decode": 0, "finetune": 0}
    for part in text.split(","):
        found = _TENANTS.match(part.strip())
        if not found or counts[found[2]] or not 1 <= int(found[1]) <= _MOST:
            raise UsageError(f'--tenants {text!r}: write numbers from 1 to {_MOST}, such as "8 decode, 2 finetune"')
        counts[found[2]] = int(found[1])
    return counts


def _show(model: str, tenants: str, fleet: Fleet, found: list[Candidate]) -> None:
    table = Table(title=f"{escape(model)}, {escape(tenants)}; rates are simulated", title_justify="left")
    for heading in (
        "placement",
        "tokens/s",
        "ms a\ntoken",
        "tuning\ntokens/s",
        "fullest\ndevice",
        "KiB a token\nover links",
    ):
        table.add_column(heading, justify="left" if heading == "placement" else "right", overflow="fold")
    for each in found:
        if each.rates is not None:
            table.add_row(
                each.placement.text(),
                *_rates(each.rates),
                _fullest(fleet, each),
                f"{sum(each.traffic.values()) / 1024:,.0f}" if each.traffic else "",
            )
    if found[0].rates is not None:
        console().print(table, _details(fleet, found[0]))
    for each in found:
        if each.problem is not None:
            console().print(f"{each.placement.text()} is left out: {escape(each.problem)}")


def _rates(rates: Rates) -> list[str]:
    decode = [f"{rates.decode_per_s:,.0f}", f"{rates.token_ms:.1f}"] if rates.decode_per_s else ["", ""]
    return [*decode, f"{rates.finetune_per_s:,.0f}" if rates.finetune_per_s else ""]


def _fullest(fleet: Fleet, candidate: Candidate) -> str:
    """Return the memory of the device that is the fullest, and how much it has."""
    parts = [
        (sum(device.values()) / fleet.machines[name].memory_bytes, sum(device.values()), fleet.machines[name])
        for name, devices in candidate.memory.items()
        for device in devices
    ]
    _, size, machine = max(parts, key=lambda part: part[0])
    return f"{size / _GIB:,.1f} of {machine.memory_bytes / _GIB:,.0f} GiB"


def _details(fleet: Fleet, candidate: Candidate) -> Table:
    """Return what each device of the fastest placement holds, and what a token sends over which link."""
    purposes = list(dict.fromkeys(name for devices in candidate.memory.values() for each in devices for name in each))
    table = Table(title=f"{candidate.placement.text()}: GiB of each device", title_justify="left")
    table.add_column("device", overflow="fold")
    for purpose in (*purposes, "total", "of"):
        table.add_column(purpose, justify="right")
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, devices in candidate.memory.items():
        for number, device in enumerate(devices):
            sizes = [device.get(purpose, 0.0) for purpose in purposes]
            total = [*sizes, sum(sizes), fleet.machines[name].memory_bytes]
            label = f"{name}, {number}" if fleet.machines[name].devices > 1 else name
            alike.setdefault(tuple(f"{size / _GIB:,.2f}" for size in total), []).append(label)
    for texts, labels in alike.items():
        others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        table.add_row(escape(labels[0]) + others, *texts)
    sent = [f"{one} – {other} {size / 1024:,.0f} KiB" for (one, other), size in candidate.traffic.items()]
    table.caption = f"A decoded token sends {', '.join(sent)}." if sent else "A decoded token sends nothing over links."
    table.caption_justify = "left"
    return table


def _layers(blocks: range, last: range) -> str:
    """Return an executor's part of a model, as ``serve --layers`` and a placement's file take it."""
    return f"{blocks.start}-{blocks.stop - 1}{',lm_head' * (blocks == last)}"


def _data(found: list[Candidate]) -> list[dict[str, Any]]:
    return [
        {
            "placement": each.placement.text(),
            "executors": [
                {
                    "machine": site.machine,
                    "layers": _layers(site.blocks, each.placement.sites()[-1].blocks),
                    "shards": site.shards,
                }
                for site in each.placement.sites()
            ],
            "left_out": each.problem,
            "memory_bytes": each.memory,
            "bytes_per_token": [{"between": pair, "bytes": size} for pair, size in each.traffic.items()],
            "rates": None if each.rates is None else asdict(each.rates),
        }
        for each in found
    ]
