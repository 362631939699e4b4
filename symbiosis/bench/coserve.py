"""Bursty inference beside fine-tuning: co-serving against temporal sharing, over load."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from statistics import median
from typing import Any

from symbiosis.bench.replay import Crowd
from symbiosis.bench.report import Report
from symbiosis.bench.settings import Settings
from symbiosis.simulation.loads import SHAPES, arrivals
from symbiosis.simulation.outcome import SLO, Outcome
from symbiosis.simulation.replay import Load
from symbiosis.simulation.trace import Arrival, scaled

GOALS = {"slo_attainment": "≥ 0.90", "finetune_kept": "≥ 0.76 of its peak"}
LENGTHS = {"tiny": 0.1, "100m": 0.04, "1b": 0.03}
CLIENTS, TUNING = 8, 1
REQUESTS = 32
LOADS = (0.2, 0.4, 0.6)
"""Loads, as parts of the tokens/s that the same clients get without pauses and without fine-tuning."""
SLO_FACTOR = 3.0
"""SLO as a multiple of the time per token of one client alone."""
NO_SLO = SLO(1e9, 1e9)
UNTUNED = "co-serving, no fine-tuning"
QUIET_S = 15.0
"""Seconds for which fine-tuning is measured alone."""


async def coserve(settings: Settings, *, trace: list[Arrival] | None, loads: tuple[float, ...] = LOADS) -> Report:
    """Play one bursty trace at several loads while a client fine-tunes; policies are interleaved.

    The headline ``slo_attainment`` is that of co-serving at the heaviest load. ``finetune_kept`` is its fine-tuning
    there, relative to fine-tuning without inference.
    """
    preset = settings.preset
    report = Report("coserve", preset.name, GOALS)
    base = settings.base()
    found = scaled(trace[:REQUESTS] if trace else arrivals(SHAPES["chat"], REQUESTS), lengths=LENGTHS[preset.name])
    rows = preset.batch * preset.sequence

    async def crowd(stack: AsyncExitStack, spec: str, load: Load) -> Crowd:
        executor = await stack.enter_async_context(settings.executor(base, spec))
        return await stack.enter_async_context(Crowd(executor, preset, load))

    async def play(spec: str, load: Load, text: str) -> Outcome:
        async with AsyncExitStack() as stack:
            one = await crowd(stack, spec, load)
            for turn in (-1, 0):
                settings.says(turn, text)
                outcome = await one.play(NO_SLO, settings.says_part)
        return outcome

    alone = await play("opportunistic", Load(found[:4], clients=1, paced=False), "one client alone")
    peak = await play("opportunistic", Load(found, clients=CLIENTS, paced=False), "inference without pause")
    quiet = Load([Arrival(QUIET_S, 1, 1)], tuning=TUNING, rows=rows)
    tuned = await play("no-lockstep", quiet, "fine-tuning alone")
    slo = SLO(SLO_FACTOR * alone.token_mean, 5000.0)
    tokens = sum(arrival.tokens for arrival in found) / (found[-1].at - found[0].at)
    policies = _policies(settings.policy, slo)
    for part in loads:
        paced = scaled(found, speed=part * peak.tokens_per_s / tokens)
        without = Load(paced, clients=CLIENTS)
        load = Load(paced, clients=CLIENTS, tuning=TUNING, rows=rows)
        async with AsyncExitStack() as stack:
            crowds = {UNTUNED: await crowd(stack, policies["co-serving"], without)}
            for name, spec in policies.items():
                crowds[name] = await crowd(stack, spec, load)
            jobs = {name: partial(one.play, slo, settings.says_part) for name, one in crowds.items()}
            played = await settings.interleaved(f"load {part:g}", jobs)
        for name, outcomes in played.items():
            row = _row(part, name, outcomes, tuned)
            report.rows.append(row)
            if part == max(loads) and name != UNTUNED:
                prefix = "" if name == "co-serving" else name.replace(" ", "_") + "_"
                report.headline[f"{prefix}slo_attainment"] = row["SLO kept"]
                report.headline[f"{prefix}finetune_kept"] = row["fine-tuning kept"]
    report.notes.append(
        f"{REQUESTS} requests of {'the trace' if trace else 'a generated trace'}, lengths times "
        f"{LENGTHS[preset.name]}, by {CLIENTS} clients; {TUNING} client that fine-tunes on {rows} tokens a step. SLO: "
        f"{slo.token_ms:.0f} ms a token ({SLO_FACTOR:g} times one client's, alone), 5 s to the first. Load: part of "
        f"the {peak.tokens_per_s:.1f} tokens/s that inference gets without pause and without fine-tuning. Fine-tuning "
        f"alone: {tuned.finetune_per_s:.1f} tokens/s. Medians of {settings.rounds} rounds, in each of which all take "
        f"their turn; base layers {settings.base_layers!r}."
    )
    return report


def _policies(policy: str, slo: SLO) -> dict[str, str]:
    """Return co-serving, or its replacement, and the policies that it is compared with."""
    return {
        "co-serving": policy or f"co-serving:slo_ms={slo.token_ms:.3f},ttft_ms={slo.first_ms:.0f}",
        "temporal 64": "temporal:every=64",
        "temporal 128": "temporal:every=128",
        "temporal 512": "temporal:every=512",
        "dynamic temporal": "dynamic-temporal",
    }


def _row(load: float, policy: str, played: list[Outcome], tuned: Outcome) -> dict[str, Any]:
    """Return medians of the rounds as a row of the report."""

    def middle(name: str) -> float:
        values: list[float] = [getattr(outcome, name) for outcome in played]
        return median(values)

    return {
        "load": load,
        "policy": policy,
        "SLO kept": middle("slo_attainment"),
        "fine-tuning kept": middle("finetune_per_s") / tuned.finetune_per_s,
        "ms a token": middle("token_mean"),
        "p99": middle("token_p99"),
        "ms to the first token": middle("first_mean"),
        "tokens/s": middle("tokens_per_s"),
        "tuning tokens/s": middle("finetune_per_s"),
    }
