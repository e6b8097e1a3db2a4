"""Building the programs: keyed, atomic, one at a time, with errors that say what is missing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.cluster.harness import build

PROGRAM = build.Program("tool", "kubernetes", "./tool")

# A compiler that counts its calls and writes what it was asked to.
_GO = """#!/bin/sh
if [ "$1" = env ]; then echo {version}; exit 0; fi
if [ "$1" = list ]; then echo os; exit 0; fi
echo call >> {calls}
while [ "$1" != -o ]; do shift; done
echo half > "$2"
{then}
"""


class Compiler:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._calls = directory / "calls"
        (directory / "bin").mkdir()
        monkeypatch.setenv("PATH", f"{directory / 'bin'}:/bin:/usr/bin")
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        self.install()

    def install(self, *, version: str = "go1.26.1", then: str = 'echo whole > "$2"') -> None:
        program = self._directory / "bin" / "go"
        program.write_text(_GO.format(version=version, calls=self._calls, then=then))
        program.chmod(0o755)

    @property
    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path, monkeypatch)


def test_a_program_is_built_once(compiler: Compiler) -> None:
    lines: list[str] = []
    directory = build.ensure([PROGRAM], report=lines.append)
    assert (directory / "tool").read_text() == "whole\n"
    assert lines[0] == "building tool (1 of 1)"
    assert build.ensure([PROGRAM], report=lines.append) == directory
    assert compiler.calls == 1


def test_builders_wait_for_each_other(compiler: Compiler, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    compiler.install(then=f'while [ ! -e {gate} ]; do sleep 0.05; done; echo whole > "$2"')
    waits = threading.Event()

    def report(line: str) -> None:
        if line.startswith("waiting"):
            waits.set()

    threads = [
        threading.Thread(target=build.ensure, args=([PROGRAM],), kwargs={"report": report})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert waits.wait(60)
    gate.touch()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert compiler.calls == 1


def test_a_failed_build_leaves_no_program(compiler: Compiler) -> None:
    compiler.install(then="echo 'undefined: os' >&2; exit 1")
    with pytest.raises(build.BuildError, match="undefined: os"):
        build.ensure([PROGRAM], report=lambda _: None)
    assert build.missing([PROGRAM]) == [PROGRAM]
    compiler.install()
    assert (build.ensure([PROGRAM], report=lambda _: None) / "tool").read_text() == "whole\n"


def test_an_old_compiler_is_named(compiler: Compiler) -> None:
    compiler.install(version="go1.19.8")
    with pytest.raises(build.BuildError, match=r"Go 1\.21 or newer .* found 1\.19\.8"):
        build.ensure([PROGRAM], report=lambda _: None)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"Go 1\.21 .* not on PATH"):
        build.ensure([PROGRAM], report=lambda _: None)


def test_the_key_follows_sources_and_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    keys = [build.build_key()]
    (tmp_path / "go.mod").write_text("module one")
    keys.append(build.build_key())
    (tmp_path / "go.mod").write_text("module two")
    keys.append(build.build_key())
    monkeypatch.setattr(build, "BUILD_FLAGS", ("-other",))
    keys.append(build.build_key())
    assert len(set(keys)) == len(keys)


def test_helm_says_the_version_that_is_pinned() -> None:
    pinned = (build.SOURCES / "kubernetes/go.mod").read_text()
    assert f"helm.sh/helm/v3 {build.HELM_VERSION} " in pinned
    assert f"version.version={build.HELM_VERSION}" in build.LINKER_FLAGS


def test_the_demonstration_builds_no_pretended_nodes() -> None:
    assert build.KWOK not in build.DEMONSTRATION
    assert set(build.PROGRAMS) == {*build.DEMONSTRATION, build.KWOK}
