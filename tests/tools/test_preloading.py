"""Processes of tests begin with what their files import, and with streams of their own."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from tests.preloading import Preloaded, imports_below

FILE = """
from __future__ import annotations
import colorsys
import no_such_module
from email.policy import SMTP
from tests.conftest import wait_until
def test() -> None:
    import chunk
"""
PROGRAM = """
import os, sys
print({"colorsys", "email.policy"} <= sys.modules.keys(), sys.argv, sys.stdin.read(), __name__)
print(os.getpid(), file=sys.stderr)
"""


def test_packages_at_the_top_of_test_files_are_imported(tmp_path: Path) -> None:
    for name in ("test_one.py", "conftest.py", "helper.py"):
        (tmp_path / name).write_text(FILE if name == "test_one.py" else f"import {name[:-3]}_uses")
    assert set(imports_below([tmp_path])) == {
        "import conftest_uses",
        "import colorsys",
        "import no_such_module",
        "from email.policy import SMTP",
    }
    assert "import conftest_uses" in set(imports_below([tmp_path / "test_one.py"]))


def test_each_program_is_a_process_with_its_own_streams(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(FILE)
    preloaded = Preloaded([tmp_path])
    try:
        command = [*shlex.split(preloaded.python), "-u", "-c", PROGRAM]
        ended = [
            subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
            for given in ("one", "two")
        ]
    finally:
        preloaded.close()
    assert [done.stdout for done in ended] == [
        f"True ['-c'] {given} __main__\n" for given in ("one", "two")
    ]
    assert len({done.stderr for done in ended}) == 2
