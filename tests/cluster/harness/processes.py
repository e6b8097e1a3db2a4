"""Long-running processes of a cluster: started with a mark, found again by it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster.harness.waiting import wait_until

# Every process carries the cluster's state directory in its environment, so that a
# sweep after a killed owner finds them without a journal that could lag behind.
MARK = "RADIXGROVE_CLUSTER_STATE"


class ProcessDied(RuntimeError):
    """A process ended while it was waited for; the message carries the end of its log."""


class Process:
    """One process and its log file; may be started and stopped many times."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        state: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` replaces the default, which is only PATH and HOME."""
        self.name = name
        self.log = state / "logs" / f"{name}.log"
        self._command = list(command)
        self._environment = {**(environment or _default_environment()), MARK: str(state)}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The id of the process that does the work; RuntimeError when it does not run."""
        return self.wrapper_pid

    @property
    def wrapper_pid(self) -> int:
        """The id of the process that was started, maybe only to start another."""
        if self._child is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._child.pid

    def start(self) -> None:
        """Starts the process in its own session, its output appended to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises `ProcessDied` when the process has ended by itself."""
        if self._child is not None and self._child.poll() is not None:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise ProcessDied(f"{self.name} ended with {self._child.returncode}:\n{tail}")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, e.g. SIGSTOP and SIGCONT to pause and go on."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def stop(self, *, grace: float = 10) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds; returns when the process has ended."""
        self._end(signal.SIGTERM, grace)
        self.kill()

    def kill(self) -> None:
        """SIGKILL; returns when the process has ended."""
        self._end(signal.SIGKILL, grace=60)
        if self.running:
            raise RuntimeError(f"{self.name} does not end")

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def _end(self, number: signal.Signals, grace: float) -> None:
        if self._child is None:
            return
        if self.running:
            self.send(number)
        try:
            self._child.wait(grace)
        except subprocess.TimeoutExpired:
            return
        self._child = None


def marked(state: Path) -> Iterator[int]:
    """Ids of the living processes that carry the mark of this state directory."""
    mark = f"{MARK}={state}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
        if mark in environment.split(b"\0"):
            yield int(entry.name)


def kill_marked(state: Path) -> None:
    """Kills every process of a cluster, also stopped ones, until none is left."""

    def none_left() -> bool:
        pids = list(marked(state))
        for pid in pids:
            _kill(pid)
        return not pids

    wait_until(none_left, f"no process of {state.name} is left", interval=0.05)


def children(pid: int) -> list[int]:
    """Ids of the direct children of a process's main thread; empty when it has ended."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in text.split()]


def _default_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
