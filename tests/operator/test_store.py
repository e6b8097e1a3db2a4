"""What the watches saw: who has to be looked at when a service goes."""

from __future__ import annotations

from typing import Any

from radixgrove.operator.store import Store


def service(own: str, claim: str = "", namespace: str = "here", **model: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": namespace, "name": own, "uid": f"uid-{own}"},
        "spec": {"model": {"source": "hf://org/model"} | model},
        "status": {"model": {"claim": claim}},
    }


def store_of(*bodies: dict[str, Any]) -> Store:
    store = Store()
    for body in bodies:
        store.service_seen(body)
    return store


def test_a_service_that_shares_nothing_is_left_alone() -> None:
    store = store_of(service("gone", "cache-1"), service("other", "cache-2"))
    assert store.service_gone(("here", "gone")) == []
    assert [n.key for n in store.services()] == [("here", "other")]


def test_whoever_wants_its_name_is_looked_at_in_any_namespace() -> None:
    store = store_of(
        service("gone", name="llama", aliases=["big"]),
        service("same", namespace="there", name="llama"),
        service("alias", name="other", aliases=["big"]),
        service("stranger", name="qwen"),
    )
    assert store.service_gone(("here", "gone")) == [("there", "same"), ("here", "alias")]


def test_whoever_uses_its_claim_is_looked_at_in_its_namespace_alone() -> None:
    store = store_of(
        service("gone", "cache-1"),
        service("user", "cache-1"),
        service("elsewhere", "cache-1", namespace="there"),
    )
    assert store.service_gone(("here", "gone")) == [("here", "user")]


def test_whoever_waits_for_gpus_is_looked_at() -> None:
    store = store_of(service("gone"), service("waiting"), service("serving"))
    store.placed(("here", "waiting"), [], "cuda")
    assert store.service_gone(("here", "gone")) == [("here", "waiting")]


def test_a_service_that_went_before_concerns_nobody() -> None:
    store = store_of(service("gone", name="llama"), service("same", name="llama"))
    assert store.service_gone(("here", "gone")) == [("here", "same")]
    assert store.service_gone(("here", "gone")) == []
