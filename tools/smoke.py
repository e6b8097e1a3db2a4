"""`make smoke`: a cluster from start to end, checked. Exits 1 when anything is not as promised.

This process becomes the reaper of orphans, so that whatever `radixgrove up` might leave behind is
found as a child of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

import click
import psutil

from radixgrove.cli.demonstration import Shown, demonstrate
from radixgrove.cli.redis_server import free_ports

_PR_SET_CHILD_SUBREAPER = 36
_START_DEADLINE = 1800.0
_STOP_DEADLINE = 60.0
_GONE_DEADLINE = 5.0


class SmokeFailure(Exception):
    """What was promised and did not happen."""


def main() -> int:
    # A failure to become the reaper would make the last check see nothing.
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("this kernel has no child subreapers")
    port, management_port = free_ports(2)
    command = [sys.executable, "-m", "radixgrove.cli", "up", "--replicas", "2"]
    command += ["--port", str(port), "--management-port", str(management_port), "--follow"]
    # A slow machine is no reason to place without Redis, which may be elsewhere than the prefix.
    command += ["--redis-timeout", "10"]
    with tempfile.TemporaryDirectory(prefix="radixgrove-smoke-") as directory:
        return _check([*command, "--log-dir", directory], port)


def _check(command: list[str], port: int) -> int:
    """Runs the cluster of that command; returns the exit status."""
    cluster = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        _await_ready(cluster)
        check_answers(demonstrate(f"http://127.0.0.1:{port}", click.echo))
        cluster.send_signal(signal.SIGTERM)
        code = cluster.wait(_STOP_DEADLINE)
        if code != 0:
            raise SmokeFailure(f"radixgrove up ended with exit code {code}")
        _check_gone()
    except (SmokeFailure, click.ClickException, subprocess.TimeoutExpired) as error:
        print(f"smoke: FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        if cluster.poll() is None:
            cluster.kill()
            cluster.wait()
    print("smoke: passed: right answer, prefix found again on its replica, nothing left behind")
    return 0


def check_answers(shown: list[Shown]) -> None:
    """
    Raises:
        SmokeFailure: a wrong answer, or a repeated prefix that was computed twice.
    """
    for one in shown:
        if one.expected not in one.answer:
            raise SmokeFailure(f"{one.question!r} was answered {one.answer!r}")
    _, first, second = shown
    if second.replica != first.replica:
        raise SmokeFailure(f"one prefix went to {first.replica} and to {second.replica}")
    if second.cached_tokens <= 0:
        raise SmokeFailure("the repeated prefix was computed again")


def _await_ready(cluster: subprocess.Popen[str]) -> None:
    """Pass its output on until it says that it is ready."""
    assert cluster.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert cluster.stdout is not None
        for line in cluster.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + _START_DEADLINE
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise SmokeFailure(f"not ready after {_START_DEADLINE:.0f} s") from None
        if line is None:
            raise SmokeFailure("radixgrove up ended before it was ready")
        print(line, end="")
        if "Ctrl-C" in line:  # the last line of the announcement
            return


def _check_gone() -> None:
    deadline = time.monotonic() + _GONE_DEADLINE
    while left := _children():
        if time.monotonic() > deadline:
            raise SmokeFailure(f"left behind: {', '.join(left)}")
        time.sleep(0.1)


def _children() -> list[str]:
    """Command lines of our living children, adopted ones included.

    A command line alone does not tell the living: it is empty for a moment while a program starts.
    """
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{' '.join(child.cmdline())} (process {child.pid})")
    return found


if __name__ == "__main__":
    sys.exit(main())
