"""Bursty inference beside fine-tuning: co-serving against temporal sharing, over load."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from symbiosis.bench.replay import Crowd, check_answers
from symbiosis.bench.report import Report
from symbiosis.bench.settings import Settings
from symbiosis.errors import UsageError
from symbiosis.simulation.loads import SHAPES, arrivals
from symbiosis.simulation.outcome import SLO, LoadOutcome
from symbiosis.simulation.replay import ReplayedLoad
from symbiosis.simulation.trace import Arrival, scaled

GOALS = {"slo_attainment": "≥ 0.90", "finetune_kept": "≥ 0.76 of its peak"}
LENGTHS = {"tiny": 0.1, "100m": 0.04, "1b": 0.03}
"""Factor for the lengths of prompts and answers; answers of code are eight times as long, or they were one token."""
SHAPES_PLAYED = ("chat", "code")
CLIENTS, TUNING = 8, 1
REQUESTS = 32
SLO_FACTOR = 3.0
"""SLO as a multiple of the time per token of one client alone."""
NO_SLO = SLO(1e9, 1e9)
PEERS = {
    "temporal 64": "temporal:every=64",
    "temporal 128": "temporal:every=128",
    "temporal 512": "temporal:every=512",
    "dynamic temporal": "dynamic-temporal",
}
"""Policies that the measured one is compared with."""
QUIET_S = 15.0
"""Seconds for which fine-tuning is measured alone."""


async def coserve(settings: Settings, *, trace: list[Arrival] | None, loads: tuple[float, ...]) -> Report:
    """Play bursty traces at several loads while a client fine-tunes; policies are interleaved. Loads are parts of the
    tokens/s that the same clients get without pauses and without fine-tuning.

    The headline ``slo_attainment`` is that of co-serving, or of the policy in its place, at the heaviest load of the
    first trace. ``finetune_kept`` is its fine-tuning there, relative to fine-tuning without inference. The same of code
    begins with ``code_``.

    Raises:
        UsageError: the requests of the trace that are played have one arrival time, or no answer of two tokens.
    """
    preset = settings.preset
    found = {"trace": trace[:REQUESTS]} if trace else {name: arrivals(SHAPES[name], REQUESTS) for name in SHAPES_PLAYED}
    loaded = {name: _texts(name, texts, LENGTHS[preset.name]) for name, texts in found.items()}
    report = Report("coserve", preset.name, GOALS)
    base = settings.base()
    rows = preset.batch * preset.sequence
    quiet = ReplayedLoad([Arrival(QUIET_S, 1, 1)], tuning=TUNING, rows=rows)
    tuned = await _play(settings, base, "no-lockstep", quiet, "fine-tuning alone")
    for name, texts in loaded.items():
        await _measure(settings, report, base, name, texts, loads, tuned)
    return report


def _texts(name: str, trace: list[Arrival], lengths: float) -> list[Arrival]:
    """Return the requests of a trace with the lengths that are played."""
    texts = scaled(trace, lengths=lengths)
    if name == "code":
        texts = [text._replace(tokens=8 * text.tokens) for text in texts]
    if texts[-1].at == texts[0].at:
        raise UsageError(
            f"the first {len(texts)} requests of the trace arrive at one time; a load needs two times of arrival"
        )
    check_answers(texts, lengths)
    return texts


async def _play(settings: Settings, base: Any, spec: str, load: ReplayedLoad, text: str) -> LoadOutcome:
    """Play a load twice, and return the outcome of the second time."""
    async with settings.executor(base, spec) as executor, Crowd(executor, settings.preset, load) as crowd:
        for turn in (-1, 0):
            settings.says(turn, text)
            outcome = await crowd.play(NO_SLO, settings.says_part)
    return outcome


async def _measure(
    settings: Settings,
    report: Report,
    base: Any,
    name: str,
    texts: list[Arrival],
    loads: tuple[float, ...],
    tuned: LoadOutcome,
) -> None:
    """Add rows and headlines of one trace to a report."""
    rows = settings.preset.batch * settings.preset.sequence
    one = ReplayedLoad([text for text in texts if text.tokens > 1][:4], clients=1, paced=False)
    alone = await _play(settings, base, "opportunistic", one, f"{name}, one client alone")
    busy = ReplayedLoad(texts, clients=CLIENTS, paced=False)
    peak = await _play(settings, base, "opportunistic", busy, f"{name}, inference without pause")
    slo = SLO(SLO_FACTOR * alone.token_mean, 5000.0)
    tokens = sum(text.tokens for text in texts) / (texts[-1].at - texts[0].at)
    measured = settings.policy or "co-serving"
    untuned = f"{measured}, no fine-tuning"
    policies = {
        measured: settings.policy or f"co-serving:slo_ms={slo.token_ms:.3f},ttft_ms={slo.first_ms:.0f}",
        **PEERS,
    }
    for part in loads:
        paced = scaled(texts, speed=part * peak.tokens_per_s / tokens)
        load = ReplayedLoad(paced, clients=CLIENTS, tuning=TUNING, rows=rows)
        async with AsyncExitStack() as stack:
            crowds = {}
            for policy, spec in {untuned: policies[measured], **policies}.items():
                executor = await stack.enter_async_context(settings.executor(base, spec))
                played = replace(load, tuning=0) if policy == untuned else load
                crowds[policy] = await stack.enter_async_context(Crowd(executor, settings.preset, played))
            jobs = {policy: partial(crowd.play, slo, settings.says_part) for policy, crowd in crowds.items()}
            outcomes = await settings.interleaved(f"{name}, load {part:g}", jobs)
        for policy, rounds in outcomes.items():
            row = _row(f"{name} {part:g}", policy, rounds, tuned)
            report.rows.append(row)
            if part == max(loads) and policy != untuned:
                prefix = "code_" if name == "code" else ""
                prefix += "" if policy == measured else policy.replace(" ", "_") + "_"
                report.headline[f"{prefix}slo_attainment"] = row["SLO kept"]
                report.headline[f"{prefix}finetune_kept"] = row["fine-tuning kept"]
    report.notes.append(
        f"{name}: {len(texts)} requests, lengths times {LENGTHS[settings.preset.name]}, by {CLIENTS} clients; {TUNING} "
        f"client that fine-tunes on {rows} tokens a step. SLO: {slo.token_ms:.0f} ms a token ({SLO_FACTOR:g} times one "
        f"client's, alone), 5 s to the first. Load: part of the {peak.tokens_per_s:.1f} tokens/s that inference gets "
        f"without pause and without fine-tuning. Fine-tuning alone, once before the rounds: {tuned.finetune_per_s:.1f} "
        f"tokens/s. Medians of {settings.rounds} rounds, in each of which all take their turn; base layers "
        f"{settings.base_layers!r}."
    )


def _row(load: str, policy: str, played: list[LoadOutcome], tuned: LoadOutcome) -> dict[str, Any]:
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
