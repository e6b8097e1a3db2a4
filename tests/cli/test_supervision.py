"""What keeps a local cluster's processes alive, and ends them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from radixgrove.cli import supervise
from radixgrove.cli.cluster import ClusterError, plan_gpus
from radixgrove.cli.supervise import ChildFailed, Supervised

SLEEP = "import time; time.sleep(60)"


class Scene:
    """A supervised Python one-liner and what was said about it."""

    def __init__(self, code: str) -> None:
        self.said: list[str] = []
        self.output: list[str] = []
        self.service = Supervised(
            "child", [sys.executable, "-c", code], os.environ, self.output.append, self.said.append
        )

    def alive(self) -> bool:
        child = self.service.child
        return child is not None and child.running


async def until(condition: Callable[[], bool], deadline: float = 10.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "the condition did not come"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "FIRST_BACKOFF", 0.05)


async def test_a_dead_child_is_reported_and_started_again() -> None:
    scene = Scene(SLEEP)
    await scene.service.start()
    scene.service.mark_ready()
    assert scene.service.child is not None
    first = scene.service.child.pid
    os.kill(first, 9)
    await until(lambda: scene.service.restarts == 1 and scene.alive())
    assert scene.service.child.pid != first
    assert f"child (process {first}) was killed by SIGKILL" in scene.said[0]
    await scene.service.stop(5)
    assert not scene.alive()
    assert scene.service.restarts == 1


async def test_the_back_off_grows_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "FIRST_BACKOFF", 0.4)
    monkeypatch.setattr(supervise, "LONGEST_BACKOFF", 1.0)
    scene = Scene("raise SystemExit(7)")
    await scene.service.start()
    scene.service.mark_ready()
    await until(lambda: len(scene.said) >= 4, deadline=30)
    await scene.service.stop(1)
    assert "exited with code 7" in scene.said[0]
    # 0.4, 0.8, 1 and 1 seconds, as they are said.
    assert [text.rpartition(" in ")[2] for text in scene.said[:4]] == ["0 s", "1 s", "1 s", "1 s"]


async def test_a_child_that_never_was_ready_is_given_up_with_its_last_error() -> None:
    scene = Scene("raise ValueError('no such model')")
    await scene.service.start()
    with pytest.raises(ChildFailed, match="exited with code 1: ValueError: no such model"):
        await asyncio.wait_for(asyncio.shield(scene.service.failed), 10)
    await scene.service.stop(1)


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    scene = Scene(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"print('up', flush=True)\n{SLEEP}"
    )
    await scene.service.start()
    await until(lambda: scene.output == ["up"])
    async with asyncio.timeout(30):  # of its own it would go on for a minute
        await scene.service.stop(0.2)
    assert not scene.alive()


async def test_children_die_with_a_killed_parent() -> None:
    code = (
        "import asyncio, os, sys\n"
        "from radixgrove.service.children import Child\n"
        "async def main():\n"
        f"    command = [sys.executable, '-c', {SLEEP!r}]\n"
        "    child = await Child.start('c', command, os.environ, print)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    grandchild = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    _, alive = psutil.wait_procs([grandchild], timeout=5)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


async def test_a_death_is_seen_although_a_grandchild_holds_the_output() -> None:
    scene = Scene(
        "import subprocess, sys\n"
        f"holder = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        f"print(holder.pid, flush=True)\n{SLEEP}"
    )
    await scene.service.start()
    scene.service.mark_ready()
    await until(lambda: bool(scene.output))
    holder = psutil.Process(int(scene.output[0]))
    assert scene.service.child is not None
    os.kill(scene.service.child.pid, 9)
    try:
        await until(lambda: bool(scene.said))
        assert holder.is_running()
    finally:
        holder.kill()
        await scene.service.stop(1)


def test_gpus_are_shared_out_without_overlap() -> None:
    assert plan_gpus(2, 2, ["0", "1", "2", "3"]) == [["0", "1"], ["2", "3"]]
    with pytest.raises(ClusterError, match="3 replicas of 2 GPUs need 6; this machine offers 4"):
        plan_gpus(3, 2, ["0", "1", "2", "3"])
