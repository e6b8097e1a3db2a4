"""One look at one service after the other: what is read leads to what is written and said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import kubernetes_validate
import pytest

from radixgrove.operator.api import metrics, names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.cluster.redis_users import RedisUsers
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.name_ledger import NameLedger
from radixgrove.operator.controller.reconciler import Incomplete, Reconciler
from radixgrove.operator.controller.store import Key, Store
from radixgrove.operator.kube import renewals
from radixgrove.operator.kube.client import KubeError
from radixgrove.operator.kube.keys import Keys
from radixgrove.operator.kube.ownership import Ownership
from radixgrove.protocol.model_table import ModelEntry
from radixgrove.service.redis_rules import RedisUnavailable
from tests.operator.doubles import Probe, Table, Users
from tests.operator.memory_kube import STARTED, MemoryKube, claim, node
from tests.operator.operator_builders import CONFIG

KEY = ("team-a", "llama")


class Operator:
    def __init__(self, **spec: Any) -> None:
        self.kube, self.table, self.probe = MemoryKube(), Table(), Probe()
        self.store = Store()
        self.enqueued: list[Key] = []
        self.restart()
        self.kube.add(claim(KEY[0]))
        for number in range(4):
            self.node(f"n{number}")
        self.apply(**spec)

    def restart(self, config: OperatorConfig = CONFIG) -> None:
        """A new process, which reads the installation's keys again."""
        ledger = NameLedger(self.kube, self.store, config, self.enqueued.append)
        keys = Keys(self.kube, config)
        keys.ensure()
        self.access = Access(
            self.kube, self.store, keys, cast(RedisUsers, Users()), config,
            self.enqueued.append,
        )  # fmt: skip
        self._reconciler = Reconciler(
            self.kube, self.store, self.access, ledger, cast(RedisStore, self.table),
            cast(WorkerProbe, self.probe), config, lambda key: None, self.enqueued.append,
        )  # fmt: skip

    def apply(self, **spec: Any) -> None:
        wanted = {"model": {"source": "pvc://models/llama"}, **spec}
        live = self.kube.get(names.KIND, *KEY)
        if live is None:
            metadata = {"namespace": KEY[0], "name": KEY[1], "generation": 1}
            live = {"kind": names.KIND, "metadata": metadata}
        self.kube.add(live | {"spec": wanted})

    def node(self, name: str, **fields: str) -> None:
        self.store.node_seen(self.kube.add(node(name, **fields)))

    def context(self) -> list[str]:
        """One reconciliation; what it wrote."""
        self.kube.written.clear()
        self.look()
        return list(self.kube.written)

    def look(self) -> float:
        """One reconciliation; seconds until the next one."""
        self.store.service_seen(self.resource)
        return self._reconciler.reconcile(KEY) or 0.0

    def gone(self) -> None:
        self._reconciler.reconcile(KEY)

    def settle(self, *nodes: str) -> None:
        for _ in range(4):
            self.context()
            self.kube.run_pods(*nodes or ("n0", "n1"))
        assert self.context() == []

    @property
    def resource(self) -> dict[str, Any]:
        return self.kube.the(names.KIND, KEY[1])

    def sets(self) -> list[str]:
        return [found["metadata"]["name"] for found in self.kube.of("StatefulSet")]

    def pod(self, name: str) -> dict[str, Any]:
        return self.kube.the("Pod", name)

    def condition(self, kind: str = "Ready") -> str:
        found = self.resource["status"]["conditions"]
        return next(f"{c['status']}/{c['reason']}" for c in found if c["type"] == kind)

    def message(self, kind: str = "Ready") -> str:
        found = self.resource["status"]["conditions"]
        return str(next(c["message"] for c in found if c["type"] == kind))

    def events(self) -> list[str]:
        return [found["reason"] for found in self.kube.of("Event")]


