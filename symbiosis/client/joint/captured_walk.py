"""One captured walk: the rows of its clients, the CUDA graph that repeats it, and its attention over a pool.

Legend: R rows; H heads, of which G share keys; L tokens of a row; D features of a head.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import causal_mask_function

from symbiosis.client.joint import Here
from symbiosis.client.joint.attention import JointError
from symbiosis.client.joint.model import JointModel
from symbiosis.client.joint.pool import Pool
from symbiosis.client.requester import Requester
from symbiosis.core.requests import Call, Results


def can_capture(device: torch.device) -> bool:
    """Return whether walks on a device can be captured."""
    return device.type == "cuda"


class CapturedWalk:
    """One walk of R rows, each with the adapter of one client.

    Args:
        model: the joint model.
        adapters: the adapters of the rows, from :meth:`JointModel.adapters`.
        pool: has the caches of the rows.
        here: runs base layers.
        requester: the requester of the joint model's layers.
        device: the model's device.

    Attributes:
        ids: tokens [R, 1].
        logits: of the latest walk, [R, 1, vocabulary].
        output: class of the model's output.
        layers: the base layers that the walk goes through.
        was_run: whether it has run. An error of a later run is that of one token, such as a position out of range.
    """

    def __init__(
        self,
        model: JointModel,
        adapters: Mapping[str, Any],
        pool: Pool,
        here: Here,
        requester: Requester,
        device: torch.device,
    ) -> None:
        rows = len(pool.texts)
        self.pool = pool
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.logits = torch.empty(0, device=device)
        self.output: type[Any] = object
        self.layers: set[int] = set()
        self.widths: set[int] = set()
        """Widths of the rows that base layers take."""
        self.kept: list[torch.Tensor] = []
        """The adapters' values, whose memory the graph reads whatever their clients do."""
        self._positions = torch.zeros_like(self.ids)
        self._lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._seen = torch.ones(rows, pool.capacity, dtype=torch.bool, device=device)
        """Which tokens of each row its client's attention mask lets the next token see."""
        self._masked: set[int] = set()
        """Rows whose clients have given a mask."""
        self._none = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._cache = _PooledCache(pool, self._lengths, self._seen)
        self._model = model
        self._adapters = adapters
        self._here = here
        self._requester = requester
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self.was_run = False

    def place(self, tokens: Sequence[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
        """Take the next tokens: row, id [1, 1], position [1, 1], and mask [1, length + 1] or None."""
        ids, positions = [self._none] * len(self.ids), [self._none] * len(self.ids)
        for row, token, position, attention in tokens:
            ids[row], positions[row] = token, position
            if attention is not None:
                self._seen[row, : attention.shape[1]].copy_(attention[0])
                self._masked.add(row)
            elif row in self._masked:
                self._seen[row].fill_(True)
                self._masked.discard(row)
        torch.cat(ids, out=self.ids)
        torch.cat(positions, out=self._positions)
        lengths = [0 if text is None else text.length for text in self.pool.texts]
        self._lengths.copy_(torch.tensor(lengths, device="cpu"), non_blocking=True)

    def run(self) -> None:
        """Walk: the first time by the model's own code, which is captured, and then by the graph."""
        if not can_capture(self._device):
            self.compute()
        else:
            if self._graph is None:
                self._graph = self._capture()
            self._graph.replay()
        self.was_run = True

    def _capture(self) -> torch.cuda.CUDAGraph:
        now, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what a collector frees may wait for the device, which would end the capture
        side.wait_stream(now)
        try:
            with torch.cuda.stream(side):
                self.compute()  # libraries allocate at their first call
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.compute()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # which the first error has caused
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            now.wait_stream(side)
            if collects:
                gc.enable()
        return graph

    def compute(self) -> None:
        """Walk by the model's own code."""
        with self._model.seated(self._adapters), self._requester.answered_by(self._answer):
            out = self._model.forward(self._cache, self.ids, self._positions)
        self.logits, self.output = out.logits, type(out)

    def _answer(self, call: Call) -> Results:
        self.layers.update(call.key.layers)
        self.widths.add(call.tensors[0].shape[1])
        return self._here.compute(call)


class _PooledCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of a walk whose rows are in a pool, and its attention.

    Args:
        pool: has the keys and values.
        lengths: tokens [R] of each row before this one.
        seen: which tokens [R, L] each row may see.
    """

    def __init__(self, pool: Pool, lengths: torch.Tensor, seen: torch.Tensor) -> None:
        self.layers = [DynamicLayer() for _ in pool.keys]  # for code that asks for kinds of layers
        self.layer_class_to_replicate = None
        self.offloading = False
        self._pool = pool
        self._lengths = lengths
        self._seen = seen
        self._rows = torch.arange(len(lengths), device=lengths.device)
        self._columns = torch.arange(pool.capacity, device=lengths.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values [R, H, 1, D] behind those of each row, and return the pool's."""
        keys, values = self._pool.keys[layer_idx], self._pool.values[layer_idx]
        keys[self._rows, :, self._lengths] = key_states[:, :, 0]
        values[self._rows, :, self._lengths] = value_states[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1  # not the same for all rows: the model gets positions

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._pool.capacity, 0

    def mask(self, given: Mapping[str, Any]) -> torch.Tensor:
        """Return what to add to scores, [R, 1, 1, L]: 0 for tokens that a row may see, -inf for others."""
        if given.get("mask_function") is not causal_mask_function:
            raise JointError("its attention does not see all earlier tokens")
        seen = self._seen & (self._columns <= self._lengths[:, None])
        scores = torch.zeros(seen.shape, dtype=given["dtype"], device=seen.device)
        return scores.masked_fill_(~seen, -math.inf)[:, None, None]

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> torch.Tensor:
        """Return the attention of queries [R, H, 1, D] over the pool: [R, 1, H, D].

        The heads that share keys are rows of one product, so the keys are not repeated for them.
        """
        rows, heads, _, features = query.shape
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], features)
        mask = mask.expand(rows, 1, grouped.shape[2], key.shape[2])
        found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=options.get("scaling"))
        return found.reshape(rows, 1, heads, value.shape[3])
