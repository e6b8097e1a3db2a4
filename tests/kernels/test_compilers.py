"""Compiling in processes: they fill the cache that launches look into, and are not needed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixgrove.kernels import compilers
from radixgrove.kernels.compilers import Compilers, Room, compiling_apart

triton = pytest.importorskip("triton")
from triton.runtime.cache import get_cache_manager  # noqa: E402

CUDA = torch.device("cuda")
GIB = 1 << 30


def launched_by(name: str, cache: Path) -> list[list[str]]:
    """Words of each line that a script beside this file prints."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.hopper
@pytest.mark.slow
def test_every_kernel_can_be_handed_over(tmp_path: Path) -> None:
    launched = launched_by("handed_over.py", tmp_path)
    assert len({name for name, _ in launched}) > 30
    assert [name for name, same in launched if same != "True"] == []


@pytest.mark.hopper
@pytest.mark.slow
def test_what_a_process_compiles_is_what_the_launch_asks_for(tmp_path: Path) -> None:
    launched = launched_by("compile_apart.py", tmp_path)
    # The first is compiled where it is launched.
    assert launched[0] == ["_silu_and_mul_kernel", "False"]
    assert sorted(name for name, _ in launched[1:]) == ["_rms_norm_kernel"] * 2 + ["route_kernel"]
    assert {hit for _, hit in launched[1:]} == {"True"}
    assert {hit for _, hit in launched_by("compile_apart.py", tmp_path)} == {"True"}


