"""``symbiosis simulate``: policies on a simulated load, without a GPU and without waiting."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from symbiosis.bench.commands import LayersOption, PresetName
from symbiosis.core.registry import make_policy
from symbiosis.errors import UsageError
from symbiosis.terminal.console import PLOTS, brief, console, is_given, toml_in, writable, write_and_show, write_json
from symbiosis.terminal.loop import run
from symbiosis.terminal.progress import Steps

if TYPE_CHECKING:
    from symbiosis.bench.check import Checked
    from symbiosis.bench.settings import Settings
    from symbiosis.simulation.costs import Costs
    from symbiosis.simulation.outcome import SLO, LoadOutcome
    from symbiosis.simulation.replay import Place, ReplayedLoad


ROUNDS = 5
"""Rounds of simulating and playing a load, with ``--check``."""
RATES = {
    "tokens_per_s": "tokens/s",
    "finetune_per_s": "tuning\ntokens/s",
    "slo_attainment": "SLO\nkept",
    "mean_batch": "mean\nbatch",
    "fairness": "fairness",
}
TIMES = {
    "token_p50": "token\np50 ms",
    "token_p99": "token\np99 ms",
    "first_mean": "first token\nmean ms",
    "first_p99": "first token\np99 ms",
}


def simulate(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="CSV with the columns arrival_s, ContextTokens, GeneratedTokens, such as Azure's traces of LLM "
            "inference. By default a load is generated."
        ),
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(
            help="Load to generate: chat, code, rag, agents, burst or steady, with parameters such as "
            "code:rate=4,variation=5. By default chat; with --grid all six, and repeat to choose."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Batching policy, with options; repeat to compare. By default four. co-serving without options aims "
            "at --slo-ms and --ttft-ms."
        ),
    ] = None,
    machine: Annotated[
        Literal["a100", "h100", "here"],
        typer.Option(help="Costs of base layers: a GPU by its data sheet, or measured here on a preset."),
    ] = "a100",
    model: Annotated[
        str,
        typer.Option(
            help="Model on a GPU: llama-3.1-8b, llama-2-13b, qwen2.5-14b, qwen2.5-32b, gemma-2-27b, or a folder with a "
            "config.json."
        ),
    ] = "llama-3.1-8b",
    preset: Annotated[PresetName, typer.Option(help="With --machine here: model to measure.")] = PresetName.TINY,
    base_layers: LayersOption = "linear",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Largest number of requests of the trace. By default 200, with --grid 40.")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="Factor for the speed of the trace.")] = 1.0,
    lengths: Annotated[float, typer.Option(min=1e-6, help="Factor for the lengths of the trace, in tokens.")] = 1.0,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of clients that share the requests in turn. By default each request is a client."
        ),
    ] = None,
    paced: Annotated[
        bool, typer.Option(help="Requests arrive at the times of the trace; otherwise as soon as their client is free.")
    ] = True,
    finetune: Annotated[int, typer.Option(min=0, help="Number of clients that fine-tune meanwhile.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Tokens of a fine-tuning step.")] = 512,
    executors: Annotated[
        int, typer.Option(min=1, help="Number of executors of the same base model; clients are spread over them.")
    ] = 1,
    placement: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="TOML file with executors, their layers, machines and links; see docs/plan.md.",
        ),
    ] = None,
    slo_ms: Annotated[float, typer.Option(min=1e-3, help="Latency target for each token, in milliseconds.")] = 75.0,
    ttft_ms: Annotated[
        float, typer.Option(min=1e-3, help="Latency target for the first token, in milliseconds.")
    ] = 5000.0,
    seed: Annotated[int, typer.Option(help="Seed of a generated load; with --grid, of the first one.")] = 0,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid",
            help="Compare the first policy with the others over many loads, in parallel: each load at three rates on "
            "two machines, with and without fine-tuning. By default co-serving with temporal sharing and "
            "opportunistic batching.",
        ),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="With --grid: number of seeds of each load.")] = 1,
    random: Annotated[
        int,
        typer.Option(min=0, help="With --grid: number of loads with random parameters, in place of the named ones."),
    ] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="With --machine here: also play the load on a real executor, interleaved, and compare."
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the result to this file: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Simulate a load on the scheduler and policies of the executor, and show what clients would see.

    Examples:

        symbiosis simulate trace.csv --speed 2 --finetune 2

        symbiosis simulate --policy co-serving:slo_ms=50 --policy temporal:every=64 --finetune 2 --plot policies.png

        symbiosis simulate --machine here --requests 24 --lengths 0.05 --clients 8 --no-paced --check
    """
    from symbiosis.simulation.clock import Clock
    from symbiosis.simulation.costs import roofline
    from symbiosis.simulation.loads import arrivals, make_shape
    from symbiosis.simulation.outcome import SLO
    from symbiosis.simulation.replay import ReplayedLoad, replicas
    from symbiosis.simulation.trace import read_trace, scaled

    _check_options(context)
    co_serving = f"co-serving:slo_ms={slo_ms:g},ttft_ms={ttft_ms:g}"
    policy = [re.sub(r"(^|\+)co-serving$", rf"\g<1>{co_serving}", spec) for spec in policy or []]
    if grid:
        _grid(
            policy, co_serving, load or [], seeds, seed, random, SLO(slo_ms, ttft_ms), requests or 40, rows, json, plot
        )
        return
    policies = policy or ["no-lockstep", "lockstep", "opportunistic", co_serving]
    for spec in policies:
        make_policy(spec)  # report mistakes before the work
    requests = requests or 200
    found = read_trace(trace, requests) if trace else arrivals(make_shape((load or ["chat"])[0]), requests, seed)
    if check and any(arrival.slo != 1 for arrival in found):
        raise UsageError("--check plays one SLO for all clients; leave patient out of --load")
    played = ReplayedLoad(scaled(found, speed=speed, lengths=lengths), clients, paced, finetune, rows)
    slo = SLO(slo_ms, ttft_ms)
    results: dict[str, LoadOutcome] = {}
    real: dict[str, LoadOutcome] = {}
    if check:
        checked = _check(policies, preset.value, base_layers, played, slo)
        results = {spec: predicted for spec, (predicted, _) in checked.items()}
        real = {spec: played for spec, (_, played) in checked.items()}
        costs_text = f"{preset.value}, measured here; medians of {ROUNDS} rounds"
    else:
        if placement is not None:
            costs, place = _placed(placement, model)
        else:
            here = machine == "here"
            costs = _calibrate(preset.value, base_layers, played) if here else roofline(machine, model)
            place = replicas(costs, executors)
        for spec in policies:
            place(Clock(), partial(make_policy, spec))  # report a latency target that cannot be met
        results = {spec: _predict(spec, costs, played, slo, place) for spec in policies}
        costs_text = costs.text
    served = {"placement": str(placement)} if placement is not None else {"executors": executors}
    write_and_show(
        (json, lambda file: write_json(file, served | _as_data(costs_text, played, results, real))),
        (plot, lambda file: _plot(file, results, slo)),
        show=lambda: _show(costs_text, played, executors, results, real),
    )


