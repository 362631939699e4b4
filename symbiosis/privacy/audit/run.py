"""The audit itself: record a tenant's traffic under each scheme, attack it, and measure what the scheme costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from symbiosis.core.privacy import Privacy
from symbiosis.core.registry import make_privacy
from symbiosis.core.requests import Call
from symbiosis.core.transport import Channel
from symbiosis.host import Executor
from symbiosis.privacy.audit.costs import measure_costs
from symbiosis.privacy.audit.evidence import Evidence, FirstRequests, collect, combine_shares, random_traffic
from symbiosis.privacy.audit.goals import Score, Truth
from symbiosis.privacy.audit.provider import Provider
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.result import Audit, Costs, Observation
from symbiosis.privacy.audit.verdict import FALSE_FINDS, Limit
from symbiosis.privacy.audit.workload import Plan, build, generate, give_adapter, lora, play, text
from symbiosis.privacy.masks import Mask, Results, SendCall
from symbiosis.privacy.scheme import Scheme
from symbiosis.privacy.wiretap import Seen, Wiretap

__all__ = ["SCHEMES", "audit"]

SCHEMES = ("none", "noise-pool", "local-pads", "secret-shares", "secret-shares:model=base")
"""Schemes that are audited by default. ``base`` is the audit's own model."""

Progress = Callable[[str], None]


async def audit(
    schemes: Sequence[str | Privacy] = SCHEMES,
    plan: Plan | None = None,
    *,
    baselines: int = 12,
    rounds: int = 3,
    progress: Progress = lambda text: None,
) -> Audit:
    """Play the provider against a tenant under each scheme.

    Args:
        schemes: names with options, as for ``privacy=``, or objects. ``model=base`` stands for the audit's model, which
            is the default of ``local-pads``. ``secret-shares`` gets a second executor of it by default.
        plan: size of the model and of the workload.
        baselines: sets of random traffic that attacks are compared with, at least two.
        rounds: rounds of timing; 0 measures no times (they are NaN).
        progress: called with a description of each step.

    Raises:
        UsageError: a scheme is unknown, or does not take an option.
    """
    plan = plan or Plan()
    base = build(plan)
    further = f"audit-{os.urandom(4).hex()}"
    async with Executor(base) as one, Executor(build(plan), name=further) as two:
        chosen = {
            scheme if isinstance(scheme, str) else scheme.name: _privacy(scheme, base, f"inproc://{further}")
            for scheme in schemes
        }
        return await _Run(plan, base, one, two, progress).audit(chosen, baselines, rounds)


def _privacy(scheme: str | Privacy, base: Any, further: str) -> Privacy | None:
    """Return a scheme with the audit's own model and second executor, where it needs them."""
    if not isinstance(scheme, str):
        return scheme
    name, _, options = scheme.partition(":")
    defaults = {"local-pads": ("model", "base"), "secret-shares": ("with", further)}
    option, value = defaults.get(name, ("", ""))
    if option and f"{option}=" not in options:
        options = ",".join(filter(None, [options, f"{option}={value}"]))
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
    first: list[FirstRequests]
    """The same of clients that are opened for one text each."""
    size: int
    """Bytes of the workload to and from all executors."""


