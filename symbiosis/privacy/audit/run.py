"""The audit itself: record a tenant's traffic under each scheme, attack it, and measure what the scheme costs."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from symbiosis.core.privacy import Privacy
from symbiosis.core.registry import make_privacy
from symbiosis.errors import PrivacyError
from symbiosis.host import Executor
from symbiosis.privacy.audit.attacks import difference
from symbiosis.privacy.audit.costs import SchemeCosts, measure_costs
from symbiosis.privacy.audit.evidence import (
    Evidence,
    FirstRequests,
    collect,
    combine_shares,
    in_pairs,
    random_traffic,
    sent_apart,
)
from symbiosis.privacy.audit.limit import FALSE_FINDS, Limit
from symbiosis.privacy.audit.provider import attack, score
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.result import Audit, Observation
from symbiosis.privacy.audit.scores import Score
from symbiosis.privacy.audit.workload import Truth, Workload, build, generate, give_adapter, lora, play, text
from symbiosis.privacy.wiretap import Seen, Wiretap

SCHEMES = ("none", "noise-pool", "local-pads", "secret-shares", "secret-shares:model=base")
"""Schemes that are audited by default. ``base`` is the audit's own model."""
_DECOYS = 99
"""Prompts that the provider guesses besides the right one."""

Progress = Callable[[str], None]


async def audit(
    schemes: Sequence[str | Privacy] = SCHEMES,
    plan: Workload | None = None,
    *,
    baselines: int = 12,
    rounds: int = 3,
    progress: Progress = lambda text: None,
) -> Audit:
    """Play the provider against a tenant under each scheme.

    Args:
        schemes: names with options, as for ``privacy=``, or objects. ``model=base`` stands for the audit's model, which
            is the default of ``local-pads``. ``secret-shares`` gets a second executor of it by default. Results of
            several with one name are numbered: ``noise-pool``, ``noise-pool #2``.
        plan: size of the model and of the workload.
        baselines: sets of random traffic that attacks are compared with, at least two.
        rounds: rounds of timing; 0 measures no times (they are NaN).
        progress: called with a description of each step.

    Raises:
        UsageError: a scheme is unknown, or does not take an option.
        PrivacyError: a scheme sends numbers that are not finite.
    """
    plan = plan or Workload()
    base, further = build(plan), f"audit-{os.urandom(4).hex()}"
    async with Executor(base) as one, Executor(build(plan), name=further) as two:
        chosen: dict[str, Privacy | None] = {}
        for scheme in schemes:
            name = scheme if isinstance(scheme, str) else scheme.name
            names = itertools.chain([name], (f"{name} #{number}" for number in itertools.count(2)))
            chosen[next(each for each in names if each not in chosen)] = _privacy(scheme, base, f"inproc://{further}")
        run = _AuditRun(
            plan, Public(base, list(one.layers), text(plan, 256, 4)), text(plan, _DECOYS, 3), one, two, progress
        )
        return await run.audit(chosen, baselines, rounds)


def _privacy(scheme: str | Privacy, base: Any, further: str) -> Privacy | None:
    """Return a scheme with the audit's own model and second executor, where it needs them."""
    if not isinstance(scheme, str):
        return scheme
    name, _, options = scheme.partition(":")
    option, value = {"local-pads": ("model", "base"), "secret-shares": ("with", further)}.get(name, ("", ""))
    if option and f"{option}=" not in options:
        options = f"{options},{option}={value}".strip(",")
    privacy: Any = make_privacy(f"{name}:{options}" if options else name)
    if getattr(privacy, "model", None) == "base":
        privacy.model = base
    made: Privacy | None = privacy
    return made


class _Traffic(NamedTuple):
    """The traffic of one scheme."""

    truth: Truth
    evidence: list[Evidence]
    """The evidence of each executor that was used."""
    apart: list[list[torch.Tensor]]
    """What each of them received besides rows."""
    first: list[FirstRequests]
    """The requests of clients that are opened for one text each, as each executor received them."""
    size: int
    """Bytes of the workload to and from all executors."""


