"""What the API server itself says of an InferenceService: schema, defaults, rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixgrove.operator.api import crd
from tests.checkout import ROOT
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import KubectlError
from tests.cluster.harness.waiting import wait_until
from tests.operator.resources import RGSVC, service

pytestmark = pytest.mark.cluster

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_admitted(plane: ControlPlane, namespace: str, path: Path) -> None:
    plane.kubectl.run("create", "-n", namespace, "--dry-run=server", "-f", str(path))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"hardware": {"nodes": 2, "gpusPerNode": 8}, "parallelism": {"tp": 8}},
            r"tp \* pp \* dp must equal nodes \* gpusPerNode",
        ),
        (
            {"hardware": {"nodes": 2, "gpusPerNode": 2}, "parallelism": {"tp": 4}},
            "tp must divide gpusPerNode",
        ),
        (
            {
                "hardware": {"nodes": 2, "gpusPerNode": 3},
                "parallelism": {"tp": 2, "pp": 3},
            },
            "tp must divide gpusPerNode",
        ),
        (
            {"hardware": {"gpusPerNode": 8}, "parallelism": {"tp": 8, "ep": 3}},
            r"ep must divide tp \* dp",
        ),
        ({"autoscaling": {"min": 3, "max": 2}}, "min must not exceed max"),
        ({"rollout": {"maxUnavailable": 0}}, "cannot both be 0"),
        ({"model": {"source": "ftp://x"}}, '"ftp://x" is none of hf://ORG/REPO, s3://BUCKET'),
        ({"hardware": {"memory": "3GB"}}, '"3GB" is no size, such as 500Mi'),
        ({"hardware": {"memory": "16"}}, '"16" is no size, such as 500Mi'),
        ({"hardware": {"sharedMemory": "524288"}}, '"524288" is no size, such as 500Mi'),
        ({"hardware": {"cpu": "two"}}, '"two" is no quantity, such as 500m'),
        ({"startup": {"timeout": "5 minutes"}}, '"5 minutes" is no duration, such as 90s'),
        ({"model": {"source": "s3://b/x", "revision": "main"}}, "revision is for hf://"),
        ({"model": {"source": "gs://b/x", "path": "y"}}, "path is for oci://"),
        ({"router": {"policy": "random"}}, "belong to a dedicated router"),
        ({"router": {"settings": {"retries": 1}}}, "belong to a dedicated router"),
        ({"router": {"autoscaling": {"max": 2}}}, "belong to a dedicated router"),
        (
            {"router": {"dedicated": True, "replicas": 2, "autoscaling": {"max": 4}}},
            "replicas and autoscaling exclude each other",
        ),
        (
            {"router": {"dedicated": True, "autoscaling": {"min": 3, "max": 2}}},
            "min must not exceed max",
        ),
        ({"engine": {"pageSize": 0}}, "spec.engine.pageSize"),
        ({"replicas": -1}, "spec.replicas"),
    ],
    ids=str,
)
def test_wrong_specs_are_refused_by_the_api_server(
    plane: ControlPlane, namespace: str, spec: dict[str, Any], said: str
) -> None:
    with pytest.raises(KubectlError, match=said):
        plane.kubectl.apply(service("wrong", namespace, **spec))


def test_shared_memory_may_be_without_a_limit(plane: ControlPlane, namespace: str) -> None:
    plane.kubectl.apply(service("unlimited", namespace, hardware={"sharedMemory": "0"}))


def test_a_service_with_a_size_from_before_the_rule_goes_on(
    plane: ControlPlane, namespace: str
) -> None:
    before = crd.custom_resource_definition()
    schema = before["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    hardware = schema["properties"]["hardware"]["properties"]
    del hardware["sharedMemory"]["x-kubernetes-validations"]
    plane.kubectl.apply(before)
    old = service("old", namespace, hardware={"sharedMemory": "524288"})
    wait_until(lambda: not refusal(plane, old), "the API server has the older definition")
    plane.kubectl.apply(old)
    plane.kubectl.apply(crd.custom_resource_definition())
    new = service("new", namespace, hardware={"sharedMemory": "524288"})
    wait_until(lambda: "is no size" in refusal(plane, new), "it has the present one")

    written = ("patch", RGSVC, "old", "-n", namespace, "--type=merge")
    plane.kubectl.run(*written, "--subresource=status", '--patch={"status": {"url": "http://r"}}')
    plane.kubectl.run(*written, '--patch={"spec": {"replicas": 2}}')
    with pytest.raises(KubectlError, match="is no size"):
        plane.kubectl.run(*written, '--patch={"spec": {"hardware": {"sharedMemory": "16"}}}')


def refusal(plane: ControlPlane, resource: dict[str, Any]) -> str:
    """What the API server would say of it; "": nothing."""
    try:
        plane.kubectl.run("create", "--dry-run=server", "-f", "-", text=json.dumps(resource))
    except KubectlError as error:
        return error.stderr
    return ""


def test_default_is_no_name(plane: ControlPlane, namespace: str) -> None:
    with pytest.raises(KubectlError, match="every namespace has one called default"):
        plane.kubectl.apply(service("default", namespace))


@pytest.mark.parametrize("name", ["a" * 41, "9lives", "with.dot"])
def test_a_name_must_fit_a_service(plane: ControlPlane, namespace: str, name: str) -> None:
    with pytest.raises(KubectlError, match="a name"):
        plane.kubectl.apply(service(name, namespace))


def test_defaults_are_filled_in(plane: ControlPlane, namespace: str) -> None:
    plane.kubectl.apply(service("plain", namespace))
    spec = plane.kubectl.json("get", RGSVC, "plain", "-n", namespace)["spec"]
    assert spec["replicas"] == 1
    assert spec["hardware"]["gpusPerNode"] == 1
    assert spec["recovery"]["nodeGrace"] == "10s"
