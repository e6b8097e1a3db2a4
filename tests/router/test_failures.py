"""What clients see when replicas fail, and what replicas see when clients go."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest
import redis

from tests.checkout import ROOT
from tests.conftest import RedisServer, find_free_port
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import (
    INTERNAL_KEY,
    MODEL,
    Router,
    SimulatedReplica,
    completion,
    eventually,
    prompt,
)
from tests.router.mains import forgetful_main


@pytest.fixture
async def pair(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> tuple[Router, list[SimulatedReplica]]:
    replicas = [
        await make_replica(redis_url=redis_server.url, replica_id=f"r{i}", keep_bodies=True)
        for i in range(2)
    ]
    return await make_router(redis_server, retries=2), replicas


def by_name(replicas: list[SimulatedReplica], name: str) -> SimulatedReplica:
    return replicas[int(name.removeprefix("r"))]


# ---- retries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_refusal_is_retried_elsewhere_and_never_on_the_same_replica(
    status: int, pair: tuple[Router, list[SimulatedReplica]]
) -> None:
    router, replicas = pair
    warm = await router.complete(prompt(*range(30)))  # the cache pulls the next ones there too
    bad = by_name(replicas, warm.replica)
    bad.behaviour.status = status
    before = bad.counters.requests
    answer = await router.complete(prompt(*range(30)))
    assert answer.status == 200
    assert answer.replica != warm.replica
    assert bad.counters.requests == before + 1


async def test_when_all_refuse_the_last_answer_is_relayed(
    pair: tuple[Router, list[SimulatedReplica]],
) -> None:
    router, replicas = pair
    for replica in replicas:
        replica.behaviour.status = 429
    answer = await router.complete(prompt(1))
    assert answer.status == 429
    assert answer.error["message"] == "simulated"
    assert [replica.counters.requests for replica in replicas] == [1, 1]
    sample = f'radixgrove_router_requests_total{{model="{MODEL}",status="429"}}'
    assert await router.metric(sample) == 1


async def test_death_before_the_first_byte_is_retried(
    pair: tuple[Router, list[SimulatedReplica]],
) -> None:
    router, replicas = pair
    warm = await router.complete(prompt(*range(30)))
    bad = by_name(replicas, warm.replica)
    bad.behaviour.break_after = 0
    for stream in (False, True):
        answer = await router.complete(prompt(*range(30)), stream=stream)
        assert (answer.status, answer.cut) == (200, False)
        assert answer.replica != warm.replica


async def test_death_before_the_first_byte_without_another_replica_is_an_error(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server)
    replica.behaviour.break_after = 0
    answer = await router.complete(prompt(1))
    assert (answer.status, answer.error["code"]) == (502, "bad_gateway")
    assert answer.error["type"] == "server_error"
    assert str(replica.port) not in answer.body.decode()


async def test_death_in_mid_stream_is_an_error_event_and_no_clean_end(
    pair: tuple[Router, list[SimulatedReplica]],
) -> None:
    router, replicas = pair
    for replica in replicas:
        replica.behaviour.tokens = 5
        replica.behaviour.break_after = 3
        replica.behaviour.token_seconds = 0.02
    answer = await router.complete(prompt(1), stream=True)
    events = [line for line in answer.body.decode().split("\n\n") if line]
    assert answer.status == 200
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:3])
    error = json.loads(events[3].removeprefix("data: "))["error"]
    assert error["code"] == "stream_interrupted"
    assert len(events) == 4
    assert b"[DONE]" not in answer.body
    assert answer.cut
    assert sum(replica.counters.requests for replica in replicas) == 1  # and no retry


# ---- breaker ---------------------------------------------------------------------------------


async def test_client_errors_touch_no_breaker(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, breaker_failures=3)
    for status in (400, 404, 413, 422):
        replica.behaviour.status = status
        for _ in range(5):
            assert (await router.complete(prompt(1))).status == status
    replica.behaviour.status = 200
    assert (await router.complete(prompt(1))).status == 200


async def test_breaker_opens_and_closes_again(
    pair: tuple[Router, list[SimulatedReplica]], make_router: MakeRouter, redis_server: RedisServer
) -> None:
    _, replicas = pair
    router = await make_router(redis_server, breaker_failures=3, breaker_seconds=6.0, retries=0)
    warm = await router.complete(prompt(*range(30)))
    bad = by_name(replicas, warm.replica)
    bad.behaviour.status = 500
    statuses = [(await router.complete(prompt(*range(30)))).status for _ in range(3)]
    assert statuses == [500, 500, 500]
    reached = bad.counters.requests
    for _ in range(5):  # open: the other one serves
        assert (await router.complete(prompt(*range(30)))).replica != warm.replica
    assert bad.counters.requests == reached
    bad.behaviour.status = 200

    async def back() -> bool:
        return (await router.complete(prompt(*range(30), 7))).replica == warm.replica

    await eventually(back, what="the replica's return")


async def test_requests_that_fail_everywhere_close_a_model_to_no_other(
    make_router: MakeRouter, pair: tuple[Router, list[SimulatedReplica]], redis_server: RedisServer
) -> None:
    _, replicas = pair
    router = await make_router(
        redis_server, breaker_failures=2, breaker_seconds=600.0, queue_timeout=1.0, retries=0
    )
    for replica in replicas:
        replica.behaviour.status = 500
    for number in range(8):
        assert (await router.complete(prompt(number))).status == 500
    for replica in replicas:
        replica.behaviour.status = 200
    assert (await router.complete(prompt(9))).status == 200


# ---- deadlines -------------------------------------------------------------------------------


async def test_first_byte_deadline(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, first_byte_timeout=2.0)
    replica.behaviour.hang = True
    answer = await router.complete(prompt(1))
    assert (answer.status, answer.error["code"]) == (504, "timeout")
    await eventually(lambda: replica.counters.aborted == 1, what="the abort upstream")


async def test_job_that_takes_too_long_is_not_done_twice(
    pair: tuple[Router, list[SimulatedReplica]],
    redis_server: RedisServer,
    make_router: MakeRouter,
) -> None:
    """Neither by the router, on the other replica, nor by OpenAI's client, which retries a 504."""
    _, replicas = pair
    router = await make_router(redis_server, first_byte_timeout=2.5, retries=2)
    for replica in replicas:
        replica.behaviour.hang = True
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none") as client:
        with pytest.raises(openai.InternalServerError) as raised:
            await client.completions.create(model=MODEL, prompt=prompt(1), max_tokens=2)
    assert raised.value.status_code == 504
    assert "fewer tokens" in raised.value.message
    assert sum(replica.counters.requests for replica in replicas) == 1


