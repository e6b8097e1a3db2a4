"""Processes of the product that begin as forks of one process which has done their imports.

Importing is most of what a router's start costs. A fork has a state of its own all the same, as a
process started by a command has; those that test the command itself start it by one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from prometheus_client import values

from radixgrove.service import logs

Main = Callable[[list[str]], None]

_CONTEXT = multiprocessing.get_context("forkserver")
# None of them starts a thread, opens a file or registers a metric of the product's worker.
_CONTEXT.set_forkserver_preload(
    [
        "radixgrove.router.server",
        "radixgrove.worker.engine.follower",
        "radixgrove.worker.engine.loop",
        "radixgrove.worker.frontend.server",
    ]
)


class Fork:
    """What `subprocess.Popen` has, for `main(arguments)` of a module that is also a command.

    Its output is appended to `log`; its variables are this process's and `environment`.
    """

    def __init__(
        self,
        main: Main,
        arguments: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._process = _CONTEXT.Process(
            target=_run, args=(main, arguments, log, os.environ | (environment or {})), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(main: Main, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    gc.freeze()  # what was imported stays: collecting would copy all of its pages
    os.environ.clear()  # those of the test before which the forkserver began
    os.environ.update(environment)
    # The library chose at its import whether metrics are written to files.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    try:
        main(arguments)
    finally:
        logs.STDERR.flush()  # multiprocessing ends its children without their exit handlers
