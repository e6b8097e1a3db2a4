"""Who reaches what: the NetworkPolicies of chart and operator, and pod security, as enforced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.harness import demo, pods, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import KubectlError, condition
from tests.cluster.harness.served import Served, message, reason
from tests.cluster.harness.traffic import Client
from tests.cluster.harness.volumes import Mounts
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

ENGINE = {"contextLength": 512, "kvTokens": 2048, "maxRunning": 2, "settings": {"cpu_threads": 1}}
RENDEZVOUS = 29500
ANY_OTHER = 41234  # as NCCL and Gloo would choose one

_LISTEN = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the first process of a pod ignores it
http.server.HTTPServer(("", int(sys.argv[1])), http.server.BaseHTTPRequestHandler).serve_forever()
"""
_CONNECT = """
import socket, sys
for where in sys.argv[1:]:
    host, port = where.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 2).close()
        print(where)
    except OSError:
        pass
"""


# With what the pod was given, as whoever has broken into it would.
_TELL_REDIS = """
import os, socket, sys
from urllib.parse import unquote, urlsplit
url = urlsplit(os.environ["RADIXGROVE_REDIS_URL"])
link = socket.create_connection((url.hostname, url.port), 5).makefile("rwb")
def tell(*words):
    parts = [b"$%d\\r\\n%s\\r\\n" % (len(word), word) for word in map(str.encode, words)]
    link.write(b"*%d\\r\\n" % len(words) + b"".join(parts))
    link.flush()
    return link.readline().decode().strip()
print(tell("AUTH", unquote(url.username), unquote(url.password)))
for command in sys.argv[1:]:
    print(tell(*command.split()))
"""


