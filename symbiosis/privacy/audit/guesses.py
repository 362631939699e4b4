"""Attacks that compare the traffic with guesses: guessed texts, averages over repetitions, and sizes of requests.

They need no bare row. They use the distribution of the noise, which is public.

Legend: n rows; w columns; c candidates; t tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from symbiosis.privacy.audit.evidence import Evidence, FirstRequests, Place
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.scores import Score, link_by_features, rank_score, rows_score, tokens_score
from symbiosis.privacy.audit.workload import Truth

_ROWS_AT_A_TIME = 64


def guess_tokens(evidence: Evidence, truth: Truth, public: Public) -> tuple[Score, Score]:
    """Score the most likely token of each row of the first block: for Gaussian noise, and for uniform noise."""
    rows = evidence[truth.main_place(public.layer("q_proj"))].rows
    gaussian, outside = _distances(rows, public.token_rows(), rows)
    return rank_score(-gaussian, truth.tokens), rank_score(-_combine(gaussian, outside), truth.tokens)


def guess_prompts(evidence: Evidence, truth: Truth, public: Public, decoys: torch.Tensor) -> tuple[Score, Score]:
    """Score which of some guessed prompts each generation was for, by rows of the base model for each of them.

    Args:
        decoys: [c, t] prompts of the same length as the tenant's. The guesses are these and the right prompt.
    """
    texts, prompts = truth.texts, list(truth.prompts.values())
    length = texts.shape[1]
    guessed = public.run(torch.cat([texts, decoys]))
    gaussian = torch.zeros(len(prompts), 1 + len(decoys))
    outside = torch.zeros(len(prompts), 1 + len(decoys))
    for place, stream in evidence.items():
        if place.backward:
            continue
        expected = guessed[place.layers[0]].view(len(texts) + len(decoys), length, -1)
        for number, rows in enumerate(truth.generated(place, stream.rows)):
            if len(rows) < length:
                continue
            choices = torch.cat([expected[prompts[number]][None], expected[len(texts) :]]).flatten(1)
            by_gaussian, by_bounds = _distances(rows[:length].reshape(1, -1), choices, stream.rows)
            gaussian[number] += by_gaussian[0]
            outside[number] += by_bounds[0]
    right = torch.zeros(len(prompts), dtype=torch.long)
    return rank_score(-gaussian, right), rank_score(-_combine(gaussian, outside), right)


def _distances(
    rows: torch.Tensor, candidates: torch.Tensor, traffic: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how unlikely each candidate is, [n, c] for rows [n, w] and candidates [c, w], in two ways.

    The first is for Gaussian noise: half the squared distance over its variance, up to a constant. The second is for
    noise that is uniform in ±A: how many elements differ from the candidate's by more than A, which never happens for
    the right one. A, a power of two, and the variance are estimated from all rows of the place.
    """
    gaussian = (0.5 * candidates.square().sum(1) - rows @ candidates.T) / float(traffic.square().mean())
    bound = float(torch.exp2((2 * traffic.abs().mean()).log2().round()))
    parts = torch.split(rows, _ROWS_AT_A_TIME)
    outside = torch.cat([((part[:, None] - candidates).abs() > bound).sum(2) for part in parts])
    return gaussian, outside.float()


def _combine(gaussian: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
    """Return distances by bounds, in which ties are resolved by the distance for Gaussian noise."""
    least = gaussian.amin(-1, keepdim=True)
    spread = (gaussian.amax(-1, keepdim=True) - least).clamp_min(1e-30)
    return outside + 0.5 * (gaussian - least) / spread


def average(evidence: Evidence, truth: Truth, public: Public, *, middle: bool) -> dict[str, Score]:
    """Score the mean of the rows of the repeated prompt over all requests for it, or their :func:`midrange`."""
    estimates: dict[Place, torch.Tensor] = {}
    first: dict[Place, torch.Tensor] = {}
    """Place → indices of the rows of the first request."""
    for place, stream in evidence.items():
        rows = torch.stack(truth.by_operation(place, stream.rows, truth.repeats))
        if rows.numel():
            first[place] = (truth.operation[place] == truth.repeats[0]).nonzero()[:, 0]
            estimates[place] = midrange(rows) if middle else rows.mean(0)
    tokens = truth.tokens[first[truth.main_place(public.layer("q_proj"))]]
    once = replace(truth, rows={place: truth.rows[place][index] for place, index in first.items()}, tokens=tokens)
    return {
        "activations": rows_score(estimates, once, backward=False),
        "tokens": tokens_score(estimates, once, public),
    }


def midrange(rows: torch.Tensor) -> torch.Tensor:
    """Return the middle [n, w] between the extremes of [repeats, n, w].

    For uniform noise in ±A it is off by A/repeats, where the mean is off by A/√repeats.
    """
    return (rows.amax(0) + rows.amin(0)) / 2


def link_by_sizes(evidence: Evidence, truth: Truth) -> Score:
    """Score which generations were for the same prompt, by the sizes of their requests alone."""
    features: list[list[torch.Tensor]] = [[] for _ in truth.prompts]
    for place, stream in evidence.items():
        if place.backward:
            continue
        squares = stream.rows.square().mean(1).double()
        size = torch.bincount(stream.request, weights=squares) / torch.bincount(stream.request)
        for parts, requests in zip(features, truth.generated(place, stream.request), strict=True):
            parts.append(0.5 * size[torch.unique(requests)].clamp_min(1e-30).log2())
    return link_by_features([torch.cat(parts) for parts in features], list(truth.prompts.values()))


def link_by_first_sizes(first: FirstRequests) -> Score:
    """Score the same for clients that were opened for one text each."""
    sizes = 0.5 * first.sizes.clamp_min(1e-30).log2()
    return link_by_features(list(sizes), 2 * list(range(len(sizes) // 2)))
