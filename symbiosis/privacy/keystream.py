"""Random numbers from a cryptographic generator: AES-256 in counter mode.

torch's generators are not cryptographic: some of their numbers are enough to compute all the rest. Masks also must not
draw from the tenant's generators, so that dropout and sampling stay the same as without masks.
"""

from __future__ import annotations

import math
import os
import threading

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

BITS = {torch.float32: 24, torch.float64: 53}
"""Bits of a random number of each dtype, as many as its significand has: noise is exact and uniform on a grid."""
_NORMALS_AHEAD = 1 << 15
"""Normal numbers that are computed together, so that requests of one row do not pay for many small operators."""
_BLOCK_BYTES = 16
"""Size of a block of AES, the unit of the counter."""


class Keystream:
    """Random numbers under a secret key. Each number is drawn once; threads may share a keystream.

    Args:
        key: 32 bytes; by default new ones from the operating system.
        start: number of the 16-byte block to begin with.
    """

    def __init__(self, key: bytes | None = None, start: int = 0) -> None:
        cipher = Cipher(algorithms.AES(os.urandom(32) if key is None else key), modes.CTR(start.to_bytes(16, "big")))
        self._encryptor = cipher.encryptor()
        self._lock = threading.Lock()
        self._normals_lock = threading.Lock()
        self._normals = torch.empty(0, dtype=torch.float64, device="cpu")
        """Normal numbers that were computed and not yet drawn."""

    def raw(self, size: int) -> bytearray:
        """Return the next ``size`` bytes."""
        data = bytearray(size)
        with self._lock:
            self._encryptor.update_into(data, data)  # encrypting zeros gives the keystream itself
        return data

    def integers(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [rows, width] signed integers of :data:`BITS` bits, in int32 for fp32 and in int64 for fp64.

        Each row takes whole blocks of the cipher, so that a keystream may start at any row; see :func:`blocks`.
        """
        size = blocks(width, dtype) * _BLOCK_BYTES
        return _integers(self.raw(rows * size), dtype).view(rows, size // dtype.itemsize)[:, :width]

    def uniform(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [rows, width] numbers in [-1, 1), uniform multiples of 2^(1 - :data:`BITS`)."""
        integers = _integers(self.raw(rows * width * dtype.itemsize), dtype)
        return integers.to(dtype).mul_(grid_step(dtype)).view(rows, width)

    def normal(self, rows: int, width: int) -> torch.Tensor:
        """Return [rows, width] standard normal numbers in fp64 by the method of Box and Muller, none beyond ±8.7.

        In fp32 the method would give rows away: exp(-(a² + b²) / 2) of a pair would be a multiple of 2^-24. For one
        pair in a hundred this is coarser than the grid that the noise is rounded to.
        """
        count = rows * width
        with self._normals_lock:
            if self._normals.shape[0] < count:
                self._normals = self._box_muller(max(count, _NORMALS_AHEAD))
            drawn, self._normals = self._normals[:count], self._normals[count:]
        return drawn.view(rows, width)

    def _box_muller(self, count: int) -> torch.Tensor:
        pairs = -(-count // 2)
        sizes, angles = self.uniform(2, pairs, torch.float64)
        smallest = 2.0 ** (-1 - BITS[torch.float64])  # the logarithm of zero is infinite
        sizes.mul_(0.5).add_(0.5).clamp_min_(smallest).log_().mul_(-2).sqrt_()
        angles.mul_(math.pi)
        return torch.cat([angles.cos(), angles.sin()]).view(2, pairs).mul_(sizes).view(-1)


def grid_step(dtype: torch.dtype) -> float:
    """Return the distance of neighbouring numbers in [-1, 1) with :data:`BITS` bits."""
    return 2.0 ** (1 - BITS[dtype])


def blocks(width: int, dtype: torch.dtype) -> int:
    """Return how many blocks of the cipher a row of :meth:`Keystream.integers` takes."""
    return -(-width * dtype.itemsize // _BLOCK_BYTES)


def _integers(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """Return the signed integers of :data:`BITS` bits in random bytes, one for each ``dtype.itemsize`` bytes."""
    wide = torch.int32 if dtype is torch.float32 else torch.int64
    return torch.frombuffer(data, dtype=wide).bitwise_right_shift_(8 * wide.itemsize - BITS[dtype])
