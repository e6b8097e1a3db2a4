"""A rank that is lost while its group starts: the group ends, and names it."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from radixgrove.worker.engine import group_links
from radixgrove.worker.execution import build
from radixgrove.worker.runtime import Runtime
from tests.conftest import wait_until
from tests.forks import Fork
from tests.worker.execution import tiny
from tests.worker.parallel.machines import ENDS_WITHIN
from tests.worker.parallel.ranks import follow, leading, settings

SILENCE = 4.0  # seconds, instead of a minute of a start
LOST = 1  # of three ranks


@pytest.mark.parametrize("step", ["load_model", "measure_prefill"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_in_the_start_is_named_and_the_others_end(
    step: str, fault: signal.Signals, tmp_path: Path
) -> None:
    tiny.save("llama3-rope", tmp_path / "model")
    Runtime(tmp_path, settings(1, pp=3), tmp_path / "model").write()
    mains = [lead, partial(follow_up_to, step), follow_impatiently]
    ranks = [
        Fork(main, [str(rank), str(tmp_path)], tmp_path / f"rank-{rank}.log")
        for rank, main in enumerate(mains)
    ]
    try:
        wait_until((tmp_path / "reached").exists, what=f"{step} of rank {LOST}")
        os.kill(ranks[LOST].pid, fault)
        assert ranks[0].wait(SILENCE + ENDS_WITHIN) != 0
        assert ranks[2].wait(SILENCE + ENDS_WITHIN) != 0
    finally:
        for rank in ranks:
            rank.kill()
    last = (tmp_path / "rank-0.log").read_text().splitlines()[-1]
    assert f"rank {LOST} " in last


def lead(arguments: list[str]) -> None:
    """Rank 0's process."""
    group_links.START_SILENCE_SECONDS = SILENCE
    leading(Path(arguments[1]))


def follow_impatiently(arguments: list[str]) -> None:
    """Another rank's, as `follow`."""
    group_links.START_SILENCE_SECONDS = SILENCE
    follow(arguments)


def follow_up_to(step: str, arguments: list[str]) -> None:
    """As `follow`, up to a step of the start, in which the rank stays."""

    def stay(*_: object) -> None:
        (Path(arguments[1]) / "reached").touch()
        threading.Event().wait()

    setattr(build, step, stay)
    follow(arguments)
