"""Play the scene under each scheme, attack what the executors saw, and measure what the scheme costs."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from symbiosis.client.client import Client
from symbiosis.core.privacy import Privacy
from symbiosis.core.registry import make_privacy
from symbiosis.core.requests import Call
from symbiosis.core.transport import Channel
from symbiosis.host import Executor
from symbiosis.privacy.audit.evidence import Visits, collect, random_traffic
from symbiosis.privacy.audit.goals import Score
from symbiosis.privacy.audit.provider import Provider, Scores, together
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.scene import Plan, Played, build, give_adapter, lora, play, text, visit
from symbiosis.privacy.audit.verdict import FALSE_FINDS, Limit
from symbiosis.privacy.masks import Ask, Mask
from symbiosis.privacy.scheme import Scheme
from symbiosis.privacy.wiretap import Seen, Wiretap

__all__ = ["SCHEMES", "Audit", "Costs", "View", "audit"]

SCHEMES = (
    "none",
    "noise-pool",
    "mixed-noise",
    "mixed-noise:rank=1024",
    "local-pads",
    "secret-shares",
    "secret-shares:model=base",
)
"""What is audited by default. ``base`` is the audit's own model."""

Progress = Callable[[str], None]


@dataclass
class Costs:
    """Of a scheme, beside sending rows bare; times are medians of pairs measured next to each other."""

    decode: float
    """Time to generate a text."""
    train: float
    """Time for a training step."""
    traffic: float
    """Bytes to and from executors, over the whole scene."""
    logits: float
    """Greatest error of a logit, over the greatest logit."""
    gradients: float
    """The same of the adapter's gradients."""


@dataclass
class View:
    """What one executor (or all together) made of one scheme's traffic."""

    scheme: str
    who: str
    """Which executor it is, where there are several."""
    scores: Scores
    found: dict[str, set[str]]
    """Attack → goals at which it did better than on random traffic."""
    by_repeats: dict[str, dict[int, float]]
    control: bool = False
    """Whether it is beyond what the scheme claims: executors that collude."""

    @property
    def name(self) -> str:
        return f"{self.scheme} ({self.who})" if self.who else self.scheme


@dataclass
class Audit:
    """All of it."""

    plan: Plan
    views: list[View]
    costs: dict[str, Costs]
    limits: dict[str, dict[str, Limit]]
    """Attack → goal → what it takes to be better than on random traffic."""
    share: float
    baselines: int
    bare: View
    """What the attacks make of bare rows: what they do not find there they would not find anywhere."""
    guess: float
    """The least error of activations that an attack came to on random traffic: a guess by the public model."""
    schemes: dict[str, str] = field(default_factory=dict)
    """Scheme as asked for → with all its options."""

    def holds(self, scheme: str) -> bool | None:
        """Whether no attack got more out of a scheme's traffic than out of random traffic. None if that shows nothing:
        the attacks do not find the adapter in bare rows, either."""
        if any(goals for view in self._of(scheme) for goals in view.found.values()):
            return False
        return None if "adapter" in self.missed else True

    @property
    def missed(self) -> set[str]:
        """Goals of which no attack gets anything out of bare rows."""
        reached = set().union(*self.bare.found.values())
        return {goal for scores in self.bare.scores.values() for goal in scores} - reached

    def limit(self, attack: str, goal: str) -> Limit | None:
        """What it takes of an attack. What random traffic hardly has, such as rows that are alike, is compared with
        rows taken as they are."""
        return self.limits.get(attack, self.limits["as is"]).get(goal)

    def _of(self, scheme: str) -> Iterable[View]:
        return (view for view in self.views if view.scheme == scheme and not view.control)


@dataclass
class _Scheme:
    name: str
    privacy: Privacy | None


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
        schemes: names with options, as for ``privacy=``, or objects. ``local-pads`` gets the audit's model, as does
            whoever says ``model=base``, and ``secret-shares`` a second executor of it, unless they say otherwise.
        plan: how large the scene is.
        baselines: lots of random traffic that attacks are compared with.
        rounds: of timing; 0 measures no times (they are NaN).
        progress: is told what goes on.

    Raises:
        UsageError: no such scheme, or options that it does not take.
    """
    plan = plan or Plan()
    base = build(plan)
    with tempfile.TemporaryDirectory() as folder:
        _save(base, folder)
        other = f"audit-{os.urandom(4).hex()}"
        async with Executor(base) as one, Executor(build(plan), name=other) as two:
            chosen = [_scheme(scheme, folder, f"inproc://{other}") for scheme in schemes]
            return await _audit(chosen, plan, base, one, two, baselines, rounds, progress)


def _save(model: Any, folder: str) -> None:
    """For a scheme that reads the public weights, without a word."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def _scheme(scheme: str | Privacy, folder: str, other: str) -> _Scheme:
    if not isinstance(scheme, str):
        return _Scheme(scheme.name, scheme)
    name, _, options = scheme.partition(":")
    if name == "local-pads" and "model=" not in options:
        options = ",".join(filter(None, [options, "model=base"]))
    options = re.sub(r"\bmodel=base(?=,|$)", lambda _: f"model={folder}", options)
    if name == "secret-shares" and "with=" not in options:
        options = ",".join(filter(None, [options, f"with={other}"]))
    return _Scheme(scheme, make_privacy(f"{name}:{options}" if options else name))


