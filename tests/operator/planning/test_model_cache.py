"""From a source to files: resolving, downloading once, sharing, failing in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from radixgrove.operator.api import names
from radixgrove.operator.api.spec import CacheSpec, InferenceServiceSpec
from radixgrove.operator.api.status import ModelStatus
from radixgrove.operator.planning.model_cache import (
    BYTES,
    COMPLETE,
    Cache,
    CacheStep,
    decide,
    wanted_claims,
)
from radixgrove.operator.planning.observed import JobState, Pod
from radixgrove.operator.render import models
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.models import User, resolve_job_name
from radixgrove.protocol.model.fit import Intended
from tests.operator.operator_builders import CONFIG, SERVICE, spec

NOW = 1_000_000.0
COMMIT = "c" * 40
HUB = "hf://org/model"


def step(
    resource: InferenceServiceSpec,
    known: ModelStatus | None = None,
    jobs: dict[str, JobState] | None = None,
    claims: dict[str, dict[str, str]] | None = None,
    now: float = NOW,
    others: Sequence[User] = (),
) -> CacheStep:
    """`claims` are those that exist, with their annotations; `others` are younger services."""
    live = {name: live_claim(annotations) for name, annotations in (claims or {}).items()}
    cache = Cache(jobs or {}, live, [User(SERVICE, resource.model.cache), *others])
    return decide(SERVICE, resource, known or ModelStatus(), cache, CONFIG, now)


def live_claim(annotations: dict[str, str]) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "7Gi"}}}
    return {
        "metadata": {"annotations": annotations},
        "spec": spec | {"storageClassName": "theirs", "volumeName": "v"},
    }


def kinds(found: CacheStep) -> list[str]:
    return [child["kind"] for child in found.apply]


def hub(**model: Any) -> InferenceServiceSpec:
    return spec(model={"source": HUB} | model)


def test_a_claim_of_the_users_is_read_as_it_is() -> None:
    found = step(spec(model={"source": "pvc://models/llama/8b"}), claims={"models": {}})
    assert found.ready
    assert found.at is not None
    assert (found.at.claim, found.at.sub_path) == ("models", "llama/8b")
    assert found.apply == []


def test_a_claim_of_the_users_that_is_not_there_is_named_and_waited_for() -> None:
    resource = spec(model={"source": "pvc://models/llama/8b"})
    assert wanted_claims(resource, ModelStatus()) == ["models"]
    found = step(resource)
    assert (found.ready, found.at, found.reason) == (False, None, "ClaimNotFound")
    assert "the claim models" in found.message
    assert found.requeue_at == NOW + 30


@pytest.mark.parametrize(
    ("phase", "expected"),
    [("Pending", (True, False, "ClaimPending")), ("Lost", (False, True, "ClaimLost"))],
)
def test_a_claim_of_the_users_that_holds_nothing_is_not_called_provided(
    phase: str, expected: tuple[bool, bool, str]
) -> None:
    claim = live_claim({}) | {"status": {"phase": phase}}
    cache = Cache({}, {"models": claim}, [])
    resource = spec(model={"source": "pvc://models/llama"})
    found = decide(SERVICE, resource, ModelStatus(), cache, CONFIG, NOW)
    assert (found.ready, found.present, found.reason) == expected
    assert found.requeue_at == NOW + 30
    if phase == "Pending":
        assert "ReadWriteMany of the storage class theirs" in found.message


@pytest.mark.parametrize(
    ("said", "shown"),
    [("starting\nKilled by the node", "Killed by the node"), ("OOMKilled", "OOMKilled"),
     ('{"level": 3}', "no message"), ("", "no message")],
)  # fmt: skip
def test_a_fetcher_that_was_ended_from_outside_shows_what_it_left(said: str, shown: str) -> None:
    claim = names.cache_name(HUB, COMMIT)
    job = JobState(claim, "u", failed=True, finished_at=NOW, message=said)
    found = step(hub(revision=COMMIT), jobs={claim: job}, claims={claim: {}})
    assert found.message.startswith(shown)
    assert "{" not in found.message


def test_a_lookup_that_is_tried_again_says_why() -> None:
    model = hub()
    name = models.resolve_job_name(SERVICE, model.model)
    said = json.dumps({"reason": "DownloadFailed", "message": "the hub is not reached"})
    job = JobState(name, "u", message=said, pod=Pod("third", "u", 0, running=True))
    found = step(model, jobs={name: job})
    assert found.reason == "Resolving"
    assert found.message == "looking up the revision; tried again after: the hub is not reached"


def test_a_claim_without_a_volume_names_the_value_that_chooses_its_storage_class() -> None:
    words = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    name = names.cache_name(HUB, COMMIT)
    job = JobState(name, "uid", pod=Pod("download", "uid", 0, unschedulable=words))
    claim = live_claim({}) | {"status": {"phase": "Pending"}}
    claim["metadata"]["name"] = name
    del claim["spec"]["storageClassName"]
    cache = Cache({name: job}, {name: claim}, [User(SERVICE, CacheSpec())])
    found = decide(SERVICE, hub(revision=COMMIT), ModelStatus(), cache, CONFIG, NOW)
    assert found.reason == "Unschedulable"
    for part in (
        words,
        name,
        "the cluster's default storage class",
        "modelCache.storageClass",
        "modelCache.accessMode",
    ):
        assert part in found.message


def test_an_image_is_mounted_as_it_is() -> None:
    reference = "registry.example.com/models/llama:8b"
    resource = spec(model={"source": f"oci://{reference}", "path": "models/llama"})
    found = step(resource)
    assert (found.ready, found.reason, found.apply) == (True, "ImageVolume", [])
    assert found.at is not None
    assert (found.at.image, found.at.directory) == (reference, "/model/models/llama")


def test_a_node_path_is_said_to_be_one() -> None:
    found = step(spec(model={"source": "file:///srv/models/llama"}))
    assert found.at is not None
    assert found.at.host_path == "/srv/models/llama"
    assert found.reason == "NodePath"
    assert "hostPath" in found.message


def test_a_branch_is_looked_up_before_anything_is_fetched() -> None:
    found = step(hub())
    assert (kinds(found), found.ready, found.reason) == (["Job"], False, "Resolving")


def test_what_it_stood_for_is_kept_when_the_branch_moves() -> None:
    known = ModelStatus(source=HUB, requested_revision="main", revision=COMMIT)
    found = step(hub(revision="main"), known)
    assert found.status.revision == COMMIT
    assert found.reason == "Downloading"
    assert step(hub(revision="v2"), known).reason == "Resolving", "another branch is another model"


def test_a_commit_needs_no_lookup() -> None:
    found = step(hub(revision=COMMIT))
    assert kinds(found) == ["PersistentVolumeClaim", "Job"]
    assert found.status.claim == names.cache_name(HUB, COMMIT)


def test_a_resolved_revision_leads_to_the_download_and_its_job_goes() -> None:
    name = resolve_job_name(SERVICE, hub().model)
    job = JobState(name, "u", succeeded=True, message=json.dumps({"revision": COMMIT}))
    found = step(hub(), jobs={name: job})
    assert found.status.revision == COMMIT
    assert found.delete_jobs == [job]


def test_a_finished_download_is_remembered_on_the_claim() -> None:
    claim = names.cache_name(HUB, COMMIT)
    done = JobState(claim, "u", succeeded=True)
    found = step(hub(revision=COMMIT), jobs={claim: done}, claims={claim: {}})
    assert found.ready
    assert found.apply[0]["metadata"]["annotations"][COMPLETE] == "true"
    # Also when somebody deleted the Job.
    again = step(hub(revision=COMMIT), claims={claim: {COMPLETE: "true"}})
    assert again.ready
    assert kinds(again) == ["PersistentVolumeClaim"]


def test_the_size_of_what_came_is_remembered_on_the_claim() -> None:
    claim = names.cache_name(HUB, COMMIT)
    said = json.dumps({"revision": COMMIT, "bytes": "810000000000"})
    done = JobState(claim, "u", succeeded=True, message=said)
    found = step(hub(revision=COMMIT), jobs={claim: done}, claims={claim: {}})
    assert found.size == 810_000_000_000
    annotations = found.apply[0]["metadata"]["annotations"]
    without_job = step(hub(revision=COMMIT), claims={claim: annotations})
    assert without_job.size == found.size
    assert without_job.apply == found.apply, "once said, nothing is written any more"


@pytest.mark.parametrize("annotations", [{COMPLETE: "true"}, {COMPLETE: "true", BYTES: "many"}])
def test_a_claim_of_unknown_size_is_as_good(annotations: dict[str, str]) -> None:
    found = step(hub(revision=COMMIT), claims={names.cache_name(HUB, COMMIT): annotations})
    assert (found.ready, found.size) == (True, 0)


def test_a_failed_download_says_why_and_is_tried_again_later() -> None:
    claim = names.cache_name(HUB, COMMIT)
    said = json.dumps({"reason": "Unauthorized", "message": "set model.tokenSecret"})
    job = JobState(claim, "u", failed=True, finished_at=NOW, message=said)
    found = step(hub(revision=COMMIT), jobs={claim: job}, claims={claim: {}})
    assert found.reason == "Unauthorized"
    assert found.message.startswith("set model.tokenSecret (tried again at 1970-01-12T13:47:40Z")
    assert claim in found.message, "the Job that a user deletes to have it tried at once"
    assert found.delete_jobs == []
    assert found.requeue_at == NOW + CONFIG.model_cache.retry_after
    later = step(hub(revision=COMMIT), jobs={claim: job}, claims={claim: {}}, now=NOW + 61)
    assert later.delete_jobs == [job]
    assert later.status.failures == 1


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("tp 4 does not divide 9 query heads", "tp is parallelism.tp of the service"),
        ("max_model_len 9 exceeds 8", "max_model_len is engine.contextLength of the service"),
        ("the weights take 15 GiB", "see hardware, parallelism and engine.quantize"),
    ],
)
def test_a_model_that_does_not_fit_names_the_fields_it_does_not_fit(said: str, fields: str) -> None:
    claim = names.cache_name(HUB, COMMIT)
    message = json.dumps({"reason": "ModelDoesNotFit", "message": said})
    job = JobState(claim, "u", failed=True, finished_at=NOW, message=message)
    job = replace(job, intended=names.digest([]))  # as nothing is known of the service
    found = step(hub(revision=COMMIT), jobs={claim: job}, claims={claim: {}})
    assert found.message.startswith(f"{said}; {fields} (tried again")


def test_a_bucket_that_changed_before_it_was_fetched_is_looked_up_again() -> None:
    """As when it was still being filled at the first lookup."""
    bucket = spec(model={"source": "s3://models/llama"})
    known = ModelStatus(source="s3://models/llama", revision="a" * 40)
    name = names.cache_name("s3://models/llama", "a" * 40)
    said = json.dumps({"reason": "ModelChanged", "message": "the objects changed"})
    job = JobState(name, "u", failed=True, finished_at=NOW, message=said)
    waits = step(bucket, known, {name: job}, {name: {}}, now=NOW + 1)
    assert (waits.reason, waits.status.revision) == ("ModelChanged", "a" * 40)
    again = step(bucket, waits.status, {name: job}, {name: {}}, now=waits.requeue_at or 0.0)
    assert again.delete_jobs == [job]
    lookup = step(bucket, again.status)
    assert (lookup.reason, kinds(lookup)) == ("Resolving", ["Job"])
    done = {resolve_job_name(SERVICE, bucket.model): JobState(
        "r", "u", succeeded=True, message=json.dumps({"revision": "b" * 40})
    )}  # fmt: skip
    assert step(bucket, lookup.status, done).status.revision == "b" * 40


def test_a_model_that_was_unfit_for_another_service_is_judged_anew() -> None:
    claim = names.cache_name(HUB, COMMIT)
    resource = hub(revision=COMMIT)

    def look(tp: int, reason: str, judged_for: int) -> CacheStep:
        job = models.download_job(
            claim, SERVICE, resource.model, COMMIT, CONFIG, Intended(tp=judged_for)
        )
        state = JobState(
            claim, "u", failed=True, finished_at=NOW,
            message=json.dumps({"reason": reason, "message": "x"}),
            intended=job["metadata"]["annotations"][names.INTENDED],
        )  # fmt: skip
        cache = Cache(
            {claim: state}, {claim: live_claim({})}, [User(SERVICE, CacheSpec())], Intended(tp=tp)
        )
        return decide(SERVICE, resource, ModelStatus(), cache, CONFIG, NOW)

    changed = look(2, "ModelDoesNotFit", judged_for=3)
    assert (changed.reason, len(changed.delete_jobs)) == ("Downloading", 1)
    assert changed.requeue_at is not None
    assert look(3, "ModelDoesNotFit", judged_for=3).reason == "ModelDoesNotFit"
    assert look(2, "DownloadFailed", judged_for=3).reason == "DownloadFailed", "waits its time"


def test_a_download_that_keeps_failing_is_tried_less_and_less_down_to_once_an_hour() -> None:
    claim = names.cache_name(HUB, COMMIT)
    job = JobState(claim, "u", failed=True, finished_at=NOW)
    waits, known = [], ModelStatus(source=HUB, requested_revision=COMMIT)
    for _ in range(9):
        waiting = step(hub(revision=COMMIT), known, jobs={claim: job}, claims={claim: {}})
        assert waiting.requeue_at is not None
        waits.append(waiting.requeue_at - NOW)
        known = step(
            hub(revision=COMMIT), known, jobs={claim: job}, claims={claim: {}}, now=NOW + waits[-1]
        ).status
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    done = step(hub(revision=COMMIT), known, claims={claim: {COMPLETE: "true"}})
    assert done.status.failures == 0
    other = step(hub(revision="d" * 40), known)
    assert other.status.failures == 0


@pytest.mark.parametrize("message", ["", "no json", "[1]", '{"reason": 3}'])
def test_a_job_without_clear_last_words_is_still_a_failure(message: str) -> None:
    claim = names.cache_name(HUB, COMMIT)
    job = JobState(claim, "u", failed=True, finished_at=NOW, message=message)
    found = step(hub(revision=COMMIT), jobs={claim: job}, claims={claim: {}})
    assert not found.ready
    assert found.reason


def test_the_claim_belongs_to_all_its_users_unless_it_is_to_stay() -> None:
    owners = step(hub(revision=COMMIT)).apply[0]["metadata"]["ownerReferences"]
    assert [(o["uid"], o["controller"]) for o in owners] == [(SERVICE.uid, False)]
    kept = step(hub(revision=COMMIT, cache={"retain": True})).apply[0]
    assert kept["metadata"]["ownerReferences"] == []


def test_users_of_one_claim_render_it_alike() -> None:
    """Or they would undo each other's work for ever."""
    claim = names.cache_name(HUB, COMMIT)
    own, other = CacheSpec(size="10Gi"), CacheSpec(size="20Gi", retain=True)
    younger = Service("team-a", "younger", "uid-2")
    users = [User(SERVICE, own, claim), User(younger, other, claim)]
    stranger = User(Service("team-a", "stranger", "uid-3"), own, "another-claim")
    rendered = [
        decide(
            service,
            hub(revision=COMMIT, cache=cache),
            ModelStatus(),
            Cache({}, {}, [*users, stranger]),
            CONFIG,
            NOW,
        ).apply[0]
        for service, cache in ((SERVICE, {"size": "10Gi"}), (younger, {"size": "20Gi"}))
    ]
    assert rendered[0] == rendered[1]
    assert rendered[0]["spec"]["resources"]["requests"]["storage"] == "10Gi"
    assert rendered[0]["metadata"]["ownerReferences"] == [], "one of them wants it kept"