async def test_error_event_of_the_replica_is_the_only_one(make_router: MakeRouter) -> None:
    """However the network joins it with what came before."""
    events = b'data: {"choices": []}\n\ndata: {"error": {"message": "mine", "code": null}}\n\n'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body, kind = b"{}", b"application/json"
        if head.startswith(b"POST"):
            size = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
            await reader.readexactly(size)
            body, kind = events, b"text/event-stream"
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: %b\r\n\r\n%b" % (kind, body)
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        router = await make_router(replicas=[f"{MODEL}=http://127.0.0.1:{port}"])
        broken = await router.complete("x", stream=True)
    assert broken.cut
    assert broken.body == events


async def test_silence_in_mid_stream_is_an_error_event(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, idle_timeout=0.4)
    replica.behaviour.token_seconds = 30.0
    answer = await router.complete(prompt(1), stream=True)
    assert b'"stream_interrupted"' in answer.body
    assert answer.cut
    await eventually(lambda: replica.counters.aborted == 1, what="the abort upstream")


async def test_request_is_held_until_a_replica_comes(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, queue_timeout=20.0)
    assert replica.publisher is not None
    await replica.publisher.drain()
    held = asyncio.create_task(router.complete(prompt(1)))
    sample = f'radixgrove_router_requests_held{{model="{MODEL}"}}'
    await eventually(lambda: _is(router.metric(sample), 1.0), what="the request to be held")
    await make_replica(redis_url=redis_server.url, replica_id="new")
    answer = await held
    assert (answer.status, answer.replica) == (200, "new")


async def _is(value: object, expected: float) -> bool:
    return await value == expected  # type: ignore[misc]


async def test_held_too_long_is_503_with_retry_after(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, queue_timeout=0.5)
    assert replica.publisher is not None
    await replica.publisher.drain()
    await eventually(lambda: _ready(router, 0), what="the router to see it")
    answer = await router.complete(prompt(1))
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1


