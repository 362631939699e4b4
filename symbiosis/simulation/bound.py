"""What a policy that knows the future could reach on a load: an estimate to compare policies with."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from symbiosis.core.requests import Batch, Key
from symbiosis.simulation.costs import Costs
from symbiosis.simulation.outcome import SLO
from symbiosis.simulation.replay import ReplayedLoad

_BESIDE = 512
"""Rows of the batches that others run beside."""


class Bound(NamedTuple):
    """The best figures of an outcome that seem possible."""

    slo_attainment: float
    finetune_per_s: float


@dataclass(eq=False)
class _Prompt:
    work: float
    """Seconds of the executor that are left."""
    at: float
    due: float
    pace: float
    """SLO of its tokens, in seconds."""
    tokens: int
    """Tokens that are to be decoded after it."""


def bound(costs: Costs, load: ReplayedLoad, slo: SLO) -> Bound:
    """Return the SLO attainment and the fine-tuning that seem possible.

    Rows of prompts and tokens cost what they add to batches that run anyway, on an executor without overhead, which is
    a lower bound of what a policy needs. Tokens are made exactly at the pace of their SLO. A policy may postpone
    tokens, since the SLO is the mean of a text, and so keep a few prompts more.

    Prompts run one after another, the earliest target first. Where a target would be missed, the longest prompt since
    the executor was last idle is never served (Moore and Hodgson, 1968). That is best for prompts that arrive together;
    where they arrive one after another, another choice may keep a few more.

    Fine-tuning fills the rest, at the rate that it has alone. A later turn of a conversation arrives its
    pause after the earliest time at which the answer before it can be complete at the pace of the SLO.
    """
    prompts: list[_Prompt] = []
    ends: dict[object, float] = {}
    for arrival in load.trace:
        at = arrival.at if arrival.pause is None else ends[arrival.conversation] + arrival.pause
        work = sum(_added(costs, key, 1 if key in costs.last else arrival.prompt) for key in costs.walk)
        pace = arrival.slo * slo.token_ms / 1e3
        ends[arrival.conversation] = at + work + pace * (arrival.tokens - 1)
        prompts.append(_Prompt(work, at, at + arrival.slo * slo.first_ms / 1e3, pace, arrival.tokens - 1))
    prompts.sort(key=lambda prompt: prompt.at)
    count = len(prompts)
    while (played := _played(costs, prompts, slo.token_ms / 1e3)).late:
        prompts.remove(max(played.late, key=lambda prompt: prompt.work))
    rows = load.rows * load.tuning
    step = sum(_seconds(costs, key, rows) for key in (*costs.walk, *costs.back)) if rows else 1.0
    spare = played.spare / played.seconds if prompts else 1.0
    return Bound(len(prompts) / count, rows / step * spare)


def _added(costs: Costs, key: Key, rows: int) -> float:
    """Return the seconds that rows add to a batch that runs anyway."""
    return _seconds(costs, key, _BESIDE + rows) - _seconds(costs, key, _BESIDE)


class _Played(NamedTuple):
    late: list[_Prompt]
    """The prompts that ran since the executor was last idle, up to one that is late; empty if none is late."""
    seconds: float = 0.0
    """Duration of all."""
    spare: float = 0.0
    """Seconds in which neither prompts nor tokens ran."""


def _seconds(costs: Costs, key: Key, rows: int) -> float:
    return costs.batch(Batch(key, (), "", rows), False)


def _played(costs: Costs, prompts: list[_Prompt], step: float) -> _Played:
    """Play prompts, in order of arrival, in steps of some seconds."""
    row = sum(_added(costs, key, 1) for key in costs.walk)
    waiting: list[tuple[float, int, float]] = []
    busy: list[_Prompt] = []
    decoding: list[tuple[float, float]] = []
    """The end of each text that decodes, and the seconds of the executor that its tokens take in a step."""
    now, spare, coming = 0.0, 0.0, 0
    while coming < len(prompts) or waiting or decoding:
        if not (waiting or decoding) and prompts[coming].at > now:
            spare += prompts[coming].at - now
            now = prompts[coming].at
        while coming < len(prompts) and prompts[coming].at < now + step:
            heapq.heappush(waiting, (prompts[coming].due, coming, prompts[coming].work))
            coming += 1
        decoding = [(end, taken) for end, taken in decoding if end > now]
        left = max(step - sum(taken for _, taken in decoding), 0.0)
        while waiting and left > 0:
            due, number, work = heapq.heappop(waiting)
            prompt = prompts[number]
            if prompt not in busy:
                busy.append(prompt)
            if work > left:
                heapq.heappush(waiting, (due, number, work - left))
                left = 0.0
            else:
                left -= work
                decoding.append((now + step - left + prompt.tokens * prompt.pace, row * step / prompt.pace))
            if now + step - left > max(due, prompt.at + step):
                return _Played(busy)
        if not waiting:
            busy = []
        spare += left
        now += step
    return _Played([], now, spare)