_KILLED = """
import os
from radixgrove.kernels.compilers import _start_processes
process, channels = _start_processes(2, 90)
print(process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.hopper
@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them() -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    state = Path("/proc", killed.stdout.strip(), "stat")
    deadline = time.monotonic() + 60
    while state.exists() and ") Z" not in state.read_text():  # which waits for all others
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Processes:
    """In place of what `Compilers` starts, with its ends of the channels."""

    pid = 4321

    def __init__(self, command: list[str], pass_fds: list[int], **options: Any) -> None:
        self.command, self.options = command, options
        self.ends = [socket.socket(fileno=os.dup(descriptor)) for descriptor in pass_fds]
        self.hang = False

    def wait(self, seconds: float | None = None) -> int:
        if self.hang and seconds is not None:
            raise subprocess.TimeoutExpired(self.command, seconds)
        return 0

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Processes]]:
    """What has been started, for a device of compute capability 9.0."""
    started: list[Processes] = []

    def start(*command: Any, **options: Any) -> Processes:
        started.append(Processes(*command, **options))
        return started[-1]

    monkeypatch.setattr(compilers.subprocess, "Popen", start)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield started
    for processes in started:
        processes.close()


def launch(apart: Compilers, what: str) -> None:
    """As Triton does where its cache on disk has nothing."""
    kernel = SimpleNamespace(module="absent", name="_kernel")
    assert apart.before_compiling(fn=kernel, compile={"specialization_data": what}) is False
    apart.compile_missing()


def test_processes_that_have_ended_leave_the_work_to_threads(started: list[Processes]) -> None:
    with Compilers(2, CUDA) as apart:
        launch(apart, "first")
        started[0].close()
        for what in "abc":  # one more than there are
            launch(apart, what)


def test_processes_that_cannot_start_leave_the_work_to_threads(
    started: list[Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(compilers.subprocess, "Popen", start)
    with Compilers(2, CUDA) as apart:
        for what in "abc":
            launch(apart, what)


def test_processes_are_started_for_what_the_cache_lacks(
    started: list[Processes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name = "kernel.json"

    def look(key: str) -> dict[str, str] | None:
        """As Triton does before it compiles."""
        fn = SimpleNamespace(module="absent", name="_kernel")
        triton.knobs.runtime.jit_cache_hook(fn=fn, compile={"specialization_data": key})
        found: dict[str, str] | None = get_cache_manager(key).get_group(name)
        return found

    def keep(key: str) -> None:
        manager = get_cache_manager(key)
        manager.put_group(name, {name: manager.put("{}", name)})

    keep("aa")
    with compiling_apart(CUDA, 1, at_once=False):
        assert look("aa")
        assert not started
        assert look("bb") is None  # the first of them
        (processes,) = started
        assert processes.command[-2] == "90"
        with ThreadPoolExecutor(1) as executor:
            looking = executor.submit(look, "cc")
            (end,) = processes.ends
            assert json.loads(end.makefile().readline()) == ["absent", "_kernel", "cc"]
            keep("cc")
            end.sendall(b"\n")
            assert looking.result(30)
    assert len(started) == 1
    assert look_is_plain()


def test_processes_may_be_started_before_there_is_anything_to_compile(
    started: list[Processes],
) -> None:
    with Compilers(1, CUDA) as apart:
        apart.start()
        assert len(started) == 1
        launch(apart, "first")
    with compiling_apart(CUDA, 1, at_once=True):
        assert len(started) == 2


def look_is_plain() -> bool:
    return triton.knobs.cache.manager_class is None and not triton.knobs.runtime.jit_cache_hook


def test_channels_end_though_a_forked_process_has_them_too(started: list[Processes]) -> None:
    with Compilers(1, CUDA) as apart:
        launch(apart, "first")
        (end,) = started[0].ends
        end.settimeout(10)
        forked = os.dup(apart._channels[0].fileno())
    try:
        assert end.recv(1) == b""
    finally:
        os.close(forked)


def test_processes_that_hang_are_all_ended(
    started: list[Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(compilers.os, "killpg", lambda *of: ended.append(of))
    with Compilers(1, CUDA) as apart:
        launch(apart, "first")
        started[0].hang = True
    assert ended == [(Processes.pid, signal.SIGKILL)]
    assert started[0].options["start_new_session"], "it would be our own group"


def test_what_all_processes_need_is_done_before_they_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where no more of them can be, the channels of these end."""
    done: list[str] = []
    pairs = [socket.socketpair() for _ in range(2)]

    def fork() -> int:
        done.append("fork")
        raise BlockingIOError

    def leave(status: int) -> None:
        raise SystemExit(status)

    backend = SimpleNamespace(hash=lambda: done.append("assembler"))
    monkeypatch.setattr(triton.compiler.compiler, "make_backend", lambda target: backend)
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: done.append("sources"))
    monkeypatch.setattr(triton.runtime.driver, "set_active", lambda driver: None)
    monkeypatch.setattr(compilers.os, "nice", lambda by: 0)
    monkeypatch.setattr(compilers.os, "fork", fork)
    monkeypatch.setattr(compilers.os, "wait", lambda: os.waitpid(-os.getpid(), 0))  # of no child
    monkeypatch.setattr(compilers.os, "_exit", leave)
    with pytest.raises(SystemExit, match="0"):
        compilers.main(["90", *(str(theirs.detach()) for _, theirs in pairs)])
    assert done == ["sources", "assembler", "fork"]
    for ours, _ in pairs:
        with ours:
            assert ours.recv(1) == b""


def test_a_process_ends_in_silence_when_the_one_that_asks_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(compilers.os, "_exit", leave)
    ours, theirs = socket.socketpair()
    ours.sendall(b"no kernel\n")
    ours.close()  # to which the answer is a broken pipe
    with theirs, pytest.raises(SystemExit) as ended:
        compilers._serve_and_exit(theirs, [theirs])
    assert ended.value.__context__ is None


def test_room_for_processes_is_cores_and_memory() -> None:
    with compiling_apart(CUDA, 0, at_once=True):
        assert look_is_plain()
    assert [Room(cores, GIB).threads for cores in (0, 1, 2, 7, 8, 64)] == [1, 1, 2, 7, 8, 16]
    assert [Room(cores, 64 * GIB).processes for cores in (1, 7, 8, 64)] == [0, 0, 8, 16]
    assert [Room(64, memory).processes for memory in (0, GIB // 4, GIB)] == [0, 1, 4]
