"""What the provider wants to know, and scores of how much of it an estimate gives.

Scores of activations and gradients concern what is *particular* to a row: the mean over rows, which the public model
has as well, is subtracted from the estimate and from the truth.

Legend: n rows; w columns; i in_features; o out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch.nn import functional as F

from symbiosis.privacy.audit.evidence import Estimates, Place
from symbiosis.privacy.audit.public import Public

__all__ = ["Score", "Stage", "Truth", "link_by_features", "link_by_rows", "rank_score", "rows_score", "tokens_score"]


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


NOT_APPLICABLE = Score(float("nan"), float("nan"))


class Stage(IntEnum):
    """Stage of the tenant's work."""

    WARM = 0
    """One forward pass, in which the client learns which layers are siblings."""
    GENERATE = 1
    """Generation for different prompts."""
    REPEAT = 2
    """Forward passes over one prompt."""
    TRAIN = 3


@dataclass
class Truth:
    """The tenant's knowledge of its own traffic; rows are in the order of each stream."""

    rows: dict[Place, torch.Tensor]
    """[n, w] bare rows."""
    stage: dict[Place, torch.Tensor]
    """[n] the :class:`Stage` of each row."""
    operation: dict[Place, torch.Tensor]
    """[n] number of the tenant's operation, such as one generation."""
    tokens: torch.Tensor
    """[n] token of each row of the first block."""
    adapter: dict[int, torch.Tensor]
    """Layer (an up_proj) → ΔW [o, i]."""
    rank: int
    """Rank of the adapter."""
    prompts: dict[int, int]
    """Operation → prompt, for operations that generate."""
    texts: torch.Tensor
    """[prompts, tokens] token ids of the prompts."""

    def main_place(self, layer: int) -> Place:
        """Return the forward place of a layer with the most rows.

        A layer has two places: alone, and together with its siblings once the client knows them.
        """
        places = [place for place in self.rows if layer in place.layers and not place.backward]
        return max(places, key=lambda place: len(self.rows[place]))


def rows_score(estimates: Estimates, truth: Truth, *, backward: bool) -> Score:
    """Score the estimated rows of all forward places (activations) or of all backward places (gradients)."""
    cosines, errors = [], []
    for place, (rows, index) in estimates.items():
        if place.backward is not backward or not len(rows):
            continue
        rows, true = rows.double(), truth.rows[place][index].double()
        cosines.append(F.cosine_similarity(rows - rows.mean(0), true - true.mean(0), dim=1))
        errors.append((rows - true).norm(dim=1) / true.norm(dim=1).clamp_min(1e-30))
    if not cosines:
        return NOT_APPLICABLE
    cosine = torch.cat(cosines)
    return Score(cosine.mean().item(), (cosine >= 0.99).double().mean().item(), torch.cat(errors).median().item())


def rank_score(scores: torch.Tensor, right: torch.Tensor) -> Score:
    """Score choices by ``scores`` [n, choices], of which the greatest is chosen, and the right choices [n]."""
    own = scores.gather(1, right[:, None])
    better = (scores > own).sum(1) + 0.5 * ((scores == own).sum(1) - 1)
    place = better / (scores.shape[1] - 1)
    first = (better == 0).double()
    return Score((1 - 2 * place.double()).mean().item(), first.mean().item(), choices=len(first))


def tokens_score(estimates: Estimates, truth: Truth, public: Public) -> Score:
    """Score token ids that are read off the first block's rows."""
    place = truth.main_place(public.layer("q_proj"))
    if place not in estimates:
        return NOT_APPLICABLE
    rows, index = estimates[place]
    return rank_score(public.token_likeness(rows), truth.tokens[index])


def link_by_rows(estimates: Estimates, truth: Truth) -> Score:
    """Score which generations were for the same prompt, by their estimated forward rows."""
    features: dict[int, list[torch.Tensor]] = {}
    for place, (rows, index) in estimates.items():
        if place.backward:
            continue
        here = truth.stage[place][index] == Stage.GENERATE
        rows, operation = rows[here], truth.operation[place][index][here]
        least = min([int((operation == number).sum()) for number in truth.prompts], default=0)
        if not least:
            continue
        rows = rows - rows.mean(0)
        for number in truth.prompts:
            part = rows[operation == number][:least].flatten()
            features.setdefault(number, []).append(F.normalize(part, dim=0))
    if not features:
        return NOT_APPLICABLE
    return link_by_features({number: torch.cat(parts) for number, parts in features.items()}, truth.prompts)


def link_by_features(features: Mapping[int, torch.Tensor], prompts: Mapping[int, int]) -> Score:
    """Score whether the operation nearest to each one by its features is for the same prompt.

    Only operations whose prompt occurs twice are scored.
    """
    numbers = list(features)
    matrix = torch.stack([features[number] for number in numbers]).double()
    nearness = -torch.cdist(matrix, matrix)
    scores = []
    for row, number in enumerate(numbers):
        others = [column for column in range(len(numbers)) if column != row]
        twins = [column for column in others if prompts[numbers[column]] == prompts[number]]
        if len(twins) == 1:
            scores.append(rank_score(nearness[row, others][None], torch.tensor([others.index(twins[0])])))
    cosine, recovered = (sum(values) / len(scores) for values in list(zip(*scores, strict=True))[:2])
    return Score(cosine, recovered, choices=len(scores))
