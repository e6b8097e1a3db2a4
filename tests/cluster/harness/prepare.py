"""What a cluster needs from the machine, and its installation from Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CNI_PLUGINS = Path("/usr/lib/cni")

# Program or file → the Debian package that brings it.
_NEEDED = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    str(CNI_PLUGINS / "ptp"): "containernetworking-plugins",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mkfs.ext4": "e2fsprogs",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
}

# What runs by the hundred: in pods, from a mount that they cannot write to, and as operators.
_STARTED_OFTEN = (
    "radixgrove.cli.commands.parts",
    "radixgrove.operator.controller.main",
    "radixgrove.worker.agent.agent",
    "radixgrove.worker.engine.loop",
    "radixgrove.worker.engine.executor",
    "radixgrove.worker.frontend.server",
    "tests.cluster.harness.traffic_source",
    "tests.cluster.images.group_probe.__main__",
)


class PrepareError(RuntimeError):
    """The machine cannot run a cluster; the message says what is missing."""


def missing_packages() -> list[str]:
    """Debian packages that the machine lacks."""
    return sorted({package for what, package in _NEEDED.items() if shutil.which(what) is None})


def check() -> None:
    """Raises `PrepareError` unless this process may make nodes here."""
    if os.geteuid() != 0:
        raise PrepareError(
            "a cluster with nodes needs root: it makes network namespaces, mounts and cgroups"
            " (RADIXGROVE_TEST_KUBECONFIG may name an existing cluster instead)"
        )
    packages = missing_packages()
    if packages:
        raise PrepareError(
            f"missing Debian packages: {' '.join(packages)};"
            " install them with `python -m tests.cluster.harness prepare`"
        )


def install() -> None:
    """Installs the missing packages with apt-get. Raises `PrepareError`."""
    packages = missing_packages()
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise PrepareError(f"install these packages as root: {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
    ):
        outcome = subprocess.run(command, env=environment, capture_output=True, text=True)
        if outcome.returncode != 0:
            raise PrepareError(f"{' '.join(command)} failed:\n{outcome.stderr[-2000:]}")


def compile_bytecode() -> None:
    """Compiles what is started often, once: each start would do it again, which is most of it.

    Raises `PrepareError`.
    """
    wanted = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", f"import {', '.join(_STARTED_OFTEN)}"]
    outcome = subprocess.run(command, env=wanted, capture_output=True, text=True)
    if outcome.returncode != 0:
        raise PrepareError(f"what pods run cannot be imported:\n{outcome.stderr[-2000:]}")