def test_a_second_user_joins_the_owners_with_its_first_look() -> None:
    claim = names.cache_name(HUB, COMMIT)
    joining = Service("team-a", "joining", "uid-2")
    users = [User(SERVICE, CacheSpec(), claim), User(joining, CacheSpec())]
    found = decide(joining, hub(revision=COMMIT), ModelStatus(), Cache({}, {}, users), CONFIG, NOW)
    owners = found.apply[0]["metadata"]["ownerReferences"]
    assert [owner["uid"] for owner in owners] == [SERVICE.uid, "uid-2"]


def test_a_claim_that_exists_is_not_reshaped() -> None:
    claim = names.cache_name(HUB, COMMIT)
    found = step(hub(revision=COMMIT, cache={"size": "1Gi"}), claims={claim: {COMPLETE: "true"}})
    assert found.apply[0]["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "7Gi"}},
        "storageClassName": "theirs",
    }


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (Pod("p", "u", 0, unschedulable="pod has unbound claims"), "Unschedulable"),
        (Pod("p", "u", 0, waiting=("ErrImagePull", "no such image")), "ImagePull"),
        (Pod("p", "u", 0, waiting=("CreateContainerConfigError", "no secret")), "ContainerConfig"),
    ],
)
def test_a_download_that_does_not_start_says_why(pod: Pod, reason: str) -> None:
    claim = names.cache_name(HUB, COMMIT)
    jobs = {claim: JobState(claim, "u", pod=pod)}
    found = step(hub(revision=COMMIT), jobs=jobs, claims={claim: {}})
    assert (found.ready, found.reason) == (False, reason)
    assert (pod.unschedulable or pod.waiting[1]) in found.message