async def _audit(
    schemes: Sequence[_Scheme],
    plan: Plan,
    base: Any,
    one: Executor,
    two: Executor,
    baselines: int,
    rounds: int,
    progress: Progress,
) -> Audit:
    layers = list(one.layers)
    public = Public(base, layers, text(plan, 256, torch.Generator().manual_seed(plan.seed + 4)))
    control = next((scheme for scheme in schemes if scheme.privacy is None), None) or _Scheme("none", None)
    progress("the tenant works, with bare rows")
    played, taps, _ = await _tap(control, plan, one, two)
    provider, shape = Provider(public, plan, played), collect(taps[0])
    (came,) = await _visits(control, plan, played, one, two)
    bare_bytes = _bytes(taps[0])
    progress("attacks on bare rows")
    bare = View(control.name, "", provider.attack(shape, came), {}, provider.by_repeats(shape))
    limits: dict[str, dict[str, list[Score]]] = {}
    for lot in range(baselines):
        progress(f"random traffic, lot {lot + 1} of {baselines}")
        generator = torch.Generator().manual_seed(plan.seed + 1000 + lot)
        noise = random_traffic(shape, played.truth.rows, generator)
        for attack, scores in provider.attack(noise, came.random(generator)).items():
            for goal, score in scores.items():
                limits.setdefault(attack, {}).setdefault(goal, []).append(score)
    views: list[View] = []
    costs: dict[str, Costs] = {}
    for scheme in schemes:
        if scheme is control:
            views.append(bare)
            costs[scheme.name] = await _costs(scheme, plan, one, rounds, bare_bytes)
            continue
        progress(f"{scheme.name}: the tenant works")
        played, taps, effects = await _tap(scheme, plan, one, two)
        visits = await _visits(scheme, plan, played, one, two)
        provider = Provider(public, plan, played)
        evidences = [collect(tap, effects) for tap in taps]
        whose = [""] if len(taps) == 1 else [f"executor {number + 1}" for number in range(len(taps))]
        for who, evidence, came in zip(whose, evidences, visits, strict=True):
            progress(f"{scheme.name}: attacks {who}")
            # A share of several is centered on its part of the row.
            whole = {place: stream._replace(rows=len(taps) * stream.rows) for place, stream in evidence.items()}
            views.append(View(scheme.name, who, provider.attack(whole, came), {}, provider.by_repeats(whole)))
        if len(taps) > 1:
            progress(f"{scheme.name}: attacks of executors that collude")
            views.append(View(scheme.name, "both together", provider.attack(together(evidences)), {}, {}, control=True))
        progress(f"{scheme.name}: costs")
        costs[scheme.name] = await _costs(scheme, plan, one, rounds, sum(map(_bytes, taps)))
    for cost in costs.values():
        cost.traffic /= bare_bytes
    attacked = views if bare in views else [bare, *views]
    count = sum(len(scores) for view in attacked for scores in view.scores.values())
    share = FALSE_FINDS / count
    found = {
        attack: {goal: Limit(scores, share) for goal, scores in goals.items()}
        for attack, goals in limits.items()
        if min(map(len, goals.values())) == baselines
    }
    for view in attacked:
        for attack, scores in view.scores.items():
            at = found.get(attack, found["as is"])
            view.found[attack] = {goal for goal, score in scores.items() if at[goal].exceeded_by(score)}
    errors = [score.error for goals in limits.values() for score in goals.get("activations", [])]
    return Audit(
        plan,
        views,
        costs,
        found,
        share,
        baselines,
        bare,
        min(errors),
        {scheme.name: "none" if scheme.privacy is None else _described(scheme.privacy) for scheme in schemes},
    )


def _described(privacy: Privacy) -> str:
    """With its options, but not the audit's own addresses and folders."""
    values = {
        name: value
        for name, value in vars(privacy).items()
        if not name.startswith("_") and isinstance(value, int | float)
    }
    return ", ".join([privacy.name, *(f"{name} {value:g}" for name, value in values.items())])


