"""Rendering is pure and stable; what it makes is valid Kubernetes, and is pinned by golden files.

`RADIXGROVE_UPDATE_GOLDEN=1 python -m pytest tests/operator/render` rewrites the files.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.cli.configuration import EMPTY_FILE, load_environment, resolve
from radixgrove.operator.api import names
from radixgrove.operator.api.config import NetworkPolicies, PodDefaults
from radixgrove.operator.api.spec import InferenceServiceSpec, Model, PodFields, Router
from radixgrove.operator.fetch.download import HOPELESS
from radixgrove.operator.render import group, models, policies, router
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.merge import strategic_merge
from radixgrove.operator.render.revision import (
    InvalidEngine,
    InvalidOverrides,
    ModelAt,
    config_map_data,
    revision_of,
    thaw,
)
from radixgrove.protocol.settings import RouterSettings, WorkerSettings
from tests.checkout import ROOT
from tests.operator.operator_builders import CONFIG, MODEL, SERVICE, revision, spec

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
KUBERNETES = "1.35"


def render_all(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Every child of a resource with all groups placed, in the order they are applied."""
    spec = InferenceServiceSpec.model_validate(resource["spec"])
    service = Service("team-a", resource["metadata"]["name"], SERVICE.uid)
    frozen = revision_of(spec, service.name, MODEL, "", CONFIG)
    labels = group.group_labels(service, frozen, 0, 1)
    children = [
        policies.service_account(service),
        policies.worker_network_policy(service, spec.router.dedicated, CONFIG),
        policies.pod_disruption_budget(service, spec.replicas * spec.hardware.nodes),
        models.claim(
            "model-1", [models.User(service, spec.model.cache)], spec.model, "c0ffee", CONFIG
        ),
        models.resolve_job(service, spec.model, CONFIG),
        models.download_job("model-1", service, spec.model, "c0ffee", CONFIG),
        group.revision_config_map(service, frozen, CONFIG),
        group.stateful_set(service, frozen, 0, 1, CONFIG),
        group.headless_service(service, labels, "set-uid"),
        group.group_network_policy(service, labels, "set-uid"),
    ]
    if spec.router.dedicated:
        children += router.router_objects(service, spec.router, CONFIG, "keys-hash")
    return children


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_render_as_the_golden_files_say(path: Path) -> None:
    rendered = render_all(yaml.safe_load(path.read_text()))
    text = yaml.safe_dump_all(rendered, sort_keys=True, width=100)
    golden = GOLDEN / path.name
    if os.environ.get("RADIXGROVE_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_rendered_object_is_strictly_valid(path: Path) -> None:
    for rendered in render_all(yaml.safe_load(path.read_text())):
        kubernetes_validate.validate(rendered, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_rendering_twice_changes_nothing_and_leaves_its_input_alone(path: Path) -> None:
    resource = yaml.safe_load(path.read_text())
    before = copy.deepcopy(resource)
    assert render_all(resource) == render_all(resource)
    assert resource == before


def worker(frozen: Any = None, **fields: Any) -> dict[str, Any]:
    """The pod spec of a group's StatefulSet."""
    rendered = group.stateful_set(SERVICE, frozen or revision(**fields), 3, 7, CONFIG)
    return rendered["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}


def test_ranks_meet_at_pod_zero_of_their_own_attempt() -> None:
    env = environment(worker(hardware={"nodes": 2, "gpusPerNode": 8}))
    assert env["MASTER_ADDR"] == "llama-3-a7-0.llama-3-a7.team-a.svc.cluster.local"
    assert (env["NNODES"], env["WORLD_SIZE"]) == ("2", "16")
    assert env["RADIXGROVE_REPLICA_ID"] == "llama-3-a7-0"


def test_the_rank_is_the_pods_index_label() -> None:
    env = worker()["containers"][0]["env"]
    rank = next(item for item in env if item["name"] == "NODE_RANK")
    path = rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['apps.kubernetes.io/pod-index']"


@pytest.mark.parametrize(
    ("network", "locks", "devices"),
    [("auto", False, 0), ("tcp", False, 0), ("roce", True, 1), ("ib", True, 1)],
)
def test_memory_is_locked_only_for_rdma(network: str, locks: bool, devices: int) -> None:
    container = worker(hardware={"network": network})["containers"][0]
    capabilities = container["securityContext"]["capabilities"]
    assert ("IPC_LOCK" in capabilities.get("add", [])) is locks
    assert int(container["resources"]["limits"].get("rdma/ib", 0)) == devices


def test_tcp_keeps_nccl_off_rdma_and_every_network_names_its_interface() -> None:
    env = environment(worker(hardware={"network": "tcp", "interface": "ens3"}))
    assert env["NCCL_IB_DISABLE"] == "1"
    assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "ens3"


@pytest.mark.parametrize("child", ["group", "download", "router"])
def test_chart_wide_defaults_reach_every_child_and_replace_nothing(child: str) -> None:
    config = CONFIG.model_copy(
        update={
            "images": CONFIG.images.model_copy(update={"pull_secrets": ["pull"]}),
            "pods": PodDefaults(
                tolerations=[{"key": "gpu", "operator": "Exists"}],
                node_selector={"pool": "ai", "nvidia.com/gpu.product": "any"},
                priority_class="high",
                runtime_class="nvidia",
                env={"HTTPS_PROXY": "http://proxy"},
                ca_bundle="ca",
            ),
        }
    )
    frozen = revision(hardware={"gpuType": "H100"})
    workload = {
        "group": group.stateful_set(SERVICE, frozen, 0, 1, config),
        "download": models.download_job(
            "model-1", SERVICE, Model(source="hf://org/model"), "c0ffee", config
        ),
        "router": router.router_objects(SERVICE, Router(dedicated=True), config, "")[0],
    }[child]
    kubernetes_validate.validate(workload, KUBERNETES, strict=True)
    pod = workload["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["priorityClassName"] == "high"
    assert pod["nodeSelector"]["pool"] == "ai"
    wanted = {"group": "H100"}.get(child, "any")
    assert pod["nodeSelector"]["nvidia.com/gpu.product"] == wanted, "the service's own wins"
    assert pod.get("runtimeClassName") == ("nvidia" if child == "group" else None)
    env = environment(pod)
    assert env["HTTPS_PROXY"] == "http://proxy"
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert env["SSL_CERT_FILE"] == f"{mounts['ca']}/ca.crt"
    assert {"name": "ca", "configMap": {"name": "ca"}} in pod["volumes"]


def test_shared_memory_is_sized_and_counted_in_the_memory_limit() -> None:
    pod = worker(hardware={"memory": "8Gi", "sharedMemory": "2Gi"})
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "10240Mi"


def test_shared_memory_without_a_limit_of_its_own_adds_nothing_to_the_pods() -> None:
    pod = worker(hardware={"memory": "8Gi", "sharedMemory": "0"})
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "0"}
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "8192Mi"


@pytest.mark.parametrize(
    ("hardware", "requested", "limit"),
    [
        ({}, "81920Mi", None),
        ({"memory": "32Gi", "sharedMemory": "2Gi"}, f"{(32 + 2 + 80) * 1024}Mi", "116736Mi"),
        ({"nodes": 2}, "40960Mi", None),  # a group's ranks share it equally
        ({"nodes": 2, "memory": "8Gi"}, f"{(8 + 2 + 40) * 1024}Mi", "51200Mi"),
        ({"device": "cpu"}, "81920Mi", None),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "engine", [{"hostCacheGib": 80}, {"settings": {"host_cache_gib": 80}}], ids=str
)
def test_the_scheduler_knows_of_the_host_cache(
    engine: dict[str, Any], hardware: dict[str, Any], requested: str, limit: str | None
) -> None:
    """Its memory is locked when the worker starts: two of them must not meet on one node."""
    resources = worker(hardware=hardware, engine=engine)["containers"][0]["resources"]
    assert resources["requests"]["memory"] == requested
    assert resources.get("limits", {}).get("memory") == limit


@pytest.mark.parametrize("engine", [{}, {"hostCacheGib": 0}], ids=str)
def test_without_a_host_cache_no_memory_is_asked_for(engine: dict[str, Any]) -> None:
    resources = worker(engine=engine)["containers"][0]["resources"]
    assert resources == {side: {"nvidia.com/gpu": "1"} for side in ("requests", "limits")}


@pytest.mark.parametrize("name", ["host_cache_gib", "drain_timeout"])
def test_settings_that_the_pod_follows_are_checked_first(name: str) -> None:
    with pytest.raises(InvalidEngine, match=name):
        worker(engine={"settings": {name: "much"}})


def test_nodes_of_the_last_failure_are_avoided_where_others_exist() -> None:
    plain = group.stateful_set(SERVICE, revision(), 3, 7, CONFIG)
    assert "nodeAffinity" not in plain["spec"]["template"]["spec"]["affinity"]
    rendered = group.stateful_set(SERVICE, revision(), 3, 7, CONFIG, ["gpu-1", "gpu-2"])
    kubernetes_validate.validate(rendered, KUBERNETES, strict=True)
    affinity = rendered["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    # One value each is what the API server admits; all of them must hold.
    assert term["preference"]["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]}
        for node in ("gpu-1", "gpu-2")
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schedulerName": "volcano"}, "volcano"),
        ({}, None),
    ],
)
def test_another_scheduler_places_the_pods_when_told_to(
    fields: dict[str, Any], said: str | None
) -> None:
    assert worker(**fields).get("schedulerName") == said


def test_a_groups_pods_lie_on_nodes_of_their_own_within_one_rack() -> None:
    rack = "topology.example.com/rack"
    affinity = worker(hardware={"nodes": 2}, topologyKey=rack)["affinity"]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    (together,), (apart,) = (
        affinity[kind][required] for kind in ("podAffinity", "podAntiAffinity")
    )
    assert (together["topologyKey"], apart["topologyKey"]) == (rack, "kubernetes.io/hostname")
    own = group.group_labels(SERVICE, revision(), 3, 7)
    for term in (together, apart):
        assert term["labelSelector"]["matchLabels"].items() <= own.items()
        assert names.ATTEMPT in term["labelSelector"]["matchLabels"], "not those of other attempts"
    assert "podAffinity" not in worker(topologyKey=rack)["affinity"], "one pod is with itself"


def test_the_startup_probe_lasts_as_long_as_the_resource_says() -> None:
    probe = worker(startup={"timeout": "90m"})["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 90 * 60


@pytest.mark.parametrize(
    ("size", "timeout", "expected"),
    [
        (0, None, 1800),  # of a claim of the user's: unknown
        (16_000_000_000, None, 1800 + 160),
        (810_000_000_000, None, 1800 + 8100),
        (810_000_000_000, "30m", 1800),  # the user's word
    ],
)
def test_a_start_may_take_longer_the_larger_the_model(
    size: int, timeout: str | None, expected: int
) -> None:
    startup = {} if timeout is None else {"startup": {"timeout": timeout}}
    frozen = revision_of(spec(**startup), SERVICE.name, MODEL, "", CONFIG, model_bytes=size)
    pod = group.stateful_set(SERVICE, frozen, 0, 1, CONFIG)["spec"]["template"]["spec"]
    probe = pod["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == expected
    assert thaw(config_map_data(frozen, "team-a.llama", CONFIG)) == frozen
    assert frozen.hash == revision(**startup).hash, "to learn the size rolls nothing"


def test_a_model_in_an_image_is_a_volume_of_it() -> None:
    frozen = revision().model_copy(update={"model": ModelAt(source="oci://r/m:1", image="r/m:1")})
    rendered = group.stateful_set(SERVICE, frozen, 0, 1, CONFIG)
    kubernetes_validate.validate(rendered, KUBERNETES, strict=True)
    volumes = {v["name"]: v for v in rendered["spec"]["template"]["spec"]["volumes"]}
    assert volumes["model"]["image"] == {"reference": "r/m:1"}


def test_a_group_outlives_the_drain_of_its_requests() -> None:
    pod = worker(engine={"settings": {"drain_timeout": 300.0}})
    assert pod["terminationGracePeriodSeconds"] > 300


def test_overrides_are_merged_by_name_and_never_lose_the_groups_labels() -> None:
    frozen = revision(
        podOverrides={
            "metadata": {"labels": {"team": "a", names.ATTEMPT: "99"}},
            "spec": {
                "hostNetwork": True,
                "containers": [
                    {"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
                    {"name": "sidecar", "image": "busybox"},
                ],
            },
        }
    )
    template = group.stateful_set(SERVICE, frozen, 3, 7, CONFIG)["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"][names.ATTEMPT] == "7"
    assert [c["name"] for c in template["spec"]["containers"]] == ["worker", "sidecar"]
    env = environment(template["spec"])
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["NNODES"] == "1"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"spec": "x"}, "podOverrides.spec must be an object"),
        (
            {"spec": {"containers": {"name": "worker"}}},
            "podOverrides.spec.containers must be a list",
        ),
        ({"spec": {"containers": ["worker"]}}, r"podOverrides.spec.containers\[0\]"),
        ({"spec": {"initContainers": ["x"]}}, r"podOverrides.spec.initContainers\[0\]"),
        (
            {"spec": {"containers": [{"name": "worker", "env": [3]}]}},
            r"podOverrides.spec.containers\[0\].env\[0\]",
        ),
        ({"metadata": None}, "podOverrides.metadata"),
        ({"template": {}}, "podOverrides.template"),
    ],
    ids=str,
)
def test_overrides_of_another_form_are_refused_by_their_path(
    overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidOverrides, match=named):
        worker(podOverrides=overrides)


def test_merge_follows_kubectls_rules() -> None:
    base = {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "args": ["x"],
        "k": 1,
    }
    patch = {"env": [{"name": "A", "$patch": "delete"}, {"name": "C"}], "args": ["y"], "k": None}
    assert strategic_merge(base, patch) == {
        "env": [{"name": "B", "value": "2"}, {"name": "C"}],
        "args": ["y"],
    }


FIELDS = {
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": {"topologyKey": "zone"}}
            ]
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "env": [{"name": "A", "value": "service"}],
    "volumes": [{"name": "v", "emptyDir": {}}],
    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    "imagePullSecrets": ["mine"],
    "priorityClassName": "high",
    "serviceAccountName": "reader",
    "annotations": {"mesh": "off"},
    "labels": {"team": "a", names.MANAGED_BY: "somebody"},
}


def of_kind(kind: str, config: Any, fields: PodFields) -> dict[str, Any]:
    """A workload with pods of that kind."""
    model = Model(source="hf://org/model")
    match kind:
        case "workers":
            frozen = revision(pods={"workers": fields.model_dump(by_alias=True)})
            return group.stateful_set(SERVICE, frozen, 0, 1, config)
        case "routers":
            return router.router_objects(SERVICE, Router(dedicated=True), config, "", fields)[0]
        case _:
            return models.download_job("m", SERVICE, model, "c0ffee", config, fields=fields)


@pytest.mark.parametrize("kind", ["workers", "routers", "downloads"])
def test_fields_of_chart_and_service_reach_the_pods_of_their_kind(kind: str) -> None:
    everywhere = PodFields(
        env=[{"name": "A", "value": "chart"}, {"name": "B", "value": "chart"}],
        tolerations=[{"key": "pool", "operator": "Exists"}],
        image_pull_secrets=["theirs"],
        priority_class_name="low",
    )
    config = CONFIG.model_copy(update={"pods": PodDefaults.model_validate({kind: everywhere})})
    bare = of_kind(kind, CONFIG, PodFields())["spec"]["template"]
    workload = of_kind(kind, config, PodFields.model_validate(FIELDS))
    kubernetes_validate.validate(workload, KUBERNETES, strict=True)
    template = workload["spec"]["template"]
    pod = template["spec"]
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["pool", "spot"]
    own = bare["spec"].get("affinity", {}).get("podAntiAffinity", {})
    terms = "preferredDuringSchedulingIgnoredDuringExecution"
    assert len(pod["affinity"]["podAntiAffinity"][terms]) == len(own.get(terms, [])) + 1
    zone = next(c for c in pod["topologySpreadConstraints"] if c["topologyKey"] == "zone")
    counted = zone["labelSelector"]["matchLabels"]
    assert counted.items() <= template["metadata"]["labels"].items()
    env = environment(pod)
    assert (env["A"], env["B"]) == ("service", "chart")
    assert set(environment(bare["spec"])) <= set(env)
    assert {"name": "v", "emptyDir": {}} in pod["volumes"]
    assert {"name": "v", "mountPath": "/v"} in pod["containers"][0]["volumeMounts"]
    assert pod["imagePullSecrets"] == [{"name": "theirs"}, {"name": "mine"}]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("high", "reader")
    assert template["metadata"]["annotations"]["mesh"] == "off"
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"][names.MANAGED_BY] == names.MANAGER


# ---- a chat template of the user's own -----------------------------------------------------------


@pytest.mark.parametrize(("given", "key"), [({}, "chat_template.jinja"), ({"key": "a.b"}, "a.b")])
def test_a_chat_template_comes_from_a_config_map(given: dict[str, str], key: str) -> None:
    model = {"source": "hf://org/model", "chatTemplate": {"configMap": "templates", **given}}
    pod = worker(model=model)
    (source,) = (v["configMap"] for v in pod["volumes"] if v["name"] == "chat-template")
    assert source == {
        "name": "templates",
        "items": [{"key": key, "path": "chat_template.jinja"}],
    }
    (mount,) = (
        mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "chat-template"
    )
    data = config_map_data(revision(model=model), "team-a.llama", CONFIG)
    settings = WorkerSettings.model_validate(yaml.safe_load(data["worker.yaml"]))
    assert settings.chat_template == f"{mount['mountPath']}/chat_template.jinja"
    assert thaw(data) == revision(model=model)


def test_without_one_nothing_is_mounted_for_it() -> None:
    names_of_volumes = {volume["name"] for volume in worker()["volumes"]}
    assert "chat-template" not in names_of_volumes
    assert "chat_template" not in config_map_data(revision(), "s", CONFIG)["worker.yaml"]


def test_two_chat_templates_are_refused() -> None:
    model = {"source": "hf://org/model", "chatTemplate": {"configMap": "templates"}}
    with pytest.raises(InvalidEngine, match=r"model\.chatTemplate"):
        worker(model=model, engine={"settings": {"chat_template": "/elsewhere"}})


# ---- what restarts a group -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 5},
        {"autoscaling": {"max": 3}},
        {"recovery": {"maxRestarts": 1}},
        {"rollout": {"maxUnavailable": 0, "maxSurge": 2}},
        {"router": {"dedicated": True, "replicas": 5}},
        {"router": {"dedicated": True, "autoscaling": {"max": 5}}},
        {"suspend": True},
        {"pods": {"routers": {"priorityClassName": "high"}, "downloads": {"labels": {"a": "b"}}}},
        {"hardware": {"nodes": 1, "device": "cuda"}},  # defaults, spelled out
        {"engine": {"settings": {}}},
    ],
    ids=str,
)
def test_these_changes_restart_nothing(fields: dict[str, Any]) -> None:
    assert revision(**fields).hash == revision().hash


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": {"pageSize": 32}},
        {"engine": {"kvDtype": "fp8_e4m3"}},
        {"engine": {"hostCacheGib": 80}},
        {"engine": {"hostWritePolicy": "write-back"}},
        {"hardware": {"gpusPerNode": 2}},
        {"hardware": {"gpusPerNode": 2}, "parallelism": {"tp": 2, "ep": 2}},
        {"image": "rg/worker:2"},
        {"startup": {"timeout": "1h"}},
        {"pods": {"workers": {"env": [{"name": "A", "value": "1"}]}}},
        {"podOverrides": {"spec": {"hostNetwork": True}}},
        {"model": {"source": "hf://org/model", "aliases": ["other"]}},
        {"model": {"source": "hf://org/model", "chatTemplate": {"configMap": "templates"}}},
    ],
    ids=str,
)
def test_these_changes_roll_every_group(fields: dict[str, Any]) -> None:
    assert revision(**fields).hash != revision().hash