async def test_model_whose_replicas_are_gone_is_away_and_not_unknown(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, queue_timeout=0.2, main=forgetful_main)
    assert (await router.complete(prompt(1))).status == 200
    await replica.stop()  # it takes its registration back

    async def gone() -> bool:
        return not (await router.status())["replicas"]

    await eventually(gone, what="the replica's end")
    answer = await router.complete(prompt(1))
    assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    unknown = await router.post("/v1/completions", completion(prompt(1), model="no"))
    assert unknown.status == 404
    await make_replica(redis_url=redis_server.url, replica_id="back")
    await eventually(lambda: _has_status(router, 200), what="the model's return")


async def _has_status(router: Router, status: int) -> bool:
    return (await router.complete(prompt(1))).status == status


async def test_queue_is_bounded(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, max_queued=3)
    replica.behaviour.token_seconds = 1.5
    answers = await asyncio.gather(*(router.complete(prompt(i)) for i in range(6)))
    statuses = sorted(answer.status for answer in answers)
    assert statuses == [200, 200, 200, 429, 429, 429]
    assert all("retry-after" in a.headers for a in answers if a.status == 429)


async def test_bodies_are_bounded_until_their_answers_begin(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, max_bodies_bytes=5000)
    text = prompt(*range(50))  # 3,200 characters
    replica.behaviour.hang = True
    waits = asyncio.create_task(router.complete(text))
    await eventually(lambda: replica.counters.requests == 1, what="the request to arrive")
    refused = await router.complete(text)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    waits.cancel()
    await eventually(lambda: replica.counters.aborted == 1, what="the abort")

    replica.behaviour = type(replica.behaviour)(tokens=1000, token_seconds=0.05)
    body = completion(text, stream=True)
    async with router.client.post(router.url + "/v1/completions", json=body) as stream:
        await stream.content.readany()
        replica.behaviour = type(replica.behaviour)()
        assert (await router.complete(text)).status == 200
        stream.close()


# ---- disconnects -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["non-streaming", "before the first byte", "mid-stream"])
async def test_disconnect_reaches_the_replica(
    case: str, redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url, block_ms=1.0)
    router = await make_router(redis_server)
    replica.behaviour.tokens = 1000
    replica.behaviour.token_seconds = 0.05 if case == "mid-stream" else 0.0
    text = prompt(1)
    if case != "mid-stream":
        replica.behaviour.hang = True
    body = completion(text, stream=case != "non-streaming")
    session = aiohttp.ClientSession()
    request = asyncio.create_task(session.post(router.url + "/v1/completions", json=body))
    await eventually(lambda: replica.counters.requests == 1, what="the request to arrive")
    if case == "mid-stream":
        response = await request
        await response.content.readany()
        response.close()
    else:
        request.cancel()
    await session.close()
    await eventually(lambda: replica.counters.aborted == 1, what="the abort")
    sample = f'radixgrove_router_requests_total{{model="{MODEL}",status="499"}}'
    await eventually(lambda: _is(router.metric(sample), 1.0))


# ---- bytes and headers -----------------------------------------------------------------------


