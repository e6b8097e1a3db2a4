"""What of its parts' logs a local cluster shows, and where the rest is."""

from __future__ import annotations

import resource
import stat
from pathlib import Path

import pytest

from radixgrove.cli import part_logs
from radixgrove.cli.part_logs import PartLogs, default_directory, worth_showing

STAMP = "2026-01-01T00:00:00.000Z"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"{STAMP} INFO    radixgrove.worker: start: loading 40%", "start: loading 40%"),
        (f"{STAMP} INFO    radixgrove.access: request path=/v1/models", None),
        (f"{STAMP} DEBUG   radixgrove.worker: start: a detail", None),
        (f"{STAMP} WARNING radixgrove.router: Redis is away", "Redis is away"),
        (f"{STAMP} ERROR   radixgrove.worker: the engine failed", "the engine failed"),
        ("| Traceback (most recent call last):", None),
        ('{"time":"t","level":"error","logger":"l","message":"it failed"}', "it failed"),
        ('{"time":"t","level":"info","logger":"l","message":"request"}', None),
        ("{", None),
        ('{"level":' + 5000 * "[", None),
        ("Loading weights: 100%|####|", None),
    ],
)  # fmt: skip
def test_progress_and_failures_are_for_the_terminal(line: str, shown: str | None) -> None:
    assert worth_showing(line) == shown


@pytest.mark.parametrize("follow", [False, True])
def test_every_line_is_in_the_parts_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr(part_logs, "show", lambda name, text: shown.append((name, text)))
    directory = tmp_path / "a" / "logs"
    lines = [f"{STAMP} INFO    radixgrove.access: request", f"{STAMP} ERROR   x: it failed %s"]
    for start in range(2):  # the second begins anew
        logs = PartLogs(directory, follow=follow)
        take = logs.sink("router")
        for line in lines:
            take(line)
        logs.close()
        assert (directory / "router.log").read_text().splitlines() == lines, start
    assert stat.S_IMODE((directory / "router.log").stat().st_mode) == 0o600
    assert shown[: len(shown) // 2] == [
        ("router", line) for line in (lines if follow else ["it failed %s"])
    ]


def test_a_disk_that_is_full_costs_lines_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(part_logs, "show", lambda name, text: shown.append(text))
    logs = PartLogs(tmp_path, follow=False)
    take = logs.sink("router")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))  # of every file that is written
    try:
        for _ in range(3):
            take("a line")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    (said,) = shown
    assert "cannot be written" in said
    assert capfd.readouterr().err == ""


def test_the_directory_follows_the_port_and_the_users_wish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_directory(8000) == tmp_path / "radixgrove" / "up-8000"
