"""Ways to take masks off: each makes of what came an estimate of what was meant.

An attack knows the base model and the scheme with its options, not its secrets. It may be told what it could find out
with patience (which requests repeat a prompt), never a row of the truth.

Legend: n rows; w columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from symbiosis.privacy.audit.evidence import Estimate, Estimates, Evidence, Place, Stream
from symbiosis.privacy.audit.public import Prior, Public

__all__ = [
    "bare",
    "complement",
    "difference",
    "every_vector",
    "filtered",
    "midrange",
    "principal",
    "projection",
    "unmask",
]

Rows = Callable[[Place, Stream], torch.Tensor]


def unmask(evidence: Evidence, rows: Rows) -> Estimates:
    """The estimate of all rows of all streams by ``rows(place, stream)``."""
    return {place: Estimate(rows(place, stream), torch.arange(len(stream.rows))) for place, stream in evidence.items()}


def bare(evidence: Evidence, public: Public) -> Estimates:
    """Take rows as they are."""
    return unmask(evidence, lambda place, stream: stream.rows)


def every_vector(evidence: Evidence, public: Public) -> Estimates | None:
    """Subtract each vector that was sent for its effects, at its most likely amplitude, and keep what leaves the least.

    Vectors of all places of one width are tried, should one be used at another place. None without any vector.
    """
    if not any(len(stream.noise) for stream in evidence.values()):
        return None
    by_width: dict[int, list[torch.Tensor]] = {}
    for stream in evidence.values():
        by_width.setdefault(stream.rows.shape[1], []).append(stream.noise)
    vectors = {width: torch.cat(parts) for width, parts in by_width.items()}

    def rows(place: Place, stream: Stream) -> torch.Tensor:
        tried = vectors[stream.rows.shape[1]]
        return stream.rows if not len(tried) else _least_left(stream.rows, tried)

    return unmask(evidence, rows)


def _least_left(rows: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """[n, w]: rows less the multiple of a vector that leaves the least of each."""
    inner = rows @ vectors.T
    squares = vectors.square().sum(1).clamp_min(1e-30)
    best = (inner.square() / squares).argmax(1)
    found = vectors[best].double()
    amplitude = plausible((rows * found).sum(1) / squares[best])
    return (rows.double() - amplitude[:, None] * found).float()


def plausible(amplitude: torch.Tensor) -> torch.Tensor:
    """Amplitudes are powers of two (times a scale that is one too): the nearest, if it is near."""
    size = amplitude.abs().clamp_min(1e-30)
    power = torch.exp2(size.log2().round())
    return torch.where((size / power - 1).abs() < 0.1, power, size) * amplitude.sign()


def difference(evidence: Evidence, public: Public) -> Estimates | None:
    """Find rows under one mask by their likeness, wherever they came, and take from each the mean of its like.

    The difference of two rows with one mask is bare. So is a row less the mean of those that share its mask, but for
    that mean, for which the public model's own is put. None if no two rows are alike.
    """
    any_alike = False
    estimates: dict[Place, Estimate] = {}
    for width in {stream.rows.shape[1] for stream in evidence.values()}:
        places = [place for place, stream in evidence.items() if stream.rows.shape[1] == width]
        rows = torch.cat([evidence[place].rows for place in places])
        means = torch.cat([public.prior(place).mean.expand(len(evidence[place].rows), -1) for place in places])
        found = _less_the_mean_of_its_like(rows, means)
        any_alike |= found is not None
        counts = [len(evidence[place].rows) for place in places]
        parts = torch.split(rows if found is None else found, counts)
        for place, part in zip(places, parts, strict=True):
            estimates[place] = Estimate(part, torch.arange(len(part)))
    return {place: estimates[place] for place in evidence} if any_alike else None


ALIKE = 0.9
"""Cosine from which two rows count as being under one mask: their bare parts would be a third as large."""


def _less_the_mean_of_its_like(rows: torch.Tensor, means: torch.Tensor) -> torch.Tensor | None:
    unit = torch.nn.functional.normalize(rows)
    lonely = torch.cat([_nearest(unit, start) < ALIKE for start in range(0, len(unit), 1024)])
    rows = rows.double()
    leaders: list[torch.Tensor] = []
    group = torch.full((len(rows),), -1)
    group[lonely] = 0
    for index in (~lonely).nonzero()[:, 0].tolist():
        if group[index] < 0:
            like = (group < 0) & ((unit @ unit[index]).abs() >= ALIKE)
            like[index] = True
            group[like] = len(leaders)
            leaders.append(rows[index])
    if not leaders:
        return None
    lead = torch.stack(leaders)[group]
    amplitude = plausible((rows * lead).sum(1) / lead.square().sum(1).clamp_min(1e-30))[:, None]
    alike = ~lonely
    count = torch.bincount(group[alike], minlength=len(leaders))[:, None]
    # The mask, at the leader's amplitude: the mean of what is left of the rows when the public mean is taken off.
    masks = torch.zeros(len(leaders), rows.shape[1], dtype=torch.float64)
    masks.index_add_(0, group[alike], ((rows - means) / amplitude)[alike])
    masks /= count.clamp_min(1)
    return torch.where(lonely[:, None] | (count[group] < 2), rows, rows - amplitude * masks[group]).float()


def _nearest(unit: torch.Tensor, start: int) -> torch.Tensor:
    """The greatest cosine, of either sign, of each of 1024 rows with another row."""
    cosines = (unit[start : start + 1024] @ unit.T).abs_()
    own = torch.arange(len(cosines))
    cosines[own, start + own] = 0.0
    return cosines.amax(1)


def complement(rows: torch.Tensor, directions: torch.Tensor, prior: Prior) -> torch.Tensor:
    """[n, w]: the most likely rows, by the prior, of those that differ from ``rows`` by the span of ``directions``.

    What is outside the span is bare. What is inside is guessed from it, linearly, with the public model's covariance.
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


