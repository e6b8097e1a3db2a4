"""Scheduler and executor in one process: the engine without its sockets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.messages import Finish, Submit, TokenLogprobs, TokenRules, Tokens
from radixgrove.worker.plan import Executor, StepPlan
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.grammars import LoadTokenizer
from radixgrove.worker.scheduler.scheduler import Scheduler


def settings(**changes: object) -> WorkerSettings:
    """A small float32 engine on the CPU."""
    values: dict[str, object] = {
        "device": Device.CPU,
        "dtype": DType.FLOAT32,
        "cpu_threads": 1,  # tests run beside each other, a process a core
        "max_model_len": 512,
        "max_running": 64,
        "kv_tokens": 64 * 256,
        # A slow machine is no reason to refuse.
        "queue_timeout": 3600,
        "grammar_timeout": 600,
    }
    return WorkerSettings.model_validate(values | changes)


def build(worker: WorkerSettings, model_dir: Path) -> Executor:
    executor, _ = build_executor(worker, model_dir, lambda phase: None)
    return executor


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    finish: Finish | None = None


class InProcessEngine:
    """Runs sequences to their end; memory is checked after every step."""

    def __init__(
        self, executor: Executor, worker: WorkerSettings, load: LoadTokenizer | None = None
    ) -> None:
        self._executor = executor
        config = SchedulerConfig.resolve(worker, executor.info, on_cpu=True)
        self.scheduler = Scheduler(config, load=load)
        self.most_chunks = 0  # chunks that the most chopped prompt took
        self.most_decodes = 0  # rows of the largest step of decodes
        self._names = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        rules: Sequence[TokenRules | None] = (),
        deadline: float = 1200.0,
    ) -> list[Answer]:
        """`rules`: of each prompt's answer, where it has any."""
        answers: dict[str, Answer] = {}
        for prompt, own in zip_longest(prompts, rules):
            self._names += 1
            name = f"r{self._names}"
            answers[name] = Answer()
            self.scheduler.submit(
                Submit(
                    request_id=name,
                    frontend=0,
                    token_ids=np.array(prompt, dtype="<i4").tobytes(),
                    sampling=sampling,
                    domain="local",
                    rules=own,
                ),
                time.time(),
            )
        end = time.monotonic() + deadline
        chunks: dict[int, int] = {}
        while any(answer.finish is None for answer in answers.values()):
            assert time.monotonic() < end, "the engine did not finish in time"
            self.scheduler.copies_ended(*self._executor.copies_ended())
            plan = self.scheduler.schedule(time.time())
            if plan is None:
                assert self.scheduler.grammars.building, "work is left, but nothing is planned"
                time.sleep(0.001)
                continue
            for new in plan.new_rows:
                chunks[new.row] = 0
            for chunk in plan.prefills:
                chunks[chunk.row] += 1
                self.most_chunks = max(self.most_chunks, chunks[chunk.row])
            self.most_decodes = max(self.most_decodes, len(plan.decodes))
            self._launch(plan)
            self.scheduler.complete(self._executor.collect())
            self.scheduler.check()
            for output in self.scheduler.take_outputs().get(0, []):
                self._take(answers[output.request_id], output)
        return list(answers.values())

    def _launch(self, plan: StepPlan) -> None:
        if not self.scheduler.masked:
            self._executor.launch(plan)
            return
        self._executor.forward(plan)
        self._executor.sample(self.scheduler.fill_masks(self._executor.masks))

    @staticmethod
    def _take(answer: Answer, output: object) -> None:
        assert isinstance(output, Tokens), output
        answer.tokens += output.token_ids
        answer.logprobs += output.logprobs or []
        if output.cached_tokens is not None:
            answer.cached_tokens = output.cached_tokens
        answer.finish = output.finish
