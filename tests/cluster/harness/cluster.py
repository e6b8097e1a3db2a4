"""A cluster with nodes: everything from the bridge to cluster DNS, up and down as one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.harness import addons, build, images, network, prepare, state, volumes
from tests.cluster.harness.control_plane import KUBE_PROXY, KUBE_ROUTER, ControlPlane, node_user
from tests.cluster.harness.kubectl import Kubectl, condition
from tests.cluster.harness.node import PAUSE_IMAGE, Node
from tests.cluster.harness.waiting import wait_until

SLOTS = 8  # clusters that one machine may run at once, each with its own addresses
MAX_NODES = 6
GPUS = 8

# Changed by every kubelet, machine-wide.
_KUBELET_SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


class Cluster:
    """A real Kubernetes of `nodes` nodes with `gpus` advertised GPUs each; a context manager.

    Nodes are called `<cluster>-node-1`, `-2` …. Needs root and the packages of `prepare`. Raises
    `prepare.PrepareError`, `build.BuildError`, or RuntimeError when all slots are taken.
    """

    def __init__(self, *, nodes: int = 2, gpus: int = GPUS) -> None:
        self.nodes: list[Node] = []
        self._count = nodes
        self._gpus = gpus
        self._state: state.StateDirectory | None = None

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts everything and returns when all nodes are Ready and names resolve."""
        prepare.check()
        self._programs = build.ensure((*build.CONTROL_PLANE, *build.NODE))
        state.sweep()
        self._state, self.addresses = _claim_slot()
        self.control_plane = self._new_control_plane(self._state)
        try:
            self._start_control_plane()
            self._archives = self._system_images()
            for _ in range(self._count):
                self._start_node()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends and removes everything."""
        for node in self.nodes:
            node.stop()
        self.nodes.clear()
        if self._state is not None:
            self.control_plane.stop()
            self._state.remove()
            self._state = None

    def detach(self) -> None:
        """Lets the cluster go on when this process ends; `cluster-down` ends it."""
        if self._state is not None:
            self._state.detach()

    @property
    def name(self) -> str:
        if self._state is None:
            raise RuntimeError("the cluster is not running")
        return self._state.name

    @property
    def kubeconfig(self) -> Path:
        """Credentials of the cluster's administrator."""
        return self.control_plane.kubeconfig

    @property
    def kubectl(self) -> Kubectl:
        """kubectl as the cluster's administrator."""
        return self.control_plane.kubectl

    def node(self, name: str) -> Node:
        """A node by its name, as a pod's `spec.nodeName` says it."""
        return next(node for node in self.nodes if node.name == name)

    def add_node(self) -> Node:
        """Adds one more node and waits until it is Ready."""
        node = self._start_node()
        self.wait_until_ready()
        return node

    def wait_until_ready(self) -> None:
        """Waits until all nodes are Ready, advertise GPUs, enforce policies and resolve names."""
        wait_until(self._all_ready, "all nodes are Ready")
        for node in self.nodes:
            node.enforce_policies()
            self.advertise_gpus(node)
        self.kubectl.wait_for(
            "daemonset", "coredns", "-n", "kube-system",
            that=lambda d: d["status"].get("numberReady", 0) == len(self.nodes),
            what="cluster DNS serves on every node",
        )  # fmt: skip

    def build_images(self, *recipes: images.Recipe) -> None:
        """Builds images and gives them to every node, also to those added later.

        Pods name them with `imagePullPolicy: Never` or `IfNotPresent`. Raises `images.ImageError`.
        """
        built = [images.build_image(recipe) for recipe in recipes]
        new = [archive for archive in built if archive not in self._archives]
        if not new:
            return
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.import_images(new), self.nodes))
        self._archives += new

    def offer_volumes(self, count: int) -> None:
        """Makes empty volumes that any claim without a storage class may bind, each once."""
        volumes.offer_volumes(self.kubectl, self.control_plane.path / "volumes", count)

    def advertise_gpus(self, node: Node) -> None:
        """Makes a node offer GPUs, as a device plugin would; a restarted kubelet forgets them."""
        # A kubelet makes allocatable from capacity, but only with its next report.
        operations = [
            {
                "op": "add",
                "path": f"/status/{field}/nvidia.com~1gpu",
                "value": str(self._gpus),
            }
            for field in ("capacity", "allocatable")
        ]
        self.kubectl.patch("node", node.name, "--subresource=status", body=operations, kind="json")

    def _new_control_plane(self, owner: state.StateDirectory) -> ControlPlane:
        return ControlPlane(
            address=self.addresses.bridge,
            service_range=self.addresses.services,
            nodes=[self._node_name(index) for index in range(1, MAX_NODES + 1)],
            owner=owner,
        )

    def _start_control_plane(self) -> None:
        for setting in _KUBELET_SYSCTLS:
            state.remember_sysctl(setting)
        network.create_bridge(self.name, self.addresses)
        self.control_plane.start()
        self.kubectl.apply(*addons.manifests(self.addresses.dns))

    def _system_images(self) -> list[Path]:
        directory = self.control_plane.path / "images"
        directory.mkdir()
        programs = {PAUSE_IMAGE: "pause", addons.DNS_IMAGE: "coredns"}
        return [
            images.scratch_image(directory / f"{program}.tar", name, self._programs / program)
            for name, program in programs.items()
        ]

    def _start_node(self) -> Node:
        index = len(self.nodes) + 1
        name = self._node_name(index)
        kubeconfig_of = self.control_plane.kubeconfig_of
        node = Node(
            name,
            index,
            addresses=self.addresses,
            bridge=self.name,
            state=self.control_plane.path,
            programs=self._programs,
            kubeconfigs={
                "kubelet": kubeconfig_of(node_user(name)),
                "kube-proxy": kubeconfig_of(KUBE_PROXY),
                "kube-router": kubeconfig_of(KUBE_ROUTER),
            },
            authority=self.control_plane.authority.certificate,
        )
        self.nodes.append(node)
        node.start(self._archives)
        return node

    def _node_name(self, index: int) -> str:
        return f"{self.name}-node-{index}"

    def _all_ready(self) -> bool:
        for node in self.nodes:
            node.check()
        ready = [n for n in self.kubectl.items("nodes") if condition(n, "Ready") == "True"]
        return {node.name for node in self.nodes} <= {n["metadata"]["name"] for n in ready}


def _claim_slot() -> tuple[state.StateDirectory, network.Addresses]:
    for slot in range(SLOTS):
        claimed = state.StateDirectory.claim(f"rg{slot}")
        if claimed is not None:
            return claimed, network.Addresses(slot)
    raise RuntimeError(f"{SLOTS} clusters run on this machine already")
