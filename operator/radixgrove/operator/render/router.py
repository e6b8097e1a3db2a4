"""A service's own router: Deployment and its autoscaler, Service, PodDisruptionBudget,
NetworkPolicy."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import Object
from radixgrove.operator.api.spec import NO_FIELDS, PodFields, Router, RouterAutoscaling
from radixgrove.operator.render.common import (
    Service,
    container_security_context,
    field_env,
    http_probe,
    key_env,
    metadata,
    pod_security_context,
    secret_env,
    with_pod_defaults,
)
from radixgrove.operator.render.pods import with_fields
from radixgrove.operator.render.policies import router_network_policy
from radixgrove.operator.render.revision import DRAIN_TIMEOUT, InvalidSettings, first_mistake
from radixgrove.protocol.settings import RouterSettings

_KEYS_DIRECTORY = "/etc/radixgrove/keys"
# Settings that a user does not choose, or chooses elsewhere.
_BY_OPERATOR = {
    "host", "port", "management_host", "management_port", "management_key", "internal_key",
    "cluster_secret", "redis_url", "redis_prefix", "model_table", "router_id", "root_key",
    "metrics_key", "previous_internal_key", "previous_cluster_secret",
}  # fmt: skip
# The previous ones are there while the namespace is changed over to keys of its own.
_OPTIONAL = {
    "metrics_key": "metrics-key",
    "previous_internal_key": "previous-internal-key",
    "previous_cluster_secret": "previous-cluster-secret",
}
_ELSEWHERE = {"policy": "router.policy", "api_keys_file": "router.auth"}


class InvalidRouter(InvalidSettings):
    """`router.settings` does not make settings of a router; the message names the field."""

    reason = "InvalidRouter"


def router_name(service: Service) -> str:
    return f"{service.name}-router"


def router_url(service: Service, config: OperatorConfig) -> str:
    return f"http://{service.name}.{service.namespace}.svc.{config.cluster_domain}/v1"


def router_settings(service: Service, router: Router, config: OperatorConfig) -> RouterSettings:
    """All but the secrets. Raises InvalidRouter when the router's own schema refuses a setting."""
    given = router.settings or {}
    for name in given:
        if name in _BY_OPERATOR:
            raise InvalidRouter(f"router.settings.{name} is set by the operator")
        if name in _ELSEWHERE:
            raise InvalidRouter(f"router.settings.{name}: set {_ELSEWHERE[name]} instead")
    settings: dict[str, Any] = {"drain_timeout": DRAIN_TIMEOUT, "log_json": True} | given
    settings |= {
        "host": "::",
        "port": names.ROUTER_PORT,
        "management_host": "::",
        "management_port": names.ROUTER_MANAGEMENT_PORT,
        "redis_prefix": config.redis.prefix,
        "model_table": service.key,
    }
    if router.policy is not None:
        settings["policy"] = router.policy
    if router.auth is not None:
        settings["api_keys_file"] = f"{_KEYS_DIRECTORY}/api-keys"
    try:
        checked = RouterSettings.model_validate(settings)
    except ValidationError as error:
        raise InvalidRouter(
            f"router.settings.{first_mistake(error, RouterSettings.model_fields)}"
        ) from error
    if any("," in url for url in checked.replicas):
        raise InvalidRouter("router.settings.replicas: an item must not hold a comma")
    return checked


def router_objects(
    service: Service,
    router: Router,
    config: OperatorConfig,
    keys: str,
    fields: PodFields = NO_FIELDS,
    running: int | None = None,
) -> list[Object]:
    """The Deployment first.

    `keys`: hash of the installation's, which routers read when they start. `running`: the replicas
    of its Deployment, where there is one.

    Raises InvalidRouter.
    """
    labels = names.labels(service.name, names.ROUTER)
    guards = [router_network_policy(service, config)] if config.network_policies.enabled else []
    scaling = router.autoscaling
    scalers = [_scaler(service, scaling)] if scaling is not None else []
    replicas = (router.replicas or 2) if scaling is None else _within(scaling, running)
    return [
        _deployment(service, router, config, keys, fields, replicas),
        *scalers,
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


def _within(scaling: RouterAutoscaling, running: int | None) -> int:
    """What the autoscaler has chosen stays. (Were the field left out, the next apply would set the
    number back to 1 where an apply had named it before.)"""
    return min(max(running or 0, scaling.min), scaling.max)


def _scaler(service: Service, scaling: RouterAutoscaling) -> Object:
    name = router_name(service)
    target = {"type": "Utilization", "averageUtilization": scaling.cpu_percent}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(service, name, names.ROUTER),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": scaling.min,
            "maxReplicas": scaling.max,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
        },
    }


def _deployment(
    service: Service,
    router: Router,
    config: OperatorConfig,
    keys: str,
    fields: PodFields,
    replicas: int,
) -> Object:
    labels = names.labels(service.name, names.ROUTER)
    settings = router_settings(service, router, config)
    spec = with_pod_defaults(
        {
            "serviceAccountName": service.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": math.ceil(settings.drain_timeout) + 30,
            "securityContext": pod_security_context(),
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": labels},
                }
            ],
            "containers": [_container(settings, config)],
            "volumes": [{"name": "tmp", "emptyDir": {}}, *_key_volumes(router)],
        },
        config,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, router_name(service), names.ROUTER),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": with_fields(
                {"metadata": {"labels": labels, "annotations": {names.KEYS: keys}}, "spec": spec},
                "router",
                labels,
                config.pods.routers,
                fields,
            ),
        },
    }


def _container(settings: RouterSettings, config: OperatorConfig) -> Object:
    plain = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    values = {f"RADIXGROVE_{name.upper()}": _variable(value) for name, value in plain.items()}
    values |= {
        "RADIXGROVE_ROUTER_ID": "$(POD_NAME)",
        "HOME": "/tmp",
        "XDG_CACHE_HOME": "/tmp/cache",
        "XDG_RUNTIME_DIR": "/tmp",
    }
    mounts = [{"name": "tmp", "mountPath": "/tmp"}]
    if settings.api_keys_file is not None:
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
            *(
                secret_env(f"RADIXGROVE_{name.upper()}", config.keys_secret, key, optional=True)
                for name, key in _OPTIONAL.items()
            ),
        ],
        "ports": [
            {"name": "http", "containerPort": names.ROUTER_PORT},
            {"name": "management", "containerPort": names.ROUTER_MANAGEMENT_PORT},
        ],
        "readinessProbe": http_probe("/readyz?without-replicas=true", "http", period=2, failures=2),
        "livenessProbe": http_probe("/livez", "http", period=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "resources": {
            "requests": {"cpu": "250m", "memory": "256Mi"},
            "limits": {"memory": "2Gi"},
        },
        "securityContext": container_security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _variable(value: Any) -> str:
    """A setting as the router reads it from its environment."""
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key_volumes(router: Router) -> list[Object]:
    if router.auth is None:
        return []
    return [{"name": "keys", "secret": {"secretName": router.auth.keys_secret}}]
