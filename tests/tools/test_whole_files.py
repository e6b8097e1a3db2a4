"""Files of tests stay whole, and those that take long begin first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT
from tests.whole_files import _FIRST, rank

_CONFTEST = """
from tests.whole_files import WholeFiles

def pytest_xdist_make_scheduler(config, log):
    return WholeFiles(config, log)
"""
_TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_that_says_where_it_runs(number):
    with open({log!r}, "a") as log:
        log.write(f"{{os.environ['PYTEST_XDIST_WORKER']}} {name}\\n")
"""


def test_a_process_has_whole_files_those_that_take_long_first(tmp_path: Path) -> None:
    """Asked of pytest-xdist itself."""
    log = tmp_path / "log"
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    names = ["cli/test_a", "cli/test_b", "cli/test_c", "e2e/test_tools", "e2e/test_x", "e2e/test_y"]
    for name in names:
        file = tmp_path / "tests" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_TESTS.format(log=str(log), name=name))
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", f"--rootdir={tmp_path}",
         "-n", "2", "--dist", "loadfile"],
        cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    ran = [line.split() for line in log.read_text().splitlines()]
    assert len(ran) == 4 * len(names)
    order = []
    for process in {worker for worker, _ in ran}:
        files = [name for worker, name in ran if worker == process]
        assert len(set(files)) * 4 == len(files)
        assert files == [name for name in dict.fromkeys(files) for _ in range(4)]
        ranks = [rank(f"tests/{name}.py") for name in files]
        assert ranks == sorted(ranks)
        order += files
    assert {*order} == {*names}


def test_what_begins_first_is_there() -> None:
    for begin in _FIRST:
        assert (ROOT / begin).exists(), begin
