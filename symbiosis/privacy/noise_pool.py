"""The scheme of the paper: a few noise vectors for each key, whose effects the executor computes (Symbiosis, 3.8).

The executor is sent K vectors n for a key, to be computed without a bias, and answers with their effects n·Wᵀ. From
then on x is sent as x + n. **The scheme does not protect against a provider that keeps what it was sent**, because that
includes n; see ``docs/privacy.md``.

Legend: n rows; o out_features.
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
from symbiosis.privacy.amplitude import Amplitudes, check_positive_integers
from symbiosis.privacy.keystream import Keystream
from symbiosis.privacy.masks import MaskedKey, MaskedRows, Results, SendCall
from symbiosis.privacy.scheme import Scheme

__all__ = ["NoisePool", "add_rotating"]

_REQUEST_NEXT_AT = 0.75
"""Used fraction of a pool at which the effects of the next pool are requested."""


class NoisePool(Scheme):
    """K noise vectors for each key, used in rotation; the executor computes their effects.

    Args:
        size: number K of vectors for each key (layers that are requested together, and a direction).
        rotate: consecutive rows that get the same vector.
        refresh: rows that each vector masks before new vectors replace the pool. They are requested ahead of time.
        scale: ratio of the noise's amplitude to the rms of the largest row.
        accuracy: largest error of results, instead of a scale, relative to the result of the request's largest row.
            After larger rows it may be up to 16 times that; see :func:`~symbiosis.privacy.amplitude.scale_for`.

    Raises:
        PrivacyError: an option is out of range.
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
        check_positive_integers(self.name, size=size, rotate=rotate, refresh=refresh)
        if refresh % rotate:
            raise PrivacyError(f"{self.name}: refresh={refresh} must be a multiple of rotate={rotate}")
        self.size, self.rotate, self.refresh = size, rotate, refresh
        self._set_size(scale, accuracy)

    def __repr__(self) -> str:
        return f"{self.name}:size={self.size},rotate={self.rotate},refresh={self.refresh},{self._describe_size()}"

    def begin(self, channels: Sequence[Channel], send: SendCall) -> Pools:
        return Pools(self, self.amplitudes_for(channels[0]), channels[0].device, send)


class _Pool:
    """The noise vectors [K, width] of one key, within ±1, and the future of their effects [K, o] for each layer."""

    def __init__(self, vectors: torch.Tensor, effects: Future[Results]) -> None:
        self.vectors = vectors
        self.effects = effects
        self.used = 0
        """Rows that were masked so far."""

    @property
    def failed(self) -> bool:
        """Whether the executor did not compute the effects."""
        return self.effects.done() and self.effects.exception() is not None


class _Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of a request, masked with a pool from its use number ``first`` on."""

    pool: _Pool
    start: int
    stop: int
    first: int


class Pools:
    """The noise pools of one client."""

    def __init__(self, options: NoisePool, amplitudes: Amplitudes, device: torch.device, send: SendCall) -> None:
        self.amplitudes = amplitudes
        self._size, self._rotate, self._uses = options.size, options.rotate, options.size * options.refresh
        self._device = device
        self._send = send
        self._stream = Keystream()
        self._lock = threading.Lock()
        self._current: dict[MaskedKey, _Pool] = {}
        self._next: dict[MaskedKey, _Pool] = {}

    def mask(self, key: MaskedKey, x: torch.Tensor, amplitude: float, kind: Kind) -> MaskedRows:
        with self._lock:
            pieces = self._take(key, x.shape[0], kind)
        sent = self._add(pieces, x, [piece.pool.vectors for piece in pieces], amplitude)
        waits = tuple([piece.pool.effects for piece in pieces if not piece.pool.effects.done()])
        return MaskedRows((Call(key.key, kind, (sent,)),), waits, partial(self._unmask, pieces, amplitude))

    def prepare(self, key: MaskedKey) -> Future[Any] | None:
        with self._lock:
            return self._pool(key, Kind.FINETUNE).effects

    def close(self) -> None:
        pass

    def _take(self, key: MaskedKey, rows: int, kind: Kind) -> list[_Piece]:
        """Return the parts of a request of ``rows`` rows with their pools, and count the uses."""
        pieces = []
        start = 0
        while start < rows:
            pool = self._pool(key, kind)
            count = min(rows - start, self._uses - pool.used)
            pieces.append(_Piece(pool, start, start + count, pool.used))
            pool.used += count
            start += count
            if pool.used >= _REQUEST_NEXT_AT * self._uses and key not in self._next:
                self._next[key] = self._request(key, Kind.FINETUNE)
        return pieces

    def _pool(self, key: MaskedKey, kind: Kind) -> _Pool:
        """Return the pool that the next row of a key is masked with."""
        pool = self._current.get(key)
        if pool is None or pool.used >= self._uses or pool.failed:
            following = self._next.pop(key, None)
            if following is None or following.failed:
                following = self._request(key, kind)
            pool = self._current[key] = following
        return pool

    def _request(self, key: MaskedKey, kind: Kind) -> _Pool:
        vectors = self._stream.uniform(self._size, key.width, key.dtype).to(self._device)
        return _Pool(vectors, self._send(Call(key.effects, kind, (vectors,))))

    def _unmask(self, pieces: list[_Piece], amplitude: float, answers: Sequence[Results]) -> Results:
        (results,) = answers
        effects = [piece.pool.effects.result() for piece in pieces]
        return tuple(
            [
                self._add(pieces, result, [of_piece[layer] for of_piece in effects], -amplitude)
                for layer, result in enumerate(results)
            ]
        )

    def _add(
        self, pieces: list[_Piece], x: torch.Tensor, matrices: Sequence[torch.Tensor], factor: float
    ) -> torch.Tensor:
        """Return x plus ``factor`` times the rows of one matrix for each piece."""
        if len(pieces) == 1:
            return add_rotating(x, matrices[0], pieces[0].first, self._rotate, factor)
        parts = [
            add_rotating(x[start:stop], matrix, first, self._rotate, factor)
            for (_, start, stop, first), matrix in zip(pieces, matrices, strict=True)
        ]
        return torch.cat(parts)


def add_rotating(x: torch.Tensor, matrix: torch.Tensor, first: int, rotate: int, factor: float) -> torch.Tensor:
    """Return x [n, width] plus ``factor`` times rows of ``matrix`` [K, width] in rotation.

    Each row of the matrix serves ``rotate`` consecutive rows; ``first`` rows were served before.
    """
    rows, size = x.shape[0], matrix.shape[0]
    if rows == 1:
        return torch.add(x, matrix[first // rotate % size], alpha=factor)
    picks = torch.arange(first, first + rows, device=x.device).div_(rotate, rounding_mode="floor").remainder_(size)
    return torch.add(x, matrix.index_select(0, picks), alpha=factor)
