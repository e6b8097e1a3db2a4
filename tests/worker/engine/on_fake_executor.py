"""The main of an engine process on the fake executor, its size and its faults as JSON."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.engine import links
from radixgrove.worker.engine import loop as engine
from radixgrove.worker.messages import EngineInfo, EngineState, PhaseReport
from radixgrove.worker.plan import ExecutorInfo, StepPlan, StepResult
from tests.worker.scheduler.fake_executor import FakeExecutor

OPTIONS = {
    "num_pages": 256,
    "max_rows": 16,
    "max_model_len": 512,
    "vocab_size": 50,
    "depth": 2,
    "fail_at": 0,  # the collection of this step raises; 0: none
    "stall_at": 0,  # the collection of this step never returns
    "stall_from_tokens": 0,  # so does that of the first step with this many tokens; 0: none
    "step_seconds": 0.0,  # each step takes at least this long
    "token_seconds": 0.0,  # and each of its tokens so much more
    "send_queue": links.SEND_QUEUE,
    "fail_to_build": False,
    "num_host_pages": 0,
    "host_rate": 1e6,
}


class UnreliableExecutor(FakeExecutor):
    def __init__(self, info: ExecutorInfo, options: dict[str, float]) -> None:
        super().__init__(info)
        self._options = options
        self._never = threading.Event()
        self._long: set[int] = set()  # steps that reach `stall_from_tokens`
        self._tokens: deque[int] = deque()  # of the steps in flight

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        self._tokens.append(plan.num_tokens)
        if 0 < self._options["stall_from_tokens"] <= plan.num_tokens:
            self._long.add(plan.step_id)

    def collect(self) -> StepResult:
        result = super().collect()
        if result.step_id == self._options["fail_at"]:
            raise RuntimeError("rank 1 is gone")
        if result.step_id == self._options["stall_at"] or result.step_id in self._long:
            self._never.wait()
        tokens = self._tokens.popleft() * self._options["token_seconds"]
        self._never.wait(self._options["step_seconds"] + tokens)
        return result

    def expert_tokens(self) -> None:
        """It has no experts."""

    def copies_ended(self) -> tuple[int, int]:
        """Each look finds one more of each kind ended."""
        self.end_save()
        self.end_load()
        return super().copies_ended()


def build(
    options: dict[str, Any],
    settings: WorkerSettings,
    model_dir: Path,
    report: Callable[[PhaseReport], None],
    runtime_dir: Path,
) -> tuple[UnreliableExecutor, EngineInfo]:
    report(PhaseReport(EngineState.LOADING, "reading nothing", 0.5))
    if options["fail_to_build"]:
        raise RuntimeError("no memory for 3 pages; lower memory_fraction")
    info = ExecutorInfo(
        num_pages=options["num_pages"],
        page_size=settings.page_size,
        max_rows=options["max_rows"],
        max_model_len=options["max_model_len"],
        vocab_size=options["vocab_size"],
        depth=options["depth"],
        num_host_pages=options["num_host_pages"],
    )
    return UnreliableExecutor(info, options), EngineInfo(
        num_pages=info.num_pages,
        page_size=info.page_size,
        max_model_len=info.max_model_len,
        max_running=info.max_rows,
        vocab_size=info.vocab_size,
        dtype="float32",
        device="cpu",
        weights_bytes=0,
        kv_bytes_per_token=16,
        attention_backend="none",
        kv_dtype="fp8_e4m3",
        prefill_tokens_per_second=1000.0,
        host_pages=info.num_host_pages,
        host_tokens_per_second=options["host_rate"],
    )


def main(arguments: list[str]) -> None:
    """Of the runtime directory and the `OPTIONS` that differ."""
    directory, changes = arguments
    options = {**OPTIONS, **json.loads(changes)}
    links.SEND_QUEUE = options["send_queue"]
    sys.exit(engine.run(Path(directory), partial(build, options)))
