"""Bursty inference with fine-tuning beside it: co-serving against temporal sharing, over load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from statistics import median

import torch

import symbiosis
from symbiosis.bench.models import Preset, build
from symbiosis.bench.replay import Crowd
from symbiosis.bench.report import Report
from symbiosis.simulation.outcome import SLO, Outcome
from symbiosis.simulation.replay import Load
from symbiosis.simulation.trace import Arrival, scaled, synthetic

__all__ = ["coserve"]

GOALS = {"slo_attainment": "≥ 0.90", "finetune_kept": "≥ 0.76 of its peak"}
LENGTHS = {"tiny": 0.1, "100m": 0.04, "1b": 0.03}
CLIENTS, TUNING = 8, 1
REQUESTS = 32
LOADS = (0.2, 0.4, 0.6)
"""Of the tokens a second that the same clients get without a pause and without fine-tuning."""
SLO_FACTOR = 3.0
"""Of the time for a token with one client and nothing else."""


async def coserve(
    preset: Preset,
    *,
    device: torch.device,
    policy: str,
    base_layers: str,
    rounds: int,
    trace: list[Arrival] | None,
    progress: Callable[[str], None],
) -> Report:
    """The same bursty trace at several loads, while a client fine-tunes. ``slo_attainment`` is co-serving's at the
    heaviest load, ``finetune_kept`` its fine-tuning there, in proportion to what fine-tuning gets without inference."""
    report = Report("coserve", preset.name, GOALS)
    base = build(preset, device)
    found = scaled(trace[:REQUESTS] if trace else synthetic(REQUESTS), lengths=LENGTHS[preset.name])
    rows = preset.batch * preset.sequence

    async def play(spec: str, load: Load, slo: SLO, text: str, times: int = 1) -> list[Outcome]:
        async with AsyncExitStack() as stack:
            executor = await stack.enter_async_context(symbiosis.Executor(base, policy=spec, base_layers=base_layers))
            crowd = await stack.enter_async_context(Crowd(executor, preset, load))
            await crowd.play(slo, lambda part: progress(f"{text}, warm-up, {part:.0%}"))
            return [await crowd.play(slo, lambda part: progress(f"{text}, {part:.0%}")) for _ in range(times)]

    no_slo = SLO(1e9, 1e9)
    (alone,) = await play("opportunistic", Load(found[:4], clients=1, paced=False), no_slo, "one client alone")
    (peak,) = await play("opportunistic", Load(found, clients=CLIENTS, paced=False), no_slo, "inference without pause")
    quiet = Load([Arrival(30 * alone.token_mean / 1e3, 1, 1)], tuning=TUNING, rows=rows)
    (tuned,) = await play("no-lockstep", quiet, no_slo, "fine-tuning alone")
    slo = SLO(SLO_FACTOR * alone.token_mean, 5000.0)
    tokens = sum(arrival.tokens for arrival in found) / (found[-1].at - found[0].at)
    policies = {
        "co-serving": policy or f"co-serving:slo_ms={slo.token_ms:.3f},ttft_ms={slo.first_ms:.0f}",
        "temporal 64": "temporal:every=64",
        "temporal 128": "temporal:every=128",
        "temporal 512": "temporal:every=512",
        "dynamic temporal": "dynamic-temporal",
    }
    kept: dict[tuple[str, float], tuple[float, float]] = {}
    for part in LOADS:
        speed = part * peak.tokens_per_s / tokens
        load = Load(scaled(found, speed=speed), clients=CLIENTS, tuning=TUNING, rows=rows)
        for name, spec in policies.items():
            played = await play(spec, load, slo, f"{name}, load {part:g}", rounds)
            attained = median(o.slo_attainment for o in played)
            share = median(o.finetune_per_s for o in played) / tuned.finetune_per_s
            kept[name, part] = attained, share
            report.rows.append(
                {
                    "load": part,
                    "policy": name,
                    "SLO kept": attained,
                    "fine-tuning kept": share,
                    "ms a token": median(o.token_mean for o in played),
                    "p99": median(o.token_p99 for o in played),
                    "ms to the first token": median(o.first_mean for o in played),
                    "tokens/s": median(o.tokens_per_s for o in played),
                    "tuning tokens/s": median(o.finetune_per_s for o in played),
                }
            )
    heaviest = max(LOADS)
    report.headline["slo_attainment"], report.headline["finetune_kept"] = kept["co-serving", heaviest]
    for name in policies:
        if name != "co-serving":
            key = name.replace(" ", "_")
            report.headline[f"{key}_slo_attainment"], report.headline[f"{key}_finetune_kept"] = kept[name, heaviest]
    report.notes.append(
        f"{REQUESTS} requests of {'the trace' if trace else 'a made up trace'}, lengths times "
        f"{LENGTHS[preset.name]}, by {CLIENTS} clients; {TUNING} client that fine-tunes on {rows} tokens a step. SLO: "
        f"{slo.token_ms:.0f} ms a token ({SLO_FACTOR:g} times one client's, alone), 5 s to the first. Load: part of "
        f"the {peak.tokens_per_s:.1f} tokens/s that inference gets without pause and without fine-tuning. Fine-tuning "
        f"alone: {tuned.finetune_per_s:.1f} tokens/s. Medians of {rounds} rounds; base layers {base_layers!r}."
    )
    return report
