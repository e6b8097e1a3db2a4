"""Requests of a replica that failed before the client had a byte: held, and placed again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.openai.errors import ApiError, overloaded, timed_out
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router import encoding, upstream
from radixgrove.router.__main__ import main as router_main
from radixgrove.router.main import RouterStartError, check
from radixgrove.router.recovery import (
    CONNECT,
    DIED,
    LATE,
    NO_RESOURCES,
    AttemptFailed,
    Course,
    Failure,
    ReplicaAnswer,
    refusal,
)
from radixgrove.router.replicas import MIN_OPEN_SECONDS, Breaker, Replica
from radixgrove.service import exit_codes
from tests.conftest import RedisServer, find_free_port
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL, Answer, Router, completion, eventually, prompt
from tests.router.test_failures import ReplicaProcess

# ---- the rule --------------------------------------------------------------------------------

HELD, BUSY = refusal(503), refusal(429)
assert HELD is not None
assert BUSY is not None


@dataclass
class _Step:
    failure: Failure
    replica: int
    seconds: float  # at the replica
    held: float  # after it
    proven: bool  # the replica answers a probe afterwards


steps = st.builds(
    _Step,
    st.sampled_from([CONNECT, DIED, HELD, BUSY, NO_RESOURCES, LATE]),
    st.integers(0, 2),
    st.floats(0, 20),
    st.floats(0.01, 5),
    st.booleans(),
)


@given(steps=st.lists(steps, max_size=12), retries=st.integers(0, 3))
def test_a_request_goes_on_as_long_as_it_may(steps: list[_Step], retries: int) -> None:
    patience, answer_within, now, delivered, waited = 30.0, 60.0, 100.0, 0, 0.0
    replicas = [Replica(f"r{i}", "http://127.0.0.1", Breaker(5, 10.0)) for i in range(3)]
    course = Course(retries, hold_until=now + patience, answer_by=now + answer_within)
    came, failed_at = now, dict[Replica, float]()
    for step in steps:
        began, now = now, now + step.seconds
        replica = replicas[step.replica]
        goes_on = course.failed(replica, AttemptFailed(step.failure, timed_out()), began, now)
        delivered += step.failure.delivered
        waited += 0.0 if step.failure.delivered else step.seconds
        # Without limit while nothing was delivered; a few times else; never for a late answer.
        late = now >= came + answer_within
        assert goes_on == (delivered <= retries and step.failure is not LATE and not late)
        if not goes_on:
            return
        # Time at a replica that had the request is no waiting: all else is, and counts once.
        left = min(patience - waited, came + answer_within - now)
        assert course.deadline - now == pytest.approx(left)
        assert course.may_wait == (step.failure is not BUSY)
        if step.failure is not NO_RESOURCES:
            # A probe is no proof that a full replica has room.
            failed_at[replica] = math.inf if step.failure is BUSY else now
        now, waited = now + step.held, waited + step.held
        if step.proven:
            replica.proven = now
        first, *fewer = course.passed_by()
        assert set(first) == set(failed_at)
        unproven = {replica for replica, at in failed_at.items() if replica.proven <= at}
        assert set(fewer[0] if fewer else first) == unproven


def test_a_breaker_opens_on_answers_that_begin_and_never_end() -> None:
    now = [0.0]
    breaker = Breaker(3, 10.0, clock=lambda: now[0])
    for _ in range(3):
        assert not breaker.open
        breaker.answering()
        breaker.failed(unreachable=False)
    assert breaker.open
    now[0] = 10.0
    assert breaker.allows()
    breaker.take()
    assert not breaker.allows()
    breaker.answering()
    assert not breaker.open
    breaker.failed(unreachable=False)  # one more is enough now
    assert breaker.open


@pytest.mark.parametrize("unreachable", [True, False])
def test_a_probe_shortens_what_it_disproves(unreachable: bool) -> None:
    now = [0.0]
    breaker = Breaker(3, 10.0, clock=lambda: now[0])
    for failure in (True, unreachable, True):
        breaker.failed(unreachable=failure)
    breaker.reached()  # no sooner than that, lest it flutter
    assert not breaker.allows()
    now[0] = MIN_OPEN_SECONDS
    assert not breaker.allows()
    breaker.reached()
    assert breaker.open != unreachable  # 500s came from what answered its probes all along
    now[0] = 10.0
    assert breaker.allows()


# ---- replicas on real sockets ----------------------------------------------------------------

OK = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n"
    b'{"choices": ["whole"]}'
)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
EVENT = b'data: {"choices": []}\n\n'


class Foreign:
    """A static replica that says what it is made to say, and ends the connection."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.ready = True
        self.requests = 0
        self.before: Callable[[], float] = lambda: 0.0  # seconds until it answers
        self.port = 0

    @property
    def url(self) -> str:
        return f"{MODEL}=http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                status = b"200 OK" if self.ready else b"503 No"
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status)
            else:
                size = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
                await reader.readexactly(size)
                self.requests += 1
                await asyncio.sleep(self.before())
                for part in self.answer.partition(b": ping\n\n"):
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.02 * (part == b": ping\n\n"))
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def foreign(answer: bytes, port: int = 0) -> AsyncIterator[Foreign]:
    replica = Foreign(answer)
    async with await asyncio.start_server(replica.handle, "127.0.0.1", port) as server:
        replica.port = server.sockets[0].getsockname()[1]
        yield replica


