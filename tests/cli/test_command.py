"""The command itself: fast help, honest errors, completion."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "transformers", "fastapi", "aiohttp", "uvicorn")


def radixgrove(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RADIXGROVE_")}
    return subprocess.run(
        [sys.executable, "-m", "radixgrove.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, "COLUMNS": "100", **environ},
        check=False,
    )


def imported_by(*arguments: str) -> set[str]:
    """Top-level modules that a run of the command imports."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "radixgrove.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    assert lines, result.stderr
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["worker", "--help"],
        ["up", "--help-all"],
        ["ps", "--management-url", "http://127.0.0.1:9"],
        ["config", "show"],
    ],
    ids=lambda arguments: arguments[0] + arguments[-1],
)
def test_imports_nothing_heavy(arguments: list[str]) -> None:
    assert not imported_by(*arguments) & set(HEAVY)


def test_doctor_imports_no_more_than_a_worker_to_look_at_files() -> None:
    """Which is numpy, by which safetensors reads headers."""
    assert not imported_by("doctor") & set(HEAVY) - {"numpy"}


def test_lists_of_commands_are_not_cut() -> None:
    for group in ([], ["bench"], ["config"]):
        listed = radixgrove(*group, "--help", COLUMNS="80").stdout.partition("Commands:")[2]
        assert listed
        assert "..." not in listed


def test_help_is_one_screen_and_help_all_has_the_rest() -> None:
    everyday, everything = (
        radixgrove("worker", "--help").stdout,
        radixgrove("worker", "--help-all").stdout,
    )
    assert everyday.count("\n  --") <= 25
    assert "--max-running" in everyday
    assert "--watermark" not in everyday
    assert "--watermark" in everything
    assert "--management-key" not in everything, "secrets are no flags"


def test_unknown_command_and_flag_name_the_nearest() -> None:
    result = radixgrove("wroker")
    assert result.returncode == 2
    assert "Did you mean 'worker'?" in result.stderr
    result = radixgrove("worker", "--max-runing", "3")
    assert result.returncode == 2
    assert "--max-running" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (["worker", "--internal-key", "abc"], "RADIXGROVE_INTERNAL_KEY"),
        (["router", "--root-key=abc"], "RADIXGROVE_ROOT_KEY"),
        (["ps", "--management-key", "abc"], "RADIXGROVE_MANAGEMENT_KEY"),
        (["chat", "--api-key", "abc"], "RADIXGROVE_API_KEY"),
        (["chat", "--nothing-of-the-kind"], None),
    ],
)
def test_a_flag_for_a_secret_is_answered_with_its_variable(
    arguments: list[str], variable: str | None
) -> None:
    result = radixgrove(*arguments)
    assert result.returncode == 2
    assert ("Secrets have no flag" in result.stderr) == (variable is not None)
    assert variable is None or f"set {variable}." in result.stderr


def test_unreachable_cluster_has_its_own_exit_code(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    for arguments in (["ps", "--management-url", url], ["chat", "--url", url, "hello"]):
        result = radixgrove(*arguments)
        assert result.returncode == 3
        assert "does not answer" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_for_this_command(shell: str) -> None:
    script = radixgrove("completion", shell).stdout
    assert "_RADIXGROVE_COMPLETE" in script


def test_completion_completes_commands_and_flags() -> None:
    words = radixgrove(
        _RADIXGROVE_COMPLETE="bash_complete", COMP_WORDS="radixgrove wor", COMP_CWORD="1"
    )
    assert "worker" in words.stdout


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_router_that_cannot_start_says_why_in_one_line(processes: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags, reason, code in [
            (["--port", port], f"cannot listen on 127.0.0.1 port {port}", 1),
            (["--api-keys-file", "/nope"], "the API key file /nope cannot be read", 2),
            (["--redis-url", "http://:pa55@host"], "redis_url is not like redis://", 2),
            (["--replicas", "http://me:pa55@host"], "a URL in `replicas` has credentials", 2),
        ]:
            result = radixgrove(
                "router", "--port", "0", "--management-port", "0", "--processes", processes, *flags
            )
            assert result.returncode == code
            assert reason in result.stderr
            assert "Traceback" not in result.stderr
            assert "pa55" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--api-keys-file", "/does/not/exist"], "the API key file /does/not/exist cannot be read"),
        (["--redis-url", "http://:pa55@host"], "redis_url is not like redis://"),
    ],
    ids=["keys", "redis"],
)
def test_a_worker_refuses_such_settings_before_it_looks_for_a_model(
    flags: list[str], reason: str
) -> None:
    result = radixgrove("worker", "--model", "/does/not/exist/either", *flags)
    assert result.returncode == 2
    assert reason in result.stderr
    assert "Traceback" not in result.stderr
    assert "pa55" not in result.stderr


def test_a_second_cluster_is_told_which_of_its_ports_is_taken(
    tmp_path: Path, free_port: int
) -> None:
    """Before it starts any part."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = str(taken.getsockname()[1]), str(free_port)
        for flags, name, remedy in [
            (["--port", port, "--management-port", free], "port", "--port"),
            (["--port", free, "--management-port", port], "management port", "--management-port"),
        ]:
            result = radixgrove("up", "--log-dir", str(tmp_path / "logs"), *flags)
            assert result.returncode == 1
            assert f"cannot listen on 127.0.0.1 {name} {port}" in result.stderr
            assert f"choose another with {remedy}, e.g. {remedy} " in result.stderr
            assert not list((tmp_path / "logs").iterdir())


def test_output_that_a_full_disk_does_not_take_is_an_error_of_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "radixgrove.cli", "config", "show"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Error: No space left on device")


_SAYS = """
import sys
from radixgrove.cli.commands.up import _say
_say("ready")
_say("an answer")
print("goes on", file=sys.stderr)
"""


@pytest.mark.parametrize("gone", ["disk", "reader"])
def test_a_cluster_outlives_what_reads_its_output(gone: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    full = os.open("/dev/full", os.O_WRONLY)
    ended = subprocess.run(
        [sys.executable, "-c", _SAYS],
        stdout=full if gone == "disk" else writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(full)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "goes on\n")


def test_streams_that_are_closed_are_no_error() -> None:
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    command = [*closed, sys.executable, "-m", "radixgrove.cli", "config", "show"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
