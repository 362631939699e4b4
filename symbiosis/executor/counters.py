"""The running counts behind an executor's statistics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from symbiosis.core.requests import Batch, Key, Pass, Request
from symbiosis.core.terms import Kind, tenant_of
from symbiosis.executor.load import RecentLoad
from symbiosis.executor.statistics import ClientStatistics, Histogram, LayerStatistics, Statistics

MAX_KEYS = 4096
"""Largest number of groups of siblings, by pass and precision, that are counted apart."""
MAX_CLIENTS = 2048
"""Largest number of clients with counts of their own, of some 6 KiB each; beyond it those are forgotten
that had no request for longest."""
MAX_LEFT = 256
"""Largest number of tenants with counts of their own for what forgotten clients did."""
_MAX_NAMED = 8
"""Largest number of layers that are named one by one."""
_MAX_REASONS = 100
"""Largest number of reasons that are counted apart, so that a policy with a new reason for each batch is harmless."""
_MAX_OF_CLIENT = 20
"""Largest number of reasons to walk alone, and of the policy's reasons, that are counted apart for each client."""
BOUNDS_S = tuple(round(base * 10**power, 6) for power in range(-4, 2) for base in (1.0, 2.5, 5.0))[:-1]
"""Upper bounds of the durations that histograms count together, in seconds: 0.1 ms to 25 s."""
OTHER = "other"
"""Stands for the reasons, or the tenants, that are too many to be counted apart."""
APART_S = 10.0
"""Two requests for the same layers that are further apart, in seconds, do not count as work at the same time."""
_FORWARD, _FORWARD_WITHOUT_BIAS = Pass.FORWARD, Pass.FORWARD_WITHOUT_BIAS
_PASSES = [pass_.name.lower().replace("_", " ") + (" fp32" if fp32 else "") for pass_ in Pass for fp32 in (False, True)]
"""Names of a key's pass and precision: ``forward``, ``forward without bias``, ``backward fp32``."""
_NONE = LayerStatistics(0, 0, 0, 0, 0.0)
"""Counts of a layer that had no requests."""


@dataclass(slots=True)
class _Layer:
    requests: int = 0
    batches: int = 0
    members: int = 0
    rows: int = 0
    wait_s: float = 0.0
    client: str = ""
    """The client of the latest batch, if that had one request."""
    arrived: float = 0.0
    """When this request arrived."""


@dataclass(slots=True)
class _ClientCounts:
    requests: int = 0
    rows: int = 0
    companions: int = 0
    """Sum over requests of the size of their batch."""
    joint: int = 0
    alone: Counter[str] = field(default_factory=Counter)
    work: list[int] = field(default_factory=lambda: [0] * len(Kind))
    """Rows of forward passes, times the layers that they went through, by kind."""
    waits: dict[str, float] = field(default_factory=dict)
    unshared: dict[tuple[str, str], int] = field(default_factory=dict)
    passes: list[int] = field(default_factory=lambda: [0] * len(_PASSES))

    def waited(self, reason: str, seconds: float) -> None:
        waits = self.waits
        if reason not in waits and len(waits) >= _MAX_OF_CLIENT:
            reason = OTHER
        waits[reason] = waits.get(reason, 0.0) + seconds

    def walked_alone(self, reason: str, tokens: int = 1) -> None:
        self.alone[reason if reason in self.alone or len(self.alone) < _MAX_OF_CLIENT else OTHER] += tokens

    def had_batch(self, beside: str, reason: str, requests: int = 1) -> None:
        """Count requests that had a batch to themselves."""
        found = beside, reason
        if found not in self.unshared and len(self.unshared) >= _MAX_OF_CLIENT:
            found = beside, OTHER
        self.unshared[found] = self.unshared.get(found, 0) + requests

    def add(self, other: _ClientCounts, part: float = 1.0) -> None:
        """Add the counts of another client, or of clients together that had the same requests: a part of their rows."""
        self.requests += other.requests
        self.rows += round(part * other.rows)
        self.companions += other.companions
        self.joint += other.joint
        for reason, tokens in other.alone.items():
            self.walked_alone(reason, tokens)
        for reason, seconds in other.waits.items():
            self.waited(reason, seconds)
        for (beside, reason), requests in other.unshared.items():
            self.had_batch(beside, reason, requests)
        for number, requests in enumerate(other.passes):
            self.passes[number] += requests
        for kind, work in enumerate(other.work):
            self.work[kind] += round(part * work)

    def snapshot(self, layers: int, slo: tuple[int, int], service: float = 0.0) -> ClientStatistics:
        unshared: dict[str, dict[str, int]] = {}
        for (beside, reason), requests in self.unshared.items():
            unshared.setdefault(beside, {})[reason] = requests
        return ClientStatistics(
            self.requests,
            self.rows,
            sum(self.waits.values()),
            self.companions / self.requests if self.requests else 0.0,
            self.joint,
            dict(self.alone),
            {kind.name.lower(): work / layers for kind, work in zip(Kind, self.work, strict=True)},
            dict(self.waits),
            *slo,
            unshared,
            {name: requests for name, requests in zip(_PASSES, self.passes, strict=True) if requests},
            service,
        )


