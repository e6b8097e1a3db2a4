"""Recovery, rollout and placement together, against a small simulated cluster.

The simulation does what a StatefulSet controller, a scheduler and kubelets do to pods; hypothesis
chooses what goes wrong and in which order, operator restarts that lose a status write included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.operator.api.spec import InferenceServiceSpec
from radixgrove.operator.api.status import GroupPhase, GroupStatus, InferenceServiceStatus
from radixgrove.operator.planning import gang
from radixgrove.operator.planning.demand import Node, NodeDemand
from radixgrove.operator.planning.observed import Group, ObservedState, Pod
from radixgrove.operator.planning.plan import NewAttempt, Plan, PlanInput, as_placements, make_plan
from radixgrove.operator.planning.service_view import ServiceView
from tests.conftest import examples
from tests.operator.operator_builders import CONFIG, SERVICE, revision, spec

GPU_NODES = NodeDemand(devices={"nvidia.com/gpu": 8})


def gpu_node(name: str) -> Node:
    return Node(name, devices=GPU_NODES.devices)


@dataclass
class Cluster:
    """One service on a cluster with room for everything."""

    spec: InferenceServiceSpec
    target: str = "r1"
    now: float = 1_000_000.0
    groups: dict[str, Group] = field(default_factory=dict)
    records: list[GroupStatus] = field(default_factory=list)
    nodes: dict[str, Node] = field(
        default_factory=lambda: {f"n{i}": gpu_node(f"n{i}") for i in range(8)}
    )
    names_used: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=lambda: {"r1"})
    others: list[gang.GangPlacement] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)  # nodes that hang, unknown to Kubernetes
    refuses: bool = False  # the API server makes no groups
    unused: set[int] = field(default_factory=set)  # numbers of attempts that it refused
    uids: int = 0
    last_attempt: int = 0

    def reconcile(self, *, dies_after: int = 1000) -> Plan:
        """One reconciliation; the operator may die after some of its writes."""
        self.known.add(self.target)
        groups = tuple(self.groups.values())
        view = ServiceView(
            service=SERVICE,
            spec=self.spec,
            created=1.0,
            generation=1,
            before=InferenceServiceStatus(
                groups=self.records, last_attempt=self.last_attempt, revision=self.target
            ),
            now=self.now,
            observed=ObservedState(groups, self.nodes, max((g.attempt for g in groups), default=0)),
            revisions={known: revision() for known in self.known},
            target=self.target,
        )
        plan = make_plan(
            PlanInput(
                view=view,
                unused_attempts=self.unused,
                placements=[*as_placements(view, groups, self.records), *self.others],
                demand=lambda _: GPU_NODES,
                holds_lease=lambda _: False,
                silent_nodes=lambda pods: {pod.node for pod in pods} & self.silent,
                config=CONFIG,
            )
        )
        writes: list[Callable[[], None]] = [partial(self._keep, plan)]
        writes += [partial(self._drain, group, because) for group, because in plan.drain]
        writes += [partial(self._delete, group) for group in plan.delete]
        writes += [partial(self._create, plan, new) for new in plan.create]
        writes += [partial(self._keep, plan)]
        for write in writes[:dies_after]:
            write()
        if len(writes) > dies_after:
            self.unused.clear()  # which only the operator that died knew
        return plan

    def _keep(self, plan: Plan) -> None:
        self.records = [GroupStatus.model_validate_json(r.model_dump_json()) for r in plan.records]
        self.last_attempt = plan.last_attempt

    def _drain(self, group: Group, because: str) -> None:
        self.groups[group.name] = replace(group, draining_since=self.now, draining_because=because)

    def _delete(self, group: Group) -> None:
        self.groups.pop(group.name, None)

    def _create(self, plan: Plan, new: NewAttempt) -> None:
        name = new.name(SERVICE.name)
        self.unused.discard(new.attempt)
        if self.refuses:
            self.unused.add(new.attempt)
            plan.not_made(new, "quota")
            return
        assert name not in self.names_used, "an attempt's name is never used twice"
        self.names_used.add(name)
        nodes = self.spec.hardware.nodes
        self.groups[name] = Group(
            name, self.uid(), new.index, new.attempt, new.revision, nodes, self.now,
            demand=GPU_NODES,
        )  # fmt: skip

    def wipe_status(self) -> None:
        self.records, self.last_attempt = [], 0
        self.names_used = set(self.groups)  # the one act that costs the count

    def uid(self) -> str:
        self.uids += 1
        return f"uid-{self.uids}"

    def pods(self, change: Callable[[Pod], Pod | None], only: int | None = None) -> None:
        for name, group in list(self.groups.items()):
            pods = [change(pod) if only is None or pod.rank == only else pod for pod in group.pods]
            self.groups[name] = replace(group, pods=tuple(p for p in pods if p is not None))

    def make_pods(self) -> None:
        """The StatefulSet controller: missing pods come back, ending ones end."""
        for name, group in list(self.groups.items()):
            pods = {pod.rank: pod for pod in group.pods if pod.deleted_at is None}
            for rank in range(group.nodes):
                pods.setdefault(rank, Pod(f"{name}-{rank}", self.uid(), rank))
            self.groups[name] = replace(group, pods=tuple(pods[r] for r in sorted(pods)))

    def start_pods(self) -> None:
        def start(pod: Pod) -> Pod:
            node = pod.node or f"n{pod.rank}"
            return replace(pod, node=node, phase="Running", running=True, ready=True)

        self.pods(start)

    def settle(self) -> None:
        """Nothing goes wrong any more: everything must come to rest."""
        self.nodes = {f"n{i}": gpu_node(f"n{i}") for i in range(8)}
        self.refuses = False
        for _ in range(200):
            plan = self.reconcile()
            acted = plan.create or plan.drain or plan.delete or plan.requeue_at is not None
            if not acted and all(group.ready for group in self.groups.values()):
                return
            if plan.requeue_at is not None:
                self.now = max(self.now, plan.requeue_at)
            self.now += 1.0
            self.make_pods()
            self.start_pods()
        raise AssertionError("the service does not come to rest")

    @property
    def live(self) -> list[Group]:
        return [group for group in self.groups.values() if not group.draining]


# Half of an older group of another service, which is just being placed.
OTHER = gang.GangPlacement(
    ("b", "other", 0), (0.5, "b", "other", 0), GPU_NODES, 2, 1, held=["n7"], starved_since=1e6
)


def cluster(nodes: int = 2, replicas: int = 2, **fields: object) -> Cluster:
    made = Cluster(spec(hardware={"nodes": nodes, "gpusPerNode": 8}, replicas=replicas, **fields))
    made.settle()
    return made


def test_a_new_service_gets_its_groups_and_then_rests() -> None:
    made = cluster()
    assert sorted(made.groups) == ["llama-0-a1", "llama-1-a2"]
    plan = made.reconcile()
    assert plan.serving == ["llama-0-a1-0", "llama-1-a2-0"]
    assert made.records == plan.records


def test_a_refused_attempt_keeps_its_number_and_its_group_waits() -> None:
    made = Cluster(spec(hardware={"nodes": 2, "gpusPerNode": 8}, replicas=2), refuses=True)
    for _ in range(3):
        plan = made.reconcile()
        assert [(new.index, new.attempt) for new in plan.create] == [(0, 1), (1, 2)]
        assert [(r.phase, r.detail) for r in plan.records] == [(GroupPhase.WAITING, "quota")] * 2
    made.settle()
    assert sorted(made.groups) == ["llama-0-a1", "llama-1-a2"]


def test_one_lost_pod_recreates_its_group_once_and_touches_no_other() -> None:
    made = cluster()
    victim = made.groups["llama-0-a1"]
    pods = (victim.pods[0], replace(victim.pods[1], uid="another"))
    made.groups["llama-0-a1"] = replace(victim, pods=pods)
    plan = made.reconcile()
    assert [group.name for group in plan.delete] == ["llama-0-a1"]
    assert plan.serving == ["llama-0-a3-0", "llama-1-a2-0"], "the old attempt is fenced at once"
    made.settle()
    assert sorted(made.groups) == ["llama-0-a3", "llama-1-a2"]
    assert {r.index: r.restarts for r in made.records} == {0: 1, 1: 0}
    assert {r.index: r.last_failure for r in made.records} == {
        0: "llama-0-a1-1 was replaced", 1: "",
    }  # fmt: skip


def test_the_next_attempt_avoids_a_machine_that_hangs_while_kubernetes_thinks_it_well() -> None:
    made = cluster(replicas=1)
    made.silent = {"n1"}  # frozen seconds ago; its peer has noticed and ended
    made.pods(lambda pod: replace(pod, restarts=1), only=0)
    (new,) = made.reconcile().create
    assert (new.attempt, new.avoid) == (2, ("n1",))
    made.settle()
    made.silent = set()
    made.pods(lambda pod: replace(pod, restarts=1), only=0)
    assert made.reconcile().records[0].avoid == [], "only the last failure counts"


@pytest.mark.parametrize("hangs", [True, False])
def test_a_start_that_ended_for_a_machine_that_hangs_has_not_failed(hangs: bool) -> None:
    made = Cluster(spec(hardware={"nodes": 2, "gpusPerNode": 8}))
    made.reconcile()
    made.make_pods()
    made.pods(lambda pod: replace(pod, node=f"n{pod.rank}", phase="Running", running=True))
    made.reconcile()
    made.silent = {"n1"} if hangs else set()
    made.pods(lambda pod: replace(pod, restarts=1), only=0)
    (record,) = made.reconcile().records
    assert (record.failures, record.start_failed) == (1, not hangs)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_next_attempt_avoids_the_node_that_was_lost(nodes: int) -> None:
    made = cluster(nodes=nodes, replicas=1)
    made.nodes["n0"] = Node("n0", reachable=False, since=made.now - 3600)
    (new,) = made.reconcile().create
    assert new.avoid == ("n0",)


def test_an_eviction_speaks_against_no_node() -> None:
    made = cluster(replicas=1)
    made.silent = {"n1"}
    made.pods(lambda pod: replace(pod, deleted_at=made.now + 100), only=1)
    plan = made.reconcile()
    assert [group.name for group, _ in plan.drain] == ["llama-0-a1"]
    assert plan.records[0].avoid == []


def test_an_eviction_drains_before_it_deletes() -> None:
    made = cluster()
    victim = made.groups["llama-0-a1"]
    leaving = replace(victim.pods[1], deleted_at=made.now + 100)
    made.groups["llama-0-a1"] = replace(victim, pods=(victim.pods[0], leaving))
    plan = made.reconcile()
    assert [group.name for group, _ in plan.drain] == ["llama-0-a1"]
    assert "llama-0-a1-0" not in plan.serving
    assert not plan.delete
    made.now += CONFIG.drain_notice
    assert [group.name for group in made.reconcile().delete] == ["llama-0-a1"]


def test_routers_forget_an_evicted_group_of_one_pod_while_it_still_answers() -> None:
    made = cluster(nodes=1)
    victim = made.groups["llama-0-a1"]
    leaving = replace(victim.pods[0], deleted_at=made.now + 100)
    made.groups["llama-0-a1"] = replace(victim, pods=(leaving,))
    plan = made.reconcile()
    assert plan.serving == ["llama-1-a2-0"]
    assert (plan.drain, plan.delete) == ([], []), "its StatefulSet replaces the pod"
    made.make_pods()
    made.start_pods()
    assert made.reconcile().serving == ["llama-0-a1-0", "llama-1-a2-0"]


def test_an_exhausted_group_is_kept_but_not_served() -> None:
    made = cluster(replicas=1, recovery={"maxRestarts": 0})
    made.pods(lambda pod: replace(pod, restarts=1), only=1)
    plan = made.reconcile()
    assert plan.serving == []
    assert [record.phase for record in plan.records] == [GroupPhase.FAILED]
    made.make_pods()
    made.start_pods()
    assert made.reconcile().records[0].phase is GroupPhase.FAILED
    made.target = "r2"  # a new revision, or the restart annotation, starts afresh
    made.settle()
    assert [group.revision for group in made.live] == ["r2"]


def test_an_exhausted_group_whose_set_is_deleted_gets_one_more_attempt() -> None:
    made = cluster(nodes=2, replicas=2, recovery={"maxRestarts": 0})
    made.pods(lambda pod: replace(pod, restarts=1), only=1)
    made.reconcile()
    made.pods(lambda pod: None, only=1)
    assert [record.phase for record in made.records] == [GroupPhase.FAILED] * 2
    # Neither waits for the other, which has half of its pods and is to keep them.
    del made.groups["llama-0-a1"]
    plan = made.reconcile()
    assert [(new.index, new.attempt) for new in plan.create] == [(0, 3)]
    made.make_pods()
    made.start_pods()
    made.reconcile()
    assert [record.phase for record in made.records] == [GroupPhase.READY, GroupPhase.FAILED]


def test_an_old_group_that_breaks_under_a_bad_update_comes_back_as_it_was() -> None:
    made = cluster(rollout={"maxUnavailable": 0, "maxSurge": 1})
    made.target = "bad"
    made.reconcile()
    made.make_pods()
    made.pods(lambda p: p if p.ready else replace(p, waiting=("ErrImagePull", "no such image")))
    victim = made.groups["llama-0-a1"]
    made.groups["llama-0-a1"] = replace(
        victim, pods=(replace(victim.pods[0], uid="x"), victim.pods[1])
    )
    plan = made.reconcile()
    assert plan.blocked
    assert [(new.index, new.revision) for new in plan.create] == [(0, "r1")]
    made.target = "r1"
    made.settle()
    assert [group.revision for group in made.live] == ["r1", "r1"]


def test_nothing_is_placed_while_another_group_is_half_placed() -> None:
    made = Cluster(spec(hardware={"nodes": 2, "gpusPerNode": 8}))
    made.others = [OTHER]
    plan = made.reconcile()
    assert (plan.create, plan.waits_for) == ([], "a service of another namespace")
    made.others = []
    made.settle()
    assert len(made.live) == 1


def test_the_younger_of_two_half_placed_groups_gives_up_and_later_returns() -> None:
    made = Cluster(spec(hardware={"nodes": 2, "gpusPerNode": 8}))
    made.reconcile()
    made.make_pods()
    made.pods(lambda pod: replace(pod, node="n0"), only=0)
    made.others = [OTHER]
    plan = made.reconcile()
    assert [group.name for group in plan.delete] == ["llama-0-a1"]
    assert made.groups == {}
    made.others = []
    made.settle()
    assert sorted(made.groups) == ["llama-0-a2"]


def test_a_group_that_does_not_fit_keeps_its_pods_until_another_needs_the_nodes_it_holds() -> None:
    made = Cluster(spec(hardware={"nodes": 2, "gpusPerNode": 8}))
    made.reconcile()
    made.make_pods()
    words = "0/8 nodes are available: 8 Insufficient nvidia.com/gpu."
    made.pods(lambda pod: replace(pod, node="n0"), only=0)
    made.pods(lambda pod: replace(pod, unschedulable=words, unplaced_since=made.now), only=1)
    made.reconcile()
    made.now += CONFIG.gang_timeout + 1
    plan = made.reconcile()
    assert (plan.delete, plan.records[0].phase) == ([], GroupPhase.PENDING)
    newcomer = ("b", "late", 0)
    waits = gang.GangPlacement(
        newcomer, (made.now, *newcomer), GPU_NODES, nodes=1, placed=0, starved_since=made.now
    )
    made.others = [waits]
    plan = made.reconcile()
    assert [group.name for group in plan.delete] == ["llama-0-a1"]
    ((_, reason, message),) = plan.events
    assert reason == "GroupYielded"
    assert "gave up 1 of 2 placed pods for a service of another namespace" in message
    made.now += 20
    assert made.reconcile().waits_for == "a service of another namespace", (
        "which has not been placed yet"
    )
    made.others = []
    assert [new.attempt for new in made.reconcile().create] == [2]


def test_a_suspended_service_has_no_groups_and_keeps_none_in_mind() -> None:
    made = cluster()
    made.spec = made.spec.model_copy(update={"suspend": True})
    made.settle()
    assert (made.groups, made.records) == ({}, [])


EVENTS: dict[str, Callable[[Cluster], object]] = {
    "reconcile": lambda c: c.reconcile(),
    "operator dies before it writes": lambda c: c.reconcile(dies_after=0),
    "operator dies after one write": lambda c: c.reconcile(dies_after=1),
    "operator dies after two writes": lambda c: c.reconcile(dies_after=2),
    "status wiped": Cluster.wipe_status,
    "pods made": Cluster.make_pods,
    "pods start": Cluster.start_pods,
    "rank 1 replaced": lambda c: c.pods(lambda p: replace(p, uid=c.uid(), ready=False), only=1),
    "rank 0 restarts": lambda c: c.pods(lambda p: replace(p, restarts=p.restarts + 1), only=0),
    "rank 0 gone": lambda c: c.pods(lambda p: None, only=0),
    "eviction": lambda c: c.pods(lambda p: replace(p, deleted_at=c.now + 30), only=1),
    "node silent": lambda c: c.nodes.update(n0=Node("n0", False, c.now)),
    "node hangs": lambda c: c.silent.add("n0"),
    "node gone": lambda c: c.nodes.pop("n1", None),
    "node back": lambda c: c.nodes.update(n0=Node("n0"), n1=Node("n1")),
    "new revision": lambda c: setattr(c, "target", "r2" if c.target == "r1" else "r3"),
    "rollback": lambda c: setattr(c, "target", "r1"),
    "more": lambda c: setattr(c, "spec", c.spec.model_copy(update={"replicas": 3})),
    "fewer": lambda c: setattr(c, "spec", c.spec.model_copy(update={"replicas": 1})),
    "groups are refused": lambda c: setattr(c, "refuses", True),
    "groups are made again": lambda c: setattr(c, "refuses", False),
    "time": lambda c: setattr(c, "now", c.now + 45),
}


def test_a_plan_asks_for_the_earliest_of_its_next_looks() -> None:
    plan = Plan(last_attempt=0)
    for when in (3.0, 1.0, 2.0):
        plan.requeue_by(when)
    assert plan.requeue_at == 1.0


@examples(1000)
@given(st.integers(1, 2), st.lists(st.sampled_from(sorted(EVENTS)), max_size=25))
def test_whatever_happens_it_converges_without_leftovers(nodes: int, events: list[str]) -> None:
    made = cluster(nodes=nodes, recovery={"maxRestarts": 1000})
    for event in events:
        EVENTS[event](made)
        plan = made.reconcile()
        attempts = {f"{group.name}-0" for group in made.groups.values() if not group.draining}
        attempts |= {f"{new.name(SERVICE.name)}-0" for new in plan.create}  # refused ones included
        assert set(plan.serving) <= attempts, "routers never hear of an attempt that is leaving"
    made.settle()
    assert len(made.live) == len(made.groups) == made.spec.replicas
    assert {group.revision for group in made.live} == {made.target}
    assert all(record.phase is GroupPhase.READY for record in made.records)
    before = dict(made.groups)
    plan = made.reconcile()
    assert made.groups == before
    assert plan.records == made.records
