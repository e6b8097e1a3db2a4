"""Which nodes a group's pods may run on, and whether two groups compete for the same ones. Pure.

Judged by node selector (the GPU type is one), tolerations, devices and scheduler. Affinity is left
out, so that groups which only affinity keeps apart count as competing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from radixgrove.operator.api import names
from radixgrove.operator.api.objects import PodSpec, Taint, Toleration

DEFAULT_SCHEDULER = "default-scheduler"
_KEEPS_OFF = ("NoSchedule", "NoExecute")  # effects of taints


@dataclass(frozen=True)
class Node:
    name: str
    reachable: bool = True
    since: float = 0.0  # of the last change between reachable and not
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Taint] = ()
    devices: Mapping[str, int] = field(default_factory=dict)  # allocatable, by resource


@dataclass(frozen=True)
class NodeDemand:
    """What each pod of a group asks of its node."""

    devices: Mapping[str, int] = field(default_factory=dict)  # by resource; empty: a CPU group
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Toleration] = ()
    scheduler: str = DEFAULT_SCHEDULER

    def admits(self, node: Node) -> bool:
        """Whether a pod could run there if nothing else did."""
        return self.fits(node) and not self.kept_off_by(node)

    def fits(self, node: Node) -> bool:
        """Whether the node has the labels and devices, taints apart."""
        return self.selector.items() <= node.labels.items() and all(
            node.devices.get(name, 0) >= count for name, count in self.devices.items()
        )

    def kept_off_by(self, node: Node) -> list[Taint]:
        """The node's taints that such a pod does not bear."""
        return [
            taint
            for taint in node.taints
            if taint["effect"] in _KEEPS_OFF and not self._tolerates(taint)
        ]

    def pods_on(self, node: Node) -> int:
        """How many pods could run there if nothing else did; at least 1 where one could."""
        if not self.admits(node):
            return 0
        return min((node.devices[name] // n for name, n in self.devices.items() if n), default=1)

    def competes(self, other: NodeDemand, nodes: Collection[Node]) -> bool:
        """Whether some node could serve either; without a known node, whether one might."""
        if self.scheduler != other.scheduler or not self._shares_devices(other):
            return False
        if any(other.selector.get(key, value) != value for key, value in self.selector.items()):
            return False
        return not nodes or any(self.admits(node) and other.admits(node) for node in nodes)

    def _shares_devices(self, other: NodeDemand) -> bool:
        """Two groups on CPUs compete, too."""
        if not self.devices or not other.devices:
            return not self.devices and not other.devices
        return not self.devices.keys().isdisjoint(other.devices)

    def _tolerates(self, taint: Taint) -> bool:
        return any(_matches(toleration, taint) for toleration in self.tolerations)


def _matches(toleration: Toleration, taint: Taint) -> bool:
    if toleration.get("effect", "") not in ("", taint["effect"]):
        return False
    key = toleration.get("key", "")
    if toleration.get("operator", "Equal") == "Exists":
        return key in ("", taint["key"])
    return key == taint["key"] and toleration.get("value", "") == taint.get("value", "")


def largest_gpu(demand: NodeDemand, nodes: Collection[Node]) -> int:
    """Bytes of the largest GPU among nodes that could run such pods; 0 where none says."""
    sizes = [node.labels.get(names.GPU_MEMORY, "") for node in nodes if demand.admits(node)]
    return max((int(size) for size in sizes if size.isdecimal()), default=0) << 20


def demand_of(spec: PodSpec) -> NodeDemand:
    """Of a pod, or of a template's pods."""
    devices: dict[str, int] = {}
    for container in spec.get("containers", []):
        for name, count in device_counts(container.get("resources", {}).get("limits", {})).items():
            devices[name] = devices.get(name, 0) + count
    return NodeDemand(
        devices=devices,
        selector=spec.get("nodeSelector", {}),
        tolerations=spec.get("tolerations", []),
        scheduler=spec.get("schedulerName", DEFAULT_SCHEDULER),
    )


def device_counts(resources: Mapping[str, str]) -> dict[str, int]:
    """Extended resources: their names have a domain, their amounts are whole numbers."""
    return {
        name: int(count)
        for name, count in resources.items()
        if "/" in name and str(count).isdecimal() and int(count)
    }