def _check_options(context: typer.Context) -> None:
    """Check the options before any work.

    Raises:
        UsageError: an option is invalid, or has no effect beside the other options.
    """
    given = context.params
    here = given["machine"] == "here"
    if given["check"] and not here:
        raise UsageError(
            "--check plays the load to a real executor, so the costs must be measured here: --machine here"
        )
    for name in ("executors", "placement"):
        if given["check"] and given[name] not in (1, None):
            raise UsageError(f"--check plays the load to one executor; leave --{name} out")
    if given["grid"]:
        fixed = ("trace", "machine", "model", "placement", "executors", "speed", "lengths", "clients", "paced")
        for name in (*fixed, "finetune", "check"):
            if is_given(context, name):
                raise UsageError(f"--grid has loads, machines and numbers of clients of its own; leave {name} out")
        if given["random"] and given["load"]:
            raise UsageError("--random replaces the named loads; leave --load out")
    elif len(given["load"] or []) > 1:
        raise UsageError("--load may be repeated with --grid only")
    means_nothing = {
        "load": "the trace has its own requests" if given["trace"] else "",
        "seed": "the trace is not generated" if given["trace"] else "",
        "seeds": "it is for --grid" if not given["grid"] else "the loads are random" if given["random"] else "",
        "random": "it is for --grid" if not given["grid"] else "",
        "model": "the costs are measured here; --preset chooses the model" if here else "",
        "machine": "the file has its machines" if given["placement"] else "",
        "executors": "the file has its executors" if given["placement"] else "",
        "preset": "it is for --machine here" if not here else "",
        "base_layers": "it is for --machine here" if not here else "",
        "speed": "--no-paced leaves the times of the trace out" if not given["paced"] else "",
        "rows": "no client fine-tunes; give --finetune too" if not given["finetune"] and not given["grid"] else "",
    }
    for name, why in means_nothing.items():
        if why and is_given(context, name):
            raise UsageError(f"--{name.replace('_', '-')} has no effect here: {why}")
    for name in ("speed", "lengths", "slo_ms", "ttft_ms"):
        if not given[name] < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} is {given[name]}; it must be a finite number")
    policies = given["policy"] or []
    for spec in policies:
        if policies.count(spec) > 1:
            raise UsageError(f"--policy {spec} is given {policies.count(spec)} times; give it once")
    writable(given["json"], given["plot"])
    if given["plot"] is not None and given["plot"].suffix not in PLOTS:
        raise UsageError(f"--plot {given['plot']}: give a file that ends in {', '.join(PLOTS)}")