async def _tap(
    scheme: _Scheme, plan: Plan, one: Executor, two: Executor
) -> tuple[Played, list[list[Seen]], list[torch.Tensor]]:
    """What the tenant meant, what came to each executor that was asked, and what was asked for its effects alone."""
    with Wiretap(one) as first, Wiretap(two) as second, _effects(scheme.privacy) as effects:
        async with one.client(lora(plan), privacy=scheme.privacy, seed=plan.seed) as client:
            played = await play(client, list(one.layers), plan)
    return played, [tap.seen for tap in (first, second) if tap.seen], effects


async def _visits(scheme: _Scheme, plan: Plan, played: Played, one: Executor, two: Executor) -> list[Visits]:
    """What comes to each executor that is asked, where a client is opened for each text, and each comes twice."""
    prompts = 2 * list(range(len(played.texts)))
    seen: list[list[list[Seen]]] = [[], []]
    for prompt in prompts:
        with Wiretap(one) as first, Wiretap(two) as second:
            async with one.client(lora(plan), privacy=scheme.privacy, seed=plan.seed) as client:
                await visit(client, plan, played.texts[prompt])
        seen[0].append(first.seen)
        seen[1].append(second.seen)
    return [Visits.collect(prompts, visits) for visits in seen if visits[0]]


@contextmanager
def _effects(privacy: Privacy | None) -> Iterator[list[torch.Tensor]]:
    """What a scheme asks the effects of, meanwhile."""
    asked: list[torch.Tensor] = []
    if not isinstance(privacy, Scheme):
        yield asked
        return
    begin = privacy.begin

    def watched(channels: Sequence[Channel], ask: Ask) -> Mask:
        def noted(call: Call) -> Future[tuple[torch.Tensor, ...]]:
            asked.append(call.tensors[-1])
            return ask(call)

        return begin(channels, noted)

    setattr(privacy, "begin", watched)  # noqa: B010 (of this scheme only)
    try:
        yield asked
    finally:
        delattr(privacy, "begin")


def _bytes(seen: Iterable[Seen]) -> int:
    return sum(tensor.nbytes for one in seen for tensor in (*one.tensors, *(one.results or ())))


# --------------------------------------------------------------------------------------------------------------- costs


async def _costs(scheme: _Scheme, plan: Plan, executor: Executor, rounds: int, moved: int) -> Costs:
    """Beside a bare client of the same executor."""
    nan = float("nan")
    async with (
        executor.client(lora(plan), seed=plan.seed) as bare,
        executor.client(lora(plan), privacy=scheme.privacy, seed=plan.seed) as masked,
    ):
        clients = (bare, masked)
        results = []
        for client in clients:
            give_adapter(client.model, plan)
            results.append(await _results(client, plan))
        (logits, gradients), (masked_logits, masked_gradients) = results
        times: dict[str, list[float]] = {"decode": [], "train": []}
        work = {"decode": _decode, "train": _train}
        for what, do in work.items():
            for _ in range(rounds + 1 if rounds else 0):
                seconds = []
                for client in clients:
                    started = time.perf_counter()
                    await do(client, plan)
                    seconds.append(time.perf_counter() - started)
                times[what].append(seconds[1] / seconds[0])
    return Costs(
        median(times["decode"][1:]) if rounds else nan,
        median(times["train"][1:]) if rounds else nan,
        float(moved),
        _error(masked_logits, logits),
        _error(masked_gradients, gradients),
    )


async def _results(client: Client, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the adapter's gradients, of a batch."""
    ids = text(plan, 4, torch.Generator().manual_seed(plan.seed + 5))
    await client.forward(input_ids=ids)  # siblings are known from then on, so that shapes are the same
    output = await client.forward(input_ids=ids, labels=ids)
    await client.backward(output.loss)
    parameters = [parameter for parameter in client.model.parameters() if parameter.requires_grad]
    gradients = torch.cat([parameter.grad.flatten() for parameter in parameters])
    client.model.zero_grad()
    return output.logits.detach(), gradients


async def _decode(client: Client, plan: Plan) -> None:
    ids = text(plan, 1, torch.Generator().manual_seed(plan.seed + 6))
    tokens = 4 * plan.new_tokens
    await client.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )


async def _train(client: Client, plan: Plan) -> None:
    ids = text(plan, 8, torch.Generator().manual_seed(plan.seed + 7))
    optimizer = torch.optim.SGD([parameter for parameter in client.model.parameters() if parameter.requires_grad], 0.0)
    for _ in range(4):
        await client.train_step({"input_ids": ids, "labels": ids}, optimizer)


def _error(masked: torch.Tensor, bare: torch.Tensor) -> float:
    return ((masked - bare).abs().max() / bare.abs().max()).item()
