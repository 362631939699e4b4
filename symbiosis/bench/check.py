"""Comparison of the simulator with a real executor: a load is simulated and played in turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import astuple
from statistics import median
from typing import NamedTuple

from symbiosis.bench.calibrate import Calibration
from symbiosis.bench.recorder import Measurements
from symbiosis.bench.replay import Crowd
from symbiosis.bench.settings import Settings
from symbiosis.core.policy import Policy
from symbiosis.simulation.outcome import SLO, LoadOutcome
from symbiosis.simulation.replay import ReplayedLoad, replay, told


class Checked(NamedTuple):
    """The outcome of a policy: for each figure, the median of the rounds."""

    predicted: LoadOutcome
    real: LoadOutcome


async def check(
    settings: Settings, policies: dict[str, Callable[[], Policy]], load: ReplayedLoad, slo: SLO
) -> dict[str, Checked]:
    """Play a load to each policy, and simulate it with costs measured immediately before and after.

    The speed of a shared machine changes from minute to minute, so measuring and playing alternate.

    Raises:
        UsageError: a policy promises a latency below that of an idle executor. Nothing has been played then.
    """
    predicted: dict[str, list[LoadOutcome]] = {name: [] for name in policies}
    real: dict[str, list[LoadOutcome]] = {name: [] for name in policies}
    async with AsyncExitStack() as stack:
        calibration = await stack.enter_async_context(Calibration(settings, load))
        before = await calibration.measure()
        for make in policies.values():
            known = calibration.costs([before])
            told(make(), known.walk, known.batch)
        base = settings.base()
        crowds: dict[str, Crowd] = {}
        for name, make in policies.items():
            executor = await stack.enter_async_context(settings.executor(base, make()))
            crowds[name] = await stack.enter_async_context(Crowd(executor, settings.preset, load))
        for turn in range(-1, settings.rounds):
            for name, crowd in crowds.items():
                settings.says(turn, f"{name}, on the executor")
                played = await crowd.play(slo, settings.says_part)
                if turn < 0:
                    continue
                after: Measurements = await calibration.measure()
                costs = calibration.costs([before, after])
                predicted[name].append(replay(policies[name], costs, load, slo))
                real[name].append(played)
                before = after
            if turn < 0:
                before = await calibration.measure()
    return {name: Checked(_median(predicted[name]), _median(real[name])) for name in policies}


def _median(outcomes: list[LoadOutcome]) -> LoadOutcome:
    return LoadOutcome(*(median(values) for values in zip(*map(astuple, outcomes), strict=True)))
