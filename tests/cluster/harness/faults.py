"""Faults on purpose, and their repair."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.harness import cgroups
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import Kubectl, condition
from tests.cluster.harness.node import Node
from tests.cluster.harness.waiting import PATIENCE, wait_until


class Faults:
    """Breaks parts of a cluster; as a context manager it repairs all of them at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._frozen: set[str] = set()
        self._cut_off: set[str] = set()

    def __enter__(self) -> Faults:
        return self

    def __exit__(self, *_: object) -> None:
        self.repair()

    def repair(self) -> None:
        """Thaws, reconnects and restarts everything, and waits until the cluster is whole."""
        for name in sorted(self._frozen):
            self.thaw(self._cluster.node(name))
        for name in sorted(self._cut_off):
            self.reconnect(self._cluster.node(name))
        for node in self._cluster.nodes:
            if not node.kubelet.running:
                node.kubelet.start()
        self._cluster.wait_until_ready()

    def kill_container(self, namespace: str, pod: str, container: str | None = None) -> None:
        """SIGKILL to the first process of a pod's container (default: its first container).

        Waits for a container that is just restarted.
        """

        def first_process() -> int | None:
            found = self._cluster.kubectl.json("get", "pod", pod, "-n", namespace)
            statuses = found["status"].get("containerStatuses", [])
            ids = (s.get("containerID", "") for s in statuses if container in (None, s["name"]))
            container_id = next(ids, "").removeprefix("containerd://")
            if not container_id:
                return None
            pids = cgroups.container_processes(found["spec"]["nodeName"], container_id)
            return next(filter(_is_first, pids), None)

        os.kill(wait_until(first_process, f"{namespace}/{pod} runs"), signal.SIGKILL)

    def stop_kubelet(self, node: Node) -> None:
        """Kills a kubelet: its pods go on, the node becomes NotReady after the grace period."""
        node.kubelet.kill()

    def start_kubelet(self, node: Node) -> None:
        """Starts a stopped kubelet and waits until its node is Ready with its GPUs."""
        node.kubelet.start()
        self.wait_until(node, ready=True)
        self._cluster.advertise_gpus(node)

    def freeze(self, node: Node) -> None:
        """Stops every process of a node, pods included, as a hung machine would."""
        self._frozen.add(node.name)
        node.freeze()

    def thaw(self, node: Node) -> None:
        """Lets a frozen node go on."""
        node.thaw()
        self._frozen.discard(node.name)

    def cut_off(self, node: Node) -> None:
        """Pulls a node's network cable; its pods go on and believe themselves alive."""
        self._cut_off.add(node.name)
        node.cut_off()

    def reconnect(self, node: Node) -> None:
        """Plugs a node's cable in again."""
        node.reconnect()
        self._cut_off.discard(node.name)

    def wait_until(self, node: Node, *, ready: bool, timeout: float = PATIENCE) -> None:
        """Waits until the control plane believes a node Ready, or lost."""
        self._cluster.kubectl.wait_for(
            "node", node.name,
            that=lambda found: (condition(found, "Ready") == "True") == ready,
            what="is Ready" if ready else "is not Ready",
            timeout=timeout,
        )  # fmt: skip


class Bystander:
    """Somebody else with write access, who changes and deletes what our operator owns.

    Each method returns how many writes it made, to be compared with those of the operator.
    """

    def __init__(
        self, kubectl: Kubectl, namespace: str, kinds: Sequence[str], selector: str
    ) -> None:
        self._kubectl = kubectl
        self._scope = [",".join(kinds), "-n", namespace, f"--selector={selector}"]
        self._namespace = namespace

    def label_all(self, key: str, value: str) -> int:
        """Sets a foreign label on every object."""
        objects = self._objects()
        for name in objects:
            self._kubectl.run("label", name, "-n", self._namespace, f"{key}={value}", "--overwrite")
        return len(objects)

    def patch_all(self, body: object) -> int:
        """Merges the same change into every object, e.g. into fields that the operator owns."""
        objects = self._objects()
        for name in objects:
            self._kubectl.patch(name, "-n", self._namespace, body=body)
        return len(objects)

    def delete_all(self) -> int:
        """Deletes every object, without waiting for its end."""
        objects = self._objects()
        for name in objects:
            self._kubectl.delete(name, "-n", self._namespace, wait=False)
        return len(objects)

    def _objects(self) -> list[str]:
        return self._kubectl.run("get", *self._scope, "--output=name").split()


def _is_first(pid: int) -> bool:
    """Whether a process is number 1 of its own process namespace."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # ended meanwhile
        return False
    return any(line.split()[-1] == "1" for line in lines if line.startswith("NSpid:"))
