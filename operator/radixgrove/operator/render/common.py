"""What all rendered objects have in common."""

from __future__ import annotations

from dataclasses import dataclass

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import Object

USER = 10001  # numeric, so that the kubelet can check runAsNonRoot


@dataclass(frozen=True)
class Service:
    """The resource that children belong to."""

    namespace: str
    name: str
    uid: str

    @property
    def key(self) -> str:
        return names.service_key(self.namespace, self.name)

    @property
    def owner(self) -> Object:
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }

    @property
    def shared_owner(self) -> Object:
        """For objects with several owners, of which none controls."""
        return {**self.owner, "controller": False}


def metadata(
    service: Service, name: str, component: str, extra_labels: dict[str, str] | None = None
) -> Object:
    return {
        "name": name,
        "namespace": service.namespace,
        "labels": names.labels(service.name, component) | (extra_labels or {}),
        "ownerReferences": [service.owner],
    }


def pod_security_context() -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context(add: list[str] | None = None) -> Object:
    capabilities: Object = {"drop": ["ALL"]}
    if add:
        capabilities["add"] = add
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }


def secret_env(name: str, secret: str, key: str, optional: bool = False) -> Object:
    reference: Object = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def field_env(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def resource_env(name: str, container: str, resource: str) -> Object:
    """A container's own request or limit, in whole units, rounded up."""
    reference = {"containerName": container, "resource": resource, "divisor": "1"}
    return {"name": name, "valueFrom": {"resourceFieldRef": reference}}


def key_env(config: OperatorConfig, *settings: str) -> list[Object]:
    """Secrets of the installation as the settings' environment variables."""
    return [
        secret_env(f"RADIXGROVE_{setting.upper()}", config.keys_secret, config.key_names[setting])
        for setting in settings
    ]


def with_pod_defaults(spec: Object, config: OperatorConfig) -> Object:
    """A pod spec with the chart-wide defaults, which never replace what is there."""
    defaults = config.pods
    spec = dict(spec)
    if defaults.node_selector:
        spec["nodeSelector"] = {**defaults.node_selector, **spec.get("nodeSelector", {})}
    if defaults.tolerations:
        spec["tolerations"] = [*defaults.tolerations, *spec.get("tolerations", [])]
    if defaults.priority_class:
        spec.setdefault("priorityClassName", defaults.priority_class)
    if config.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in config.images.pull_secrets]
    if not (defaults.ca_bundle or defaults.env):
        return spec
    environment = [{"name": k, "value": v} for k, v in sorted(defaults.env.items())]
    mounts: list[Object] = []
    if defaults.ca_bundle:
        environment.append({"name": "SSL_CERT_FILE", "value": "/etc/radixgrove/ca/ca.crt"})
        mounts.append({"name": "ca", "mountPath": "/etc/radixgrove/ca", "readOnly": True})
        volume = {"name": "ca", "configMap": {"name": defaults.ca_bundle}}
        spec["volumes"] = [*spec.get("volumes", []), volume]
    spec["containers"] = [
        {
            **container,
            "env": [*container.get("env", []), *environment],
            "volumeMounts": [*container.get("volumeMounts", []), *mounts],
        }
        for container in spec["containers"]
    ]
    return spec


def http_probe(path: str, port: str, *, period: int, failures: int, timeout: int = 5) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }
