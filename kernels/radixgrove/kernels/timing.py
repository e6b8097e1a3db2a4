"""Times of work that is captured as CUDA graphs; which of several ways to do it is fastest."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

log = logging.getLogger(__name__)

# A kernel has to win by this much, so that noise does not choose.
_MARGIN = 0.985
# One much slower than the best is timed once only.
_HOPELESS = 1.3
_REPEATS = 4
C = TypeVar("C")
Timeable = TypeVar("Timeable", contravariant=True)


class Trial(Protocol[Timeable]):
    """What is timed: the same work in the way of a choice."""

    @property
    def device(self) -> torch.device: ...

    def run(self, choice: Timeable) -> None:
        """On cold weights, several times over."""

    def run_once(self, choice: Timeable) -> None:
        """Enough to compile and to load."""


@dataclass(slots=True)
class _Timed(Generic[C]):
    choice: C
    graph: torch.cuda.CUDAGraph
    milliseconds: float


def fastest(choices: Sequence[C], trial: Trial[C], what: str) -> C:
    """The one that takes the least time, or the first, if none is clearly better.

    Args:
        choices: of which the first must work; another that fails is left out.
        what: is chosen for, for the log.
    """
    timed = _time(choices, trial, torch.cuda.graph_pool_handle())
    first = timed[0]
    limit = _HOPELESS * min(one.milliseconds for one in timed)
    timed = [one for one in timed if one.milliseconds <= limit or one is first]
    _repeat(timed, trial.device)
    best = min(timed, key=lambda one: one.milliseconds)
    if best.milliseconds >= _MARGIN * first.milliseconds:
        best = first
    log.debug(
        "%s: %.4f ms by %s, %.4f by %s",
        what,
        best.milliseconds,
        best.choice,
        first.milliseconds,
        first.choice,
    )
    return best.choice


def _time(choices: Sequence[C], trial: Trial[C], pool: _POOL_HANDLE) -> list[_Timed[C]]:
    """Each once; one that this device or Triton cannot build is just not chosen."""
    timed: list[_Timed[C]] = []
    for choice in choices:
        try:
            steps = partial(trial.run_once, choice), partial(trial.run, choice)
            graph = _record(*steps, trial.device, pool)
        except Exception:
            if not timed:
                raise
            log.debug("candidate %s failed", choice, exc_info=True)
            continue
        graph.replay()
        timed.append(_Timed(choice, graph, _replay(graph)))
    return timed


def _repeat(timed: Sequence[_Timed[C]], device: torch.device) -> None:
    """Time all in turn, so that they see the same clocks, and without a gap in between."""
    events = []
    for one in (*timed,) * _REPEATS:
        begin, end = _timing_event(), _timing_event()
        begin.record()
        one.graph.replay()
        end.record()
        events.append((one, begin, end))
    torch.cuda.synchronize(device)
    for one, begin, end in events:
        one.milliseconds = min(one.milliseconds, begin.elapsed_time(end))


@lru_cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _record(
    warm_up: Callable[[], None],
    run: Callable[[], None],
    device: torch.device,
    pool: _POOL_HANDLE,
) -> torch.cuda.CUDAGraph:
    """`run` as a graph, after `warm_up`, in which kernels compile and libraries allocate.

    Graphs of one `pool` share their memory.
    """
    stream = _recording_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # A collection meanwhile might free CUDA memory; `torch.cuda.graph` would make one each time.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            # Other threads (NCCL's watchdog) may call into CUDA.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay."""
    begin, end = _timing_event(), _timing_event()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def replay_times(run: Callable[[], object], replays: int) -> list[float]:
    """Milliseconds of each of so many replays of `run`, which has run once: what it needs is there.

    Ranks that wait for each other in `run` replay it as often.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may call into CUDA.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return [_replay(graph) for _ in range(replays)]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
