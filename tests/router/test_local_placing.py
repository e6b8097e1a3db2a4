"""Placement by one router alone: static replicas, and registered ones while Redis is away."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from radixgrove.protocol.blocks import MEMBER_BYTES
from radixgrove.protocol.placing import (
    DECODE_TOKENS,
    DEFAULT_TOKENS_PER_SECOND,
    HIT_CREDIT,
    MOST_CREDIT_MS,
)
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router.placement import Placement, PlacementRequest, Placer
from radixgrove.router.replicas import Breaker, Replica, Service
from tests.router.publishing import registration

BLOCK = 16
TOKEN_MS = 1000 / DEFAULT_TOKENS_PER_SECOND


def replica(name: str) -> Replica:
    return Replica(name, f"http://{name}", Breaker(3, 10.0), ready=True)


def service(*names: str) -> Service:
    found = Service("m", ["m"])
    found.set_replicas({name: replica(name) for name in names})
    return found


def asked(blocks: int, *, path: int = 0, sequences: int = 1) -> PlacementRequest:
    members = b"".join(
        (1000 * path + number + 1).to_bytes(MEMBER_BYTES, "little") for number in range(blocks)
    )
    return PlacementRequest(blocks * BLOCK, members, BLOCK, sequences, length=blocks * BLOCK + 1)


async def placed(placer: Placer, found: Service, ask: PlacementRequest) -> Placement:
    decision = await placer.place(found, ask)
    assert decision is not None
    return decision


@pytest.fixture
def placer() -> Placer:
    return Placer(RouterSettings(), "router", None)


async def test_the_time_is_the_wait_and_what_is_not_cached(placer: Placer) -> None:
    found = service("a")
    first = await placed(placer, found, asked(800))
    assert (first.decided, first.matched_tokens) == ("local", 0)
    assert first.time_ms == pytest.approx(800 * BLOCK * TOKEN_MS)
    placer.release(first)
    again = await placed(placer, found, asked(800))
    assert (again.matched_tokens, again.time_ms) == (800 * BLOCK, 0.0)
    longer = await placed(placer, found, asked(900))
    assert longer.matched_tokens == 800 * BLOCK
    assert longer.time_ms == pytest.approx(100 * BLOCK * TOKEN_MS)


async def test_every_request_that_ends_takes_its_estimated_work_with_it(placer: Placer) -> None:
    found = service("a")
    (chosen,) = found.replicas.values()
    first = await placed(placer, found, asked(800))
    begun = chosen.busy_until
    second = await placed(placer, found, asked(800, path=1, sequences=2))
    assert chosen.in_flight == 3
    busy = chosen.busy_until
    assert busy == pytest.approx(begun + second.work_ms / 1000)
    assert second.work_ms < second.time_ms <= first.work_ms + second.work_ms
    placer.release(first)
    left = chosen.busy_until - time.monotonic()
    assert chosen.in_flight == 2
    assert 0 < left <= second.work_ms / 1000, "the other one still computes"
    placer.release(second)
    assert (chosen.in_flight, chosen.busy_until) == (0, 0.0)


async def test_a_prefix_outweighs_load_up_to_its_credit(placer: Placer) -> None:
    found = service("a", "b")
    first = await placed(placer, found, asked(100))
    placer.release(first)
    saved = 100 * BLOCK * TOKEN_MS
    credit = min(HIT_CREDIT * saved, MOST_CREDIT_MS)
    worth = int((saved + credit) / (DECODE_TOKENS * TOKEN_MS))  # requests in flight
    first.replica.in_flight = worth - 1
    assert (await placed(placer, found, asked(100))).replica is first.replica
    first.replica.in_flight = worth + 1
    assert (await placed(placer, found, asked(100))).replica is not first.replica


async def test_a_prompt_goes_where_it_fits(placer: Placer) -> None:
    found = service("static")
    short = replica("short")
    short.registration = registration(replica_id="short", max_model_len=200)
    found.set_replicas({"static": found.replicas["static"], "short": short})
    assert found.registration is short.registration
    for _ in range(5):
        assert (await placed(placer, found, asked(20))).replica.id == "static"
    found.set_replicas({"short": short})
    assert await placer.place(found, asked(20)) is None
    assert await placer.place(found, replace(asked(10), length=201)) is None
    exact = await placed(placer, found, replace(asked(10), length=200))
    placer.release(exact)
    fitting = await placed(placer, found, asked(10))
    assert (fitting.replica, fitting.decided) == (short, "degraded")
