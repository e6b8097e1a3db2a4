"""When Redis can be used: while it takes this process's own heartbeat, not because it answers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from radixgrove.service import redis_link, redis_wire
from radixgrove.service.redis_client import ask, connect
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import (
    RedisAddress,
    RedisRefused,
    RedisUnavailable,
    RedisUnsuitable,
    check_server,
)
from tests.conftest import RedisServer, find_free_port, silent
from tests.redis_faults import REFUSALS, RedisRoute, route, well
from tests.router.harness import eventually

KEY = "test:router:r"


@contextlib.asynccontextmanager
async def linked(url: str) -> AsyncIterator[RedisLink]:
    link = RedisLink(url, KEY, "this is a test")
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "other").mkdir()
    with RedisServer(tmp_path / "other") as server:
        yield server


@pytest.mark.parametrize("code", REFUSALS)
async def test_a_redis_that_answers_but_takes_no_writes_cannot_be_used(
    code: str, redis_server: RedisServer
) -> None:
    async with linked(redis_server.url) as link:
        await eventually(lambda: link.up)
        REFUSALS[code](redis_server.client)
        await eventually(lambda: not link.up, what=code)
        assert link.problem.startswith(code)
        assert link.connected
        assert await link.call("GET", "nothing") is None
        assert not link.settled
        well(redis_server.client)
        await eventually(lambda: link.up, what="a heartbeat that is taken")


async def test_a_heartbeat_ends_with_its_process(redis_server: RedisServer) -> None:
    async with linked(redis_server.url) as link:
        await eventually(lambda: link.up)
        assert 0 < redis_server.client.pttl(KEY) <= redis_link.HEARTBEAT_LIFE_MS


def heartbeats(server: RedisServer) -> int:
    """How many it has heard, and what else has been set."""
    return int(server.client.info("commandstats")["cmdstat_set"]["calls"])


async def test_what_is_wrong_with_the_keys_of_others_does_not_matter(
    redis_server: RedisServer,
) -> None:
    redis_server.client.set("theirs", "no hash")
    async with linked(redis_server.url) as link:
        await eventually(lambda: link.up)
        since = link.since
        with pytest.raises(RedisRefused, match="WRONGTYPE"):
            await link.call("HGETALL", "theirs")
        beats = heartbeats(redis_server)
        await eventually(lambda: heartbeats(redis_server) > beats, what="the next heartbeat")
        assert link.up
        assert link.since == since


async def test_a_demoted_server_is_left_for_the_one_that_has_its_name_now(
    redis_server: RedisServer, other: RedisServer
) -> None:
    async with route(redis_server.port) as way, linked(way.url) as link:
        await eventually(lambda: link.up)
        way.target = other.port
        redis_server.client.execute_command("REPLICAOF", "127.0.0.1", other.port)
        await eventually(lambda: other.client.exists(KEY), what="a heartbeat at the new master")
        await eventually(lambda: link.up)
        assert way.connections >= 2


@pytest.mark.parametrize("wrong", ["demoted", "silent", "gone"])
async def test_of_the_servers_that_have_a_name_the_one_that_can_be_used_is_found(
    wrong: str, redis_server: RedisServer, other: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = redis_server.port
    kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    places = [(*kind, (address, port)) for address in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    async with contextlib.AsyncExitStack() as stack:
        if wrong == "demoted":
            other.client.execute_command("REPLICAOF", "127.0.0.1", port)
            handle = RedisRoute(other.port).handle
            await stack.enter_async_context(await asyncio.start_server(handle, "127.0.0.2", port))
        elif wrong == "silent":
            stack.enter_context(silent("127.0.0.2", port))
        link = await stack.enter_async_context(linked(f"redis://a.name:{port}/0"))
        await eventually(lambda: link.up)


async def test_the_operators_client_leaves_a_demoted_server_too(
    redis_server: RedisServer, other: RedisServer
) -> None:
    async with route(redis_server.port) as way:

        def demote() -> None:
            with contextlib.closing(connect(way.url, 5.0)) as client:

                def write() -> object:
                    return ask(client, lambda: client.set("table", "new"))

                write()
                way.target = other.port
                redis_server.client.execute_command("REPLICAOF", "127.0.0.1", other.port)
                with pytest.raises(RedisUnavailable):
                    write()
                write()

        await asyncio.to_thread(demote)
    assert other.client.get("table") == b"new"


async def test_it_is_said_once_and_not_with_every_heartbeat(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(redis_link, "DOUBT_SECONDS", 0.01)
    caplog.set_level(logging.WARNING)
    async with linked(redis_server.url) as link:
        await eventually(lambda: link.up)
        refused = heartbeats(redis_server) + 20
        REFUSALS["NOREPLICAS"](redis_server.client)

        def many() -> bool:
            stats = redis_server.client.info("commandstats")["cmdstat_set"]
            return bool(stats["calls"] + stats.get("rejected_calls", 0) > refused)

        await eventually(many, what="many heartbeats")
    said = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    assert len(said) == 1
    assert "NOREPLICAS" in said[0]
    assert "this is a test" in said[0]


async def test_scripts_are_loaded_where_redis_lacks_them_and_run_in_order(
    redis_server: RedisServer,
) -> None:
    async with linked(redis_server.url) as link:
        await eventually(lambda: link.up)
        redis_server.client.script_flush()
        answers = await link.run_scripts("drain", [(["leases"], ["a"]), (["leases"], ["b"])])
        assert answers == [b"UNKNOWN", b"UNKNOWN"]


async def test_a_lost_connection_fails_its_calls_and_is_made_again(
    redis_server: RedisServer,
) -> None:
    async with linked(redis_server.url) as link:
        await eventually(lambda: link.up)
        waiting = asyncio.create_task(link.call("BLPOP", "nothing", 0))
        await eventually(lambda: redis_server.client.info("clients")["blocked_clients"] == 1)
        redis_server.kill()
        with pytest.raises(RedisUnavailable):
            await waiting
        assert not link.up
        redis_server.start()
        await eventually(lambda: link.up)


async def test_what_redis_takes_all_the_time_is_known(redis_server: RedisServer) -> None:
    async with route(redis_server.port) as way, linked(way.url) as link:
        await eventually(lambda: link.up and link.round_trip < 0.2)
        way.delay = 0.2
        await eventually(lambda: link.round_trip >= 0.2)
        assert link.up


def test_a_pause_of_this_process_is_not_blamed_on_redis(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop runs timers before it reads sockets: the answer is there, and was not seen."""
    monkeypatch.setattr(redis_wire, "CALL_TIMEOUT", 0.4)

    async def pause() -> None:
        async with linked(redis_server.url) as link:
            await link.wait_until_up(10)
            since = link.since
            wire = link._wire
            assert wire is not None
            for _ in range(20):
                # An answer is due at the watchdog's next look, which comes late itself.
                call = asyncio.ensure_future(link.call("PING"))
                await asyncio.sleep(0)
                wire._due = wire._answered + len(wire._waiting)
                time.sleep(0.3 + redis_wire.LATE_SECONDS)  # noqa: ASYNC251 - the pause itself
                assert await call == b"PONG"
            assert link.up
            assert link.since == since

    uvloop.run(pause())