@dataclass
class _AuditRun:
    """One audit: a base model that is served by two executors, and a provider that knows it."""

    plan: Workload
    public: Public
    decoys: torch.Tensor
    one: Executor
    two: Executor
    progress: Progress

    async def audit(self, schemes: dict[str, Privacy | None], baselines: int, rounds: int) -> Audit:
        bare_traffic = await self._record("none", None)
        (bare,) = await self._attack("none", bare_traffic)
        random = await self._attack_random_traffic(bare_traffic, baselines)
        observations: list[Observation] = []
        costs: dict[str, SchemeCosts] = {}
        for name, privacy in schemes.items():
            traffic = bare_traffic
            if privacy is None:
                observations.append(replace(bare, scheme=name))
            else:
                traffic = await self._record(name, privacy)
                observations += await self._attack(name, traffic)
            await self._says(f"{name}: costs")
            ratio = traffic.size / bare_traffic.size
            costs[name] = await measure_costs(privacy, self.plan, self.one, rounds, ratio)
        attacked = [bare, *(each for each in observations if each.scores is not bare.scores)]
        probability = FALSE_FINDS / sum(len(scores) for each in attacked for scores in each.scores.values())
        limits = {
            attack: {goal: Limit(scores, probability) for goal, scores in goals.items()}
            for attack, goals in random.items()
        }
        error = min(score.error for goals in random.values() for score in goals.get("activations", []))
        described = {name: _describe(privacy) for name, privacy in schemes.items()}
        return Audit(self.plan, observations, bare, costs, limits, probability, baselines, error, described)

    async def _says(self, text: str) -> None:
        """Describe the next step. The audit can be cancelled here, and attacks take seconds without another await."""
        self.progress(text)
        await asyncio.sleep(0)

    async def _record(self, name: str, privacy: Privacy | None) -> _Traffic:
        """Play the workload under a scheme, and then each text twice with clients that are opened for it."""
        await self._says(f"{name}: the tenant works")
        plan = self.plan
        truth, seen = await record(privacy, plan, self.one, self.two)
        short: list[list[list[Seen]]] = [[], []]
        for prompt in 2 * list(range(plan.prompts)):
            with Wiretap(self.one) as first, Wiretap(self.two) as second:
                async with self.one.client(lora(plan), privacy=privacy, seed=plan.seed) as client:
                    give_adapter(client.model, plan)
                    await generate(client, truth.texts[prompt], plan.new_tokens)
            for executor, tap in zip(short, (first, second), strict=True):
                executor.append(tap.seen)
        return _Traffic(
            truth,
            [collect(calls, truth.sent) for calls in seen],
            [sent_apart(calls, truth.sent) for calls in seen],
            [FirstRequests.collect(clients) for clients in short if clients[0]],
            sum(tensor.nbytes for calls in seen for call in calls for tensor in (*call.tensors, *(call.results or ()))),
        )

    async def _attack(self, name: str, traffic: _Traffic) -> list[Observation]:
        """Return the attacks of each executor, and of all of them together if there are several."""
        count = len(traffic.evidence)
        observations = []
        executors = zip(traffic.evidence, traffic.apart, traffic.first, strict=True)
        for number, (evidence, apart, first) in enumerate(executors, 1):
            executor = f"executor {number}" if count > 1 else ""
            await self._says(f"{name}: attacks {executor}")
            if not all(
                matrix.isfinite().all() for stream in evidence.values() for matrix in (stream.rows, stream.noise)
            ):
                raise PrivacyError(f"{name}: the scheme sends numbers that are not finite, which cannot be audited")
            # A share has the mean x / count, so the attacks get it enlarged.
            whole = {place: stream._replace(rows=count * stream.rows) for place, stream in evidence.items()}
            scores = attack(whole, apart, first, traffic.truth, self.public, self.decoys)
            observations.append(Observation(name, executor, scores))
        if count > 1:
            await self._says(f"{name}: attacks of executors that collude")
            apart = list(itertools.chain(*traffic.apart))
            scores = attack(combine_shares(traffic.evidence), apart, None, traffic.truth, self.public, self.decoys)
            observations.append(Observation(name, "both together", scores, collusion=True))
        return observations

    async def _attack_random_traffic(self, bare: _Traffic, baselines: int) -> dict[str, dict[str, list[Score]]]:
        """Return attack → goal → scores on sets of random traffic."""
        found: dict[str, dict[str, list[Score]]] = {}
        for number in range(baselines):
            await self._says(f"random traffic, set {number + 1} of {baselines}")
            generator = torch.Generator().manual_seed(self.plan.seed + 1000 + number)
            noise = random_traffic(bare.evidence[0], bare.truth.rows, generator)
            apart, first = [stream.noise for stream in noise.values()], bare.first[0].random(generator)
            scores = attack(noise, apart, first, bare.truth, self.public, self.decoys)
            # No two of these rows are alike, and "difference" needs rows that are.
            alike = difference(in_pairs(noise, bare.truth.rows, generator), self.public)
            assert alike is not None
            scores["difference"] = score(alike, bare.truth, self.public)
            for name, goals in scores.items():
                for goal, each in goals.items():
                    found.setdefault(name, {}).setdefault(goal, []).append(each)
        return found


async def record(
    privacy: Privacy | None, plan: Workload, one: Executor, two: Executor
) -> tuple[Truth, list[list[Seen]]]:
    """Play the workload. Returns the truth, and the calls to each executor that was used."""
    with Wiretap(one) as first, Wiretap(two) as second:
        async with one.client(lora(plan), privacy=privacy, seed=plan.seed) as client:
            truth = await play(client, list(one.layers), plan)
    return truth, [tap.seen for tap in (first, second) if tap.seen]


def _describe(privacy: Privacy | None) -> str:
    """Return the name and the numeric options of a scheme; others are the audit's own addresses and models."""
    if privacy is None:
        return "none"
    options: Iterable[tuple[str, Any]] = vars(privacy).items()
    numbers = [f"{name} {value:g}" for name, value in options if name[0] != "_" and isinstance(value, int | float)]
    return ", ".join([privacy.name, *numbers])
