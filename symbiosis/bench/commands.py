"""``symbiosis bench``: measurements against plain transformers + PEFT, interleaved in one run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from symbiosis.bench.report import Report

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure against plain transformers + PEFT, interleaved in one run.")
console = Console()


class PresetName(StrEnum):
    """Sizes of the Llama-shaped model with random weights."""

    TINY = "tiny"
    M100 = "100m"
    B1 = "1b"


PresetOption = Annotated[PresetName, typer.Option(help="Model: tiny and 100m are fp32, 1b is bf16; random weights.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]
DeviceOption = Annotated[str, typer.Option(help="Device of base model and clients, such as cpu or cuda.")]
PolicyOption = Annotated[str, typer.Option(help="Batching policy, with options: opportunistic:wait_ms=20.")]
LayersOption = Annotated[
    str,
    typer.Option(help="What is served: linear, or mlp (whole MLPs as well, for tenants that adapt nothing inside)."),
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Measurements of each kind; medians are shown.")]


class TransportName(StrEnum):
    """Transports of a benchmark, in process or not."""

    INPROC = "inproc"
    SHM = "shm"
    TCP = "tcp"
    DIST = "dist"


class WireName(StrEnum):
    """Transports between processes."""

    SHM = "shm"
    TCP = "tcp"
    DIST = "dist"


TransportOption = Annotated[
    TransportName,
    typer.Option(help="inproc: clients in the executor's process; otherwise executor and clients in their own."),
]
PLAYED = {
    "policies": PresetName.B1,
    "mix": PresetName.B1,
    "fairness": PresetName.M100,
    "coserve": PresetName.M100,
}
"""Benchmarks that play a load, which takes long, and the preset of each in ``bench all``."""
COUNTS = {"serve": (1, 2, 4, 8, 16), "finetune": (1, 2, 4, 8)}


@app.command()
def overhead(
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 6,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    transport: TransportOption = TransportName.INPROC,
    json: JsonOption = None,
) -> None:
    """Measure one client against plain HF+PEFT: decode step and training step, with the paper's four LoRAs."""
    _show(_measure("overhead", preset, rounds, policy, base_layers, device, transport=transport.value), json)


@app.command()
def serve(
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 5,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "mlp",
    device: DeviceOption = "cpu",
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of clients at once; repeat for several.")
    ] = None,
    transport: TransportOption = TransportName.INPROC,
    json: JsonOption = None,
) -> None:
    """Measure 1 to 16 decoding clients: tokens/s against plain jobs in turn and against a mixed-adapter batch."""
    _show(_measure("serve", preset, rounds, policy, base_layers, device, clients, transport.value), json)


