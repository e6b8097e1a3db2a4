"""What people read of a service: conditions and their reasons, counts, Events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from radixgrove.operator.api import names, times
from radixgrove.operator.api.config import OperatorConfig, PodDefaults
from radixgrove.operator.api.objects import Taint
from radixgrove.operator.api.spec import InferenceServiceSpec, PodFields, Pods
from radixgrove.operator.api.status import (
    GroupPhase,
    GroupStatus,
    InferenceServiceStatus,
    ModelStatus,
)
from radixgrove.operator.kube.events import event
from radixgrove.operator.planning.conditions import (
    StatusInput,
    compute,
    difference,
    starting,
    transitions,
)
from radixgrove.operator.planning.demand import Node, NodeDemand
from radixgrove.operator.planning.diagnosis import Problem, pod_problem, problem
from radixgrove.operator.planning.image_check import ImageCheck
from radixgrove.operator.planning.model_cache import CacheStep
from radixgrove.operator.planning.model_names import Grant
from radixgrove.operator.planning.observed import Group, ObservedState, Pod, group_of, pod_of
from radixgrove.operator.planning.plan import Plan
from radixgrove.operator.planning.service_view import ServiceView
from radixgrove.operator.render.revision import InvalidEngine, InvalidOverrides, ModelAt
from radixgrove.service import exit_codes
from tests.operator.operator_builders import CONFIG, SERVICE, spec

NOW = 1_000_000.0
EMPTY = InferenceServiceStatus()
VIEW_FIELDS = {field.name for field in fields(ServiceView)}
CACHED = CacheStep(ModelStatus(name="llama"), ready=True, reason="Cached")


def record(index: int, phase: GroupPhase = GroupPhase.READY, **fields: Any) -> GroupStatus:
    return GroupStatus(index=index, attempt=index + 1, revision="r1", phase=phase).model_copy(
        update=fields
    )


def facts(
    *records: GroupStatus,
    resource: InferenceServiceSpec | None = None,
    groups: Sequence[Group] = (),
    blocked: bool = False,
    waits_for: str = "",
    config: OperatorConfig = CONFIG,
    **more: Any,
) -> StatusInput:
    """Fields are those of the view, or else of the input."""
    of_view = {name: more.pop(name) for name in VIEW_FIELDS & more.keys()}
    view = ServiceView(
        service=SERVICE,
        spec=resource or spec(replicas=len(records)),
        created=NOW,
        generation=5,
        before=EMPTY,
        now=NOW,
        target="r1",
        model=CACHED,
    )
    return StatusInput(
        view=replace(view, **of_view),
        plan=Plan(records=list(records), blocked=blocked, waits_for=waits_for, last_attempt=7),
        groups=groups,
        config=config,
        url="http://router/v1",
        autoscaling=None,
        **more,
    )


def computed(
    given: StatusInput, before: InferenceServiceStatus = EMPTY, now: float = NOW
) -> InferenceServiceStatus:
    return compute(replace(given, view=replace(given.view, before=before, now=now)))


def conditions(given: StatusInput, before: InferenceServiceStatus = EMPTY) -> dict[str, str]:
    """`True/Serving` by type."""
    found = computed(given, before, NOW).conditions
    return {c.type: f"{c.status}/{c.reason}" for c in found}


def message(given: StatusInput, kind: str = "Ready") -> str:
    return next(c.message for c in computed(given, EMPTY, NOW).conditions if c.type == kind)


def group_with(**fields: Any) -> Group:
    """One group of one pod that is not ready, for the reason given."""
    pod = Pod("llama-0-a1-0", "uid", 0, **fields)
    return Group("llama-0-a1", "set", 0, 1, "r1", 1, NOW, pods=(pod,))


def slow_start(ran: float) -> Group:
    """One with a container that ended after `ran` seconds, and may start for 45 minutes."""
    made = group_with(restarts=1, ran=ran, exited="loading\nlayer 71 of 80")
    return replace(made, startup=2700.0)


# ---- counts --------------------------------------------------------------------------------------


def test_counts_tell_present_ready_and_updated_groups_apart() -> None:
    status = computed(
        facts(
            record(0),
            record(1, revision="r0"),
            record(2, GroupPhase.STARTING),
            record(3, GroupPhase.WAITING),
            resource=spec(replicas=4, hardware={"nodes": 2, "gpusPerNode": 8}),
        ),
        EMPTY,
        NOW,
    )
    assert (status.desired_replicas, status.replicas) == (4, 3)
    assert (status.ready_replicas, status.updated_replicas) == (2, 1)
    assert status.summary == "2/4"
    assert status.observed_generation == 5
    assert status.last_attempt == 7
    assert status.parallelism is not None
    assert (status.parallelism.tp, status.parallelism.pp) == (8, 2)
    assert [group.index for group in status.groups] == [0, 1, 2, 3]


def test_an_autoscaler_counts_pods_of_rank_0_alone() -> None:
    wanted = names.labels("llama", names.WORKER) | {names.POD_INDEX: "0"}
    selector = computed(facts(record(0)), EMPTY, NOW).selector
    assert dict(part.split("=") for part in selector.split(",")) == wanted


# ---- why it is not ready -------------------------------------------------------------------------

STARTING = record(0, GroupPhase.STARTING)
WAITING = record(0, GroupPhase.WAITING)
UNSCHEDULABLE = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
QUOTA = 'pods "x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=8'


@pytest.mark.parametrize(
    ("given", "reason", "said"),
    [
        (
            facts(STARTING, groups=[group_with(unschedulable=UNSCHEDULABLE)]),
            "InsufficientGPUs",
            "4 Insufficient nvidia.com/gpu.",
        ),
        (
            facts(STARTING, groups=[group_with(unschedulable="node(s) had untolerated taint")]),
            "Unschedulable",
            "untolerated taint",
        ),
        (facts(WAITING, waits_for="team-b/other"), "InsufficientGPUs", "team-b/other"),
        (
            facts(record(0, GroupPhase.WAITING, yields=1, detail="gave up 1 of 2 placed pods")),
            "InsufficientGPUs",
            "gave up 1 of 2",
        ),
        (
            facts(STARTING, groups=[group_with(waiting=("ErrImagePull", "no such image"))]),
            "ImagePull",
            "no such image",
        ),
        (
            facts(STARTING, groups=[group_with(waiting=("CreateContainerConfigError", "no key"))]),
            "ContainerConfig",
            "no key",
        ),
        (
            facts(
                STARTING,
                groups=[
                    group_with(waiting=("CrashLoopBackOff", "back-off"), exited="a\nno memory")
                ],
            ),
            "EngineFailed",
            "no memory",
        ),
        (
            facts(STARTING, groups=[group_with(restarts=1, exited="rank 0", out_of_memory=True)]),
            "OutOfMemory",
            "rank 0",
        ),
        (
            facts(STARTING, groups=[replace(group_with(), refused="violates PodSecurity")]),
            "PodRefused",
            "violates PodSecurity",
        ),
        (
            facts(STARTING, groups=[replace(group_with(), refused=QUOTA)]),
            "QuotaBlocked",
            "exceeded quota",
        ),
        (
            facts(record(0, GroupPhase.FAILED, failures=11, detail="11 failures in a row")),
            "RestartBudgetExhausted",
            "group 0: 11 failures in a row; recovery.maxRestarts is 10: set the annotation "
            "serving.radixgrove.io/restart to a new value",
        ),
        (
            facts(
                record(0, GroupPhase.FAILED, failures=1, detail="rank 1 ended"),
                resource=spec(recovery={"policy": "None"}),
            ),
            "GroupFailed",
            "rank 1 ended; recovery.policy is None: set the annotation",
        ),
        (
            facts(
                record(
                    0,
                    GroupPhase.WAITING,
                    retry_at="2026-01-01T00:00:00Z",
                    failures=3,
                    program_failures=2,
                    detail="NCCL",
                )
            ),
            "BackOff",
            "2026-01-01T00:00:00Z (failure 3 in a row, 2 of its programs, 10 allowed): NCCL",
        ),
        (facts(STARTING, phases=["group 0: weights: 3 of 7"]), "Starting", "weights: 3 of 7"),
        (
            facts(
                record(0, GroupPhase.STARTING, failures=1, last_failure="node-3 does not answer"),
                phases=["group 0: weights: 3 of 7"],
            ),
            "Recovering",
            "group 0 is made again, since node-3 does not answer; group 0: weights: 3 of 7",
        ),
        (
            facts(
                STARTING,
                groups=[replace(group_with(started_at=NOW), startup=2700.0)],
                phases=["group 0: weights: 3 of 7"],
            ),
            "Starting",
            f"weights: 3 of 7; until {times.to_seconds_text(NOW + 2700)} (startup.timeout: 45m)",
        ),
        (
            facts(STARTING, groups=[slow_start(ran=2712.0)]),
            "StartupTimeout",
            "raise startup.timeout (45m); its last message: layer 71 of 80",
        ),
        (
            facts(STARTING, groups=[slow_start(ran=90_000.0)]),
            "EngineFailed",  # it had run for a day
            "layer 71 of 80",
        ),
        (
            facts(
                WAITING, model=CacheStep(ModelStatus(), reason="ModelNotFound", message="no such")
            ),
            "ModelNotFound",
            "no such",
        ),
        (
            facts(WAITING, invalid=InvalidEngine("page_size: too large")),
            "InvalidEngine",
            "page_size",
        ),
        (
            facts(WAITING, invalid=InvalidOverrides("podOverrides.spec must be an object")),
            "InvalidPodOverrides",
            "podOverrides.spec",
        ),
        (facts(WAITING, failures=["patch services: forbidden (403)"]), "RequestRefused", "403"),
        (facts(resource=spec(suspend=True)), "Suspended", "suspend"),
        (facts(resource=spec(replicas=0)), "ScaledToZero", "replicas is 0"),
        (
            facts(record(0), router=Problem("RouterNotReady", "it starts")),
            "RouterNotReady",
            "it starts",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_is_said_with_a_reason(given: StatusInput, reason: str, said: str) -> None:
    assert conditions(given)["Ready"] == f"False/{reason}"
    assert said in message(given)


# ---- what would mend it --------------------------------------------------------------------------

GPUS_OF_16 = NodeDemand({"nvidia.com/gpu": 16}, {"nvidia.com/gpu.product": "B200"})
NODES = {"n0": Node("n0", devices={"nvidia.com/gpu": 8}, labels={"nvidia.com/gpu.product": "H100"})}
MISSING = 'MountVolume.SetUp failed for volume "{}" : {} is not there'
RWOP = (
    "1 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode"
)
SCRATCH = {"name": "scratch", "persistentVolumeClaim": {"claimName": "scratch"}}


@pytest.mark.parametrize(
    ("group", "fields", "said"),
    [
        (
            replace(group_with(unschedulable=UNSCHEDULABLE), demand=GPUS_OF_16),
            {"hardware": {"gpusPerNode": 16, "memory": "1Ti"}},
            "its pod asks its node for 16 nvidia.com/gpu (no node has more than 8), 1Ti of memory, "
            "the label nvidia.com/gpu.product=B200 (no node has it): change hardware, or add nodes",
        ),
        (
            group_with(unschedulable="2 Insufficient cpu."),
            {"hardware": {"device": "cpu", "cpu": "64", "nodes": 2}},
            "each of its 2 pods asks its node for 64 CPUs",
        ),
        (
            group_with(waiting=("ErrImagePull", "no such image")),
            {"image": "rg/worker:typo"},
            "named by image; Secrets of its registry, in this namespace: "
            "pods.workers.imagePullSecrets, or image.pullSecrets of the chart",
        ),
        (
            group_with(waiting=("ErrImagePull", "no such image")),
            {},
            "named by image.registry, image.worker and image.tag of the chart",
        ),
        (
            group_with(waiting=("ErrImagePull", 'pulling image "models/x:1": not found')),
            {"model": {"source": "oci://models/x:1"}},
            "model.source: oci://models/x:1; Secrets of its registry, in this namespace: pods",
        ),
        (
            group_with(restarts=1, exit_code=exit_codes.MODEL, exited="no directory"),
            {"model": {"source": "pvc://models/typo"}},
            "model.source: pvc://models/typo",
        ),
        (
            group_with(
                restarts=1,
                exit_code=exit_codes.MODEL,
                exited="chat_template '/chat-template/chat_template.jinja': not valid Jinja",
            ),
            {"model": {"source": "pvc://models/x", "chatTemplate": {"configMap": "ours"}}},
            "model.chatTemplate.configMap: ours",
        ),
        (
            group_with(unschedulable="2 Insufficient memory."),
            {"hardware": {"nodes": 2, "memory": "3Gi"}, "engine": {"hostCacheGib": 2000}},
            "each of its 2 pods asks its node for 3Gi of memory, 1000Gi of memory for "
            "engine.hostCacheGib: change hardware, or engine.hostCacheGib, or add nodes",
        ),
        (
            group_with(not_mounted=MISSING.format("model", "/models/typo")),
            {"model": {"source": "file:///models/typo"}},
            "model.source: file:///models/typo",
        ),
        (
            group_with(restarts=1, exited="max_model_len 9000 exceeds the model's 8192"),
            {},
            "max_model_len is engine.contextLength of the service",
        ),
        (
            group_with(restarts=1, exited="tp 2 does not divide the model's 9 query heads"),
            {"parallelism": {"tp": 2}, "hardware": {"gpusPerNode": 2}},
            "tp is parallelism.tp of the service",
        ),
        (
            group_with(restarts=1, exited="Error: zmq is not installed"),
            {"image": "rg/router:1"},
            "the image is named by image: a worker's is needed",
        ),
        (
            group_with(restarts=1, exited="killed", out_of_memory=True),
            {"hardware": {"device": "cpu", "memory": "100Mi"}},
            "raise hardware.memory: 100Mi",
        ),
        (replace(group_with(), refused=QUOTA), {}, "raise that ResourceQuota, or ask for less"),
        (
            replace(group_with(), refused="failed quota: q: must specify limits.cpu for: worker"),
            {},
            "set it in podOverrides, for the container `worker`, or for all pods of the namespace",
        ),
        (
            replace(group_with(), refused='violates PodSecurity "restricted": runAsUser=0'),
            {},
            "podOverrides asks for it",
        ),
        (
            replace(group_with(), refused="no PriorityClass with name typo was found"),
            {"pods": {"workers": {"priorityClassName": "typo"}}},
            "named by pods.workers.priorityClassName: make it, or name another one",
        ),
        (
            replace(group_with(), refused="maximum memory usage per Container is 1Gi"),
            {},
            "a LimitRange of the namespace: change hardware, or that LimitRange",
        ),
        (
            replace(group_with(), refused='requests: "4": must be less than or equal to cpu limit'),
            {},
            "a LimitRange of the namespace: change hardware, or that LimitRange",
        ),
        (
            replace(group_with(), refused="denied request: pods need the label team"),
            {},
            "pods.workers and podOverrides may add what is asked for",
        ),
        (
            group_with(waiting=("CreateContainerConfigError", 'secret "typo" not found')),
            {
                "pods": {
                    "downloads": {"env": [{"valueFrom": {"secretKeyRef": {"name": "typo"}}}]},
                    "workers": {"env": [{"valueFrom": {"secretKeyRef": {"name": "typo"}}}]},
                }
            },
            "named by pods.workers.env[0].valueFrom.secretKeyRef.name: make it, or name another",
        ),
        (
            group_with(not_mounted=MISSING.format("chat-template", 'configmap "typo"')),
            {"model": {"source": "pvc://models/x", "chatTemplate": {"configMap": "typo"}}},
            "named by model.chatTemplate.configMap: make it, or name another one",
        ),
        (
            group_with(restarts=1, never_began=True, exited='exec: "radixgrove": not found'),
            {"image": "rg/router:1"},
            "the image is named by image, its command by podOverrides",
        ),
        (
            replace(
                group_with(unschedulable="2 node(s) didn't match pod affinity rules"),
                demand=NodeDemand({}, {"pool": "typo"}),
            ),
            {"hardware": {"nodes": 2}, "topologyKey": "example.com/rack"},
            "each of its 2 pods asks its node for the label pool=typo (no node has it), the label "
            "example.com/rack, as all of its group have it (no node has it): change podOverrides, "
            "or topologyKey, or add nodes",
        ),
        (
            replace(
                group_with(unschedulable="1 node(s) had untolerated taint {team: b}"),
                demand=NodeDemand({"nvidia.com/gpu": 1}),
            ),
            {},
            "its pod asks its node for 1 nvidia.com/gpu: change hardware, or "
            "pods.workers.tolerations, or add nodes",
        ),
        (
            group_with(unschedulable="2 node(s) didn't match Pod's node affinity/selector"),
            {"pods": {"workers": {"affinity": {"nodeAffinity": {}}}}},
            "change pods.workers.affinity, or add nodes",
        ),
        (
            group_with(unschedulable=RWOP),
            {"model": {"source": "pvc://models/x"}},
            "its claims are named by model.source: pvc://models/x: one that several pods read must "
            "be ReadOnlyMany or ReadWriteMany",
        ),
        (
            group_with(not_mounted='Multi-Attach error for volume "pvc-1": used by pod(s) other'),
            {"model": {"source": "pvc://models/x"}},
            "its claims are named by model.source: pvc://models/x: one that several pods read must",
        ),
        (
            group_with(unschedulable="2 node(s) didn't match PersistentVolume's node affinity"),
            {"pods": {kind: {"volumes": [SCRATCH]} for kind in Pods.model_fields}},
            "its claims are named by model.cache, "
            "pods.workers.volumes[0].persistentVolumeClaim.claimName: each needs a volume, on a "
            "node that the pod may run on",
        ),
        (
            group_with(unschedulable='persistentvolumeclaim "scratch" not found'),
            {"pods": {"workers": {"volumes": [SCRATCH]}}},
            "named by pods.workers.volumes[0].persistentVolumeClaim.claimName: make it, or name",
        ),
        (
            replace(group_with(), refused='violates PodSecurity "restricted": hostPath'),
            {"model": {"source": "file:///models/x"}},
            "model.source: file:///models/x asks for it",
        ),
        (
            replace(group_with(), refused='violates PodSecurity "restricted": IPC_LOCK'),
            {"hardware": {"network": "ib"}},
            "hardware.network: ib asks for it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_mend_it_is_said_in_the_resources_own_fields(
    group: Group, fields: dict[str, Any], said: str
) -> None:
    given = facts(
        STARTING, groups=[group], resource=spec(**fields), observed=ObservedState(nodes=NODES)
    )
    trouble = problem(group)
    assert trouble is not None
    for kind in ("Ready", "Progressing", "Degraded"):
        assert f"{trouble.message} ({said}" in message(given, kind)


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (
            replace(group_with(), refused="no PriorityClass with name typo was found"),
            "named by pods.priorityClassName of the chart: make it, or name another one",
        ),
        (
            replace(group_with(), refused='RuntimeClass "nvidia" not found'),
            "named by pods.runtimeClassName of the chart",
        ),
        (
            replace(group_with(), refused='error looking up service account a/robot: "robot"'),
            "named by pods.workers.serviceAccountName of the chart",
        ),
        (
            group_with(not_mounted=MISSING.format("ca", 'configmap "our-ca"')),
            "named by pods.caBundle of the chart: make it, or name another one",
        ),
        (
            replace(
                group_with(unschedulable="didn't match Pod's node affinity/selector"),
                demand=NodeDemand({}, {"pool": "gpu", "zone": "a"}),
            ),
            "change pods.nodeSelector of the chart, or pods.workers.nodeSelector of the chart",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_chart_names_and_is_not_there_is_said_as_its_value(
    group: Group, said: str
) -> None:
    pods = PodDefaults(
        priority_class="typo",
        runtime_class="nvidia",
        ca_bundle="our-ca",
        node_selector={"pool": "gpu"},
        workers=PodFields(service_account_name="robot", node_selector={"zone": "a"}),
    )
    config = CONFIG.model_copy(update={"pods": pods})
    assert said in message(facts(STARTING, groups=[group], config=config))


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (
            "exceeded quota: q, requested: requests.storage=200Gi",
            "or ask for less: model.cache.size",
        ),
        ("exceeded quota: q, requested: count/services=1", "(raise that ResourceQuota)"),
        ("maximum storage usage per PersistentVolumeClaim is 1Gi", "change model.cache.size of"),
        ('admission webhook "x" denied the request: no team', "(a policy of the cluster: exempt"),
        ("policy 'x' denied request: no team", "app.kubernetes.io/managed-by=radixgrove, or meet"),
        ("Redis does not answer; routers keep what they know", "(redis.url of the chart names it)"),
    ],
)
def test_what_would_mend_a_refused_request_is_said(refused: str, said: str) -> None:
    given = facts(WAITING, failures=[refused, refused])
    for kind in ("Ready", "Degraded"):
        assert f"{refused}; {refused} (" in message(given, kind)
        assert message(given, kind).count(said) == 1


def test_a_policy_of_the_charts_own_says_itself_what_would_do() -> None:
    refused = "policy 'radixgrove-pods' denied request: the operator's pods are not privileged"
    assert message(facts(WAITING, failures=[refused])) == refused


def test_a_template_that_the_api_server_refuses_leads_to_what_was_laid_over_it() -> None:
    words = "patch statefulsets/a/b: is invalid: spec.template.spec.containers[1].image: Required"
    over = {"spec": {"containers": [{"name": "workers"}]}}
    given = facts(WAITING, failures=[words], resource=spec(podOverrides=over))
    for kind in ("Ready", "Degraded"):
        assert message(given, kind) == (
            f"{words} (see podOverrides; the worker's container is called worker)"
        )


def test_taints_are_named_of_nodes_that_are_ready_and_would_do_without_them() -> None:
    def said(*taints: Taint, gpus: int = 1, pool: str = "a") -> str:
        devices = {"nvidia.com/gpu": gpus}
        node = Node("n0", labels={"pool": pool}, taints=taints, devices=devices)
        group = replace(
            group_with(unschedulable="1 node(s) had untolerated taint(s)"),
            demand=NodeDemand({"nvidia.com/gpu": 1}, {"pool": "a"}),
        )
        observed = ObservedState(nodes={"n0": node})
        return message(facts(STARTING, groups=[group], resource=spec(), observed=observed))

    lost = Taint(key="node.kubernetes.io/unreachable", effect="NoExecute")
    team = Taint(key="team", value="b", effect="NoSchedule")
    assert "or pods.workers.tolerations (of team=b), or add nodes" in said(lost, team)
    assert "tolerations" not in said(lost)
    assert "tolerations" not in said(team, gpus=0)
    assert "tolerations" not in said(team, pool="b")
    assert "pods.workers.tolerations, or add" in said(), "the node is not known with its taint yet"


def test_a_template_that_is_refused_for_a_value_of_the_chart_leads_to_it() -> None:
    words = 'patch statefulsets/a/b: is invalid: volumeMounts[0].name: Not found: "v"'
    pods = PodDefaults(workers=PodFields(volume_mounts=[{"name": "v", "mountPath": "/v"}]))
    given = facts(WAITING, failures=[words], config=CONFIG.model_copy(update={"pods": pods}))
    assert message(given).startswith(f"{words} (see pods.workers of the chart; the worker's")


def test_what_an_older_revision_lacks_is_not_told_by_the_fields_of_this_one() -> None:
    older = replace(group_with(unschedulable=UNSCHEDULABLE), revision="r0")
    old = record(0, GroupPhase.STARTING, revision="r0")
    assert message(facts(old, groups=[older])).endswith(UNSCHEDULABLE)


def test_a_pod_without_a_node_for_want_of_a_claims_volume_is_told_by_the_claim() -> None:
    pending = replace(CACHED, present=False, reason="ClaimPending", message="no volume yet")
    unbound = group_with(unschedulable="pod has unbound immediate PersistentVolumeClaims.")
    given = facts(STARTING, groups=[unbound], model=pending)
    assert conditions(given)["Ready"] == "False/ClaimPending"
    assert message(given) == "no volume yet"


def test_a_model_image_that_cannot_be_pulled_is_not_there() -> None:
    at = ModelAt(source="oci://models/x:1", image="models/x:1")
    model = CacheStep(ModelStatus(), at, ready=True, reason="ImageVolume")
    stuck = group_with(waiting=("ImagePullBackOff", 'Back-off pulling image "models/x:1"'))
    assert conditions(facts(STARTING, groups=[stuck], model=model))["ModelCached"] == (
        "False/ImagePull"
    )
    other = group_with(waiting=("ImagePullBackOff", 'Back-off pulling image "rg/worker:1"'))
    assert conditions(facts(STARTING, groups=[other], model=model))["ModelCached"] == (
        "True/ImageVolume"
    )


@pytest.mark.parametrize("reason", ["Unschedulable", "QuotaBlocked"])
def test_a_claim_that_was_refused_comes_before_the_pod_that_waits_for_it(reason: str) -> None:
    refusal = "patch persistentvolumeclaims/a/model: exceeded quota (403)"
    waiting = CacheStep(ModelStatus(), reason=reason, message="claim not found")
    given = facts(WAITING, model=waiting, failures=[refusal])
    assert conditions(given)["Ready"] == "False/RequestRefused"
    assert refusal in message(given)


def test_a_scheduler_that_looks_at_no_pod_is_named() -> None:
    unseen = replace(group_with(), demand=NodeDemand(scheduler="volcano"))
    said = "the scheduler volcano (schedulerName) has not looked at llama-0-a1-0 yet"
    assert said in message(facts(STARTING, groups=[unseen]))
    assert "scheduler" not in message(facts(STARTING, groups=[group_with()]))


UNKNOWN = Group("llama-1-a2", "set", 1, 2, "r1", 1, NOW)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            facts(record(0, GroupPhase.FAILED, failures=1), record(1), unregistered=[UNKNOWN]),
            "GroupFailed",
        ),
        (
            facts(
                STARTING,
                record(1),
                groups=[group_with(unschedulable=UNSCHEDULABLE)],
                unregistered=[UNKNOWN],
            ),
            "InsufficientGPUs",
        ),
        (
            facts(
                record(1),
                image_check=ImageCheck(hold=True, problem=Problem("ImageCheckFailed", "no")),
                unregistered=[UNKNOWN],
            ),
            "ImageCheckFailed",
        ),
        (
            facts(record(0, GroupPhase.WAITING), record(1), unregistered=[UNKNOWN], waits_for="x"),
            "NotRegistered",
        ),
    ],
    ids=["failed", "trouble", "image", "waits"],
)
def test_what_routers_do_not_know_hides_no_other_trouble(given: StatusInput, reason: str) -> None:
    assert conditions(given)["Ready"] == f"False/{reason}"


def test_only_groups_that_count_as_ready_are_taken_away() -> None:
    failed = record(1, GroupPhase.FAILED, failures=1)
    assert conditions(facts(record(0), failed, unregistered=[UNKNOWN]))["Ready"] == "True/Serving"


# ---- as it should be -----------------------------------------------------------------------------


def test_a_service_whose_groups_and_router_answer_is_settled() -> None:
    assert conditions(facts(record(0), record(1))) == {
        "Ready": "True/Serving",
        "Progressing": "False/Settled",
        "ModelCached": "True/Cached",
        "Degraded": "False/AsExpected",
    }


def test_a_service_serves_without_a_name_that_another_has_and_says_what_it_answers_to() -> None:
    why = ("the model name llama is in use in another namespace",)
    given = facts(record(0), names=Grant(("big",), ("team-a/llama",), why))
    found = computed(given)
    assert (found.model.name, found.model.aliases) == ("big", [])
    assert conditions(given)["Ready"] == "True/Serving"
    assert conditions(given)["Degraded"] == "True/ModelNameTaken"
    (degraded,) = [c for c in found.conditions if c.type == "Degraded"]
    assert degraded.message == (
        f"{why[0]}: set model.name or model.aliases otherwise. It answers to big, team-a/llama"
    )


def test_a_sleeping_service_is_ready() -> None:
    asleep = facts(resource=spec(replicas=0, autoscaling={"min": 0, "max": 2}))
    assert conditions(asleep)["Ready"] == "True/Asleep"


def test_one_ready_group_serves_while_another_starts() -> None:
    found = conditions(facts(record(0), record(1, GroupPhase.STARTING)))
    assert found["Ready"] == "True/Serving"
    assert found["Progressing"] == "True/Starting"
    assert found["Degraded"] == "False/AsExpected", "a first start is no loss"


def test_a_lost_group_degrades_a_service_that_still_serves() -> None:
    lost = record(1, GroupPhase.WAITING, failures=1, retry_at="2026-01-01T00:00:00Z")
    found = conditions(facts(record(0), lost))
    assert (found["Ready"], found["Degraded"]) == ("True/Serving", "True/BackOff")


def test_a_recovery_of_long_ago_does_not_degrade_a_service_that_grows() -> None:
    found = conditions(facts(record(0, restarts=3), record(1, GroupPhase.STARTING)))
    assert (found["Progressing"], found["Degraded"]) == ("True/Starting", "False/AsExpected")


def test_a_group_that_is_given_up_is_no_progress() -> None:
    kept = facts(
        record(0, GroupPhase.FAILED, failures=1, detail="rank 1 ended"),
        resource=spec(recovery={"policy": "None"}),
    )
    assert conditions(kept)["Progressing"] == "False/GroupFailed"


def test_a_blocked_rollout_says_what_hinders_the_new_revision() -> None:
    given = facts(
        record(0, revision="r0"),
        record(1, GroupPhase.PENDING),
        resource=spec(replicas=1),
        groups=[group_with(waiting=("ErrImagePull", "no such image"))],
        blocked=True,
    )
    found = conditions(given)
    assert found["Ready"] == "True/Serving"
    assert found["Progressing"] == "False/RolloutBlocked"
    assert found["Degraded"] == "True/ImagePull"
    assert "no such image" in message(given, "Progressing")


@pytest.mark.parametrize(
    ("waits", "reason"),
    [
        (replace(group_with(), refused=QUOTA), "QuotaBlocked"),
        (group_with(unschedulable=UNSCHEDULABLE), "InsufficientGPUs"),
    ],
)
def test_a_rollout_that_finds_no_room_for_its_surge_says_so(waits: Group, reason: str) -> None:
    given = facts(record(0, revision="r0"), record(1, GroupPhase.PENDING), groups=[waits])
    found = conditions(given)
    assert (found["Ready"], found["Progressing"]) == ("True/Serving", f"True/{reason}")
    assert message(given, "Progressing").startswith("1 groups are of an old revision: ")


def test_a_rollout_under_way_and_a_leaving_group_are_progress() -> None:
    assert conditions(facts(record(0, revision="r0")))["Progressing"] == "True/RollingOut"
    leaving = facts(record(0), record(1), resource=spec(replicas=1))
    assert conditions(leaving)["Progressing"] == "True/Draining"


def test_groups_of_a_suspended_service_leave_first() -> None:
    given = facts(record(0), resource=spec(suspend=True), groups=[group_with()])
    found = conditions(given)
    assert (found["Ready"], found["Progressing"]) == ("False/Suspended", "True/Draining")


def test_nothing_becomes_ready_that_routers_could_not_be_told_of() -> None:
    untold = facts(record(0), routers_behind=True, failures=["Redis does not answer"])
    assert conditions(untold)["Ready"] == "False/RequestRefused"
    assert message(untold).startswith("Redis does not answer")
    before = computed(facts(record(0)), EMPTY, NOW)
    served = conditions(untold, before)
    assert served["Ready"] == "True/Serving", "by what routers know"
    assert served["Degraded"] == "True/RequestRefused"


# ---- transitions ---------------------------------------------------------------------------------


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = computed(facts(STARTING), EMPTY, NOW)
    later = computed(facts(STARTING, phases=["group 0: warming up"]), first, NOW + 60)
    assert seconds_of(later)["Ready"] == times.from_text(times_text(first)["Ready"])
    ready = computed(facts(record(0)), later, NOW + 90)
    assert seconds_of(ready)["Ready"] == NOW + 90
    assert seconds_of(ready)["Degraded"] == NOW
    assert computed(facts(record(0)), ready, NOW + 600) == ready, "at rest nothing is written"


def times_text(status: InferenceServiceStatus) -> dict[str, str]:
    return {c.type: c.last_transition_time for c in status.conditions}


def seconds_of(status: InferenceServiceStatus) -> dict[str, float | None]:
    return {kind: times.from_text(text) for kind, text in times_text(status).items()}


def test_every_transition_is_an_event_once() -> None:
    starting = computed(facts(STARTING), EMPTY, NOW)
    broken = computed(facts(record(0, GroupPhase.FAILED, failures=99)), starting, NOW + 1)
    ready = computed(facts(record(0)), broken, NOW + 2)
    assert {reason for _, reason, _ in transitions(EMPTY, starting)} >= {"Starting", "Cached"}
    events = {(kind, reason) for kind, reason, _ in transitions(starting, broken)}
    assert ("Warning", "RestartBudgetExhausted") in events
    assert {(kind, reason) for kind, reason, _ in transitions(broken, ready)} == {
        ("Normal", "Serving"), ("Normal", "Settled"), ("Normal", "AsExpected"),
    }  # fmt: skip
    assert transitions(ready, ready) == []


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (facts(STARTING, groups=[group_with(unschedulable=UNSCHEDULABLE)]), "Warning"),
        (facts(STARTING, groups=[group_with(waiting=("ErrImagePull", "no"))]), "Warning"),
        (facts(WAITING, model=CacheStep(ModelStatus(), reason="ModelNotFound")), "Warning"),
        (facts(WAITING, model=CacheStep(ModelStatus(), reason="Downloading")), "Normal"),
        (facts(STARTING), "Normal"),
        (facts(record(0, revision="r0")), "Normal"),
        (facts(resource=spec(suspend=True)), "Normal"),
    ],
)
def test_only_what_needs_somebody_is_a_warning(given: StatusInput, kind: str) -> None:
    events = transitions(EMPTY, computed(given, EMPTY, NOW))
    assert ("Warning" in {found for found, _, _ in events}) == (kind == "Warning")


def test_an_event_is_about_the_resource_and_the_same_words_are_one_object() -> None:
    resource = {"metadata": {"name": "llama", "namespace": "team-a", "uid": "u1"}}
    said = event(resource, "Warning", "ImagePull", "no such image", NOW)
    assert said["involvedObject"]["uid"] == "u1"
    assert said["metadata"]["namespace"] == "team-a"
    assert (said["type"], said["reason"], said["message"]) == (
        "Warning", "ImagePull", "no such image",
    )  # fmt: skip
    again = event(resource, "Warning", "ImagePull", "no such image", NOW + 0.2)
    later = event(resource, "Warning", "ImagePull", "no such image", NOW + 60)
    assert again["metadata"] == said["metadata"]
    assert later["metadata"]["name"] != said["metadata"]["name"]


# ---- from the API server's objects ---------------------------------------------------------------


def pod_object(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "llama-0-a1-1",
            "uid": "uid",
            "labels": {names.POD_INDEX: "1"},
            "ownerReferences": [{"uid": "set", "controller": True}],
        },
        "spec": {"nodeName": "gpu-1"},
        "status": status,
    }


def container(name: str = "worker", restarts: int = 0, **states: Any) -> dict[str, Any]:
    return {"name": name, "restartCount": restarts, **states}


def test_a_pods_restarts_and_last_words_are_those_of_its_worker() -> None:
    seconds_of = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:45:07Z"}
    ended = {"terminated": {"exitCode": 1, "message": "CUDA out of memory"} | seconds_of}
    running = {"running": {"startedAt": "2026-01-01T00:46:00Z"}}
    seen = pod_of(
        pod_object(
            phase="Running",
            podIP="10.0.0.7",
            conditions=[{"type": "Ready", "status": "False"}],
            containerStatuses=[
                container("sidecar", restarts=9, state={"running": {}}),
                container(restarts=2, state=running, lastState=ended),
            ],
        )
    )
    assert (seen.rank, seen.node, seen.address) == (1, "gpu-1", "10.0.0.7")
    assert (seen.running, seen.ready, seen.restarts) == (True, False, 2)
    assert (seen.started_at, seen.ran) == (times.from_text("2026-01-01T00:46:00Z"), 2707.0)
    found = pod_problem(seen)
    assert found is not None
    assert (found.reason, found.message) == ("EngineFailed", "llama-0-a1-1: CUDA out of memory")


def test_of_a_log_in_json_only_the_message_is_shown() -> None:
    lines = [
        {"level": "info", "message": "loading"},
        {"level": "error", "message": "the engine ended", "exception": "Traceback\nOSError: gone"},
    ]
    log = "\n".join(json.dumps(line) for line in lines)
    ended = {"terminated": {"exitCode": 1, "message": log}}
    seen = pod_of(pod_object(containerStatuses=[container(restarts=1, state={}, lastState=ended)]))
    found = pod_problem(seen)
    assert found is not None
    assert found.message == "llama-0-a1-1: the engine ended: OSError: gone"


def test_what_a_process_says_as_it_ends_does_not_hide_why() -> None:
    lines = [
        {"level": "error", "message": "rank 0 exited: max_model_len exceeds the model's 8192"},
        {"level": "info", "message": "draining 0 requests"},
        {"level": "info", "message": "worker ended"},
    ]
    log = "\n".join(json.dumps(line) for line in lines)
    found = pod_problem(pod_ended(log))
    assert found is not None
    assert found.message == f"llama-0-a1-1: {lines[0]['message']}"
    crashed = pod_problem(pod_ended(f"{log}\nSegmentation fault"))
    assert crashed is not None
    assert crashed.message == "llama-0-a1-1: Segmentation fault"


def test_a_process_that_was_killed_for_want_of_memory_is_told_from_one_that_failed() -> None:
    found = pod_problem(pod_ended("rank 0 was killed by SIGKILL", reason="OOMKilled"))
    assert found == Problem("OutOfMemory", "llama-0-a1-1: rank 0 was killed by SIGKILL")
    assert pod_problem(pod_ended("", reason="OOMKilled")) == (
        Problem("OutOfMemory", "llama-0-a1-1: OOMKilled")
    )


def pod_ended(log: str, reason: str = "Error") -> Pod:
    ended = {"terminated": {"exitCode": 1, "message": log, "reason": reason}}
    return pod_of(pod_object(containerStatuses=[container(restarts=1, state={}, lastState=ended)]))


def test_a_router_that_ends_again_and_again_leaves_its_last_words() -> None:
    ended = {"terminated": {"exitCode": 2, "message": "api_keys_file: line 3 has no key"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
    status = container("router", restarts=5, state=waiting, lastState=ended)
    found = pod_problem(pod_of(pod_object(containerStatuses=[status])))
    assert found is not None
    assert "line 3 has no key" in found.message


# ---- the model, as the pods find it --------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "cached"),
    [
        ({"restarts": 1, "exited": "model '/model/x' is not a directory", "exit_code": 5},
         "False/ModelUnusable"),
        ({"restarts": 1, "exited": "CUDA out of memory", "exit_code": 1}, "True/Cached"),
        ({"restarts": 1, "exited": "chat_template '/chat-template/x': no Jinja", "exit_code": 5},
         "True/Cached"),
        ({"not_mounted": 'MountVolume.SetUp failed for volume "model" : /srv/x is not a directory'},
         "False/VolumeNotMounted"),
        ({"not_mounted": 'MountVolume.SetUp failed for volume "tls" : secret not found'},
         "True/Cached"),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_that_pods_do_not_find_is_not_cached(pod: dict[str, Any], cached: str) -> None:
    given = facts(STARTING, groups=[group_with(**pod)])
    assert conditions(given)["ModelCached"] == cached
    assert conditions(given)["Degraded"].startswith("True/")
    assert (pod.get("exited") or pod["not_mounted"]) in message(given)


def test_a_start_ends_when_its_probe_has_passed() -> None:
    running = {"running": {"startedAt": "2026-01-01T00:46:00Z"}}
    passed = pod_of(pod_object(containerStatuses=[container(state=running, started=True)]))
    loading = pod_of(pod_object(containerStatuses=[container(state=running, started=False)]))
    assert (passed.started_at, loading.started_at) == (
        None,
        times.from_text("2026-01-01T00:46:00Z"),
    )


@pytest.mark.parametrize("key", ["initContainerStatuses", "containerStatuses"])
def test_whichever_container_does_not_start_is_told(key: str) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "back-off"}}
    seen = pod_of(pod_object(**{key: [container("other", state=waiting)]}))
    assert seen.waiting == ("ImagePullBackOff", "back-off")
    creating = {"waiting": {"reason": "ContainerCreating"}}
    assert pod_of(pod_object(**{key: [container(state=creating)]})).waiting == ("", "")


def test_a_group_that_merely_starts_has_no_problem() -> None:
    creating = container(state={"waiting": {"reason": "PodInitializing"}})
    probe = {"periodSeconds": 5, "failureThreshold": 540}
    worker = {"name": "worker", "startupProbe": probe}
    stateful_set = {
        "metadata": {
            "name": "llama-0-a1",
            "uid": "set",
            "labels": {names.GROUP_INDEX: "0", names.ATTEMPT: "1", names.REVISION: "r1"},
        },
        "spec": {"replicas": 1} | {"template": {"spec": {"containers": [worker]}}},
    }
    strangers = pod_object() | {"metadata": {"name": "x", "uid": "y", "ownerReferences": []}}
    seen = group_of(stateful_set, [pod_object(containerStatuses=[creating]), strangers])
    assert seen is not None
    assert [pod.name for pod in seen.pods] == ["llama-0-a1-1"]
    assert (seen.placed, seen.ready, seen.startup) == (1, False, 2700.0)
    assert problem(seen) is None


def test_a_change_names_what_an_object_loses() -> None:
    """Or a merge patch would leave it there, and be written for ever."""
    before = {"autoscaling": {"desired": 1, "lowSince": "x"}, "url": "u", "summary": "1/1"}
    after = {"autoscaling": {"desired": 1}, "url": "u"}
    assert difference(before, after) == {
        "autoscaling": {"desired": 1, "lowSince": None}, "summary": None,
    }  # fmt: skip
    assert difference(after, after) == {}


# ---- how long a start may last before it is trouble ----------------------------------------------


def loading(seconds: float, allowed: float = 1800.0, **fields: Any) -> Group:
    """One group with a container that has run for so long, of the time its start may take."""
    made = group_with(node="n0", running=True, started_at=NOW - seconds, **fields)
    return replace(made, startup=allowed, created=NOW - seconds - 60)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (facts(STARTING, groups=[loading(1700)]), 1),
        (facts(STARTING, groups=[loading(1801)]), 0),
        (facts(record(0, GroupPhase.PENDING)), 1),  # made at this look
        (facts(STARTING, groups=[loading(10, restarts=1, exited="out of memory")]), 0),
        (facts(record(0, GroupPhase.STARTING, failures=1), groups=[loading(10)]), 0),
        (facts(record(0, GroupPhase.STARTING, was_ready=True), groups=[loading(10)]), 0),
        (facts(WAITING), 0),
        (facts(STARTING, groups=[replace(group_with(unschedulable=UNSCHEDULABLE), startup=9)]), 0),
        # Its pods do not even exist, or wait for an image or a volume: that time counts, too.
        (facts(STARTING, groups=[replace(group_with(), startup=60.0, created=NOW - 59)]), 1),
        (facts(STARTING, groups=[replace(group_with(), startup=60.0, created=NOW - 61)]), 0),
        (facts(record(0)), 0),
        (facts(record(0), STARTING.model_copy(update={"index": 1})), 1),
        (facts(resource=spec(replicas=2), model=CacheStep(ModelStatus(), reason="Downloading")), 2),
        (facts(resource=spec(replicas=2), model=CacheStep(ModelStatus(), reason="NoSpace")), 0),
        (facts(resource=spec(replicas=0)), 0),
    ],
)
def test_groups_start_without_trouble_only_for_so_long(given: StatusInput, count: int) -> None:
    assert starting(given) == count


def test_a_service_has_served_from_its_first_readiness_until_it_is_stopped() -> None:
    first = computed(facts(STARTING), EMPTY, NOW)
    ready = computed(facts(record(0)), first, NOW)
    down = computed(facts(record(0, GroupPhase.STARTING, failures=1)), ready, NOW)
    stopped = computed(facts(resource=spec(suspend=True)), down, NOW)
    resumed = computed(facts(STARTING), stopped, NOW)
    assert [s.served for s in (first, ready, down, stopped, resumed)] == [
        False, True, True, False, False,
    ]  # fmt: skip
    asleep = facts(resource=spec(replicas=0, autoscaling={"min": 0, "max": 2}))
    woken = computed(facts(STARTING), computed(asleep, ready, NOW), NOW)
    assert not woken.served


# ---- a service that is down ----------------------------------------------------------------------


def test_a_service_that_was_up_and_is_down_is_degraded_whatever_it_waits_for() -> None:
    up = computed(facts(record(0)), EMPTY, NOW)
    assert conditions(facts(STARTING), up)["Degraded"] == "True/Starting"
    asleep = facts(resource=spec(replicas=0))
    assert conditions(asleep, up)["Degraded"] == "False/AsExpected"
    stopped = facts(resource=spec(suspend=True))
    assert conditions(stopped, up)["Degraded"] == "False/AsExpected"


@pytest.mark.parametrize(
    ("given", "degraded"),
    [
        (
            facts(STARTING, groups=[group_with(waiting=("ErrImagePull", "no such image"))]),
            "True/ImagePull",
        ),
        (
            facts(STARTING, groups=[group_with(unschedulable=UNSCHEDULABLE)]),
            "True/InsufficientGPUs",
        ),
        (
            facts(WAITING, model=CacheStep(ModelStatus(), reason="ClaimNotFound")),
            "True/ClaimNotFound",
        ),
        (facts(WAITING, invalid=InvalidEngine("page_size: too large")), "True/InvalidEngine"),
        (facts(STARTING), "False/AsExpected"),
        (facts(WAITING, model=CacheStep(ModelStatus(), reason="Downloading")), "False/AsExpected"),
        (facts(resource=spec(suspend=True)), "False/AsExpected"),
    ],
)
def test_a_service_that_is_down_for_a_reason_that_needs_action_is_degraded(
    given: StatusInput, degraded: str
) -> None:
    found = conditions(given)
    assert found["Ready"].startswith("False/")
    assert found["Degraded"] == degraded
