"""The installation's keys: made once, never overwritten, gone with what they belong to."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import urlsplit

import pytest

from radixgrove.operator.api import names
from radixgrove.operator.api.config import RedisSettings
from radixgrove.operator.kube.client import KubeError
from radixgrove.operator.kube.keys import Keys, Phase
from radixgrove.operator.render.common import Service
from tests.operator.memory_kube import MemoryKube
from tests.operator.operator_builders import CONFIG, SERVICE

GENERATED = {
    "root-key", "internal-key", "cluster-secret", "management-key", "metrics-key", "redis-password",
}  # fmt: skip
EVERY = GENERATED | {"redis-url", "router-redis-url"}
ONE_USER = CONFIG.model_copy(update={"redis": CONFIG.redis.model_copy(update={"users": False})})
OWN_REDIS = CONFIG.model_copy(update={"redis": RedisSettings(url="")})


def secret(kube: MemoryKube) -> dict[str, str]:
    data = kube.the("Secret", CONFIG.keys_secret)["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def add_secret(kube: MemoryKube, **values: str) -> None:
    data = {k.replace("_", "-"): base64.b64encode(v.encode()).decode() for k, v in values.items()}
    metadata = {"name": CONFIG.keys_secret, "namespace": CONFIG.namespace}
    kube.add({"kind": "Secret", "metadata": metadata, "data": data})


def test_they_are_made_once_and_read_by_every_later_leader() -> None:
    kube = MemoryKube()
    first = Keys(kube, CONFIG)
    values = first.ensure()
    assert set(values) == EVERY | {"changed-over"}
    assert min(len(values[key]) for key in GENERATED) >= 32
    assert len(set(values.values())) == len(values), "no two are the same"
    assert urlsplit(values["router-redis-url"]).username == "radixgrove._router"
    assert secret(kube) == values
    assert Keys(kube, CONFIG).ensure() == values
    assert Keys(kube, CONFIG).digest("team-a", Phase.OWN) == first.digest("team-a", Phase.OWN)
    assert kube.written == [f"create Secret/{CONFIG.keys_secret}"]


def test_what_the_user_gave_stays_and_only_the_rest_is_added() -> None:
    kube = MemoryKube()
    add_secret(kube, internal_key="mine", redis_password="my-password")
    values = Keys(kube, CONFIG).ensure()
    assert values["internal-key"] == "mine"
    url = Keys(kube, ONE_USER).ensure()["redis-url"]
    assert url == CONFIG.redis.url.format(password="my-password")
    assert set(secret(kube)) == EVERY
    assert secret(kube)["internal-key"] == "mine"


def test_another_redis_makes_other_keys_so_that_workers_learn_of_it() -> None:
    kube = MemoryKube()
    before = Keys(kube, CONFIG).digest("team-a", Phase.OWN)
    moved = CONFIG.model_copy(update={"redis": RedisSettings(url="redis://elsewhere:6379/0")})
    assert Keys(kube, moved).digest("team-a", Phase.OWN) != before
    assert secret(kube)["redis-url"].endswith("@elsewhere:6379/0")


def test_another_prefix_makes_other_keys_and_the_usual_one_is_as_if_it_were_not_there() -> None:
    kube = MemoryKube()

    def digest(prefix: str) -> str:
        redis = RedisSettings(url=CONFIG.redis.url, prefix=prefix)
        return Keys(kube, CONFIG.model_copy(update={"redis": redis})).digest("team-a", Phase.OWN)

    assert digest("mine") == digest("mine")
    assert len({digest("radixgrove"), digest("mine"), digest("yours")}) == 3
    # What an operator said that did not know of prefixes: its groups stay.
    keys, common = Keys(kube, CONFIG), ("internal-key", "cluster-secret", "management-key")
    values = keys.ensure()
    url = CONFIG.redis.url.format(password=values["redis-password"])
    assert keys.digest("team-a", Phase.COMMON) == names.digest([*map(values.get, common), url])


def test_what_somebody_removes_comes_back_as_it_was() -> None:
    kube = MemoryKube()
    keys = Keys(kube, CONFIG)
    values = keys.ensure()
    kube.written.clear()
    keys.keep()
    assert kube.written == [], "at rest nothing is written"
    del kube.objects["Secret", CONFIG.namespace, CONFIG.keys_secret]
    keys.keep()
    assert secret(kube) == values
    del kube.the("Secret", CONFIG.keys_secret)["data"]["internal-key"]
    keys.keep()
    assert secret(kube) == values
    assert kube.written == [
        f"create Secret/{CONFIG.keys_secret}", f"patch Secret/{CONFIG.keys_secret}",
    ]  # fmt: skip
    assert Keys(kube, CONFIG).digest("team-a", Phase.OWN) == keys.digest("team-a", Phase.OWN), (
        "and no group rolls"
    )


def test_what_somebody_changes_stays_until_the_operator_starts_again() -> None:
    kube = MemoryKube()
    keys = Keys(kube, CONFIG)
    before = keys.digest("team-a", Phase.OWN)
    add_secret(kube, **dict.fromkeys(secret(kube), "changed"))
    kube.written.clear()
    keys.keep()
    assert kube.written == []
    assert secret(kube)["internal-key"] == "changed"
    assert keys.digest("team-a", Phase.OWN) == before
    assert Keys(kube, CONFIG).digest("team-a", Phase.OWN) != before


def test_what_else_a_users_secret_holds_is_none_of_the_operators() -> None:
    kube = MemoryKube()
    add_secret(kube, internal_key="mine")
    kube.the("Secret", CONFIG.keys_secret)["data"]["picture"] = base64.b64encode(b"\xff").decode()
    keys = Keys(kube, CONFIG)
    assert set(keys.ensure()) == EVERY
    del kube.the("Secret", CONFIG.keys_secret)["data"]["picture"]
    kube.written.clear()
    keys.keep()
    assert kube.written == []


def test_a_redis_known_from_the_secret_alone_must_be_in_it() -> None:
    kube = MemoryKube()
    with pytest.raises(KubeError, match="redis-url"):
        Keys(kube, OWN_REDIS).ensure()
    add_secret(kube, redis_url="rediss://mine")
    assert Keys(kube, OWN_REDIS).ensure()["redis-url"] == "rediss://mine"


def test_they_go_with_the_operators_deployment() -> None:
    kube = MemoryKube()
    owned = CONFIG.model_copy(update={"owner_deployment": "radixgrove-operator"})
    with pytest.raises(KubeError, match="Deployment is not there"):
        Keys(kube, owned).ensure()
    assert kube.of("Secret") == [], "no Secret is left behind by an installation that has gone"
    metadata = {"name": "radixgrove-operator", "namespace": CONFIG.namespace}
    uid = kube.add({"kind": "Deployment", "metadata": metadata})["metadata"]["uid"]
    keys = Keys(kube, owned)
    keys.ensure()
    (owner,) = kube.the("Secret", CONFIG.keys_secret)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Deployment", uid)
    for kind, name in (("Secret", CONFIG.keys_secret), ("Deployment", "radixgrove-operator")):
        del kube.objects[kind, CONFIG.namespace, name]
    with pytest.raises(KubeError, match="Deployment is not there"):
        keys.keep()
    assert kube.of("Secret") == [], "an operator that ends after its Deployment makes none either"


def test_a_copy_has_what_workers_read_and_goes_with_the_last_service() -> None:
    other = Service(SERVICE.namespace, "other", "uid-2")
    copy: dict[str, Any] = Keys(MemoryKube(), CONFIG).copy("team-a", [SERVICE, other], Phase.OWN)
    read = {"internal-key", "cluster-secret", "management-key", "metrics-key", "redis-url"}
    assert set(copy["data"]) == read
    owners = copy["metadata"]["ownerReferences"]
    assert [(owner["uid"], owner["controller"]) for owner in owners] == [
        (SERVICE.uid, False), ("uid-2", False),
    ]  # fmt: skip


def decoded(copy: dict[str, Any]) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in copy["data"].items()}


def test_namespaces_have_nothing_in_common_with_each_other_or_the_installation() -> None:
    keys = Keys(MemoryKube(), CONFIG)
    common = set(keys.ensure().values())
    found = [decoded(keys.copy(n, [], Phase.OWN)) for n in ("team-a", "team-b")]
    for key in found[0].keys() - {"metrics-key"}:
        assert found[0][key] != found[1][key]
        assert not {found[0][key], found[1][key]} & common
    url = urlsplit(found[0]["redis-url"])
    assert (url.username, url.hostname) == ("radixgrove.team-a", "radixgrove-redis.radixgrove.svc")


def test_while_a_namespace_is_changed_over_its_routers_have_the_common_keys_too() -> None:
    kube = MemoryKube()
    add_secret(kube, internal_key="i", cluster_secret="c", management_key="m", redis_password="p")
    keys = Keys(kube, CONFIG)
    assert not keys.changed_over
    common = decoded(keys.copy("team-a", [], Phase.COMMON))
    assert common["redis-url"] == CONFIG.redis.url.format(password="p")
    assert {common[key] for key in ("internal-key", "cluster-secret")} == {"i", "c"}
    changing = decoded(keys.copy("team-a", [], Phase.CHANGING))
    assert changing.pop("previous-internal-key") == "i"
    assert changing.pop("previous-cluster-secret") == "c"
    assert changing == decoded(keys.copy("team-a", [], Phase.OWN))
    for phase in Phase:
        kube.add(keys.copy("team-a", [], phase))
        assert keys.phase_of("team-a") is phase, "as the next leader finds it"


def test_workers_with_keys_of_their_own_are_never_shown_the_common_one() -> None:
    kube = MemoryKube()
    add_secret(kube, management_key="m")
    keys = Keys(kube, CONFIG)
    own = decoded(keys.copy("team-a", [], Phase.OWN))["management-key"]
    assert keys.management_keys("team-a", Phase.OWN) == [own]
    assert keys.management_keys("team-a", Phase.CHANGING) == [own, "m"]
    assert keys.management_keys("team-a", Phase.COMMON) == ["m"]
    for phase in Phase:
        assert keys.management_keys(CONFIG.namespace, phase) == ["m"]


def test_where_redis_takes_no_users_all_come_as_its_url_says() -> None:
    keys = Keys(MemoryKube(), ONE_USER)
    url = CONFIG.redis.url.format(password=keys.ensure()["redis-password"])
    assert decoded(keys.copy("team-a", [], Phase.OWN))["redis-url"] == url
    assert keys.ensure()["router-redis-url"] == keys.operator_url() == url
