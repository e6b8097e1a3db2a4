"""Test files are rewritten once, not by each process of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rewriting import kept_code, rewrite_all

FILE = "def test_it() -> None:\n    assert 1 + 1 == 3\n"


def test_pytest_takes_the_code_that_is_there(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    file, wrong = tmp_path / "test_one.py", tmp_path / "test_wrong.py"
    file.write_text(FILE)
    wrong.write_text("def test_it(:")
    rewrite_all([file, wrong], pytestconfig)
    kept = kept_code(file)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    number = kept.stat().st_ino
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "assert (1 + 1) == 3" in ended.stdout
    assert kept.stat().st_ino == number, "what is written anew is another file"


def test_a_file_that_was_changed_is_rewritten(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    file = tmp_path / "test_one.py"
    codes = []
    for text in (FILE, FILE, FILE.replace("3", "4")):
        file.write_text(text)
        rewrite_all([file], pytestconfig)
        codes.append(kept_code(file).stat().st_ino)
    assert codes[0] == codes[1] != codes[2]