def _grid(
    policies: list[str],
    co_serving: str,
    loads: list[str],
    seeds: int,
    first: int,
    random_loads: int,
    slo: SLO,
    requests: int,
    rows: int,
    json: Path | None,
    plot: Path | None,
) -> None:
    from symbiosis.bench import grid
    from symbiosis.simulation.replay import told
    from symbiosis.terminal.machine import machine

    compared = policies or [co_serving, *grid.POLICIES]
    cells = list(grid.cells(loads, seeds, first, random_loads))
    for spec in compared:
        for cell in cells:
            costs = cell.costs()
            told(make_policy(spec), costs.walk, costs.batch)  # report mistakes and unreachable targets before the work
    text = f"{len(cells)} loads, {len(compared)} policies"
    with Steps(console(stderr=True)) as steps:
        found = grid.run(cells, compared, slo, requests, rows, partial(steps, text))
    if not found:
        raise KeyboardInterrupt
    loads_data = [
        {
            "load": row.cell.text(),
            **asdict(row.cell),
            "bound": row.bound._asdict(),
            "policies": {spec: asdict(outcome) for spec, outcome in row.outcomes.items()},
            "holds": row.holds(compared[0]),
        }
        for row in found
    ]
    write_and_show(
        (json, lambda file: write_json(file, {"loads": loads_data, "means": grid.means(found), "machine": machine()})),
        (plot, lambda file: grid.plot(file, found)),
        show=lambda: console().print(grid.table(found, compared[0]), grid.summary(found)),
    )
    if len(found) < len(cells):
        console(stderr=True).print(f"interrupted: these are {len(found)} of {len(cells)} loads")
        raise typer.Exit(130)


def _calibrate(preset: str, base_layers: str, load: ReplayedLoad) -> Costs:
    from symbiosis.bench.calibrate import calibrate

    with console().status("measuring") as status:
        return run(calibrate(_settings(preset, base_layers, 1, lambda text: status.update(f"measuring: {text}")), load))


def _check(policies: list[str], preset: str, base_layers: str, load: ReplayedLoad, slo: SLO) -> dict[str, Checked]:
    from symbiosis.bench.check import check

    with console().status("measuring") as status:
        settings = _settings(preset, base_layers, ROUNDS, status.update)
        return run(check(settings, {spec: partial(make_policy, spec) for spec in policies}, load, slo))


def _settings(preset: str, base_layers: str, rounds: int, progress: Callable[[str], None]) -> Settings:
    import torch

    from symbiosis.bench.models import PRESETS
    from symbiosis.bench.settings import Settings

    return Settings(PRESETS[preset], torch.device("cpu"), "", base_layers, rounds, progress)


