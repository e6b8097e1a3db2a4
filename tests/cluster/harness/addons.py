"""What runs in `kube-system`: cluster DNS, and the rights of the nodes' programs."""

from __future__ import annotations

from typing import Any

from tests.cluster.harness.control_plane import KUBE_ROUTER

DNS_IMAGE = "localhost/radixgrove/coredns:1"
_NAMESPACE = "kube-system"
_DNS_LABELS = {"k8s-app": "kube-dns"}
_READ = ["get", "list", "watch"]

_COREFILE = """\
.:5353 {
  errors
  health :8080
  ready :8181
  kubernetes cluster.local in-addr.arpa ip6.arpa {
    pods insecure
    ttl 5
  }
  cache 5
}
"""


def manifests(dns_address: str) -> list[dict[str, Any]]:
    """Everything to apply to a fresh control plane, in order."""
    return [*_kube_router_rights(), *_dns_rights(), *_dns(dns_address)]


def _kube_router_rights() -> list[dict[str, Any]]:
    rules = [
        _rule("", ["namespaces", "pods", "services", "nodes", "endpoints"], _READ),
        _rule("networking.k8s.io", ["networkpolicies"], _READ),
        _rule("discovery.k8s.io", ["endpointslices"], _READ),
    ]
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": KUBE_ROUTER}
    return _grant("radixgrove-kube-router", rules, subject)


def _dns_rights() -> list[dict[str, Any]]:
    rules = [
        _rule("", ["endpoints", "services", "pods", "namespaces"], ["list", "watch"]),
        _rule("discovery.k8s.io", ["endpointslices"], ["list", "watch"]),
    ]
    account = {"kind": "ServiceAccount", "name": "coredns", "namespace": _NAMESPACE}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata("coredns")},
        *_grant("radixgrove-coredns", rules, account),
    ]


def _dns(address: str) -> list[dict[str, Any]]:
    """One DNS server on every node, asked only from there: losing a node costs no other DNS."""
    container = {
        "name": "coredns",
        "image": DNS_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        # Soon ready, and not given up for a busy moment: its node's pods have no other.
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": 8181},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 10,
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
        # Pretended nodes must not get one.
        "nodeSelector": {"radixgrove.test/real": "true"},
    }
    ports = [
        {"name": "dns", "protocol": "UDP", "port": 53, "targetPort": 5353},
        {"name": "dns-tcp", "protocol": "TCP", "port": 53, "targetPort": 5353},
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata("coredns"),
            "data": {"Corefile": _COREFILE},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": _metadata("coredns"),
            "spec": {
                "selector": {"matchLabels": _DNS_LABELS},
                "template": {"metadata": {"labels": _DNS_LABELS}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata("kube-dns"),
            "spec": {
                "clusterIP": address,
                "internalTrafficPolicy": "Local",
                "selector": _DNS_LABELS,
                "ports": ports,
            },
        },
    ]


def _metadata(name: str) -> dict[str, Any]:
    return {"name": name, "namespace": _NAMESPACE}


def _rule(group: str, resources: list[str], verbs: list[str]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _grant(name: str, rules: list[dict[str, Any]], subject: dict[str, str]) -> list[dict[str, Any]]:
    version = "rbac.authorization.k8s.io/v1"
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    return [
        {"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": role,
            "subjects": [subject],
        },
    ]