KUBERNETES = "1.35"
TWO_NODES = {"hardware": {"nodes": 2, "gpusPerNode": 8}}


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (
            {
                "hardware": {"nodes": 4, "gpusPerNode": 8},
                "parallelism": {"tp": 8, "pp": 2, "dp": 2},
            },
            "32 ranks on 4 nodes in dp 2 members",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("source", ["pvc://models/llama", "hf://org/model"])
def test_a_shape_that_the_worker_cannot_run_is_refused_before_anything_is_made(
    spec: dict[str, Any], named: str, source: str
) -> None:
    operator = Operator(model={"source": source}, **spec)
    operator.context()
    assert operator.condition() == "False/UnsupportedShape"
    assert named in operator.message()
    assert operator.condition("Degraded") == "True/UnsupportedShape"
    assert operator.sets() == []
    assert operator.kube.of("Job") == [], "nothing is fetched for it"
    if source.startswith("hf"):
        assert operator.condition("ModelCached") == "False/UnsupportedShape"
    operator.apply(**spec, image="example.com/of-groups:1")
    operator.settle()
    assert operator.condition() == "True/Serving"


def test_a_download_is_told_what_the_model_must_be_fit_for() -> None:
    operator = Operator(
        model={"source": "hf://org/model", "revision": "c" * 40},
        hardware={"gpusPerNode": 2, "gpuType": "H100"},
        parallelism={"tp": 2, "ep": 2},
        engine={"contextLength": 4096, "memoryPercent": 50, "quantize": "fp8"},
    )
    for name, product, size in (("g1", "H100", "81559"), ("g2", "H200", "143771")):
        labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": size}
        operator.store.node_seen(operator.kube.add(node(name, labels=labels)))
    operator.context()
    (job,) = operator.kube.of("Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    arguments = dict(zip(*[iter(container["args"][4:])] * 2, strict=True))
    assert (arguments["--tp"], arguments["--ep"]) == ("2", "2")
    assert arguments["--max-model-len"] == "4096"
    assert arguments["--quantize"] == "fp8"
    assert arguments["--memory"] == str(81559 << 20), "half of two GPUs of that type"


def limited(memory: str | None) -> dict[str, Any]:
    """Fields with another limit of memory."""
    worker = {"name": "worker", "resources": {"limits": {"memory": memory}}}
    return {"podOverrides": {"spec": {"containers": [worker]}}}


def download(**fields: Any) -> list[str]:
    """Arguments of the Job that fetches a service's model."""
    operator = Operator(model={"source": "hf://org/model", "revision": "c" * 40}, **fields)
    labels = {"nvidia.com/gpu.memory": "81559"}
    operator.store.node_seen(operator.kube.add(node("g1", labels=labels)))
    operator.context()
    (job,) = operator.kube.of("Job")
    return list(job["spec"]["template"]["spec"]["containers"][0]["args"])


@pytest.mark.parametrize(
    ("hardware", "parallelism", "memory"),
    [
        ({"nodes": 2, "gpusPerNode": 2}, {"tp": 2, "pp": 2}, 4 * (81559 << 20)),
        ({"gpusPerNode": 4}, {"tp": 2, "dp": 2}, 2 * (81559 << 20)),
        # On a CPU what the pods' limits allow, /dev/shm among it.
        ({"device": "cpu", "nodes": 2, "memory": "3Gi"}, {"tp": 1, "pp": 2}, 2 * (4 << 30)),
        ({"device": "cpu", "gpusPerNode": 2, "memory": "3Gi"}, {"tp": 1, "dp": 2}, 2 << 30),
    ],
    ids=str,
)
def test_a_model_may_take_the_memory_of_all_stages_of_one_member(
    hardware: dict[str, Any], parallelism: dict[str, int], memory: int
) -> None:
    engine = {"memoryPercent": 100}
    arguments = download(hardware=hardware, parallelism=parallelism, engine=engine)
    assert arguments[arguments.index("--memory") + 1] == str(memory)
    assert ("--pp" in arguments) == ("pp" in parallelism)


@pytest.mark.parametrize(
    ("fields", "memory"),
    [
        ({"engine": {"hostCacheGib": 2}}, 4 << 30),  # which comes on top, and is taken
        (limited("1.5Gi"), 3 << 29),
        (limited("7E"), None),  # a form that is not read
        (limited(None), None),
    ],
    ids=str,
)
def test_on_a_cpu_a_model_may_take_what_the_pods_limit_leaves(
    fields: dict[str, Any], memory: int | None
) -> None:
    arguments = download(hardware={"device": "cpu", "memory": "3Gi"}, **fields)
    given = arguments[arguments.index("--memory") + 1] if "--memory" in arguments else None
    assert given == (str(memory) if memory else None)


def test_a_service_is_made_served_and_then_left_alone() -> None:
    operator = Operator(**TWO_NODES)
    operator.settle()
    assert operator.sets() == ["llama-0-a1"]
    assert operator.condition() == "True/Serving"
    assert operator.table.entries["team-a.llama"].attempts == ["llama-0-a1-0"]
    assert "Serving" in operator.events()


def test_a_group_whose_pods_are_late_says_why_they_are_refused() -> None:
    operator = Operator(**TWO_NODES)
    operator.context()
    (group,) = operator.kube.of("StatefulSet")
    meta = group["metadata"]
    words = "capability IPC_LOCK is forbidden"
    refused = {
        "reason": "FailedCreate", "message": words, "lastTimestamp": "2027-01-15T08:00:00Z",
    }  # fmt: skip
    about = {"involvedObject": {"name": meta["name"], "uid": meta["uid"]}}
    where = {"namespace": KEY[0], "name": "refused"}
    operator.kube.add({"kind": "Event", "metadata": where, **about, **refused})
    meta["creationTimestamp"] = "2999-01-01T00:00:00Z"  # too young to be late
    operator.context()
    assert "PodRefused" not in operator.condition()
    meta["creationTimestamp"] = STARTED
    operator.context()
    assert operator.condition() == "False/PodRefused"
    assert "IPC_LOCK" in operator.message()
    made = {
        "reason": "SuccessfulCreate",
        "message": "create Pod successful",
        "lastTimestamp": "2027-01-15T08:00:01Z",
    }
    operator.kube.add({"kind": "Event", "metadata": where | {"name": "made"}, **about, **made})
    operator.context()
    assert "PodRefused" not in operator.condition(), "the pod was admitted since"


def refuse_pods_of_job(operator: Operator, words: str) -> None:
    """As the Job controller says it."""
    (job,) = operator.kube.of("Job")
    meta = job["metadata"]
    event = f"(combined from similar events): {words}"
    about = {"involvedObject": {"name": meta["name"], "uid": meta["uid"]}}
    where = {"namespace": KEY[0], "name": "refused"}
    operator.kube.add(
        {"kind": "Event", "metadata": where, **about, "reason": "FailedCreate", "message": event}
    )


def test_a_job_whose_pods_are_refused_says_so() -> None:
    operator = Operator(model={"source": "hf://org/model"})
    operator.context()
    assert operator.condition() == "False/Resolving"
    words = "Error creating: exceeded quota: small, requested: pods=1"
    refuse_pods_of_job(operator, words)
    operator.context()
    for kind, value in (("Ready", "False"), ("ModelCached", "False"), ("Degraded", "True")):
        assert operator.condition(kind) == f"{value}/QuotaBlocked"
        assert operator.message(kind) == f"{words} (raise that ResourceQuota)"


def refuse_mount(operator: Operator, pod: dict[str, Any], words: str) -> None:
    """As a kubelet says it."""
    pod["status"] = {"phase": "Pending"}
    about = {"involvedObject": {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}}
    where = {"namespace": KEY[0], "name": "mount"}
    about["lastTimestamp"] = "2027-01-15T08:00:00Z"
    operator.kube.add(
        {"kind": "Event", "metadata": where, **about, "reason": "FailedMount", "message": words}
    )


def test_a_pod_that_gets_no_volumes_says_why() -> None:
    operator = Operator(model={"source": "file:///srv/missing"})
    operator.context()
    operator.kube.run_pods("n0")
    words = 'MountVolume.SetUp failed for volume "model" : /srv/missing is not a directory'
    refuse_mount(operator, operator.pod("llama-0-a1-0"), words)
    operator.context()
    assert operator.condition() == "False/VolumeNotMounted"
    assert words in operator.message()
    assert operator.condition("ModelCached") == "False/VolumeNotMounted"


@pytest.mark.parametrize("kind", ["router", "download"])
def test_so_does_a_pod_of_its_router_or_of_a_download(kind: str) -> None:
    words = 'MountVolume.SetUp failed for volume "ca" : configmap "ca" not found'
    if kind == "router":
        operator = Operator(**DEDICATED)
        operator.settle("n0")
        labels, owners = names.labels(KEY[1], names.ROUTER), []
    else:
        operator = Operator(model={"source": "hf://org/model"})
        operator.context()
        (job,) = operator.kube.of("Job")
        labels = {"job-name": job["metadata"]["name"]}
        owners = [{"uid": job["metadata"]["uid"], "controller": True}]
    meta = {"name": "x", "namespace": KEY[0], "labels": labels, "ownerReferences": owners}
    pod = operator.kube.add(
        {
            "kind": "Pod",
            "metadata": meta,
            "spec": {"nodeName": "n0"},
        }
    )
    refuse_mount(operator, pod, words)
    operator.context()
    assert words in operator.message()


def test_a_service_whose_objects_would_have_anothers_names_is_left_alone() -> None:
    operator = Operator()
    older = {"namespace": KEY[0], "name": "llama-router", "uid": "older",
             "creationTimestamp": "2025-01-01T00:00:00Z"}  # fmt: skip
    spec = {"model": {"source": "pvc://models/llama", "name": "other"}}
    operator.store.service_seen({"kind": names.KIND, "metadata": older, "spec": spec})
    operator.context()
    assert operator.condition() == "False/NameCollides"
    assert "llama-router" in operator.message()
    assert operator.sets() == []
    assert operator.context() == []
    operator.store.service_gone((KEY[0], "llama-router"))
    operator.settle()
    assert operator.condition() == "True/Serving"


def kill_container(pod: dict[str, Any], words: str, reason: str = "Error") -> None:
    """It ended once before it was ready."""
    ended = {"terminated": {"exitCode": 1, "reason": reason, "message": words}}
    runs = {"running": {"startedAt": STARTED}}
    status = {"name": "worker", "restartCount": 1, "state": runs, "lastState": ended}
    pod["status"] = {"phase": "Running", "containerStatuses": [status]}


AT_ONCE = CONFIG.model_copy(update={"drain_notice": 0.0})


def trying_an_image() -> Operator:
    """In place of that of its only replica."""
    operator = Operator(image="example.com/worker:1")
    operator.restart(AT_ONCE)
    operator.settle("n0")
    operator.apply(image="example.com/worker:2")
    operator.context()
    return operator


def test_a_new_image_is_tried_where_it_is_to_run_before_the_only_replica_goes() -> None:
    operator = trying_an_image()
    (job,) = operator.kube.of("Job")
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["image"], container["args"]) == (
        "example.com/worker:2", ["radixgrove", "--version"],
    )  # fmt: skip
    assert "limits" not in container["resources"], "no GPU"
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    (term,) = pod["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert term["matchFields"][0]["values"] == ["n0"]
    assert operator.condition("Progressing") == "True/CheckingImage"

    waiting = {"reason": "ErrImagePull", "message": "worker:2: not found"}
    tries = {
        "kind": "Pod",
        "metadata": {
            "name": "try",
            "namespace": KEY[0],
            "labels": {"job-name": job["metadata"]["name"]},
            "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
        },
        "status": {"containerStatuses": [{"name": "worker", "state": {"waiting": waiting}}]},
    }
    operator.kube.add(tries)
    operator.context()
    assert operator.condition() == "True/Serving", "the running group stays"
    assert operator.sets() == ["llama-0-a1"]
    assert operator.condition("Progressing") == "False/RolloutBlocked"
    assert operator.condition("Degraded") == "True/ImagePull"
    assert "worker:2: not found (named by image; Secrets" in operator.message("Degraded")

    operator.apply(image="example.com/worker:3")
    operator.context()
    (job,) = operator.kube.of("Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "example.com/worker:3"
    (apart,) = pod["affinity"]["podAntiAffinity"][required]
    own = {"job-name": job["metadata"]["name"]}
    assert apart["labelSelector"]["matchLabels"] == own, "pods of other tries do not keep it off"
    assert operator.condition("Progressing") == "True/CheckingImage"

    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    operator.context()
    operator.context()
    operator.context()
    assert operator.sets() == ["llama-0-a2"]
    operator.settle("n0")
    assert operator.condition("Degraded") == "False/AsExpected"


def test_an_image_that_a_quota_keeps_from_being_tried_holds_up_no_rollout() -> None:
    operator = trying_an_image()
    assert operator.condition("Progressing") == "True/CheckingImage"
    assert operator.look() <= 5.0, "only Events say why there is no pod"
    refuse_pods_of_job(operator, "Error creating: exceeded quota: small, requested: pods=1")
    for _ in range(3):
        operator.context()
    assert operator.sets() == ["llama-0-a2"]


def test_a_revision_that_does_not_start_gives_way_to_the_last_good_one() -> None:
    operator = Operator(model={"source": "pvc://models/llama", "name": "good"})
    operator.restart(AT_ONCE)
    operator.settle("n0")
    good = operator.resource["status"]["revision"]
    operator.apply(model={"source": "pvc://models/missing", "name": "bad"})
    for _ in range(3):
        operator.context()
    assert operator.sets() == ["llama-0-a2"]
    operator.kube.run_pods("n0")
    kill_container(operator.pod("llama-0-a2-0"), "no such directory")
    operator.context()
    assert operator.condition("Degraded") == "True/RolledBack"
    assert "no such directory" in operator.message("Degraded")
    operator.settle("n0")
    assert operator.condition() == "True/Serving"
    assert operator.condition("Progressing") == "False/RolledBack"
    assert operator.resource["status"]["revision"] == good
    assert operator.table.entries["team-a.llama"].names == ["good"], "what its workers answer to"
    operator.restart(AT_ONCE)
    assert operator.context() == [], "also a new operator does not try again"

    operator.apply(
        model={"source": "pvc://models/llama", "name": "good"}, startup={"timeout": "9m"}
    )
    for _ in range(3):
        operator.context()
    operator.settle("n0")
    assert operator.condition("Progressing") == "False/Settled"
    assert operator.condition("Degraded") == "False/AsExpected"
    assert operator.resource["status"]["rolledBack"] == ""


@pytest.mark.parametrize("passing", ["Unknown", "StartError"])
def test_a_container_that_ended_with_its_machine_or_never_began_gives_nothing_up(
    passing: str,
) -> None:
    operator = Operator()
    operator.restart(AT_ONCE)
    operator.settle("n0")
    operator.apply(startup={"timeout": "9m"})
    for _ in range(3):
        operator.context()
    operator.kube.run_pods("n0")
    kill_container(operator.pod("llama-0-a2-0"), "", reason=passing)
    for _ in range(2):
        operator.context()
        assert operator.condition("Degraded") == "True/Starting"
    kill_container(operator.pod("llama-0-a2-0"), "no such directory")
    operator.context()
    assert operator.condition("Degraded") == "True/RolledBack"


def test_a_pod_on_an_unreachable_node_is_moved_unless_its_worker_renews_its_lease() -> None:
    operator = Operator(**TWO_NODES)
    operator.settle()
    operator.table.leases = {("team-a.llama", "llama-0-a1-0")}
    operator.node("n1", ready="Unknown")  # for longer than any grace
    operator.context()
    assert operator.sets() == ["llama-0-a1"]
    operator.table.leases.clear()
    operator.context()
    assert operator.sets() == ["llama-0-a2"]
    assert "GroupRecovery" in operator.events()


def test_the_next_attempt_would_rather_not_run_on_a_machine_that_hangs() -> None:
    operator = Operator(**TWO_NODES)
    operator.settle()
    operator.probe.hung = {"n1"}
    operator.pod("llama-0-a1-0")["status"]["containerStatuses"][0]["restartCount"] = 1
    operator.context()
    pods = operator.kube.the("StatefulSet", "llama-0-a2")["spec"]["template"]["spec"]
    assert "'values': ['n1']" in str(pods["affinity"]["nodeAffinity"])
    operator.settle("n0", "n2")
    assert operator.condition() == "True/Serving"
    # It is remembered with the attempt: its set is still restored when somebody changes it.
    operator.kube.the("StatefulSet", "llama-0-a2")["spec"]["updateStrategy"]["type"] = "Other"
    assert operator.context() == ["patch StatefulSet/llama-0-a2"]
    assert operator.kube.the("StatefulSet", "llama-0-a2")["spec"]["template"]["spec"] == pods


def test_a_group_that_comes_back_in_the_middle_of_a_rollout_reads_its_own_settings() -> None:
    rollout = {"maxUnavailable": 0, "maxSurge": 1}
    operator = Operator(**TWO_NODES, rollout=rollout)
    operator.settle()
    old = settings_of(operator, "llama-0-a1")
    operator.apply(**TWO_NODES, rollout=rollout, engine={"pageSize": 32})
    operator.context()
    assert operator.sets() == ["llama-0-a1", "llama-1-a2"]
    assert settings_of(operator, "llama-1-a2") != old
    operator.pod("llama-0-a1-1")["metadata"]["uid"] = "replaced"
    operator.context()
    assert operator.sets() == ["llama-0-a3", "llama-1-a2"]
    assert settings_of(operator, "llama-0-a3") == old
    operator.kube.run_pods("n0", "n1", of="llama-0-a3")
    operator.context()
    operator.pod("llama-0-a3-1")["metadata"]["uid"] = "replaced again"
    operator.context()
    operator.context()
    assert operator.sets() == ["llama-1-a2"], "the next attempt waits for its back-off"
    assert old in {found["metadata"]["name"] for found in operator.kube.of("ConfigMap")}


def settings_of(operator: Operator, name: str) -> str:
    volumes = operator.kube.the("StatefulSet", name)["spec"]["template"]["spec"]["volumes"]
    return str(next(v["configMap"]["name"] for v in volumes if "configMap" in v))


def test_children_of_a_deleted_namesake_are_waited_out() -> None:
    operator = Operator()
    operator.settle("n0")
    operator.resource["metadata"]["uid"] = "made-anew"  # its children still have the old owner
    with pytest.raises(Incomplete, match="belongs to another owner"):
        operator.context()
    assert operator.condition("Degraded") == "True/RequestRefused"
    owners = {
        owner["uid"]
        for found in [*operator.kube.of("NetworkPolicy"), *operator.kube.of("ServiceAccount")]
        for owner in found["metadata"]["ownerReferences"]
        if owner["kind"] == names.KIND
    }
    assert "made-anew" not in owners
    assert "llama-0-a1" in operator.sets(), "left to the garbage collector"
    assert operator.table.entries["team-a.llama"].attempts == ["llama-0-a2-0"], "a name of its own"
    # The garbage collector has come by.
    for key, found in list(operator.kube.objects.items()):
        stale = found["metadata"].get("ownerReferences", [{}])[0].get("uid")
        if stale not in (None, "made-anew") and key[2] != "llama-0-a2" and key[0] != "Secret":
            del operator.kube.objects[key]
    for kind, namespace, name in list(operator.kube.objects):
        operator.kube.changed(kind, namespace, name, None)
    operator.settle("n0")
    assert operator.condition() == "True/Serving"


class Clock:
    """Of looks at services."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        clock = SimpleNamespace(time=lambda: self.now)
        monkeypatch.setattr("radixgrove.operator.controller.reconciler.time", clock)


def pod_of_a_new_revision(operator: Operator) -> dict[str, Any]:
    """Of a service of one replica, whose group of before is gone."""
    operator.restart(AT_ONCE)
    operator.settle("n0")
    operator.apply(startup={"timeout": "9m"})
    for _ in range(3):
        operator.context()
    operator.kube.run_pods("n1")
    return operator.pod("llama-0-a2-0")


@pytest.mark.parametrize("loss", ["evicted", "restarted machine", "replaced", "none"])
def test_a_group_that_lost_a_pod_while_it_started_gives_no_revision_up(loss: str) -> None:
    """The other pod's program has ended for that, and may be seen first."""
    operator = Operator(**TWO_NODES)
    operator.restart(AT_ONCE)
    operator.settle()
    operator.apply(**TWO_NODES, startup={"timeout": "9m"})
    for _ in range(3):
        operator.context()
    operator.kube.run_pods("n0", "n1")
    for rank in range(2):
        operator.pod(f"llama-0-a2-{rank}")["status"].pop("conditions")  # running, and not ready
    operator.context()
    kill_container(operator.pod("llama-0-a2-0"), "rank 1 (machine 1) is gone")
    other = operator.pod("llama-0-a2-1")
    if loss == "evicted":
        other["status"] = {"phase": "Failed", "message": "The node was low on resource: memory."}
    elif loss == "restarted machine":
        kill_container(other, "", reason="Unknown")
    elif loss == "replaced":
        other["metadata"]["uid"] = "another"
    for _ in range(3):
        operator.context()
    assert (operator.condition("Degraded") == "True/RolledBack") == (loss == "none")


@pytest.mark.parametrize("lasts", [False, True])
def test_a_volume_that_is_refused_gives_a_revision_up_only_if_that_lasts(
    monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    clock, operator = Clock(monkeypatch), Operator()
    pod = pod_of_a_new_revision(operator)
    running = pod["status"]
    refuse_mount(operator, pod, 'Multi-Attach error for volume "pvc-1": used by llama-0-a1-0')
    for _ in range(11):
        operator.context()
        assert operator.condition() == "False/VolumeNotMounted"
        assert operator.look() <= 5.0, "no event says that a refusal has lasted"
        clock.now += 10
    if lasts:
        clock.now += 20
        operator.context()
        assert operator.condition("Degraded") == "True/RolledBack"
        assert "Multi-Attach" in operator.message("Degraded")
    else:
        pod["status"] = running
        operator.settle("n1")
        assert operator.condition("Degraded") == "False/AsExpected"
        assert operator.condition("Progressing") == "False/Settled"


def test_a_volume_that_came_after_all_is_no_refusal_that_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its Event stays for an hour, while the image is pulled, say."""
    clock, operator = Clock(monkeypatch), Operator()
    pod = pod_of_a_new_revision(operator)
    refuse_mount(operator, pod, "failed to sync configmap cache: timed out")
    operator.context()
    assert operator.condition() == "False/VolumeNotMounted"
    operator.kube.add(
        {
            "kind": "Event",
            "metadata": {"namespace": KEY[0], "name": "pulls"},
            "involvedObject": {"name": "llama-0-a2-0", "uid": pod["metadata"]["uid"]},
            "reason": "Pulling",
            "lastTimestamp": "2027-01-15T08:00:01Z",
        }
    )
    for _ in range(2):
        clock.now += 200
        operator.context()
        assert operator.condition() == "False/Starting"
        assert operator.condition("Degraded") != "True/RolledBack"


def test_a_group_that_routers_do_not_know_does_not_count_as_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, operator = Clock(monkeypatch), Operator(replicas=2)
    operator.table.unregistered = {"llama-1-a2-0"}
    operator.settle()
    assert operator.condition("Degraded") == "False/AsExpected", "it may take a while"
    assert operator.look() <= 5.0, "and no event says that it has"

    clock.now += 16
    operator.context()
    assert operator.condition() == "True/Serving"
    assert operator.message() == "1 of 2 groups are ready"
    assert ready_groups(operator) == ("1/2", 1, 1, 1.0)
    for kind in ("Degraded", "Progressing"):
        assert operator.condition(kind).endswith("/NotRegistered")
        assert "routers do not know llama-1-a2-0, though ready" in operator.message(kind)

    operator.table.unregistered.add("llama-0-a1-0")
    operator.context()
    clock.now += 16
    operator.context()
    assert operator.condition() == "False/NotRegistered"

    assert ready_groups(operator) == ("0/2", 0, 0, 0.0)

    operator.table.answers = False
    operator.context()
    assert operator.condition() == "False/NotRegistered", "nothing new is known"
    operator.table.answers = True
    operator.table.unregistered.clear()
    operator.context()
    assert operator.condition() == "True/Serving"
    assert ready_groups(operator) == ("2/2", 2, 2, 2.0)
    assert operator.condition("Degraded") == "False/AsExpected"
    assert operator.look() > 60


def ready_groups(operator: Operator) -> tuple[str, int, int, float | None]:
    """As kubectl shows them, the status counts them, and alerts see them."""
    status = operator.resource["status"]
    labels = {"namespace": KEY[0], "service": KEY[1], "state": "ready"}
    measured = metrics.REGISTRY.get_sample_value("radixgrove_operator_groups", labels)
    return status["summary"], status["readyReplicas"], status["updatedReplicas"], measured


def test_a_group_that_routers_do_not_know_takes_no_other_with_it_when_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, operator = Clock(monkeypatch), Operator(replicas=2)
    operator.table.unregistered = {"llama-1-a2-0"}
    operator.settle()
    clock.now += 16
    operator.context()
    assert operator.condition("Degraded") == "True/NotRegistered"

    operator.apply(replicas=1)
    assert "patch StatefulSet/llama-1-a2" in operator.context(), "it drains"
    assert operator.condition() == "True/Serving"
    assert operator.condition("Degraded") == "False/AsExpected"


def test_a_group_that_is_kept_for_diagnosis_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pods may be ready, and routers are not to know it."""
    clock = Clock(monkeypatch)
    operator = Operator(**TWO_NODES, replicas=2, recovery={"policy": "None"})
    operator.settle()
    operator.pod("llama-1-a2-1")["metadata"]["uid"] = "replaced"
    for _ in range(2):
        operator.context()
        clock.now += 16
    operator.context()
    assert operator.condition() == "True/Serving"
    assert operator.condition("Degraded") == "True/GroupFailed"


def test_while_redis_is_silent_nothing_is_found_out_about_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, operator = Clock(monkeypatch), Operator()
    operator.table.unregistered = {"llama-0-a1-0"}
    operator.settle()
    clock.now += 10
    operator.context()
    operator.table.answers = False
    for _ in range(4):
        clock.now += 10
        operator.context()
        assert operator.condition() == "True/Serving", "it had 10 s when it was last looked at"
    operator.table.answers = True
    clock.now += 10
    operator.context()
    assert operator.condition() == "True/Serving", "it may have waited for Redis, too"
    clock.now += 16
    operator.context()
    assert operator.condition() == "False/NotRegistered"


def test_leases_are_asked_for_once_in_a_look_also_while_redis_is_silent() -> None:
    members = {"hardware": {"gpusPerNode": 2}, "parallelism": {"tp": 1, "dp": 2}}
    operator = Operator(**members, replicas=2)
    operator.settle("n0")
    operator.table.asked = 0
    operator.context()
    assert operator.table.asked == 1
    operator.table.answers = False
    operator.node("n1", ready="Unknown")  # for longer than any grace
    operator.pod("llama-1-a2-0")["spec"]["nodeName"] = "n1"
    operator.table.asked = 0
    operator.context()
    assert operator.sets() == ["llama-0-a1", "llama-1-a3"], "no lease is known of"
    assert operator.table.asked == 1


def test_a_group_of_another_worker_is_not_judged_by_the_one_that_is_to_follow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, operator = Clock(monkeypatch), Operator(image="example.com/other:1")
    operator.table.unregistered = {"llama-0-a1-0"}
    operator.settle()
    operator.apply()  # of the chart's image, which is tried first
    for _ in range(3):
        operator.context()
        clock.now += 16
    assert operator.sets() == ["llama-0-a1"]
    assert operator.condition() == "True/Serving"


def test_of_another_worker_it_is_not_known_whether_it_registers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, operator = Clock(monkeypatch), Operator(image="example.com/other:1")
    operator.table.unregistered = {"llama-0-a1-0"}
    operator.settle()
    clock.now += 16
    operator.context()
    assert operator.condition() == "True/Serving"


def test_status_shows_the_members_of_a_group_once_routers_know_them() -> None:
    hardware = {"device": "cpu", "gpusPerNode": 2}
    operator = Operator(hardware=hardware, parallelism={"tp": 1, "dp": 2})
    operator.table.unregistered = {"llama-0-a1-0"}
    operator.settle("n0")
    (group,) = operator.resource["status"]["groups"]
    assert group.get("members", []) == []
    (name,) = operator.sets()
    for dp_rank in range(2):
        operator.table.leases.add((names.service_key(*KEY), f"{name}-0/{dp_rank}"))
    operator.context()
    (group,) = operator.resource["status"]["groups"]
    assert group["members"] == [
        {"name": f"{name}-0/{dp_rank}", "state": "Ready"} for dp_rank in range(2)
    ]


def test_a_service_is_ready_once_routers_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator()

    def away(*_: object) -> None:
        raise RedisUnavailable

    with monkeypatch.context() as without_redis:
        without_redis.setattr(operator.table, "put", away)
        for _ in range(2):
            with pytest.raises(Incomplete, match="Redis does not answer"):
                operator.context()
            operator.kube.run_pods("n0")
        with pytest.raises(Incomplete):
            operator.context()
        assert operator.condition() == "False/RequestRefused"
    operator.context()
    assert operator.condition() == "True/Serving"


# ---- what belongs to the installation ------------------------------------------------------------

PREFIXED = CONFIG.model_copy(
    update={"redis": CONFIG.redis.model_copy(update={"prefix": "mine"})}
)  # fmt: skip


def change_a_key(kube: MemoryKube) -> None:
    found = kube.objects["Secret", CONFIG.namespace, CONFIG.keys_secret]
    found["data"]["root-key"] = "Y2hhbmdlZA=="


@pytest.mark.parametrize("what", ["prefix", "key"])
def test_what_pods_read_of_the_installation_at_their_start_replaces_groups_once(what: str) -> None:
    operator = Operator(**DEDICATED)
    operator.settle("n0")
    routers = operator.kube.the("Deployment", "llama-router")["spec"]["template"]
    operator.restart()
    assert operator.context() == [], "an operator that starts again changes nothing"
    if what == "key":
        change_a_key(operator.kube)
    config = PREFIXED if what == "prefix" else CONFIG
    operator.restart(config)
    for _ in range(6):
        operator.context()
        for group in operator.kube.of("StatefulSet"):  # drained ones have had their time
            if names.DRAINING in group["metadata"].get("annotations", {}):
                group["metadata"]["annotations"][names.DRAINING] = STARTED
        operator.kube.run_pods("n0")
    assert operator.sets() == ["llama-0-a2"]
    assert operator.kube.the("Deployment", "llama-router")["spec"]["template"] != routers
    assert operator.context() == []
    operator.restart(config)
    assert operator.context() == [], "and once is enough"


def test_no_group_is_made_for_keys_that_could_not_be_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would start with the old ones, and count as new."""
    operator = Operator(**DEDICATED, rollout={"maxUnavailable": 0, "maxSurge": 1})
    operator.settle("n0")
    router = operator.kube.the("Deployment", "llama-router")["spec"]
    change_a_key(operator.kube)
    operator.restart()
    request = operator.kube._request

    def refused(method: str, verb: str, kind: str, *rest: Any, **more: Any) -> Any:
        if kind == "Secret" and method == "PATCH":
            raise KubeError(verb, "secrets", 403, "forbidden")
        return request(method, verb, kind, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(operator.kube, "_request", refused)
        with pytest.raises(Incomplete, match="secrets: forbidden"):
            operator.context()
        assert operator.sets() == ["llama-0-a1"]
        assert operator.kube.the("Deployment", "llama-router")["spec"] == router
    operator.context()
    assert operator.sets() == ["llama-0-a1", "llama-1-a2"]
    assert operator.kube.the("Deployment", "llama-router")["spec"] != router


def revisions(operator: Operator) -> list[Any]:
    found = operator.kube.of("ConfigMap")
    return [one for one in found if one["metadata"]["namespace"] == KEY[0]]


def test_a_revision_that_somebody_deleted_is_there_again_before_a_pod_needs_it() -> None:
    operator = Operator(**TWO_NODES)
    operator.settle()
    (frozen,) = revisions(operator)
    meta = frozen["metadata"]
    del operator.kube.objects["ConfigMap", KEY[0], meta["name"]]
    operator.kube.changed("ConfigMap", KEY[0], meta["name"], None)
    operator.context()
    (again,) = revisions(operator)
    assert (again["metadata"]["name"], again["data"]) == (meta["name"], frozen["data"])
    assert operator.sets() == ["llama-0-a1"]
    assert operator.context() == []


def test_a_copy_of_the_keys_that_somebody_deleted_is_made_again() -> None:
    operator = Operator()
    operator.settle("n0")
    del operator.kube.objects["Secret", KEY[0], CONFIG.keys_secret]  # of which no event tells
    assert operator.context() == [f"patch Secret/{CONFIG.keys_secret}"]
    assert operator.context() == []


def test_a_status_that_somebody_wiped_is_written_once() -> None:
    operator = Operator(**TWO_NODES)
    operator.settle()
    before = operator.resource["status"]
    operator.resource["status"] = {}
    wrote = [written for written in operator.context() if "Event" not in written]
    assert wrote == ["patch InferenceService/llama"]
    for kept in ("operator", "lastAttempt", "summary"):
        assert operator.resource["status"][kept] == before[kept]
    assert operator.context() == []
    assert operator.sets() == ["llama-0-a1"]


# ---- what alerts are made of ---------------------------------------------------------------------


def measured() -> tuple[float | None, ...]:
    """Ready, desired and starting groups, and whether it is a first start."""
    labels = {"namespace": KEY[0], "service": KEY[1]}
    groups = [
        metrics.REGISTRY.get_sample_value("radixgrove_operator_groups", labels | {"state": state})
        for state in ("ready", "desired", "starting")
    ]
    return *groups, metrics.REGISTRY.get_sample_value("radixgrove_operator_first_start", labels)


def test_a_first_start_is_told_from_a_service_that_is_down() -> None:
    operator = Operator()
    operator.context()
    assert measured() == (0, 1, 1, 1)
    operator.kube.the("StatefulSet", "llama-0-a1")["metadata"]["creationTimestamp"] = STARTED
    operator.context()
    assert measured() == (0, 1, 0, 0), "its time is over"
    operator.settle("n0")
    assert measured() == (1, 1, 0, 0)
    pod = operator.pod("llama-0-a1-0")["status"]
    pod["conditions"] = [{"type": "Ready", "status": "False"}]
    operator.context()
    assert measured() == (0, 1, 0, 0)
    operator.apply(suspend=True)
    operator.context()
    assert measured() == (0, 0, 0, 0)
    del operator.kube.objects[names.KIND, *KEY]
    operator.gone()
    assert measured() == (None,) * 4


# ---- beside another installation -----------------------------------------------------------------

THEIRS = "elsewhere/rg-operator"


def lease(renewed: int, seconds: int = 15) -> dict[str, Any]:
    namespace, _, name = THEIRS.partition("/")
    spec = {"renewTime": f"2026-01-01T00:00:{renewed:02}Z", "leaseDurationSeconds": seconds}
    return {"kind": "Lease", "metadata": {"namespace": namespace, "name": name}, "spec": spec}


def looked_after_by_another() -> Operator:
    operator = Operator()
    operator.resource["status"] = {"operator": THEIRS}
    operator.kube.add(lease(0))
    return operator


def test_what_another_installation_looks_after_is_left_alone_and_that_is_said_once() -> None:
    operator = looked_after_by_another()
    operator.table.entries["team-a.llama"] = ModelEntry(
        service="team-a.llama", names=["llama"], attempts=[], desired=1
    )
    (said,) = operator.context()
    assert said.startswith("create Event/llama.")
    assert operator.context() == []
    (event,) = operator.kube.of("Event")
    assert (event["type"], event["reason"]) == ("Warning", "ServedElsewhere")
    for words in (THEIRS, CONFIG.installation, "operator.namespaces"):
        assert words in event["message"]
    assert operator.table.entries == {}, "its routers do not serve it"


def test_it_is_taken_over_when_the_other_installation_is_gone() -> None:
    operator = looked_after_by_another()
    operator.context()
    del operator.kube.objects["Lease", "elsewhere", "rg-operator"]
    operator.settle("n0")
    assert operator.resource["status"]["operator"] == CONFIG.installation
    assert operator.condition() == "True/Serving"


def test_an_installation_lives_as_long_as_its_lease_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(renewals, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    operator = looked_after_by_another()
    for turn in range(1, 4):
        operator.context()
        clock[0] += 60.0
        operator.kube.add(lease(turn))
    operator.context()
    assert operator.sets() == []
    clock[0] += 14.0  # the last renewal still counts
    operator.context()
    assert operator.sets() == []
    clock[0] += 2.0
    operator.context()
    assert operator.sets() == ["llama-0-a1"]


def test_of_two_that_claim_it_at_once_one_does_nothing() -> None:
    operator = Operator()
    stale = operator.kube.get(names.KIND, *KEY)
    operator.resource["status"] = {"operator": THEIRS}
    operator.kube.add(operator.resource)  # written in between
    with pytest.raises(KubeError, match="modified"):
        Ownership(operator.kube, CONFIG).claim(stale or {})
    assert operator.resource["status"] == {"operator": THEIRS}


def test_a_lease_that_may_not_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = looked_after_by_another()
    get = operator.kube.get

    def refused(kind: str, namespace: str | None, name: str) -> Any:
        if kind == "Lease":
            raise KubeError("get", f"leases/{namespace}/{name}", 403, "forbidden")
        return get(kind, namespace, name)

    monkeypatch.setattr(operator.kube, "get", refused)
    with pytest.raises(KubeError, match="get leases/elsewhere/rg-operator: forbidden"):
        operator.context()
    assert operator.kube.written == []


# ---- its own router ------------------------------------------------------------------------------

DEDICATED = {"router": {"dedicated": True, "auth": {"keysSecret": "missing"}}}


def test_a_service_is_not_ready_before_its_own_router_is() -> None:
    operator = Operator(**DEDICATED)
    operator.settle("n0")
    assert operator.condition() == "False/RouterNotReady"
    assert operator.condition("Progressing") == "True/RouterNotReady"
    operator.kube.the("Deployment", "llama-router")["status"] = {"availableReplicas": 1}
    operator.context()
    assert operator.condition() == "True/Serving"
    assert operator.condition("Progressing") == "False/Settled"


def test_a_router_whose_pods_are_refused_says_so() -> None:
    operator = Operator(router={"dedicated": True}, pods={"routers": {"priorityClassName": "typo"}})
    operator.settle("n0")
    words = 'pods "llama-router-x" is forbidden: no PriorityClass with name typo was found'
    failure = {"type": "ReplicaFailure", "status": "True", "message": words}
    operator.kube.the("Deployment", "llama-router")["status"] = {"conditions": [failure]}
    operator.context()
    assert operator.condition() == "False/RouterNotReady"
    mend = "named by pods.routers.priorityClassName: make it, or name another one"
    assert operator.message() == f"its own router does not answer: {words} ({mend})"


def test_what_keeps_its_own_router_from_starting_is_said() -> None:
    operator = Operator(**DEDICATED)
    operator.settle("n0")
    words = 'secret "missing" not found'
    waiting = {"reason": "CreateContainerConfigError", "message": words}
    operator.kube.add(
        {
            "kind": "Pod",
            "metadata": {
                "name": "llama-router-x",
                "namespace": KEY[0],
                "labels": names.labels(KEY[1], names.ROUTER),
            },
            "status": {"containerStatuses": [{"name": "router", "state": {"waiting": waiting}}]},
        }
    )
    operator.context()
    assert words in operator.message()


def test_wrong_settings_of_its_router_are_named_and_leave_the_running_one_alone() -> None:
    wrong = {"router": {"dedicated": True, "settings": {"retrys": 1}}}
    operator = Operator(**wrong)
    operator.settle("n0")
    assert operator.kube.of("Deployment") == []
    for kind, value in (("Ready", "False"), ("Progressing", "False"), ("Degraded", "True")):
        assert operator.condition(kind) == f"{value}/InvalidRouter"
    assert "router.settings.retrys" in operator.message()
    operator.apply(router={"dedicated": True, "settings": {"retries": 1}})
    operator.context()
    router = operator.kube.the("Deployment", "llama-router")
    router["status"] = {"availableReplicas": 1}
    operator.settle("n0")
    assert operator.condition() == "True/Serving"
    operator.apply(**wrong)
    operator.context()
    assert operator.condition() == "True/Serving"
    assert operator.condition("Degraded") == "True/InvalidRouter"
    assert operator.kube.the("Deployment", "llama-router")["spec"] == router["spec"]
    assert operator.context() == []


def test_the_number_of_its_routers_is_left_to_their_autoscaler() -> None:
    scaled = {"router": {"dedicated": True, "autoscaling": {"min": 3, "max": 8}}}
    operator = Operator(router={"dedicated": True, "replicas": 1})
    operator.settle("n0")
    router = operator.kube.the("Deployment", "llama-router")["spec"]
    assert router["replicas"] == 1
    assert operator.kube.of("HorizontalPodAutoscaler") == []

    operator.apply(**scaled)
    operator.context()
    scaler = operator.kube.the("HorizontalPodAutoscaler", "llama-router")["spec"]
    assert scaler["scaleTargetRef"]["name"] == "llama-router"
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 8)
    assert operator.kube.the("Deployment", "llama-router")["spec"]["replicas"] == 3
    operator.kube.the("Deployment", "llama-router")["spec"]["replicas"] = 7
    operator.apply(router=scaled["router"] | {"settings": {"retries": 1}})
    operator.context()
    assert operator.kube.the("Deployment", "llama-router")["spec"]["replicas"] == 7

    operator.apply(router={"dedicated": True})
    operator.context()
    assert operator.kube.of("HorizontalPodAutoscaler") == []
    assert operator.kube.the("Deployment", "llama-router")["spec"]["replicas"] == 2


@pytest.mark.parametrize("scaling", [{}, {"autoscaling": {"max": 4}}], ids=["fixed", "scaled"])
def test_a_router_that_is_not_wanted_any_more_goes(scaling: dict[str, Any]) -> None:
    operator = Operator(router=DEDICATED["router"] | scaling)
    operator.settle("n0")
    operator.apply()
    operator.context()
    assert operator.kube.of("Deployment") == []
    assert operator.kube.of("HorizontalPodAutoscaler") == []
    assert operator.condition() == "True/Serving"


# ---- other versions ------------------------------------------------------------------------------


def test_a_crd_that_drops_parts_of_the_status_is_told_until_it_is_renewed() -> None:
    operator = Operator()
    operator.settle("n0")
    operator.kube.dropped = {"summary"}
    operator.apply(replicas=2)
    operator.context()
    assert operator.enqueued == [KEY], "to say so in the status"
    operator.context()
    assert operator.condition("Degraded") == "True/OutdatedCRD"
    for words in ("status.summary", "Helm release that owns", "kubectl apply --server-side"):
        assert words in operator.message("Degraded")
    operator.kube.dropped = set()
    operator.settle("n0", "n1")
    assert operator.condition("Degraded") == "False/AsExpected"


@pytest.mark.parametrize("dropped", ["summary", "served", "groups.avoid", "groups.wasReady"])
def test_under_a_crd_that_drops_parts_of_the_status_nothing_is_written_at_rest(
    dropped: str,
) -> None:
    operator = Operator()
    operator.kube.dropped = {dropped}
    operator.settle("n0", "n1")
    operator.apply(replicas=2)
    operator.settle("n0", "n1")
    operator.restart()
    operator.settle("n0", "n1")
    operator.kube.dropped = set()
    operator.settle("n0", "n1")
    where, _, field = dropped.rpartition(".")
    status = operator.resource["status"]
    assert field in (status[where][0] if where else status)
    assert operator.condition("Degraded") == "False/AsExpected"


def test_where_nobody_says_which_crd_is_served_every_look_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = Operator()
    monkeypatch.setattr(operator.kube, "schema_hash", lambda: "")
    operator.kube.dropped = {"summary"}
    for _ in range(4):
        operator.context()
        operator.kube.run_pods("n0")
    assert operator.context() == ["patch InferenceService/llama"]
    operator.kube.dropped = set()
    operator.settle("n0")
    assert operator.condition("Degraded") == "False/AsExpected"


def test_what_else_somebody_changes_of_a_status_is_written_again_under_such_a_crd() -> None:
    operator = Operator()
    operator.kube.dropped = {"summary"}
    operator.settle("n0")
    operator.resource["status"]["url"] = "http://elsewhere"
    operator.settle("n0")
    assert operator.resource["status"]["url"] == CONFIG.router.url
    assert operator.condition("Degraded") == "True/OutdatedCRD"


def test_a_spec_of_another_version_is_told_once() -> None:
    operator = Operator(unheard_of=1)
    operator.context()
    assert operator.condition() == "False/InvalidSpec"
    assert "spec.unheard_of" in operator.message()
    since = operator.resource["status"]["conditions"][0]["lastTransitionTime"]
    assert operator.context() == [], "or its own write would wake it for ever"
    assert operator.resource["status"]["conditions"][0]["lastTransitionTime"] == since
