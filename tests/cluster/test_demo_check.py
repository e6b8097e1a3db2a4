"""What the demonstration needs of a machine: refused before anything is fetched, with numbers."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.cluster.harness import demo_check
from tests.cluster.harness.progress import Progress, minutes


def test_what_is_missing_is_said_with_numbers_and_what_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_check, "_MEMORY", 1 << 60)
    monkeypatch.setattr(demo_check, "_PROGRAMS", 1 << 60)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = "\n".join(demo_check.problems(tmp_path))
    assert "sudo make demo-cluster" in found
    assert "GiB of memory are available, and 1073741824 GiB are needed" in found
    assert "GiB are free at" in found
    assert "XDG_CACHE_HOME" in found


def test_what_is_there_already_needs_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for part in ("_ENVIRONMENT", "_IMAGES", "_MODEL"):
        monkeypatch.setattr(demo_check, part, 1 << 60)
    monkeypatch.setattr(demo_check, "_PROGRAMS", 0)
    (tmp_path / ".venv").mkdir()
    for folder in ("cluster/images", "models"):
        (tmp_path / "cache/radixgrove" / folder).mkdir(parents=True)
    assert "GiB are free" not in "\n".join(demo_check.problems(tmp_path))


def test_it_needs_nothing_but_the_standard_library() -> None:
    command = ["python3", "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
               "from tests.cluster.harness import demo_check"]  # fmt: skip
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_progress_is_lines_unless_somebody_looks_at_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        progress = Progress(stream, _last=-1000.0)
        progress.show("a third")
        progress.show("too soon for another")
        progress.clear()
    assert file.getvalue() == "a third\n"
    assert terminal.getvalue() == "\r\x1b[Ka third\r\x1b[K"
    assert (minutes(40), minutes(720)) == ("40 s", "12 min")
