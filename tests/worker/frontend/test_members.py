"""A worker of two members: which engine a request gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from radixgrove.protocol.envelope import ENVELOPE_TYPE, INTERNAL_KEY_HEADER, Envelope
from radixgrove.worker.messages import EngineInfo
from tests.conftest import wait_until
from tests.worker import patient_frontend
from tests.worker.frontend.conftest import INTERNAL_KEY, MODEL, Frontend, running_frontend

LONG = "one prefix that many requests have in common " * 20


@pytest.fixture(scope="module")
def _shared(demo_model_dir: Path) -> Iterator[Frontend]:
    with running_frontend(demo_model_dir, main=patient_frontend.main, dp=2) as frontend:
        yield frontend


@pytest.fixture
def pair(_shared: Frontend) -> Frontend:
    """A frontend of two members, both idle."""
    for engine in _shared.engines:
        wait_until(lambda engine=engine: not engine.running, what="an idle engine")  # type: ignore[misc]
        engine.reset()
    _shared.answer("Hello world")
    return _shared


def requests(frontend: Frontend) -> list[int]:
    """How many each member has had."""
    return [len(engine.submits) for engine in frontend.engines]


def complete(frontend: Frontend, prompt: str = LONG) -> None:
    response = frontend.complete(prompt)
    assert response.status_code == 200, response.text


def routed(frontend: Frontend, key: str = INTERNAL_KEY, **fields: Any) -> httpx.Response:
    """What a router would send."""
    envelope = Envelope(
        body=json.dumps({"model": MODEL, "prompt": "hi"}).encode(),
        prompts=[],
        principal="carol",
        request_id="reservation-1",
        tokenizer_digest="another",
        **fields,
    )
    headers = {"content-type": ENVELOPE_TYPE, INTERNAL_KEY_HEADER: key}
    with frontend.client() as client:
        body = msgspec.msgpack.encode(envelope)
        return client.post("/v1/completions", content=body, headers=headers)


@pytest.mark.parametrize("holder", [0, 1])
def test_a_request_goes_to_the_member_that_has_its_prefix(pair: Frontend, holder: int) -> None:
    pair.engines[holder].matched_tokens = 64
    for _ in range(3):
        complete(pair)
    assert requests(pair)[holder] == 3


def test_a_busy_member_gets_no_new_prefix(pair: Frontend) -> None:
    pair.engines[0].paused.set()
    pair.engines[1].paused.set()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, pair, f"prompt {i} of no other") for i in range(8)]
        wait_until(lambda: sum(requests(pair)) == 8, what="all requests at the engines")
        for engine in pair.engines:
            engine.paused.clear()
        for answer in answers:
            answer.result()
    assert min(requests(pair)) >= 2, "prompts of one moment spread over both"


def test_a_burst_of_one_new_prefix_stays_on_one_member(pair: Frontend) -> None:
    """No engine has it yet, and none knows what the other was sent."""
    for engine in pair.engines:
        engine.paused.set()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, pair, f"{LONG} {i}") for i in range(8)]
        wait_until(lambda: sum(requests(pair)) == 8, what="all requests at the engines")
        for engine in pair.engines:
            engine.paused.clear()
        for answer in answers:
            answer.result()
    assert sorted(requests(pair)) == [0, 8]


def test_a_member_that_does_not_say_what_it_has_delays_no_request(demo_model_dir: Path) -> None:
    with running_frontend(demo_model_dir, dp=2) as frontend:
        frontend.answer("Hello world")
        for engine in frontend.engines:
            engine.matched_tokens = None
        complete(frontend)
        assert sum(requests(frontend)) == 1


def test_members_in_a_long_step_get_prompts_by_what_each_was_sent(demo_model_dir: Path) -> None:
    """They say nothing, neither of prefixes nor of their load, until it ends."""
    with (
        running_frontend(demo_model_dir, dp=2) as frontend,
        ThreadPoolExecutor(8) as pool,
    ):
        keep_busy(frontend)
        answers = []
        for number in range(8):
            answers.append(pool.submit(complete, frontend, f"{number} begins as no other does"))
            wait_until(lambda n=number: sum(requests(frontend)) == n + 1, what="the request")  # type: ignore[misc]
            first, second = requests(frontend)
            assert abs(first - second) <= 1
        for engine in frontend.engines:
            engine.paused.clear()
        for answer in answers:
            answer.result()


def test_rows_are_left_for_what_other_frontends_send(demo_model_dir: Path) -> None:
    with (
        running_frontend(demo_model_dir, dp=2, frontends=4) as frontend,
        ThreadPoolExecutor(8) as pool,
    ):
        keep_busy(frontend, max_running=8)
        answers = []
        for number in range(3):
            answers.append(pool.submit(complete, frontend, LONG))
            wait_until(lambda n=number: sum(requests(frontend)) == n + 1, what="the request")  # type: ignore[misc]
        assert sorted(requests(frontend)) == [1, 2], "two of each of four frontends take all rows"
        for engine in frontend.engines:
            engine.paused.clear()
        for answer in answers:
            answer.result()


def keep_busy(frontend: Frontend, **info: int) -> None:
    """Let all members begin a step that takes a minute, and say no more."""
    frontend.answer("Hello world")
    introduce(frontend, **info)
    for engine in frontend.engines:
        engine.matched_tokens = None
        engine.paused.set()
        engine.hang(60.0)
    for engine in frontend.engines:
        before = engine.told
        wait_until(lambda e=engine, n=before: e.told >= n + 2, what="a pulse with the step")  # type: ignore[misc]
        engine.silent.set()


def introduce(frontend: Frontend, **info: int) -> None:
    """Let each member say what it is, the shortest last; the frontend has heard it."""
    for engine, length in zip(frontend.engines, (800, 700), strict=True):
        engine.infos.put(EngineInfo(page_size=16, max_model_len=length, **info))
        wait_until(lambda n=length: longest_context(frontend) == n, what="what it said")  # type: ignore[misc]


def longest_context(frontend: Frontend) -> int:
    with frontend.client() as client:
        return int(client.get("/v1/models").json()["data"][0]["max_model_len"])


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_a_router_chooses_the_member(pair: Frontend, dp_rank: int) -> None:
    pair.engines[1 - dp_rank].matched_tokens = 64
    assert routed(pair, dp_rank=dp_rank).status_code == 200
    assert requests(pair)[dp_rank] == 1


def test_a_router_of_the_release_before_leaves_the_choice(pair: Frontend) -> None:
    assert routed(pair).status_code == 200
    assert sum(requests(pair)) == 1


@pytest.mark.parametrize("dp_rank", [2, -1, 1 << 40])
def test_a_member_that_does_not_exist_is_refused(pair: Frontend, dp_rank: int) -> None:
    response = routed(pair, dp_rank=dp_rank)
    assert response.status_code == 400
    assert "is none of 2 members" in response.json()["error"]["message"]
    assert sum(requests(pair)) == 0


def test_a_choice_without_the_internal_key_is_refused(pair: Frontend) -> None:
    assert routed(pair, key="guessed", dp_rank=1).status_code == 401
    body = {"model": MODEL, "prompt": "hi", "dp_rank": 1}
    with pair.client() as client:
        response = client.post("/v1/completions", json=body)
    pair.engines[0].matched_tokens = 64
    complete(pair)
    assert requests(pair)[0] >= 1, "a client's body chooses no member"
    assert response.status_code in (200, 400)


def test_the_shortest_context_of_the_members_is_the_workers(demo_model_dir: Path) -> None:
    with running_frontend(demo_model_dir, dp=2) as frontend:
        introduce(frontend)
        frontend.engines[1].infos.put(EngineInfo(page_size=16, max_model_len=900))
        wait_until(lambda: longest_context(frontend) == 800, what="what the smaller pool holds")


def test_a_request_goes_to_a_free_row_before_it_goes_to_its_prefix(demo_model_dir: Path) -> None:
    with running_frontend(demo_model_dir, main=patient_frontend.main, dp=2) as frontend:
        first, second = frontend.engines
        introduce(frontend, max_running=4)
        frontend.answer("Hello world")
        first.matched_tokens, first.waiting = 64, 4
        complete(frontend)
        assert requests(frontend) == [0, 1]
        second.waiting = 4
        complete(frontend)
        assert requests(frontend) == [1, 1], "without a row anywhere the prefix decides"


def test_with_one_member_all_are_lost(demo_model_dir: Path) -> None:
    with running_frontend(demo_model_dir, dp=2) as frontend:
        frontend.answer("never ends")
        frontend.engines[0].paused.set()
        frontend.engines[1].paused.set()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(frontend.complete, LONG)
            wait_until(lambda: sum(requests(frontend)) == 1, what="the request at an engine")
            idle = requests(frontend).index(0)
            frontend.engines[idle].stop()
            assert answer.result().status_code == 503
        assert frontend.complete("again").status_code == 503