def _placed(file: Path, model: str) -> tuple[Costs, Place]:
    """Return the costs of a model, and its executors as a file places them.

    Raises:
        UsageError: the file is invalid, or its machines cannot hold the model.
    """
    from symbiosis.simulation.costs import shape_of
    from symbiosis.simulation.machines import read_fleet, read_placement
    from symbiosis.simulation.placement import SimulatedModel, TenantWork, fits, needs, place

    data = toml_in(file, f"--placement {file}")
    base, fleet = SimulatedModel.of(shape_of(model)), read_fleet(data)
    found = read_placement(data, fleet, base.shape.blocks)
    nothing = TenantWork(decode=0, finetune=0, context=0, rows=0, rank=0)  # what tenants hold is not simulated
    if problem := fits(fleet, needs(fleet, base, nothing, found)):
        raise UsageError(f"--placement {file}: {model} does not fit: {problem}")
    costs = base.costs(fleet.machines[found.home].device)
    return replace(costs, text=f"{model}, {found.text()} of {file.name}"), place(fleet, found, base)


def _predict(spec: str, costs: Costs, load: ReplayedLoad, slo: SLO, place: Place) -> LoadOutcome:
    from symbiosis.simulation.replay import replay

    with Steps(console(stderr=True)) as steps:
        return replay(
            lambda: make_policy(spec),
            costs,
            load,
            slo,
            place=place,
            progress=lambda done: steps(spec, round(100 * done), 100),
        )


def _show(
    costs: str, load: ReplayedLoad, executors: int, results: dict[str, LoadOutcome], real: dict[str, LoadOutcome]
) -> None:
    """Print two tables, so that all figures fit in 80 columns."""
    where = costs if executors == 1 else f"{executors} executors, each {costs}"
    title = f"{len(load.trace)} requests, {load.tuning} fine-tuning clients; {where}"
    console().print(_table(RATES, results, real, title), _table(TIMES, results, real))


def _table(
    columns: dict[str, str], results: dict[str, LoadOutcome], real: dict[str, LoadOutcome], title: str | None = None
) -> Table:
    """Return a table with one row per policy. On a narrow terminal the names are folded and no figure is cut."""
    table = Table(title=title, title_justify="left")
    table.add_column("policy", overflow="fold")
    for heading in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for spec, predicted in results.items():
        table.add_row(escape(spec), *(_text(getattr(predicted, name)) for name in columns))
        if spec in real:
            table.add_row("  for real", *(_text(getattr(real[spec], name)) for name in columns), style="bold")
            ratios = (_ratio(getattr(predicted, name), getattr(real[spec], name)) for name in columns)
            table.add_row("  predicted / real", *ratios, style="dim")
    return table


def _ratio(predicted: float, real: float) -> str:
    return f"{predicted / real:.2f}" if real and predicted == predicted and real == real else ""


def _text(value: float) -> str:
    return "" if value != value else brief(value)


def _as_data(
    costs: str, load: ReplayedLoad, results: dict[str, LoadOutcome], real: dict[str, LoadOutcome]
) -> dict[str, Any]:
    from symbiosis.terminal.machine import machine

    return {
        "costs": costs,
        "requests": len(load.trace),
        "finetune": load.tuning,
        "machine": machine(),
        "policies": {
            spec: {"predicted": asdict(found), **({"real": asdict(real[spec])} if spec in real else {})}
            for spec, found in results.items()
        },
    }


def _plot(file: Path, results: dict[str, LoadOutcome], slo: SLO) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="tight")
    axes = figure.subplots(1, 3)
    names = list(results)
    for axis, (title, fields) in zip(
        axes,
        (
            ("tokens a second", ("tokens_per_s", "finetune_per_s")),
            ("time for a token, ms", ("token_p50", "token_p99")),
            ("time to the first token, ms", ("first_mean", "first_p99")),
        ),
        strict=True,
    ):
        for offset, name in enumerate(fields):
            values = [getattr(results[spec], name) for spec in names]
            axis.barh([place + 0.4 * offset for place in range(len(names))], values, 0.38, label=name.replace("_", " "))
        axis.set_yticks([place + 0.2 for place in range(len(names))], names if axis is axes[0] else [""] * len(names))
        axis.invert_yaxis()
        axis.set_title(title)
        axis.legend(fontsize=8)
    axes[1].axvline(slo.token_ms, color="black", linestyle=":")
    axes[2].axvline(slo.first_ms, color="black", linestyle=":")
    figure.savefig(file, dpi=120)
