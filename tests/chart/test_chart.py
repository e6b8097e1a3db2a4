"""The chart: what it renders, refuses and keeps stable. Helm's own engine, no cluster."""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Iterator
from functools import cache, reduce
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from radixgrove.operator.api import crd, metrics, names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.kube import admission, rbac
from radixgrove.operator.kube.keys import REDIS_USERS
from radixgrove.protocol.settings import RouterSettings, RoutingPolicy
from tests.chart import foreign
from tests.checkout import ROOT

CHART = ROOT / "helm/radixgrove"
KUBERNETES = "1.35"

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespaced": {
        "operator": {"namespaces": ["team-a", "team-b"]},
        "monitoring": {"enabled": True},
        "redis": {"tls": {"secret": "redis-tls"}},
    },
    "own redis": {"redis": {"url": "rediss://:{password}@redis.example.com:6380/1"}},
    "everything": {
        "image": {"registry": "registry.example.com/ai", "pullSecrets": ["pull"]},
        "operator": {"replicas": 2, "gangTimeout": 600, "nameHold": 60},
        "router": {
            "auth": {"keysSecret": "keys"},
            "settings": {"retries": 3},
            "autoscaling": {"enabled": True, "maxReplicas": 16},
            "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a": "b"}},
        },
        "keys": {"existingSecret": "mine"},
        "modelCache": {"storageClass": "fast"},
        "pods": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "nodeSelector": {"pool": "ai"},
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "proxy": {"https": "http://proxy:3128", "noProxy": ".svc"},
            "caBundle": "ca",
            "routers": {
                "nodeSelector": {"disk": "fast"},
                "tolerations": [{"key": "edge", "operator": "Exists"}],
                "affinity": {"podAffinity": {}},
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
                ],
                "env": [{"name": "A", "value": "1"}],
                "volumes": [{"name": "v", "emptyDir": {}}],
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                "imagePullSecrets": ["second"],
                "priorityClassName": "higher",
                "serviceAccountName": "mine",
                "annotations": {"mesh": "off", "checksum/config": "theirs"},
                "labels": {"team": "a", "app.kubernetes.io/name": "theirs"},
            },
            "workers": {"env": [{"name": "B", "value": "2"}]},
            "downloads": {"serviceAccountName": "reader"},
        },
        "networkPolicy": {"scrapeFrom": [{"namespaceSelector": {"matchLabels": {"m": "y"}}}]},
        "monitoring": {"enabled": True, "labels": {"r": "x"}, "dashboard": True, "alerts": True},
        "ingress": {"enabled": True, "className": "nginx", "host": "ai.example.com",
                    "tlsSecret": "tls", "annotations": {"x": "y"}},
        "route": {"enabled": True, "hostnames": ["ai.example.com"], "parentRefs": [{"name": "gw"}]},
    },
    "no policies, no CRD": {"networkPolicy": {"enabled": False}, "crds": {"install": False}},
}  # fmt: skip


def texts(
    values: dict[str, Any], name: str = "radixgrove", namespace: str = "rg"
) -> dict[str, str]:
    chart = helm_python.Chart.load(str(CHART))
    rendered: dict[str, str] = chart.render(values, name=name, namespace=namespace)
    return rendered


def render(
    values: dict[str, Any], name: str = "radixgrove", namespace: str = "rg"
) -> list[dict[str, Any]]:
    """The chart's objects, the caller's own; rendered once for all who ask for the same."""
    objects: list[dict[str, Any]] = json.loads(_objects(json.dumps(values), name, namespace))
    return objects


@cache
def _objects(values: str, name: str, namespace: str) -> str:
    documents = []
    for path, text in sorted(texts(json.loads(values), name, namespace).items()):
        if path.endswith(".yaml"):
            parsed = yaml.load_all(text, Loader=yaml.CSafeLoader)  # ten times as fast as in Python
            documents += [document for document in parsed if document]
    return json.dumps(documents)


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name)


