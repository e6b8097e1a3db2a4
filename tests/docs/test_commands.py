"""What the documents tell people to type exists."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import click
import pytest

from radixgrove.cli.configuration import load_file, resolve
from radixgrove.cli.main import cli
from tests.checkout import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_TYPED = re.compile(
    r"(?:^|[`(\s/])(?<!install )(radixgrove|make) ([a-z][^`\n|#;&)]*)", re.MULTILINE
)


def typed(program: str) -> list[tuple[str, list[str]]]:
    """Pages and the words after the program's name, in code spans and blocks."""
    found = []
    for page in PAGES:
        text = page.read_text()
        code = re.findall(r"```.*?```|`[^`\n]+`|^    .+$", text, re.DOTALL | re.MULTILINE)
        for name, words in _TYPED.findall("\n".join(code)):
            if name == program:
                found.append((page.name, words.split()))
    return found


def test_commands_and_their_flags_exist() -> None:
    commands = typed("radixgrove")
    assert len(commands) > 10
    for page, words in commands:
        command: click.Command | None = cli
        context = click.Context(cli)
        while isinstance(command, click.Group) and words:
            command = command.get_command(context, words.pop(0))
            assert command is not None, f"{page}: {words}"
        assert command is not None
        flags = {flag for parameter in command.params for flag in parameter.opts}
        flags |= {flag for parameter in command.params for flag in parameter.secondary_opts}
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in {*flags, "--help"}, f"{page}: {word}"


def test_make_targets_exist() -> None:
    makefiles = [ROOT / "Makefile", ROOT / "tests" / "cluster" / "cluster.mk"]
    targets = {
        name
        for path in makefiles
        for name in re.findall(r"^([a-z-]+):", path.read_text(), re.MULTILINE)
    }
    named = typed("make")
    assert len(named) > 5
    for page, (target, *_) in named:
        assert target.strip(".,") in targets, f"{page}: make {target}"


def test_make_bench_replays_a_trace_only_where_one_is_given() -> None:
    """No trace comes with the project, and the replay can do nothing without one."""

    def scripts(*variables: str) -> list[str]:
        command = ["make", "--dry-run", "--directory", str(ROOT), "bench", *variables]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return re.findall(r"-m (benchmarks\..*)", text)

    plain = scripts()
    assert len(plain) == 3
    assert all(importlib.util.find_spec(line.split()[0]) for line in plain)
    *_, replay = scripts("TRACE=requests.jsonl", "PEERS=venv")
    assert replay.split() == [
        *("benchmarks.load.router_replay", "--trace", "requests.jsonl", "--peers-venv", "venv")
    ]


def test_files_that_pages_point_at_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("part", ["worker", "router", "up"])
def test_the_configuration_file_shown_is_one(part: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(example)
    file = load_file(str(path))
    assert file.sections.keys() == {"worker", "router", "up"}
    resolve(part, {}, {}, file)