async def test_bytes_ids_and_traces_pass_through(
    pair: tuple[Router, list[SimulatedReplica]],
) -> None:
    router, replicas = pair
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = json.dumps(completion("tök " * 40, stream=True), ensure_ascii=False, indent=3).encode()
    answer = await router.post(
        "/v1/completions",
        body,
        headers={
            "x-request-id": "mine-1",
            "traceparent": trace,
            "x-custom": "kept",
            "x-radixgrove-key": "forged",
            "authorization": "Bearer client",
        },
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert "tök ".encode() in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
    seen = by_name(replicas, answer.replica).counters
    assert seen.bodies == [body]
    headers = seen.headers[0]
    assert headers["x-request-id"] == "mine-1"
    assert headers["traceparent"].split("-")[1] == trace.split("-")[1]
    assert headers["traceparent"] != trace  # a span of the router's own
    assert headers["x-custom"] == "kept"
    assert headers["x-radixgrove-key"] == INTERNAL_KEY
    assert "authorization" not in headers


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/v1/models/none", "/livez"])
async def test_head_is_get_without_its_body(
    path: str, pair: tuple[Router, list[SimulatedReplica]]
) -> None:
    router, _ = pair
    got = await router.get(path)
    async with router.client.head(router.url + path) as response:
        assert await response.read() == b""
        assert response.status == got.status
        assert response.headers["content-length"] == str(len(got.body))
        assert response.headers["content-type"] == got.headers["content-type"]


async def test_headers_that_reveal_are_for_those_who_may_ask(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, reveal_replica=False)
    answer = await router.complete(prompt(1))  # asks
    assert "x-radixgrove-replica" not in answer.headers
    open_hearted = await make_router(redis_server)
    asked = await open_hearted.complete(prompt(1))
    silent = await open_hearted.post(
        "/v1/completions", completion(prompt(1)), headers={"x-radixgrove-debug": "0"}
    )
    for name in ("x-radixgrove-replica", "x-radixgrove-matched-tokens"):
        assert name in asked.headers
        assert name not in silent.headers


async def test_the_log_says_where_a_request_was_and_never_its_prompt(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url, replica_id="r0")
    router = await make_router(redis_server, log_json=True, log_level="debug")
    canary = prompt(4711)
    assert (await router.complete(canary)).status == 200
    assert (await router.complete(canary, temperature=canary)).status == 400
    replica.behaviour.break_after = 0
    assert (await router.complete(canary)).status == 502

    def lines() -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in router.log.read_text().splitlines()]
        return [line for line in logged if line.get("path") == "/v1/completions"]

    await eventually(lambda: len(lines()) == 3, what="the lines of the access log")
    assert [line["status"] for line in lines()] == [200, 400, 502]
    served, refused, _ = lines()
    assert (served["replica"], served["matched_tokens"], served["host_tokens"]) == ("r0", 0, 0)
    assert served["expected_ms"] > 0
    assert "replica" not in refused
    assert canary[:16] not in router.log.read_text()


async def test_errors_have_openais_shape(pair: tuple[Router, list[SimulatedReplica]]) -> None:
    router, replicas = pair
    cases = [
        (await router.get("/v1/nothing"), 404, "unknown_url"),
        (await router.get("/v1/completions"), 405, "method_not_supported"),
        (await router.post("/v1/embeddings", {}), 404, "unknown_url"),
        (await router.post("/v1/completions", b"\xff"), 400, None),
        (await router.post("/v1/completions", completion("x", model="no")), 404, "model_not_found"),
        (await router.complete("x", model="no", max_tokens=1 << 21), 404, "model_not_found"),
        (await router.complete("x", model="no", temperature=9), 404, "model_not_found"),
        (await router.complete("x", temperature=9), 400, None),
        (
            await router.complete(prompt(1), max_tokens=1 << 21),
            400,
            "context_length_exceeded",
        ),
        (await router.get("/v1/models/none"), 404, "model_not_found"),
        (await router.post("/v1/completions", b"{}", headers={"content-type": "a/b"}), 415, ...),
        (await router.post("/v1/completions", b"[" * (9 << 20)), 413, ...),
    ]
    for answer, status, code in cases:
        assert answer.status == status
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert code is ... or answer.error["code"] == code
    assert sum(replica.counters.requests for replica in replicas) == 0


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, None),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 100_000, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", 408, "request_timeout"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{",
            408,
            "request_timeout",
        ),
    ],
    ids=["no http", "headers too large", "headers too late", "body too late"],
)
async def test_what_never_became_a_request_has_an_id_and_a_line_in_the_log(
    data: bytes, status: int, code: str | None, make_router: MakeRouter
) -> None:
    router = await make_router(
        replicas=[f"model=http://127.0.0.1:{find_free_port()}"],
        ready=False,
        request_timeout=0.3,
        log_json=True,
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(data)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    identity = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()

    def lines() -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in router.log.read_text().splitlines()]
        return [line for line in logged if line.get("request_id") == identity]

    await eventually(lines, what="the line in the access log")
    assert [(line["logger"], line["status"]) for line in lines()] == [("radixgrove.access", status)]


# ---- processes that die ----------------------------------------------------------------------


class ReplicaProcess:
    """A simulated replica as a process of its own, to be killed."""

    def __init__(self, redis_url: str, name: str, port: int) -> None:
        self.command = [sys.executable, "-m", "benchmarks.simulated"]
        self.command += ["--port", str(port), "--redis", redis_url, "--replica-id", name]
        self.process = subprocess.Popen(self.command, cwd=ROOT)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def restart(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=ROOT)


