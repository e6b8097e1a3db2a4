"""What the watches saw: who has to be looked at when a service goes."""

from __future__ import annotations

from typing import Any

import pytest

from radixgrove.operator.controller.store import Store, collision, other_service_of


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
    store.placed(("here", "waiting"), [], waits=True)
    assert store.service_gone(("here", "gone")) == [("here", "waiting")]


def test_a_service_that_went_before_concerns_nobody() -> None:
    store = store_of(service("gone", name="llama"), service("same", name="llama"))
    assert store.service_gone(("here", "gone")) == [("here", "same")]
    assert store.service_gone(("here", "gone")) == []


@pytest.mark.parametrize(
    ("one", "other", "collide"),
    [
        ("llama", "llama-router", True),
        ("llama", "llama-0-a1", True),
        ("llama-12-a345", "llama", True),
        ("llama", "llama-routers", False),
        ("llama", "llama-8b", False),
        ("llama", "llama-0-b1", False),
        ("llama", "other-router", False),
    ],
)
def test_services_whose_objects_would_have_one_name_collide(
    one: str, other: str, collide: bool
) -> None:
    old, young = aged(service(one), 1), aged(service(other), 2)
    found = [made for made in map(other_service_of, (old, young)) if made is not None]
    assert bool(collision(found[1], found)) is collide
    assert collision(found[0], found) == ""
    elsewhere = other_service_of(aged(service(other, namespace="there"), 2))
    assert elsewhere is not None
    assert collision(elsewhere, found[:1]) == ""


def test_what_collided_with_a_service_that_went_is_looked_at() -> None:
    store = store_of(service("llama"), service("llama-router"), service("llama-8b"))
    assert store.service_gone(("here", "llama")) == [("here", "llama-router")]


def aged(body: dict[str, Any], day: int) -> dict[str, Any]:
    body["metadata"]["creationTimestamp"] = f"2026-01-{day:02}T00:00:00Z"
    return body
