"""The interface of batching policies.

A policy decides which queued rows run next. The scheduler (:mod:`symbiosis.core.scheduler`) owns the queues, asks the
policy for a decision and checks it. A policy reads no clock, does no I/O and touches no tensor.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from symbiosis.core.requests import Batch, Key, Request
from symbiosis.core.terms import NO_TERMS, Terms
from symbiosis.errors import UsageError

MAX_WAIT_S = 3600.0
"""Longest wait, in seconds, that a policy may ask for while no client is thinking."""


@dataclass(slots=True)
class Run:
    """Run rows of queued requests now.

    ``takes`` are pairs of a request and a number of rows. All requests have the key ``key``, and requests of one client
    are in arrival order. A request may be taken in part; its other rows stay queued. ``reason`` is a short text for
    statistics.
    """

    key: Key
    takes: Sequence[tuple[Request, int]]
    reason: str


@dataclass(slots=True)
class Wait:
    """Run nothing before time ``until`` (seconds on the executor's clock). The policy is asked again earlier if a
    request comes or goes, or if a client ends a walk or leaves.

    ``None`` waits for a change alone, which is allowed only while a client is thinking. While no client is thinking, a
    wait may last for at most :data:`MAX_WAIT_S`.
    """

    until: float | None


Decision = Run | Wait
"""What a policy decides: rows to run now, or a time to wait until."""


class QueueView(Protocol):
    """The queued requests of one key, read only."""

    @property
    def key(self) -> Key: ...
    @property
    def rows(self) -> int:
        """Queued rows of all requests."""

    @property
    def oldest(self) -> Request: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in arrival order."""

    def of(self, client: str) -> Sequence[Request]:
        """Return a client's requests in arrival order, which is the order in which a batch must take them."""

    def take(self, max_rows: int, first: Request | None = None) -> list[tuple[Request, int]]:
        """Return as many rows as fit, oldest request first. The last request may be taken in part.

        ``first`` precedes all other requests, unless its client has an earlier request in this queue.
        """


class View(Protocol):
    """The state that a policy may read when it decides: the queues and the clients that may still send requests."""

    @property
    def queues(self) -> Mapping[Key, QueueView]:
        """The queues that are not empty."""

    @property
    def oldest(self) -> Request:
        """The queued request that arrived first."""

    @property
    def thinking(self) -> int:
        """Number of clients in a walk without an outstanding request. These may join a batch if the policy waits."""

    @property
    def batches(self) -> int:
        """Number of batches that were started from the queues, ``batches - request.seen`` of them since a request was
        queued."""

    @property
    def layers(self) -> int:
        """Number of layers in the layer table."""

    @property
    def max_rows(self) -> int:
        """Largest number of rows in a batch."""

    def part(self, key: Key) -> float:
        """Return the part of a token's walk that one row of a request with this key is, by the weights that it is
        multiplied with. A token that goes through all layers is 1."""


class Policy(ABC):
    """Base class of batching policies. A subclass sets ``name`` and implements :meth:`decide`.

    The scheduler calls the other methods to report what happens to requests; their defaults do nothing. A policy object
    belongs to one scheduler, because it may remember that scheduler's requests.
    """

    name: str

    lone_at_once: bool = False
    """Whether the scheduler may run a lone request without asking the policy: nothing else is queued or running, no
    other client is thinking, and the event loop has had a turn (:meth:`Scheduler.offer`). This halves the cost of such
    a request, and the policy gets no hook for it. A policy that limits rates must say False."""

    _bound: bool = False

    def __repr__(self) -> str:
        """Return the policy as it is written after ``--policy``, with the options that do not have their defaults."""
        given = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, parameter.default)
            if name != "policy" and value != parameter.default:
                parts = value.items() if isinstance(value, Mapping) else [("", value)]
                given += [f"{name}{key and f'.{key}'}={_written(one)}" for key, one in parts]
        text, inner = _name_of(self), getattr(self, "policy", None)
        text += f":{','.join(given)}" if given else ""
        return f"{text}+{inner!r}" if isinstance(inner, Policy) else text

    def bind(self) -> None:
        """Claim this policy for one scheduler.

        Raises:
            UsageError: another scheduler has claimed it.
        """
        if self._bound:
            raise UsageError(
                f"the policy {self!r} belongs to another executor or simulation already and remembers its requests; "
                "make a new one"
            )
        self._bound = True

    def default_terms(self, client: str) -> Terms:
        """Return the terms that the policy grants to a client of this name by default."""
        return NO_TERMS

    def may_join(self, client: str, now: float) -> bool:
        """Return whether a client may take part in a walk with other clients now. A policy that holds back the requests
        of this client, and would thus hold back the others, says False."""
        return True

    def slo(self) -> Mapping[str, tuple[int, int]]:
        """Return how many tokens of each client were made within their latency targets, and how many later. Empty if
        the policy has no such targets. Statistics show it."""
        return {}

    def service(self) -> Mapping[str, float]:
        """Return the service that each tenant was given so far, in the policy's own measure. Empty if the policy does
        not count it. Statistics show it."""
        return {}

    def unloaded(self, seconds: float) -> None:
        """Note how long one token takes in the base layers of an idle executor.

        Called at most once, before all other hooks; not called if the layers of a token are not known.

        Raises:
            UsageError: the policy promises latencies below this.
        """

    def submitted(self, request: Request) -> None:
        """Note that a request was queued."""

    def started(self, batch: Batch) -> None:
        """Note that a batch has started: its rows have left the queue."""

    def ran(self, batch: Batch, seconds: float) -> None:
        """Note how long a batch took. On a GPU this is reported some batches later."""

    def cancelled(self, request: Request) -> None:
        """Note that the remaining rows of a queued request were withdrawn."""

    @abstractmethod
    def decide(self, view: View, now: float) -> Decision:
        """Decide what to do at time ``now`` (seconds). Called only while a request is queued."""


def names_of(policy: Policy) -> str:
    """Return the names of a policy and of those inside it, such as ``fair+opportunistic``."""
    inner = getattr(policy, "policy", None)
    return f"{_name_of(policy)}+{names_of(inner)}" if isinstance(inner, Policy) else _name_of(policy)


def _name_of(policy: Policy) -> str:
    return str(getattr(type(policy), "name", type(policy).__name__))


def _written(value: object) -> str:
    """Return the value of an option as it is written after ``--policy``."""
    if isinstance(value, tuple):
        return "/".join(map(_written, value))
    return (
        f"{value:.12g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
    )
