"""The executor that a scheduler drives: one rank's runner, or a group's with rank 0 in front."""

from __future__ import annotations

from pathlib import Path

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.engine.leader import GroupExecutor, PlanLinks
from radixgrove.worker.execution.assembly import Report
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.messages import EngineInfo
from radixgrove.worker.plan import Executor


def build_executor(
    settings: WorkerSettings,
    model_dir: Path,
    report: Report,
    runtime_dir: Path | None = None,
) -> tuple[Executor, EngineInfo]:
    """Rank 0's executor: load the model, size the pool, warm up, capture.

    Args:
        runtime_dir: where the ranks meet; needed when `settings.tp` is more than 1.

    Raises:
        ModelError: the model, or the settings for it, cannot be served; the message says why.
        RankMissing: another rank did not come.
    """
    runner, info = build_rank(settings, model_dir, report, runtime_dir, rank=0)
    if settings.tp == 1 or runtime_dir is None:
        return runner, info
    links = PlanLinks(runtime_dir, settings.tp, runner.info.depth, settings.step_timeout)
    return GroupExecutor(runner, links), info
