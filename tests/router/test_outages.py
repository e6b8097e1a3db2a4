"""Redis goes, returns empty, or is never there; foreign and static replicas; several processes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from radixgrove.service.listening import bound_socket
from tests.conftest import RedisServer, find_free_port
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL, Router, completion, eventually, prompt

LONG = tuple(range(500, 560))


async def _redis_up(router: Router, up: bool) -> bool:
    return await router.metric("radixgrove_router_redis_up") == float(up)


async def test_serves_without_redis_and_recovers_when_it_returns_empty(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    for i in range(2):
        await make_replica(redis_url=redis_server.url, replica_id=f"r{i}")
    router = await make_router(redis_server)
    await router.complete(prompt(*LONG, 1))
    await router.complete(prompt(*LONG, 2))
    redis_server.kill()
    await eventually(lambda: _redis_up(router, False), what="the router to notice")
    # Prefix affinity holds among the routers' own guesses, and everything is answered.
    answers = [await router.complete(prompt(*LONG, 10 + i)) for i in range(6)]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.replica for answer in answers}) == 1
    assert (await router.get("/readyz")).status == 200
    spread = await asyncio.gather(
        *(router.complete(prompt(*range(1000 * i, 1000 * i + 30))) for i in range(1, 17))
    )
    assert {answer.replica for answer in spread} == {"r0", "r1"}
    await eventually(lambda: "Redis cannot be used" in router.log.read_text())

    redis_server.start()  # empty
    during = [await router.complete(prompt(*LONG, 30 + i)) for i in range(5)]
    assert {answer.status for answer in during} == {200}

    async def shared_again() -> bool:
        before = [await router.metric(_placements(name)) for name in ("r0", "r1")]
        answer = await router.complete(prompt(*LONG, 99))
        after = [await router.metric(_placements(name)) for name in ("r0", "r1")]
        return sum(after) > sum(before) and answer.matched_tokens == len(LONG) * 16

    await eventually(shared_again, deadline=30, what="the index to be rebuilt from snapshots")
    assert await _redis_up(router, True)


def _placements(replica: str) -> str:
    return f'radixgrove_router_placements_total{{decided="redis",replica="{replica}"}}'


async def test_redis_that_hangs_costs_a_moment_and_no_request(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, redis_timeout=0.05)
    assert redis_server.process is not None
    redis_server.process.send_signal(signal.SIGSTOP)
    try:
        answer = await asyncio.wait_for(router.complete(prompt(1)), 20)
        assert answer.status == 200
        await eventually(lambda: _redis_up(router, False))
        assert (await asyncio.wait_for(router.complete(prompt(2)), 20)).status == 200
    finally:
        redis_server.process.send_signal(signal.SIGCONT)
    await eventually(lambda: _redis_up(router, True))


async def test_flushed_scripts_are_loaded_again(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server)
    redis.Redis.from_url(redis_server.url).script_flush()
    answer = await router.complete(prompt(1))
    assert answer.status == 200
    assert await router.metric(_placements(answer.replica)) == 1


async def test_dead_generations_are_cleaned_up(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    first = await make_replica(redis_url=redis_server.url, replica_id="same")
    router = await make_router(redis_server)
    await router.complete(prompt(*LONG))
    assert first.publisher is not None
    client = redis.Redis.from_url(redis_server.url)
    old = first.publisher.status().generation.encode()
    await eventually(lambda: any(old in key for key in client.keys("*:gpu:*")))
    await make_replica(redis_url=redis_server.url, replica_id="same")  # takes its place
    await eventually(lambda: not any(old in key for key in client.scan_iter()), what="the janitor")
    assert not client.hexists("radixgrove:{default}:leases", old)


async def test_static_foreign_replicas_are_tracked_by_what_was_sent(
    make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """No Redis, no events, no envelope: as vLLM or SGLang would be."""
    replicas = [await make_replica(keep_bodies=True) for _ in range(2)]
    one, other = (replica.url for replica in replicas)
    router = await make_router(replicas=[one, f"{other}/v1/"])  # as its clients are given it, too
    await eventually(lambda: _ready_replicas(router, 2))
    text = prompt(*LONG)
    first = await router.complete(text + prompt(1))
    for tail in range(2, 8):
        answer = await router.complete(text + prompt(tail))
        assert answer.replica == first.replica
        assert answer.matched_tokens > 0
    seen = Counter([(await router.complete(prompt(9000 + i))).replica for i in range(20)])
    assert len(seen) == 2
    for body, param in ((completion("x", n="2"), "n"), (completion("x", model=5), "model")):
        refused = await router.post("/v1/completions", body)
        assert (refused.status, refused.error["param"]) == (400, param)
    served = next(replica for replica in replicas if replica.url.endswith(first.replica))
    assert served.counters.headers[0]["content-type"] == "application/json"
    assert "x-radixgrove-key" not in served.counters.headers[0]


async def _ready_replicas(router: Router, count: int) -> bool:
    states = [replica["state"] for replica in (await router.status())["replicas"]]
    return states.count("ready") == count


async def test_static_replica_that_is_not_ready_gets_nothing(
    make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replicas = [await make_replica() for _ in range(2)]
    replicas[0].behaviour.ready = False
    router = await make_router(replicas=[f"{MODEL}={replica.url}" for replica in replicas])
    answers = [await router.complete(prompt(i)) for i in range(6)]
    assert {answer.status for answer in answers} == {200}
    assert replicas[0].counters.requests == 0
    replicas[0].behaviour.ready = True
    await eventually(lambda: _ready_replicas(router, 2))


async def test_static_and_registered_replicas_serve_one_model_together(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    registered = await make_replica(redis_url=redis_server.url, replica_id="mine", block_ms=4)
    static = await make_replica(block_ms=4)
    router = await make_router(redis_server, replicas=[f"{MODEL}={static.url}"])
    await eventually(lambda: _ready_replicas(router, 2))
    await asyncio.gather(
        *(router.complete(prompt(*range(1000 * i, 1000 * i + 40))) for i in range(1, 17))
    )
    assert registered.counters.requests >= 3
    assert static.counters.requests >= 3


async def test_several_models_behind_one_router(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    for name in ("alpha", "beta"):
        await make_replica(
            redis_url=redis_server.url,
            service=name,
            replica_id=f"{name}-0",
            models=[name, f"{name}-alias"],
        )
    router = await make_router(redis_server)
    await eventually(lambda: _ready_replicas(router, 2))
    for model in ("alpha", "alpha-alias", "beta", "beta-alias"):
        answer = await router.post("/v1/completions", completion(prompt(1), model=model))
        assert answer.replica == f"{model.partition('-')[0]}-0"
        assert (await router.get(f"/v1/models/{model}")).json["id"] == model
    listed = [entry["id"] for entry in (await router.get("/v1/models")).json["data"]]
    assert listed == ["alpha", "alpha-alias", "beta", "beta-alias"]


async def test_replica_with_another_secret_is_refused_loudly(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url, replica_id="good")
    await make_replica(redis_url=redis_server.url, replica_id="bad", secret=b"another")
    router = await make_router(redis_server)
    answers = [await router.complete(prompt(i)) for i in range(8)]
    assert {answer.replica for answer in answers} == {"good"}
    assert await router.metric("radixgrove_router_refused_replicas") == 1
    refused = "replica bad is refused: it has another cluster secret"
    await eventually(lambda: refused in router.log.read_text())


async def is_draining(router: Router, replica: str) -> bool:
    status = (await router.get("/status", management=True)).json
    return any(e["replica"] == replica and e["state"] == "draining" for e in status["replicas"])


async def test_drain_through_the_management_port(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    for i in range(2):
        await make_replica(redis_url=redis_server.url, replica_id=f"r{i}")
    router = await make_router(redis_server, management_key="secret")
    other = await make_router(redis_server)
    assert (await router.get("/status", management=True)).status == 401
    key = {"authorization": "Bearer secret"}
    path = "/replicas/r0/drain"
    assert (await router.post(path, b"", management=True)).status == 401
    assert (
        await router.post("/replicas/no/drain", b"", management=True, headers=key)
    ).status == 404
    assert (await router.post(path, b"", management=True, headers=key)).status == 200
    answers = [await router.complete(prompt(i)) for i in range(6)]
    # The lease says so: without Redis's answer in time, only once the other has looked at it.
    await eventually(lambda: is_draining(other, "r0"), what="word of the drain")
    answers += [await other.complete(prompt(i)) for i in range(6)]
    assert {answer.replica for answer in answers} == {"r1"}
    assert (await router.get("/replicas/r1/drain")).status == 404  # not on the public port


async def test_a_drained_replica_comes_back_on_request(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """From every router, whichever drained it."""
    replicas = [
        await make_replica(redis_url=redis_server.url, replica_id=f"r{i}") for i in range(2)
    ]
    router, other = await make_router(redis_server), await make_router(redis_server)

    async def states(of: Router) -> dict[str, str]:
        status = (await of.get("/status", management=True)).json
        return {entry["replica"]: entry["state"] for entry in status["replicas"]}

    await router.post("/replicas/r0/drain", b"", management=True)
    assert (await states(router))["r0"] == "draining"
    await eventually(lambda: replicas[0].publisher.status().draining)
    assert (await other.post("/replicas/r0/undrain", b"", management=True)).status == 200
    assert (await states(other))["r0"] == "ready"
    await eventually(lambda: not replicas[0].publisher.status().draining)
    for one in (router, other):

        async def ready(one: Router = one) -> bool:
            return (await states(one))["r0"] == "ready"

        await eventually(ready)
        answers = [await one.complete(prompt(500 + i)) for i in range(12)]
        assert {answer.replica for answer in answers} == {"r0", "r1"}


async def test_log_level_can_be_changed(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, log_level="warning", processes=2)
    await router.complete(prompt(1))
    assert "radixgrove.access" not in router.log.read_text()
    assert (await router.post("/log-level", b'{"level":"loud"}', management=True)).status == 400
    await router.post("/log-level", b'{"level":"info"}', management=True)

    async def logged() -> bool:
        await router.complete(prompt(1))
        return "radixgrove.access" in router.log.read_text()

    await eventually(logged)


async def test_keys_make_principals_and_principals_do_not_share(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-a\nbob: key-b\n")
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, api_keys_file=str(keys))
    assert (await router.complete(prompt(1))).status == 401
    assert (await router.get("/v1/models")).status == 401
    assert (await router.get("/readyz")).status == 200
    body = completion(prompt(*LONG, 1))

    async def ask(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await router.post("/v1/completions", body, headers=headers)).matched_tokens

    # The simulated replica publishes all it has under `local`: neither principal may see that.
    assert [await ask("key-a"), await ask("key-b")] == [0, 0]


async def test_every_route_but_health_needs_a_key(make_router: MakeRouter, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-a\n")
    router = await make_router(ready=False, api_keys_file=str(keys), management_key="m")
    routes = ["/v1/models", f"/v1/models/{MODEL}", "/metrics", "/v1/chat/completions"]
    routes += [
        "/v1/completions",
        "/v1/responses",
        "/nothing",
        "/docs",
        "/openapi.json",
        "/status",
        "/livez/x",
    ]
    for path in routes:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "key-a"}):
                async with router.client.request(
                    method, router.url + path, headers=header
                ) as response:
                    assert response.status == 401, (method, path)
                    if method != "HEAD":
                        assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert (await router.get("/livez")).status == 200
    assert (await router.get("/readyz")).status == 503


async def test_whoever_scrapes_metrics_needs_no_api_key(
    make_router: MakeRouter, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: key-a\n")
    router = await make_router(ready=False, api_keys_file=str(keys), management_key="m")
    for key, path, status in [
        *(("m", "/metrics", 200), ("key-a", "/metrics", 200), ("m", "/v1/models", 401)),
    ]:
        answer = await router.get(path, authorization=f"Bearer {key}")
        assert answer.status == status, (key, path)


async def test_processes_share_one_port_and_a_dead_one_is_replaced(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    import psutil

    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, processes=2)
    assert router.process is not None
    parent = psutil.Process(router.process.pid)
    await eventually(lambda: len(parent.children()) == 2)
    victim = parent.children()[0]
    victim.kill()
    await eventually(lambda: victim.pid not in [child.pid for child in parent.children()])
    await eventually(lambda: len(parent.children()) == 2, what="the replacement")
    await eventually(lambda: router.answers("/readyz"))
    for i in range(8):
        assert (await router.complete(prompt(i))).status == 200
    assert replica.counters.requests >= 8
    children = parent.children()
    assert await router.stop() == 0
    assert not any(child.is_running() for child in children)


async def test_a_process_that_hangs_is_named_and_replaced(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    import psutil

    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, processes=2)
    assert router.process is not None
    parent = psutil.Process(router.process.pid)
    await eventually(lambda: len(parent.children()) == 2)
    victim = parent.children()[0]
    victim.suspend()
    await eventually(
        lambda: f"(process {victim.pid}) hangs: its event loop" in router.log.read_text(),
        what="the message",
    )
    assert not victim.is_running()
    await eventually(lambda: len(parent.children()) == 2, what="the replacement")
    await eventually(lambda: router.answers("/readyz"))
    for i in range(8):
        assert (await router.complete(prompt(i))).status == 200


def test_processes_that_cannot_start_end_the_router(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = {
            "processes": 2,
            "port": find_free_port(),
            "management_port": other.getsockname()[1],
        }
        lines = _last_words(settings, tmp_path / "router.json")
    taken = f"cannot listen on 127.0.0.1 management port {settings['management_port']}"
    assert any(taken in line for line in lines)
    assert "router process 0 (process " in lines[-1]


def test_processes_do_not_join_those_of_another_router_on_its_port(tmp_path: Path) -> None:
    with bound_socket("127.0.0.1", 0, shared=True) as other:
        other.listen()
        settings = {"processes": 2, "port": other.getsockname()[1], "management_port": 0}
        lines = _last_words(settings, tmp_path / "router.json")
    assert f"cannot listen on 127.0.0.1 port {settings['port']}: Address already in" in lines[-1]


def _last_words(settings: dict[str, int], file: Path) -> list[str]:
    """What a router that cannot start says, line by line."""
    file.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "radixgrove.router", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr.splitlines()


async def test_killed_parent_leaves_no_process_and_its_directory_goes_with_the_next_start(
    redis_server: RedisServer, make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    def directories() -> set[Path]:
        return set(base.glob("radixgrove-router-*"))

    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as name:
        base = Path(name)
        monkeypatch.setenv("TMPDIR", name)
        killed = await make_router(redis_server, ready=False, processes=2)
        living = await make_router(redis_server, ready=False, processes=2)
        assert len(directories()) == 2
        assert killed.process is not None
        parent = psutil.Process(killed.process.pid)
        await eventually(lambda: len(parent.children()) == 2)
        children = parent.children()
        parent.kill()
        parent.wait(30)
        await eventually(lambda: not any(map(_lives, children)), what="the children's end")
        left = directories()
        await make_router(redis_server, ready=False, processes=2)
        assert len(directories()) == 2
        assert len(directories() & left) == 1  # that of the one that lives
        assert await living.answers("/livez")


def _lives(process: Any) -> bool:
    return bool(process.is_running() and process.status() != "zombie")


async def test_router_starts_before_redis_and_replicas(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    redis_server.kill()
    router = await make_router(redis_server, ready=False)
    assert (await router.get("/readyz")).status == 503
    assert (await router.get("/readyz?without-replicas=true")).status == 503
    for answer in (await router.get("/readyz"), await router.complete(prompt(1))):
        assert answer.status == 503
        assert answer.error["message"] == "Starting: Redis cannot be used yet."
    redis_server.start()
    await eventually(lambda: router.answers("/readyz?without-replicas=true"))
    assert (await router.get("/readyz")).status == 503
    await make_replica(redis_url=redis_server.url, port=find_free_port())
    await eventually(lambda: router.answers("/readyz"))
    assert (await router.complete(prompt(1))).status == 200
