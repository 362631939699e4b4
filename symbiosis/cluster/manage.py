"""Start, move, count and end the executors of a cluster, from a process beside Ray.

Each executor is a detached actor in a detached placement group of its own, both with the name of its
:class:`~symbiosis.cluster.plan.ExecutorId`. Ray starts the actor again where the placement group is, and moves both
when the node has ended. What runs is read from Ray's lists of both, so no state is kept that could be wrong.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from symbiosis.cluster import running
from symbiosis.cluster.directory import FRESH_S, DirectoryActor
from symbiosis.cluster.executor import DRAIN_S, ExecutorActor
from symbiosis.cluster.plan import ClusterPlan, ExecutorId, Model, changes, selectors
from symbiosis.errors import BrokenError, UsageError

NAMESPACE = "symbiosis"
CONNECT_S = 10.0
"""Seconds for Ray to accept a connection."""
PLACE_S = 10.0
"""Seconds for Ray to find a node for an executor."""

Told = Callable[[str], object]


class ClusterManager:
    """The symbiosis cluster of a running Ray cluster.

    Args:
        address: of Ray: ``auto``, or ``host:port``.
        tell: is told what happens, a line each.

    Raises:
        UsageError: no Ray answers there.
    """

    def __init__(self, address: str = "auto", tell: Told = lambda line: None) -> None:
        self._tell = tell
        host, _, port = address.rpartition(":")
        try:
            if host:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()  # Ray would try for minutes
            self.context = ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"no Ray at {address}: {' '.join(str(error).split())[:300]}; start it on each node with ray start, and "
                "give --ray HOST:PORT where it is not on this host"
            ) from error

    def close(self) -> None:
        """Disconnect from Ray. What was started goes on."""
        ray.shutdown()

    def up(self, plan: ClusterPlan, within_s: float) -> None:
        """Start the directory and all executors, and wait until they serve. Nothing is left if one cannot.

        Raises:
            UsageError: a cluster is up, the directory cannot listen, or an executor has no room or cannot serve.
            BrokenError: the directory does not start, or an executor does not serve, in time.
        """
        with contextlib.suppress(ValueError):
            ray.get_actor(running.DIRECTORY)
            raise UsageError("a symbiosis cluster is up on this Ray; change it with scale, or end it with down first")
        options = {
            "name": running.DIRECTORY,
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": 0,
            "resources": running.HEAD,
        }
        directory = ray.remote(DirectoryActor).options(**options).remote(plan)
        try:
            try:
                ray.get(directory.plan.remote(), timeout=within_s)
            except GetTimeoutError as error:
                raise BrokenError(f"the directory did not start within {within_s:g} s; raise --within") from error
            except RayError as error:
                why = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
                raise UsageError(f"cannot listen on {plan.host}:{plan.port} of the head node: {why}") from error
            started = [place for model in plan.models for place in changes(model, model.replicas, ())[0]]
            self._start(plan, started, within_s)
        except BaseException:
            try:
                self._remove(running.places(), drain=False)
            finally:
                ray.kill(directory)
            raise

    def scale(self, name: str, replicas: int, within_s: float) -> None:
        """Start or end executors, so that each part of a model has this many. Those that do not serve end first.

        Raises:
            UsageError: there is no such model, or a new executor has no room, or cannot serve. Then nothing changes.
        """
        plan = running.asked("plan")
        model, places = _model(plan, name), running.places()
        start, end = changes(model, replicas, places)
        if end:
            start, end = changes(model, replicas, places, _serving(name))
        self._start(plan, start, within_s)
        self._remove(end)

    def drain(self, node: str, within_s: float) -> None:
        """Start the executors of a node elsewhere, and then end them there. The node gets no more executors.

        Args:
            node: its name or IP address, or the beginning of its id.

        Raises:
            UsageError: there is no such node, or an executor has no room elsewhere. Then nothing changes.
        """
        plan, (found, name) = running.asked("plan"), _node(node)
        leave = [place for place in running.places() if _reserved(place) == found]
        was_drained = found in running.away()
        _internal_kv_put(running.AWAY + found, "drained")
        try:
            present, start = running.places(), []
            for place in leave:
                stay = [each for each in present if (each.model, each.part) == (place.model, place.part)]
                start.append(place._replace(number=1 + max(each.number for each in stay)))
                present.append(start[-1])
            self._start(plan, start, within_s)
        except BaseException:
            if not was_drained:
                _internal_kv_del(running.AWAY + found)
            raise
        self._remove(leave)
        self._tell(f"{name} has no executors, and gets none until its Ray is started again")

    def down(self) -> None:
        """End all executors, when their walks have ended, and the directory."""
        places = running.places()
        directory = None if places else running.directory()
        self._remove(places)
        with contextlib.suppress(UsageError):
            ray.kill(directory or running.directory())

    def _start(self, plan: ClusterPlan, places: Sequence[ExecutorId], within_s: float) -> None:
        """Start executors, and wait until they serve. Ends them again if one of them cannot."""
        if not places:
            return
        running.asked("expect", list(map(str, places)))
        made: list[ExecutorId] = []
        try:
            for place in places:
                self._place(_model(plan, place.model), place, made)
            for state in self._states(places, within_s):
                self._tell(state)
        except BaseException:
            self._remove(made, drain=False)
            raise

    def _place(self, model: Model, place: ExecutorId, made: list[ExecutorId]) -> None:
        """Start an executor. It is in ``made`` as soon as anything of it may be there.

        Raises:
            UsageError: no node has room for it, or another command has just started one of this name.
        """
        same = [each for each in running.places() if (each.model, each.part) == (place.model, place.part)]
        beside = filter(None, map(_reserved, same))
        for selector in selectors(model, running.away(), beside, _fitting(model)):
            made.append(place)
            try:
                group: Any = placement_group(
                    [dict(model.resources)],
                    name=str(place),
                    lifetime="detached",
                    bundle_label_selector=[selector] if selector else None,
                )
            except RayError as error:
                if "already exists" not in str(error):
                    raise UsageError(f"{place} cannot be placed: {error}") from error
                made.remove(place)
                raise UsageError(f"another command has just started {place}; try again when it has ended") from error
            if group.wait(PLACE_S):
                break
            remove_placement_group(group)
            made.remove(place)
        else:
            raise UsageError(f"no node has room for {place}: {_shown(model)}; see ray status")
        options: dict[str, Any] = {
            "name": str(place),
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": 2,
            "num_cpus": model.resources.get("CPU", 0),
            "num_gpus": model.resources.get("GPU", 0),
            "memory": model.resources.get("memory"),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
        }
        command = model.command(place.part)
        ray.remote(ExecutorActor).options(**options).remote(str(place), model.name, command, running.directory())

    def _states(self, places: Sequence[ExecutorId], within_s: float) -> Iterator[str]:
        """Yield a line for each executor that serves, until all do.

        Raises:
            UsageError: an executor has ended.
            BrokenError: one does not serve in time.
        """
        left, until = list(map(str, places)), time.monotonic() + within_s
        while left:
            reports: Mapping[str, Any] = running.asked("reports")
            for name in list(left):
                report = reports.get(name, {})
                if report.get("state") == "failed":
                    raise UsageError(f"{name} cannot serve: {report['error']}")
                if report.get("state") == "serving":
                    left.remove(name)
                    yield f"{name} serves on {report['address']}"
            if left and time.monotonic() > until:
                raise BrokenError(f"{', '.join(left)} did not serve within {within_s:g} s; raise --within")
            time.sleep(0.2)

    def _remove(self, places: Sequence[ExecutorId], drain: bool = True) -> None:
        """End executors, and free what is reserved for them. An interrupt ends them at once."""
        names = list(map(str, places))
        try:
            with contextlib.suppress(UsageError, BrokenError):  # without the directory, no tenant gets these addresses
                running.asked("forget", names) if names else None
            ends = []
            for name in names if drain else []:
                with contextlib.suppress(ValueError):
                    ends.append(ray.get_actor(name).drain.remote())
            ray.wait(ends, num_returns=len(ends), timeout=DRAIN_S) if ends else None
        finally:
            for name in names:
                with contextlib.suppress(ValueError, RayActorError):
                    ray.kill(ray.get_actor(name))
                with contextlib.suppress(ValueError):
                    remove_placement_group(get_placement_group(name))


def _model(plan: ClusterPlan, name: str) -> Model:
    for model in plan.models:
        if model.name == name:
            return model
    raise UsageError(f"no model {name!r} in this cluster; it has {', '.join(model.name for model in plan.models)}")


def _serving(model: str) -> set[str]:
    """Return the names of a model's executors that serve. A directory that was started again hears of them soon."""
    until = time.monotonic() + FRESH_S
    while True:
        executors = running.status()["models"][model]["executors"]
        serving = {each["name"] for each in executors if each["state"] == "serving"}
        if len(serving) == len(executors) or time.monotonic() > until:
            return serving
        time.sleep(0.2)


