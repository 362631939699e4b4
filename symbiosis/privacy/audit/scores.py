"""Scores: how much of what the provider wants to know an estimate gives.

Scores of activations and gradients concern what is *particular* to a row: the mean over rows, which the public model
has as well, is subtracted from the estimate and from the truth. Whether a row is recovered does not depend on the
estimates of other rows, which may be noise: the truth's mean is subtracted from both.

Legend: n rows; w columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from symbiosis.privacy.audit.evidence import Estimates
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.workload import Truth


class Score(NamedTuple):
    """How well an attack reached a goal."""

    cosine: float
    """For vectors: 1 is perfect and 0 is nothing. For choices: 2·(rank of the right one, 1 best, 0 worst) − 1."""
    recovered: float
    """Recovered fraction: rows to a cosine of 0.99, right tokens and prompts, energy of the adapter."""
    error: float = float("nan")
    """Median relative error of a row, or relative error of the adapter."""
    choices: int = 0
    """Number of choices, for goals that are choices."""
    rows: int = 0
    """Number of rows, for goals that are rows."""


def rows_score(estimates: Estimates, truth: Truth, *, backward: bool) -> Score:
    """Score the estimated rows of all forward places (activations) or of all backward places (gradients).

    Rows that are zero do not count as recovered or not, nor in the number of rows.
    """
    cosines, recovered, errors = [], [], []
    for place, estimate in estimates.items():
        if place.backward is backward:
            rows, true = estimate.double(), truth.rows[place].double()
            mean = true.mean(0)
            cosines.append(F.cosine_similarity(rows - rows.mean(0), true - mean, dim=1))
            found = F.cosine_similarity(rows - mean, true - mean, dim=1) >= 0.99
            recovered.append(found[true.norm(dim=1) > 0])  # a gradient of zeros is known without an attack
            errors.append((rows - true).norm(dim=1) / true.norm(dim=1).clamp_min(1e-30))
    cosine, found = torch.cat(cosines).mean().item(), torch.cat(recovered)
    return Score(cosine, found.double().mean().item(), torch.cat(errors).median().item(), rows=len(found))


def score_in_any_order(rows: Sequence[torch.Tensor], truth: Truth, *, backward: bool) -> Score:
    """Score rows [m, w] that may be the bare rows of any place, in any order.

    A bare row is recovered if a multiple of it is there. Rows of zeros are not.
    """
    by_width: dict[int, list[torch.Tensor]] = {}
    for matrix in rows:
        by_width.setdefault(matrix.shape[1], []).append(matrix)
    units = {width: F.normalize(torch.cat(parts)) for width, parts in by_width.items()}
    cosines = []
    for place, true in truth.rows.items():
        if place.backward is backward:
            there = units.get(true.shape[1], true.new_zeros(1, true.shape[1]))
            cosines += [(part @ there.T).abs().amax(1) for part in torch.split(F.normalize(true.float()), 1024)]
    cosine = torch.cat(cosines).double()
    found = cosine >= 0.99
    errors = torch.where(found, (1 - cosine.square()).clamp_min(0).sqrt(), 1.0)
    recovered = found.double()
    return Score((recovered * cosine).mean().item(), recovered.mean().item(), errors.median().item(), rows=len(found))


def rank_score(scores: torch.Tensor, right: torch.Tensor) -> Score:
    """Score choices by ``scores`` [n, choices], of which the greatest is chosen, and the right choices [n]."""
    own = scores.gather(1, right[:, None])
    better = (scores > own).sum(1) + 0.5 * ((scores == own).sum(1) - 1)
    place = better / (scores.shape[1] - 1)
    first = (better == 0).double()
    return Score((1 - 2 * place.double()).mean().item(), first.mean().item(), choices=len(first))


def tokens_score(estimates: Estimates, truth: Truth, public: Public) -> Score:
    """Score token ids that are read off the first block's rows."""
    rows = estimates[truth.main_place(public.layer("q_proj"))]
    return rank_score(public.token_likeness(rows), truth.tokens)


def link_by_rows(estimates: Estimates, truth: Truth) -> Score:
    """Score which generations were for the same prompt, by their estimated forward rows."""
    features: list[list[torch.Tensor]] = [[] for _ in truth.prompts]
    for place, estimate in estimates.items():
        parts = truth.generated(place, estimate)
        least = min(map(len, parts))
        if place.backward or not least:
            continue
        mean = torch.cat(parts).mean(0)
        for found, part in zip(features, parts, strict=True):
            found.append(F.normalize((part[:least] - mean).flatten(), dim=0))
    return link_by_features([torch.cat(parts) for parts in features], list(truth.prompts.values()))


def link_by_features(features: Sequence[torch.Tensor], prompts: Sequence[int]) -> Score:
    """Score whether the operation nearest to each one by its features is for the same prompt.

    Only operations whose prompt occurs twice are scored.
    """
    matrix = torch.stack(list(features)).double()
    nearness = -torch.cdist(matrix, matrix)
    scores = []
    for row, prompt in enumerate(prompts):
        others = [column for column in range(len(prompts)) if column != row]
        twins = [place for place, column in enumerate(others) if prompts[column] == prompt]
        if len(twins) == 1:
            scores.append(rank_score(nearness[row, others][None], torch.tensor(twins)))
    cosine, recovered = (sum(values) / len(scores) for values in list(zip(*scores, strict=True))[:2])
    return Score(cosine, recovered, choices=len(scores))