def test_a_restart_annotation_rolls_every_group() -> None:
    assert revision(restart="2026-01-01").hash != revision().hash


def test_a_new_chart_rolls_nothing_and_a_running_revision_keeps_its_image() -> None:
    upgraded = CONFIG.model_copy(
        update={
            "images": CONFIG.images.model_copy(update={"worker": "rg/worker:2"}),
            "pods": PodDefaults(env={"HTTPS_PROXY": "http://proxy"}),
        }
    )
    assert revision(config=upgraded).hash == revision().hash
    old = group.stateful_set(SERVICE, revision(), 0, 2, upgraded)
    assert old["spec"]["template"]["spec"]["containers"][0]["image"] == "rg/worker:1"


@pytest.mark.parametrize("kind", ["resolve", "download"])
def test_a_job_gives_up_at_once_on_what_another_try_would_not_change(kind: str) -> None:
    model = Model(source="hf://org/model")
    job = (
        models.resolve_job(SERVICE, model, CONFIG)
        if kind == "resolve"
        else models.download_job("model-1", SERVICE, model, "c0ffee", CONFIG)
    )
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    pod = job["spec"]["template"]["spec"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [HOPELESS]
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert pod["restartPolicy"] == "Never", "which such a policy needs"


# ---- guards --------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(0, 8))
def test_a_disruption_budget_lets_one_group_go_at_a_time(nodes: int, groups: int) -> None:
    budget = policies.pod_disruption_budget(SERVICE, nodes * groups)
    spare = nodes * groups - budget["spec"]["minAvailable"]
    assert spare == min(1, nodes * groups)


def test_only_routers_reach_the_serving_port_and_no_policy_names_rendezvous() -> None:
    policy = policies.worker_network_policy(SERVICE, dedicated=False, config=CONFIG)
    serving, management = policy["spec"]["ingress"]
    assert [rule["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in serving["from"]] == ["router"]  # fmt: skip
    ports = {port["port"] for rule in (serving, management) for port in rule["ports"]}
    assert ports == {names.API_PORT, names.MANAGEMENT_PORT}


def test_scrapers_and_the_operator_reach_metrics_and_management_ports() -> None:
    scraper = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    config = CONFIG.model_copy(update={"network_policies": NetworkPolicies(scrape_from=[scraper])})
    for policy, ports in (
        (policies.worker_network_policy(SERVICE, False, config), {8100, 8101}),
        (policies.worker_network_policy(SERVICE, True, config), {8100, 8101}),
        (policies.router_network_policy(SERVICE, config), {8001}),
    ):
        kubernetes_validate.validate(policy, KUBERNETES, strict=True)
        rule = policy["spec"]["ingress"][1]
        assert {port["port"] for port in rule["ports"]} == ports
        operator, *scrapers = rule["from"]
        assert scrapers == [scraper]
        assert operator["namespaceSelector"]["matchLabels"] == {
            "kubernetes.io/metadata.name": CONFIG.namespace
        }
        assert operator["podSelector"]["matchLabels"][names.COMPONENT] == "operator"


def test_a_dedicated_router_alone_reaches_its_services_workers() -> None:
    policy = policies.worker_network_policy(SERVICE, True, CONFIG)
    (peer,) = policy["spec"]["ingress"][0]["from"]
    deployment = own_router()
    assert peer == {
        "podSelector": {"matchLabels": deployment["spec"]["template"]["metadata"]["labels"]}
    }


@given(
    st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True),
    st.integers(0, 511),
    st.integers(0, 9999),
)
def test_names_fit_their_kinds(name: str, index: int, attempt: int) -> None:
    set_name = names.group_name(name, index, attempt)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", set_name)
    assert len(set_name) <= 52  # its pods carry it plus a hash in a label of at most 63


@given(st.text("abc-", min_size=1, max_size=63), st.text("abc-", min_size=1, max_size=40))
def test_service_keys_fit_the_settings_pattern(namespace: str, name: str) -> None:
    assert len(names.service_key(namespace, name)) <= 63


def test_the_workers_environment_holds_only_settings_the_worker_knows() -> None:
    """The command line refuses a `RADIXGROVE_…` variable that is no setting."""
    for fields in ({}, {"hardware": {"nodes": 2, "network": "tcp"}}):
        for name in environment(worker(**fields)):
            if name.startswith("RADIXGROVE_"):
                assert name.removeprefix("RADIXGROVE_").lower() in WorkerSettings.model_fields


CPU_WORKER: dict[str, Any] = {"device": "cpu", "cpu": "2500m"}


@pytest.mark.parametrize(
    ("fields", "threads"),
    [
        ({"hardware": CPU_WORKER}, "requests.cpu"),
        ({"hardware": {**CPU_WORKER, "gpusPerNode": 2}}, "1"),
        ({"hardware": CPU_WORKER, "engine": {"settings": {"cpu_threads": 7}}}, None),
        ({"hardware": {"device": "cpu"}}, None),
        ({"hardware": {"cpu": "4"}}, None),  # a GPU's worker
    ],
)
def test_a_cpu_engine_computes_with_the_cores_that_its_pod_requests(
    fields: dict[str, Any], threads: str | None
) -> None:
    entries = worker(**fields)["containers"][0]["env"]
    found = [entry for entry in entries if entry["name"] == "RADIXGROVE_CPU_THREADS"]
    if threads is None:
        assert found == []
    elif threads.isdigit():
        assert found[0]["value"] == threads
    else:
        reference = found[0]["valueFrom"]["resourceFieldRef"]
        assert reference == {"containerName": "worker", "resource": threads, "divisor": "1"}


def test_a_dedicated_routers_environment_holds_only_settings_the_router_knows() -> None:
    deployment = own_router(policy="random", auth={"keysSecret": "keys"}, settings={"retries": 1})
    for name in environment(deployment["spec"]["template"]["spec"]):
        if name.startswith("RADIXGROVE_"):
            assert name.removeprefix("RADIXGROVE_").lower() in RouterSettings.model_fields


# ---- a service's own router ----------------------------------------------------------------------


def own_router(keys: str = "", config: Any = CONFIG, **fields: Any) -> dict[str, Any]:
    """Its Deployment."""
    wanted = Router.model_validate({"dedicated": True} | fields)
    return router.router_objects(SERVICE, wanted, config, keys)[0]


def test_its_settings_reach_it_in_the_form_it_reads() -> None:
    given = {
        "retries": 0,
        "queue_timeout": 0.5,
        "reveal_replica": True,
        "log_json": False,
        "replicas": ["http://one:1", "http://two:2"],
        "drain_timeout": 600.0,
    }
    pod = own_router(settings=given)["spec"]["template"]["spec"]
    kubernetes_validate.validate(own_router(settings=given), KUBERNETES, strict=True)
    resolved = resolve("router", {}, load_environment(environment_of_process(pod)), EMPTY_FILE)
    assert {name: getattr(resolved.settings, name) for name in given} == given
    assert pod["terminationGracePeriodSeconds"] >= 610, "its streams get their time"


def environment_of_process(pod: dict[str, Any]) -> dict[str, str]:
    return {name: value or "x" for name, value in environment(pod).items()}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"retrys": 1}, "router.settings.retrys: there is no such field; is retries meant"),
        ({"retries": 99}, "router.settings.retries"),
        ({"redis_url": "redis://x"}, "router.settings.redis_url is set by the operator"),
        ({"policy": "random"}, "set router.policy instead"),
        ({"api_keys_file": "/x"}, "set router.auth instead"),
        ({"replicas": ["http://a,http://b"]}, "comma"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(router.InvalidRouter, match=named):
        own_router(settings=settings)


def test_its_autoscaler_is_one_that_kubernetes_takes() -> None:
    scaling = {"min": 1, "max": 4, "cpuPercent": 50}
    wanted = Router.model_validate({"dedicated": True, "autoscaling": scaling})
    deployment, scaler, *_ = router.router_objects(SERVICE, wanted, CONFIG, "", running=9)
    kubernetes_validate.validate(scaler, KUBERNETES, strict=True)
    assert scaler["spec"]["scaleTargetRef"]["kind"] == deployment["kind"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaler["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"] == 50
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "cpu" in container["resources"]["requests"], "which the percentage is of"
    assert deployment["spec"]["replicas"] == 4


def test_it_is_replaced_when_the_installations_keys_change() -> None:
    before, same, after = own_router("one"), own_router("one"), own_router("two")
    assert before == same
    assert before["spec"]["template"] != after["spec"]["template"]
    assert before["spec"]["selector"] == after["spec"]["selector"], "which cannot be changed"


# ---- address families ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "serves", "managed", "host"),
    [
        ([], "0.0.0.0", "0.0.0.0", "$(POD_IP)"),
        (["10.0.0.7"], "0.0.0.0", "0.0.0.0", "$(POD_IP)"),
        (["10.0.0.7", "fd00::7"], "::", "0.0.0.0", "$(POD_IP)"),
        (["fd00::7", "10.0.0.7"], "::", "::", "[$(POD_IP)]"),
        (["fd00::7"], "::", "::", "[$(POD_IP)]"),
    ],
)
def test_workers_listen_where_kubelets_and_routers_ask(
    addresses: list[str], serves: str, managed: str, host: str
) -> None:
    config = CONFIG.model_copy(update={"pod_ips": addresses})
    frozen = revision()
    file = yaml.safe_load(config_map_data(frozen, "team-a.llama", config)["worker.yaml"])
    assert (file["host"], file["management_host"]) == (serves, managed)
    pod = group.stateful_set(SERVICE, frozen, 3, 7, config)["spec"]["template"]["spec"]
    assert environment(pod)["RADIXGROVE_ADVERTISE_URL"] == f"http://{host}:8100"
