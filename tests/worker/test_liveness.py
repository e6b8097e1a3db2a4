"""When an engine counts as ready, and when as stuck."""

from __future__ import annotations

import pytest

from radixgrove.worker.agent.relay import BEAT_SECONDS, SILENCE_SECONDS
from radixgrove.worker.liveness import FAR_SILENCE, SILENCE, START_SILENCE, Liveness
from radixgrove.worker.messages import EngineState, Stats


def stats(
    ticks: int, *, steps: int = 0, left: float | None = None, state: EngineState = EngineState.READY
) -> Stats:
    return Stats(state=state, ticks=ticks, steps=steps, step_remaining=left)


class Watcher:
    """A liveness at times that a test sets, looked at four times a second."""

    def __init__(self, silence: float = SILENCE) -> None:
        self.now = 5000.0
        self.liveness = Liveness(lambda: self.now, silence=silence)

    def watch(self, seconds: float) -> str | None:
        """The first problem seen within that time."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            if problem := self.liveness.problem():
                return problem
        return None


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


def test_an_engine_that_ticks_is_ready(watcher: Watcher) -> None:
    assert not watcher.liveness.ready()
    for ticks in range(40):
        watcher.liveness.take(stats(ticks))
        assert watcher.watch(0.25) is None
        assert watcher.liveness.ready()


def test_an_idle_engine_that_stops_ticking_is_unready_first_and_stuck_then(
    watcher: Watcher,
) -> None:
    watcher.liveness.take(stats(1))
    assert watcher.watch(SILENCE - 1) is None
    assert not watcher.liveness.ready()
    assert watcher.watch(2) == "its scheduler has not ticked for 5.2 s"


def test_an_engine_of_a_machine_that_is_cut_off_is_not_judged_before_that_machine() -> None:
    watcher = Watcher(FAR_SILENCE)
    watcher.liveness.take(stats(1))
    assert watcher.watch(SILENCE_SECONDS + BEAT_SECONDS) is None
    assert watcher.watch(2) == "its scheduler has not ticked for 6.2 s"


def test_a_long_step_is_ready_until_its_deadline(watcher: Watcher) -> None:
    watcher.liveness.take(stats(1, left=9.0))
    assert watcher.watch(9.0) is None
    assert watcher.liveness.ready()
    assert watcher.watch(0.5) is None
    assert not watcher.liveness.ready()
    assert watcher.watch(1) == "step 1 is 1.2 s past its deadline"


def test_a_step_does_not_put_off_its_own_deadline(watcher: Watcher) -> None:
    for ticks in range(8):
        watcher.liveness.take(stats(ticks, steps=3, left=1.0))
        problem = watcher.watch(0.5)
        if problem:
            break
    assert problem == "step 4 is 1.2 s past its deadline"


def test_the_next_step_has_a_deadline_of_its_own(watcher: Watcher) -> None:
    for steps in range(20):
        watcher.liveness.take(stats(steps, steps=steps, left=1.0))
        assert watcher.watch(0.5) is None


@pytest.mark.parametrize("left", [None, 3.0])
def test_a_watcher_that_slept_looks_again_before_it_judges(
    watcher: Watcher, left: float | None
) -> None:
    """A laptop that was closed, a frozen container: nothing could give a sign of life."""
    watcher.liveness.take(stats(1, left=left))
    watcher.now += 8 * 3600.0
    assert watcher.liveness.problem() is None
    assert watcher.watch(1.0) is None
    watcher.liveness.take(stats(2, steps=1))
    assert watcher.liveness.ready()
    assert watcher.watch(1.0) is None


def test_an_engine_that_is_still_silent_after_the_sleep_is_stuck(watcher: Watcher) -> None:
    watcher.liveness.take(stats(1))
    watcher.now += 8 * 3600.0
    assert watcher.watch(SILENCE + 1) == "its scheduler has not ticked for 5.2 s"


def test_a_start_may_take_long_while_it_reports_progress(watcher: Watcher) -> None:
    for _ in range(5):
        watcher.liveness.hear()
        assert watcher.watch(START_SILENCE - 1) is None
    assert watcher.watch(2) == "it has shown no progress of its start for 900 s"
    assert not watcher.liveness.ready()
