"""Every command of docs/kubernetes.md, typed in the order of the page on a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.checkout import ROOT
from tests.cluster.harness import build, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import condition
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

PAGE = ROOT / "docs" / "kubernetes.md"
CRD = "inferenceservices.serving.radixgrove.io"
_PROGRAMS = ("kubectl", "helm", "docker", "systemctl", "make", "for", "done")
# By their first words, and where they run instead: nodes of ours have no Docker and no systemd.
ELSEWHERE = {
    "make demo-cluster": "tests/cluster/test_demo.py",
    "for part in": "tests/cluster/harness/release.py",
    "docker build": "tests/cluster/harness/release.py",
    "done": "tests/cluster/harness/release.py",
    "docker pull": "tests/cluster/harness/release.py",
    "systemctl daemon-reload": "",
}


def documented() -> list[str]:
    """Commands in blocks and in spans of code, in their order."""
    text = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^    +(\S.*)$|`([^`]+)`", text, re.MULTILINE)
    lines = [" ".join((block or span).split()) for block, span in found]
    # `helm upgrade` alone is the name of a command.
    return [
        line.partition(" # ")[0].rstrip()
        for line in lines
        if line.split()[0] in _PROGRAMS and (len(line.split()) > 2 or line in ELSEWHERE)
    ]


def elsewhere(command: str) -> bool:
    return any(command.startswith(words) for words in ELSEWHERE)


@dataclass(frozen=True)
class Administrator:
    """Types commands in a checkout, with files of their own beside it."""

    cluster: Cluster
    directory: Path

    def run(self, command: str) -> str:
        """Standard output. Raises AssertionError: it ended with an error."""
        ended = subprocess.run(
            self._shell(command), cwd=self.directory, env=self._environment(),
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def watch(self, command: str, words: str) -> None:
        """Runs it until it says these words."""
        with subprocess.Popen(
            self._shell(command), cwd=self.directory, env=self._environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as running:  # fmt: skip
            assert running.stdout is not None
            lines: list[str] = []
            reader = threading.Thread(target=lines.extend, args=(running.stdout,), daemon=True)
            reader.start()
            try:
                wait_until(lambda: words in "".join(lines), f"{command}: {words}", timeout=120)
            finally:
                running.kill()
                reader.join(10)

    def _shell(self, command: str) -> list[str]:
        return ["bash", "-euo", "pipefail", "-c", f"exec 0</dev/null; {command}"]

    def _environment(self) -> dict[str, str]:
        programs = build.ensure((build.HELM,)), self.cluster.kubectl.program.parent
        home = {f"HELM_{kind}_HOME": str(self.directory) for kind in ("CACHE", "CONFIG", "DATA")}
        path = ":".join([*map(str, programs), os.environ["PATH"]])
        return {**os.environ, **home, "PATH": path, "KUBECONFIG": str(self.cluster.kubeconfig)}


@pytest.fixture
def administrator(
    cluster: Cluster, release_images: None, tmp_path: Path
) -> Iterator[Administrator]:
    """Before a cluster without the product; nothing of it is left afterwards either."""
    release.uninstall(cluster)
    cluster.kubectl.delete("crd", CRD)
    for name in ("helm", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "keys.txt").write_text("alice: her-key\n")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(release.values()))
    yield Administrator(cluster, tmp_path)
    cluster.kubectl.delete("namespace", "team-a", wait=False)


def router_pod(cluster: Cluster) -> str:
    selector = "--selector=app.kubernetes.io/component=router"
    pods = cluster.kubectl.items("pods", "-n", release.NAMESPACE, selector)
    return next(pod["metadata"]["name"] for pod in pods if condition(pod, "Ready") == "True")


def test_what_runs_elsewhere_does() -> None:
    for where in filter(None, ELSEWHERE.values()):
        assert (ROOT / where).exists()
    assert all(any(line.startswith(words) for line in documented()) for words in ELSEWHERE)


def test_every_command_does_what_the_page_says(administrator: Administrator) -> None:
    cluster, kubectl = administrator.cluster, administrator.cluster.kubectl
    commands = [line for line in documented() if not elsewhere(line)]
    assert len(commands) > 15
    for line in commands:
        command = line.replace("REGISTRY", release.REGISTRY).replace("TOKEN", "a-token")
        if command.startswith("helm install"):
            # The images of this machine have other tags, and all of it has to be there.
            administrator.run(f"{command} -f values.yaml --wait --timeout 480s")
        elif command.startswith("helm upgrade"):
            administrator.run(f"{command} --wait --timeout 480s")
        elif command.endswith("--watch"):
            administrator.watch(command, "qwen3-8b")
        elif command.endswith("--follow"):
            administrator.watch(command, "leading")
        elif command.startswith("kubectl exec POD"):
            pod = f"{router_pod(cluster)} -n {release.NAMESPACE}"
            assert administrator.run(command.replace("POD", pod)).strip()
        elif command.startswith("kubectl rollout restart"):
            administrator.run(command)
            what = command.removeprefix("kubectl rollout restart ")
            administrator.run(f"kubectl rollout status --timeout 300s {what}")
        else:
            administrator.run(command)
        if "router.auth.keysSecret=api-keys" in command:
            router = kubectl.json("get", "deployment/radixgrove-router", "-n", release.NAMESPACE)
            volumes = router["spec"]["template"]["spec"]["volumes"]
            assert "api-keys" in [v.get("secret", {}).get("secretName") for v in volumes]
    assert not release.is_installed(cluster)
    assert kubectl.get("crd", CRD) is None
