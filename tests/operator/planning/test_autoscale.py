"""How many groups the load wants."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.operator.api import names
from radixgrove.operator.api.spec import Autoscaling
from radixgrove.operator.api.status import AutoscalingStatus
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.controller.autoscaler import Autoscaler
from radixgrove.operator.controller.store import Store
from radixgrove.operator.planning.autoscale import Load, decide
from radixgrove.service.redis_rules import RedisUnavailable
from tests.operator.memory_kube import MemoryKube

NOW = 1_000_000.0
SCALING = Autoscaling.model_validate(
    {"min": 0, "max": 4, "targets": {"queue": 8, "kvPercent": 80}, "cooldown": "1m"}
)
IDLE = Load(replicas=1, running=0, waiting=0, held=0, kv_used=0.0)


def load(
    replicas: int = 1, waiting: int = 0, held: int = 0, running: int = 1, kv: float = 0.1
) -> Load:
    return Load(replicas, running, waiting, held, kv)


def wanted(current: int, seen: Load | None, before: AutoscalingStatus | None = None,
           now: float = NOW) -> int | None:  # fmt: skip
    return decide(SCALING, current, seen, before or AutoscalingStatus(), now).desired


def test_a_queue_beyond_its_target_asks_for_more_at_once() -> None:
    assert wanted(1, load(waiting=20)) == 3
    assert wanted(1, load(waiting=1000)) == 4, "no more than max"


def test_requests_that_routers_hold_count_as_queue() -> None:
    assert wanted(1, load(held=16)) == 2


def test_full_memory_asks_for_more() -> None:
    assert wanted(2, load(replicas=2, kv=0.95)) == 3


def test_a_held_request_wakes_a_sleeping_service() -> None:
    assert wanted(0, load(replicas=0, running=0, held=1)) == 1
    assert wanted(0, load(replicas=0, running=0, held=0)) == 0


def test_a_clock_that_was_set_back_delays_by_no_more_than_the_cooldown() -> None:
    before = decide(SCALING, 3, load(replicas=3), AutoscalingStatus(), NOW + 3600)
    after = decide(SCALING, 3, load(replicas=3), before, NOW)
    assert wanted(3, load(replicas=3), after, NOW + 60) == 2


def test_calm_gives_groups_back_one_at_a_time_after_the_cooldown() -> None:
    first = decide(SCALING, 3, load(replicas=3), AutoscalingStatus(), NOW)
    assert first.desired == 3
    still = decide(SCALING, 3, load(replicas=3), first, NOW + 59)
    assert still.desired == 3
    down = decide(SCALING, 3, load(replicas=3), still, NOW + 61)
    assert down.desired == 2
    assert decide(SCALING, 2, load(replicas=2), down, NOW + 100).desired == 2, "calm starts anew"


def test_calm_takes_no_group_whose_requests_would_not_fit_on_the_others() -> None:
    busy = Load(replicas=2, running=33, waiting=0, held=0, kv_used=0.2, slots=32)
    assert decide(SCALING, 2, busy, AutoscalingStatus(), NOW).low_since is None
    low = decide(SCALING, 2, replace(busy, running=32), AutoscalingStatus(), NOW)
    assert decide(SCALING, 2, replace(busy, running=32), low, NOW + 61).desired == 1
    assert decide(SCALING, 1, replace(busy, replicas=1), low, NOW).desired == 1, "no queue yet"


def test_a_burst_in_between_starts_the_calm_anew() -> None:
    low = decide(SCALING, 2, load(replicas=2), AutoscalingStatus(), NOW)
    busy = decide(SCALING, 2, load(replicas=2, waiting=16), low, NOW + 50)
    assert decide(SCALING, 2, load(replicas=2), busy, NOW + 70).desired == 2


def test_it_sleeps_only_when_nothing_runs() -> None:
    low = decide(SCALING, 1, IDLE, AutoscalingStatus(), NOW)
    assert decide(SCALING, 1, IDLE, low, NOW + 61).desired == 0
    assert decide(SCALING, 1, load(running=1), low, NOW + 61).desired == 1


class NoRedis:
    def load(self, *_: object) -> Load:
        raise RedisUnavailable


class Once(threading.Event):
    """The wait between two rounds: over once, then for good."""

    def wait(self, timeout: float | None = None) -> bool:
        was, _ = self.is_set(), self.set()
        return was


def test_it_moves_no_service_of_another_installation() -> None:
    kube, store = MemoryKube(), Store()
    for name, operator in (("new", ""), ("ours", "radixgrove/rg"), ("theirs", "elsewhere/rg")):
        resource = {
            "kind": names.KIND,
            "metadata": {"namespace": "a", "name": name, "uid": name},
            "spec": {
                "model": {"source": "hf://org/model"},
                "replicas": 5,
                "autoscaling": {"min": 0, "max": 2},
            },
            "status": {"operator": operator},
        }
        store.service_seen(kube.add(resource))
    scaler = Autoscaler(
        kube, store, cast(RedisStore, NoRedis()), lambda key: [], "radixgrove/rg", every=0.0
    )
    scaler.run(Once())
    wanted = {name: kube.the(names.KIND, name)["spec"]["replicas"] for name in ("new", "ours")}
    assert wanted == {"new": 2, "ours": 2}, "moved into its bounds"
    assert kube.the(names.KIND, "theirs")["spec"]["replicas"] == 5


def test_a_step_down_that_was_refused_is_taken_in_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kube, store = MemoryKube(), Store()
    clock = SimpleNamespace(now=1_800_000_000.0)
    fake = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now)
    monkeypatch.setattr("radixgrove.operator.controller.autoscaler.time", fake)
    resource = {
        "kind": names.KIND,
        "metadata": {"namespace": "a", "name": "idle", "uid": "u"},
        "spec": {
            "model": {"source": "hf://org/model"},
            "replicas": 2,
            "autoscaling": {"min": 1, "max": 2, "cooldown": "10m"},
        },
    }
    store.service_seen(kube.add(resource))
    idle = SimpleNamespace(load=lambda *_: Load(2, 0, 0, 0, 0.0))
    scaler = Autoscaler(kube, store, cast(RedisStore, idle), lambda key: [], "", every=0.0)
    scaler.run(Once())
    clock.now += 601
    kube.refused = {f"patch {names.KIND}"}
    scaler.run(Once())
    kube.refused = set()
    clock.now += 1
    scaler.run(Once())
    assert kube.the(names.KIND, "idle")["spec"]["replicas"] == 1


def test_an_unknown_load_moves_nothing() -> None:
    assert wanted(3, None) == 3
    assert wanted(9, None) == 4, "except into the bounds"


@given(
    st.integers(0, 8),
    st.builds(
        Load,
        replicas=st.integers(0, 8),
        running=st.integers(0, 1000),
        waiting=st.integers(0, 10_000),
        held=st.integers(0, 10_000),
        kv_used=st.floats(0, 1),
        slots=st.integers(0, 64),
    ),
)
def test_the_bounds_always_hold(current: int, seen: Load) -> None:
    desired = wanted(current, seen)
    assert desired is not None
    assert 0 <= desired <= 4
    if current <= 4:
        assert desired >= current - 1