def pods(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    found = [(o["metadata"]["name"], o["spec"]) for o in objects if o["kind"] == "Pod"]
    return found + [
        (o["metadata"]["name"], o["spec"]["template"]["spec"])
        for o in objects
        if o["kind"] in ("Deployment", "StatefulSet")
    ]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_every_object_is_strictly_valid(values: dict[str, Any]) -> None:
    objects = render(values)
    assert len(objects) > 10
    for rendered in objects:
        if rendered["kind"] in foreign.CRDS:
            foreign.validate(rendered)
        else:
            kubernetes_validate.validate(rendered, KUBERNETES, strict=True)


def test_kinds_of_other_projects_are_all_rendered_and_checked_for_unknown_fields() -> None:
    objects = render(CASES["everything"])
    for kind in foreign.CRDS:
        rendered = next(o for o in objects if o["kind"] == kind)
        foreign.validate(rendered)
        with pytest.raises(jsonschema.ValidationError, match="unheardOf"):
            foreign.validate(rendered | {"spec": rendered["spec"] | {"unheardOf": 1}})
    route = next(o for o in objects if o["kind"] == "HTTPRoute")
    route["spec"]["rules"][0]["timeouts"]["request"] = "forever"
    with pytest.raises(jsonschema.ValidationError, match="forever"):
        foreign.validate(route)


def test_names_that_look_like_numbers_stay_names() -> None:
    values = {
        "image": {"tag": "10", "pullSecrets": ["11"]},
        "operator": {"namespaces": ["12"]},
        "router": {"auth": {"keysSecret": "13"}},
        "redis": {"prefix": "14"},
        "keys": {"existingSecret": "15"},
        "modelCache": {"storageClass": "16"},
        "pods": {
            "nodeSelector": {"pool": "17"},
            "tolerations": [{"key": "18", "value": "true"}],
            "priorityClassName": "19",
            "runtimeClassName": "20",
            "caBundle": "21",
        },
        "monitoring": {"enabled": True, "labels": {"r": "22"}},
        "ingress": {"enabled": True, "className": "23", "host": "24", "tlsSecret": "25"},
        "route": {"enabled": True, "hostnames": ["26"], "parentRefs": [{"name": "27"}]},
    }
    objects = render(values, name="28", namespace="29")
    for rendered in objects:
        if rendered["kind"] in foreign.CRDS:
            foreign.validate(rendered)
        else:
            kubernetes_validate.validate(rendered, KUBERNETES, strict=True)
    for part, settings in (("operator", OperatorConfig), ("router", RouterSettings)):
        text = find(objects, "ConfigMap", f"28-radixgrove-{part}")["data"][f"{part}.yaml"]
        settings.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_rendering_twice_is_the_same(values: dict[str, Any]) -> None:
    assert texts(values) == texts(values)


def test_no_template_draws_lots_or_asks_the_cluster() -> None:
    forbidden = re.compile(
        r"\b(rand[A-Z]\w+|lookup|genCA|genSignedCert|genPrivateKey|now|uuidv4)\b"
    )
    for path in (CHART / "templates").rglob("*.*"):
        for action in re.findall(r"\{\{.*?\}\}", path.read_text(), re.DOTALL):
            assert not forbidden.search(action), f"{path.name}: {action}"


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_names_are_unique_and_carry_the_release(values: dict[str, Any]) -> None:
    objects = render(values, name="prod")
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(keys) == len(set(keys))
    for kind, _, name in keys:
        assert "prod-radixgrove" in name or kind == "CustomResourceDefinition"


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_every_pod_meets_the_restricted_pod_security_standard(values: dict[str, Any]) -> None:
    for name, spec in pods(render(values)):
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert isinstance(security["runAsUser"], int), name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert all("hostPath" not in volume for volume in spec.get("volumes", [])), name
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["readOnlyRootFilesystem"] is True, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name


def test_every_pods_memory_is_limited() -> None:
    """What grows without end ends alone, and does not take its node with it."""
    for name, spec in pods(render({})):
        for container in spec["containers"]:
            assert container["resources"]["limits"]["memory"], name


def test_whoever_scrapes_a_router_has_a_key_that_opens_nothing_else() -> None:
    """With API keys configured its metrics ask for one, or for this."""
    objects = render(CASES["everything"])
    (endpoint,) = find(objects, "ServiceMonitor", "radixgrove-router")["spec"]["endpoints"]
    secret = endpoint["authorization"]["credentials"]
    (container,) = find(objects, "Deployment", "radixgrove-router")["spec"]["template"]["spec"][
        "containers"
    ]
    sources = {entry["name"]: entry.get("valueFrom") for entry in container["env"]}
    assert sources["RADIXGROVE_METRICS_KEY"] == {"secretKeyRef": secret}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_operator_and_router_understand_their_configuration(values: dict[str, Any]) -> None:
    objects = render(values)
    text = find(objects, "ConfigMap", "radixgrove-operator")["data"]["operator.yaml"]
    config = OperatorConfig.model_validate(yaml.safe_load(text))
    assert config.namespace == "rg"
    router = find(objects, "ConfigMap", "radixgrove-router")["data"]["router.yaml"]
    settings = RouterSettings.model_validate(yaml.safe_load(router))
    assert settings.model_table == "shared"
    service = find(objects, "Service", "radixgrove-router")["spec"]["ports"][0]["port"]
    assert config.router.url.endswith(".local/v1" if service == 80 else f".local:{service}/v1")


@pytest.mark.parametrize(("given", "drain"), [({}, 120.0), ({"drain_timeout": 900.5}, 900.5)])
def test_a_leaving_router_gets_the_time_that_its_streams_have(
    given: dict[str, Any], drain: float
) -> None:
    objects = render({"router": {"settings": given}})
    text = find(objects, "ConfigMap", "radixgrove-router")["data"]["router.yaml"]
    assert RouterSettings.model_validate(yaml.safe_load(text)).drain_timeout == drain
    deployment = find(objects, "Deployment", "radixgrove-router")
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert drain + 10 < grace < drain + 60


def test_values_reach_the_operator() -> None:
    objects = render(CASES["everything"])
    text = find(objects, "ConfigMap", "radixgrove-operator")["data"]["operator.yaml"]
    config = OperatorConfig.model_validate(yaml.safe_load(text))
    assert config.images.worker == "registry.example.com/ai/radixgrove/worker:0.1.0"
    assert config.keys_secret == "mine"
    assert config.pods.env == {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".svc"}
    assert config.pods.runtime_class == "nvidia"
    assert config.pods.ca_bundle == "ca"
    assert config.model_cache.storage_class == "fast"
    assert config.gang_timeout == 600
    assert config.pods.workers.env == [{"name": "B", "value": "2"}]
    assert config.pods.downloads.service_account_name == "reader"
    assert config.pods.routers.annotations["mesh"] == "off"
    assert config.name_hold == 60
    assert config.network_policies.scrape_from == [
        {"namespaceSelector": {"matchLabels": {"m": "y"}}}
    ]


def test_chart_wide_defaults_reach_every_pod() -> None:
    for name, spec in pods(render(CASES["everything"])):
        router = name == "radixgrove-router"
        assert spec["tolerations"][0] == {"key": "gpu", "operator": "Exists"}, name
        assert spec["nodeSelector"]["pool"] == "ai", name
        assert spec["priorityClassName"] == ("higher" if router else "high"), name
        assert spec["imagePullSecrets"][0] == {"name": "pull"}, name


def test_fields_of_routers_reach_the_shared_one() -> None:
    template = find(render(CASES["everything"]), "Deployment", "radixgrove-router")["spec"][
        "template"
    ]
    spec, meta = template["spec"], template["metadata"]
    (container,) = spec["containers"]
    assert spec["nodeSelector"] == {"pool": "ai", "disk": "fast"}
    assert [t["key"] for t in spec["tolerations"]] == ["gpu", "edge"]
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "zone"
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    assert {"name": "A", "value": "1"} in container["env"]
    assert {"name": "v", "mountPath": "/v"} in container["volumeMounts"]
    assert {"name": "v", "emptyDir": {}} in spec["volumes"]
    assert spec["imagePullSecrets"] == [{"name": "pull"}, {"name": "second"}]
    assert spec["serviceAccountName"] == "mine"
    assert spec["affinity"] == {"podAffinity": {}}
    assert meta["annotations"]["mesh"] == "off"
    assert meta["labels"]["team"] == "a"
    assert "theirs" not in [*meta["labels"].values(), *meta["annotations"].values()]


def test_an_autoscaler_of_routers_alone_says_how_many() -> None:
    objects = render(CASES["everything"])
    deployment = find(objects, "Deployment", "radixgrove-router")
    scaler = find(objects, "HorizontalPodAutoscaler", "radixgrove-router")["spec"]
    assert "replicas" not in deployment["spec"], "or each upgrade would set it back"
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 16)
    assert not [o for o in render({}) if o["kind"] == "HorizontalPodAutoscaler"]
    assert find(render({}), "Deployment", "radixgrove-router")["spec"]["replicas"] == 2


