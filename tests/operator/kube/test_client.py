"""Comparing desired and live objects, and writing what is ours."""

from __future__ import annotations

from typing import Any

import pytest

from radixgrove.operator.api import names
from radixgrove.operator.kube.client import KubeError, Object, covers
from tests.operator.memory_kube import MemoryKube


@pytest.mark.parametrize(
    ("live", "desired", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": {"x": 1, "default": True}}, {"a": {"x": 1}}, True),
        ({"a": [{"name": "x", "protocol": "TCP"}]}, {"a": [{"name": "x"}]}, True),
        ({"a": [{"x": 1}]}, {"a": [{}]}, False),
        ({"a": [{}]}, {"a": [{}]}, True),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({}, {"a": []}, True),
        ({}, {"a": False}, True),
        ({}, {"a": "x"}, False),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}, True),
        ({"memory": "1Gi"}, {"memory": "1025Mi"}, False),
        ({"cpu": "500m"}, {"cpu": "0.5"}, True),
        ({"o": [{"uid": "x"}, {"uid": "y"}]}, {"o": [{"uid": "y"}]}, True),
        ({"o": [{"uid": "x"}]}, {"o": [{"uid": "y"}]}, False),
    ],
)
def test_a_live_object_may_have_more_than_is_desired(live: Any, desired: Any, same: bool) -> None:
    assert covers(live, desired) is same


# ---- writing what is ours ------------------------------------------------------------------------


def policy(**meta: Any) -> Object:
    labels = {names.MANAGED_BY: names.MANAGER}
    owner = {"uid": "service", "controller": True}
    made = {"name": "llama", "namespace": "team-a", "labels": labels, "ownerReferences": [owner]}
    return {"kind": "NetworkPolicy", "metadata": made | meta, "spec": {"podSelector": {}}}


@pytest.mark.parametrize(
    ("live", "because"),
    [
        ({"labels": {}, "ownerReferences": []}, "was there before"),
        ({"labels": {names.MANAGED_BY: "Helm"}, "ownerReferences": None}, "was there before"),
        ({"ownerReferences": [{"uid": "gone", "controller": True}]}, "another owner"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, "being deleted"),
    ],
)
def test_what_is_not_ours_is_left_as_it_is(live: dict[str, Any], because: str) -> None:
    kube = MemoryKube()
    kube.add(policy(**live) | {"spec": {"theirs": True}})
    with pytest.raises(KubeError, match=because) as refused:
        kube.apply(policy())
    assert refused.value.status == 409
    assert kube.written == []


def test_ours_is_restored_also_without_its_labels() -> None:
    kube = MemoryKube()
    kube.add(policy(labels={}) | {"spec": {}})
    kube.apply(policy())
    assert (
        kube.the("NetworkPolicy", "llama")["metadata"]["labels"] == policy()["metadata"]["labels"]
    )


def test_what_is_not_rendered_any_more_goes_and_what_others_added_stays() -> None:
    kube = MemoryKube()
    spec = {"podSelector": {}, "ingress": [{"from": []}], "policyTypes": ["Ingress"]}
    kube.apply(policy() | {"spec": spec})
    kube.the("NetworkPolicy", "llama")["spec"]["theirs"] = True
    kube.apply(policy())
    assert kube.the("NetworkPolicy", "llama")["spec"] == {"podSelector": {}, "theirs": True}
    kube.written.clear()
    kube.apply(policy())
    assert kube.written == []


class Meddled(MemoryKube):
    """Somebody writes right after each of our writes, before its answer is read."""

    def apply(self, desired: Object) -> Object:
        live = super().apply(desired)
        theirs = self.add(self.the(desired["kind"], "llama") | {"spec": {"theirs": True}})
        for version in (live, theirs):
            self.changed(desired["kind"], "team-a", "llama", version["metadata"]["resourceVersion"])
        return live


def test_a_change_that_comes_while_we_write_is_not_missed() -> None:
    kube = Meddled()
    kube.apply_cached(policy())
    assert kube.the("NetworkPolicy", "llama")["spec"] == {"theirs": True}
    kube.written.clear()
    kube.apply_cached(policy())
    assert kube.written == ["patch NetworkPolicy/llama"]


def test_what_nobody_changed_is_not_even_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = MemoryKube()
    kube.apply_cached(policy())
    version = kube.the("NetworkPolicy", "llama")["metadata"]["resourceVersion"]
    kube.changed("NetworkPolicy", "team-a", "llama", version)  # its own event
    monkeypatch.setattr(kube, "_request", None)
    kube.apply_cached(policy())
