"""The provider: makes every attack on recorded traffic, and scores each for the goals that it serves."""

from __future__ import annotations

import math

from symbiosis.privacy.audit import attacks, guesses
from symbiosis.privacy.audit.adapter import adapter_from_known_text, adapter_from_rows
from symbiosis.privacy.audit.evidence import Estimates, Evidence, FirstRequests
from symbiosis.privacy.audit.goals import Score, Truth, link_by_rows, rows_score, tokens_score
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.workload import Plan, text

__all__ = ["ATTACKS", "GOALS", "Provider", "Scores"]

GOALS = {
    "adapter": "ΔW of each up_proj",
    "activations": "rows of forward requests",
    "tokens": "token ids",
    "prompts": "which of 100 guessed prompts a request is for",
    "links": "which requests are for the same prompt",
    "gradients": "rows of backward requests",
}

ATTACKS = {
    "as is": "takes rows as they were sent",
    "every vector": "subtracts each vector that was sent for its effects, and keeps the smallest rest",
    "difference": "finds rows with the same mask by their likeness, and subtracts their mean",
    "projection": "keeps what is outside the span of the noise that was sent, and guesses the rest from it",
    "principal": "keeps what is outside the largest directions of the traffic, and guesses the rest from it",
    "filter": "makes the best linear guess by the second moments of the traffic and of the base model's rows",
    "known text": "reads tokens first; then the base model gives each block's rows, and these its ΔW",
    "averaging": "takes the mean over all requests for one prompt",
    "mid-range": "takes the middle between the extremes of all requests for one prompt",
    "guess, Gaussian": "compares guessed tokens and prompts by their likelihood under Gaussian noise",
    "guess, bounds": "excludes guessed tokens and prompts that are further from a row than uniform noise can be",
    "sizes": "compares the sizes of requests",
    "first sizes": "compares the sizes of the first requests of clients that are opened for one text each",
}

Scores = dict[str, dict[str, Score]]
"""Attack → goal → score, where the attack applies."""

_ESTIMATES = {
    "as is": attacks.as_is,
    "every vector": attacks.every_vector,
    "difference": attacks.difference,
    "projection": attacks.projection,
    "principal": attacks.principal,
    "filter": attacks.filtered,
}
_DECOYS = 99


class Provider:
    """A provider that knows the base model, has text of its own, and guesses prompts."""

    def __init__(self, public: Public, plan: Plan, truth: Truth) -> None:
        self.public = public
        self.truth = truth
        self.decoys = text(plan, _DECOYS, 3)

    def attack(self, evidence: Evidence, first: FirstRequests | None = None) -> Scores:
        """Make all attacks.

        Args:
            evidence: the recorded traffic, in the order of the tenant's rows.
            first: sizes of the requests of clients for one text each.

        Raises:
            ValueError: the traffic is not that of this tenant; rows are missing, or there are too many.
        """
        self._check(evidence)
        truth, public = self.truth, self.public
        estimates = {name: attack(evidence, public) for name, attack in _ESTIMATES.items()}
        found: Scores = {name: self._score(each) for name, each in estimates.items() if each is not None}
        best = estimates["projection"] or estimates["as is"]
        assert best is not None
        found["known text"] = {"adapter": adapter_from_known_text(evidence, best, truth, public)}
        for name, middle in (("averaging", False), ("mid-range", True)):
            means = guesses.averaged(evidence, truth, middle=middle)
            found[name] = {
                "activations": rows_score(means, truth, backward=False),
                "tokens": tokens_score(means, truth, public),
            }
        by_token = guesses.guess_tokens(evidence, truth, public)
        by_prompt = guesses.guess_prompts(evidence, truth, public, self.decoys)
        for name, token, prompt in zip(("guess, Gaussian", "guess, bounds"), by_token, by_prompt, strict=True):
            found[name] = {"tokens": token, "prompts": prompt}
        found["sizes"] = {"links": guesses.link_by_sizes(evidence, truth)}
        if first is not None:
            found["first sizes"] = {"links": guesses.link_by_first_sizes(first)}
        return {
            name: {goal: score for goal, score in scores.items() if not math.isnan(score.cosine)}
            for name, scores in found.items()
        }

    def _score(self, estimates: Estimates) -> dict[str, Score]:
        truth, public = self.truth, self.public
        return {
            "adapter": adapter_from_rows(estimates, truth, public),
            "activations": rows_score(estimates, truth, backward=False),
            "tokens": tokens_score(estimates, truth, public),
            "links": link_by_rows(estimates, truth),
            "gradients": rows_score(estimates, truth, backward=True),
        }

    def _check(self, evidence: Evidence) -> None:
        for place, rows in self.truth.rows.items():
            came = evidence.get(place)
            if came is None or came.rows.shape != rows.shape:
                shape = None if came is None else list(came.rows.shape)
                raise ValueError(f"{place}: the tenant has rows of shape {list(rows.shape)}, but {shape} was recorded")
