"""The provider's evidence: for each place in the model, all rows that were sent there.

Legend: n rows; m noise vectors; w columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from symbiosis.core.requests import Key
from symbiosis.privacy.wiretap import Seen


class Place(NamedTuple):
    """Layers that are requested together, and the direction."""

    layers: tuple[int, ...]
    backward: bool

    @classmethod
    def of(cls, key: Key) -> Place:
        return cls(key.layers, key.pass_.is_backward)


class Stream(NamedTuple):
    """All rows that were sent to one place, in order of arrival."""

    rows: torch.Tensor
    """[n, w]."""
    request: torch.Tensor
    """[n] number of the request that brought each row, counted at this place."""
    noise: torch.Tensor
    """[m, w] rows that were sent for their effects only. A provider could recognize them by their pass, number and
    size; the audit gives it this knowledge."""


Evidence = dict[Place, Stream]
Estimates = Mapping[Place, torch.Tensor]
"""An attack's estimates [n, w] of the bare rows of streams."""


class FirstRequests(NamedTuple):
    """The requests of v clients that each process one text. The second half of them process the texts of the first."""

    sizes: torch.Tensor
    """[v, requests] mean squares of the numbers of each request."""
    numbers: torch.Tensor
    """[requests] how many numbers each request has."""

    @classmethod
    def collect(cls, clients: Sequence[Sequence[Seen]]) -> FirstRequests:
        return cls(
            torch.tensor([[float(call.tensors[-1].double().square().mean()) for call in calls] for calls in clients]),
            torch.tensor([call.tensors[-1].numel() for call in clients[0]]),
        )

    def random(self, generator: torch.Generator) -> FirstRequests:
        """Return the sizes that independent uniform noise of one amplitude would have."""
        deviation = math.sqrt(0.8) / self.numbers.sqrt()  # of the mean square of so many uniform numbers, relative
        return self._replace(sizes=1 + deviation * torch.randn(self.sizes.shape, generator=generator))


def sent_apart(calls: Iterable[Seen], sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what the calls of one client have besides ``sent``, which are its rows: matrices [m, w] at any place."""
    rows_sent = {_content(matrix) for matrix in sent}
    return [matrix.float() for call in calls for matrix in call.tensors if _content(matrix) not in rows_sent]


def collect(calls: Iterable[Seen], sent: Sequence[torch.Tensor]) -> Evidence:
    """Sort the calls of one client by place. Matrices other than those in ``sent`` were sent for their effects."""
    rows_sent = {_content(matrix) for matrix in sent}
    rows: dict[Place, list[torch.Tensor]] = {}
    noise: dict[Place, list[torch.Tensor]] = {}
    for call in calls:
        x = call.tensors[-1]
        kind = rows if _content(x) in rows_sent else noise
        kind.setdefault(Place.of(call.key), []).append(x.float())
    return {
        place: Stream(
            torch.cat(parts),
            torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts])),
            torch.cat(noise[place]) if place in noise else parts[0].new_empty(0, parts[0].shape[1]),
        )
        for place, parts in rows.items()
    }


def _content(matrix: torch.Tensor) -> tuple[torch.Size, bytes]:
    return matrix.shape, matrix.contiguous().view(torch.uint8).numpy().tobytes()


def random_traffic(evidence: Evidence, meant: Mapping[Place, torch.Tensor], generator: torch.Generator) -> Evidence:
    """Return traffic of the same shape without information: independent uniform noise at every place.

    At each place, 24 unrelated vectors of noise look as if they were sent for their effects.

    Args:
        meant: the tenant's bare rows. The noise is 256 times as large; nothing else of them is used.
    """

    def noise(rows: int, width: int) -> torch.Tensor:
        return torch.rand(rows, width, generator=generator).mul_(2).sub_(1)

    return {
        place: Stream(
            noise(*stream.rows.shape).mul_(256.0 * float(meant[place].square().mean(1).sqrt().max())),
            stream.request,
            noise(24, stream.rows.shape[1]),
        )
        for place, stream in evidence.items()
    }


def in_pairs(traffic: Evidence, meant: Mapping[Place, torch.Tensor], generator: torch.Generator) -> Evidence:
    """Return random traffic in which two rows that follow each other are masked with one vector.

    Args:
        meant: the tenant's bare rows. What is masked is noise of their size; nothing else of them is used.
    """
    paired: Evidence = {}
    for place, stream in traffic.items():
        rows = stream.rows[torch.arange(len(stream.rows)) // 2 * 2]
        bare = torch.randn(rows.shape, generator=generator) * float(meant[place].square().mean().sqrt())
        paired[place] = stream._replace(rows=rows + bare)
    return paired


def combine_shares(evidences: Sequence[Evidence]) -> Evidence:
    """Return the evidence of executors that collude: the sums of shares, unwrapped."""
    return {
        place: stream._replace(rows=_sum([evidence[place].rows for evidence in evidences]))
        for place, stream in evidences[0].items()
    }


def _sum(shares: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum modulo 2A, where A is the power of two at or above the largest number of a row of the shares."""
    stacked = torch.stack(shares)
    modulus = 2 * torch.exp2(stacked.abs().amax((0, 2)).clamp_min(1e-30).log2().ceil())[:, None]
    total = stacked.double().sum(0)
    return (total - modulus * (total / modulus).round()).float()
