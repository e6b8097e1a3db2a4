"""What `radixgrove up` tells people to type next can be typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from radixgrove.cli.commands.up import _command


def program(directory: Path) -> str:
    directory.mkdir()
    path = directory / "radixgrove"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_command_is_named_as_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, other = program(tmp_path / "my venv"), program(tmp_path / "other")
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setenv("PATH", str(Path(called).parent))
    assert _command() == "radixgrove"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _command() == f"'{called}'"
    monkeypatch.setenv("PATH", str(Path(other).parent))
    assert _command() == f"'{called}'"
    monkeypatch.setattr(sys, "argv", ["/somewhere/radixgrove/cli/__main__.py"])
    assert _command() == "radixgrove"
