"""What the API server holds the operator to, beyond its roles' verbs. One table for the chart.

Rights are to kinds of objects: an account that may create Secrets may create a token of any other,
and one that may create pods may run them as any account, on any node's disk and network. These
policies look at the objects themselves, and at requests of the operator's own account alone.
"""

from __future__ import annotations

import sys

import yaml

from radixgrove.operator.api import names
from radixgrove.operator.api.objects import Object
from radixgrove.operator.kube.rbac import KEYS_SECRET

# Replaced by the chart.
NAME = "@policy"
ACCOUNT = "@account"  # the operator's user name
SERVICE_ACCOUNTS = "@service-accounts"  # a list in CEL: that pods may run as, besides their own
HOST_PATHS = "@host-paths"  # a list in CEL: folders of nodes that models may lie in

# Of the kernel's capabilities those that act within a pod: what pod security's "baseline" lets
# containers add, and what GPUs and their networks are used with. SYS_ADMIN, say, owns the node.
_CAPABILITIES = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "IPC_LOCK", "KILL", "MKNOD",
    "NET_ADMIN", "NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID",
    "SYS_CHROOT", "SYS_NICE", "SYS_PTRACE", "SYS_RESOURCE",
)  # fmt: skip

_ANY = ["CREATE", "UPDATE", "DELETE"]
_POD = "object.spec.template.spec"
_LABELS = "object.spec.template.metadata.labels"
_CONTAINERS = f"{_POD}.containers + {_POD}.?initContainers.orValue([])"
_VOLUMES = f"{_POD}.?volumes.orValue([])"


def policies(
    name: str, account: str, keys_secret: str, service_accounts: str, host_paths: str
) -> list[Object]:
    """Policies and their bindings.

    `account`: the user name of the operator's service account. `service_accounts`, `host_paths`:
    lists in CEL.
    """
    found = []
    for suffix, rules, validations in (
        ("secrets", [_rule("", "secrets")], _secrets(keys_secret)),
        (
            "pods",
            [
                _rule("apps", "statefulsets", "deployments", operations=["CREATE", "UPDATE"]),
                _rule("batch", "jobs", operations=["CREATE", "UPDATE"]),
            ],
            _pods(service_accounts, host_paths),
        ),
        (
            "own",
            [
                _rule("apps", "statefulsets", "deployments"),
                _rule("batch", "jobs"),
                _rule("policy", "poddisruptionbudgets"),
                _rule("autoscaling", "horizontalpodautoscalers"),
                _rule("networking.k8s.io", "networkpolicies"),
                _rule("", "services", "configmaps", "serviceaccounts", "persistentvolumeclaims"),
            ],
            _own(),
        ),
    ):
        found += _policy(f"{name}-{suffix}", account, rules, validations)
    return found


def _rule(group: str, *resources: str, operations: list[str] = _ANY) -> Object:
    return {
        "apiGroups": [group],
        "apiVersions": ["*"],
        "operations": operations,
        "resources": list(resources),
    }


def _secrets(keys_secret: str) -> list[Object]:
    return [
        _validation(
            f"object != null && object.type == 'Opaque' && object.metadata.name == '{keys_secret}'",
            f"the operator writes Opaque Secrets named {keys_secret}, and no others",
        )
    ]


def _pods(service_accounts: str, host_paths: str) -> list[Object]:
    return [
        _validation(
            f"({_POD}.?serviceAccountName.orValue('') in {service_accounts}) || "
            f"('{names.SERVICE}' in {_LABELS} && {_POD}.?serviceAccountName.orValue('') == "
            f"{_LABELS}['{names.SERVICE}'])",
            "the operator's pods run as the service account of their InferenceService, or as one "
            "of operator.serviceAccounts of the chart: see serviceAccountName in pods and "
            "podOverrides",
        ),
        _validation(
            f"{_POD}.?automountServiceAccountToken.orValue(true) == false && "
            f"!({_VOLUMES}).exists(v, has(v.projected) && v.projected.?sources.orValue([])"
            ".exists(s, has(s.serviceAccountToken)))",
            "the operator's pods have no token of a service account: see "
            "automountServiceAccountToken and volumes in podOverrides",
        ),
        _validation(
            f"!{_POD}.?hostNetwork.orValue(false) && !{_POD}.?hostPID.orValue(false) && "
            f"!{_POD}.?hostIPC.orValue(false)",
            "the operator's pods share no namespace of their node: leave hostNetwork, hostPID and "
            "hostIPC out of podOverrides",
        ),
        _validation(
            f"!({_CONTAINERS}).exists(c, c.?securityContext.privileged.orValue(false))",
            "the operator's pods are not privileged: see securityContext in podOverrides",
        ),
        _validation(
            f"({_CONTAINERS}).all(c, c.?securityContext.capabilities.add.orValue([])"
            f".all(a, a in {list(_CAPABILITIES)}))",
            "the operator's pods add no capability with which they would own their node: see "
            "securityContext in podOverrides",
        ),
        _validation(
            f"({_VOLUMES}).all(v, !has(v.hostPath) || {host_paths}.exists(p, v.hostPath.path == p "
            "|| v.hostPath.path.startsWith(p + '/')))",
            "the operator's pods mount no folder of their node but those in operator.hostPaths of "
            "the chart: see model.source, and volumes in podOverrides",
        ),
    ]


def _own() -> list[Object]:
    owned = f"metadata.?labels[?'{names.MANAGED_BY}'].orValue('') == '{names.MANAGER}'"
    return [
        _validation(
            f"(object == null || object.{owned}) && (oldObject == null || oldObject.{owned})",
            f"the operator writes and deletes what has the label {names.MANAGED_BY}="
            f"{names.MANAGER}, and nothing else",
        ),
    ]


def _validation(expression: str, message: str) -> Object:
    return {"expression": expression, "message": message, "reason": "Forbidden"}


def _policy(
    name: str, account: str, rules: list[Object], validations: list[Object]
) -> list[Object]:
    version = "admissionregistration.k8s.io/v1"
    return [
        {
            "apiVersion": version,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": rules},
                "matchConditions": [
                    {"name": "operator", "expression": f"request.userInfo.username == '{account}'"}
                ],
                "validations": validations,
            },
        },
        {
            "apiVersion": version,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


def chart_file() -> str:
    """As the chart reads it (`.Files.Get`); placeholders are the chart's values."""
    return yaml.safe_dump_all(
        policies(NAME, ACCOUNT, KEYS_SECRET, SERVICE_ACCOUNTS, HOST_PATHS),
        sort_keys=False,
        width=1000,
    )


def user_name(namespace: str, service_account: str) -> str:
    return f"system:serviceaccount:{namespace}:{service_account}"


if __name__ == "__main__":
    sys.stdout.write(chart_file())
