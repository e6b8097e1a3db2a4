"""One node: namespaces, a cgroup, containerd, kubelet, kube-proxy and kube-router.

The node is a set of namespaces (process, mount, network, host name); `pause` is the first process
in them. When that ends, the kernel ends every process in them, and with the last process go the
node's mounts and links. Inside, /run and /var are the node's own, so that all programs keep their
usual paths and two nodes do not meet; everything else is the machine's file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.harness import cgroups, images, network
from tests.cluster.harness.prepare import CNI_PLUGINS
from tests.cluster.harness.processes import Process, children
from tests.cluster.harness.waiting import wait_until

PAUSE_IMAGE = "localhost/radixgrove/pause:1"
_CONTAINERD_SOCKET = "/run/containerd/containerd.sock"

# Images lie on a disk of the node's own, a sparse file without a journal: their tens of thousands
# of files go at once with the disk, where one by one they would take minutes on some machines.
_DISK_SIZE = 64 << 30

# Joins the cgroups (their files come before "--") and becomes the command: a process that were
# moved after its start could have children already.
_JOIN_CGROUPS = 'while [ "$1" != -- ]; do echo $$ > "$1"; shift; done; shift; exec "$@"'

_CONTAINERD_CONFIG = """\
version = 2
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs",
]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox_image}"
  # Where root lacks CAP_SYS_RESOURCE, as in some virtual machines, runc cannot lower the score.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_plugins}"
    conf_dir = "/var/etc/cni"
