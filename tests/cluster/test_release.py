"""From `helm install` to an answer: the project's own images and chart on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.harness import demo, pods, release
from tests.cluster.harness.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_ASK = """
import json, sys, urllib.request as r
request = r.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
print(json.load(r.urlopen(request, timeout=120))["choices"][0]["message"]["content"])
"""


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the chart's release in it."""
    release.build_images(cluster)
    release.install(cluster)
    yield cluster
    cluster.kubectl.delete("namespace", demo.NAMESPACE, timeout=120)
    release.helm(cluster, "uninstall", "radixgrove", "-n", release.NAMESPACE, "--wait")
    cluster.kubectl.delete("namespace", release.NAMESPACE, timeout=120)


def test_the_demo_model_answers_through_the_router_service(
    installed: Cluster, environment_image: str, namespace: str
) -> None:
    demo.serve(installed)
    kubectl = installed.kubectl
    kubectl.apply(pods.pod("client", environment_image, ["sleep", "infinity"]), namespace=namespace)
    pods.wait_until_ready(kubectl, namespace, "client")
    service = kubectl.json("get", "inferenceservice", demo.SERVICE, "-n", demo.NAMESPACE)
    question = {
        "model": service["status"]["model"]["name"],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    answer = kubectl.run(
        "exec", "client", "-n", namespace, "--", "/usr/bin/python3", "-c", _ASK,
        f"{service['status']['url']}/chat/completions", json.dumps(question), timeout=180,
    )  # fmt: skip
    assert "Paris" in answer
