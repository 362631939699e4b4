"""The runner: gathers the rows of a batch, runs base layers, scatters results. It alone computes with rows.

The position in a sequence does not matter to a layer that works row by row, so batch and sequence are flattened and
nothing is padded. However requests are cut and merged, each gets the results that it would get alone.

Requests larger than a batch are served in slices. Their results are collected in a matrix of the full size until the
last slice is done, so ``max_rows`` bounds the other memory of the executor whatever the sequence length.

Legend: n, n_i rows; f features.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from symbiosis.core.requests import Batch, Call, Key, Results, Slice
from symbiosis.core.terms import Kind
from symbiosis.executor.layers import BaseLayer

USUAL_CHOICES = 8
"""Experts of a row in most mixtures. A call may choose all experts of a bank, perhaps 128, and its rows take memory for
each of them. So of rows with more choices, fewer go through a bank at a time."""


Compute = Callable[[Key, Results], Results]
"""Runs the layers of a key, one after another, on the same rows."""


class DeviceClock:
    """Measures how long batches take on a CUDA device, where a launch returns long before its work is done.

    It records an event before and after each batch, on the batch's stream, and reads them once the device has passed
    them, so no thread waits for the device.

    Attributes:
        ahead_s: expected seconds of the batches that the device has yet to finish.
    """

    def __init__(self, device: torch.device) -> None:
        self.ahead_s = 0.0
        self._device = device
        self._under_way: deque[tuple[Batch, float, torch.cuda.Event, torch.cuda.Event]] = deque()

    def mark(self) -> torch.cuda.Event:
        """Return an event at the present position of the device's stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def launched(self, batch: Batch, began: torch.cuda.Event, expected_s: float) -> None:
        """Note that a batch was launched after the event ``began``, and is expected to take so many seconds."""
        self.ahead_s += expected_s
        self._under_way.append((batch, expected_s, began, self.mark()))

    def done(self) -> Iterator[tuple[Batch, float]]:
        """Yield batches that have finished since the last call, and how many seconds each took."""
        while self._under_way and self._under_way[0][3].query():  # type: ignore[no-untyped-call]
            batch, expected_s, began, ended = self._under_way.popleft()
            self.ahead_s = self.ahead_s - expected_s if self._under_way else 0.0
            yield batch, began.elapsed_time(ended) / 1e3


class Runner:
    """Runs batches on a table of base layers.

    Args:
        layers: the table.
        max_rows: largest number of rows in a batch.
        compute: runs the layers of a key on rows; by default those of the table.
    """

    def __init__(self, layers: Sequence[BaseLayer], max_rows: int = 8192, compute: Compute | None = None) -> None:
        self._layers = layers
        self._compute = compute or self._run_layers
        self._max_choices = max_rows * USUAL_CHOICES

    def run(self, batch: Batch, calls: Sequence[Call]) -> None:
        """Run a batch. Its calls, in the order of its slices, get one result matrix per layer of the key."""
        slices = batch.slices
        if calls[0].work is not None:  # its key is no other call's; it is not divided, whatever the policy took of it
            (call,), (piece,) = calls, slices
            if piece.stop == piece.request.rows:
                call.results = self.run_alone(call)
            return
        if len(slices) == 1 and slices[0].stop - slices[0].start == slices[0].request.rows:
            (call,) = calls
            call.results = self.run_alone(call)
            return
        with torch.no_grad():
            inputs = tuple(
                merge([_cut(tensor, piece) for tensor, piece in zip(column, slices, strict=True)])
                for column in zip(*[call.tensors for call in calls], strict=True)
            )
            outputs = self._run(batch.key, inputs)
            del inputs
            counts = [stop - start for _, start, stop in slices]
            placed = all(call.answers for call in calls)
            columns = [
                torch.split_with_sizes(output, counts) if placed else split(output, counts) for output in outputs
            ]
            for call, piece, *results in zip(calls, slices, *columns, strict=True):
                _keep(call, piece, results)

    def run_alone(self, call: Call) -> tuple[torch.Tensor, ...]:
        """Return the results of a whole call that shares no batch. Its tensors are used without a copy."""
        grad = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            results = self._run(call.key, call.tensors) if call.work is None else call.work()
            return _place(call, results) if call.answers else results
        finally:
            _set_grad_enabled(grad)

    def _run(self, key: Key, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if key.choices and len(tensors[0]) * key.choices > self._max_choices:
            return self._run_in_parts(key, tensors, max(self._max_choices // key.choices, 1))
        return self._compute(key, tensors)

    def _run_layers(self, key: Key, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        layers = key.layers
        if len(layers) == 1:
            return self._layers[layers[0]].run(key, tensors)
        return tuple([result for layer in layers for result in self._layers[layer].run(key, tensors)])

    def _run_in_parts(self, key: Key, tensors: tuple[torch.Tensor, ...], rows: int) -> tuple[torch.Tensor, ...]:
        """Run a call in parts of at most ``rows`` rows."""
        parts = zip(*[torch.split(tensor, rows) for tensor in tensors], strict=True)
        results = [self._compute(key, part) for part in parts]
        return tuple([torch.cat(columns) for columns in zip(*results, strict=True)])

    def time(self, layers: Sequence[int]) -> float:
        """Return the seconds that one row takes through these layers, one after another."""
        calls = [Call(key, Kind.DECODE, tensors) for key, tensors in (self._layers[layer].sample() for layer in layers)]
        began = time.perf_counter()
        for call in calls:
            self.run_alone(call)
        if calls and calls[0].tensors[0].is_cuda:
            torch.cuda.synchronize(calls[0].tensors[0].device)
        return time.perf_counter() - began


_set_grad_enabled = torch._C._set_grad_enabled  # what torch.no_grad() calls after six Python calls


def _cut(tensor: torch.Tensor, piece: Slice) -> torch.Tensor:
    request, start, stop = piece
    return tensor if stop - start == request.rows else tensor[start:stop]


def _keep(call: Call, piece: Slice, results: Sequence[torch.Tensor]) -> None:
    request, start, stop = piece
    if stop - start == request.rows:
        call.results = _place(call, results)
        return
    if call.results is None:
        call.results = call.answers or tuple(result.new_empty(request.rows, result.shape[1]) for result in results)
    for whole, part in zip(call.results, results, strict=True):
        whole[start:stop] = part


def _place(call: Call, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results of a call, in the caller's memory if it has some for them."""
    if not call.answers:
        return tuple(results)
    for answer, result in zip(call.answers, results, strict=True):
        answer.copy_(result)
    return call.answers


def merge(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices [n_i, f] as one matrix [Σ n_i, f]. A single matrix is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return a matrix [Σ n_i, f] as matrices [n_i, f]. A single matrix is returned without a copy.

    Several parts are copies, not views, because they belong to different tenants. A tenant must not reach another
    tenant's rows through the storage, keep them alive, or change the version counter that autograd checks.
    """
    if len(counts) == 1:
        return [rows]
    return torch.split_with_sizes_copy(rows, list(counts))  # type: ignore[func-returns-value, return-value]
