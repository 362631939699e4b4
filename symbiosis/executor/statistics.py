"""Counts of what an executor has done, per layer and per client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from symbiosis.core.requests import Batch, Key, Request

MAX_KEYS = 4096
MAX_CLIENTS = 4096
"""Largest number of clients with counts of their own; beyond it the oldest are forgotten."""


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
    """Counts of one client."""

    requests: int
    rows: int
    wait_s: float
    """Seconds that its requests were queued, summed."""
    mean_batch: float
    """Size of the batch of a request in requests, averaged over the client's requests."""
    joint: int = 0
    """Tokens that the client decoded in walks with other clients. For clients in this process."""
    alone: Mapping[str, int] = {}
    """Tokens that it decoded by itself, by the reason. For clients in this process."""


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

    @property
    def mean_batch(self) -> float:
        """Requests per batch, over all layers."""
        return self.members / self.batches if self.batches else 0.0

    @property
    def mean_rows(self) -> float:
        """Rows per batch, over all layers."""
        return self.rows / self.batches if self.batches else 0.0


_MAX_REASONS = 100
"""Largest number of reasons that are counted apart, so that a policy with a new reason for each batch is harmless."""
_MAX_ALONE = 20
"""Largest number of reasons to walk alone that are counted apart for each client."""


@dataclass(slots=True)
class _Layer:
    requests: int = 0
    batches: int = 0
    members: int = 0
    rows: int = 0
    wait_s: float = 0.0


@dataclass(slots=True)
class _ClientCounts:
    requests: int = 0
    rows: int = 0
    wait_s: float = 0.0
    companions: int = 0
    """Sum over requests of the size of their batch."""
    joint: int = 0
    alone: Counter[str] = field(default_factory=Counter)


LOAD_S = 5.0
"""Seconds over which the load is measured: at least so many, and at most twice as many."""
FEW_ROWS = 64
"""Rows from which on most of a batch's time grows with its rows. It depends on the device; see decision 0038."""


@dataclass(slots=True)
class Load:
    """Part of the recent time that an executor has spent on rows of its batches, from 0 to 1.

    The time that a batch takes whatever its rows, mostly to read the weights, is not counted: the rows of one more
    client share it. So clients that decode add little, and those that fine-tune add much.
    """

    seconds: float = 0.0
    """Seconds that batches have taken for their rows so far."""
    _last: float = 0.0
    """When the latest batch has ended."""
    _marks: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    """Two times, LOAD_S or more apart, and the seconds until then; the later first."""

    def ran(self, rows: int, seconds: float, now: float) -> None:
        """Count a batch that has ended at time ``now`` (seconds)."""
        if now - self._marks[0][0] >= LOAD_S:
            self._marks = (now, self.seconds), self._marks[0]
        self.seconds += seconds * rows / (rows + FEW_ROWS)
        self._last = now

    def at(self, now: float) -> float:
        """Return the load at a time."""
        if now - self._last >= LOAD_S:
            return 0.0
        later, earlier = self._marks
        since, seconds = later if now - later[0] >= LOAD_S else earlier
        return min((self.seconds - seconds) / max(now - since, LOAD_S), 1.0)


@dataclass(slots=True)
class Counters:
    """The running counts behind :class:`Statistics`. A request counts once, in the batch with its last row."""

    run_s: float = 0.0
    requests: int = 0
    batches: int = 0
    members: int = 0
    rows: int = 0
    layers: dict[Key, _Layer] = field(default_factory=dict)
    clients: dict[str, _ClientCounts] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    load: Load = field(default_factory=Load)
    _tenants: tuple[str, ...] = ()
    """Tenants of the latest joint walk."""
    _each: _ClientCounts = field(default_factory=lambda: _ClientCounts())
    """What was counted for each of them since."""

    def count(self, batch: Batch, answered: Sequence[Request], started: float, ended: float) -> None:
        """Count a batch that ran from ``started`` to ``ended`` (seconds) and answered these requests.

        A request of a joint walk counts as one of each of its tenants.
        """
        size = sum([len(request.tenants) or 1 for request, _, _ in batch.slices])
        self.batches += 1
        self.members += size
        self.rows += batch.rows
        layer = self._layer(batch.key, size, batch.rows, batch.reason, ended - started)
        for request in answered:
            if request.tenants:
                self._joint_request(layer, request, started - request.arrived, size)
            else:
                self.requests += 1
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
        client = self._client(name)
        client.requests += 1
        client.rows += rows
        client.wait_s += wait
        client.companions += size

    def _joint_request(self, layer: _Layer, request: Request, wait: float, size: int) -> None:
        """Count a request of a joint walk for each of its tenants, but only once until the tenants change."""
        tenants, count = request.tenants, len(request.tenants)
        if tenants is not self._tenants:
            self._share_out()
            self._tenants = tenants
        self.requests += count
        layer.requests += count
        layer.wait_s += wait * count
        each = self._each
        each.requests += 1
        each.rows += request.rows // count
        each.wait_s += wait
        each.companions += size

    def _share_out(self) -> None:
        """Add what was counted for each tenant of the latest joint walk to the counts of these clients."""
        each, self._each = self._each, _ClientCounts()
        for name in self._tenants:
            client = self._client(name)
            client.requests += each.requests
            client.rows += each.rows
            client.wait_s += each.wait_s
            client.companions += each.companions

    def walked(self, name: str, alone: str | None) -> None:
        """Count a token of a client: from a joint walk, or for a reason from a walk of its own."""
        client = self._client(name)
        if alone is None:
            client.joint += 1
        else:
            client.alone[alone if alone in client.alone or len(client.alone) < _MAX_ALONE else "other"] += 1

    def _client(self, name: str) -> _ClientCounts:
        client = self.clients.get(name)
        if client is None:
            if len(self.clients) >= MAX_CLIENTS:
                del self.clients[next(iter(self.clients))]
            client = self.clients[name] = _ClientCounts()
        return client

    def snapshot(self, names: list[str]) -> Statistics:
        """Return the statistics so far. ``names`` are those of the layer table."""
        self._share_out()
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
                client.joint,
                dict(client.alone),
            )
            for name, client in self.clients.items()
        }
        return Statistics(
            requests=self.requests,
            batches=self.batches,
            members=self.members,
            rows=self.rows,
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
    """Return a name for siblings, such as ``model.layers.0.self_attn.q_proj+k_proj+v_proj``."""
    prefix = names[0].rpartition(".")[0]
    if len(names) > 1 and all(name.rpartition(".")[0] == prefix for name in names):
        return f"{prefix}.{'+'.join(name.rpartition('.')[2] for name in names)}"
    return "+".join(names)
