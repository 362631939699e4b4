"""No-lockstep, lockstep and opportunistic batching with the same trace and model."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from statistics import median

from symbiosis.bench.replay import Crowd, check_answers
from symbiosis.bench.report import Report, ratio
from symbiosis.bench.settings import Settings
from symbiosis.errors import UsageError
from symbiosis.simulation.loads import SHAPES, arrivals
from symbiosis.simulation.outcome import SLO, LoadOutcome
from symbiosis.simulation.replay import ReplayedLoad
from symbiosis.simulation.trace import Arrival, scaled

GOALS = {
    "opportunistic_vs_none_throughput": "≥ 2 (paper, on GPUs: 1.28)",
    "opportunistic_vs_none_latency": "≤ 0.6",
    "prefill_vs_none": "≥ 1",
}
NAMES = {"none": "no-lockstep", "lockstep": "lockstep", "opportunistic": "opportunistic"}
LENGTHS = {"tiny": 0.1, "100m": 0.05, "1b": 0.03}
"""Factors for the trace's lengths, so that a round takes about a minute on two cores."""
REQUESTS_EACH = 3
NO_SLO = SLO(1e9, 1e9)


async def policies(settings: Settings, *, counts: tuple[int, ...], trace: list[Arrival] | None) -> Report:
    """Measure clients with mixed adapters and lengths under several policies.

    The settings' policy, if any, replaces opportunistic batching.

    Raises:
        UsageError: the trace has too few requests for that many clients, or no answer of two tokens.
    """
    if trace and len(trace) < REQUESTS_EACH * max(counts):
        raise UsageError(
            f"the trace has {len(trace)} requests, and {max(counts)} clients need {REQUESTS_EACH * max(counts)}; use a "
            "longer trace, or fewer --clients"
        )
    preset, rounds = settings.preset, settings.rounds
    lengths = LENGTHS[preset.name]
    report = Report("policies", preset.name, GOALS)
    names = {**NAMES, "opportunistic": settings.policy}
    base = settings.base()
    for count in counts:
        found = trace[: REQUESTS_EACH * count] if trace else arrivals(SHAPES["chat"], REQUESTS_EACH * count)
        texts = scaled(found, lengths=lengths)
        check_answers(texts, lengths)
        load = ReplayedLoad(texts, clients=count, paced=False)
        async with AsyncExitStack() as stack:
            jobs = {}
            for name, spec in names.items():
                executor = await stack.enter_async_context(settings.executor(base, spec, joint="off"))
                crowd = await stack.enter_async_context(Crowd(executor, preset, load))
                jobs[name] = partial(crowd.play, NO_SLO, settings.says_part)
            outcomes = await settings.interleaved(f"{count} clients", jobs)
        for name, all_ in outcomes.items():
            report.rows.append(
                {
                    "clients": count,
                    "policy": names[name],
                    "tokens/s": median(o.tokens_per_s for o in all_),
                    "ms a token": median(o.token_mean for o in all_),
                    "p99": median(o.token_p99 for o in all_),
                    "ms to the first token": median(o.first_mean for o in all_),
                    "mean batch": median(o.mean_batch for o in all_),
                }
            )
        ours, none, lockstep = outcomes["opportunistic"], outcomes["none"], outcomes["lockstep"]
        figures = {
            "opportunistic_vs_none_throughput": _ratio(ours, none, "tokens_per_s"),
            "opportunistic_vs_none_latency": _ratio(ours, none, "token_mean"),
            "prefill_vs_none": _ratio(none, ours, "first_mean"),
            "opportunistic_vs_lockstep_throughput": _ratio(ours, lockstep, "tokens_per_s"),
            "opportunistic_vs_lockstep_latency": _ratio(ours, lockstep, "token_mean"),
            "mean_batch": median(o.mean_batch for o in ours),
        }
        for key, value in figures.items():
            report.headline[key if count == max(counts) else f"{key}_{count}"] = value
    report.notes.append(
        f"{REQUESTS_EACH} texts for each client; a client that is done takes the next text. Lengths of "
        f"{'the trace' if trace else 'a generated trace'} times {lengths}; the paper's four LoRAs; "
        f"medians of {rounds} rounds; base layers {settings.base_layers!r}; joint decoding off. "
        "prefill_vs_none is a ratio of speeds: the inverse of the ratio of times to the first token."
    )
    return report


def _ratio(above: list[LoadOutcome], below: list[LoadOutcome], name: str) -> float:
    return ratio([getattr(o, name) for o in above], [getattr(o, name) for o in below])
