"""Addresses of a cluster and the bridge that joins its nodes."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from tests.cluster.harness.state import set_sysctl


@dataclass(frozen=True)
class Addresses:
    """The address plan of cluster number `slot`; all IPv4."""

    slot: int

    @property
    def bridge(self) -> str:
        """The host's address, where the API server listens."""
        return f"10.250.{self.slot}.1"

    @property
    def services(self) -> str:
        return f"10.249.{self.slot}.0/24"

    @property
    def dns(self) -> str:
        """The cluster DNS Service."""
        return f"10.249.{self.slot}.10"

    def node(self, index: int) -> str:
        """Address of node number `index`, counted from 1."""
        return f"10.250.{self.slot}.{10 + index}"

    def pods(self, index: int) -> str:
        """Pod range of node number `index`."""
        return f"10.{230 + self.slot}.{index}.0/24"


def run(*command: str, text: str | None = None) -> str:
    """Runs a program of the system and returns its output; RuntimeError says what failed."""
    outcome = subprocess.run(
        command,
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {outcome.stderr.strip()}")
    return outcome.stdout


def create_bridge(name: str, addresses: Addresses) -> None:
    """Makes the cluster's bridge and lets the host forward between its nodes."""
    set_sysctl("net/ipv4/ip_forward", "1")
    run("ip", "link", "add", name, "type", "bridge")
    run("ip", "address", "add", f"{addresses.bridge}/24", "dev", name)
    run("ip", "link", "set", name, "up")


def connect(bridge: str, link: str, pid: int) -> None:
    """A cable from the bridge into the network namespace of a process, there called eth0."""
    run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", link, "master", bridge)
    run("ip", "link", "set", link, "up")


def set_link(link: str, *, up: bool) -> None:
    """Plugs a cable in or pulls it."""
    run("ip", "link", "set", link, "up" if up else "down")
