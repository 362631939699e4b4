"""What the provider has, in the form that attacks want: for each place in the model, all rows that ever came there.

Legend: n rows; w columns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from symbiosis.core.requests import Key

__all__ = ["Estimate", "Estimates", "Evidence", "Place", "Request", "Stream", "Visits", "collect", "random_traffic"]


class Place(NamedTuple):
    """Where rows came: a layer, or siblings, and in which direction."""

    layers: tuple[int, ...]
    backward: bool

    @classmethod
    def of(cls, key: Key) -> Place:
        return cls(key.layers, key.pass_.is_backward)


class Request(Protocol):
    """What an attack looks at of a request that was recorded."""

    @property
    def key(self) -> Key: ...
    @property
    def tensors(self) -> tuple[torch.Tensor, ...]: ...


class Stream(NamedTuple):
    """All rows that came to one place, in the order in which they came."""

    rows: torch.Tensor
    """[n, w]."""
    request: torch.Tensor
    """[n] whole numbers: which of the place's requests a row came in."""
    noise: torch.Tensor
    """[m, w]: rows that were sent for their effects alone. The provider knows them by their pass, their number, their
    size; here it is told."""


Evidence = dict[Place, Stream]


class Visits(NamedTuple):
    """What came of clients that were opened for one text each: v of them, each text twice, and r requests of each."""

    prompts: dict[int, int]
    """Visit → text."""
    sizes: torch.Tensor
    """[v, r] mean squares of the requests' numbers."""
    numbers: torch.Tensor
    """[r] how many numbers each has."""

    @classmethod
    def collect(cls, prompts: Sequence[int], visits: Sequence[Sequence[Request]]) -> Visits:
        return cls(
            dict(enumerate(prompts)),
            torch.tensor([[float(one.tensors[-1].double().square().mean()) for one in visit] for visit in visits]),
            torch.tensor([one.tensors[-1].numel() for one in visits[0]]),
        )

    def random(self, generator: torch.Generator) -> Visits:
        """The same of independent uniform noise of one size."""
        spread = math.sqrt(0.8) / self.numbers.sqrt()  # of the mean of so many squares of uniform numbers
        return self._replace(sizes=1 + spread * torch.randn(self.sizes.shape, generator=generator))


class Estimate(NamedTuple):
    """What an attack takes some rows of a stream to be."""

    rows: torch.Tensor
    """[k, w]."""
    which: torch.Tensor
    """[k]: their numbers in the stream."""


Estimates = Mapping[Place, Estimate]


def collect(requests: Iterable[Request], effects: Collection[torch.Tensor] = ()) -> Evidence:
    """Sort requests by place.

    Args:
        requests: of one client, in the order in which they came.
        effects: the matrices that the client's scheme has sent for their effects.
    """
    sent = {_content(matrix) for matrix in effects}
    rows: dict[Place, list[torch.Tensor]] = {}
    noise: dict[Place, list[torch.Tensor]] = {}
    for request in requests:
        place = Place.of(request.key)
        x = request.tensors[-1]
        (noise if _content(x) in sent else rows).setdefault(place, []).append(x.float())
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


def random_traffic(
    evidence: Evidence, meant: Mapping[Place, torch.Tensor], generator: torch.Generator, vectors: int = 24
) -> Evidence:
    """Traffic of the same shape that says nothing: independent uniform noise, and unrelated vectors that seem to have
    been sent for their effects.

    Args:
        meant: rows that the tenant meant, of which only the size is taken: noise is 256 times as large.
        vectors: how many for each place.
    """

    def amplitude(place: Place) -> float:
        return 256.0 * float(meant[place].square().mean(1).sqrt().max())

    def noise(rows: int, width: int) -> torch.Tensor:
        return torch.rand(rows, width, generator=generator).mul_(2).sub_(1)

    return {
        place: Stream(
            noise(*stream.rows.shape).mul_(amplitude(place)), stream.request, noise(vectors, stream.rows.shape[1])
        )
        for place, stream in evidence.items()
    }