def projection(evidence: Evidence, public: Public) -> Estimates | None:
    """Project on the complement of the span of the noise that was sent, and guess the rest from it. None without
    any."""
    if not any(len(stream.noise) for stream in evidence.values()):
        return None
    return unmask(evidence, lambda place, stream: complement(stream.rows, stream.noise.double(), public.prior(place)))


def principal(evidence: Evidence, public: Public) -> Estimates:
    """Project on the complement of the directions in which the traffic is largest, up to the widest gap.

    For noise of low rank that was never sent bare.
    """

    def rows(place: Place, stream: Stream) -> torch.Tensor:
        x = stream.rows.double()
        x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-30)
        values, vectors = torch.linalg.eigh(x.T @ x)
        values, vectors = values.flip(0).clamp_min(1e-30), vectors.flip(1)
        most = min(len(values), len(x)) - 1
        cut = int((values[:most] / values[1 : most + 1]).argmax()) + 1
        return complement(stream.rows, vectors[:, :cut].T, public.prior(place))

    return unmask(evidence, rows)


def filtered(evidence: Evidence, public: Public) -> Estimates:
    """The best linear guess of a row from what came, by the second moments of the traffic and of the public model.

    Noise that is weaker in some directions than in others is filtered out as far as it can be, be it of low rank or
    not. Rows are brought to one size first.
    """

    def rows(place: Place, stream: Stream) -> torch.Tensor:
        x = stream.rows.double()
        size = x.norm(dim=1, keepdim=True).clamp_min(1e-30)
        size = torch.exp2(size.log2().round())  # of amplitudes, which are powers of two
        x = x / size
        traffic = x.T @ x / len(x)
        traffic += 1e-12 * traffic.trace() * torch.eye(len(traffic), dtype=torch.float64)
        if len(x) < 2 * len(traffic):  # too few to tell weak directions from rare ones
            traffic = traffic.diagonal().diag()
        prior = public.prior(place)
        weights = torch.linalg.solve(traffic, prior.covariance.double())
        found: torch.Tensor = prior.mean + (x @ weights) / size
        return found.float()

    return unmask(evidence, rows)


def midrange(rows: torch.Tensor) -> torch.Tensor:
    """[n, w] from [repeats, n, w]: the middle between the extremes. For noise with sharp bounds it is off by A/repeats,
    where the mean is off by A/√repeats."""
    return (rows.amax(0) + rows.amin(0)) / 2
