"""What a cluster runs, as plain data, and the decisions about it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from symbiosis.errors import UsageError
from symbiosis.terminal import child
from symbiosis.transports.limits import MAX_REPLICAS

NODE_ID = "ray.io/node-id"
"""Label of every node of Ray."""


@dataclass(frozen=True)
class Model:
    """One base model of a cluster.

    Attributes:
        arguments: of ``symbiosis serve``, but for the addresses and the layers.
        parts: base layers of each part, as ``serve --layers`` takes them. Empty: every executor serves all.
        replicas: executors of each part.
        resources: what Ray reserves for one executor with all its shards: ``CPU``, ``GPU``, ``memory`` in bytes.
        nodes: labels that the nodes of its executors have.
    """

    name: str
    arguments: tuple[str, ...]
    parts: tuple[str, ...] = ()
    replicas: int = 1
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    nodes: Mapping[str, str] = field(default_factory=dict)

    def command(self, part: int) -> list[str]:
        """Return the arguments of ``symbiosis serve`` for an executor of a part."""
        return [*self.arguments, *(["--layers", self.parts[part]] if self.parts else [])]


@dataclass(frozen=True)
class ClusterPlan:
    """The models of a cluster, and where its directory listens."""

    models: tuple[Model, ...]
    host: str = "127.0.0.1"
    port: int = 7070


class ExecutorId(NamedTuple):
    """An executor's model, the index of its part, and its number. Numbers are not used twice while others run."""

    model: str
    part: int
    number: int

    def __str__(self) -> str:
        return f"{self.model}/{self.part}/{self.number}"

    @classmethod
    def of(cls, name: str) -> ExecutorId | None:
        """Return the identity in the name of an actor, or None for an actor that is no executor."""
        model, _, rest = name.partition("/")
        part, _, number = rest.partition("/")
        return cls(model, int(part), int(number)) if model and part.isdigit() and number.isdigit() else None


def changes(
    model: Model, replicas: int, present: Collection[ExecutorId], serving: Collection[str] = ()
) -> tuple[list[ExecutorId], list[ExecutorId]]:
    """Return the executors to start and those to end, so that each part of a model has this many. The first to end are
    those whose names are not among those that serve.

    Raises:
        UsageError: the model would have more executors than a tenant takes addresses.
    """
    if (count := max(len(model.parts), 1) * replicas) > MAX_REPLICAS:
        raise UsageError(f"{model.name} would have {count} executors; a tenant takes up to {MAX_REPLICAS} addresses")
    start: list[ExecutorId] = []
    end: list[ExecutorId] = []
    for part in range(max(len(model.parts), 1)):
        here = sorted(place for place in present if (place.model, place.part) == (model.name, part))
        end += sorted(here, key=lambda place: str(place) not in serving)[replicas:]
        free = 1 + max((place.number for place in here), default=-1)
        start += [ExecutorId(model.name, part, free + more) for more in range(replicas - len(here))]
    return start, end


def selectors(model: Model, away: Iterable[str], beside: Iterable[str], nodes: Iterable[str]) -> list[dict[str, str]]:
    """Return label selectors of nodes for an executor, the preferred one first.

    Args:
        away: ids of nodes that are drained.
        beside: ids of nodes with an executor of the same part, which a replica should survive.
        nodes: ids of the nodes that have what the executor needs, if nothing else runs there.
    """
    away, beside = set(away), set(beside)
    alternatives = [away | beside, away] if beside - away and set(nodes) - away - beside else [away]
    return [{**model.nodes, **({NODE_ID: f"!in({','.join(sorted(ids))})"} if ids else {})} for ids in alternatives]


def addresses(reports: Mapping[str, Mapping[str, object]], model: str, now: float, fresh_s: float) -> list[str]:
    """Return the addresses of a model's executors that serve. Executors that have not reported for ``fresh_s`` are left
    out, unless that holds for all of their part."""
    fresh: dict[int, list[str]] = {}
    late: dict[int, list[str]] = {}
    for name, report in reports.items():
        place = ExecutorId.of(name)
        if place is not None and place.model == model and report["state"] == "serving":
            found = fresh if now - float(str(report["at"])) <= fresh_s else late
            found.setdefault(place.part, []).append(str(report["address"]))
    return [address for part in (late | fresh).values() for address in part]


def reason(output: str, status: int) -> str:
    """Return why a command has ended: its error, or the last line that it has printed, after the signal, if any."""
    lines = output.splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return child.reason(status, (errors or lines or [""])[-1])
