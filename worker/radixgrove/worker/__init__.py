"""The worker: an engine that generates tokens, its frontends, and the agent that owns them.

The names below may be used by other programs; the rest of the package may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixgrove.protocol.lazy import exports

if TYPE_CHECKING:
    from radixgrove.worker.agent.agent import run as run
    from radixgrove.worker.attention.base import AttentionBackend as AttentionBackend
    from radixgrove.worker.cache.tree import RadixTree as RadixTree
    from radixgrove.worker.engine.executor import build_executor as build_executor
    from radixgrove.worker.engine.offline import OfflineEngine as OfflineEngine
    from radixgrove.worker.messages import Refused as Refused
    from radixgrove.worker.messages import Submit as Submit
    from radixgrove.worker.messages import Tokens as Tokens
    from radixgrove.worker.plan import Executor as Executor
    from radixgrove.worker.plan import ExecutorInfo as ExecutorInfo
    from radixgrove.worker.plan import StepPlan as StepPlan
    from radixgrove.worker.plan import StepResult as StepResult
    from radixgrove.worker.scheduler.config import SchedulerConfig as SchedulerConfig
    from radixgrove.worker.scheduler.scheduler import Scheduler as Scheduler

_HOMES = {
    "agent.agent": ["run"],
    "attention.base": ["AttentionBackend"],
    "cache.tree": ["RadixTree"],
    "engine.executor": ["build_executor"],
    "engine.offline": ["OfflineEngine"],
    "messages": ["Refused", "Submit", "Tokens"],
    "plan": ["Executor", "ExecutorInfo", "StepPlan", "StepResult"],
    "scheduler.config": ["SchedulerConfig"],
    "scheduler.scheduler": ["Scheduler"],
}

__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = exports(__name__, _HOMES)
