"""`make demo-cluster`: from nothing to an answer of the demo model, then a cluster to look at."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixgrove.worker.agent import demo_model
from tests.cluster.harness import build, pods, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.served import Served
from tests.cluster.harness.volumes import Mounts, claim_directory, claim_environment

NAMESPACE = "demo"
SERVICE = "smollm2"
_QUESTION = "What is the capital of France? Answer with one word."


def run() -> None:
    """Shows the whole way on a real cluster and returns when interrupted."""
    if build.missing(build.DEMONSTRATION):
        build.provide_go(_say)
    build.ensure(build.DEMONSTRATION, report=_say)
    _say("starting two nodes")
    with Cluster(nodes=2) as cluster:
        _say(f"two nodes are ready: {', '.join(node.name for node in cluster.nodes)}")
        _say("building the images of operator, router and Redis, unless the cache has them")
        release.build_images(cluster)
        _say("images are built from the project's Dockerfiles")
        _say("installing the chart")
        release.install(cluster)
        _say("helm has installed operator, router and Redis")
        started = time.monotonic()
        serve(cluster)
        _say(
            f"{SERVICE} is Ready with two replicas, {time.monotonic() - started:.0f} s after apply"
        )
        with forwarded_router(cluster) as url:
            _say(f"asking {url}: {_QUESTION}")
            _say(f"answer: {ask(url, _QUESTION)}")
        _explain(cluster)
        # Nothing is left to do: a signal ends the wait, and the cluster with it.
        while True:
            time.sleep(3600)


def serve(cluster: Cluster, *, replicas: int = 2, timeout: float = 300) -> None:
    """Applies an InferenceService of the demo model on CPU and waits for all its replicas."""
    mounts = prepare_namespace(cluster)
    served = Served(cluster.kubectl, NAMESPACE, SERVICE)
    served.apply(spec(mounts, replicas))
    served.wait_until_ready(replicas, timeout=timeout)


def prepare_namespace(cluster: Cluster, namespace: str = NAMESPACE) -> Mounts:
    """A `restricted` namespace with claims for the demo model and for this checkout's code."""
    pods.make_namespace(cluster.kubectl, namespace)
    claim_directory(cluster.kubectl, namespace, "models", demo_model.ensure().parent)
    return claim_environment(cluster.kubectl, namespace)


def spec(mounts: Mounts, replicas: int, **more: Any) -> dict[str, Any]:
    """An InferenceService of the demo model on CPU; `more` are further fields of its spec."""
    return {
        "model": {"source": f"pvc://models/{demo_model.ensure().name}"},
        "hardware": {"device": "cpu", "cpu": "100m", "memory": "3Gi"},
        "replicas": replicas,
        "podOverrides": release.worker_overrides(mounts),
        **more,
    }


@contextmanager
def forwarded_router(cluster: Cluster) -> Iterator[str]:
    """A port of this machine that leads to the router's Service; yields the API's base URL."""
    kubectl = cluster.kubectl
    forward = subprocess.Popen(
        [
            str(kubectl.program), f"--kubeconfig={kubectl.kubeconfig}", "port-forward",
            "-n", release.NAMESPACE, "service/radixgrove-router", ":80",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with forward:
        assert forward.stdout is not None
        # "Forwarding from 127.0.0.1:40551 -> 8000"
        address = forward.stdout.readline().split()[2]
        try:
            yield f"http://{address}/v1"
        finally:
            forward.terminate()


def ask(url: str, question: str, *, timeout: float = 120) -> str:
    """One chat completion, greedy, by plain HTTP."""
    body = {
        "model": SERVICE,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 16,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def _explain(cluster: Cluster) -> None:
    print(
        f"""
Look around from another terminal:

  export KUBECONFIG={cluster.kubeconfig}
  export PATH={cluster.kubectl.program.parent}:$PATH
  kubectl get nodes,rgsvc,pods --all-namespaces
  kubectl -n {NAMESPACE} describe rgsvc {SERVICE}
  kubectl -n {NAMESPACE} scale rgsvc {SERVICE} --replicas=1
  kubectl -n {release.NAMESPACE} logs deployment/radixgrove-operator
  kubectl -n {release.NAMESPACE} port-forward service/radixgrove-router 8000:80
  curl http://127.0.0.1:8000/v1/models

Ctrl-C ends the cluster and removes it.
""",
        flush=True,
    )


def _say(line: str) -> None:
    print(f"demo: {line}", flush=True)
