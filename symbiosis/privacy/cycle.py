"""Rows of a matrix that are used in turn, again and again, without copies of them."""

from __future__ import annotations

import torch

__all__ = ["Cycle"]


class Cycle:
    """The rows of a matrix [K, width], each for ``rotate`` rows on end, and then from the beginning."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix
        self._size = matrix.shape[0]
        self._each = torch.split(matrix, 1)
        """A row at a time: a slice costs as much as the sum that it is for."""

    def added_to(self, x: torch.Tensor, first: int, rotate: int, factor: float) -> torch.Tensor:
        """x [n, width] + ``factor`` · the rows for its rows, which are the ``first``-th to be used and those after."""
        rows, size = x.shape[0], self._size
        if rows == 1:
            return torch.add(x, self._each[first // rotate % size], alpha=factor)
        if rotate > 1:
            picks = torch.arange(first, first + rows, device=x.device)
            picks = picks.div_(rotate, rounding_mode="floor").remainder_(size)
            return torch.add(x, self._matrix.index_select(0, picks), alpha=factor)
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        at, done = first % size, 0
        while done < rows:
            if at == 0 and rows - done >= size:  # whole turns in one go
                turns = (rows - done) // size
                end = done + turns * size
                shape = turns, size, x.shape[1]
                torch.add(x[done:end].view(shape), self._matrix, alpha=factor, out=total[done:end].view(shape))
            else:
                end = min(rows, done + size - at)
                until = at + end - done
                torch.add(x[done:end], self._matrix[at:until], alpha=factor, out=total[done:end])
                at = until % size
            done = end
        return total
