"""What guards a service as a whole: PodDisruptionBudget, NetworkPolicy, ServiceAccount."""

from __future__ import annotations

from collections.abc import Collection

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import Object
from radixgrove.operator.render.common import Service, metadata

NAMESPACE_NAME = "kubernetes.io/metadata.name"


def service_account(service: Service) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, service.name, names.WORKER),
        "automountServiceAccountToken": False,
    }


def pod_disruption_budget(service: Service, expected_pods: int) -> Object:
    """One pod may be evicted, and with it its group, when every other pod is ready.

    An integer, because `maxUnavailable` loses its base while pods are replaced. Pods that are not
    ready may always go: they serve no request.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, service.name, names.WORKER),
        "spec": {
            "minAvailable": max(expected_pods - 1, 0),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.labels(service.name, names.WORKER)},
        },
    }


def worker_network_policy(service: Service, dedicated: bool, config: OperatorConfig) -> Object:
    """Routers reach the serving port; operator and scrapers metrics and management; no others."""
    serving = {"port": names.API_PORT, "protocol": "TCP"}
    management = {"port": names.MANAGEMENT_PORT, "protocol": "TCP"}
    if dedicated:
        router: Object = {"podSelector": {"matchLabels": names.labels(service.name, names.ROUTER)}}
    else:
        router = _in_namespace(config.namespace, config.router.labels)
    return _network_policy(
        service,
        names.WORKER,
        [
            {"from": [router], "ports": [serving]},
            {"from": _overseers(config), "ports": [serving, management]},
        ],
    )


def router_network_policy(service: Service, config: OperatorConfig) -> Object:
    """Everybody reaches the API of a dedicated router, operator and scrapers its management."""
    api = {"port": names.ROUTER_PORT, "protocol": "TCP"}
    management = {"port": names.ROUTER_MANAGEMENT_PORT, "protocol": "TCP"}
    return _network_policy(
        service,
        names.ROUTER,
        [{"ports": [api]}, {"from": _overseers(config), "ports": [management]}],
    )


def redis_network_policy(namespaces: Collection[str], config: OperatorConfig) -> Object:
    """Workers and dedicated routers of namespaces with services reach the chart's Redis.

    Where policies are switched off, one that is there already closes nothing.
    """
    selector = {"key": NAMESPACE_NAME, "operator": "In", "values": sorted(namespaces)}
    component = {"key": names.COMPONENT, "operator": "In", "values": [names.WORKER, names.ROUTER]}
    pods = {"matchLabels": {names.MANAGED_BY: names.MANAGER}, "matchExpressions": [component]}
    peer = {"namespaceSelector": {"matchExpressions": [selector]}, "podSelector": pods}
    rule = {"from": [peer], "ports": [{"port": 6379, "protocol": "TCP"}]}
    if not config.network_policies.enabled:
        ingress: list[Object] = [{}]
    else:
        ingress = [rule] if namespaces else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": config.redis_policy,
            "namespace": config.namespace,
            "labels": {names.MANAGED_BY: names.MANAGER, names.COMPONENT: "redis"},
        },
        "spec": {
            "podSelector": {"matchLabels": config.redis.labels},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _network_policy(service: Service, component: str, ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(service, f"{service.name}-{component}s", component),
        "spec": {
            "podSelector": {"matchLabels": names.labels(service.name, component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _overseers(config: OperatorConfig) -> list[Object]:
    labels = {names.COMPONENT: "operator", "app.kubernetes.io/name": "radixgrove"}
    return [_in_namespace(config.namespace, labels), *config.network_policies.scrape_from]


def _in_namespace(namespace: str, labels: dict[str, str]) -> Object:
    return {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: namespace}},
        "podSelector": {"matchLabels": labels},
    }
