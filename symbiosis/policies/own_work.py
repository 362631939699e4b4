"""The work that local clients do between requests, which delays every other client on the same cores.

A client in the executor's process computes attention, norms and its adapter on the executor's cores with each answer it
gets. This time is learned for prefill and fine-tuning requests, by key and rows, and is part of what such a request
costs. Clients in other processes cost nothing here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from symbiosis.core.requests import Request
from symbiosis.core.terms import Kind
from symbiosis.policies.latency import LatencyModel

_MAX_CLIENTS = 4096


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer that a client works on."""

    request: Request
    at: float
    """Time of the answer, in seconds."""
    ran: float
    """Seconds of batches until then."""


class OwnWork:
    """Learns how long local clients compute with an answer before they send the next request."""

    def __init__(self) -> None:
        self._models = {Kind.PREFILL: LatencyModel(), Kind.FINETUNE: LatencyModel()}
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        """The last answer to each local client that has sent no request since."""
        self._ran = 0.0
        """Seconds of batches so far."""

    def seconds(self, request: Request) -> float:
        """Return the predicted seconds that the client of a prefill or fine-tuning request computes with its answer."""
        return self._models[request.kind][request.key].predict(request.rows) if request.local else 0.0

    def submitted(self, request: Request) -> None:
        """Learn from the time since the client's last answer, less the time in which batches ran."""
        answer = self._answers.pop(request.client, None)
        if answer is not None and _same_walk(answer.request, request):
            seconds = request.arrived - answer.at - (self._ran - answer.ran)
            self._models[request.kind][answer.request.key].learn(answer.request.rows, seconds)

    def ran(self, seconds: float) -> None:
        """Note that a batch ran for so long."""
        self._ran += seconds

    def answered(self, request: Request, at: float) -> None:
        """Note that a local client got its answer at time ``at`` (seconds)."""
        if len(self._answers) >= _MAX_CLIENTS:
            self._answers.popitem(last=False)
        self._answers[request.client] = _Answer(request, at, self._ran)


def _same_walk(before: Request, after: Request) -> bool:
    """Return whether two requests belong to one walk, so that the time between them is work and not a pause."""
    if after.kind is not before.kind:
        return False
    came_back, goes_back = before.key.pass_.is_backward, after.key.pass_.is_backward
    if came_back != goes_back:
        return goes_back
    layer, next_layer = before.key.layers[0], after.key.layers[0]
    return next_layer < layer if goes_back else next_layer > layer