def test_the_field_that_names_what_a_download_lacks_is_said() -> None:
    waits = Pod("p", "u", 0, waiting=("CreateContainerConfigError", 'secret "typo" not found'))
    claim = names.cache_name(HUB, COMMIT)
    wanted = hub(revision=COMMIT, tokenSecret="typo")
    found = step(wanted, jobs={claim: JobState(claim, "u", pod=waits)}, claims={claim: {}})
    assert found.message == (
        'p: secret "typo" not found (named by model.tokenSecret: make it, or name another one)'
    )


def test_a_job_without_a_pod_is_looked_at_again_for_only_events_say_why() -> None:
    claim = names.cache_name(HUB, COMMIT)
    for refused in ("", "exceeded quota: small"):
        job = JobState(claim, "u", refused=refused)
        found = step(hub(revision=COMMIT), jobs={claim: job}, claims={claim: {}})
        assert found.requeue_at is not None
        assert NOW < found.requeue_at <= NOW + 60
    running = JobState(claim, "u", pod=Pod("p", "u", 0, running=True))
    found = step(hub(revision=COMMIT), jobs={claim: running}, claims={claim: {}})
    assert found.requeue_at is None


def test_a_users_claim_for_one_node_is_refused_for_groups_of_several() -> None:
    wide = spec(model={"source": "pvc://models/llama"}, hardware={"nodes": 2})
    narrow = spec(model={"source": "pvc://models/llama"}, replicas=2)
    assert wanted_claims(wide, ModelStatus()) == ["models"]
    claim = live_claim({})
    claim["spec"]["accessModes"] = ["ReadWriteOnce"]
    cache = Cache({}, {"models": claim}, [])
    found = decide(SERVICE, wide, ModelStatus(), cache, CONFIG, NOW)
    assert (found.ready, found.reason) == (False, "AccessMode")
    assert "models is ReadWriteOnce, and 2 nodes" in found.message
    assert found.requeue_at is not None, "nothing tells when it is another"
    claim["spec"]["accessModes"] = ["ReadWriteOnce", "ReadOnlyMany"]
    assert decide(SERVICE, wide, ModelStatus(), cache, CONFIG, NOW).ready
    # Groups of one pod may share a node.
    claim["spec"]["accessModes"] = ["ReadWriteOnce"]
    assert decide(SERVICE, narrow, ModelStatus(), cache, CONFIG, NOW).ready


def test_a_claim_for_one_node_is_refused_for_several() -> None:
    narrow = {"source": HUB, "cache": {"accessMode": "ReadWriteOnce"}}
    assert step(spec(model=narrow)).reason == "Resolving"
    assert step(spec(model=narrow, replicas=2)).reason == "AccessMode"
    assert step(spec(model=narrow, hardware={"nodes": 2})).reason == "AccessMode"
