"""Run one batch: gather rows, base layers, scatter rows. The only place where the executor touches tensors.

Requests larger than a batch are served in slices; their results gather in a matrix of the full size until the last
slice is done, so the executor's own memory stays bounded by ``max_rows`` whatever the sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symbiosis.core.layers import BaseLayer
from symbiosis.core.requests import Batch, Call, Slice
from symbiosis.core.rows import merge, split

__all__ = ["Payload", "Runner"]


class Payload:
    """The tensors of one request while the executor has it: rows in, and results so far."""

    __slots__ = ("call", "results")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.results: tuple[torch.Tensor, ...] | None = None


class Runner:
    """Runs batches on a table of base layers."""

    def __init__(self, layers: Sequence[BaseLayer]) -> None:
        self._layers = layers

    def run(self, batch: Batch, payloads: Sequence[Payload]) -> None:
        """Run a batch; ``payloads`` belong to its slices, in order, and get one result matrix per layer of the key.

        Siblings (a key with several layers) read the same rows, so only a forward pass has them.
        """
        layers, pass_ = batch.key
        with torch.no_grad():
            inputs = [
                merge([_cut(tensors, piece) for tensors, piece in zip(column, batch.slices, strict=True)])
                for column in zip(*(payload.call.tensors for payload in payloads), strict=True)
            ]
            outputs = [self._layers[layer].run(pass_, tuple(inputs)) for layer in layers]
            del inputs
            counts = [stop - start for _, start, stop in batch.slices]
            columns = [split(output, counts) for output in outputs]
            for payload, piece, *results in zip(payloads, batch.slices, *columns, strict=True):
                _keep(payload, piece, results)


def _cut(tensor: torch.Tensor, piece: Slice) -> torch.Tensor:
    request, start, stop = piece
    return tensor if stop - start == request.rows else tensor[start:stop]


def _keep(payload: Payload, piece: Slice, results: Sequence[torch.Tensor]) -> None:
    request, start, stop = piece
    if stop - start == request.rows:
        payload.results = tuple(results)
        return
    if payload.results is None:
        payload.results = tuple(result.new_empty(request.rows, result.shape[1]) for result in results)
    for whole, part in zip(payload.results, results, strict=True):
        whole[start:stop] = part