async def _state(router: Router, port: int) -> str:
    found = {r["replica"]: r["state"] for r in (await router.status())["replicas"]}
    return str(found[f"127.0.0.1:{port}"])


async def _failures(router: Router, replica: str, reason: str) -> float:
    labels = f'reason="{reason}",replica="{replica}"'
    return await router.metric(f"radixgrove_router_replica_failures_total{{{labels}}}")


NO_ANSWERS = {
    "stream without an event": (STREAM + b"\r\n", "no_answer"),
    "stream without a chunk": (
        STREAM + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "no_answer",
    ),
    "stream cut short of its length": (STREAM + b"content-length: 100\r\n\r\n", "died"),
    "stream that ends in its first event": (STREAM + b"\r\n" + EVENT[:9], "no_answer"),
    "stream cut in its first event": (
        STREAM + b"content-length: 100\r\n\r\n" + EVENT[:9],
        "died",
    ),
    "JSON cut short of its length": (OK[:-3], "died"),
    "JSON of no bytes": (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n",
        "no_answer",
    ),
    "no bytes of nothing": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "no_answer"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", "no_answer"),
    "interim answers without end": (b"HTTP/1.1 102 Processing\r\n\r\n" * 4000, "died"),
    "JSON ended by its connection, and cut": (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + OK[-22:-3],
        "no_answer",
    ),
}