@pytest.fixture
def processes(redis_server: RedisServer) -> Iterator[list[ReplicaProcess]]:
    replicas = [ReplicaProcess(redis_server.url, f"p{i}", find_free_port()) for i in range(2)]
    yield replicas
    for replica in replicas:
        replica.kill()


async def _ready(router: Router, count: int) -> bool:
    replicas = (await router.status())["replicas"]
    return [replica["state"] for replica in replicas].count("ready") == count


async def test_replica_killed_under_load(
    redis_server: RedisServer, processes: list[ReplicaProcess], make_router: MakeRouter
) -> None:
    """Every request ends as a whole answer or as an error that says so; a restart starts cold."""
    router = await make_router(redis_server)
    await eventually(lambda: _ready(router, 2))
    warm = await router.complete(prompt(*range(40)))
    generations = {r["replica"]: r["generation"] for r in (await router.status())["replicas"]}
    victim = processes[int(warm.replica.removeprefix("p"))]
    load = [
        asyncio.create_task(
            router.complete(prompt(*range(40), *range(1000 * i, 1000 * i + 20)), stream=bool(i % 2))
        )
        for i in range(1, 41)
    ]
    await eventually(lambda: _some_done(load))
    victim.kill()
    for answer in await asyncio.gather(*load):
        whole = (
            answer.body.endswith(b"data: [DONE]\n\n") or b'"finish_reason":"stop"' in answer.body
        )
        assert (whole and not answer.cut) or b'"error"' in answer.body
    victim.restart()

    async def returned() -> bool:
        status = {r["replica"]: r["generation"] for r in (await router.status())["replicas"]}
        return status.get(warm.replica, generations[warm.replica]) != generations[warm.replica]

    await eventually(returned, what="the restarted replica")
    await eventually(lambda: _ready(router, 2))
    # Nothing of the old generation is believed any more.
    answer = await router.complete(prompt(*range(40), 99_999))
    cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer.matched_tokens == cached


def _some_done(tasks: list[asyncio.Task[object]]) -> bool:
    return sum(task.done() for task in tasks) >= 3


async def test_stopped_replica_loses_its_lease_and_gets_nothing(
    redis_server: RedisServer, processes: list[ReplicaProcess], make_router: MakeRouter
) -> None:
    router = await make_router(redis_server, first_byte_timeout=2.0)
    await eventually(lambda: _ready(router, 2))
    processes[0].kill(signal.SIGSTOP)
    await eventually(lambda: _ready(router, 1), what="the lease to run out")
    answers = [await router.complete(prompt(i)) for i in range(8)]
    assert {answer.replica for answer in answers} == {"p1"}
    processes[0].kill(signal.SIGCONT)
    await eventually(lambda: _ready(router, 2), what="its return")


async def test_router_killed_under_load_leaves_no_load_behind(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replicas = [await make_replica(redis_url=redis_server.url, replica_id=f"r{i}") for i in (0, 1)]
    doomed, other = await make_router(redis_server), await make_router(redis_server)
    replicas[0].behaviour.hang = replicas[1].behaviour.hang = True
    lost = [asyncio.create_task(doomed.complete(prompt(i))) for i in range(10)]
    await eventually(lambda: sum(r.counters.requests for r in replicas) == 10)
    for replica in replicas:
        replica.behaviour.hang = False
    doomed.kill()
    assert all(
        isinstance(e, Exception) for e in await asyncio.gather(*lost, return_exceptions=True)
    )
    assert (await other.complete(prompt(99))).status == 200  # and serves on

    client = redis.Redis.from_url(redis_server.url)

    def dropped() -> bool:
        loads = [client.hgetall(key) for key in client.keys("radixgrove:{default}:load:*")]
        return not any(b"%d-" % doomed.port in router for load in loads for router in load)

    await eventually(dropped, what="the dead router's load to be dropped")


async def test_router_drains_on_sigterm(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server)
    replica.behaviour.token_seconds = 0.3
    running = asyncio.create_task(router.complete(prompt(1), stream=True))
    await eventually(lambda: replica.counters.requests == 1)
    assert router.process is not None
    router.process.terminate()
    answer = await running
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert await asyncio.to_thread(router.process.wait, 60) == 0