"""


class NodeProcess(Process):
    """A program inside a node: signals go to it, not to the `nsenter` that started it."""

    @property
    def pid(self) -> int:
        found = children(super().pid)
        if len(found) != 1:
            raise RuntimeError(f"{self.name} is not running")
        return found[0]


class Node:
    """A worker machine of the cluster. Made and owned by `Cluster`."""

    def __init__(
        self,
        name: str,
        index: int,
        *,
        addresses: network.Addresses,
        bridge: str,
        state: Path,
        programs: Path,
        kubeconfigs: Mapping[str, Path],
        authority: Path,
    ) -> None:
        self.name = name
        self.address = addresses.node(index)
        self.pods = addresses.pods(index)
        self._addresses = addresses
        self._bridge = bridge
        self._state = state
        self._programs = programs
        self._kubeconfigs = kubeconfigs
        self._authority = authority
        self._var = state / name / "var"
        self._processes: list[NodeProcess] = []

    def start(self, archives: Sequence[Path]) -> None:
        """Starts the node and imports images; it registers itself with the API server."""
        self._write_files()
        self._cgroup_files = cgroups.create(self.name)
        self._start_first_process()
        self._connect()
        self._mount()
        self.containerd = self._program(
            "containerd", ["containerd", "--config=/var/etc/containerd.toml"]
        )
        self.kubelet = self._program("kubelet", self._kubelet_command())
        self.kube_proxy = self._program("kube-proxy", self._kube_proxy_command())
        self.kube_router = self._program("kube-router", self._kube_router_command())
        self.containerd.start()
        wait_until(self._containerd_answers, f"containerd of {self.name} answers")
        self.import_images(archives)
        self.kubelet.start()
        self.kube_proxy.start()

    def enforce_policies(self) -> None:
        """Starts kube-router, which refuses to run before the node is registered."""
        if not self.kube_router.running:
            self.kube_router.start()

    def stop(self) -> None:
        """Ends every process of the node at once, as a power failure would."""
        cgroups.kill_all(self.name)
        for process in self._processes:
            process.kill()

    def run(self, *command: str, text: str | None = None) -> str:
        """Runs a command inside the node and returns its output."""
        return network.run(*self._enter(), *command, text=text)

    def import_images(self, archives: Sequence[Path]) -> None:
        """Makes the images of docker-archives available to the node's pods."""
        with tempfile.TemporaryFile() as errors:
            importing = subprocess.Popen(
                [*self._enter(), "ctr", "-n", "k8s.io", "images", "import", "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            with importing, contextlib.suppress(BrokenPipeError):  # then `ctr` says why
                assert importing.stdin is not None
                images.write_together(archives, importing.stdin)
            errors.seek(0)
            if importing.returncode != 0:
                raise RuntimeError(f"import of images: {errors.read().decode().strip()}")

    def freeze(self) -> None:
        """Stops every process of the node, pods included; see `thaw`."""
        cgroups.freeze(self.name)

    def thaw(self) -> None:
        """Lets a frozen node go on."""
        cgroups.thaw(self.name)

    def cut_off(self) -> None:
        """Pulls the node's network cable; its processes go on."""
        network.set_link(self.name, up=False)

    def reconnect(self) -> None:
        """Plugs the cable in again."""
        network.set_link(self.name, up=True)

    def check(self) -> None:
        """Raises `ProcessDied` when one of the node's own programs has ended."""
        for process in self._processes:
            process.check()

    def _write_files(self) -> None:
        etc = self._var / "etc"
        for path in ("etc/cni", "tmp", "log", "lib/kubelet", "lib/containerd"):
            (self._var / path).mkdir(parents=True)
        (self._var / "run").symlink_to("/run")
        (etc / "containerd.toml").write_text(
            _CONTAINERD_CONFIG.format(sandbox_image=PAUSE_IMAGE, cni_plugins=CNI_PLUGINS)
        )
        (etc / "cni" / "10-pods.conflist").write_text(json.dumps(self._cni_config()))
        (etc / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet_config()))
        (etc / "resolv.conf").write_text("# Pods resolve names through the cluster's DNS.\n")
        shutil.copy(self._authority, etc / "ca.crt")
        for program, kubeconfig in self._kubeconfigs.items():
            shutil.copy(kubeconfig, etc / f"{program}.kubeconfig")

    def _start_first_process(self) -> None:
        command = [
            "unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--mount", "--net",
            "--uts", "--propagation=private", str(self._programs / "pause"),
        ]  # fmt: skip
        self._first = self._process("pause", command)
        self._first.start()
        wait_until(self._first_process_runs, f"{self.name} has namespaces")

    def _first_process_runs(self) -> bool:
        self._first.check()
        found = children(self._first.wrapper_pid)
        return bool(found) and os.readlink(f"/proc/{found[0]}/exe").endswith("/pause")

    def _connect(self) -> None:
        network.connect(self._bridge, self.name, self._first.pid)
        network.run("ip", "route", "add", self.pods, "via", self.address, "dev", self._bridge)
        self.run("hostname", self.name)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", self._addresses.bridge)
        self.run("tee", "/proc/sys/net/ipv4/ip_forward", text="1")

    def _mount(self) -> None:
        disk = self._state / self.name / "disk"
        with disk.open("wb") as file:
            file.truncate(_DISK_SIZE)
        network.run("mkfs.ext4", "-q", "-m0", "-O^has_journal", "-Enodiscard", str(disk))
        self.run("mount", "--bind", str(self._var), "/var")
        self.run("mount", "-o", "loop,noatime", str(disk), "/var/lib/containerd")
        self.run("mount", "-t", "tmpfs", "tmpfs", "/run")
        self.run("mkdir", "/run/lock")

    def _containerd_answers(self) -> bool:
        self.containerd.check()
        try:
            self.run("ctr", "-n", "k8s.io", "images", "list", "--quiet")
        except RuntimeError:
            return False
        return True

    def _program(self, name: str, command: Sequence[str]) -> NodeProcess:
        return self._process(name, [*self._enter(), *command])

    def _process(self, name: str, command: Sequence[str]) -> NodeProcess:
        files = [str(path) for path in self._cgroup_files]
        joined = ["/bin/sh", "-c", _JOIN_CGROUPS, "sh", *files, "--", *command]
        process = NodeProcess(f"{self.name}-{name}", joined, state=self._state)
        self._processes.append(process)
        return process

    def _enter(self) -> list[str]:
        target = f"--target={self._first.pid}"
        return ["nsenter", target, "--mount", "--net", "--pid", "--uts", "--"]

    def _cni_config(self) -> Mapping[str, Any]:
        # Point-to-point links make the node route between its own pods too, so that policies
        # hold there without the kernel's bridge filter.
        return {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": self.pods}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }

    def _kubelet_config(self) -> Mapping[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": "/var/etc/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{_CONTAINERD_SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.name}",
            "failCgroupV1": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "failSwapOn": False,
            "clusterDNS": [self._addresses.dns],
            "clusterDomain": "cluster.local",
            "resolvConf": "/var/etc/resolv.conf",
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "oomScoreAdj": 0,
            # Renewed every 3 s: of the control plane's `NODE_GRACE` a busy machine may lose most.
            "nodeLeaseDurationSeconds": 12,
            # What tests kill again and again starts again at once, not after ten seconds and more.
            "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        }

    def _kubelet_command(self) -> list[str]:
        return [
            str(self._programs / "kubelet"),
            "--config=/var/etc/kubelet.yaml",
            "--kubeconfig=/var/etc/kubelet.kubeconfig",
            "--node-labels=radixgrove.test/real=true",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        ]

    def _kube_proxy_command(self) -> list[str]:
        return [
            str(self._programs / "kube-proxy"),
            "--kubeconfig=/var/etc/kube-proxy.kubeconfig",
            f"--hostname-override={self.name}",
            "--proxy-mode=iptables",
            "--conntrack-max-per-core=0",
        ]

    def _kube_router_command(self) -> list[str]:
        return [
            str(self._programs / "kube-router"),
            "--kubeconfig=/var/etc/kube-router.kubeconfig",
            f"--hostname-override={self.name}",
            "--run-firewall=true",
            "--run-router=false",
            "--run-service-proxy=false",
            "--health-port=0",
            f"--service-cluster-ip-range={self._addresses.services}",
        ]
