"""What runs of the cluster on the Ray that this process is connected to. Nothing here starts or ends anything."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_list

from symbiosis.cluster.directory import FRESH_S
from symbiosis.cluster.plan import ClusterPlan, ExecutorId
from symbiosis.errors import BrokenError, UsageError

DIRECTORY = "directory"
HEAD = {"node:__internal_head__": 0.001}
"""The directory is on the node without which there is no Ray."""
AWAY = "symbiosis/away/"
"""Before the id of a drained node in a key of Ray's store, which ends with Ray, as the ids of nodes do."""
ANSWER_S = 30.0
"""Seconds for the directory to answer. It may be starting again."""

_WAITING = {"state": "waiting", "address": "", "pid": None, "node": "", "error": ""}
"""What is shown of an executor that has not reported yet: Ray has no node for it, or starts it."""


def directory() -> Any:
    """Return the actor that keeps the list of addresses. Raises UsageError: no cluster is up."""
    try:
        return ray.get_actor(DIRECTORY)
    except ValueError as error:
        raise UsageError("no symbiosis cluster is up on this Ray; symbiosis cluster up starts one") from error


def asked(method: str, *arguments: Any) -> Any:
    """Return what a method of the directory returns. It may be about to start again."""
    actor, until = directory(), time.monotonic() + ANSWER_S
    while True:
        try:
            return ray.get(getattr(actor, method).remote(*arguments), timeout=ANSWER_S)
        except RayError as error:
            if time.monotonic() > until:
                raise BrokenError(f"the directory of the cluster does not answer: {error}") from error
            time.sleep(0.5)


def places() -> list[ExecutorId]:
    """Return all executors, those included that wait for a node, or for which a killed command has reserved a place."""
    reserved = [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    return sorted(set(filter(None, map(ExecutorId.of, [*ray.util.list_named_actors(), *reserved]))))


def away() -> set[str]:
    """Return the ids of drained nodes, which get no more executors."""
    return {key.decode().removeprefix(AWAY) for key in _internal_kv_list(AWAY)}


def status() -> dict[str, Any]:
    """Return the address and the executors of each model. A part without an executor has one without a name."""
    plan, reports = asked("plan"), asked("reports")
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    states: dict[str, Any] = {}
    for model in plan.models:
        executors = []
        for place in places():
            if place.model == model.name:
                report = reports.get(str(place), dict(_WAITING))
                lost = report.get("age_s", 0.0) > FRESH_S
                executors.append(
                    {
                        "name": str(place),
                        "layers": model.parts[place.part] if model.parts else "all",
                        "state": "lost" if lost else report["state"],
                        "node": names.get(report["node"], ""),
                        "node_id": report["node"],
                        "pid": report["pid"],
                        "address": report["address"],
                        "error": report["error"],
                    }
                )
        present = {each["layers"] for each in executors}
        executors += [
            {**_WAITING, "name": "", "node_id": "", "layers": layers, "state": "missing"}
            for layers in model.parts or ("all",)
            if layers not in present
        ]
        states[model.name] = {"address": url(plan, model.name), "executors": executors}
    return {"models": states, "drained": sorted(away())}


def url(plan: ClusterPlan, model: str) -> str:
    """Return the address of a model for tenants."""
    head = next((node["NodeManagerAddress"] for node in ray.nodes() if set(HEAD) <= set(node["Resources"])), "")
    host = head if plan.host in ("0.0.0.0", "::") and head else plan.host
    return f"http://{f'[{host}]' if ':' in host else host}:{plan.port}/{model}"