# ---- addresses and servers --------------------------------------------------------------------


def _certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "redis")])
    now = datetime.datetime.now(datetime.UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(alternative, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / "cert.pem", directory / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_file, key_file


async def test_tls_goes_by_the_parameters_of_the_url(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    certificate, key = _certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    async with route(redis_server.port, context) as way:
        url = f"rediss://127.0.0.1:{way.port}/0"
        async with linked(f"{url}?ssl_ca_certs={certificate}") as link:
            await eventually(lambda: link.up)
        async with linked(url) as link:  # a CA of one's own is not known to this machine
            await link.wait_until_tried(10)
            assert not link.up
            assert "SSLCertVerificationError" in link.problem
        async with linked(f"{url}?ssl_cert_reqs=none") as link:
            await eventually(lambda: link.up)
        async with linked(f"{url}?ssl_ca_certs={tmp_path}/missing.pem") as link:
            await link.wait_until_tried(10)
            assert "FileNotFoundError" in link.problem


async def test_a_server_that_is_not_there_is_named() -> None:
    port = find_free_port()
    async with linked(f"redis://127.0.0.1:{port}/0") as link:
        await link.wait_until_tried(10)
        assert "ConnectionRefusedError" in link.problem
        assert str(port) in link.problem


@pytest.mark.parametrize(
    "url",
    [
        "http://:hush@host",
        "redis://:hush@host:port/0",
        "rediss://:hush@host?ssl_cert_reqs=sometimes",
        "redis://:hush@host?no_such_parameter=1",
        "redis://:p@hush#w@host:6379/0",
        "redis://:12?hush@host:6379/0",
        "redis://host/1234567890",
        "redis://:hush@host:6379/first",
    ],
)
def test_malformed_addresses_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(ValueError, match="not like redis://") as refusal:
        RedisAddress(url)
    assert "hush" not in str(refusal.value)


def test_addresses_are_read_as_redis_py_reads_them() -> None:
    address = RedisAddress("redis://user:p%40ss@host:1234/7?max_connections=4")
    assert (address.host, address.port, address.database) == ("host", 1234, 7)
    assert (address.username, address.password) == ("user", "p@ss")
    assert RedisAddress("redis://host/3/").database == 3
    assert RedisAddress("unix:///run/redis.sock").path == "/run/redis.sock"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "needs noeviction"),
        ({"redis_mode": "cluster"}, "cluster mode"),
        ({"redis_mode": "", "server_mode": "cluster"}, "cluster mode"),  # Valkey
    ],
)
def test_unsuitable_servers_are_refused_in_words(change: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"maxmemory_policy": "noeviction", "redis_mode": "standalone"}
    check_server(good)
    with pytest.raises(RedisUnsuitable, match=words):
        check_server(good | change)


def cluster_node(directory: Path) -> RedisServer:
    """Its second port, 10,000 above the first, is none that a client gets by chance either."""
    return RedisServer(directory, options=("--cluster-enabled", "yes"))


async def test_a_node_of_a_cluster_is_not_used(tmp_path: Path) -> None:
    with cluster_node(tmp_path) as node:
        async with linked(node.url) as link:
            await link.wait_until_tried(10)
            assert link.unsuitable
            assert "cluster mode" in link.problem


async def test_a_cluster_that_does_not_say_so_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a managed service's proxy: its answers to writes tell."""
    monkeypatch.setattr(redis_link, "check_server", lambda info: None)
    with cluster_node(tmp_path) as node:
        async with linked(node.url) as link:
            await link.wait_until_tried(10)
            assert link.unsuitable
            assert "cluster mode" in link.problem


async def test_an_evicting_server_is_used_once_it_no_longer_evicts(
    redis_server: RedisServer,
) -> None:
    redis_server.client.config_set("maxmemory-policy", "allkeys-lru")
    async with linked(redis_server.url) as link:
        await link.wait_until_tried(10)
        assert link.unsuitable
        redis_server.client.config_set("maxmemory-policy", "noeviction")
        await eventually(lambda: link.up)
        assert not link.unsuitable
