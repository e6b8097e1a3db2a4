"""Which Redis a local cluster, the tests and the benchmarks start."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from radixgrove.cli import redis_server
from radixgrove.cli.redis_server import EmbeddedRedis, find_binary, free_port, free_ports
from tests.conftest import RedisServer, find_free_port


def test_without_one_on_the_path_the_embedded_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(find_binary() or "").is_relative_to(sys.prefix)
    with RedisServer(tmp_path) as server:
        assert server.client.eval("return redis.call('time')[1]", 0)


def test_one_on_the_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "redis-server"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == str(program)


@pytest.mark.parametrize("name", ["with space", 'a"b\\c', "it's"])
def test_it_starts_in_any_directory(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    server = EmbeddedRedis.prepare(find_binary() or "", directory, free_port())
    with subprocess.Popen(server.command) as process:
        try:
            deadline = time.monotonic() + 20
            while not server.answers() and process.poll() is None:
                assert time.monotonic() < deadline
            assert process.poll() is None
            client = redis.Redis.from_url(server.url)
            assert client.config_get("dir") == {"dir": str(directory)}
            client.close()
        finally:
            process.kill()


def test_a_port_that_was_given_out_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing listens there yet: parts take seconds until they do."""
    port = find_free_port()
    claims: list[socket.socket] = []
    monkeypatch.setattr(redis_server, "_PORTS", range(port, port + 1))
    monkeypatch.setattr(redis_server, "_CLAIMS", claims)
    assert free_ports(1) == [port]
    with pytest.raises(OSError, match="too few ports"):
        free_ports(1)
    another = (
        "from radixgrove.cli import redis_server\n"
        f"redis_server._PORTS = range({port}, {port + 1})\n"
        "redis_server.free_ports(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", another], capture_output=True, text=True, timeout=60, check=False
    )
    assert "too few ports" in done.stderr
    for claim in claims:
        claim.close()
    assert free_ports(1) == [port], "its process has ended"
    claims[-1].close()
