"""The provider: every attack on one lot of traffic, for everything that it gives."""

from __future__ import annotations

import math

import torch

from symbiosis.privacy.audit import attacks, guesses
from symbiosis.privacy.audit.evidence import Estimates, Evidence, Stream, Visits
from symbiosis.privacy.audit.goals import Score, activations, adapter, linking, tokens
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.scene import Plan, Played, Stage, text

__all__ = ["ATTACKS", "GOALS", "Provider", "Scores", "together"]

GOALS = {
    "adapter": "ΔW of each up_proj",
    "activations": "rows of forward requests",
    "tokens": "token ids",
    "prompts": "which of 100 guessed prompts a request is for",
    "links": "which requests are for the same prompt",
    "gradients": "rows of backward requests",
}

ATTACKS = {
    "as is": "rows are taken as they are",
    "every vector": "each vector that was sent for its effects is subtracted, and what leaves the least is kept",
    "difference": "rows under one mask are found by their likeness; each less the mean of its like",
    "projection": "what is outside the span of the noise that was sent; the rest guessed from it",
    "principal": "what is outside the directions in which the traffic is largest; the rest guessed from it",
    "filter": "the best linear guess by the second moments of the traffic and of the base model's rows",
    "known text": "tokens first; then the base model gives the first block's rows, these its ΔW, and so on",
    "averaging": "the mean over all requests for one prompt",
    "mid-range": "the middle between the extremes of all requests for one prompt",
    "guess, Gaussian": "likelihood of guessed tokens and prompts, were the noise Gaussian",
    "guess, bounds": "guessed tokens and prompts from which a row is further than noise can be are excluded",
    "moments": "mean products of rows of two layers, in which independent masks cancel",
    "sizes": "how large the rows of each request are, whatever is in them",
    "first sizes": "the same where a client is opened for each request, and its first ones are compared",
}

Scores = dict[str, dict[str, Score]]
"""Attack → goal → score, of what applies."""

DECOYS = 99


class Provider:
    """Knows the base model, has text of its own, and guesses prompts."""

    def __init__(self, public: Public, plan: Plan, played: Played) -> None:
        self.public = public
        self.plan = plan
        self.played = played
        self.decoys = text(plan, DECOYS, torch.Generator().manual_seed(plan.seed + 3))

    def attack(self, evidence: Evidence, visits: Visits | None = None) -> Scores:
        """All attacks.

        Args:
            visits: what came of clients for one text each.

        Raises:
            ValueError: the traffic is not that of this tenant: rows are missing, or there are more.
        """
        truth = self.played.truth
        self._check(evidence)
        found: Scores = {}
        estimates = {
            "as is": attacks.bare(evidence, self.public),
            "every vector": attacks.every_vector(evidence, self.public),
            "difference": attacks.difference(evidence, self.public),
            "projection": attacks.projection(evidence, self.public),
            "principal": attacks.principal(evidence, self.public),
            "filter": attacks.filtered(evidence, self.public),
        }
        for name, estimate in estimates.items():
            if estimate is not None:
                found[name] = self._all(estimate)
        best = estimates["projection"] or estimates["as is"]
        assert best is not None
        rank = self.plan.rank
        walks = self.played.prompts
        generating = int(Stage.GENERATE)
        found["known text"] = {
            "adapter": guesses.known_text(evidence, best, truth, self.public, generating, walks, rank)
        }
        for name, middle in (("averaging", False), ("mid-range", True)):
            means = guesses.averaged(evidence, truth, Stage.REPEAT, self.plan.repeats, middle=middle)
            found[name] = {
                "activations": activations(means, truth, backward=False),
                "tokens": tokens(means, truth, self.public),
            }
        by_token = guesses.guess_tokens(evidence, truth, self.public)
        by_prompt = guesses.guess_prompts(
            evidence, truth, self.public, generating, walks, self.played.texts, self.decoys
        )
        for name, token, prompt in zip(("guess, Gaussian", "guess, bounds"), by_token, by_prompt, strict=True):
            found[name] = {"tokens": token, "prompts": prompt}
        found["moments"] = {"adapter": guesses.moments(evidence, truth, self.public, generating, rank)}
        found["sizes"] = {"links": guesses.amplitudes(evidence, truth, generating, walks)}
        if visits is not None:
            found["first sizes"] = {"links": guesses.beginnings(visits)}
        return {
            name: {goal: score for goal, score in scores.items() if not math.isnan(score.cosine)}
            for name, scores in found.items()
        }

    def _all(self, estimates: Estimates) -> dict[str, Score]:
        truth, public = self.played.truth, self.public
        return {
            "adapter": adapter(estimates, truth, public, Stage.GENERATE, self.plan.rank),
            "activations": activations(estimates, truth, backward=False),
            "tokens": tokens(estimates, truth, public),
            "links": linking(estimates, truth, public, Stage.GENERATE, self.played.prompts),
            "gradients": activations(estimates, truth, backward=True),
        }

    def by_repeats(self, evidence: Evidence) -> dict[str, dict[int, float]]:
        """Cosine of rows with the truth, after 1, 2, 4… requests for one prompt."""
        counts = [2**k for k in range(20) if 2**k <= self.plan.repeats]
        found: dict[str, dict[int, float]] = {}
        for name, middle in (("averaging", False), ("mid-range", True)):
            found[name] = {}
            for count in counts:
                means = guesses.averaged(evidence, self.played.truth, Stage.REPEAT, count, middle=middle)
                found[name][count] = activations(means, self.played.truth, backward=False).cosine
        return found

    def _check(self, evidence: Evidence) -> None:
        for place, rows in self.played.truth.rows.items():
            came = evidence.get(place)
            if came is None or came.rows.shape != rows.shape:
                raise ValueError(
                    f"{place}: the tenant meant {list(rows.shape)}, and what came is "
                    f"{None if came is None else list(came.rows.shape)}"
                )


def together(evidences: list[Evidence]) -> Evidence:
    """What executors have who put their traffic together: the sum of shares, with what was wrapped unwrapped."""
    first, *others = evidences
    return {
        place: Stream(_sum([stream.rows, *(other[place].rows for other in others)]), stream.request, stream.noise)
        for place, stream in first.items()
    }


def _sum(shares: list[torch.Tensor]) -> torch.Tensor:
    """Modulo 2A, with A the power of two at or above the largest number of a row of shares."""
    most = torch.stack(shares).abs().amax((0, 2))
    turn = 2 * torch.exp2(most.clamp_min(1e-30).log2().ceil())[:, None]
    total = torch.stack(shares).double().sum(0)
    return (total - turn * (total / turn).round()).float()
