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
from typing import Any

import torch

from symbiosis.core.requests import Call, Results
from symbiosis.core.terms import Kind
from symbiosis.core.transport import Channel
from symbiosis.privacy.amplitude import Amplitudes, check_positive_integers
from symbiosis.privacy.keystream import Keystream
from symbiosis.privacy.masks import Mask, MaskedKey, MaskedRows, SendCall
from symbiosis.privacy.scheme import Scheme

_REQUEST_NEXT_AT = 0.75
"""Used fraction of a pool at which the effects of the next pool are requested."""


class NoisePool(Scheme):
    """K noise vectors for each key, used in rotation; the executor computes their effects.

    Args:
        size: number K of vectors for each key (layers that are requested together, and a direction). One call has all
            of them as rows, so it is at most the executor's limit ``rows``.
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
        refresh: int = 256,
        scale: float | None = None,
        accuracy: float | None = None,
    ) -> None:
        check_positive_integers(self.name, size=size, refresh=refresh)
        self.size, self.refresh = size, refresh
        self._set_size(scale, accuracy)

    def __repr__(self) -> str:
        return f"{self.name}:size={self.size},refresh={self.refresh},{self._describe_size()}"

    def begin(self, channels: Sequence[Channel], send: SendCall) -> Pools:
        return Pools(self, self.amplitudes_for(channels[0]), channels[0].device, send)


class Rotation:
    """The rows of a matrix [K, width] in rotation, one for each use."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix
        self._rows = matrix.unbind()  # selecting a row at its use would take as long as the sum

    def added_to(self, x: torch.Tensor, first: int, factor: float) -> torch.Tensor:
        """Return x [n, width] plus ``factor`` times the rows of uses ``first``, ``first`` + 1, …"""
        rows, size = x.shape[0], len(self._rows)
        if rows == 1:
            return torch.add(x, self._rows[first % size], alpha=factor)
        picks = torch.arange(first, first + rows, device=x.device).remainder_(size)
        return torch.add(x, self._matrix.index_select(0, picks), alpha=factor)


class _Pool:
    """The noise vectors [K, width] of one key, within ±1, and their effects [K, o] for each layer."""

    def __init__(self, vectors: torch.Tensor, effects: Future[Results]) -> None:
        self.vectors = Rotation(vectors)
        self.effects = effects
        self.used = 0
        """Rows that were masked so far."""
        self._ready: list[Rotation] = []

    @property
    def ready(self) -> list[Rotation]:
        """The effects for each layer; empty until they are computed."""
        if not self._ready and self.effects.done() and self.effects.exception() is None:
            self._ready = [Rotation(effect) for effect in self.effects.result()]
        return self._ready

    @property
    def usable(self) -> bool:
        """Whether the effects are, or will be, computed; an executor may fail to do so."""
        return bool(self._ready) or not self.effects.done() or bool(self.ready)


_Piece = tuple[_Pool, int, int]
"""Rows of a request that are masked with one pool: the pool, the number of its first use, and how many rows."""


class Pools(Mask):
    """The noise pools of one client."""

    def __init__(self, options: NoisePool, amplitudes: Amplitudes, device: torch.device, send: SendCall) -> None:
        self.amplitudes = amplitudes
        self._options = options
        self._uses = options.size * options.refresh
        self._device = device
        self._send = send
        self._stream = Keystream()
        self._lock = threading.Lock()
        self._current: dict[MaskedKey, _Pool] = {}
        self._next: dict[MaskedKey, _Pool] = {}

    def mask(self, key: MaskedKey, x: torch.Tensor, amplitude: float, kind: Kind) -> MaskedRows:
        with self._lock:
            pieces = self._take(key, x.shape[0], kind)
        sent = _add(x, pieces, [pool.vectors for pool, *_ in pieces], amplitude)
        waits = tuple([pool.effects for pool, *_ in pieces if not pool.ready])
        return MaskedRows((Call(key.key, kind, (sent,)),), waits, partial(_unmask, pieces, amplitude))

    def prepare(self, key: MaskedKey) -> Future[Any] | None:
        with self._lock:
            return self._pool(key, Kind.FINETUNE).effects

    def _take(self, key: MaskedKey, rows: int, kind: Kind) -> list[_Piece]:
        """Count ``rows`` uses of a key's pools, and return which."""
        pieces = []
        while rows:
            pool = self._pool(key, kind)
            count = min(rows, self._uses - pool.used)
            pieces.append((pool, pool.used, count))
            pool.used += count
            rows -= count
            if pool.used >= _REQUEST_NEXT_AT * self._uses and key not in self._next:
                self._next[key] = self._request(key, Kind.FINETUNE)
        return pieces

    def _pool(self, key: MaskedKey, kind: Kind) -> _Pool:
        """Return the pool that the next row of a key is masked with."""
        pool = self._current.get(key)
        if pool is None or pool.used >= self._uses or not pool.usable:
            pool = self._next.pop(key, None)
            if pool is None or not pool.usable:
                pool = self._request(key, kind)
            self._current[key] = pool
        return pool

    def _request(self, key: MaskedKey, kind: Kind) -> _Pool:
        vectors = self._stream.uniform(self._options.size, key.width, key.dtype).to(self._device)
        return _Pool(vectors, self._send(Call(key.effects, kind, (vectors,))))


def _unmask(pieces: list[_Piece], amplitude: float, answers: Sequence[Results]) -> Results:
    (results,) = answers
    return tuple(
        [
            _add(result, pieces, [pool.ready[layer] for pool, *_ in pieces], -amplitude)
            for layer, result in enumerate(results)
        ]
    )


def _add(x: torch.Tensor, pieces: list[_Piece], rotations: list[Rotation], factor: float) -> torch.Tensor:
    """Return x plus ``factor`` times the rows of one rotation for each piece of x."""
    if len(pieces) == 1:
        return rotations[0].added_to(x, pieces[0][1], factor)
    parts = torch.split(x, [count for *_, count in pieces])
    return torch.cat(
        [
            rotation.added_to(part, first, factor)
            for part, rotation, (_, first, _) in zip(parts, rotations, pieces, strict=True)
        ]
    )
