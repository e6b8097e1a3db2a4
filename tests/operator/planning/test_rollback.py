"""When the last good revision comes back, over random histories of a service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from radixgrove.operator.api.spec import Recovery
from radixgrove.operator.api.status import GroupPhase, GroupStatus, InferenceServiceStatus
from radixgrove.operator.planning import image_check
from radixgrove.operator.planning.diagnosis import RETRIED
from radixgrove.operator.planning.image_check import Candidate, candidate, judge
from radixgrove.operator.planning.observed import Group, JobState, Pod
from radixgrove.operator.planning.recovery import Fault, after_fault, remember
from radixgrove.operator.planning.rollback import decide, failing, good_revision

NOW = 1_800_000_000.0
RECOVERY = Recovery()
REVISIONS = ("r1", "r2", "r3")
IMAGES = {"r1": "one", "r2": "two", "r3": "one", "": ""}


def group(revision: str, state: str, index: int = 0) -> Group:
    """`state`: ready, starting, refused (of a volume), or stuck (its container ended before it was
    ever ready)."""
    said: dict[str, Any] = {
        "stuck": {"restarts": 1, "exited": "no such model"},
        "refused": {"not_mounted": "no such model"},
    }.get(state, {})
    pod = Pod(f"p{index}", f"u{index}", 0, node=f"n{index}", ready=state == "ready", **said)
    return Group(f"g{index}", f"s{index}", index, index + 1, revision, 1, 0.0, pods=(pod,))


groups = st.lists(
    st.tuples(
        st.sampled_from(REVISIONS), st.sampled_from(["ready", "starting", "refused", "stuck"])
    ),
    max_size=3,
).map(lambda found: [group(revision, state, i) for i, (revision, state) in enumerate(found)])
looks = st.lists(st.tuples(st.sampled_from(REVISIONS), groups), max_size=12)


@dataclass
class Service:
    """What its status remembers from look to look."""

    status: InferenceServiceStatus
    now: float = NOW

    def look(self, asked: str, found: list[Group], later: float = 5.0) -> str:
        """The revision that groups are to run, so many seconds later."""
        self.now += later
        known = {(g.attempt, g.revision): g for g in self.status.groups}
        records = [
            known.get((g.attempt, g.revision))
            or GroupStatus(index=g.index, attempt=g.attempt, revision=g.revision)
            for g in found
        ]
        before = self.status.model_copy(update={"groups": records})
        given_up = decide(asked, before, found, REVISIONS, self.now)
        runs = before.good_revision if given_up else asked
        ready = [g.revision for g in found if g.ready]
        self.status = before.model_copy(
            update={
                "good_revision": good_revision(runs, before, ready),
                "rolled_back": given_up.revision if given_up else "",
                "rolled_back_because": given_up.because if given_up else "",
                "groups": [
                    remember(g, record, RECOVERY, self.now)
                    for g, record in zip(found, records, strict=True)
                ],
            }
        )
        return runs


@given(looks)
def test_only_a_revision_that_never_ran_gives_way_and_only_to_one_that_did(
    history: list[tuple[str, list[Group]]],
) -> None:
    service = Service(InferenceServiceStatus())
    has_been_ready: set[str] = set()
    for asked, found in history:
        known = service.status
        runs = service.look(asked, found)
        if runs != asked:
            assert runs in has_been_ready
            assert known.good_revision == runs
            if known.rolled_back != asked:  # just now
                assert not any(g.ready or g.revision != asked for g in found), "nothing was left"
                assert any(pod.restarts for g in found for pod in g.pods), "it takes a minute"
                assert "no such model" in service.status.rolled_back_because
        has_been_ready |= {g.revision for g in found if g.ready}


@given(looks, st.sampled_from(REVISIONS), st.integers(1, 4))
def test_what_was_given_up_is_not_tried_again_and_another_is(
    history: list[tuple[str, list[Group]]], asked: str, times: int
) -> None:
    service = Service(InferenceServiceStatus())
    for revision, found in history:
        service.look(revision, found)
    if service.look(asked, []) == asked:
        return
    good = service.status.good_revision
    for _ in range(times):
        assert service.look(asked, [group(good, "ready")]) == good
    (other,) = set(REVISIONS) - {asked, good}
    assert service.look(other, [group(good, "ready")]) == other
    assert service.look(good, [group(good, "ready")]) == good
    assert service.status.rolled_back == ""


def test_a_single_replica_goes_back_after_its_first_failed_start() -> None:
    service = Service(InferenceServiceStatus())
    assert service.look("r1", [group("r1", "ready")]) == "r1"
    assert service.look("r2", [group("r1", "ready")]) == "r2"
    assert service.look("r2", [group("r2", "starting")]) == "r2"
    assert service.look("r2", [group("r2", "stuck")]) == "r1"


def serving_r1() -> Service:
    service = Service(InferenceServiceStatus())
    assert service.look("r1", [group("r1", "ready")]) == "r1"
    assert service.look("r2", [group("r1", "ready")]) == "r2"
    return service


def test_a_refusal_of_the_clusters_that_passes_gives_nothing_up() -> None:
    """A volume that the old pod's node has not let go of, say: that takes a minute by itself."""
    service = serving_r1()
    for _ in range(20):
        assert service.look("r2", [group("r2", "refused")]) == "r2"
    assert service.look("r2", [group("r2", "starting")]) == "r2"
    assert service.look("r2", [group("r2", "refused")], later=RETRIED) == "r2", "another one"
    assert service.look("r2", [group("r2", "ready")], later=RETRIED) == "r2"


