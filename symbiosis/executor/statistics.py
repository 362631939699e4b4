"""What an executor has done since it started, or since its counts were reset: per layer, client and tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class LayerStatistics(NamedTuple):
    """Counts of one layer (or group of siblings) in one pass."""

    requests: int
    batches: int
    members: int
    """Sum over batches of their requests; more than ``requests`` if large requests were served in slices."""
    rows: int
    wait_s: float
    """Seconds that requests were queued, summed."""

    @property
    def mean_batch(self) -> float:
        """Requests per batch."""
        return self.members / self.batches if self.batches else 0.0


class ClientStatistics(NamedTuple):
    """Counts of one client, or of all clients of one tenant."""

    requests: int
    rows: int
    wait_s: float
    """Seconds that its requests were queued, summed."""
    mean_batch: float
    """Size of the batch of a request in requests, averaged over the client's requests."""
    joint: int = 0
    """Tokens that the client decoded in walks with other clients. Tokens of several sequences that it decodes at once
    count as one. For clients in this process."""
    alone: Mapping[str, int] = {}
    """Tokens that it decoded by itself, by the reason, counted likewise. For clients in this process."""
    tokens: Mapping[str, float] = {}
    """Rows of forward passes through all layers, by kind: ``decode``, ``prefill``, ``finetune``. A row through one of n
    layers counts 1/n. A row that is computed again, such as for gradient checkpointing, counts again."""
    waits: Mapping[str, float] = {}
    """Seconds that its requests were queued, by the policy's reason to run the batch that answered them."""
    slo_kept: int = 0
    """Tokens that were made within their latency targets, where the policy has such targets."""
    slo_missed: int = 0
    unshared: Mapping[str, Mapping[str, int]] = {}
    """Requests that had a batch to themselves, by what other clients did meanwhile (see
    :meth:`~symbiosis.core.scheduler.Scheduler.beside`), and by the policy's reason for the batch."""
    passes: Mapping[str, int] = {}
    """Requests by pass and precision: ``forward``, ``backward``, ``forward fp32``."""
    service: float = 0.0
    """Service of the tenant, where the policy counts it (:meth:`~symbiosis.core.policy.Policy.service`)."""


class Histogram(NamedTuple):
    """How often durations of each length occurred."""

    bounds: tuple[float, ...]
    """Upper bounds of the durations that are counted together, in seconds."""
    counts: tuple[int, ...]
    """``counts[i]``: durations above ``bounds[i - 1]``, up to ``bounds[i]``. The last count: all longer durations."""
    seconds: float
    """Sum of all durations."""


class Statistics(NamedTuple):
    """Totals of an executor since it started, or since they were reset."""

    requests: int
    batches: int
    members: int
    rows: int
    wait_s: float
    run_s: float
    """Seconds in base layers (on a GPU: in launching them)."""
    reasons: Mapping[str, int]
    """Number of batches by the policy's reason to run them."""
    layers: Mapping[str, LayerStatistics]
    """Counts by name and pass, such as ``"model.layers.0.self_attn.q_proj+k_proj+v_proj forward"``."""
    clients: Mapping[str, ClientStatistics]
    """Counts by client, including up to some thousands of clients that have left."""
    tenants: Mapping[str, ClientStatistics]
    """Counts by tenant, including all that have left. Tenants beyond a limit are counted together, as ``"other"``."""
    waits: Mapping[str, float]
    """Seconds that requests were queued, by the policy's reason to run the batch that answered them."""
    wait_times: Mapping[str, Histogram]
    """How long requests were queued, by kind."""
    run_times: Histogram
    """How long batches ran (on a GPU: how long they took to launch)."""
    rejections: Mapping[str, int]
    """Number of peers that were not admitted or were disconnected, and of calls that were not taken, by the name of the
    error; ``handshake`` for peers without a key, ``cut`` for connections that ended without a message."""
    apart: Histogram
    """Seconds between two requests of different clients for the same layers, pass and precision, where each had a batch
    to itself."""

    @property
    def mean_batch(self) -> float:
        """Requests per batch, over all layers."""
        return self.members / self.batches if self.batches else 0.0

    @property
    def mean_rows(self) -> float:
        """Rows per batch, over all layers."""
        return self.rows / self.batches if self.batches else 0.0
