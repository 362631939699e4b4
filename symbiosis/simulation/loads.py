"""Loads by their shape: when requests for text arrive, and how long their prompts and answers are.

Lengths are log-normal. Gaps between arrivals have a gamma distribution, as BurstGPT found for real services (Wang et
al., 2024), and the rate of arrivals may change every 10 s and follow a day curve.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial

from symbiosis.core.registry import from_spec
from symbiosis.errors import UnknownNameError, UsageError
from symbiosis.simulation.trace import Arrival

_SPELL_S = 10.0
"""Seconds for which the rate of arrivals stays the same."""


@dataclass(frozen=True)
class LoadShape:
    """The parameters of a load. Lengths are in tokens; ``…_spread`` is the standard deviation of their logarithm."""

    rate: float
    """Mean requests per second."""
    prompt: float
    """Median length of a prompt; for later turns of a conversation, of what is added to it."""
    prompt_spread: float
    prompt_most: float
    answer: float
    """Median length of an answer."""
    answer_spread: float
    answer_most: float
    variation: float = 1.0
    """Standard deviation of the gaps between conversations, divided by their mean."""
    bursts: float = 0.0
    """Standard deviation of the rate, divided by its mean, between spells of 10 s."""
    day: float = 0.0
    """Amplitude of the day curve, as a part of the mean rate, 0 to 1."""
    day_s: float = 86_400.0
    """Period of the day curve, in seconds."""
    turns: float = 1.0
    """Mean number of requests in a conversation; their number is geometric."""
    pause_s: float = 0.0
    """Mean seconds from an answer to the next request of a conversation, exponentially distributed."""
    patient: float = 0.0
    """Part of the conversations, 0 to 1, whose latency targets are twice as long as those of the others."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0.0 if name.endswith("_spread") or name in ("bursts", "day", "pause_s", "patient") else 1e-6
            most = 1.0 if name in ("day", "patient") else 1e7
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise UsageError(f"a load's {name} is {value!r}; it must be a number from {least:g} to {most:g}")
        if self.turns < 1:
            raise UsageError(f"a load's turns is {self.turns!r}; a conversation has at least 1 request")


SHAPES = {
    # Azure's conversations of 2023 (Patel et al., "Splitwise", ISCA '24): mean prompt 1,155, answer 211.
    "chat": LoadShape(5.53, 760, 0.985, 14_050, 151, 0.859, 1000, variation=1.0, bursts=0.23),
    # Azure's code completions of 2023 (the same source): mean prompt 2,048, 99th percentile 7,437, mean answer 28; more
    # than half of all spells of 10 s are empty.
    "code": LoadShape(2.6, 1500, 0.8, 7437, 13, 1.24, 2000, variation=13.0),
    # RAGPulse (Wang et al., 2025), questions to a university's documents: prompts of 1,050 to 7,710 tokens, mostly
    # around 3,200, answers of 7 to 2,180.
    "rag": LoadShape(1.0, 3150, 0.3, 7710, 190, 0.7, 2180),
    # TraceLab (Zhu et al., 2026), coding agents: a step adds 790 tokens at the median and 3,700 at the 90th percentile,
    # and yields 520 on average; a request takes 8.8 steps. Tools are taken to run for 2 s.
    "agents": LoadShape(1.0, 790, 1.2, 20_000, 230, 1.28, 8000, turns=8.8, pause_s=2.0),
    # Gaps as varied as in BurstGPT's bursts, with lengths chosen between those of chat and steady.
    "burst": LoadShape(3.0, 300, 1.2, 4000, 200, 0.9, 2000, variation=5.0),
    # ShareGPT's lengths (Kwon et al., "vLLM", SOSP '23, figure 11: mean prompt 161, answer 338), Poisson arrivals.
    "steady": LoadShape(3.0, 110, 0.88, 2048, 250, 0.78, 2048),
}
"""The named loads. Medians and spreads are fitted to the figures of their sources. The rates of rag, agents, burst
and steady are chosen."""


def make_shape(spec: str) -> LoadShape:
    """Return the shape for ``"name"`` or ``"name:parameter=value,parameter=value"``.

    Raises:
        UnknownNameError: no load has this name.
        UsageError: a load has no such parameter, or does not accept its value.
    """
    name = spec.partition(":")[0]
    if name not in SHAPES:
        raise UnknownNameError(f"unknown load {name!r}; there are {', '.join(SHAPES)}")
    shape: LoadShape = from_spec("load", spec, partial(LoadShape, **vars(SHAPES[name])), {})
    return shape


def drawn(chance: random.Random) -> LoadShape:
    """Return a shape with random parameters, within the ranges that the named loads span."""

    def between(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    return LoadShape(
        1.0,
        *(between(100, 3200), chance.uniform(0.3, 1.2), 14_000),
        *(between(13, 250), chance.uniform(0.6, 1.3), 2000),
        variation=between(1, 13),
        bursts=chance.uniform(0, 0.5),
        turns=chance.choice([1.0, 1.0, 4.0]),
        pause_s=chance.uniform(0.5, 5),
    )


def arrivals(shape: LoadShape, count: int, seed: int = 0) -> list[Arrival]:
    """Return ``count`` requests in order of arrival. A later turn counts as arriving with its conversation.

    The times are scaled so that conversations arrive at the mean rate, whatever the seed.
    """
    chance = random.Random(seed)
    conversations: list[int] = []
    missing = count
    while missing:
        turns = 1
        while chance.random() < 1 - 1 / shape.turns:
            turns += 1
        conversations.append(min(turns, missing))
        missing -= conversations[-1]
    form = shape.variation**-2
    gaps = [chance.gammavariate(form, 1 / form) for _ in conversations]
    scale = count / shape.rate / (sum(gaps) or 1.0)
    found = []
    at, spell_ends, rate = 0.0, 0.0, 1.0
    for number, (turns, gap) in enumerate(zip(conversations, gaps, strict=True)):
        left = gap * scale
        while True:
            if at >= spell_ends:
                spell_ends = at + _SPELL_S
                rate = 1 + shape.day * math.sin(2 * math.pi * at / shape.day_s)
                rate *= chance.gammavariate(shape.bursts**-2, shape.bursts**2) if shape.bursts else 1.0
                rate = max(rate, 1e-3)
            if left / rate < spell_ends - at:
                at += left / rate
                break
            left = max(left - rate * (spell_ends - at), 0.0)
            at = spell_ends
        slo = 2.0 if chance.random() < shape.patient else 1.0
        for turn in range(turns):
            prompt = _length(chance, shape.prompt, shape.prompt_spread, shape.prompt_most)
            answer = _length(chance, shape.answer, shape.answer_spread, shape.answer_most)
            pause = chance.expovariate(1 / shape.pause_s) if shape.pause_s else 0.0
            found.append(Arrival(at, prompt, answer, number, pause if turn else None, slo))
    scale = count / shape.rate / (at or 1.0)  # the rates of the spells have a mean of their own
    return [arrival._replace(at=scale * arrival.at) for arrival in found]


def _length(chance: random.Random, median: float, spread: float, most: float) -> int:
    return max(round(min(chance.lognormvariate(math.log(median), spread), most)), 1)