class _Durations:
    """The running counts behind :class:`Histogram`."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    def snapshot(self) -> Histogram:
        return Histogram(BOUNDS_S, tuple(self.counts), self.seconds)


@dataclass(slots=True)
class Counters:
    """The running counts behind :class:`Statistics`. A request counts once, in the batch with its last row."""

    biased: frozenset[int] = frozenset()
    """The layers with a bias. A row whose bias the tenant adds itself is a row of a forward pass, too."""
    requests: int = 0
    batches: int = 0
    members: int = 0
    rows: int = 0
    layers: dict[Key, _Layer] = field(default_factory=dict)
    clients: OrderedDict[str, _ClientCounts] = field(default_factory=OrderedDict)
    """The client with the latest request is last."""
    reasons: Counter[str] = field(default_factory=Counter)
    load: RecentLoad = field(default_factory=RecentLoad)
    waits: dict[str, float] = field(default_factory=dict)
    wait_times: list[_Durations] = field(default_factory=lambda: [_Durations() for _ in Kind])
    run_times: _Durations = field(default_factory=_Durations)
    rejections: Counter[str] = field(default_factory=Counter)
    apart: _Durations = field(default_factory=_Durations)
    slo_before: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    service_before: Mapping[str, float] = field(default_factory=dict)
    """What the policy had counted when these counts began."""
    _left: dict[str, _ClientCounts] = field(default_factory=dict)
    """Counts of forgotten clients, by tenant."""
    _joint: Mapping[str, float] = field(default_factory=dict)
    """Clients of the latest joint walk, and the part of its rows that each has."""
    _each: _ClientCounts = field(default_factory=_ClientCounts)
    """Counts of each client of the latest joint walk, with the rows of all, that are not in the clients' own yet."""

    def count(self, batch: Batch, answered: Sequence[Request], started: float, ended: float, beside: str = "") -> None:
        """Count a batch that ran from ``started`` to ``ended`` (seconds) and answered these requests. If the
        batch had one request, ``beside`` says what other clients did.

        A request of a joint walk counts as one of each of its clients.
        """
        size = sum([len(request.joint) if request.joint else 1 for request, _, _ in batch.slices])
        self.batches += 1
        self.members += size
        self.rows += batch.rows
        seconds = ended - started
        self.run_times.add(seconds)
        reason = batch.reason
        if reason not in self.reasons:
            reason = self._new_reason(reason)
        self.reasons[reason] += 1
        key = batch.key
        layer = self._layer(key, size, batch.rows)
        own_bias = key.pass_ is _FORWARD_WITHOUT_BIAS and key.layers[0] in self.biased
        layers = len(key.layers) if key.pass_ is _FORWARD or own_bias else 0
        pass_ = _number_of(key)
        waited = 0.0
        if size > 1:
            layer.client = ""
        for request in answered:
            wait, rows, count, kind = started - request.arrived, request.rows, 1, request.kind
            if request.joint:
                count = len(request.joint)
                client = self._joint_client(request.joint)
            else:
                client = self._client(request.client)
            self.requests += count
            layer.requests += count
            times = self.wait_times[kind]
            times.counts[bisect_left(BOUNDS_S, wait)] += count
            times.seconds += wait * count
            waited += wait * count
            client.requests += 1
            client.rows += rows
            client.companions += size
            client.work[kind] += rows * layers
            client.passes[pass_] += 1
            if size == 1:
                try:
                    client.unshared[beside, reason] += 1
                except KeyError:
                    client.had_batch(beside, reason)
                self._count_apart(layer, request)
            try:
                client.waits[reason] += wait
            except KeyError:
                client.waited(reason, wait)
        layer.wait_s += waited
        self.waits[reason] += waited

    def _count_apart(self, layer: _Layer, request: Request) -> None:
        """Count how long after another client's request for the same layers a request arrived."""
        if layer.client != request.client:
            seconds = request.arrived - layer.arrived
            if layer.client and 0 <= seconds < APART_S:
                self.apart.add(seconds)
            layer.client = request.client
        layer.arrived = request.arrived

    def _new_reason(self, reason: str) -> str:
        """Return the name under which a reason is counted that was not counted before."""
        if len(self.reasons) >= _MAX_REASONS:
            reason = OTHER
        self.waits.setdefault(reason, 0.0)
        return reason

    def _layer(self, key: Key, size: int, rows: int) -> _Layer:
        layer = self.layers.get(key)
        if layer is None:
            if len(self.layers) >= MAX_KEYS:
                key = key._replace(layers=key.layers[:1])  # more groups of siblings than any model has
            layer = self.layers.setdefault(key, _Layer())
        layer.batches += 1
        layer.rows += rows
        layer.members += size
        return layer

    def _joint_client(self, joint: Mapping[str, float]) -> _ClientCounts:
        """Return the counts that stand for every client of this joint walk until its clients change."""
        if joint is not self._joint:
            self._share_out()
            self._joint = joint
        return self._each

    def _share_out(self) -> None:
        """Add what was counted for each client of the latest joint walk to its own counts."""
        each, self._each = self._each, _ClientCounts()
        for name, part in self._joint.items():
            self._client(name).add(each, part)

    def walked(self, name: str, alone: str | None) -> None:
        """Count a token of a client: from a joint walk, or for a reason from a walk of its own."""
        client = self._client(name)
        if alone is None:
            client.joint += 1
        else:
            client.walked_alone(alone)

    def _client(self, name: str) -> _ClientCounts:
        client = self.clients.get(name)
        if client is None:
            if len(self.clients) >= MAX_CLIENTS:
                oldest, counts = self.clients.popitem(last=False)
                _of_tenant(self._left, oldest, MAX_LEFT).add(counts)
            client = self.clients[name] = _ClientCounts()
        else:
            self.clients.move_to_end(name)
        return client

    def snapshot(
        self, names: list[str], slo: Mapping[str, tuple[int, int]], service: Mapping[str, float] | None = None
    ) -> Statistics:
        """Return the statistics so far.

        Args:
            names: those of the layer table.
            slo: the policy's count of tokens of each client that were made within their latency targets, and later.
            service: the policy's count of it for each tenant, if it has one.
        """
        self._share_out()
        made: dict[str, tuple[int, int]] = {}
        for name, (on_time, late) in slo.items():
            before = self.slo_before.get(name, (0, 0))
            since = max(on_time - before[0], 0), max(late - before[1], 0)  # a policy may forget a client
            if any(since):
                made[name] = since
        given = {name: max(now - self.service_before.get(name, 0.0), 0.0) for name, now in (service or {}).items()}
        layers: dict[str, LayerStatistics] = {}
        for key, layer in sorted(self.layers.items()):
            name = f"{group_name([names[index] for index in key.layers])} {_PASSES[_number_of(key)]}"
            same = layers.get(name, _NONE)  # keys of one bank of experts that differ in choices have the same name
            layers[name] = LayerStatistics(
                same.requests + layer.requests,
                same.batches + layer.batches,
                same.members + layer.members,
                same.rows + layer.rows,
                same.wait_s + layer.wait_s,
            )
        tenants: dict[str, _ClientCounts] = {}
        most = MAX_CLIENTS + MAX_LEFT + 1  # the two tables have no more; the last one is OTHER
        for part in (self._left, self.clients):
            for name, client in part.items():
                _of_tenant(tenants, name, most).add(client)
        kept: Counter[str] = Counter()
        missed: Counter[str] = Counter()
        for sign, counted in ((1, slo), (-1, self.slo_before)):  # a policy may move counts from a client to its tenant
            for name, (on_time, late) in counted.items():
                tenant = tenant_of(name) if tenant_of(name) in tenants else OTHER
                kept[tenant] += sign * on_time
                missed[tenant] += sign * late
        kept, missed = +kept, +missed
        if OTHER in kept or OTHER in missed:
            tenants.setdefault(OTHER, _ClientCounts())
        return Statistics(
            requests=self.requests,
            batches=self.batches,
            members=self.members,
            rows=self.rows,
            wait_s=sum(self.waits.values()),
            run_s=self.run_times.seconds,
            reasons=dict(self.reasons),
            layers=layers,
            clients={name: one.snapshot(len(names), made.get(name, (0, 0))) for name, one in self.clients.items()},
            tenants={
                name: client.snapshot(len(names), (kept[name], missed[name]), given.get(name, 0.0))
                for name, client in tenants.items()
            },
            waits=dict(self.waits),
            wait_times={kind.name.lower(): times.snapshot() for kind, times in zip(Kind, self.wait_times, strict=True)},
            run_times=self.run_times.snapshot(),
            rejections=dict(self.rejections),
            apart=self.apart.snapshot(),
        )


def _of_tenant(tenants: dict[str, _ClientCounts], client: str, most: int) -> _ClientCounts:
    """Return where to count for the tenant of a client: under ``OTHER`` if there are ``most`` tenants already."""
    tenant = tenant_of(client)
    if tenant not in tenants and len(tenants) >= most:
        tenant = OTHER
    return tenants.setdefault(tenant, _ClientCounts())


def _number_of(key: Key) -> int:
    """Return the place of a key's pass and precision in _PASSES."""
    return 2 * key.pass_ + key.fp32


def group_name(names: list[str]) -> str:
    """Return a name for siblings, such as ``model.layers.0.self_attn.q_proj+k_proj+v_proj``, or for a whole walk."""
    prefix = names[0].rpartition(".")[0]
    if len(names) > 1 and all(name.rpartition(".")[0] == prefix for name in names):
        return f"{prefix}.{'+'.join(name.rpartition('.')[2] for name in names)}"
    return "+".join(names) if len(names) <= _MAX_NAMED else f"{names[0]}…{names[-1]}"
