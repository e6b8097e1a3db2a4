"""Who has which name outlives the operator, and is kept before routers learn of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixgrove.operator.api import names
from radixgrove.operator.controller.name_ledger import NameLedger
from radixgrove.operator.controller.store import Key, Store, other_service_of
from radixgrove.operator.kube.client import KubeError
from radixgrove.operator.planning.model_names import Grant
from tests.operator.memory_kube import MemoryKube
from tests.operator.operator_builders import CONFIG

HOLD = CONFIG.name_hold


class Names:
    """Resources as the watch brings them, and one leader after the other."""

    def __init__(self) -> None:
        self.kube = MemoryKube()
        self.enqueued: list[Key] = []
        self.bodies: dict[Key, dict[str, Any]] = {}
        self.now = 1e9
        self.restart()

    def restart(self) -> None:
        self.store = Store()
        for body in self.bodies.values():
            self.store.service_seen(body)
        self.ledger = NameLedger(self.kube, self.store, CONFIG, self.enqueued.append)

    def put(self, namespace: str, name: str, day: int, **spec: Any) -> Grant:
        meta = {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}",
                "creationTimestamp": f"2026-01-{day:02}T00:00:00Z"}  # fmt: skip
        source = {"source": "hf://org/model"}
        body = {"metadata": meta, "spec": {"model": source | spec.pop("model", {}), **spec}}
        self.bodies[namespace, name] = body
        self.store.service_seen(body)
        return self.of(namespace, name)

    def delete(self, namespace: str, name: str) -> None:
        del self.bodies[namespace, name]
        self.store.service_gone((namespace, name))

    def of(self, namespace: str, name: str) -> Grant:
        own = other_service_of(self.bodies[namespace, name])
        assert own is not None
        return self.ledger.grant(own, self.now)

    def kept(self) -> dict[str, Any]:
        found = self.kube.the("ConfigMap", CONFIG.names_config_map)
        return dict(json.loads(found["data"]["names.json"]))


def test_a_name_stays_where_it_is_when_another_operator_takes_over() -> None:
    found = Names()
    found.put("b", "young", 2, model={"name": "llama"})
    found.put("a", "old", 1, model={"name": "llama"})
    found.restart()
    assert found.of("b", "young").bare == ("llama",)
    assert found.of("a", "old").bare == ()
    assert found.kept() == {"llama": ["b", "young", None]}


def test_a_name_that_was_freed_is_kept_over_restarts_and_then_goes() -> None:
    found = Names()
    found.put("a", "llama", 1)
    found.put("b", "llama", 2)
    found.delete("a", "llama")
    assert found.of("b", "llama").retry_at == found.now + HOLD
    found.restart()
    found.now += HOLD - 1
    assert found.of("b", "llama").bare == ()
    found.now += 1
    assert found.of("b", "llama").bare == ("llama",)


def test_services_whose_names_change_are_looked_at() -> None:
    found = Names()
    found.put("a", "first", 1, model={"name": "llama"})
    found.put("a", "second", 2, model={"name": "llama"})
    found.put("c", "third", 3)
    found.enqueued.clear()
    found.put("a", "first", 1, model={"name": "llama"}, suspend=True)
    assert found.enqueued == [("a", "second")]


def test_nothing_is_granted_that_could_not_be_kept() -> None:
    found = Names()
    found.kube.refused = {"patch ConfigMap"}
    with pytest.raises(KubeError):
        found.put("a", "llama", 1)
    found.kube.refused = set()
    assert found.of("a", "llama").bare == ("llama",)
    assert found.kept() == {"llama": ["a", "llama", None]}


def test_a_config_map_that_was_removed_comes_back() -> None:
    found = Names()
    found.put("a", "llama", 1)
    found.kube.objects.clear()
    found.ledger.keep()
    assert found.kept() == {"llama": ["a", "llama", None]}


def test_services_at_rest_are_not_decided_upon_again() -> None:
    found = Names()
    found.put("a", "llama", 1)
    found.kube.written.clear()
    first = found.of("a", "llama")
    assert found.of("a", "llama") is first
    assert found.kube.written == []


def test_a_namespace_of_the_cluster_has_the_names_that_begin_with_it() -> None:
    found = Names()
    found.kube.add({"kind": "Namespace", "metadata": {"name": "idle"}})
    wanted = {"name": "idle/llama", "aliases": ["org/llama"]}
    assert found.put("a", "thief", 1, model=wanted).bare == ("org/llama",)


def test_while_it_is_not_known_whether_a_namespace_exists_names_stay_as_they_are() -> None:
    found = Names()
    found.put("a", "old", 1, model={"name": "org/llama"})
    found.restart()
    found.kube.refused = {"get Namespace"}
    assert found.of("a", "old").bare == ("org/llama",)
    assert found.put("b", "new", 2, model={"name": "other/llama"}).bare == ()


def test_behind_a_router_of_its_own_a_service_has_all_its_names() -> None:
    found = Names()
    found.put("a", "llama", 1)
    own = found.put("b", "llama", 2, router={"dedicated": True})
    assert own.listed == ["llama"]
    assert found.of("a", "llama").listed == ["llama"]


def test_services_of_another_installation_take_no_name_of_ours() -> None:
    found = Names()
    found.put("a", "llama", 1)
    found.bodies["a", "llama"]["status"] = {"operator": "theirs/rg"}
    found.restart()
    found.kube.objects.clear()
    assert found.put("b", "llama", 2).bare == ("llama",)
    assert (
        found.kube.the("ConfigMap", "radixgrove-names")["metadata"]["labels"][names.MANAGED_BY]
        == names.MANAGER
    )
