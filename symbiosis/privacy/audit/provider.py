"""The provider: makes every attack on recorded traffic, and scores each for the goals that it serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symbiosis.privacy.audit import attacks, guesses
from symbiosis.privacy.audit.adapter import adapter_from_known_text, adapter_from_rows
from symbiosis.privacy.audit.evidence import Estimates, Evidence, FirstRequests
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.scores import Score, link_by_rows, rows_score, score_in_any_order, tokens_score
from symbiosis.privacy.audit.workload import Truth

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
    "rows apart": "takes rows that were sent in calls of their own as they are, whichever bare rows they may be",
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

_BY_PLACE = {
    "as is": attacks.as_is,
    "projection": attacks.projection,
    "principal": attacks.principal,
    "filter": attacks.filtered,
}


def attack(
    evidence: Evidence,
    apart: Sequence[torch.Tensor],
    first: FirstRequests | None,
    truth: Truth,
    public: Public,
    decoys: torch.Tensor,
) -> Scores:
    """Make all attacks on recorded traffic, and score them by the truth.

    Args:
        apart: matrices [m, w] that were sent besides the rows.
        decoys: guessed prompts.

    Raises:
        ValueError: the traffic is not that of this tenant; rows are missing, or there are too many.
    """
    for place, rows in truth.rows.items():
        if place not in evidence or evidence[place].rows.shape != rows.shape:
            raise ValueError(f"{place}: other rows were recorded than the {list(rows.shape)} that the tenant has")
    estimates: dict[str, Estimates | None] = {
        name: {place: estimate(stream, public.prior(place)) for place, stream in evidence.items()}
        for name, estimate in _BY_PLACE.items()
    }
    estimates["every vector"] = attacks.every_vector(evidence, public)
    estimates["difference"] = attacks.difference(evidence, public)
    if not any(len(stream.noise) for stream in evidence.values()):
        del estimates["projection"]
    found = {name: score(each, truth, public) for name, each in estimates.items() if each is not None}
    if apart:
        activations, gradients = (score_in_any_order(apart, truth, backward=backward) for backward in (False, True))
        found["rows apart"] = {"activations": activations, "gradients": gradients}
    best = estimates.get("projection") or estimates["as is"]
    assert best is not None
    found["known text"] = {"adapter": adapter_from_known_text(evidence, best, truth, public)}
    found["averaging"] = guesses.average(evidence, truth, public, middle=False)
    found["mid-range"] = guesses.average(evidence, truth, public, middle=True)
    by_token = guesses.guess_tokens(evidence, truth, public)
    by_prompt = guesses.guess_prompts(evidence, truth, public, decoys)
    for name, token, prompt in zip(("guess, Gaussian", "guess, bounds"), by_token, by_prompt, strict=True):
        found[name] = {"tokens": token, "prompts": prompt}
    found["sizes"] = {"links": guesses.link_by_sizes(evidence, truth)}
    if first is not None:
        found["first sizes"] = {"links": guesses.link_by_first_sizes(first)}
    return {name: found[name] for name in ATTACKS if name in found}


def score(estimates: Estimates, truth: Truth, public: Public) -> dict[str, Score]:
    """Score estimates of the bare rows of all places."""
    return {
        "adapter": adapter_from_rows(estimates, truth, public),
        "activations": rows_score(estimates, truth, backward=False),
        "tokens": tokens_score(estimates, truth, public),
        "links": link_by_rows(estimates, truth),
        "gradients": rows_score(estimates, truth, backward=True),
    }