def _node(text: str) -> tuple[str, str]:
    """Return the id and the name of the node that a text stands for."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = ("NodeName", "NodeManagerAddress")
    found = [
        node for node in nodes if text in map(node.get, names) or (len(text) >= 4 and node["NodeID"].startswith(text))
    ]
    if len(found) != 1:
        known = ", ".join(f"{node['NodeName']} ({node['NodeID'][:12]})" for node in nodes)
        raise UsageError(f"{text!r} is the name of {len(found)} nodes; give one of {known}")
    return found[0]["NodeID"], found[0]["NodeName"]


def _fitting(model: Model) -> list[str]:
    """Return the ids of the nodes that have what an executor needs, if nothing else runs there."""
    return [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"]
        and all(node["Resources"].get(kind, 0.0) >= amount for kind, amount in model.resources.items())
        and model.nodes.items() <= node["Labels"].items()
    ]


def _reserved(place: ExecutorId) -> str:
    """Return the id of the node on which an executor has its place, or "" if Ray looks for one."""
    with contextlib.suppress(ValueError):
        table = ray.util.placement_group_table(get_placement_group(str(place)))
        return str(next(iter(table.get("bundles_to_node_id", {}).values()), ""))
    return ""


def _shown(model: Model) -> str:
    parts = [f"{name} {amount:g}" for name, amount in model.resources.items()]
    return ", ".join(parts + [f"{label}={value}" for label, value in model.nodes.items()])
