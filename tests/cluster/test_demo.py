"""`make demo-cluster`, as somebody runs it who has just cloned the project."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.remains import remains
from tests.cluster.harness.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_demonstration_answers_stays_up_and_leaves_nothing_after_ctrl_c() -> None:
    process = subprocess.Popen(
        ["make", "--no-print-directory", "demo-cluster", f"CLUSTER_PYTHON={sys.executable}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        wait_until(
            lambda: process.poll() is not None or any("Ctrl-C" in line for line in lines),
            "the demonstration explains itself", timeout=600,
        )  # fmt: skip
        said = "".join(lines)
        assert process.poll() is None, said
        assert re.search(r"demo: answer: .*Paris", said), said
        # The commands it names work.
        kubeconfig = re.search(r"export KUBECONFIG=(\S+)", said)
        programs = re.search(r"export PATH=([^:\s]+):", said)
        assert kubeconfig is not None
        assert programs is not None
        kubectl = Kubectl(Path(programs[1]) / "kubectl", Path(kubeconfig[1]))
        assert "smollm2" in kubectl.run("get", "nodes,rgsvc,pods", "--all-namespaces")
    finally:
        # A terminal interrupts make and everything it started.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(120)
        reader.join(10)
    assert "Traceback" not in "".join(lines)
    cluster = next(part for part in Path(kubeconfig[1]).parts if re.fullmatch(r"rg\d", part))
    assert remains(cluster) == []