def test_a_refusal_that_lasts_gives_the_revision_up() -> None:
    service = serving_r1()
    assert service.look("r2", [group("r2", "refused")]) == "r2"
    assert service.look("r2", [group("r2", "refused")], later=RETRIED - 10) == "r2"
    assert service.look("r2", [group("r2", "refused")], later=20) == "r1"
    assert service.status.rolled_back_because == "VolumeNotMounted: p0: no such model"


def test_only_what_ended_by_itself_speaks_against_a_revision() -> None:
    """Not a machine that was lost, or a pod that was evicted, while it started."""
    record = GroupStatus(index=0, attempt=1, revision="r2")
    lost_machine = Fault("p0 was on node n0, which is gone")
    of_itself = Fault("p0 ended: no such model", ended=True)
    lost = after_fault(record, lost_machine, RECOVERY, NOW)
    assert lost.failures == 1
    assert not failing(lost, None)
    ended = after_fault(record, of_itself, RECOVERY, NOW)
    assert failing(ended, None)
    again = remember(group("r2", "starting"), ended, RECOVERY, NOW)
    assert failing(again, group("r2", "starting")), "it has not been ready since"
    well = remember(group("r2", "ready"), again, RECOVERY, NOW)
    assert not failing(well, group("r2", "ready"))
    off = Recovery.model_validate({"policy": "None"})
    for cause, gives_up in ((lost_machine, None), (of_itself, "r2")):
        kept = after_fault(record, cause, off, NOW)
        assert kept.phase is GroupPhase.FAILED
        before = InferenceServiceStatus(groups=[kept], good_revision="r1")
        found = decide("r2", before, [group("r2", "starting")], REVISIONS, NOW)
        assert (found and found.revision) == gives_up
    once_ready = record.model_copy(update={"was_ready": True})
    fell = after_fault(once_ready, Fault("p0 ended", ended=True), RECOVERY, NOW)
    assert not failing(fell, None)


# ---- trying an image first -----------------------------------------------------------------------


@given(groups, st.sampled_from(REVISIONS), st.integers(0, 2))
def test_an_image_is_tried_only_before_a_ready_group_would_go_for_it(
    found: list[Group], target: str, unavailable: int
) -> None:
    wanted = candidate(found, target, unavailable, IMAGES.__getitem__)
    others = [g for g in found if g.ready and g.revision != target]
    if wanted is not None:
        assert unavailable > 0
        assert wanted.image == IMAGES[target]
        assert any(IMAGES[g.revision] != wanted.image for g in others)
        assert set(wanted.nodes) == {pod.node for g in others for pod in g.pods}
    elif unavailable and any(IMAGES[g.revision] != IMAGES[target] for g in others):
        assert any(p.running for g in found if g.revision == target for p in g.pods)


def test_of_another_command_nothing_is_tried() -> None:
    assert candidate([group("r1", "ready")], "r2", 1, lambda revision: "") is None


WANTED = Candidate("example.com/worker:2", ("n0",))


def test_a_try_holds_the_rollout_until_it_ends_well() -> None:
    name = "llama-image-x"
    assert judge(WANTED, None).hold
    assert judge(WANTED, JobState(name, "u")).hold
    assert judge(WANTED, JobState(name, "u", succeeded=True)) == image_check.ImageCheck()
    failed = judge(WANTED, JobState(name, "u", failed=True, message="radixgrove: not found"))
    assert failed.hold
    assert failed.problem is not None
    assert failed.problem.reason == "ImageCheckFailed"
    assert "not found" in failed.problem.message
    missing = Pod("p", "u", 0, waiting=("ErrImagePull", "no such image"))
    stuck = judge(WANTED, JobState(name, "u", pod=missing))
    assert stuck.hold
    assert stuck.problem is not None


def test_where_no_pod_fits_nothing_can_be_tried() -> None:
    full = Pod("p", "u", 0, unschedulable="0/2 nodes are available: Too many pods")
    assert judge(WANTED, JobState("llama-image-x", "u", pod=full)) == image_check.ImageCheck()


def test_where_the_api_server_admits_no_pod_it_is_said_and_a_quota_holds_nothing_up() -> None:
    job = JobState("llama-image-x", "u", refused="pods are forbidden: violates PodSecurity")
    found = judge(WANTED, job)
    assert found.hold
    assert found.problem is not None
    assert found.problem.reason == "PodRefused"
    job = JobState("llama-image-x", "u", refused="exceeded quota: small, requested: pods=1")
    assert judge(WANTED, job) == image_check.ImageCheck()
