"""Tests in several processes: what shares a cluster stays in one, what is timed runs alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT
from tests.cluster.side_by_side import room_of

_CONFTEST = """
from tests.cluster.side_by_side import ByRoom

def pytest_xdist_make_scheduler(config, log):
    return ByRoom(config, log)
"""
_TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_that_says_where_it_runs(number):
    with open({log!r}, "a") as log:
        log.write(f"{{os.environ['PYTEST_XDIST_WORKER']}} {name}\\n")
"""

_WORKER = """
import os
from tests.cluster.harness import machine

def say(word):
    os.write(log, f"{{os.getpid()}} {{word}}\\n".encode())

log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range(3):
    with machine.shared():
        say("works")
        with machine.alone():
            say("alone")
            say("not alone")
        say("works")
"""


def test_files_go_whole_to_a_process_of_their_room_the_longest_first(tmp_path: Path) -> None:
    """Asked of pytest-xdist itself, which may lose an option without a word."""
    log = tmp_path / "log"
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    planes = ["tests/cluster/test_teardown", "tests/operator/api/test_admission"]
    clusters = ["groups", "rollout", "release", "node_loss"]
    for path in [*planes, *(f"tests/cluster/test_{name}" for name in clusters)]:
        file = tmp_path / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_TESTS.format(log=str(log), name=path.rpartition("test_")[2]))
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", f"--rootdir={tmp_path}",
         "-n", "3", "--dist", "loadscope"],
        cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    ran = [line.split() for line in log.read_text().splitlines()]
    by_worker = {worker: [name for w, name in ran if w == worker] for worker, _ in ran}
    files = {worker: names[::3] for worker, names in by_worker.items()}
    for worker, names in by_worker.items():
        assert names == [name for name in files[worker] for _ in range(3)], "whole, one by one"
    assert files["gw0"][0] == "teardown"
    assert not set(files["gw0"]) & set(clusters)
    assert {files["gw1"][0], files["gw2"][0]} == {"groups", "rollout"}
    assert sorted(itertools.chain(*files.values())) == sorted([*clusters, "teardown", "admission"])
    for worker in ("gw1", "gw2"):
        mine = [name for name in files[worker] if name in clusters]
        assert mine == sorted(mine, key=clusters.index), "in the order of the list"


def test_every_file_with_cluster_tests_has_a_room() -> None:
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.cluster" in path.read_text() and path != Path(__file__).resolve()
    ]
    assert len(marked) > 15
    assert [path for path in marked if room_of(path) is None] == []


def test_whoever_is_alone_is_alone_and_everybody_gets_a_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", _WORKER.format(log=str(log))]
    workers = [subprocess.Popen(command, env=environment) for _ in range(3)]
    try:
        assert [worker.wait(100) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
    said = [line.partition(" ")[::2] for line in log.read_text().splitlines()]
    alone = [place for place, (_, words) in enumerate(said) if words == "alone"]
    assert len(alone) == 3 * 3
    for place in alone:
        assert said[place + 1] == (said[place][0], "not alone")
