"""How a local cluster shares out the machine."""

from __future__ import annotations

import asyncio
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest

from radixgrove.cli import cluster as cluster_module
from radixgrove.cli.cluster import Cluster, ClusterError, plan_gpus
from radixgrove.cli.redis_server import free_ports
from radixgrove.cli.resolving import UpParts
from radixgrove.protocol.errors import StartFailed
from radixgrove.service import exit_codes
from tests.conftest import RedisServer


def test_gpus_are_shared_out_without_overlap() -> None:
    assert plan_gpus(2, 2, ["0", "1", "2", "3"]) == [["0", "1"], ["2", "3"]]
    with pytest.raises(ClusterError, match=r"3 replicas of 2 GPUs each: 6 in all; .* 4"):
        plan_gpus(3, 2, ["0", "1", "2", "3"])


def test_every_rank_of_a_replica_has_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "visible_gpus", lambda: list("01234567"))
    made = cluster(tmp_path / "a", replicas=2, device="cuda", tp=2, pp=2)
    assert made._gpus() == [list("0123"), list("4567")]
    shared = cluster(tmp_path / "b", replicas=8, device="cuda", pp=2, transport="gloo")
    assert shared._gpus() == [[index] for index in "01234567"]


@pytest.mark.parametrize(
    ("replicas", "ranks", "offered", "said"),
    [
        (3, 2, 5, r"offers 5: try --replicas 2, or --device cpu$"),
        (
            1,
            4,
            2,
            r"^1 replica of 4 GPUs each: 4 in all; .* 2: try tp \* pp \* dp of at most 2, or",
        ),
        (
            1,
            1,
            0,
            r"^1 replica of 1 GPU each: 1 in all; .* none: try a machine with GPUs, or",
        ),
    ],
)
def test_what_is_tried_instead_fits_the_gpus_there_are(
    replicas: int, ranks: int, offered: int, said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        plan_gpus(replicas, ranks, [str(index) for index in range(offered)])


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ({"api_keys_file": "/nope"}, exit_codes.USAGE, "/nope cannot be read"),
        ({"model": "/nope"}, exit_codes.MODEL, "'/nope' is not a directory"),
    ],
)
async def test_a_cluster_ends_with_the_code_of_what_is_wrong(
    tmp_path: Path, redis_server: RedisServer, flags: dict[str, str], code: int, said: str
) -> None:
    where = {"redis_url": redis_server.url, "port": free_ports(1)[0], "management_port": 0}
    made = cluster(tmp_path / "a", replicas=1, **where, **flags)
    with pytest.raises(StartFailed, match=said) as ended:
        await made.start()
    await made.stop(asyncio.Event())
    assert exit_codes.of(ended.value) == code


async def test_a_redis_that_does_not_answer_is_named_before_any_part_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setattr("radixgrove.cli.cluster._REDIS_START", 0.1)
    made = cluster(
        tmp_path / "a",
        redis_url=f"redis://:pa55@127.0.0.1:{free_port}",
        port=free_ports(1)[0],
        management_port=0,
    )
    with pytest.raises(ClusterError, match=rf"^--redis-url: .*ConnectionRefused.*{free_port}") as e:
        await made.start()
    assert "pa55" not in str(e.value)
    assert not list((tmp_path / "a").glob("*.yaml")), "no part has got its settings"


async def test_a_redis_that_may_evict_is_refused_at_once(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    redis_server.client.config_set("maxmemory-policy", "allkeys-lru")
    made = cluster(
        tmp_path / "a", redis_url=redis_server.url, port=free_ports(1)[0], management_port=0
    )
    with pytest.raises(ClusterError, match="maxmemory-policy allkeys-lru"):
        await made.start()


def cluster(directory: Path, state: Path | None = None, **flags: Any) -> Cluster:
    """One that is not started."""
    directory.mkdir()
    return Cluster(
        UpParts(None, flags),
        directory,
        state or directory,
        lambda name: lambda line: None,
        lambda text: None,
    )


def test_two_clusters_in_one_redis_keep_their_keys_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have a `replica-0`, and secrets that the other one does not know."""
    monkeypatch.setenv("REDIS_URL", "redis://redis.example:6379/0")
    made = [
        cluster(tmp_path / name, port=port)
        for name, port in [("a", 8000), ("b", 8000), ("c", 9000)]
    ]
    assert len({each.router.redis_prefix for each in made}) == len(made)
    for each in made:
        assert {worker.redis_prefix for worker in each.workers} == {each.router.redis_prefix}


@pytest.mark.parametrize("damage", [None, "", "../"])
def test_the_next_start_finds_in_redis_what_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    """Whatever the machine is called by then, and whichever of its addresses it shows."""
    monkeypatch.setenv("REDIS_URL", "redis://redis.example:6379/0")
    (state := tmp_path / "state").mkdir()
    one = cluster(tmp_path / "one", state, port=8000)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    monkeypatch.setattr(uuid, "getnode", lambda: 1 << 40)
    if damage is not None:
        (state / "id").write_text(damage)
    again, third = (cluster(tmp_path / name, state, port=8000) for name in ("two", "three"))
    assert again.router.redis_prefix == third.router.redis_prefix
    assert (one.router.redis_prefix == again.router.redis_prefix) == (damage is None)
    assert cluster(tmp_path / "four", state, port=9000).router.redis_prefix not in (
        one.router.redis_prefix,
        again.router.redis_prefix,
    )


def test_clusters_that_are_to_share_a_redis_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://redis.example:6379/0")
    assert cluster(tmp_path / "a", redis_prefix="ours").router.redis_prefix == "ours"
    monkeypatch.setenv("RADIXGROVE_CLUSTER_SECRET", "known to others")
    assert cluster(tmp_path / "b").router.redis_prefix == "radixgrove"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_management_is_asked_where_it_listens(tmp_path: Path, host: str) -> None:
    made = cluster(tmp_path / "a", management_host=host, management_port=0)
    assert made.router.management_port, "a free one"
    where = f"[{host}]" if ":" in host else host
    assert made.management_url == f"http://{where}:{made.router.management_port}"
