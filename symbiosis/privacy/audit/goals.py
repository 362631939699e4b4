"""What the provider wants, and how much of it an estimate gives: a cosine, and a recovered fraction.

Scores of activations and gradients are about what is *particular* to a row: the mean over rows, which the public model
has too, is taken off both sides first.

Legend: n rows; w columns; r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from symbiosis.privacy.audit.evidence import Estimate, Estimates, Place
from symbiosis.privacy.audit.public import Public

__all__ = [
    "Score",
    "Truth",
    "activations",
    "adapter",
    "adapter_score",
    "first_place",
    "link",
    "linking",
    "prompts",
    "rank",
    "solve_adapter",
    "tokens",
]


class Score(NamedTuple):
    """How well an attack did."""

    cosine: float
    """1 is perfect and 0 nothing for vectors; for choices, 2·(rank of the right one, 1 best, 0 worst) − 1."""
    recovered: float
    """Fraction recovered: rows to a cosine of 0.99, tokens and prompts named rightly, energy of the adapter."""
    error: float = float("nan")
    """Median relative error of a row, or that of the adapter."""
    choices: int = 0
    """How many there were, for choices."""


@dataclass
class Truth:
    """What the tenant knows of its own traffic, in the order of each stream."""

    rows: dict[Place, torch.Tensor]
    """[n, w] as the tenant meant them."""
    stage: dict[Place, torch.Tensor]
    """[n]: what the tenant was at; see ``STAGES`` of the scene."""
    walk: dict[Place, torch.Tensor]
    """[n]: in which of the tenant's operations."""
    tokens: torch.Tensor
    """[n] of the first block's rows."""
    adapter: dict[int, torch.Tensor]
    """Layer (an up_proj) → ΔW [o, i]."""


def activations(estimates: Estimates, truth: Truth, *, backward: bool) -> Score:
    """Rows of all forward streams; or gradients, those of all backward ones."""
    cosines, errors = [], []
    for place, (rows, index) in estimates.items():
        if place.backward is not backward or not len(rows):
            continue
        true = truth.rows[place][index].double()
        centered = rows.double() - rows.double().mean(0)
        cosines.append(F.cosine_similarity(centered, true - true.mean(0), dim=1))
        errors.append((rows.double() - true).norm(dim=1) / true.norm(dim=1).clamp_min(1e-30))
    if not cosines:
        return Score(float("nan"), float("nan"))
    cosine = torch.cat(cosines)
    return Score(cosine.mean().item(), (cosine >= 0.99).double().mean().item(), torch.cat(errors).median().item())


def rank(scores: torch.Tensor, right: torch.Tensor) -> Score:
    """Of choices: ``scores`` [n, choices], the greatest is the attack's; ``right`` [n] is the right one."""
    own = scores.gather(1, right[:, None])
    better = (scores > own).sum(1) + 0.5 * ((scores == own).sum(1) - 1)
    place = better / (scores.shape[1] - 1)
    first = (better == 0).double()
    return Score((1 - 2 * place.double()).mean().item(), first.mean().item(), choices=len(first))


def tokens(estimates: Estimates, truth: Truth, public: Public) -> Score:
    """Token ids, by the nearest of the rows that the first block reads for each."""
    place = first_place(truth, public, "q_proj")
    if place not in estimates:
        return Score(float("nan"), float("nan"))
    rows, index = estimates[place]
    table = public.first_rows()
    center = table.mean(0)
    likeness = F.normalize(rows - center) @ F.normalize(table - center).T
    return rank(likeness, truth.tokens[index])


def first_place(truth: Truth, public: Public, name: str, layer: int | None = None) -> Place:
    """The place with the most rows to which a layer belongs: siblings are asked together once they are known."""
    index = public.layer(name) if layer is None else layer
    places = [place for place in truth.rows if index in place.layers and not place.backward]
    return max(places, key=lambda place: len(truth.rows[place]))


def linking(estimates: Estimates, truth: Truth, public: Public, stage: int, prompts_: Mapping[int, int]) -> Score:
    """Which requests were made for one prompt: of each, the nearest other one.

    Args:
        stage: rows of this stage are looked at.
        prompts_: walk → prompt.
    """
    features: dict[int, list[torch.Tensor]] = {}
    for place, (rows, index) in estimates.items():
        if place.backward:
            continue
        here = truth.stage[place][index] == stage
        rows, walk = rows[here], truth.walk[place][index][here]
        counts = [int((walk == number).sum()) for number in prompts_]
        if not counts or not min(counts):
            continue
        rows = rows - rows.mean(0)
        for number in prompts_:
            features.setdefault(number, []).append(rows[walk == number][: min(counts)].flatten())
    if not features:
        return Score(float("nan"), float("nan"))
    return link(
        {number: torch.cat([F.normalize(part, dim=0) for part in parts]) for number, parts in features.items()},
        prompts_,
    )


