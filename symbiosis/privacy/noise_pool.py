"""The paper's scheme: a few noise vectors for each layer, their effects computed by the executor (Symbiosis, 3.8).

The executor is sent K vectors n for a key, without a bias, and answers with n·Wᵀ; from then on x goes out as x + n.
**It does not hold against a provider that keeps what it was sent**, for that is where n came from; see
``docs/privacy.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch

from symbiosis.core.requests import Call
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel
from symbiosis.errors import PrivacyError
from symbiosis.privacy.amplitude import Levels, whole
from symbiosis.privacy.cycle import Cycle
from symbiosis.privacy.keystream import Keystream
from symbiosis.privacy.masks import Ask, Asked, Masked
from symbiosis.privacy.scheme import Scheme

__all__ = ["Asker", "NoisePool", "Vectors"]

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
        accuracy: the error of results to aim at, instead of a scale, relative to what the largest row of a request
            comes to; after larger rows it may be up to 16 times that, see
            :func:`~symbiosis.privacy.amplitude.scale_for`.

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
        self._aims_at(scale, accuracy)

    def __repr__(self) -> str:
        return f"{self.name}:size={self.size},rotate={self.rotate},refresh={self.refresh},{self._said()}"

    def begin(self, channels: Sequence[Channel], ask: Ask) -> Pools:
        return Pools(self, self.levels_at(channels[0]), channels[0].device, ask)


class Vectors:
    """K vectors for one key, and their effects as soon as they have come."""

    def __init__(self, vectors: torch.Tensor, effects: Future[Results]) -> None:
        self.vectors = vectors
        """[K, width], within ±1."""
        self.effects = effects
        """One [K, out] for each layer."""
        self.used = 0
        """Rows that were masked so far."""

    @property
    def failed(self) -> bool:
        """Whether their effects will never come."""
        return self.effects.done() and self.effects.exception() is not None


class Asker:
    """Draws noise vectors and has the executor compute their effects."""

    def __init__(self, device: torch.device, ask: Ask) -> None:
        self._device = device
        self._ask = ask
        self._stream = Keystream()

    def vectors(self, asked: Asked, size: int, kind: Kind) -> Vectors:
        """So many vectors for one key; their effects are on the way."""
        vectors = self._stream.uniform(size, asked.width, asked.dtype).to(self._device)
        return Vectors(vectors, self._ask(Call(asked.effects, kind, (vectors,))))


class _Pool(Vectors):
    """Vectors that are used in turn, one row at a time as a rule: so each is at hand as a matrix of one row."""

    def __init__(self, vectors: Vectors) -> None:
        super().__init__(vectors.vectors, vectors.effects)
        self.each = Cycle(self.vectors)
        self._effects: list[Cycle] | None = None

    @property
    def there(self) -> bool:
        """Whether the effects have come."""
        return self._effects is not None or (self.effects.done() and self.effects.exception() is None)

    def cycles(self) -> list[Cycle]:
        """The effects, which have come, of each layer."""
        if self._effects is None:
            self._effects = [Cycle(effect) for effect in self.effects.result()]
        return self._effects


class _Piece(NamedTuple):
    """Rows ``start`` up to ``stop`` of a request, masked with the vectors of a pool from its use ``first`` on."""

    pool: _Pool
    start: int
    stop: int
    first: int


class Pools:
    """The pools of one client."""

    def __init__(self, options: NoisePool, levels: Levels, device: torch.device, ask: Ask) -> None:
        self.levels = levels
        self._size, self._rotate, self._uses = options.size, options.rotate, options.size * options.refresh
        self._asker = Asker(device, ask)
        self._lock = threading.Lock()
        self._current: dict[Asked, _Pool] = {}
        self._next: dict[Asked, _Pool] = {}

    def mask(self, asked: Asked, x: torch.Tensor, amplitude: float, kind: Kind) -> Masked:
        rotate = self._rotate
        with self._lock:
            pieces = self._take(asked, x.shape[0], kind)
        parts = [
            pool.each.added_to(x if len(pieces) == 1 else x[start:stop], first, rotate, amplitude)
            for pool, start, stop, first in pieces
        ]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        waits = tuple([piece.pool.effects for piece in pieces if not piece.pool.there])
        return Masked((Call(asked.key, kind, (sent,)),), waits, partial(_unmask, pieces, rotate, amplitude))

    def prepare(self, asked: Asked) -> Future[Any] | None:
        with self._lock:
            return self._now(asked, Kind.FINETUNE).effects

    def close(self) -> None:
        pass

    def _now(self, asked: Asked, kind: Kind) -> _Pool:
        """The pool that the next row is masked with."""
        pool = self._current.get(asked)
        if pool is None or pool.used >= self._uses or (not pool.there and pool.failed):
            following = self._next.pop(asked, None)
            if following is None or following.failed:
                following = self._ask(asked, kind)
            pool = self._current[asked] = following
        return pool

    def _ask(self, asked: Asked, kind: Kind) -> _Pool:
        return _Pool(self._asker.vectors(asked, self._size, kind))

    def _take(self, asked: Asked, rows: int, kind: Kind) -> list[_Piece]:
        """Vectors for so many rows."""
        pieces = []
        start = 0
        while start < rows:
            pool = self._now(asked, kind)
            count = min(rows - start, self._uses - pool.used)
            pieces.append(_Piece(pool, start, start + count, pool.used))
            pool.used += count
            start += count
            if pool.used >= _EARLY * self._uses and asked not in self._next:
                self._next[asked] = self._ask(asked, Kind.FINETUNE)
        return pieces


def _unmask(pieces: list[_Piece], rotate: int, amplitude: float, answers: Sequence[Results]) -> Results:
    (results,) = answers
    if len(pieces) == 1:
        ((pool, _, _, first),) = pieces
        return tuple(
            [
                cycle.added_to(result, first, rotate, -amplitude)
                for result, cycle in zip(results, pool.cycles(), strict=True)
            ]
        )
    return tuple(
        [
            torch.cat(
                [
                    pool.cycles()[index].added_to(result[start:stop], first, rotate, -amplitude)
                    for pool, start, stop, first in pieces
                ]
            )
            for index, result in enumerate(results)
        ]
    )