@pytest.mark.parametrize(("sent", "reason"), NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_what_is_no_answer_is_a_failure_and_another_replica_answers(
    sent: bytes, reason: str, make_router: MakeRouter
) -> None:
    async with foreign(sent) as bad, foreign(OK) as good:
        router = await make_router(replicas=[bad.url, good.url], breaker_failures=2)
        for replica in (bad, good):
            await eventually(lambda r=replica: _is_ready(router, r))

        async def opened() -> bool:
            answer = await router.complete(prompt(1), stream=True)
            assert (answer.status, answer.json) == (200, {"choices": ["whole"]})
            return bad.requests >= 2

        await eventually(opened, what="requests at both")
        assert await _failures(router, f"127.0.0.1:{bad.port}", reason) == 2
        assert await _failures(router, f"127.0.0.1:{good.port}", reason) == 0


async def _is_ready(router: Router, replica: Foreign) -> bool:
    return await _state(router, replica.port) == "ready"


@pytest.mark.parametrize(
    "sent",
    [
        STREAM + b"\r\n" + EVENT,
        STREAM + b"content-length: 1000\r\n\r\n" + EVENT,
        STREAM + b"\r\n" + EVENT + b'data:  {"error": {"message": "theirs"}}\n\ndata: [DONE]\n\n',
    ],
    ids=["no end", "cut short of its length", "error, then an end"],
)
async def test_streams_that_break_say_so_once_and_open_the_breaker(
    sent: bytes, make_router: MakeRouter
) -> None:
    async with foreign(sent) as replica:
        router = await make_router(replicas=[replica.url], breaker_failures=2, queue_timeout=0.1)
        for _ in range(2):
            answer = await router.complete(prompt(1), stream=True)
            assert answer.status == 200
            assert answer.body.startswith(EVENT)
            assert answer.body.count(b'"error"') == 1
            assert b"[DONE]" not in answer.body
            assert answer.cut
        assert await _state(router, replica.port) == "broken"


@pytest.mark.parametrize(
    "end", [b"data:[DONE]\n\n", b"data: [DONE]", b"data: [DONE]\r\n\r\n: x\n\n"]
)
async def test_nothing_follows_an_end_however_it_is_spaced(
    end: bytes, make_router: MakeRouter
) -> None:
    async with foreign(STREAM + b"content-length: 1000\r\n\r\n" + EVENT + end + b"\n") as replica:
        router = await make_router(replicas=[replica.url])
        answer = await router.complete(prompt(1), stream=True)
        assert not answer.cut
        assert b"error" not in answer.body
        assert answer.body.rstrip().endswith(b"[DONE]")


async def test_answers_that_are_held_whole_are_bounded_together(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no replica it is the fault, and small answers always pass."""
    monkeypatch.setattr(upstream, "MAX_HELD_BYTES", 1 << 20)
    simulated = await make_replica()
    replica = Replica("r0", simulated.url, Breaker(5, 1.0))
    sending = upstream.Upstream(RouterSettings())

    async def attempt(tokens: int) -> upstream.Attempt:
        simulated.behaviour.tokens = tokens  # of four characters
        body = json.dumps(completion(prompt(1))).encode()
        fields = [(b"content-type", b"application/json")]
        return await sending.send(replica, "/v1/completions", fields, body, 10.0, no_comment)

    async def no_comment(_: ReplicaAnswer) -> None:
        raise AssertionError("no stream")

    async def reachable() -> bool:
        with contextlib.suppress(AttemptFailed):
            (await attempt(2)).close()
            return True
        return False

    try:
        await eventually(reachable, what="the replica")
        for _ in range(3):  # what was given back counts no more
            first = await attempt(200_000)
            with pytest.raises(AttemptFailed) as failed:
                await attempt(200_000)
            assert isinstance(failed.value.answer, ApiError)
            assert failed.value.answer.code == "answer_too_large"
            assert not failed.value.failure.blame
            assert not failed.value.failure.retry
            (await attempt(2)).close()
            first.close()
        monkeypatch.setattr(upstream, "MAX_ANSWER_BYTES", 1 << 19)
        with pytest.raises(AttemptFailed):
            await attempt(200_000)
    finally:
        sending.close()


async def test_a_whole_answer_that_is_not_read_ends_as_a_stream_does(
    make_router: MakeRouter,
) -> None:
    """Until then it counts as an answer that is held."""
    body = b'{"text":"%b"}' % (b"x" * (16 << 20))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    asked = json.dumps(completion(prompt(1))).encode()
    async with foreign(head % len(body) + body) as replica:
        router = await make_router(replicas=[replica.url], idle_timeout=1.0)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            client.connect(("127.0.0.1", router.port))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(asked), asked)
            )
            left = f'radixgrove_router_requests_total{{model="{MODEL}",status="499"}}'

            async def given_up() -> bool:
                return await router.metric(left) == 1

            await eventually(given_up, what="the end of the request")


@pytest.mark.parametrize("last_words", [b"", overloaded("The engine has stopped.").event()])
@pytest.mark.parametrize("another", [True, False])
async def test_comments_are_no_part_of_an_answer(
    another: bool, last_words: bytes, make_router: MakeRouter
) -> None:
    """A worker's queue is long, it pings, and dies: the request goes on elsewhere."""
    ping = b": ping\n\n"
    whole = STREAM + b"\r\n" + EVENT + b"data: [DONE]\n\n"
    async with foreign(STREAM + b"\r\n" + ping + last_words) as dying, foreign(whole) as good:
        replicas = [dying.url, good.url] if another else [dying.url]
        router = await make_router(replicas=replicas, retries=1, breaker_failures=1000)

        async def died() -> Answer | None:
            answer = await router.complete(prompt(1), stream=True)
            return answer if answer.body.startswith(ping) else None

        answer = await eventually(died, what="a request at the one that dies")
        assert answer.status == 200
        if another:
            assert (answer.body, answer.cut) == (ping + EVENT + b"data: [DONE]\n\n", False)
        else:
            assert answer.cut
            assert answer.body.removeprefix(2 * ping).startswith(b'data: {"error":')
            assert answer.body.count(b"data: ") == 1


# ---- held ------------------------------------------------------------------------------------


async def _router_of_a_dead_replica(
    server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter, **settings: object
) -> Router:
    """The replica's lease goes on, and nothing listens there."""
    dead = await make_replica(redis_url=server.url, replica_id="dead")
    router = await make_router(server, **settings)
    assert (await router.complete(prompt(1))).status == 200
    dead._server.abort()
    await eventually(lambda: _refuses(dead.port), what="the listener's end")
    return router


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def _held(router: Router, count: int) -> bool:
    sample = f'radixgrove_router_requests_held{{model="{MODEL}"}}'
    return await router.metric(sample) == count


async def test_what_was_never_delivered_waits_for_the_next_replica(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    router = await _router_of_a_dead_replica(
        redis_server, make_replica, make_router, retries=0, queue_timeout=60.0
    )
    held = [asyncio.create_task(router.complete(prompt(i))) for i in range(3)]
    await eventually(lambda: _held(router, 3), what="the requests to be held")
    await make_replica(redis_url=redis_server.url, replica_id="new")
    assert [(a.status, a.replica) for a in await asyncio.gather(*held)] == [(200, "new")] * 3


async def test_it_waits_no_longer_than_it_may(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    router = await _router_of_a_dead_replica(
        redis_server, make_replica, make_router, queue_timeout=0.5
    )
    answer = await router.complete(prompt(1))
    assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
    assert await _failures(router, "dead", "connect") >= 1


async def test_one_poisonous_request_does_not_kill_every_replica(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replicas = [
        await make_replica(redis_url=redis_server.url, replica_id=f"r{i}") for i in range(4)
    ]
    router = await make_router(redis_server, retries=2)
    await eventually(lambda: _count_ready(router, 4))
    for replica in replicas:
        replica.behaviour.break_after = 0
    answer = await router.complete(prompt(1))
    assert (answer.status, answer.error["code"]) == (502, "bad_gateway")
    assert sum(replica.counters.requests for replica in replicas) == 3


async def _count_ready(router: Router, count: int) -> bool:
    states = [replica["state"] for replica in (await router.status())["replicas"]]
    return states.count("ready") == count


async def test_the_only_replica_is_tried_again_once_it_says_that_it_serves(
    make_router: MakeRouter,
) -> None:
    async with foreign(b"") as replica:
        router = await make_router(replicas=[replica.url], retries=1, queue_timeout=60.0)
        replica.ready = False
        request = asyncio.create_task(router.complete(prompt(1)))
        await eventually(lambda: _held(router, 1), what="the request to be held")
        assert replica.requests <= 1
        replica.answer, replica.ready = OK, True
        assert (await request).status == 200


async def test_the_deadline_of_the_first_byte_is_one_for_all_attempts(
    make_router: MakeRouter,
) -> None:
    """With one of its own each attempt would fail by its replica's death: 502 in the end."""
    async with foreign(b"") as one, foreign(b"") as other:
        one.before = other.before = lambda: 0.4
        router = await make_router(
            replicas=[one.url, other.url], retries=16, first_byte_timeout=1.0, breaker_failures=100
        )
        assert (await router.complete(prompt(1))).status == 504


async def test_requests_at_a_replica_that_hangs_go_elsewhere_when_its_lease_has_ended(
    redis_server: RedisServer, make_router: MakeRouter
) -> None:
    replicas = [ReplicaProcess(redis_server.url, f"p{i}", find_free_port()) for i in range(2)]
    try:
        router = await make_router(redis_server, breaker_seconds=3600.0)
        await eventually(lambda: _count_ready(router, 2))
        replicas[0].kill(signal.SIGSTOP)
        requests = [asyncio.create_task(router.complete(prompt(i, i))) for i in range(12)]
        async with asyncio.timeout(60):
            answers: list[Answer] = await asyncio.gather(*requests)
        assert [(a.status, a.replica) for a in answers] == [(200, "p1")] * 12
        assert await _failures(router, "p0", "lost") >= 1
        # Back again it serves at once: what answers a probe need not wait for its breaker.
        replicas[0].kill(signal.SIGCONT)
        await eventually(lambda: _count_ready(router, 2), what="its return")
    finally:
        for replica in replicas:
            replica.kill()


async def test_a_breaker_does_not_outlast_the_replicas_absence(make_router: MakeRouter) -> None:
    port = find_free_port()
    async with foreign(OK, port) as replica:
        router = await make_router(
            replicas=[replica.url], breaker_failures=1, breaker_seconds=3600.0, queue_timeout=60.0
        )
        assert (await router.complete(prompt(1))).status == 200
    request = asyncio.create_task(router.complete(prompt(1)))
    await eventually(lambda: _failed_once(router, port), what="the failure")
    async with foreign(OK, port):
        assert (await request).status == 200
        await eventually(lambda: _in_state(router, port, "ready"))


async def _failed_once(router: Router, port: int) -> bool:
    return await _failures(router, f"127.0.0.1:{port}", "connect") >= 1


async def _in_state(router: Router, port: int, state: str) -> bool:
    return await _state(router, port) == state


# ---- what is the router's own ----------------------------------------------------------------


def _poor_main(arguments: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
    router_main(arguments)


async def test_a_router_without_descriptors_blames_no_replica(
    make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica()
    router = await make_router(
        replicas=[f"{MODEL}={replica.url}"], main=_poor_main, queue_timeout=60.0
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    hoard = []
    while True:  # until the router has none left, and ends what it accepts
        r, w = await asyncio.open_connection("127.0.0.1", router.port)
        hoard.append(w)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                assert await r.read() == b""
                break
    body = b'{"model": "simulated", "prompt": "abc ", "max_tokens": 2}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    answer = asyncio.create_task(reader.readuntil(b"\r\n"))
    await asyncio.wait([answer], timeout=1.5)  # while it has none
    assert not answer.done()
    for other in hoard:
        other.close()
    async with asyncio.timeout(30):
        assert await answer == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    text = (await router.get("/metrics")).body.decode()
    assert "replica_failures_total{" not in text
    assert 'retries_total{reason="no_resources"}' in text


def _thrifty_main(arguments: list[str]) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, most))
    router_main(arguments)


async def test_a_router_opens_as_many_connections_as_the_system_allows(
    make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """Soft limits are made for others: 1,024 descriptors are 500 streams."""
    replica = await make_replica()
    router = await make_router(replicas=[f"{MODEL}={replica.url}"], main=_thrifty_main)
    request = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    hoard = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(64)]
    for reader, writer in hoard:
        writer.write(request)
        assert await asyncio.wait_for(reader.readuntil(b"\r\n"), 20) == b"HTTP/1.1 200 OK\r\n"
    assert (await router.complete(prompt(1))).status == 200
    for _, writer in hoard:
        writer.close()


def _unprepared_main(arguments: list[str]) -> None:
    def unforeseen(*_: object) -> None:
        raise KeyError("a field that only newer workers write")

    encoding.PromptEncoder = unforeseen  # type: ignore[assignment,misc]
    router_main(arguments)


async def test_a_tokenizer_that_fails_unforeseen_ends_no_router(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, main=_unprepared_main)
    assert (await router.complete(prompt(1))).status == 200
    await eventually(lambda: "its workers tokenize" in router.log.read_text())
    assert (await router.complete(prompt(1))).status == 200


async def test_a_replica_whose_tokenizer_is_not_there_sees_no_key_of_a_client(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url, keep_bodies=True)
    replica.behaviour.tokenizer = False
    router = await make_router(redis_server)
    answer = await router.post(
        "/v1/completions",
        {"model": MODEL, "prompt": prompt(1), "max_tokens": 2},
        headers={"authorization": "Bearer client"},
    )
    assert answer.status == 200
    await eventually(lambda: "no tokenizer" in router.log.read_text())
    seen = replica.counters.headers[0]
    assert "authorization" not in seen
    assert "x-radixgrove-key" in seen


async def test_the_tokenizer_comes_from_another_replica_where_one_hangs(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replicas = [await make_replica(redis_url=redis_server.url, replica_id=f"r{i}") for i in (0, 1)]
    replicas[0].behaviour.tokenizer_hangs = True
    router = await make_router(redis_server)
    assert (await router.complete(prompt(*range(4)))).status == 200

    async def found() -> bool:  # what the router has tokenized itself
        return (await router.complete(prompt(*range(4)))).matched_tokens > 0

    await eventually(found, what="the prompt in the index")
    # It was not awaited until it failed.
    assert "no tokenizer" not in router.log.read_text()


@pytest.mark.parametrize(
    "replica", ["http://[half", "m=ftp://host", "host:8000", "http://host:99999"]
)
def test_a_static_replica_that_has_no_address_is_refused_at_the_start(replica: str) -> None:
    with pytest.raises(RouterStartError, match="no HTTP address") as refused:
        check(RouterSettings(replicas=[replica]))
    assert exit_codes.of(refused.value) == exit_codes.USAGE
