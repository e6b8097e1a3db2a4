"""Threads of an engine spin for each other where they have the cores to themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixgrove.worker.execution.openmp_waits import SAID_BY, can_follow_load
from tests.conftest import CORES
from tests.worker.execution import tiny

MANY = 8  # cores of a machine that is not this one
# Several cores are needed for threads that wait for each other.
needs_cores = pytest.mark.skipif(CORES < 2, reason="one core")


def run(program: str, *arguments: object, **environ: str) -> list[str]:
    """Output of a process in which only `environ` says how many threads OpenMP has and how they
    wait."""
    said = {*SAID_BY, "OMP_NUM_THREADS"}
    plain = {name: value for name, value in os.environ.items() if name not in said}
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=plain | environ,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    ).stdout.splitlines()


@needs_cores
def test_threads_spin_short_from_when_they_wait_for_cores_until_they_no_longer_do(
    tmp_path: Path,
) -> None:
    """CPU seconds spun while the first thread sleeps, after given shares of waiting."""
    program = """
import sys, time
from pathlib import Path
import torch
from radixgrove.worker.execution.openmp_waits import OpenMpWaits

proc, threads = Path(sys.argv[1]), int(sys.argv[2])
schedstat = proc / "task" / "1" / "schedstat"
schedstat.parent.mkdir(parents=True)
ran, waited = 10**12, 10**12
schedstat.write_text(f"{ran} {waited} 1")
torch.set_num_threads(threads)
numbers = torch.zeros(1 << 16)
waits = OpenMpWaits(threads, proc)

def after(share, looks):
    global ran, waited
    for _ in range(looks):
        ran, waited = ran + int((1 - share) * 10**9), waited + int(share * 10**9)
        schedstat.write_text(f"{ran} {waited} 1")
        waits.look()
    begin = time.process_time()
    for _ in range(50):
        numbers.add_(1)
        time.sleep(0.005)
    print(time.process_time() - begin)

after(0.0, 1)
after(0.5, 1)
after(0.0, 9)
after(0.2, 9)
after(0.0, 10)
"""
    # So that a spin lasts until the next operation, on any processor.
    spun = [float(line) for line in run(program, tmp_path, CORES, GOMP_SPINCOUNT="1G")]
    alone, shared, calm, wavering, calm_for_long = spun
    assert max(shared, calm, wavering) < min(alone, calm_for_long) / 3, spun


@needs_cores
def test_waiting_for_a_core_is_what_the_kernel_says() -> None:
    """A process that is confined to one core, with busy ones."""
    program = """
import os, subprocess, sys, time
import torch
from radixgrove.worker.execution.openmp_waits import OpenMpWaits

waits = OpenMpWaits(2)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
end = time.monotonic() + 60
while not waits.short and time.monotonic() < end:
    look = time.monotonic() + 0.2
    while time.monotonic() < look:
        pass
    waits.look()
print(waits.short)
for other in others:
    other.kill()
"""
    assert run(program) == ["True"]


def test_where_no_threads_are_left_spins_stay_long_and_it_is_said_once(tmp_path: Path) -> None:
    program = """
import logging, os, resource, sys, threading
from pathlib import Path
import torch
from radixgrove.worker.execution.openmp_waits import OpenMpWaits

logging.basicConfig(format="%(message)s", stream=sys.stdout)
os.sched_getaffinity = lambda _: set(range(8))
schedstat = Path(sys.argv[1]) / "task" / "1" / "schedstat"
schedstat.parent.mkdir(parents=True)
schedstat.write_text("1 1 1")
waits = OpenMpWaits(2, Path(sys.argv[1]))
stack = 1 << 30
threading.stack_size(stack)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = taken + 3 * stack  # two or three of seven threads
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for look in (1, 2):
    schedstat.write_text(f"{look * 10**12} {look * 10**12} 1")
    waits.look()
    print(waits.short, threading.active_count())
"""
    said, *after = run(program, tmp_path)
    assert "can't start new thread" in said
    assert after == ["False 1"] * 2


can_tell = pytest.mark.skipif(not can_follow_load(CORES), reason="an engine cannot tell")
# The process ends at once, as an engine's: a thread inside torch aborts an interpreter that ends.
THREADS = """
import os
print([thread.name for thread in threading.enumerate()], flush=True)
os._exit(0)
"""


@can_tell
def test_an_engine_on_a_cpu_follows_the_load(tmp_path: Path) -> None:
    program = f"""
import sys, threading
from pathlib import Path
from tests.worker.execution.driver import cpu_runner

cpu_runner(Path(sys.argv[1])).close()
{THREADS}
"""
    tiny.save("llama", tmp_path)
    assert "openmp waits" in run(program, tmp_path)[0]


@can_tell
def test_nothing_is_followed_once_the_user_says_how_threads_wait() -> None:
    program = f"""
import sys, threading
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.execution.openmp_waits import follow_load

follow_load(WorkerSettings(), int(sys.argv[1]))
{THREADS}
"""
    assert "openmp waits" in run(program, CORES)[0]
    for name in SAID_BY:
        assert "openmp waits" not in run(program, CORES, **{name: "1"})[0]


@can_tell
def test_ranks_follow_the_load_wherever_their_agent_leaves_it_to_them() -> None:
    """Though each has fewer threads than the agent counts: torch takes one a physical core."""
    program = f"""
import os, threading
os.sched_getaffinity = lambda _: set(range({MANY}))
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service import machine
from radixgrove.worker.execution.openmp_waits import follow_load, follows_load

machine.cores = lambda *_: {MANY}
settings = WorkerSettings(tp=2)
print(follows_load(settings, os.environ))
follow_load(settings, {MANY} // 4)
{THREADS}
"""
    left_to_it, threads = run(program)
    assert left_to_it == "True"
    assert "openmp waits" in threads


@can_tell
def test_one_thread_watches_a_process() -> None:
    program = f"""
import threading
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.execution.openmp_waits import follow_load

for threads in ({CORES}, {CORES} + 1):
    follow_load(WorkerSettings(cpu_threads=threads), threads)
{THREADS}
"""
    assert run(program)[0].count("openmp waits") == 1


@pytest.mark.parametrize(
    ("threads", "quota", "schedstat", "follows"),
    [
        (MANY, "max 100000", "5 0 1", True),
        (MANY // 2, "max 100000", "5 0 1", True),
        (MANY // 2 - 1, "max 100000", "5 0 1", False),
        (MANY // 2, f"{MANY // 2}00000 100000", "5 0 1", False),
        (MANY, "max 100000", "0 0 0", False),
        (MANY, "max 100000", "", False),
    ],
    ids=["all cores", "hyperthreads", "a part", "quota", "not counted", "not told"],
)
def test_where_waits_follow_the_load(
    threads: int,
    quota: str,
    schedstat: str,
    follows: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MANY)))
    (tmp_path / "task" / "1").mkdir(parents=True)
    (tmp_path / "task" / "1" / "schedstat").write_text(schedstat)
    (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(f"31 23 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    assert can_follow_load(threads, tmp_path) == follows


def test_one_thread_waits_for_no_other() -> None:
    assert not can_follow_load(1)
