"""What keeps processes alive, sees that they hang, and ends them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from radixgrove.service import supervisor
from radixgrove.service.supervisor import ChildFailed, Supervised

SLEEP = "import time; time.sleep(60)"


class Scene:
    """A supervised Python one-liner and what was said about it."""

    def __init__(self, code: str, python: Path = Path(sys.executable), **options: bool) -> None:
        self.said: list[str] = []
        self.output: list[str] = []
        self.service = Supervised(
            "child",
            [str(python), "-c", code],
            os.environ,
            self.output.append,
            self.said.append,
            **options,
        )

    def alive(self) -> bool:
        child = self.service.child
        return child is not None and child.running


async def until(condition: Callable[[], bool], deadline: float = 30.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "the condition did not come"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF", 0.05)


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
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF", 0.4)
    monkeypatch.setattr(supervisor, "LONGEST_BACKOFF", 1.0)
    scene = Scene("raise SystemExit(7)")
    await scene.service.start()
    scene.service.mark_ready()
    await until(lambda: len(scene.said) >= 4)
    await scene.service.stop(1)
    assert "exited with code 7" in scene.said[0]
    # 0.4, 0.8, 1 and 1 seconds, as they are said.
    assert [text.rpartition(" in ")[2] for text in scene.said[:4]] == ["0 s", "1 s", "1 s", "1 s"]


async def test_a_child_that_never_was_ready_is_given_up_with_its_last_error() -> None:
    scene = Scene("raise ValueError('no such model')")
    await scene.service.start()
    with pytest.raises(ChildFailed, match="exited with code 1: ValueError: no such model"):
        await asyncio.wait_for(asyncio.shield(scene.service.failed), 30)
    await scene.service.stop(1)


ACCESS = "2026-01-01T00:00:00.000Z INFO    radixgrove.access: request path=/v1/Error status=200"
AWAY = "2026-01-01T00:00:00.000Z WARNING radixgrove.router: Redis is away (OSError: no route)"
RECORD = '{"time":"t","level":"%s","logger":"l","message":"%s"}'


@pytest.mark.parametrize(
    ("lines", "quoted", "complaint"),
    [
        ([ACCESS], None, None),
        ([RECORD % ("info", "request")], None, None),
        ([ACCESS, AWAY, ACCESS], None, "Redis is away (OSError: no route)"),
        (["terminate called after bad_alloc", ACCESS], "terminate called after bad_alloc", None),
        ([RECORD % ("critical", "it failed"), ACCESS], "it failed", None),
        (["ValueError: no model", "  in a file"], "ValueError: no model", None),
    ],
)
async def test_only_a_line_that_says_why_is_quoted_as_a_childs_error(
    lines: list[str], quoted: str | None, complaint: str | None
) -> None:
    scene = Scene(
        f"import os, signal\nprint({chr(10).join(lines)!r}, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    await scene.service.start()
    end = r"SIGKILL \(out of memory\?\)" + (f": {re.escape(quoted)}$" if quoted else "$")
    with pytest.raises(ChildFailed, match=end):
        await asyncio.wait_for(asyncio.shield(scene.service.failed), 30)
    assert scene.service.child.last_complaint() == (complaint or quoted)
    await scene.service.stop(1)


async def test_a_child_that_the_system_does_not_start_is_said_to_be_so(tmp_path: Path) -> None:
    scene = Scene(SLEEP, tmp_path / "no-python")
    with pytest.raises(ChildFailed, match=r"child cannot be started: .*No such file"):
        await scene.service.start()
    await scene.service.stop(1)


async def test_a_child_is_started_again_once_the_machine_has_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_BACKOFF", 0.05)
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    scene = Scene(SLEEP, python)
    await scene.service.start()
    scene.service.mark_ready()
    python.unlink()
    os.kill(scene.service.child.pid, 9)
    await until(lambda: sum("cannot be started" in text for text in scene.said) >= 2)
    python.symlink_to(sys.executable)
    await until(scene.alive)
    await scene.service.stop(5)


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
    _, alive = psutil.wait_procs([grandchild], timeout=30)
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


# ---- hanging -----------------------------------------------------------------------------------

# Ticks until the line "hang" comes; then its event loop stands still.
TICKING = """
import asyncio, pathlib, sys, time
from radixgrove.service.liveness import tick
async def main():
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)  # the first tick
    print("up", flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        await asyncio.sleep(0.01)
    time.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def ticking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A child's code, and the file at which its event loop stands still."""
    monkeypatch.setattr(supervisor, "HANG_SECONDS", 2.0)
    hang = tmp_path / "hang"
    return TICKING.replace("sys.argv[1]", repr(str(hang))), hang


async def test_a_child_whose_event_loop_stands_still_is_named_and_replaced(
    ticking: tuple[str, Path],
) -> None:
    code, hang = ticking
    scene = Scene(code, ready_when_ticking=True)
    await scene.service.start()
    first = scene.service.child.pid
    await until(lambda: scene.output == ["up"])
    hang.touch()
    await until(lambda: bool(scene.said))
    hang.unlink()
    assert f"child (process {first}) hangs: its event loop has not turned for " in scene.said[0]
    await until(lambda: scene.service.restarts == 1 and scene.alive())
    await scene.service.stop(5)
    assert not psutil.pid_exists(first)


async def test_a_child_that_is_stopped_is_replaced(ticking: tuple[str, Path]) -> None:
    scene = Scene(ticking[0], ready_when_ticking=True)
    await scene.service.start()
    await until(lambda: scene.output == ["up"])
    os.kill(scene.service.child.pid, signal.SIGSTOP)
    await until(lambda: scene.service.restarts == 1)
    await scene.service.stop(5)


async def test_a_child_that_hangs_and_is_not_to_be_started_again_is_a_failure(
    ticking: tuple[str, Path],
) -> None:
    code, hang = ticking
    scene = Scene(code, restart=False)
    await scene.service.start()
    hang.touch()
    with pytest.raises(ChildFailed, match=r"child .* hangs") as failure:
        await asyncio.wait_for(asyncio.shield(scene.service.failed), 30)
    assert failure.value.hung
    assert not scene.alive()


async def test_a_child_that_never_ticks_is_judged_by_its_end_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "HANG_SECONDS", 0.0)
    scene = Scene("import time; time.sleep(1)")
    await scene.service.start()
    scene.service.mark_ready()
    await until(lambda: bool(scene.said))
    assert "exited with code 0" in scene.said[0]
    await scene.service.stop(5)


async def test_a_child_that_ticked_was_ready(ticking: tuple[str, Path]) -> None:
    code, _ = ticking
    scene = Scene(code, ready_when_ticking=True)
    await scene.service.start()
    await until(lambda: scene.output == ["up"])
    scene.service.child.process.kill()
    await until(lambda: scene.service.restarts == 1)
    await scene.service.stop(5)


async def test_a_child_writes_where_its_parent_does_unless_a_sink_takes_it() -> None:
    code = (
        "import asyncio, os, sys\n"
        "from radixgrove.service.supervisor import ChildFailed, Supervised\n"
        "async def main():\n"
        "    command = [sys.executable, '-c', 'print(\"mine\", flush=True); raise SystemExit(3)']\n"
        "    service = Supervised('c', command, os.environ)\n"
        "    await service.start()\n"
        "    try:\n"
        "        await service.failed\n"
        "    except ChildFailed as failure:\n"
        "        print(failure)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await parent.communicate()
    mine, failure = said.decode().splitlines()
    assert mine == "mine"
    assert re.fullmatch(r"c \(process \d+\) exited with code 3", failure)
