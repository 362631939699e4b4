"""Noise from a subspace, with coefficients that nobody but the tenant knows.

The executor is sent k noise vectors P for a key and answers with P·Wᵀ. Each row then goes out as x + c·P with fresh
secret coefficients c, so "try every vector" finds nothing. Had the tenant kept a basis B to itself and sent a secret
invertible mixture P = M·B, the rows would be x + c'·B = x + (c'·M⁻¹)·P: the same span, with coefficients that are as
secret. So there is no M here.

**What does not lie in the span of P is sent bare**, (width − k) / width of the rows' energy; see ``docs/privacy.md``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from symbiosis.core.requests import Call, Key
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel
from symbiosis.privacy.amplitude import Levels, whole
from symbiosis.privacy.keystream import Keystream
from symbiosis.privacy.masks import Ask, Asked, Masked
from symbiosis.privacy.noise_pool import Asker, Vectors
from symbiosis.privacy.scheme import Scheme

__all__ = ["MixedNoise"]

Results = tuple[torch.Tensor, ...]


class MixedNoise(Scheme):
    """Each row gets its own secret combination of k noise vectors, whose effects come from the executor.

    Args:
        rank: noise vectors k for each key; from the width of the rows on, all of them is covered.
        scale: how far the noise is above the rows.
        accuracy: the error of results to aim at, instead of a scale, relative to what the largest row of a request
            comes to; after larger rows it may be up to 16 times that, see
            :func:`~symbiosis.privacy.amplitude.scale_for`.

    Raises:
        PrivacyError: a value that means nothing.
    """

    name = "mixed-noise"

    def __init__(self, rank: int = 64, scale: float | None = None, accuracy: float | None = None) -> None:
        whole(self.name, rank=rank)
        self.rank = rank
        self._aims_at(scale, accuracy)

    def __repr__(self) -> str:
        return f"{self.name}:rank={self.rank},{self._said()}"

    def begin(self, channels: Sequence[Channel], ask: Ask) -> Mixtures:
        return Mixtures(self.rank, self.levels_at(channels[0]), channels[0].device, ask)


class Mixtures:
    """The noise vectors of one client, and its coefficients."""

    def __init__(self, rank: int, levels: Levels, device: torch.device, ask: Ask) -> None:
        self.levels = levels
        self._rank = rank
        self._asker = Asker(device, ask)
        self._coefficients = Keystream()
        self._device = device
        self._lock = threading.Lock()
        self._vectors: dict[Key, Vectors] = {}

    def mask(self, asked: Asked, x: torch.Tensor, amplitude: float, kind: Kind) -> Masked:
        vectors = self._of(asked, kind)
        basis = vectors.vectors
        mix = self._coefficients.uniform(x.shape[0], basis.shape[0], asked.dtype).to(self._device)
        # Of this width, the k products that each number of the noise is a sum of come to a variance of amplitude² / 3.
        mix = mix * (amplitude * math.sqrt(3 / basis.shape[0]))
        sent = torch.addmm(x, mix, basis)
        waits = () if vectors.effects.done() else (vectors.effects,)
        return Masked((Call(asked.key, kind, (sent,)),), waits, partial(_unmask, vectors, mix))

    def prepare(self, asked: Asked) -> Future[Any] | None:
        return self._of(asked, Kind.FINETUNE).effects

    def close(self) -> None:
        pass

    def _of(self, asked: Asked, kind: Kind) -> Vectors:
        with self._lock:
            vectors = self._vectors.get(asked.key)
            if vectors is None or vectors.failed:
                vectors = self._asker.vectors(asked, min(self._rank, asked.width), kind)
                self._vectors[asked.key] = vectors
            return vectors


def _unmask(vectors: Vectors, mix: torch.Tensor, answers: Sequence[Results]) -> Results:
    (results,) = answers
    effects = vectors.effects.result()
    return tuple([torch.addmm(y, mix, effect, alpha=-1.0) for y, effect in zip(results, effects, strict=True)])