@app.command()
def wire(
    rounds: RoundsOption = 20,
    transport: Annotated[
        list[WireName] | None, typer.Option(help="Transport; repeat for several. By default all between processes.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure round trips of one row and of 1 MiB over each transport, against the raw echo of the same mechanism."""
    from symbiosis.terminal.loop import wait_passively

    wait_passively()
    with console.status("bench wire") as status:
        from symbiosis.bench.wire import wire as measure
        from symbiosis.terminal.loop import run

        report = run(
            measure(
                transports=tuple(name.value for name in transport or WireName),
                rounds=rounds,
                progress=lambda text: status.update(f"bench wire: {text}"),
            )
        )
    _show(report, json)


@app.command()
def schedule(
    rounds: RoundsOption = 5,
    policy: Annotated[list[str] | None, typer.Option(help="Policy; repeat for several. All by default.")] = None,
    clients: Annotated[list[int] | None, typer.Option(min=1, help="Number of clients; repeat for several.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure the CPU time of scheduling one request, for each policy, with 8, 100 and 1000 clients."""
    with console.status("bench schedule") as status:
        from symbiosis.bench.schedule import schedule as measure
        from symbiosis.core.registry import POLICIES, names
        from symbiosis.terminal.loop import run

        report = run(
            measure(
                policies=tuple(policy or names(POLICIES)),
                counts=tuple(clients or (8, 100, 1000)),
                rounds=rounds,
                progress=lambda text: status.update(f"bench schedule: {text}"),
            )
        )
    _show(report, json)


@app.command()
def finetune(
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 3,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of clients at once; repeat for several.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure 1 to 8 adapters trained at once: tokens/s and peak memory against as many plain jobs."""
    _show(_measure("finetune", preset, rounds, policy, base_layers, device, clients), json)


@app.command()
def memory(
    preset: PresetOption = PresetName.B1,
    lengths: Annotated[
        list[int] | None, typer.Option(min=2, help="Tokens in a sequence; repeat for several. 256 to 2048 by default.")
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="Tokens in a window.")] = 128,
    device: DeviceOption = "cpu",
    json: JsonOption = None,
) -> None:
    """Measure activations over sequence length: HF+PEFT, gradient checkpointing, pruned, in windows."""
    with console.status(f"bench memory {preset.value}") as status:
        import torch

        from symbiosis.bench.memory import memory as measure
        from symbiosis.bench.models import PRESETS

        report = measure(
            PRESETS[preset.value],
            device=torch.device(device),
            lengths=tuple(lengths or (256, 512, 1024, 2048)),
            window=window,
            progress=lambda text: status.update(f"bench memory {preset.value}: {text}"),
        )
    _show(report, json)


TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="CSV with arrival_s, ContextTokens, GeneratedTokens. By default a trace of that shape is generated."
    ),
]
MaybePolicyOption = Annotated[
    str, typer.Option(help="Policy in place of co-serving with the SLO that was measured first.")
]


@app.command()
def policies(
    trace: TraceOption = None,
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 2,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of clients at once; repeat for several.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure 8 and 32 clients with mixed adapters and lengths: no-lockstep, lockstep and opportunistic batching."""
    counts = tuple(clients or (8, 32))
    _show(_run("policies", preset, rounds, policy, base_layers, device, counts=counts, trace=_trace(trace)), json)


@app.command()
def mix(
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 3,
    policy: MaybePolicyOption = "",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    json: JsonOption = None,
) -> None:
    """Measure a small request beside a large one, and decoding beside fine-tuning."""
    _show(_run("mix", preset, rounds, policy, base_layers, device), json)


@app.command()
def coserve(
    trace: TraceOption = None,
    preset: PresetOption = PresetName.M100,
    rounds: RoundsOption = 2,
    policy: MaybePolicyOption = "",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            max=2.0,
            help="Load, as a part of the tokens/s of inference without pauses; repeat for several. By default 0.2, "
            "0.4, 0.6.",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure bursty inference beside fine-tuning, over load: co-serving and temporal sharing."""
    loads = {"loads": tuple(sorted(set(load)))} if load else {}
    _show(_run("coserve", preset, rounds, policy, base_layers, device, trace=_trace(trace), **loads), json)


@app.command()
def fairness(
    preset: PresetOption = PresetName.M100,
    rounds: RoundsOption = 3,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    json: JsonOption = None,
) -> None:
    """Measure a tenant that floods the executor beside three that do not, with fair sharing and without."""
    _show(_run("fairness", preset, rounds, policy, base_layers, device), json)


@app.command()
def privacy(
    preset: PresetOption = PresetName.M100,
    rounds: RoundsOption = 5,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    json: JsonOption = None,
) -> None:
    """Measure decode and training steps over tcp://, unmasked and under each privacy scheme, and the logits' error."""
    from symbiosis.terminal.loop import wait_passively

    wait_passively()
    _show(_run("privacy", preset, rounds, policy, base_layers, "cpu"), json)


def _trace(file: Path | None) -> Any:
    from symbiosis.simulation.trace import read_trace

    return None if file is None else read_trace(file, 1000)


@app.command("all")
def run_all(
    output: Annotated[Path, typer.Option(help="Markdown file; plots and JSON are written beside it.")] = Path(
        "docs/benchmarks.md"
    ),
    preset: Annotated[list[PresetName] | None, typer.Option(help="Model sizes; all by default.")] = None,
    device: DeviceOption = "cpu",
) -> None:
    """Run all benchmarks on all presets and write a page with tables and plots. Takes an hour and a half on 2 cores.

    Results of other presets from earlier runs, beside the page, stay in it.
    """
    from symbiosis.bench.page import write_page

    folder = output.parent / "benchmarks"
    work = [(folder / "wire.json", ["wire"]), (folder / "schedule.json", ["schedule"])]
    for name in preset or list(PresetName):
        size = ["--preset", name.value]
        for benchmark, rounds in (("overhead", 6), ("serve", 3), ("finetune", 2)):
            options = [benchmark, *size, "--rounds", str(rounds), "--device", device]
            work.append((folder / f"{name.value}-{benchmark}.json", options))
        for benchmark, chosen in PLAYED.items():
            if name is chosen:
                work.append((folder / f"{name.value}-{benchmark}.json", [benchmark, *size, "--device", device]))
        work.append((folder / f"{name.value}-privacy.json", ["privacy", *size]))
        work.append((folder / f"{name.value}-memory.json", ["memory", *size, "--device", device]))
        work.append((folder / f"{name.value}-overhead-shm.json", ["overhead", *size, "--transport", "shm"]))
        work.append(
            (
                folder / f"{name.value}-serve-shm.json",
                ["serve", *size, "--rounds", "2", "--transport", "shm"],
            )
        )
    for file, options in work:
        # Each in a process of its own, so that memory and OpenMP settings of one do not affect the next.
        subprocess.run([sys.executable, "-m", "symbiosis.cli.main", "bench", *options, "--json", str(file)], check=True)
        write_page(output)  # after each, so that an interrupted run keeps its results
    console.print(f"wrote {output}")


def _measure(
    benchmark: str,
    preset: PresetName,
    rounds: int,
    policy: str,
    base_layers: str,
    device: str,
    clients: list[int] | None = None,
    transport: str = "inproc",
) -> Report:
    if transport != "inproc":
        from symbiosis.terminal.loop import wait_passively

        wait_passively()
    options: dict[str, Any] = {}
    if benchmark != "finetune":
        options["transport"] = transport
    if benchmark in COUNTS:
        options["counts"] = tuple(
            clients or [count for count in COUNTS[benchmark] if transport == "inproc" or count <= 8]
        )
    return _run(benchmark, preset, rounds, policy, base_layers, device, **options)


def _run(
    benchmark: str, preset: PresetName, rounds: int, policy: str, base_layers: str, device: str, **options: Any
) -> Report:
    import importlib
    import warnings

    import torch

    # transformers warns of attributes that PEFT still uses.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

    from symbiosis.bench.models import PRESETS
    from symbiosis.bench.settings import Settings
    from symbiosis.terminal.loop import run

    measure: Callable[..., Awaitable[Report]] = getattr(
        importlib.import_module(f"symbiosis.bench.{benchmark}"), benchmark
    )
    with console.status(f"bench {benchmark} {preset.value}") as status:

        def progress(text: str) -> None:
            status.update(f"bench {benchmark} {preset.value}: {text}")

        settings = Settings(PRESETS[preset.value], torch.device(device), policy, base_layers, rounds, progress)

        async def main() -> Report:
            return await measure(settings, **options)

        return run(main())


def _show(report: Report, file: Path | None) -> None:
    report.print(console)
    if file is not None:
        report.save(file)
        console.print(f"wrote {file}")
