"""``examples/deploy/kuberay.yaml`` against a schema of the fields that it uses, written by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

jsonschema = pytest.importorskip("jsonschema", reason="comes with the extra symbiosis-peft[ray]")

MANIFEST = Path(__file__).parents[2] / "examples" / "deploy" / "kuberay.yaml"
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
CONTAINER = fields(
    ["name", "image"],
    name=TEXT,
    image=TEXT,
    command=several(TEXT),
    ports=several(fields(["containerPort"], name={"type": "string", "maxLength": 15}, containerPort=NUMBER)),
    resources=fields([], requests=TEXTS, limits=TEXTS),
    volumeMounts=several(fields(["name", "mountPath"], name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)
VOLUME = fields(
    ["name"],
    name=TEXT,
    secret=fields(["secretName"], secretName=TEXT),
    emptyDir=fields([], medium=TEXT),
    configMap=fields(["name"], name=TEXT),
    persistentVolumeClaim=fields(["claimName"], claimName=TEXT),
)
POD = fields(
    ["containers"],
    securityContext=fields([], runAsUser=NUMBER, runAsGroup=NUMBER, fsGroup=NUMBER),
    terminationGracePeriodSeconds=NUMBER,
    initContainers=several(CONTAINER),
    containers=several(CONTAINER),
    volumes=several(VOLUME),
)
GROUP = {"rayStartParams": TEXTS, "template": fields(["spec"], spec=POD)}
WORKERS = fields(
    ["groupName", "template"], groupName=TEXT, replicas=NUMBER, minReplicas=NUMBER, maxReplicas=NUMBER, **GROUP
)
CLUSTER = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=fields(["name"], name=TEXT),
    spec=fields(
        ["headGroupSpec"],
        rayVersion=TEXT,
        headGroupSpec=fields(["template"], **GROUP),
        workerGroupSpecs=several(WORKERS),
    ),
)


def test_the_manifest_is_valid() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    jsonschema.validate(manifest, CLUSTER)
    for pod in (manifest["spec"]["headGroupSpec"], manifest["spec"]["workerGroupSpecs"][0]):
        spec = pod["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["initContainers"] + spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(wrong, CLUSTER)
