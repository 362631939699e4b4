"""Cost of scheduling: CPU time of submit, decide and complete per request, by policy and number of clients."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable
from statistics import median

from symbiosis.bench.report import Report
from symbiosis.core.registry import make_policy
from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.scheduler import Scheduler, WaitUntil
from symbiosis.core.terms import NO_TERMS, Kind, Terms

LAYERS = 32
MAX_ROWS = 8192
REQUESTS, WARM_UP = 20_000, 1_000
"""Requests in one measurement."""
LOADS = ("mixed", "uneven")
GOALS = {"us_per_request_1000": "≤ 10", "growth_8_to_1000": "≤ 1.5"}


async def schedule(
    *, policies: tuple[str, ...], counts: tuple[int, ...], rounds: int, progress: Callable[[str], None]
) -> Report:
    """Measure microseconds per request, as medians; policies are interleaved.

    Every fourth client fine-tunes, forward and backward. In the mixed load the other clients decode, and one in eight
    of them sometimes reads a prompt. In the uneven load the other clients read prompts, of which eight fill a batch,
    and each client has its own priority. This shows policies that look at all clients for a small batch. Time is
    simulated: a batch takes 1 ms and 20 µs per row. A client that is answered requests its next layer at once.
    """
    report = Report("schedule", "", GOALS)
    found: dict[tuple[str, str, int], list[float]] = {}
    few, many = min(counts), max(counts)
    for turn in range(-1, rounds):
        for load, spec, count in itertools.product(LOADS, policies, counts):
            progress(f"{spec}, {load}, {count} clients: round {turn + 1} of {rounds}")
            await asyncio.sleep(0)  # so that Ctrl-C ends the run
            seconds, batch = _measure(spec, count, load, REQUESTS if turn >= 0 else WARM_UP)
            if turn >= 0:
                found.setdefault((load, spec, count), []).append(1e6 * seconds)
                if turn == 0:
                    report.rows.append(
                        {"load": load, "policy": spec, "clients": count, "µs a request": 0.0, "mean batch": batch}
                    )
    for row in report.rows:
        row["µs a request"] = median(found[row["load"], row["policy"], row["clients"]])
    worst = max(policies, key=lambda spec: median(found["mixed", spec, many]))
    report.headline[f"us_per_request_{many}"] = median(found["mixed", worst, many])
    report.headline[f"growth_{few}_to_{many}"] = max(
        median(found[load, spec, many]) / median(found[load, spec, few]) for load in LOADS for spec in policies
    )
    report.notes.append(
        f"The mixed load under the slowest policy, {worst}; growth: the larger of both loads. Pure Python on "
        f"one core, {REQUESTS:,} requests a measurement; the scheduler and the policy alone, no event loop, no tensors."
    )
    return report


def _measure(spec: str, count: int, load: str, requests: int) -> tuple[float, float]:
    """Return seconds of CPU per request, and the mean batch, over so many requests."""
    scheduler = Scheduler(make_policy(spec), layers=LAYERS, max_rows=MAX_ROWS)
    walks: dict[str, itertools.cycle[tuple[Key, int, Kind]]] = {}
    uneven = load == "uneven"
    forward = [Key((layer,), Pass.FORWARD) for layer in range(LAYERS)]
    backward = [Key((layer,), Pass.BACKWARD) for layer in reversed(range(LAYERS))]
    tune = [(key, 256, Kind.FINETUNE) for key in forward + backward]
    read = [(key, MAX_ROWS // 8 if uneven else 64, Kind.PREFILL) for key in forward]
    write = [(key, 1, Kind.DECODE) for key in forward]
    for number in range(count):
        name = f"client-{number}"
        if number % 4 == 3:
            steps = tune
        elif uneven:
            steps = read
        else:
            steps = read + 8 * write if number % 32 == 0 else write
        # clients begin at different layers
        walks[name] = itertools.cycle(steps[number % LAYERS :] + steps[: number % LAYERS])
        scheduler.client_joined(name, Terms(priority=number % 1000) if uneven else NO_TERMS, local=uneven)
        scheduler.walk_began(name, 0.0)
    ids = itertools.count()
    now = members = batches = answered = 0.0

    def ask(name: str) -> None:
        key, rows, kind = next(walks[name])
        scheduler.submit(Request(next(ids), name, key, rows, kind, now))

    gc.collect()  # otherwise a full collection may run while the time is measured
    began = time.process_time()
    for name in walks:
        ask(name)
    while answered < requests:
        action = scheduler.next_action(now)
        if isinstance(action, WaitUntil):
            now = action.time
            continue
        assert isinstance(action, Batch)
        seconds = 1e-3 + 2e-5 * action.rows
        now += seconds
        batches += 1
        members += len(action.slices)
        for request in scheduler.completed(action, seconds, now):
            answered += 1
            ask(request.client)
    if scheduler.policy_errors:  # it was measured without the policy
        raise scheduler.policy_errors[0]
    return (time.process_time() - began) / answered, members / batches
