"""How long a step may take before it means that a rank is stuck."""

from __future__ import annotations

from collections.abc import Callable

from radixgrove.protocol.settings import CPU_STEP_SLACK, WorkerSettings
from radixgrove.worker.messages import EngineInfo


def step_allowance(settings: WorkerSettings, info: EngineInfo) -> Callable[[int], float]:
    """Seconds that a step of so many tokens may take; where steps are slow, it grows with them."""
    rate = info.prefill_tokens_per_second
    per_token = CPU_STEP_SLACK / rate if info.device == "cpu" and rate > 0 else 0.0
    return lambda tokens: settings.step_timeout + tokens * per_token
