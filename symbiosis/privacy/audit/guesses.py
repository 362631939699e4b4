"""Attacks that compare what came with what would have come: guessed texts, averages, amplitudes, a model known so far.

They need no unmasked row. What they use of the noise is its distribution, which is no secret.

Legend: n rows; w columns; c candidates; i in_features; o out_features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch.nn import functional as F

from symbiosis.privacy.audit.attacks import midrange
from symbiosis.privacy.audit.evidence import Estimate, Estimates, Evidence, Place, Stream, Visits
from symbiosis.privacy.audit.goals import Score, Truth, adapter_score, first_place, link, prompts, rank
from symbiosis.privacy.audit.public import Public

__all__ = ["amplitudes", "averaged", "beginnings", "guess_prompts", "guess_tokens", "known_text", "moments"]


# ------------------------------------------------------------------------------------------------------------- guesses


_AT_ONCE = 64


def _bound(stream: Stream) -> float:
    """A of noise uniform in ±A, of which the provider knows that it is a power of two: the one that fits best."""
    return float(torch.exp2((2 * stream.rows.abs().mean()).log2().round()))


def _distances(rows: torch.Tensor, candidates: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """How unlikely each candidate is, [n, c] of rows [n, w] and candidates [c, w], in two ways.

    If the noise is Gaussian: half the squared distance over its variance, less what all candidates share. If it is
    uniform: how many elements lie further than A from the candidate's, which a true one never does; ties by the other.
    """
    variance = float(stream.rows.square().mean())
    gaussian = (0.5 * candidates.square().sum(1) - rows @ candidates.T) / variance
    bound = _bound(stream)
    outside = torch.cat([((part[:, None] - candidates).abs() > bound).sum(2) for part in torch.split(rows, _AT_ONCE)])
    return gaussian, outside.float()


def _combined(gaussian: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
    """Likeliness by bounds first, then by distance. Where nothing lies outside for anybody, distance decides."""
    spread = (gaussian.amax(-1, keepdim=True) - gaussian.amin(-1, keepdim=True)).clamp_min(1e-30)
    return -outside - 0.5 * (gaussian - gaussian.amin(-1, keepdim=True)) / spread


def guess_tokens(evidence: Evidence, truth: Truth, public: Public) -> tuple[Score, Score]:
    """Which token each row of the first block is, by likelihood: for Gaussian noise, and for uniform noise."""
    place = first_place(truth, public, "q_proj")
    stream = evidence[place]
    gaussian, outside = _distances(stream.rows, public.first_rows(), stream)
    return rank(-gaussian, truth.tokens), rank(_combined(gaussian, outside), truth.tokens)


def guess_prompts(
    evidence: Evidence,
    truth: Truth,
    public: Public,
    stage: int,
    walks: Mapping[int, int],
    texts: torch.Tensor,
    decoys: torch.Tensor,
) -> tuple[Score, Score]:
    """Which of some guessed prompts it was: the base model reads each, and its rows are compared with those that came.

    Args:
        walks: walk → prompt of ``texts`` [prompts, t].
        decoys: [c, t] other prompts of the same length.
    """
    length = texts.shape[1]
    guessed = public.run(torch.cat([texts, decoys]))
    likely = torch.zeros(len(walks), 1 + len(decoys))
    outside = torch.zeros(len(walks), 1 + len(decoys))
    for place, stream in evidence.items():
        if place.backward:
            continue
        expected = guessed[place.layers[0]].view(len(texts) + len(decoys), length, -1)
        here = truth.stage[place] == stage
        rows, walk = stream.rows[here], truth.walk[place][here]
        for number, (at, prompt) in enumerate(walks.items()):
            came = rows[walk == at][:length]
            if len(came) < length:
                continue
            choices = torch.cat([expected[prompt][None], expected[len(texts) :]]).flatten(1)
            gaussian, violations = _distances(came.reshape(1, -1), choices, stream)
            likely[number] -= gaussian[0]
            outside[number] += violations[0]
    return prompts(likely), prompts(_combined(-likely, outside))


# ------------------------------------------------------------------------------------------------------------ averages


def averaged(evidence: Evidence, truth: Truth, stage: int, repeats: int, *, middle: bool) -> Estimates:
    """The mean over requests for one prompt, or the middle between extremes, of all its rows."""
    found: dict[Place, Estimate] = {}
    for place, stream in evidence.items():
        index = (truth.stage[place] == stage).nonzero()[:, 0]
        if place.backward or not len(index):
            continue
        walks = truth.walk[place][index]
        count = int((walks == walks[0]).sum())
        rows = stream.rows[index].view(-1, count, stream.rows.shape[1])[:repeats]
        found[place] = Estimate(midrange(rows) if middle else rows.mean(0), index[:count])
    return found


# ---------------------------------------------------------------------------------------------------------- amplitudes


def amplitudes(evidence: Evidence, truth: Truth, stage: int, walks: Mapping[int, int]) -> Score:
    """Link requests by how large their rows are, whatever is in them."""
    features: dict[int, list[torch.Tensor]] = {walk: [] for walk in walks}
    for place, stream in evidence.items():
        here = truth.stage[place] == stage
        if place.backward or not here.any():
            continue
        size = stream.rows.square().mean(1)
        requests = int(stream.request.max()) + 1
        count = torch.bincount(stream.request, minlength=requests)
        size = torch.bincount(stream.request, weights=size.double(), minlength=requests) / count
        for walk in walks:
            mine = torch.unique(stream.request[here & (truth.walk[place] == walk)])
            features[walk].append(0.5 * size[mine].clamp_min(1e-30).log2())
    return link({walk: torch.cat(parts) for walk, parts in features.items()}, walks)


def beginnings(visits: Visits) -> Score:
    """The same of requests that are the first of their client."""
    sizes = 0.5 * visits.sizes.clamp_min(1e-30).log2()
    return link(dict(enumerate(sizes)), visits.prompts)


# ------------------------------------------------------------------------------------------------------------- adapter


def moments(evidence: Evidence, truth: Truth, public: Public, stage: int, rank_: int) -> Score:
    """ΔW from mean products of rows, in which independent masks cancel.

    E[h_o·x] = E[s_o·x·xᵀ]·(w_o + δ_o), with the mean on the right from the public model on the provider's own text.
    """
    found, true = [], []
    for layer, delta in truth.adapter.items():
        down, gate = _beside(public, layer, "down_proj"), _beside(public, layer, "gate_proj")
        x = _stage_rows(evidence, truth, first_place(truth, public, "", layer), stage)
        h = _stage_rows(evidence, truth, first_place(truth, public, "", down), stage)
        own = public.inputs[layer].double()
        s = F.silu(own @ public.weight(gate).double().T)
        normal = torch.stack([(own * s[:, o, None]).T @ own for o in range(s.shape[1])]) / len(own)
        right = h.T @ x / len(x)
        # s has either sign, so the matrix may be near singular: least squares with a ridge.
        ridge = 1e-3 * normal.square().sum((1, 2)) / normal.shape[1]
        square = normal @ normal + ridge[:, None, None] * torch.eye(normal.shape[1], dtype=torch.float64)
        weight = torch.linalg.solve(square, (normal @ right[:, :, None]))[:, :, 0]
        found.append(_of_rank(weight - public.weight(layer).double(), rank_).flatten())
        true.append(delta.double().flatten())
    return adapter_score(torch.cat(found), torch.cat(true))


def known_text(
    evidence: Evidence, estimates: Estimates, truth: Truth, public: Public, stage: int, walks: Iterable[int], rank_: int
) -> Score:
    """Tokens first, then the adapter block by block.

    With the text known, the base model itself gives the first block's rows, exactly; so ΔW of that block is all that
    is unknown in the rows h of its ``down_proj``. What noise there is in them is left out, as far as its directions are
    known: least squares over the complement of their span, all output features at once, by conjugate gradients.
    With that ΔW in its place, the base model gives the second block's rows.
    """
    place = first_place(truth, public, "q_proj")
    table = public.first_rows()
    center = table.mean(0)
    rows, index = estimates[place]
    tokens = (F.normalize(rows - center) @ F.normalize(table - center).T).argmax(1)
    read = [tokens[(truth.walk[place][index] == walk)] for walk in walks]
    text = torch.stack([sequence for sequence in read if len(sequence) == max(map(len, read))])
    tenant = Public(copy.deepcopy(public.model), public.layers, text)
    found, true = [], []
    for layer, delta in truth.adapter.items():
        inputs = tenant.run(text)
        x = inputs[layer].double()
        s = F.silu(x @ public.weight(_beside(public, layer, "gate_proj")).double().T)
        down = first_place(truth, public, "", _beside(public, layer, "down_proj"))
        h = _stage_rows(evidence, truth, down, stage)
        if h.shape[0] != x.shape[0]:
            return Score(float("nan"), float("nan"))
        w = public.weight(layer).double()
        change = _of_rank(_least_squares(x, s, h - s * (x @ w.T), evidence[down].noise.double()), rank_)
        found.append(change.flatten())
        true.append(delta.double().flatten())
        with torch.no_grad():
            tenant.weight(layer).add_(change.float())
    return adapter_score(torch.cat(found), torch.cat(true))


def _least_squares(
    x: torch.Tensor, s: torch.Tensor, left: torch.Tensor, noise: torch.Tensor, steps: int = 60
) -> torch.Tensor:
    """δ [o, i] for the least ‖P(left − s ⊙ x·δᵀ)‖, P the projection on the complement of the span of ``noise``."""
    basis = torch.linalg.qr(noise.T)[0] if 0 < len(noise) < left.shape[1] else noise.new_zeros(left.shape[1], 0)

    def project(rows: torch.Tensor) -> torch.Tensor:
        return rows - (rows @ basis) @ basis.T

    normal = torch.stack([(x * s[:, o, None].square()).T @ x for o in range(s.shape[1])])
    ridge = 1e-9 * torch.diagonal(normal, dim1=1, dim2=2).mean(1).clamp_min(1e-30)
    factor = torch.linalg.cholesky(normal + ridge[:, None, None] * torch.eye(x.shape[1], dtype=x.dtype))

    def precondition(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cholesky_solve(gradient[:, :, None], factor)[:, :, 0]

    delta = torch.zeros(s.shape[1], x.shape[1], dtype=x.dtype)
    residual = (s * project(left)).T @ x
    ahead = precondition(residual)
    direction = ahead
    old = (residual * ahead).sum()
    for _ in range(steps):
        image = (s * project(s * (x @ direction.T))).T @ x
        step = old / (direction * image).sum().clamp_min(1e-300)
        delta = delta + step * direction
        residual = residual - step * image
        ahead = precondition(residual)
        new = (residual * ahead).sum()
        if new <= 1e-24 * old or new <= 1e-30:
            break
        direction = ahead + new / old * direction
        old = new
    return delta


def _beside(public: Public, layer: int, name: str) -> int:
    return public.layer(public.layers[layer].name.replace("up_proj", name))


def _stage_rows(evidence: Evidence, truth: Truth, place: Place, stage: int) -> torch.Tensor:
    return evidence[place].rows[truth.stage[place] == stage].double()


def _of_rank(matrix: torch.Tensor, rank_: int) -> torch.Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found: torch.Tensor = (left[:, :rank_] * values[:rank_]) @ right[:rank_]
    return found
