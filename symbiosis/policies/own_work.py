"""The work that local clients do between requests, which delays every other client on the same cores.

A client in the executor's process computes attention, norms and its adapter on the executor's cores with each answer it
gets. This time is learned for prefill and fine-tuning requests, by key and rows, and is part of what such a request
costs. Clients in other processes cost nothing here.
"""

from __future__ import annotations

from symbiosis.core.requests import Request
from symbiosis.core.terms import Kind
from symbiosis.policies.latency import LatencyModel

_MAX_CLIENTS = 4096


class OwnWork:
    """Learns how long local clients compute with an answer before they send the next request."""

    def __init__(self) -> None:
        self._models = {Kind.PREFILL: LatencyModel(), Kind.FINETUNE: LatencyModel()}
        self._answers: dict[str, tuple[Request, float]] = {}
        """The latest request of each local client whose answer no newer request has followed, and the time of the
        answer less ``_ran`` at that time."""
        self._ran = 0.0
        """Seconds of batches so far."""

    def seconds(self, request: Request) -> float:
        """Return the predicted seconds that the client of a prefill or fine-tuning request computes with its answer."""
        return self._models[request.kind][request.key].predict(request.rows) if request.local else 0.0

    def submitted(self, request: Request, begins: bool) -> None:
        """Learn from the time since the client's last answer, less the time in which batches ran, unless the request
        ``begins`` a walk."""
        before, idle = self._answers.pop(request.client, (None, 0.0))
        if before is not None and before.kind is request.kind and not begins:
            self._models[request.kind][before.key].learn(before.rows, request.arrived - self._ran - idle)

    def ran(self, seconds: float) -> None:
        """Note that a batch ran for so long."""
        self._ran += seconds

    def answered(self, request: Request, at: float) -> None:
        """Note that a local client got its answer at time ``at`` (seconds)."""
        if len(self._answers) >= _MAX_CLIENTS:
            self._answers.clear()
        self._answers[request.client] = request, at - self._ran
