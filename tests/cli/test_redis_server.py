"""Which Redis a local cluster, the tests and the benchmarks start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from radixgrove.cli.redis_server import find_binary
from tests.conftest import RedisServer


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