@dataclass
class _Run:
    """One audit: a base model that is served by two executors."""

    plan: Plan
    base: Any
    one: Executor
    two: Executor
    progress: Progress

    async def audit(self, schemes: dict[str, Privacy | None], baselines: int, rounds: int) -> Audit:
        plan = self.plan
        public = Public(self.base, list(self.one.layers), text(plan, 256, 4))
        self.progress("none: the tenant works")
        bare_traffic = await self._record(None)
        provider, (shape,) = Provider(public, plan, bare_traffic.truth), bare_traffic.evidence
        self.progress("none: attacks")
        bare = Observation("none", "", provider.attack(shape, bare_traffic.first[0]))
        random = self._attack_random_traffic(provider, bare_traffic, baselines)
        observations: list[Observation] = []
        costs: dict[str, Costs] = {}
        for name, privacy in schemes.items():
            traffic = bare_traffic
            if privacy is None:
                observations.append(bare)
            else:
                self.progress(f"{name}: the tenant works")
                traffic = await self._record(privacy)
                observations += self._attack(name, Provider(public, plan, traffic.truth), traffic)
            self.progress(f"{name}: costs")
            ratio = traffic.size / bare_traffic.size
            costs[name] = await measure_costs(privacy, plan, self.one, rounds, ratio)
        attacked = observations if bare in observations else [bare, *observations]
        probability = FALSE_FINDS / sum(len(scores) for each in attacked for scores in each.scores.values())
        limits = {
            attack: {goal: Limit(scores, probability) for goal, scores in goals.items()}
            for attack, goals in random.items()
            if min(map(len, goals.values())) == baselines
        }
        error = min(score.error for goals in random.values() for score in goals.get("activations", []))
        described = {name: _describe(privacy) for name, privacy in schemes.items()}
        result = Audit(plan, observations, bare, costs, limits, probability, baselines, error, described)
        for observation in attacked:
            result.mark(observation)
        return result

    def _attack_random_traffic(
        self, provider: Provider, bare: _Traffic, baselines: int
    ) -> dict[str, dict[str, list[Score]]]:
        """Return attack → goal → scores on sets of random traffic."""
        found: dict[str, dict[str, list[Score]]] = {}
        for number in range(baselines):
            self.progress(f"random traffic, set {number + 1} of {baselines}")
            generator = torch.Generator().manual_seed(self.plan.seed + 1000 + number)
            noise = random_traffic(bare.evidence[0], bare.truth.rows, generator)
            for attack, scores in provider.attack(noise, bare.first[0].random(generator)).items():
                for goal, score in scores.items():
                    found.setdefault(attack, {}).setdefault(goal, []).append(score)
        return found

    def _attack(self, name: str, provider: Provider, traffic: _Traffic) -> list[Observation]:
        """Return the attacks of each executor, and of all of them together if there are several."""
        observations = []
        count = len(traffic.evidence)
        for number, (evidence, first) in enumerate(zip(traffic.evidence, traffic.first, strict=True), 1):
            executor = f"executor {number}" if count > 1 else ""
            self.progress(f"{name}: attacks {executor}")
            # A share has the mean x / count, so the attacks get it enlarged.
            whole = {place: stream._replace(rows=count * stream.rows) for place, stream in evidence.items()}
            observations.append(Observation(name, executor, provider.attack(whole, first)))
        if count > 1:
            self.progress(f"{name}: attacks of executors that collude")
            scores = provider.attack(combine_shares(traffic.evidence))
            observations.append(Observation(name, "both together", scores, collusion=True))
        return observations

    async def _record(self, privacy: Privacy | None) -> _Traffic:
        """Play the workload under a scheme, and then each text twice with clients that are opened for it."""
        plan = self.plan
        truth, seen, effects = await record(privacy, plan, self.one, self.two)
        prompts = 2 * list(range(plan.prompts))
        short: list[list[list[Seen]]] = [[], []]
        for prompt in prompts:
            with Wiretap(self.one) as first, Wiretap(self.two) as second:
                async with self.one.client(lora(plan), privacy=privacy, seed=plan.seed) as client:
                    give_adapter(client.model, plan)
                    await generate(client, truth.texts[prompt], plan.new_tokens)
            for executor, tap in zip(short, (first, second), strict=True):
                executor.append(tap.seen)
        return _Traffic(
            truth,
            [collect(calls, effects) for calls in seen],
            [FirstRequests.collect(prompts, clients) for clients in short if clients[0]],
            sum(tensor.nbytes for calls in seen for call in calls for tensor in (*call.tensors, *(call.results or ()))),
        )


async def record(
    privacy: Privacy | None, plan: Plan, one: Executor, two: Executor
) -> tuple[Truth, list[list[Seen]], list[torch.Tensor]]:
    """Play the workload. Returns the truth, the calls to each executor used, and noise sent for its effects."""
    with Wiretap(one) as first, Wiretap(two) as second, _noted_effects(privacy) as effects:
        async with one.client(lora(plan), privacy=privacy, seed=plan.seed) as client:
            truth = await play(client, list(one.layers), plan)
    return truth, [tap.seen for tap in (first, second) if tap.seen], effects


@contextmanager
def _noted_effects(privacy: Privacy | None) -> Iterator[list[torch.Tensor]]:
    """Collect the matrices that a scheme sends for their effects."""
    noted: list[torch.Tensor] = []
    if not isinstance(privacy, Scheme):
        yield noted
        return
    begin = privacy.begin

    def noting_begin(channels: Sequence[Channel], send: SendCall) -> Mask:
        def noting_send(call: Call) -> Future[Results]:
            noted.append(call.tensors[-1])
            return send(call)

        return begin(channels, noting_send)

    setattr(privacy, "begin", noting_begin)  # noqa: B010 (on this scheme only, not on the class)
    try:
        yield noted
    finally:
        delattr(privacy, "begin")


def _describe(privacy: Privacy | None) -> str:
    """Return the name and the numeric options of a scheme; others are the audit's own addresses and models."""
    if privacy is None:
        return "none"
    options: Iterable[tuple[str, Any]] = vars(privacy).items()
    numbers = [f"{name} {value:g}" for name, value in options if name[0] != "_" and isinstance(value, int | float)]
    return ", ".join([privacy.name, *numbers])
