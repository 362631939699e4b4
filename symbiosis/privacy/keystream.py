"""Noise from a cryptographic generator: AES-256 in counter mode.

torch's generators are not cryptographic: who has seen some of their numbers can compute all others. And a tenant's own
stream must stay as it would be without masks, so that dropout and sampling are those of a bare client.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

__all__ = ["BITS", "Keystream", "blocks", "integers_of"]

BITS = {torch.float32: 24, torch.float64: 53}
"""Bits of each number, by dtype: as many as its significand has, so that noise is uniform on a grid and exact."""
_AHEAD = 1 << 15
"""Numbers that are made at a time for small requests."""
_BLOCK = 16
"""Bytes of a block of AES, the unit of the counter."""


_Make = Callable[[int, torch.dtype], torch.Tensor]


class Keystream:
    """Uniform numbers under a secret key, drawn one after another and each of them once. Threads may share it.

    Args:
        key: 32 bytes; by default new ones from the operating system.
        start: block of 16 bytes to begin with.
    """

    def __init__(self, key: bytes | None = None, start: int = 0) -> None:
        cipher = Cipher(algorithms.AES(os.urandom(32) if key is None else key), modes.CTR(start.to_bytes(16, "big")))
        self._encryptor = cipher.encryptor()
        self._lock = threading.Lock()
        self._draws = threading.Lock()
        self._ahead: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        """Numbers that were made and not yet drawn."""

    def raw(self, size: int) -> bytearray:
        """The next ``size`` bytes."""
        data = bytearray(size)
        with self._lock:
            self._encryptor.update_into(data, data)  # of zeros: the keystream itself
        return data

    def integers(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, width] of whole numbers of :data:`BITS` bits with a sign, in int32 or int64. Each row takes whole
        blocks of the cipher, so that a stream may begin with any; see :func:`blocks`."""
        size = blocks(width, dtype) * _BLOCK
        drawn = integers_of(self.raw(rows * size), dtype).view(rows, size // dtype.itemsize)
        return drawn[:, :width]

    def uniform(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, width] of numbers in [-1, 1), multiples of 2^(1 - :data:`BITS`)."""
        return self._draw(self._uniform, dtype, rows, width)

    def normal(self, rows: int, width: int) -> torch.Tensor:
        """[rows, width] of standard normal numbers in fp64 (Box and Muller), none beyond 8.7.

        In fp32 they could be guessed at: exp(-(a² + b²) / 2) of two numbers is a multiple of 2^-24, which is coarser
        than the noise's own grid for one pair in a hundred.
        """
        return self._draw(self._normal, torch.float64, rows, width)

    def _draw(self, make: _Make, dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
        count = rows * width
        with self._draws:
            ahead = self._ahead.get((make.__name__, dtype))
            if ahead is None or ahead.shape[0] < count:
                ahead = make(max(count, _AHEAD), dtype)
            drawn, self._ahead[make.__name__, dtype] = ahead[:count], ahead[count:]
        return drawn.view(rows, width)

    def _uniform(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return integers_of(self.raw(count * dtype.itemsize), dtype).to(dtype).mul_(2.0 ** (1 - BITS[dtype]))

    def _normal(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        pairs = -(-count // 2)
        sizes, angles = self._uniform(2 * pairs, dtype).split(pairs)  # type: ignore[no-untyped-call]
        sizes.mul_(0.5).add_(0.5).clamp_min_(2.0 ** (-1 - BITS[dtype])).log_().mul_(-2).sqrt_()
        angles.mul_(math.pi)
        normal = torch.cat([angles.cos(), angles.sin()]).view(2, pairs).mul_(sizes)
        return normal.view(-1)


def blocks(width: int, dtype: torch.dtype) -> int:
    """Blocks of the cipher that a row of :meth:`Keystream.integers` takes."""
    return -(-width * dtype.itemsize // _BLOCK)


def integers_of(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """The signed integers of :data:`BITS` bits that so many random bytes come to, in int32 or int64."""
    wide, bits = (torch.int32, 32) if dtype is torch.float32 else (torch.int64, 64)
    return torch.frombuffer(data, dtype=wide).bitwise_right_shift_(bits - BITS[dtype])
