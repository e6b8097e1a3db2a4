"""Tests in several processes: what shares a cluster stays in one, what is timed runs alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT
from tests.cluster.side_by_side import group_of

_CONFTEST = """
from tests.cluster.side_by_side import ByGroup

def pytest_xdist_make_scheduler(config, log):
    return ByGroup(config, log)
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


def test_groups_stay_together_and_in_order(tmp_path: Path) -> None:
    """Asked of pytest-xdist itself, which may lose an option without a word."""
    log, folder = tmp_path / "log", tmp_path / "tests" / "cluster"
    folder.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    load, nodes = ["test_autoscale", "test_rollout"], ["test_cluster", "test_policies"]
    for name in [*load, *nodes]:
        (folder / f"{name}.py").write_text(_TESTS.format(log=str(log), name=name))
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", f"--rootdir={tmp_path}",
         "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"],
        cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    ran = [line.split() for line in log.read_text().splitlines()]
    for group in (load, nodes):
        lines = [(worker, name) for worker, name in ran if name in group]
        assert len({worker for worker, _ in lines}) == 1
        assert [name for _, name in lines] == [name for name in group for _ in range(3)]


def test_every_file_with_cluster_tests_has_a_group() -> None:
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.cluster" in path.read_text() and path != Path(__file__).resolve()
    ]
    assert len(marked) > 15
    assert [path for path in marked if group_of(path) is None] == []


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