def test_one_operator_at_a_time_may_be_evicted() -> None:
    objects = render({"operator": {"replicas": 2}})
    budget = find(objects, "PodDisruptionBudget", "radixgrove-operator")["spec"]
    pod = find(objects, "Deployment", "radixgrove-operator")["spec"]["template"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("part", ["operator", "router"])
def test_whoever_talks_to_redis_trusts_the_ca_bundle(part: str) -> None:
    deployment = find(render(CASES["everything"]), "Deployment", f"radixgrove-{part}")
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    trusted = next(e["value"] for e in container["env"] if e["name"] == "SSL_CERT_FILE")
    mount = next(m for m in container["volumeMounts"] if trusted == f"{m['mountPath']}/ca.crt")
    volume = next(v for v in spec["volumes"] if v["name"] == mount["name"])
    assert volume["configMap"] == {"name": "ca"}


def test_a_changed_configuration_restarts_operator_and_router_only() -> None:
    def stamp(values: dict[str, Any]) -> list[str]:
        objects = render(values)
        return [
            find(objects, "Deployment", f"radixgrove-{part}")["spec"]["template"]["metadata"][
                "annotations"
            ]["checksum/config"]
            for part in ("operator", "router")
        ]

    before, after = stamp({}), stamp({"router": {"policy": "random"}})
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_an_image_can_be_pinned_by_digest() -> None:
    digest = f"sha256:{'a' * 64}"
    objects = render({"image": {"router": {"digest": digest}}})
    container = find(objects, "Deployment", "radixgrove-router")["spec"]["template"]["spec"]
    assert container["containers"][0]["image"] == f"radixgrove/router@{digest}"


# ---- CRD and RBAC come from the operator ---------------------------------------------------------


def test_the_crd_is_the_generated_one_and_can_be_kept() -> None:
    generated = crd.custom_resource_definition()
    name = generated["metadata"]["name"]
    kept = find(render({}), "CustomResourceDefinition", name)
    assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert kept["metadata"].pop("labels")["app.kubernetes.io/instance"] == "radixgrove"
    assert kept == generated
    gone = find(render({"crds": {"keep": False}}), "CustomResourceDefinition", name)
    assert "annotations" not in gone["metadata"]


def test_the_charts_rbac_table_is_the_operators() -> None:
    assert (CHART / "files/rbac.yaml").read_text() == rbac.chart_file(), (
        "write it again: python -m radixgrove.operator.kube.rbac > helm/radixgrove/files/rbac.yaml"
    )


def test_the_charts_admission_policies_are_the_operators() -> None:
    assert (CHART / "files/admission.yaml").read_text() == admission.chart_file(), (
        "write it again: python -m radixgrove.operator.kube.admission > "
        "helm/radixgrove/files/admission.yaml"
    )
    user = "system:serviceaccount:rg:radixgrove-operator"
    accounts, paths = "['reader', 'fetcher']", "['/srv/models', '/data']"
    values = {
        "operator": {"hostPaths": ["/srv/models/", "/data"], "serviceAccounts": ["reader"]},
        "pods": {"downloads": {"serviceAccountName": "fetcher"}},
    }
    expected = admission.policies(
        "radixgrove-operator-rg", user, "radixgrove-keys", accounts, paths
    )
    for policy in expected:
        rendered = find(render(values), policy["kind"], policy["metadata"]["name"])
        assert rendered["spec"] == policy["spec"]
    without = render({"rbac": {"admissionPolicies": False}})
    assert not [o for o in without if o["kind"].startswith("ValidatingAdmissionPolicy")]


@pytest.mark.parametrize("case", ["defaults", "namespaced"])
def test_roles_grant_exactly_the_table(case: str) -> None:
    objects = render(CASES[case])
    replacements = {
        rbac.KEYS_SECRET: "radixgrove-keys",
        rbac.NAMES_CONFIG_MAP: "radixgrove-names",
        rbac.REDIS_POLICY: "radixgrove-redis-namespaces",
        rbac.LEASE: "radixgrove-operator",
        rbac.OWNER: "radixgrove-operator",
    }
    own = find(objects, "Role", "radixgrove-operator-own")
    assert own["rules"] == rbac.rules(rbac.Scope.OWN, replacements)
    served = [
        o for o in objects
        if o["kind"] in ("Role", "ClusterRole") and o["metadata"]["name"].endswith("-served")
    ]  # fmt: skip
    namespaces = CASES[case].get("operator", {}).get("namespaces")
    assert [o["metadata"].get("namespace") for o in served] == (namespaces or [None])
    for role in served:
        assert role["rules"] == rbac.rules(rbac.Scope.SERVED, replacements)
    cluster = find(objects, "ClusterRole", "rg-radixgrove-operator-cluster")
    assert cluster["rules"] == rbac.rules(rbac.Scope.CLUSTER, replacements)


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_nothing_stands_between_the_api_server_and_other_peoples_pods(
    values: dict[str, Any],
) -> None:
    """A webhook that does not answer would stop a whole cluster."""
    assert not [o["kind"] for o in render(values) if "Webhook" in o["kind"]]


def test_no_role_has_a_wildcard_or_reads_secrets_at_large() -> None:
    for rendered in render(CASES["everything"]):
        for rule in rendered.get("rules", []) if "Role" in rendered["kind"] else []:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
                assert rule["resourceNames"]


def test_users_roles_are_aggregated() -> None:
    objects = render({})
    edit = find(objects, "ClusterRole", "rg-radixgrove-edit")
    labels = edit["metadata"]["labels"]
    assert labels["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert labels["rbac.authorization.k8s.io/aggregate-to-admin"] == "true"
    assert allowed(edit, "inferenceservices") == {"create", "update", "patch", "delete"}
    assert allowed(edit, "inferenceservices/scale") >= {"update", "patch"}
    assert allowed(edit, "inferenceservices/status") == set(), "the operator's alone"
    view = find(objects, "ClusterRole", "rg-radixgrove-view")
    # What may view may edit, and what may edit may administer: Kubernetes' own roles say so.
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    for resource in ("inferenceservices", "inferenceservices/status", "inferenceservices/scale"):
        assert allowed(view, resource) >= {"get"}
    assert allowed(view, "inferenceservices") == {"get", "list", "watch"}


def allowed(role: dict[str, Any], resource: str) -> set[str]:
    """Verbs of a role on one of our resources."""
    rules = [rule for rule in role["rules"] if rule["apiGroups"] == ["serving.radixgrove.io"]]
    return {verb for rule in rules if resource in rule["resources"] for verb in rule["verbs"]}


# ---- network, monitoring -------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["everything", "namespaced"])
def test_workers_and_dedicated_routers_are_scraped_where_the_operator_serves(case: str) -> None:
    objects = render(CASES[case])
    served = CASES[case]["operator"].get("namespaces")
    for component in (names.WORKER, names.ROUTER):
        monitor = find(objects, "PodMonitor", f"radixgrove-{component}s")["spec"]
        assert monitor["namespaceSelector"] == ({"matchNames": served} if served else {"any": True})
        pods_of_a_service = names.labels("llama", component)
        assert monitor["selector"]["matchLabels"].items() <= pods_of_a_service.items()
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert endpoint["port"] == "http"
        assert ("authorization" in endpoint) is (component == names.ROUTER)


def test_redis_is_reached_by_routers_workers_and_the_operator_only() -> None:
    policy = find(render(CASES["namespaced"]), "NetworkPolicy", "radixgrove-redis")
    (rule,) = policy["spec"]["ingress"]
    components = [
        peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
        for peer in rule["from"]
    ]
    assert components == ["operator", "router"]
    config = OperatorConfig.model_validate(
        yaml.safe_load(
            find(render({}), "ConfigMap", "radixgrove-operator")["data"]["operator.yaml"]
        )
    )
    redis = find(render({}), "StatefulSet", "radixgrove-redis")["spec"]["selector"]["matchLabels"]
    assert config.redis.labels == redis, "the operator lets in namespaces with services"


@pytest.mark.parametrize("secret", ["", "redis-tls"])
def test_the_charts_redis_takes_its_users_from_a_secret_and_speaks_tls_where_told_to(
    secret: str,
) -> None:
    objects = render({"redis": {"tls": {"secret": secret}}})
    pod = find(objects, "StatefulSet", "radixgrove-redis")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    volumes = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert arguments["--aclfile"] == f"{mounts['users']}/{volumes['users']['items'][0]['path']}"
    assert volumes["users"]["secretName"] == "radixgrove-keys"
    assert volumes["users"]["items"][0]["key"] == REDIS_USERS
    assert "REDIS_PASSWORD" not in json.dumps(container), "no password is in an argument"
    settings = find(objects, "ConfigMap", "radixgrove-operator")["data"]["operator.yaml"]
    redis = OperatorConfig.model_validate(yaml.safe_load(settings)).redis
    assert (redis.own, redis.users) == (True, True)
    assert redis.url.partition("://")[0] == ("rediss" if secret else "redis")
    if secret:
        assert (arguments["--port"], arguments["--tls-port"]) == ("0", "6379")
        assert volumes["tls"] == {"secretName": secret}
        assert arguments["--tls-key-file"] == f"{mounts['tls']}/tls.key"


def test_nobody_scrapes_unless_told_to() -> None:
    operator = find(render({}), "NetworkPolicy", "radixgrove-operator")
    assert operator["spec"]["ingress"] == []


def test_dashboard_and_alerts_name_metrics_that_exist() -> None:
    # The page is complete, as tests/docs/test_metrics.py sees to.
    page = (ROOT / "docs/metrics.md").read_text()
    known = set(re.findall(r"^\| `(radixgrove_\w+)", page, re.MULTILINE))
    used = (CHART / "files/dashboard.json").read_text() + (CHART / "files/alerts.yaml").read_text()
    json.loads((CHART / "files/dashboard.json").read_text())
    for metric in set(re.findall(r"radixgrove_[a-z_]+", used)):
        assert re.sub(r"_(bucket|count|sum)$", "", metric) in known, metric


def alerts(name: str = "prod") -> dict[str, str]:
    """Expressions by alert."""
    objects = render({"monitoring": {"enabled": True, "alerts": True}}, name)
    rule = next(o for o in objects if o["kind"] == "PrometheusRule")
    return {r["alert"]: r["expr"] for group in rule["spec"]["groups"] for r in group["rules"]}


def test_alerts_ask_for_labels_that_the_operators_metrics_have() -> None:
    labels = {
        f"{metric.name}{suffix}": set(collector._labelnames)
        for collector in metrics.REGISTRY._collector_to_names
        for metric in collector.collect()
        for suffix in ("", "_total")
    }
    used = 0
    for alert, expression in alerts().items():
        for metric, selected in re.findall(
            r"(radixgrove_operator_\w+)(?:\{([^}]*)\})?", expression
        ):
            used += 1
            matchers = dict(re.findall(r'(\w+)=~?"([^"]*)"', selected))
            assert set(matchers) <= labels[metric] | {"namespace", "job"}, alert
            states = set(matchers.get("state", "").split("|")) - {""}
            assert states <= set(metrics.GROUP_STATES), alert
    assert used >= 8


def test_an_operators_alerts_are_of_its_own_installation() -> None:
    objects = render({"monitoring": {"enabled": True, "alerts": True}}, "prod")
    monitor = find(objects, "ServiceMonitor", "prod-radixgrove-operator")
    service = find(objects, "Service", "prod-radixgrove-operator")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items()
    assert "jobLabel" not in monitor["spec"], "so that the job is the Service's name"
    place = (service["metadata"]["namespace"], service["metadata"]["name"])
    for alert in ("RadixgroveOperatorWithoutLeader", "RadixgroveOperatorErrors"):
        matchers = dict(re.findall(r'(\w+)="([^"]*)"', alerts("prod")[alert]))
        assert (matchers["namespace"], matchers["job"]) == place
    assert "vector(0)" in alerts()["RadixgroveOperatorWithoutLeader"], "also when it is not scraped"
    assert "by (namespace, job)" in alerts()["RadixgroveRouterWithoutRedis"]
    assert "@" not in "".join(alerts().values())


def test_a_service_that_starts_in_time_is_not_down() -> None:
    expression = alerts()["RadixgroveServiceDown"]
    excused = expression.partition(" unless on (namespace, service) ")[2]
    assert excused == "min_over_time(radixgrove_operator_first_start[5m]) == 1"


# ---- wrong values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"routr": {}}, "routr"),
        ({"router": {"replicas": 0}}, "replicas"),
        ({"router": {"policy": "fastest"}}, "policy"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"worker": {"digest": "latest"}}}, "digest"),
        ({"operator": {"namespaces": "team-a"}}, "namespaces"),
        ({"operator": {"gangTimeout": 0}}, "gangTimeout"),
        ({"redis": {"url": "http://x"}}, "url"),
        ({"modelCache": {"accessMode": "ReadOnly"}}, "accessMode"),
        ({"router": {"settings": {"retrys": 3}}}, "retrys"),
        ({"router": {"settings": {"retries": 99}}}, "retries"),
        ({"router": {"settings": {"log_level": "loud"}}}, "log_level"),
        ({"router": {"settings": {"policy": "random"}}}, "policy"),
        ({"router": {"settings": {"redis_url": "redis://x"}}}, "redis_url"),
        ({"image": {"tag": 1.1}}, r"image.*tag"),
        ({"image": {"registry": "https://registry.example.com"}}, r"image.*registry"),
        ({"image": {"worker": {"repository": "docker://x/y"}}}, r"worker.*repository"),
        ({"image": {"redis": {"repository": "redis:8"}}}, r"redis.*repository"),
        ({"image": {"pullSecrets": [7]}}, r"pullSecrets"),
        ({"redis": {"enabled": False}}, r"no Redis: set redis.enabled, or redis.url, or keys"),
        ({"redis": {"resources": {"request": {"cpu": 1}}}}, r"redis.*resources.*request"),
        ({"operator": {"resources": {"limits": {"memory": "1 GB"}}}}, r"memory"),
        ({"operator": {"gpuResource": "gpu"}}, "gpuResource"),
        ({"pods": {"nodeSelector": {"gpu": True}}}, r"nodeSelector.*gpu"),
        ({"pods": {"tolerations": [{"key": "gpu", "value": 1}]}}, r"tolerations.*0.*value"),
        ({"pods": {"tolerations": [{"key": "gpu", "operator": "In"}]}}, r"tolerations.*operator"),
        ({"pods": {"proxy": {"https": "proxy:3128"}}}, r"proxy.*https"),
        ({"pods": {"priorityClassName": "High"}}, "priorityClassName"),
        ({"networkPolicy": {"scrapeFrom": [{"namespace": "x"}]}}, r"scrapeFrom.*0"),
        ({"networkPolicy": {"scrapeFrom": [{}]}}, r"scrapeFrom.*0"),
        ({"pods": {"workers": {"env": [{"name": "A", "value": 1}]}}}, r"workers.*env.*0.*value"),
        ({"pods": {"workers": {"nodeselector": {}}}}, r"workers.*nodeselector"),
        ({"pods": {"downloads": {"serviceAccountName": ""}}}, r"downloads.*serviceAccountName"),
        ({"route": {"enabled": True}}, r"route.*parentRefs"),
        ({"route": {"enabled": True, "parentRefs": [{"namespace": "x"}]}}, r"parentRefs.*0.*name"),
        ({"ingress": {"enabled": True}}, r"ingress.*host"),
        ({"ingress": {"enabled": True, "host": "https://ai.example.com"}}, r"ingress.*host"),
        ({"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}}, "minReplicas"),
        (
            {
                "router": {
                    "autoscaling": {"enabled": True},
                    "resources": {"requests": {"cpu": None}},
                }
            },
            r"resources\.requests\.cpu",
        ),
        ({"router": {"service": {"annotations": {"a b": "x"}}}}, r"service.*annotations"),
        ({"redis": {"maxmemory": "2gb"}}, r"redis\.maxmemory"),
        ({"redis": {"resources": {"limits": {"memory": "1e3Ki"}}}}, r"limits.*memory"),
        ({"redis": {"resources": {"limits": {"memory": 1000}}}}, r"redis\.maxmemory"),
        ({"redis": {"tls": {"secret": "A_B"}}}, r"tls.*secret"),
        ({"redis": {"maxmemory": "0"}}, r"redis.*maxmemory"),
        ({"modelCache": {"size": "0Gi"}}, r"modelCache.*size"),
        ({"modelCache": {"size": "200"}}, r"modelCache.*size"),
        ({"modelCache": {"size": None}}, r"modelCache.*size"),
        ({"redis": None}, r"missing property 'redis'"),
        (
            {"route": {"enabled": True, "parentRefs": [{"name": "a", "sectionName": "A b"}]}},
            "sectionName",
        ),
        ({"operator": {"hostPaths": ["/models/../etc"]}}, "hostPaths"),
        ({"image": {"registry": "Registry/AI"}}, r"image.*registry"),
        ({"pods": {"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]}}, "value"),
        ({"pods": {"tolerations": [{"operator": "Equal"}]}}, r"tolerations.*0"),
        (
            {"pods": {"tolerations": [{"key": "a", "tolerationSeconds": 5}]}},
            r"tolerations.*0",
        ),
        ({"pods": {"nodeSelector": {"a b": "x"}}}, "nodeSelector"),
        ({"pods": {"nodeSelector": {"a": "x y"}}}, "nodeSelector"),
        ({"pods": {"routers": {"labels": {"a": "x y"}}}}, "labels"),
        ({"pods": {"routers": {"env": [{"name": "A=B", "value": "1"}]}}}, r"env.*0.*name"),
        (
            {"pods": {"routers": {"volumeMounts": [{"name": "v", "mountPath": "x"}]}}},
            "mountPath",
        ),
        (
            {
                "pods": {
                    "routers": {
                        "topologySpreadConstraints": [
                            {
                                "maxSkew": 0,
                                "topologyKey": "zone",
                                "whenUnsatisfiable": "DoNotSchedule",
                            }
                        ]
                    }
                }
            },
            "maxSkew",
        ),
        (
            {"monitoring": {"labels": {"app.kubernetes.io/name": "x"}}},
            r"monitoring.*labels.*app.kubernetes.io.*name",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_key(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=named):
        render(values)


def test_the_notes_name_what_pods_wait_for() -> None:
    notes = "radixgrove/templates/NOTES.txt"
    assert "They wait for" not in texts({})[notes]
    said = texts(CASES["everything"])[notes]
    for line in (
        "Secret keys with api-keys (router.auth.keysSecret)",
        "Secret mine (keys.existingSecret)",
        "ConfigMap ca with ca.crt, in namespaces with services too (pods.caBundle)",
        "Secret pull, in namespaces with services too (image.pullSecrets)",
    ):
        assert f"\n  {line}\n" in said
    assert "redis-tls" in texts(CASES["namespaced"])[notes]


def test_redis_may_be_named_by_a_secret_of_the_users() -> None:
    objects = render({"redis": {"enabled": False}, "keys": {"existingSecret": "mine"}})
    text = find(objects, "ConfigMap", "radixgrove-operator")["data"]["operator.yaml"]
    assert yaml.safe_load(text)["redis"]["url"] == ""


def test_the_charts_own_labels_are_the_ones_that_no_value_may_set() -> None:
    """Twice in one object they would be a duplicate key."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    reserved = schema["properties"]["monitoring"]["properties"]["labels"]["properties"]
    monitor = find(render({"monitoring": {"enabled": True}}), "ServiceMonitor", "radixgrove-router")
    assert set(reserved) == set(monitor["metadata"]["labels"])


def test_the_chart_passes_lint() -> None:
    result = helm_python.lint(str(CHART))
    assert [m for m in result["messages"] if m["severity"] >= 2] == []


def routers_own_schema() -> dict[str, Any]:
    """JSON schema of `router.settings`: the router's, without what the chart decides."""
    objects = render({"router": {"auth": {"keysSecret": "keys"}}})
    file = find(objects, "ConfigMap", "radixgrove-router")["data"]["router.yaml"]
    pod = find(objects, "Deployment", "radixgrove-router")["spec"]["template"]["spec"]
    variables = {entry["name"] for entry in pod["containers"][0]["env"]}
    decided = {name.removeprefix("RADIXGROVE_").lower() for name in variables}
    decided |= set(yaml.safe_load(file)) - {"log_json", "drain_timeout"}
    decided |= {"previous_internal_key", "previous_cluster_secret"}  # of dedicated routers alone
    whole = RouterSettings.model_json_schema()
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: plain(node, whole["$defs"])
            for name, node in whole["properties"].items()
            if name not in decided
        },
    }


def plain(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Without references, and without what says nothing of a value."""
    if "$ref" in node:
        node = definitions[node["$ref"].rsplit("/", 1)[-1]] | node
    said = {"type", "description", "enum", "items", "minimum", "exclusiveMinimum", "maximum"}
    return {key: value for key, value in node.items() if key in said}


def test_router_settings_are_checked_by_the_routers_own_schema() -> None:
    """`RADIXGROVE_UPDATE_GOLDEN=1` writes it again."""
    file = CHART / "values.schema.json"
    schema = json.loads(file.read_text())
    router = schema["properties"]["router"]["properties"]
    if os.environ.get("RADIXGROVE_UPDATE_GOLDEN"):
        router["settings"] = routers_own_schema()
        file.write_text(json.dumps(schema, indent=2) + "\n")
    assert router["settings"] == routers_own_schema()
    assert {"retries", "queue_timeout", "drain_timeout", "log_level"} <= set(
        router["settings"]["properties"]
    )


def test_large_numbers_reach_the_router_as_they_were_given() -> None:
    given = {"max_body_bytes": 1_000_000, "max_queued": 1 << 20, "idle_timeout": 0.5}
    objects = render({"router": {"settings": given}})
    text = find(objects, "ConfigMap", "radixgrove-router")["data"]["router.yaml"]
    settings = RouterSettings.model_validate(yaml.safe_load(text))
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize(
    ("repository", "image"),
    [
        ("redis", "registry.example.com/ai/redis"),
        ("library/redis", "registry.example.com/ai/library/redis"),
        ("v1.2/redis", "v1.2/redis"),
        ("mirror.example.com/redis", "mirror.example.com/redis"),
        ("mirror:5000/redis", "mirror:5000/redis"),
        ("localhost/redis", "localhost/redis"),
    ],
)
def test_an_image_that_names_its_registry_is_taken_from_there(repository: str, image: str) -> None:
    values = {"registry": "registry.example.com/ai/", "redis": {"repository": repository}}
    objects = render({"image": values})
    (container,) = find(objects, "StatefulSet", "radixgrove-redis")["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["image"] == f"{image}:8-bookworm"
    operator = find(objects, "Deployment", "radixgrove-operator")["spec"]["template"]["spec"]
    assert operator["containers"][0]["image"].startswith("registry.example.com/ai/radixgrove/")


def test_the_chart_knows_every_routing_policy() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    policy = schema["properties"]["router"]["properties"]["policy"]
    assert set(policy["enum"]) == {policy.value for policy in RoutingPolicy}


def below(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all values, without those of resources, of which each may be left out."""
    for key, value in values.items():
        if key != "resources":
            yield (*path, key)
            if isinstance(value, dict):
                yield from below(value, (*path, key))


def without(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    first, *rest = path
    inner = {first: without(values[first], tuple(rest))} if rest else {}
    return {key: value for key, value in values.items() if key != first} | inner


def test_a_key_without_a_value_is_refused_unless_it_is_empty_by_default() -> None:
    """Helm takes it for a default that was removed: a guard that is off, or a template without
    the value."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    check = jsonschema.Draft7Validator(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    empty = []
    for path in below(values):
        default = reduce(operator.getitem, path, values)
        if default in ("", [], {}):
            empty.append(path)
            continue
        errors = [error.message for error in check.iter_errors(without(values, path))]
        assert f"'{path[-1]}' is a required property" in errors, path
    nothing: dict[str, Any] = {}
    for path in empty:
        inner = reduce(lambda found, key: found.setdefault(key, {}), path[:-1], nothing)
        inner[path[-1]] = None
    assert render(nothing) == render({})


def test_every_value_has_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def check(value: Any, node: dict[str, Any], path: str) -> None:
        node = schema["definitions"][node["$ref"].split("/")[-1]] if "$ref" in node else node
        for key, item in value.items() if isinstance(value, dict) else ():
            if "properties" not in node:
                return
            assert key in node["properties"], f"{path}.{key}"
            check(item, node["properties"][key], f"{path}.{key}")

    check(values, schema, "")
