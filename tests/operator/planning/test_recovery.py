"""When a group is over, and when it tries again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.operator.api import times
from radixgrove.operator.api.spec import Recovery
from radixgrove.operator.api.status import GroupPhase, GroupStatus
from radixgrove.operator.planning.demand import Node
from radixgrove.operator.planning.observed import Group, Pod
from radixgrove.operator.planning.recovery import (
    MAX_BACKOFF,
    Fault,
    after_fault,
    assess,
    backoff,
    remember,
)
from radixgrove.operator.planning.rollback import failing

NODES = {"n0": Node("n0"), "n1": Node("n1")}
RECOVERY = Recovery.model_validate({"nodeGrace": "30s"})
NOW = 1_000_000.0


def pod(rank: int, **fields: object) -> Pod:
    healthy = Pod(
        f"llama-0-a1-{rank}", f"uid-{rank}", rank, f"n{rank}", "Running", ready=True, running=True
    )
    return replace(healthy, **fields)  # type: ignore[arg-type]


def group(*pods: Pod, nodes: int = 2) -> Group:
    return Group("llama-0-a1", "set-1", 0, 1, "r1", nodes, NOW - 100, pods=pods)


HEALTHY = group(pod(0), pod(1))
RECORD = remember(HEALTHY, GroupStatus(index=0), RECOVERY, NOW)


def fault(
    seen: Group,
    record: GroupStatus = RECORD,
    *,
    nodes: dict[str, Node] = NODES,
    lease: bool = False,
    now: float = NOW,
) -> Fault | None:
    return assess(seen, record, nodes, RECOVERY, lambda _: lease, now).fault


def test_a_healthy_group_has_no_fault() -> None:
    assert fault(HEALTHY) is None


def test_a_pod_replaced_before_anybody_looked_is_noticed_by_its_uid() -> None:
    found = fault(group(pod(0), pod(1, uid="another")))
    assert found is not None
    assert "replaced" in found.message


@pytest.mark.parametrize("policy", ["RecreateGroup", "None"])
@pytest.mark.parametrize("failures", [0, 100])
def test_long_last_words_fit_into_a_status_that_the_api_server_takes(
    policy: str, failures: int
) -> None:
    log = "first line\n" + "x" * 2000 + "\nthe error"
    seen = fault(group(pod(0), pod(1, restarts=1, exited=log)))
    assert seen is not None
    recovery = Recovery.model_validate({"policy": policy})
    record = RECORD.model_copy(update={"failures": failures, "program_failures": failures})
    detail = after_fault(record, seen, recovery, NOW).detail
    assert "llama-0-a1-1" in detail
    assert detail.endswith("the error")
    GroupStatus.model_validate({"index": 0, "detail": detail})


def test_a_rank_restarted_in_place_ends_the_group() -> None:
    found = fault(group(pod(0), pod(1, restarts=1, exited="NCCL error")))
    assert found is not None
    assert "NCCL error" in found.message


def test_an_evicted_rank_drains_its_group() -> None:
    found = fault(group(pod(0), pod(1, deleted_at=NOW + 100)))
    assert found is not None
    assert found.drain


def test_a_vanished_pod_ends_the_group() -> None:
    assert fault(group(pod(0))) is not None


def test_a_single_pod_is_the_kubelets_to_restart_and_is_only_counted() -> None:
    alone = remember(group(pod(0), nodes=1), GroupStatus(index=0), RECOVERY, NOW)
    restarted = group(pod(0, restarts=2), nodes=1)
    assert fault(restarted, alone) is None
    counted = remember(restarted, alone, RECOVERY, NOW)
    assert counted.restarts == 2
    assert remember(restarted, counted, RECOVERY, NOW).restarts == 2


@pytest.mark.parametrize(
    "taken",
    [
        {"uid": "another"},
        {"phase": "Failed", "verdict": "The node was low on resource: memory."},
        {"restarts": 1, "cut_off": True, "exited": "Unknown"},
    ],
)
def test_where_a_pod_was_taken_away_the_ends_of_its_peers_programs_say_nothing(
    taken: dict[str, object],
) -> None:
    left = pod(0, restarts=1, exited="rank 1 (machine 1) is gone")
    found = fault(group(left, pod(1, **taken)))
    assert found is not None
    assert not found.ended
    assert found.message.startswith("llama-0-a1-1 ")
    assert str(taken.get("verdict", "")) in found.message
    crashed = fault(group(left, pod(1)))
    assert crashed is not None
    assert crashed.ended


def test_a_pod_that_has_run_is_given_its_grace_also_where_its_last_start_failed() -> None:
    hurt = group(pod(0), pod(1, running=False, ready=False))
    silent = NODES | {"n1": Node("n1", reachable=False, since=NOW)}
    assert fault(hurt, nodes=silent, now=NOW + 1) is None


@pytest.mark.parametrize(("ran", "ended"), [(599.0, True), (601.0, False)])
def test_a_rank_that_ended_for_the_want_of_another_one_has_not_failed(
    ran: float, ended: bool
) -> None:
    waited = pod(0, restarts=1, ran=ran, exited="rank 1 did not join within 600 s", ready=False)
    alone = group(waited, pod(1, running=False, ready=False))
    record = remember(alone, GroupStatus(index=0), RECOVERY, NOW)
    assert failing(record, alone) == ended
    found = fault(group(waited, pod(1)), record)
    assert found is not None
    assert found.ended == ended
    found = fault(group(waited, pod(1)), RECORD)
    assert found is not None
    assert found.ended, "all had come"


def test_a_container_that_the_runtime_did_not_start_at_once_has_not_failed() -> None:
    """As on a new machine, of which the GPU driver is yet to load."""
    refused = pod(0, restarts=1, never_began=True, exited="driver not loaded", ready=False)
    alone = group(replace(refused, running=False), pod(1, ready=False))
    record = remember(alone, GroupStatus(index=0), RECOVERY, NOW)
    assert fault(alone, record) is None
    assert record.hindered_since == times.to_text(NOW)
    begun = group(replace(refused, started_at=NOW), pod(1, ready=False))
    assert fault(begun, record) is None
    runs = remember(begun, record, RECOVERY, NOW)
    assert (runs.all_ran, runs.hindered_since) == (True, None)
    assert not failing(runs, begun)
    again = fault(group(pod(0, restarts=2, exited="NCCL error"), pod(1)), runs)
    assert again is not None
    assert again.ended


def test_a_slow_image_pull_is_no_failure_of_its_peers() -> None:
    pulling = group(pod(0, restarts=3, ready=False), pod(1, running=False, ready=False))
    record = remember(pulling, GroupStatus(index=0), RECOVERY, NOW)
    assert fault(pulling, record) is None
    # Its peer has timed out meanwhile and waits to be replaced: that shows once all ranks ran.
    all_run = group(pod(0, restarts=3, ready=False), pod(1))
    assert fault(all_run, remember(all_run, record, RECOVERY, NOW)) is not None


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_silent_node_fails_its_group_after_the_grace_and_not_before(nodes: int) -> None:
    silent = {"n0": Node("n0", reachable=False, since=NOW), "n1": Node("n1")}
    seen = group(*[pod(rank) for rank in range(nodes)], nodes=nodes)
    early = assess(seen, RECORD, silent, RECOVERY, lambda _: False, NOW + 29)
    assert early.fault is None
    assert early.recheck_at == NOW + 30
    assert fault(seen, nodes=silent, now=NOW + 30) is not None


def test_a_worker_that_still_holds_its_lease_is_not_lost() -> None:
    silent = {"n0": Node("n0", reachable=False, since=NOW - 1000), "n1": Node("n1")}
    assert fault(HEALTHY, nodes=silent, lease=True) is None


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("lost", [{"n0": Node("n0", reachable=False, since=NOW)}, {}])
def test_a_pod_that_never_ran_on_its_lost_node_is_not_waited_for(
    nodes: int, lost: dict[str, Node]
) -> None:
    starting = [pod(0, phase="Pending", running=False, ready=False)]
    starting += [pod(rank, ready=False) for rank in range(1, nodes)]
    found = fault(group(*starting, nodes=nodes), nodes={**lost, "n1": Node("n1")}, lease=True)
    assert found is not None
    assert found.node == "n0"


def test_a_pod_that_is_not_placed_or_starts_on_a_living_node_is_waited_for() -> None:
    unplaced = pod(0, node="", phase="Pending", running=False, ready=False)
    starting = pod(1, phase="Pending", running=False, ready=False)
    waiting = group(unplaced, starting)
    assert fault(waiting, remember(waiting, GroupStatus(index=0), RECOVERY, NOW)) is None


def test_a_pod_that_does_not_end_is_given_up_after_its_grace() -> None:
    stuck = group(pod(0, deleted_at=NOW), nodes=1)
    assert fault(stuck, now=NOW + 29) is None
    assert fault(stuck, now=NOW + 31) is not None


def test_a_deleted_node_takes_its_pods_with_it() -> None:
    assert fault(HEALTHY, nodes={"n0": Node("n0")}) is not None


def test_failures_are_forgotten_after_a_stable_while() -> None:
    failed = after_fault(RECORD, Fault("boom"), RECOVERY, NOW)
    counts = {"failures": 4, "program_failures": 2}
    failed = failed.model_copy(update=counts | {"ready_since": times.to_text(NOW)})
    still, forgotten = (remember(HEALTHY, failed, RECOVERY, NOW + after) for after in (599, 601))
    assert (still.failures, still.program_failures, still.last_failure) == (4, 2, "boom")
    assert (forgotten.failures, forgotten.program_failures, forgotten.last_failure) == (0, 0, "")


def test_the_budget_ends_in_a_failed_group_that_is_kept() -> None:
    record = RECORD
    for _ in range(RECOVERY.max_restarts):
        record = after_fault(record, Fault("boom", ended=True), RECOVERY, NOW)
        assert record.phase is GroupPhase.WAITING
    record = after_fault(record, Fault("boom", ended=True), RECOVERY, NOW)
    assert record.phase is GroupPhase.FAILED
    assert "boom" in record.detail


def test_machines_that_are_lost_time_and_again_leave_no_group_failed() -> None:
    """As when all nodes of a cluster are replaced one after the other, or go as they are needed."""
    record = RECORD
    for _ in range(3 * RECOVERY.max_restarts):
        record = after_fault(record, Fault("llama-0-a1-0 was on node n0"), RECOVERY, NOW)
        assert record.phase is GroupPhase.WAITING
    assert record.retry_at == times.to_text(NOW + MAX_BACKOFF), "it takes its time"
    assert after_fault(record, Fault("boom", ended=True), RECOVERY, NOW).phase is GroupPhase.WAITING


def test_recovery_can_be_switched_off() -> None:
    off = Recovery.model_validate({"policy": "None"})
    assert after_fault(RECORD, Fault("boom"), off, NOW).phase is GroupPhase.FAILED


@given(st.integers(1, 10_000), st.floats(0, 10_000))
def test_the_back_off_grows_and_is_bounded(failures: int, base: float) -> None:
    assert 0 <= backoff(failures, base) <= backoff(failures + 1, base) <= MAX_BACKOFF


def test_the_first_recovery_is_immediate() -> None:
    assert backoff(1, 10) == 0
    assert [backoff(n, 10) for n in (2, 3, 4)] == [10, 20, 40]
