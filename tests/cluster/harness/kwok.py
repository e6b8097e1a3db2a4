"""Pretended nodes by the hundred: kwok answers for their kubelets, nothing runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.cluster.harness import build
from tests.cluster.harness.control_plane import KWOK, ControlPlane
from tests.cluster.harness.kubectl import condition
from tests.cluster.harness.processes import Process
from tests.cluster.harness.waiting import wait_until

LABEL = "radixgrove.test/pretended"
# An annotation of pods that become Ready only after a few seconds, as real ones do.
LATE = "radixgrove.test/late"
_LATE_MS = 5000
_CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "110"}

# What kwok calls stages: when a node or pod looks like `selector`, it becomes `next`.
_NODE_READY = """\
{{ $now := Now }}
conditions:
- {type: Ready, status: "True", reason: KubeletReady, message: pretended,
   lastHeartbeatTime: {{ $now | Quote }}, lastTransitionTime: {{ $now | Quote }}}
"""
_POD_READY = """\
{{ $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
podIP: {{ PodIPWith .spec.nodeName ( or .spec.hostNetwork false ) ( or .metadata.uid "" ) \
( or .metadata.name "" ) ( or .metadata.namespace "" ) | Quote }}
conditions:
{{ range $type := list "Initialized" "ContainersReady" "Ready" }}
- {type: {{ $type }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
initContainerStatuses:
{{ range .spec.initContainers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  restartCount: 0
  state: {terminated: {exitCode: 0, startedAt: {{ $now | Quote }}, finishedAt: {{ $now | Quote }}}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""


class PretendedNodes:
    """`count` nodes with `gpus` GPUs each on a running control plane; a context manager.

    Their pods become Running and Ready at once, those with the annotation `LATE` some seconds
    later. The nodes carry the label `LABEL`, and a taint of the same name, when `tainted`, keeps
    pods of real nodes away.
    """

    def __init__(
        self, control_plane: ControlPlane, count: int, *, gpus: int = 8, tainted: bool = False
    ) -> None:
        self._control_plane = control_plane
        self._count = count
        self._gpus = gpus
        self._tainted = tainted

    def __enter__(self) -> PretendedNodes:
        path = self._control_plane.path
        stages = path / "kwok-stages.yaml"
        stages.write_text(yaml.safe_dump_all(self._stages()))
        self._kwok = Process("kwok", self._command(stages), state=path)
        self._kwok.start()
        self._control_plane.kubectl.apply(*(self._node(index) for index in range(self._count)))
        wait_until(self._all_ready, f"{self._count} pretended nodes are Ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._control_plane.kubectl.delete("nodes", f"--selector={LABEL}", wait=False)
        self._kwok.stop()

    def _command(self, stages: Path) -> list[str]:
        return [
            str(build.ensure((build.KWOK,)) / build.KWOK.name),
            f"--kubeconfig={self._control_plane.kubeconfig_of(KWOK)}",
            f"--config={stages}",
            f"--manage-nodes-with-label-selector={LABEL}",
            "--node-lease-duration-seconds=40",
            "--cidr=10.64.0.0/10",
        ]

    def _node(self, index: int) -> dict[str, Any]:
        taints = [{"key": LABEL, "value": "true", "effect": "NoSchedule"}]
        name = f"pretended-{index}"
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {LABEL: "true", "kubernetes.io/hostname": name}},
            "spec": {"taints": taints if self._tainted else []},
        }

    def _stages(self) -> list[dict[str, Any]]:
        resources = _CAPACITY | {"nvidia.com/gpu": str(self._gpus)}
        node_status = _NODE_READY + yaml.safe_dump(
            {"capacity": resources, "allocatable": resources, "phase": "Running"}
        )
        ready = '.status.conditions.[] | select( .type == "Ready" ) | .status'
        alive = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}
        deleted = {"key": ".metadata.deletionTimestamp", "operator": "Exists"}
        not_ready = {"key": ready, "operator": "NotIn", "values": ["True"]}
        late = f'.metadata.annotations["{LATE}"]'
        at_once = {"key": late, "operator": "DoesNotExist"}
        later = {"key": late, "operator": "Exists"}
        status = {"statusTemplate": _POD_READY}
        return [
            _stage("node-ready", "Node", [not_ready], {"statusTemplate": node_status}),
            _stage("pod-ready", "Pod", [alive, not_ready, at_once], status),
            _stage("pod-late", "Pod", [alive, not_ready, later], status, delay_ms=_LATE_MS),
            _stage("pod-delete", "Pod", [deleted], {"finalizers": {"empty": True}, "delete": True}),
        ]

    def _all_ready(self) -> bool:
        self._kwok.check()
        nodes = self._control_plane.kubectl.items("nodes", f"--selector={LABEL}")
        return sum(condition(node, "Ready") == "True" for node in nodes) == self._count


def _stage(
    name: str,
    kind: str,
    expressions: list[dict[str, Any]],
    outcome: dict[str, Any],
    delay_ms: int = 0,
) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": expressions},
            "delay": {"durationMilliseconds": delay_ms},
            "next": outcome,
        },
    }