def link(features: Mapping[int, torch.Tensor], prompts_: Mapping[int, int]) -> Score:
    """Of each walk, whether the one nearest by its features is for the same prompt."""
    walks = [walk for walk in features if sum(prompts_[walk] == prompt for prompt in prompts_.values()) == 2]
    matrix = torch.stack([features[walk] for walk in features]).double()
    numbers = list(features)
    near = -torch.cdist(matrix, matrix)
    total, first = [], []
    for walk in walks:
        mine = numbers.index(walk)
        twin = next(i for i, other in enumerate(numbers) if i != mine and prompts_[other] == prompts_[walk])
        others = [i for i in range(len(numbers)) if i != mine]
        score = rank(near[mine, others][None], torch.tensor([others.index(twin)]))
        total.append(score.cosine)
        first.append(score.recovered)
    return Score(sum(total) / len(total), sum(first) / len(first), choices=len(first))


def prompts(scores: torch.Tensor) -> Score:
    """Whole prompts that the provider guesses: ``scores`` [prompts, guesses], of which the first is right."""
    return rank(scores, torch.zeros(len(scores), dtype=torch.long))


# ------------------------------------------------------------------------------------------------------------- adapter


def adapter(estimates: Estimates, truth: Truth, public: Public, stage: int, rank_: int) -> Score:
    """ΔW of each ``up_proj``: h = silu(gate·x) ⊙ (W + ΔW)·x comes to the next layer, and all but ΔW is known."""
    found, true = [], []
    for layer, delta in truth.adapter.items():
        down = public.layer(public.layers[layer].name.replace("up_proj", "down_proj"))
        gate = public.layer(public.layers[layer].name.replace("up_proj", "gate_proj"))
        xs, hs = first_place(truth, public, "", layer), first_place(truth, public, "", down)
        if xs not in estimates or hs not in estimates:
            return Score(float("nan"), float("nan"))
        x = _of(estimates[xs], truth, xs, stage)
        h = _of(estimates[hs], truth, hs, stage)
        found.append(solve_adapter(x, h, public.weight(gate), public.weight(layer), rank_).flatten())
        true.append(delta.double().flatten())
    return adapter_score(torch.cat(found), torch.cat(true))


def adapter_score(found: torch.Tensor, true: torch.Tensor) -> Score:
    """Of all ΔW in one vector; what came to no number at all is worth nothing."""
    found = found.nan_to_num(0.0, 0.0, 0.0)
    cosine = F.cosine_similarity(found, true, dim=0).item()
    return Score(cosine, cosine**2 if cosine > 0 else 0.0, ((found - true).norm() / true.norm()).item())


def _of(estimate: Estimate, truth: Truth, place: Place, stage: int) -> torch.Tensor:
    return estimate.rows[truth.stage[place][estimate.which] == stage].double()


def solve_adapter(x: torch.Tensor, h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, rank_: int) -> torch.Tensor:
    """ΔW [o, i] of rank r from x [n, i] and h [n, o].

    For each output feature o, least squares of h_o − s_o·(w_o·x) = s_o·(δ_o·x) with s = silu(gate·x): h/s is never
    formed, so that rows where s is next to nothing weigh as little as they say. A little ridge keeps directions that
    no row has at zero; what is left of the noise outside the rank r is cut off.
    """
    s = F.silu(x @ gate.double().T)
    left = h - s * (x @ up.double().T)
    size = s.square().sum(0)
    normal = _normal(s.square(), x)
    right = torch.einsum("no,ni->oi", s * left, x)
    ridge = 1e-9 * torch.diagonal(normal, dim1=1, dim2=2).mean(1).clamp_min(1e-30)
    normal += ridge[:, None, None] * torch.eye(x.shape[1], dtype=x.dtype)
    delta = torch.linalg.solve(normal, right[:, :, None])[:, :, 0] * (size > 0)[:, None]
    left_vectors, values, right_vectors = torch.linalg.svd(delta, full_matrices=False)
    found: torch.Tensor = (left_vectors[:, :rank_] * values[:rank_]) @ right_vectors[:rank_]
    return found


def _normal(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[o, i, i]: Σ_n weights[n, o]·x[n]·x[n]ᵀ, a matrix product in single pieces that fit into memory."""
    return torch.stack([(x * weights[:, o, None]).T @ x for o in range(weights.shape[1])])
