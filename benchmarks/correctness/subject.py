"""One engine under test, and a count of what it really did."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.offline import BenchmarkEngine
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import AttentionChoice, Device, DType, LoadFormat, WorkerSettings
from radixgrove.worker.engine.leader import GroupExecutor
from radixgrove.worker.engine.orders import BEAT_SECONDS
from radixgrove.worker.messages import Submit, TokenLogprobs, Tokens
from radixgrove.worker.plan import StepPlan


@dataclass
class Counters:
    """What the engine really did."""

    steps: int = 0
    continued_chunks: int = 0  # prefill chunks that do not start their row
    largest_batch: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0  # of those from the host
    replays: int = 0  # of decodes
    mixed_replays: int = 0  # of steps with chunks
    ranks: int = 1  # that launched steps


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Subject:
    """One engine, with a count of its plans."""

    def __init__(self, model_dir: Path, dtype: DType, backend: str, **options: Any) -> None:
        settings = WorkerSettings(
            device=Device.CUDA if torch.cuda.is_available() else Device.CPU,
            dtype=dtype,
            load_format=LoadFormat.SAFETENSORS,
            attention_backend=AttentionChoice(backend),
            max_model_len=1024,
            max_running=64,
            **{"kv_tokens": 65536, **options},
        )
        self.engine = BenchmarkEngine(settings, model_dir)
        self.counters = Counters()
        launch = self.engine.executor.launch

        def counting(plan: StepPlan) -> None:
            self.counters.steps += 1
            self.counters.continued_chunks += sum(c.start > 0 for c in plan.prefills)
            self.counters.largest_batch = max(self.counters.largest_batch, len(plan.decodes))
            launch(plan)

        self.engine.executor.launch = counting  # type: ignore[method-assign]

    def generate(
        self, prompts: list[list[int]], *, one_by_one: bool = False, **sampling: Any
    ) -> list[Generated]:
        found = [Generated() for _ in prompts]
        groups = [[i] for i in range(len(prompts))] if one_by_one else [list(range(len(prompts)))]
        before, scheduler = self._replays(), self.engine.scheduler
        counted = scheduler.counters
        self.counters = Counters(
            cached_tokens=-counted.cached_tokens, loaded_tokens=-counted.host_cached_tokens
        )
        for group in groups:
            for index in group:
                self._submit(str(index), prompts[index], SamplingParams(seed=index, **sampling))
            while scheduler.has_work:
                self.engine.turn()
                for output in scheduler.take_outputs().get(0, []):
                    self._take(output, found)
        self.counters.cached_tokens += counted.cached_tokens
        self.counters.loaded_tokens += counted.host_cached_tokens
        after = self._replays()
        self.counters.replays = after[0] - before[0]
        self.counters.mixed_replays = after[1] - before[1]
        self.counters.ranks = self._ranks()
        return found

    def _replays(self) -> tuple[int, int]:
        """Of rank 0: of decodes, and of steps with chunks."""
        executor = self.engine.executor
        runner = getattr(executor, "_runner", executor)
        decodes, mixed = (getattr(runner, name, None) for name in ("_graphs", "_mixed"))
        return (decodes.replays if decodes else 0), (mixed.replays if mixed else 0)

    def _ranks(self) -> int:
        executor = self.engine.executor
        if not isinstance(executor, GroupExecutor):
            return 1
        peers = executor._links._peers.values()
        deadline = time.monotonic() + 4 * BEAT_SECONDS  # they say it with their heartbeats
        while time.monotonic() < deadline and not all(peer.orders for peer in peers):
            time.sleep(BEAT_SECONDS / 10)
        return 1 + sum(peer.orders > 0 for peer in peers)

    def _submit(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        self.engine.scheduler.submit(
            Submit(
                request_id=request_id,
                frontend=0,
                token_ids=np.array(prompt, dtype="<i4").tobytes(),
                sampling=sampling,
                domain="public",
            ),
            time.time(),
        )

    def _take(self, output: Any, found: list[Generated]) -> None:
        if not isinstance(output, Tokens):
            raise RuntimeError(f"refused: {output.detail}")
        item = found[int(output.request_id)]
        item.token_ids += output.token_ids
        item.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            item.prompt_logprobs = output.prompt_logprobs

    def flush(self) -> None:
        self.engine.scheduler.flush_cache()

    def close(self) -> None:
        self.engine.close()
