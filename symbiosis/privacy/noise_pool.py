"""The paper's scheme: a few noise vectors for each layer, their effects computed by the executor (Symbiosis, 3.8).

The executor is sent K vectors n for a key, without a bias, and answers with n·Wᵀ; from then on x goes out as x + n.
**It does not hold against a provider that keeps what it was sent**, for that is where n came from; see
``docs/privacy.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from symbiosis.core.protocols import Channel
from symbiosis.core.requests import Call, Key, Kind
from symbiosis.errors import PrivacyError
from symbiosis.privacy.amplitude import scale_for, whole
from symbiosis.privacy.keystream import Keystream
from symbiosis.privacy.masks import Ask, Asked, Masked
from symbiosis.privacy.scheme import Scheme

__all__ = ["Asker", "NoisePool", "Vectors", "failed"]

Results = tuple[torch.Tensor, ...]

_EARLY = 0.75
"""Of a pool's uses, after which the next one is asked for."""


class NoisePool(Scheme):
    """K noise vectors for each key, used in turn; their effects come from the executor.

    Args:
        size: vectors K for each key (layers that are asked together, and in which direction).
        rotate: rows one after another that get the same vector, before it is the next one's turn.
        refresh: how many rows each vector may mask; then new ones take their place, asked for ahead of time.
        scale: how far the noise is above the rows.
        accuracy: the relative error of results to aim at, instead of a scale.

    Raises:
        PrivacyError: a value that means nothing.
    """

    name = "noise-pool"

    def __init__(
        self,
        size: int = 64,
        rotate: int = 1,
        refresh: int = 256,
        scale: float | None = None,
        accuracy: float | None = None,
    ) -> None:
        whole(self.name, size=size, rotate=rotate, refresh=refresh)
        if refresh % rotate:
            raise PrivacyError(f"{self.name}: refresh={refresh} must be a multiple of rotate={rotate}")
        self.size, self.rotate, self.refresh = size, rotate, refresh
        self.scale = scale_for(self.name, scale, accuracy)

    def __repr__(self) -> str:
        return f"{self.name}:size={self.size},rotate={self.rotate},refresh={self.refresh},scale={self.scale:g}"

    def begin(self, channels: Sequence[Channel], ask: Ask) -> Pools:
        return Pools(self, channels[0].device, ask)


class Vectors:
    """K vectors for one key, and their effects as soon as they have come."""

    def __init__(self, asked: Asked, vectors: torch.Tensor, effects: Future[Results]) -> None:
        self.asked = asked
        self.vectors = vectors
        """[K, width], within ±1."""
        self.effects = effects
        """One [K, out] for each layer."""
        self.used = 0
        """Rows that were masked so far."""


class Asker:
    """Draws noise vectors and has the executor compute their effects."""

    def __init__(self, device: torch.device, ask: Ask) -> None:
        self._device = device
        self._ask = ask
        self._stream = Keystream()

    def vectors(self, asked: Asked, size: int, kind: Kind) -> Vectors:
        """So many vectors for one key; their effects are on the way."""
        vectors = self._stream.uniform(size, asked.width, asked.dtype).to(self._device)
        return Vectors(asked, vectors, self._ask(Call(asked.effects, kind, (vectors,))))


@dataclass(slots=True)
class _Piece:
    """Rows ``start`` up to ``stop`` of a request, masked with these vectors."""

    vectors: Vectors
    start: int
    stop: int
    picks: torch.Tensor | None
    """Which vector for each row; None: vector ``first`` for the only one."""
    first: int


class Pools:
    """The pools of one client."""

    def __init__(self, options: NoisePool, device: torch.device, ask: Ask) -> None:
        self._options = options
        self._asker = Asker(device, ask)
        self._lock = threading.Lock()
        self._current: dict[Key, Vectors] = {}
        self._next: dict[Key, Vectors] = {}

    def mask(self, asked: Asked, x: torch.Tensor, amplitude: float, kind: Kind) -> Masked:
        with self._lock:
            pieces = self._take(asked, x.shape[0], kind)
        if len(pieces) == 1:
            sent = torch.add(x, _of(pieces[0], pieces[0].vectors.vectors), alpha=amplitude)
        else:
            sent = torch.cat(
                [torch.add(x[p.start : p.stop], _of(p, p.vectors.vectors), alpha=amplitude) for p in pieces]
            )
        waits = tuple([piece.vectors.effects for piece in pieces if not piece.vectors.effects.done()])
        return Masked((Call(asked.key, kind, (sent,)),), waits, partial(_unmask, pieces, amplitude))

    def prepare(self, asked: Asked) -> Future[Any] | None:
        with self._lock:
            return self._now(asked, Kind.FINETUNE).effects

    def close(self) -> None:
        pass

    def _now(self, asked: Asked, kind: Kind) -> Vectors:
        """The vectors that the next row is masked with."""
        vectors = self._current.get(asked.key)
        if vectors is None or vectors.used >= self._uses or failed(vectors):
            following = self._next.pop(asked.key, None)
            if following is None or failed(following):
                following = self._asker.vectors(asked, self._options.size, kind)
            vectors = self._current[asked.key] = following
        return vectors

    @property
    def _uses(self) -> int:
        return self._options.size * self._options.refresh

    def _take(self, asked: Asked, rows: int, kind: Kind) -> list[_Piece]:
        """Vectors for so many rows."""
        pieces = []
        start = 0
        while start < rows:
            vectors = self._now(asked, kind)
            count = min(rows - start, self._uses - vectors.used)
            size, rotate = self._options.size, self._options.rotate
            first = vectors.used // rotate % size
            picks = None
            if count > 1:
                picks = torch.arange(vectors.used, vectors.used + count, device=vectors.vectors.device)
                picks = picks.div_(rotate, rounding_mode="floor").remainder_(size)
            pieces.append(_Piece(vectors, start, start + count, picks, first))
            vectors.used += count
            start += count
            if vectors.used >= _EARLY * self._uses and asked.key not in self._next:
                self._next[asked.key] = self._asker.vectors(asked, self._options.size, Kind.FINETUNE)
        return pieces


def failed(vectors: Vectors) -> bool:
    """Whether their effects will never come."""
    return vectors.effects.done() and vectors.effects.exception() is not None


def _of(piece: _Piece, matrix: torch.Tensor) -> torch.Tensor:
    """The rows of a matrix that a piece's rows are masked with."""
    if piece.picks is None:
        return matrix[piece.first : piece.first + 1]
    return matrix.index_select(0, piece.picks)


def _unmask(pieces: list[_Piece], amplitude: float, answers: Sequence[Results]) -> Results:
    (results,) = answers
    bare = []
    for index, result in enumerate(results):
        parts = [
            torch.sub(
                result if len(pieces) == 1 else result[piece.start : piece.stop],
                _of(piece, piece.vectors.effects.result()[index]),
                alpha=amplitude,
            )
            for piece in pieces
        ]
        bare.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return tuple(bare)
