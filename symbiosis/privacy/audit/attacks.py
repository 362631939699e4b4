"""Attacks that remove masks: each makes an estimate of the bare rows from the rows that were sent.

An attack knows the base model and the scheme with its options, but not the scheme's secrets. It may be told what the
provider could find out with patience (which requests repeat a prompt), and never a bare row.

Legend: n rows; w columns.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from symbiosis.privacy.audit.evidence import Estimates, Evidence, Place, Stream
from symbiosis.privacy.audit.public import Prior, Public

ALIKE = 0.9
"""Cosine from which on two rows count as masked with one vector: their bare parts would be a third as large."""


def as_is(stream: Stream, prior: Prior) -> torch.Tensor:
    """Take rows as they were sent."""
    return stream.rows


def every_vector(evidence: Evidence, public: Public) -> Estimates | None:
    """Subtract each vector that was sent for its effects, at its most likely amplitude, and keep the smallest rest.

    Vectors of all places of the same width are tried. Returns None if no vector was sent.
    """
    by_width: dict[int, list[torch.Tensor]] = {}
    for stream in evidence.values():
        by_width.setdefault(stream.rows.shape[1], []).append(stream.noise)
    vectors = {width: torch.cat(parts) for width, parts in by_width.items()}
    if not any(map(len, vectors.values())):
        return None
    return {place: _nearest_removed(stream.rows, vectors[stream.rows.shape[1]]) for place, stream in evidence.items()}


def _nearest_removed(rows: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return rows [n, w] less the vector [w] that explains most of each, out of ``vectors`` [m, w]."""
    if not len(vectors):
        return rows
    inner = rows @ vectors.T
    squares = vectors.square().sum(1).clamp_min(1e-30)
    best = (inner.square() / squares).argmax(1)
    found = vectors[best].double()
    amplitude = round_to_power_of_two((rows * found).sum(1) / squares[best])
    return (rows.double() - amplitude[:, None] * found).float()


def round_to_power_of_two(amplitude: torch.Tensor) -> torch.Tensor:
    """Return the nearest power of two with the same sign where it is within 10 %: amplitudes are powers of two."""
    size = amplitude.abs().clamp_min(1e-30)
    power = torch.exp2(size.log2().round())
    return torch.where((size / power - 1).abs() < 0.1, power, size) * amplitude.sign()


def difference(evidence: Evidence, public: Public) -> Estimates | None:
    """Find rows that were masked with one vector by their likeness, at any place, and subtract their mean.

    A row minus the mean of the rows that share its mask is bare except for the mean of the bare rows, for which the
    public model's mean is added. Returns None if no two rows are alike.
    """
    estimates: dict[Place, torch.Tensor] = {}
    any_alike = False
    for width in {stream.rows.shape[1] for stream in evidence.values()}:
        places = [place for place, stream in evidence.items() if stream.rows.shape[1] == width]
        rows = torch.cat([evidence[place].rows for place in places])
        means = torch.cat([public.prior(place).mean.expand(len(evidence[place].rows), -1) for place in places])
        found = _subtract_shared_masks(rows, means)
        any_alike |= found is not None
        parts = torch.split(rows if found is None else found, [len(evidence[place].rows) for place in places])
        estimates.update(zip(places, parts, strict=True))
    return estimates if any_alike else None


def _subtract_shared_masks(rows: torch.Tensor, means: torch.Tensor) -> torch.Tensor | None:
    """Group rows [n, w] by likeness, and subtract from each the mask of its group, if another row shares it."""
    unit = F.normalize(rows)
    alone = torch.cat([_greatest_cosine(unit, start) < ALIKE for start in range(0, len(unit), 1024)])
    rows = rows.double()
    leaders: list[torch.Tensor] = []
    group = torch.where(alone, 0, -1)
    for index in (~alone).nonzero()[:, 0].tolist():
        if group[index] < 0:
            like = (group < 0) & ((unit @ unit[index]).abs() >= ALIKE)
            like[index] = True
            group[like] = len(leaders)
            leaders.append(rows[index])
    if not leaders:
        return None
    lead = torch.stack(leaders)[group]
    amplitude = round_to_power_of_two((rows * lead).sum(1) / lead.square().sum(1).clamp_min(1e-30))[:, None]
    alike = ~alone
    count = torch.bincount(group[alike], minlength=len(leaders))[:, None]
    # The mask of a group, at its leader's amplitude, is the mean of its rows less the public mean.
    masks = torch.zeros(len(leaders), rows.shape[1], dtype=torch.float64)
    masks.index_add_(0, group[alike], ((rows - means) / amplitude)[alike])
    masks /= count.clamp_min(1)
    return torch.where(alone[:, None] | (count[group] < 2), rows, rows - amplitude * masks[group]).float()


def _greatest_cosine(unit: torch.Tensor, start: int) -> torch.Tensor:
    """Return the greatest cosine, of either sign, of each of 1024 rows with another row."""
    cosines = (unit[start : start + 1024] @ unit.T).abs_()
    own = torch.arange(len(cosines))
    cosines[own, start + own] = 0.0
    return cosines.amax(1)


def complement(rows: torch.Tensor, directions: torch.Tensor, prior: Prior) -> torch.Tensor:
    """Return the most likely bare rows [n, w] if masks lie in the span of ``directions``.

    The part of a row outside the span is bare. The part inside is guessed from it with the public model's covariance.
    """
    width = rows.shape[1]
    if not 0 < len(directions) < width:
        return rows
    full, _ = torch.linalg.qr(directions.double().T, mode="complete")
    free = full[:, len(directions) :]
    seen = (rows.double() - prior.mean) @ free
    covariance = prior.covariance.double()
    inside = free.T @ covariance @ free
    inside += 1e-6 * inside.trace() / len(inside) * torch.eye(len(inside), dtype=torch.float64)
    guessed: torch.Tensor = prior.mean + seen @ torch.linalg.solve(inside, free.T @ covariance)
    return guessed.float()


def projection(stream: Stream, prior: Prior) -> torch.Tensor:
    """Project on the complement of the span of the noise that was sent."""
    return complement(stream.rows, stream.noise, prior)


def principal(stream: Stream, prior: Prior) -> torch.Tensor:
    """Project on the complement of the largest directions of the traffic, up to the widest gap of eigenvalues.

    This finds noise of low rank that was never sent for its effects.
    """
    x = F.normalize(stream.rows.double(), eps=1e-30)
    values, vectors = torch.linalg.eigh(x.T @ x)
    values, vectors = values.flip(0).clamp_min(1e-30), vectors.flip(1)
    most = min(len(values), len(x)) - 1
    cut = int((values[:most] / values[1 : most + 1]).argmax()) + 1
    return complement(stream.rows, vectors[:, :cut].T, prior)


def filtered(stream: Stream, prior: Prior) -> torch.Tensor:
    """Make the best linear guess of a row from second moments of the traffic and of the public model's rows.

    This filters out noise that is weaker in some directions than in others, as far as possible.
    """
    x = stream.rows.double()
    size = torch.exp2(x.norm(dim=1, keepdim=True).clamp_min(1e-30).log2().round())  # rows are brought to one size
    x = x / size
    traffic = x.T @ x / len(x)
    traffic += (1e-12 * traffic.trace()).clamp_min(1e-30) * torch.eye(len(traffic), dtype=torch.float64)
    if len(x) < 2 * len(traffic):  # too few rows to tell weak directions from rare ones
        traffic = traffic.diagonal().diag()
    weights = torch.linalg.solve(traffic, prior.covariance.double())
    found: torch.Tensor = prior.mean + (x @ weights) / size
    return found.float()
