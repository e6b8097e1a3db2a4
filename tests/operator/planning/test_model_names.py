"""Which service answers to which name: what must hold whatever happens in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.operator.planning.model_names import (
    MAX_KEPT,
    Claim,
    Decision,
    Grant,
    Holding,
    Key,
    decide,
    decode,
    encode,
    first_ledger,
)

HOLD = 100.0


@dataclass
class Names:
    """Services over time; every decision goes by the ledger that the last one left."""

    claims: dict[Key, Claim] = field(default_factory=dict)
    ledger: dict[str, Holding] = field(default_factory=dict)
    namespaces: set[str] = field(default_factory=set)  # besides those that have services
    unreadable: set[Key] = field(default_factory=set)
    now: float = 0.0

    def put(self, key: str, *wanted: str, active: bool = True) -> Grant:
        namespace, _, service = key.partition("/")
        known = self.claims.get((namespace, service))
        created = known.created if known else self.now
        names = wanted or (service,)
        claim = Claim(namespace, service, created, names, active)
        self.claims[claim.key] = claim
        return self.of(key)

    def delete(self, key: str) -> None:
        del self.claims[_key(key)]
        self.decide()

    def decide(self) -> Decision:
        existing = self.namespaces | {namespace for namespace, _ in self.claims}
        found = decide(self.claims.values(), self.ledger, existing, self.unreadable, HOLD, self.now)
        self.ledger = decode(encode(found.ledger))  # as it survives a restart
        return found

    def of(self, key: str) -> Grant:
        return self.decide().grants[_key(key)]


def _key(text: str) -> Key:
    namespace, _, service = text.partition("/")
    return namespace, service


def test_two_teams_have_a_llama_each_under_its_scoped_name() -> None:
    names = Names()
    assert names.put("a/llama").listed == ["llama"]
    names.now = 1
    assert names.put("b/llama").listed == ["b/llama"]
    assert names.of("a/llama").unlisted == ["a/llama"]


def test_only_the_name_in_conflict_is_missed() -> None:
    names = Names()
    names.put("a/first", "llama", "big")
    names.now = 1
    found = names.put("b/second", "qwen", "big")
    assert found.bare == ("qwen",)
    assert found.problems == ("the model name big is in use in another namespace",)
    assert set(found.scoped) == {"b/qwen", "b/big", "b/second"}


def test_a_name_in_use_stays_even_when_an_older_service_comes_to_want_it() -> None:
    names = Names()
    names.put("a/old", "other")
    names.now = 1
    names.put("a/young", "llama")
    assert names.put("a/old", "other", "llama").bare == ("other",)
    assert names.of("a/young").bare == ("llama",)
    assert "belongs to young" in names.of("a/old").problems[0]


@pytest.mark.parametrize("given_up", ["deleted", "suspended", "renamed"])
def test_a_name_that_was_given_up_is_kept_for_its_namespace_for_a_while(given_up: str) -> None:
    names = Names()
    names.put("a/llama")
    names.put("b/llama")
    names.now = 10
    match given_up:
        case "deleted":
            names.delete("a/llama")
        case "suspended":
            assert names.put("a/llama", active=False).bare == ("llama",), "until another has it"
        case "renamed":
            names.put("a/llama", "other")
    names.now = 109
    found = names.of("b/llama")
    assert (found.bare, found.retry_at) == ((), 110)
    assert "is kept for another namespace until 1970-01-01T00:01:50Z" in found.problems[0]
    assert names.put("a/next", "llama").bare == ("llama",), "at once in its own"
    names.delete("a/next")
    names.now = 209
    assert names.of("b/llama").bare == ("llama",)
    if given_up == "suspended":
        assert names.of("a/llama").bare == ()
        assert names.put("a/llama").bare == (), "it does not come back to a name in use"


def test_deleted_and_applied_again_a_service_has_its_name_back() -> None:
    names = Names()
    names.put("a/llama")
    names.put("b/llama")
    names.delete("a/llama")
    names.now = 99
    assert names.put("a/llama").bare == ("llama",)
    names.now = 1000
    assert names.of("b/llama").bare == ()


def test_a_name_that_begins_with_another_namespace_is_refused() -> None:
    names = Names(namespaces={"idle"})
    names.put("b/llama")
    found = names.put("a/thief", "b/llama", "idle/llama", "org/model", "a/own")
    assert found.bare == ("org/model",)
    assert found.problems == tuple(
        f"the model name {name} begins with the name of another namespace"
        for name in ("b/llama", "idle/llama")
    )
    assert set(found.scoped) == {"a/org/model", "a/own", "a/thief"}
    names.delete("b/llama")
    names.namespaces.add("b")
    assert names.of("a/thief").bare == ("org/model",), "nor is it free once nobody serves it"
    names.namespaces.add("org")
    assert names.of("a/thief").listed == ["a/own"], "which has become a namespace"


def test_a_resource_has_the_scoped_name_that_others_of_its_namespace_want() -> None:
    names = Names()
    names.put("a/first", "second")
    names.now = 1
    assert names.put("a/second", "x").scoped == ("a/x", "a/second")
    assert names.of("a/first").scoped == ("a/first",)


def test_what_cannot_be_read_keeps_what_it_has() -> None:
    names = Names()
    names.put("a/llama")
    names.put("b/llama")
    del names.claims["a", "llama"]
    names.unreadable.add(("a", "llama"))
    names.now = 1000
    assert names.of("b/llama").problems == ("the model name llama is in use in another namespace",)


def test_services_that_are_older_than_the_ledger_keep_their_names_by_age() -> None:
    old, young = Claim("b", "old", 1.0, ("llama",)), Claim("a", "young", 2.0, ("llama", "x"))
    assert first_ledger([young, old]) == {"llama": Holding("b", "old"), "x": Holding("a", "young")}


def test_a_namespace_keeps_a_bounded_number_of_names_from_others() -> None:
    names = Names()
    for number in range(MAX_KEPT + 1):
        names.now = number / 10
        names.put("a/x", f"name-{number}")
    names.now += 1
    names.put("a/x", "last")
    assert len(names.ledger) == MAX_KEPT + 1  # and the one in use
    assert names.put("b/y", "name-0", "name-1").bare == ("name-0",)


def test_a_malformed_ledger_is_refused() -> None:
    for text in ("", "[]", '{"a": 1}', '{"a": ["x"]}', '{"a": ["x", "y", "z"]}'):
        with pytest.raises(ValueError, match=r"."):
            decode(text)


SERVICES = ("a/x", "a/y", "b/x", "b/y", "c/x")
WANTED = ("m", "n", "x", "a/m", "b/x", "c/n", "d/m")
EVENTS = st.one_of(
    st.tuples(
        st.just("put"),
        st.sampled_from(SERVICES),
        st.lists(st.sampled_from(WANTED), min_size=1, max_size=4, unique=True),
        st.booleans(),
    ),
    st.tuples(st.just("delete"), st.sampled_from(SERVICES)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 60.0, 99.0, 100.0])),
)


@given(st.lists(EVENTS, max_size=25))
def test_no_name_moves_to_another_namespace_while_it_is_in_use_or_kept(
    events: list[Any],
) -> None:
    names = Names(namespaces={"d"})
    last_used: dict[str, tuple[str, float]] = {}  # name → namespace that used it, when last
    for event in events:
        match event:
            case ("put", key, wanted, active):
                namespace, _, service = key.partition("/")
                known = names.claims.get((namespace, service))
                created = known.created if known else names.now
                claim = Claim(namespace, service, created, tuple(wanted), active)
                names.claims[claim.key] = claim
            case ("delete", key):
                names.claims.pop(_key(key), None)
            case ("wait", seconds):
                names.now += seconds
        grants = names.decide().grants
        _check_grants(names, grants)
        for (namespace, service), grant in grants.items():
            if not names.claims[namespace, service].active:
                continue
            for name in grant.bare:
                user, when = last_used.get(name, (namespace, names.now))
                assert user == namespace or names.now - when >= HOLD, f"{name} moved"
                last_used[name] = (namespace, names.now)
        again = replace(names, ledger=dict(names.ledger)).decide().grants
        assert again == grants, "looking once more changes nothing"


def _check_grants(names: Names, grants: dict[Key, Grant]) -> None:
    existing = names.namespaces | {namespace for namespace, _ in names.claims}
    answered = [
        (name, key) for key, grant in grants.items() for name in {*grant.bare, *grant.scoped}
    ]
    assert len(answered) == len(dict(answered)), "a name has one service"
    owners = dict(answered)
    for key, claim in names.claims.items():
        namespace, service = key
        assert owners[f"{namespace}/{service}"] == key
        for name in claim.wanted:
            head, slash, _ = name.partition("/")
            if slash and head in existing - {namespace}:
                assert owners.get(name, (head, ""))[0] == head
            elif claim.active and owners.get(name) != key:
                assert name in owners or names.ledger[name].freed_at is not None
        for problem in grants[key].problems:
            _, named, service = problem.partition(" belongs to ")
            assert not named or (namespace, service) in names.claims, "no stranger is named"
