"""What an executor has done so far, counted per layer and per client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from symbiosis.core.requests import Batch, Key, Request

__all__ = ["ClientStatistics", "LayerStatistics", "Statistics", "group_name"]


MAX_KEYS = 20_000
MAX_CLIENTS = 4096
"""Beyond so many, those that came first are forgotten: in a long-lived executor clients come and go."""


class LayerStatistics(NamedTuple):
    """One layer (or group of siblings) in one pass. ``wait_s``: time requests spent queued, summed, in seconds."""

    requests: int
    batches: int
    members: int
    """Requests in each batch, summed; more than ``requests`` where large ones were served in slices."""
    rows: int
    wait_s: float

    @property
    def mean_batch(self) -> float:
        """Requests a batch."""
        return self.members / self.batches if self.batches else 0.0


class ClientStatistics(NamedTuple):
    """One client. ``wait_s``: time its requests spent queued, summed, in seconds."""

    requests: int
    rows: int
    wait_s: float
    mean_batch: float
    """Requests in the batches that this client rode in, averaged over its requests."""


class Statistics(NamedTuple):
    """Totals of an executor since it started, or since they were reset."""

    requests: int
    batches: int
    members: int
    rows: int
    wait_s: float
    run_s: float
    """Time spent in base layers (on a GPU: in launching them)."""
    reasons: Mapping[str, int]
    """Batches by the policy's reason to run them."""
    layers: Mapping[str, LayerStatistics]
    """By name and pass, as in ``"model.layers.0.self_attn.q_proj+k_proj+v_proj forward"``."""
    clients: Mapping[str, ClientStatistics]
    """Including those that have left, up to some thousands."""

    @property
    def mean_batch(self) -> float:
        """Requests a batch, over all layers."""
        return self.members / self.batches if self.batches else 0.0

    @property
    def mean_rows(self) -> float:
        """Rows a batch, over all layers."""
        return self.rows / self.batches if self.batches else 0.0


_MAX_REASONS = 100
"""A policy that makes up a reason for each batch does not fill the memory."""


@dataclass(slots=True)
class _Layer:
    requests: int = 0
    batches: int = 0
    members: int = 0
    rows: int = 0
    wait_s: float = 0.0


@dataclass(slots=True)
class _Client:
    requests: int = 0
    rows: int = 0
    wait_s: float = 0.0
    companions: int = 0
    """Sum over requests of the size of the batch each rode in."""


@dataclass(slots=True)
class Counters:
    """The running counts behind :class:`Statistics`. A request counts once, in the batch with its last row."""

    run_s: float = 0.0
    layers: dict[Key, _Layer] = field(default_factory=dict)
    clients: dict[str, _Client] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self, batch: Batch, answered: Sequence[Request], started: float, ended: float) -> None:
        """A batch ran from ``started`` to ``ended`` (seconds) and answered these requests."""
        size = len(batch.slices)
        layer = self._layer(batch.key, size, batch.rows, batch.reason, ended - started)
        for request in answered:
            self._request(layer, request.client, request.rows, started - request.arrived, size)

    def _layer(self, key: Key, size: int, rows: int, reason: str, seconds: float) -> _Layer:
        self.run_s += seconds
        self.reasons[reason if reason in self.reasons or len(self.reasons) < _MAX_REASONS else "other"] += 1
        layer = self.layers.get(key)
        if layer is None:
            if len(self.layers) >= MAX_KEYS:
                key = key._replace(layers=key.layers[:1])  # more groups of siblings than any model has
            layer = self.layers.setdefault(key, _Layer())
        layer.batches += 1
        layer.rows += rows
        layer.members += size
        return layer

    def _request(self, layer: _Layer, name: str, rows: int, wait: float, size: int) -> None:
        layer.requests += 1
        layer.wait_s += wait
        client = self.clients.get(name)
        if client is None:
            if len(self.clients) >= MAX_CLIENTS:
                del self.clients[next(iter(self.clients))]
            client = self.clients[name] = _Client()
        client.requests += 1
        client.rows += rows
        client.wait_s += wait
        client.companions += size

    def snapshot(self, names: list[str]) -> Statistics:
        """The statistics so far; ``names`` of the layer table."""
        layers = {
            f"{group_name([names[index] for index in key.layers])} {pass_name(key)}": (
                LayerStatistics(layer.requests, layer.batches, layer.members, layer.rows, layer.wait_s)
            )
            for key, layer in sorted(self.layers.items())
        }
        clients = {
            name: ClientStatistics(
                client.requests,
                client.rows,
                client.wait_s,
                client.companions / client.requests if client.requests else 0.0,
            )
            for name, client in self.clients.items()
        }
        return Statistics(
            requests=sum(layer.requests for layer in layers.values()),
            batches=sum(layer.batches for layer in layers.values()),
            members=sum(layer.members for layer in layers.values()),
            rows=sum(layer.rows for layer in layers.values()),
            wait_s=sum(layer.wait_s for layer in layers.values()),
            run_s=self.run_s,
            reasons=dict(self.reasons),
            layers=layers,
            clients=clients,
        )


def pass_name(key: Key) -> str:
    """Return the name of a key's pass and precision: ``forward``, ``forward without bias``, ``backward fp32``."""
    return key.pass_.name.lower().replace("_", " ") + (" fp32" if key.fp32 else "")


def group_name(names: list[str]) -> str:
    """How siblings are called: ``model.layers.0.self_attn.q_proj+k_proj+v_proj``."""
    prefix = names[0].rpartition(".")[0]
    if len(names) > 1 and all(name.rpartition(".")[0] == prefix for name in names):
        return f"{prefix}.{'+'.join(name.rpartition('.')[2] for name in names)}"
    return "+".join(names)
