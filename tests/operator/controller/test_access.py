"""An installation of before there were keys by namespace is changed over, one at a time."""

from __future__ import annotations

import base64
from typing import Any, cast

import pytest

from radixgrove.operator.cluster.redis_users import RedisUsers
from radixgrove.operator.controller import access
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.store import Key, Store
from radixgrove.operator.kube.keys import Keys, Phase
from radixgrove.operator.render.common import Service
from tests.operator.doubles import Users
from tests.operator.memory_kube import MemoryKube
from tests.operator.operator_builders import CONFIG

OLD = {"internal-key": "i", "cluster-secret": "c", "management-key": "m", "redis-password": "p"}


class Installation:
    """With services in team-a and team-b, whose keys are still those of all."""

    def __init__(self, *, upgraded: bool = True) -> None:
        self.kube, self.store, self.users = MemoryKube(), Store(), Users()
        self.enqueued: list[Key] = []
        self.services = {
            key: Service(*key, f"uid-{key}")
            for key in (("team-a", "one"), ("team-a", "two"), ("team-b", "three"))
        }
        for namespace, name in self.services:
            meta = {"namespace": namespace, "name": name, "uid": f"uid-{name}"}
            self.store.service_seen({"metadata": meta, "spec": {"model": {"source": "hf://o/m"}}})
        if upgraded:
            data = {key: base64.b64encode(value.encode()).decode() for key, value in OLD.items()}
            meta = {"name": CONFIG.keys_secret, "namespace": CONFIG.namespace}
            self.kube.add({"kind": "Secret", "metadata": meta, "data": data})
            for namespace in ("team-a", "team-b"):
                copy = Keys(self.kube, CONFIG).copy(namespace, [], Phase.COMMON)
                self.kube.add(copy)
        self.restart()

    def restart(self) -> None:
        self.keys = Keys(self.kube, CONFIG)
        self.access = Access(
            self.kube, self.store, self.keys, cast(RedisUsers, self.users), CONFIG,
            self.enqueued.append,
        )  # fmt: skip
        self.access.start()

    def look(self, namespace: str, name: str, *, settled: bool = False) -> str:
        key = (namespace, name)
        digest = self.access.give(self.services[key], [])
        self.access.report(key, digest, settled=settled)
        return digest

    def secret(self, namespace: str) -> dict[str, Any]:
        found = self.kube.objects["Secret", namespace, CONFIG.keys_secret]
        return dict(found["data"])

    def phase(self, namespace: str) -> Phase:
        return self.keys.phase_of(namespace)


def test_one_namespace_after_the_other_is_changed_over_once_all_its_services_have_settled() -> None:
    made = Installation()
    before = made.look("team-b", "three")  # the first to be looked at begins
    assert made.phase("team-b") is Phase.CHANGING
    common = made.look("team-a", "one")
    assert common == made.keys.digest("team-a", Phase.COMMON), "its groups stay as they are"
    assert not made.keys.changed_over
    assert made.access.management_keys("team-a") == [OLD["management-key"]]
    assert OLD["management-key"] in made.access.management_keys("team-b"), "of older workers"
    made.look("team-b", "three", settled=True)
    assert OLD["management-key"] not in made.access.management_keys("team-b")
    assert set(made.enqueued) == set(made.services), "the next ones are looked at"
    assert made.look("team-b", "three") == before, "which restarts nothing"
    assert made.phase("team-b") is Phase.OWN
    assert "previous-internal-key" not in made.secret("team-b")
    assert made.look("team-a", "one", settled=True) != common
    assert made.phase("team-a") is Phase.CHANGING, "the other service has not settled"
    assert not made.keys.changed_over
    made.look("team-a", "two", settled=True)
    assert made.keys.changed_over


def test_a_service_that_was_settled_with_the_old_keys_counts_for_nothing() -> None:
    made = Installation()
    made.look("team-b", "three")
    made.access.report(("team-b", "three"), "another hash", settled=True)
    assert made.phase("team-b") is Phase.CHANGING


def test_the_next_leader_goes_on_where_the_last_one_was() -> None:
    made = Installation()
    made.look("team-b", "three")
    made.restart()
    made.look("team-a", "one")
    assert (made.phase("team-a"), made.phase("team-b")) == (Phase.COMMON, Phase.CHANGING)


def test_a_namespace_that_does_not_come_to_rest_holds_up_no_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Installation()
    made.look("team-b", "three")
    monkeypatch.setattr(access, "_PATIENCE", 0.0)
    made.look("team-a", "one")
    assert made.phase("team-a") is Phase.CHANGING
    assert not made.keys.changed_over


def test_a_namespace_that_goes_is_waited_for_no_longer() -> None:
    made = Installation()
    for key in list(made.services):
        made.store.service_gone(key)
    made.access.keep()
    assert made.keys.changed_over


def test_a_new_installation_has_nothing_to_change_over() -> None:
    made = Installation(upgraded=False)
    assert made.keys.changed_over
    assert made.look("team-a", "one") == made.keys.digest("team-a", Phase.OWN)


def test_redis_knows_a_service_before_its_pods_are_made() -> None:
    made = Installation(upgraded=False)
    made.access.admit(Service("team-c", "new", "uid"))
    assert made.users.services == {
        "team-a": {"team-a.one", "team-a.two"},
        "team-b": {"team-b.three"},
        "team-c": {"team-c.new"},
    }
