"""A service's own router: Deployment, Service, PodDisruptionBudget, NetworkPolicy."""

from __future__ import annotations

import math

from radixgrove.operator import names
from radixgrove.operator.config import OperatorConfig
from radixgrove.operator.render.common import (
    Object,
    Service,
    container_security_context,
    field_env,
    http_probe,
    key_env,
    metadata,
    pod_security_context,
    with_pod_defaults,
)
from radixgrove.operator.render.policies import router_network_policy
from radixgrove.operator.revision import DRAIN_TIMEOUT
from radixgrove.operator.spec import Router

_KEYS_DIRECTORY = "/etc/radixgrove/keys"


def router_name(service: Service) -> str:
    return f"{service.name}-router"


def router_url(service: Service, config: OperatorConfig) -> str:
    return f"http://{service.name}.{service.namespace}.svc.{config.cluster_domain}/v1"


def router_objects(service: Service, router: Router, config: OperatorConfig) -> list[Object]:
    labels = names.labels(service.name, names.ROUTER)
    guards = [router_network_policy(service, config)] if config.network_policies.enabled else []
    return [
        _deployment(service, router, config),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(service, service.name, names.ROUTER),
            "spec": {
                "selector": labels,
                "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
            },
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(service, router_name(service), names.ROUTER),
            "spec": {
                "maxUnavailable": 1,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": labels},
            },
        },
        *guards,
    ]


def _deployment(service: Service, router: Router, config: OperatorConfig) -> Object:
    labels = names.labels(service.name, names.ROUTER)
    spec = with_pod_defaults(
        {
            "serviceAccountName": service.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": math.ceil(DRAIN_TIMEOUT) + 30,
            "securityContext": pod_security_context(),
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": labels},
                }
            ],
            "containers": [_container(service, router, config)],
            "volumes": [{"name": "tmp", "emptyDir": {}}, *_key_volumes(router)],
        },
        config,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, router_name(service), names.ROUTER),
        "spec": {
            "replicas": router.replicas or 2,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def _container(service: Service, router: Router, config: OperatorConfig) -> Object:
    values = {
        "RADIXGROVE_HOST": "0.0.0.0",
        "RADIXGROVE_PORT": str(names.ROUTER_PORT),
        "RADIXGROVE_MANAGEMENT_HOST": "0.0.0.0",
        "RADIXGROVE_MANAGEMENT_PORT": str(names.ROUTER_MANAGEMENT_PORT),
        "RADIXGROVE_REDIS_PREFIX": config.redis.prefix,
        "RADIXGROVE_MODEL_TABLE": service.key,
        "RADIXGROVE_LOG_JSON": "true",
        "RADIXGROVE_DRAIN_TIMEOUT": str(DRAIN_TIMEOUT),
        "RADIXGROVE_ROUTER_ID": "$(POD_NAME)",
        "HOME": "/tmp",
        "XDG_CACHE_HOME": "/tmp/cache",
        "XDG_RUNTIME_DIR": "/tmp",
    }
    if router.policy is not None:
        values["RADIXGROVE_POLICY"] = router.policy.value
    mounts = [{"name": "tmp", "mountPath": "/tmp"}]
    if router.auth is not None:
        values["RADIXGROVE_API_KEYS_FILE"] = f"{_KEYS_DIRECTORY}/api-keys"
        mounts.append({"name": "keys", "mountPath": _KEYS_DIRECTORY})
    return {
        "name": "router",
        "image": config.images.router,
        "imagePullPolicy": config.images.pull_policy,
        "args": ["radixgrove", "router"],
        "env": [
            field_env("POD_NAME", "metadata.name"),
            *({"name": key, "value": value} for key, value in values.items()),
            *key_env(config, "internal_key", "cluster_secret", "management_key", "redis_url"),
        ],
        "ports": [
            {"name": "http", "containerPort": names.ROUTER_PORT},
            {"name": "management", "containerPort": names.ROUTER_MANAGEMENT_PORT},
        ],
        "readinessProbe": http_probe("/readyz?without-replicas=true", "http", period=2, failures=2),
        "livenessProbe": http_probe("/livez", "http", period=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}},
        "securityContext": container_security_context(),
        "volumeMounts": mounts,
    }


def _key_volumes(router: Router) -> list[Object]:
    if router.auth is None:
        return []
    return [{"name": "keys", "secret": {"secretName": router.auth.keys_secret}}]