@pytest.fixture
def served(installed: Cluster, worker_mounts: Mounts) -> Iterator[Served]:
    """A service with pods that also listen where ranks of a group would meet."""
    spec = demo.spec(worker_mounts, 1, engine=ENGINE)
    spec["podOverrides"]["spec"]["containers"] += [
        {
            "name": f"listener-{port}",
            "image": release.image("worker"),
            "imagePullPolicy": "Never",
            "command": ["/usr/bin/python3", "-c", _LISTEN, str(port)],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        for port in (RENDEZVOUS, ANY_OTHER)
    ]
    service = Served(installed.kubectl, demo.NAMESPACE, "guarded")
    service.apply(spec)
    service.wait_until_ready(1)
    yield service
    service.delete()


@pytest.fixture
def stranger(
    installed: Cluster, namespace: str, environment_image: str, client: Client
) -> list[Client]:
    """Pods of no service: one beside the workers, one in a namespace of its own."""
    manifest = pods.pod("stranger", environment_image, ["sleep", "infinity"])
    installed.kubectl.apply(manifest, namespace=namespace)
    pods.wait_until_ready(installed.kubectl, namespace, "stranger")
    return [client, Client(installed.kubectl, namespace, "stranger")]


def reached(strangers: list[Client], targets: list[str]) -> list[set[str]]:
    """Which of the `host:port` targets each stranger can connect to."""
    return [set(stranger.python(_CONNECT, *targets).split()) for stranger in strangers]


def address_of(cluster: Cluster, namespace: str, selector: str) -> str:
    """Of a ready pod: those that were replaced may still be leaving."""

    def found() -> str:
        for pod in cluster.kubectl.items("pods", "-n", namespace, f"--selector={selector}"):
            if condition(pod, "Ready") == "True" and "deletionTimestamp" not in pod["metadata"]:
                return str(pod["status"]["podIP"])
        return ""

    return wait_until(found, f"a pod of {selector} is ready")


def test_a_stranger_reaches_the_router_alone_until_the_policies_are_gone(
    installed: Cluster, served: Served, stranger: list[Client], client: Client
) -> None:
    worker = address_of(installed, served.namespace, "serving.radixgrove.io/service=guarded")
    component = "app.kubernetes.io/name=radixgrove,app.kubernetes.io/component"
    routers = address_of(installed, release.NAMESPACE, f"{component}=router")
    operator = address_of(installed, release.NAMESPACE, f"{component}=operator")
    api = f"radixgrove-router.{release.NAMESPACE}.svc:80"
    closed = [
        *(f"{worker}:{port}" for port in (8100, 8101, RENDEZVOUS, ANY_OTHER)),
        f"radixgrove-redis.{release.NAMESPACE}.svc:6379",
        f"{routers}:8001",
        f"{operator}:8080",
    ]
    # A policy reaches the node of a new pod, and an endpoint every node, in its own time.
    wait_until(
        lambda: reached(stranger, [api, *closed]) == [{api}, {api}],
        "strangers reach the router alone",
    )
    # The very ports that are closed to strangers serve the router.
    url = served.status()["url"]
    assert "Paris" in client.ask(url, served.name, "What is the capital of France? One word.")

    before = served.pods()
    release.install(installed, {"networkPolicy": {"enabled": False}})
    try:
        # Operator and router were replaced, for their settings have changed.
        routers = address_of(installed, release.NAMESPACE, f"{component}=router")
        everything = {*(target for target in closed[:5]), f"{routers}:8001"}
        wait_until(
            lambda: reached(stranger, sorted(everything)) == [everything, everything],
            "strangers reach everything",
        )
    finally:
        release.install(installed)
    wait_until(
        lambda: reached(stranger, [api, *closed[:5]]) == [{api}, {api}],
        "strangers reach the router alone again",
    )
    assert served.pods() == before


def test_a_pod_with_all_that_its_workers_hold_changes_nothing_of_another_namespace(
    installed: Cluster, served: Served
) -> None:
    own = f"radixgrove:{{{served.namespace}.{served.name}}}"
    control = f"EXISTS {own}:leases"
    attacks = [
        "SET radixgrove:models:shared {}",
        "GET radixgrove:models:shared",
        "HSET radixgrove:{team-a.llama}:replicas llama-0-a1-0 {}",
        "SADD radixgrove:services x",
        "SCAN 0",
        "ACL LIST",
    ]
    (pod,) = served.pods()
    said = installed.kubectl.run(
        "exec", pod, "-n", served.namespace, "-c", "worker", "--",
        "/usr/bin/python3", "-c", _TELL_REDIS, control, *attacks,
    ).splitlines()  # fmt: skip
    assert said[:2] == ["+OK", ":1"], "it reaches Redis, and its own keys"
    assert [line.partition(" ")[0] for line in said[2:]] == ["-NOPERM"] * len(attacks)


def test_scrapers_that_the_values_name_reach_metrics_and_nothing_else(
    installed: Cluster, served: Served, stranger: list[Client]
) -> None:
    scraper = stranger[1]
    labels = {"kubernetes.io/metadata.name": scraper.namespace}
    peer = {"namespaceSelector": {"matchLabels": labels}}
    release.install(installed, {"networkPolicy": {"scrapeFrom": [peer]}})
    try:
        worker = address_of(installed, served.namespace, "serving.radixgrove.io/service=guarded")
        component = "app.kubernetes.io/name=radixgrove,app.kubernetes.io/component"
        routers = address_of(installed, release.NAMESPACE, f"{component}=router")
        metrics = {f"{worker}:8100", f"{worker}:8101", f"{routers}:8001"}
        closed = [f"{worker}:{RENDEZVOUS}", f"radixgrove-redis.{release.NAMESPACE}.svc:6379"]

        def as_allowed() -> bool:
            # The operator was replaced, for its settings have changed.
            operator = address_of(installed, release.NAMESPACE, f"{component}=operator")
            open_to_scrapers = {*metrics, f"{operator}:8080"}
            targets = [*sorted(open_to_scrapers), *closed]
            return reached(stranger, targets) == [set(), open_to_scrapers]

        wait_until(as_allowed, "the scraper, and no other pod, reaches metrics")
    finally:
        release.install(installed)


@pytest.mark.parametrize("namespace", [demo.NAMESPACE, release.NAMESPACE])
def test_the_api_server_refuses_pods_below_restricted(
    installed: Cluster, worker_mounts: Mounts, environment_image: str, namespace: str
) -> None:
    manifest = pods.pod("root", environment_image, ["sleep", "infinity"])
    manifest["spec"]["securityContext"] = {}
    with pytest.raises(KubectlError, match='violates PodSecurity "restricted'):
        installed.kubectl.apply(manifest, namespace=namespace)


def test_a_service_whose_pods_are_refused_says_so(
    installed: Cluster, worker_mounts: Mounts
) -> None:
    service = Served(installed.kubectl, demo.NAMESPACE, "refused")
    spec = demo.spec(worker_mounts, 1) | {"model": {"source": "file:///models/small"}}
    service.apply(spec)
    try:
        # In the API server's words; the first may be of a service account that is still made.
        service.wait(
            lambda s: (
                reason(s, "Ready") == "False/PodRefused"
                and all(word in message(s, "Ready") for word in ("restricted", "hostPath"))
            ),
            "its pods are refused, and why",
        )
    finally:
        service.delete()
