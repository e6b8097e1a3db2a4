"""One engine in its caller's process: scheduler and executor, no HTTP, no frontends, no Redis."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.ranks import UnsupportedRanks
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service.directories import private_directory
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.engine.tokenizer import tokenizer_of
from radixgrove.worker.execution.assembly import Report
from radixgrove.worker.messages import EngineInfo, PhaseReport, Submit, Tokens
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.plan import Executor, StepPlan
from radixgrove.worker.runtime import Runtime
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.scheduler import Scheduler

_WAITING_SECONDS = 0.001  # for copies from the host alone, or for grammars


def _no_report(phase: PhaseReport) -> None:
    """The caller does not follow the start."""


class OfflineEngine:
    """Generates token ids for prompts of token ids; a context manager, for one thread.

        with OfflineEngine(WorkerSettings(), Path("path/to/model")) as engine:
            answers = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=16, seed=0))

    Prompts share cached prefixes, within a call and from call to call. `turn` is one turn of the
    engine's loop, for callers with requests of their own in `scheduler`.
    """

    def __init__(
        self, settings: WorkerSettings, model_dir: Path, report: Report = _no_report
    ) -> None:
        """Load the model of a directory, and start the ranks of a group.

        Raises:
            UnsupportedRanks: the settings ask for several members, of which this is one.
            ModelError: the model, or the settings for it, cannot be served; the message says why.
            RankMissing: another rank did not come.
        """
        if settings.dp > 1:
            raise UnsupportedRanks("an engine without HTTP is one member: leave dp at 1")
        self._cleanup = ExitStack()
        with ExitStack() as started:
            runtime_dir = None
            if Layout.of(settings).size > 1:
                runtime_dir = started.enter_context(_other_ranks(settings, model_dir))
            self.executor: Executor
            self.info: EngineInfo
            self.executor, self.info = build_executor(settings, model_dir, report, runtime_dir)
            self._cleanup = started.pop_all()
        config = SchedulerConfig.resolve(
            settings,
            self.executor.info,
            on_cpu=self.info.device == "cpu",
            prefill_rate=self.info.prefill_tokens_per_second,
            host_rate=self.info.host_tokens_per_second,
        )
        self.scheduler = Scheduler(config, load=partial(tokenizer_of, model_dir))
        self._forwarded = False  # a step, which is yet to be sampled

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[list[int]]:
        """The generated ids of each prompt, a stop token included.

        Prompt i is sampled with the seed `sampling.seed + i`.

        Raises:
            InvalidInput: a prompt is refused, as one that is longer than the context.
        """
        now = time.monotonic()
        for index, prompt in enumerate(prompts):
            self.scheduler.submit(
                Submit(
                    request_id=str(index),
                    frontend=0,
                    token_ids=np.asarray(prompt, dtype="<i4").tobytes(),
                    sampling=msgspec.structs.replace(sampling, seed=sampling.seed + index),
                    domain="public",
                ),
                now,
            )
        answers: list[list[int]] = [[] for _ in prompts]
        refusals = []
        while True:
            for output in self.scheduler.take_outputs().get(0, []):
                if isinstance(output, Tokens):
                    answers[int(output.request_id)] += output.token_ids
                else:
                    refusals.append(f"prompt {output.request_id}: {output.detail}")
            if not self.scheduler.has_work:
                break
            self.turn()
        if refusals:
            raise InvalidInput("; ".join(refusals))
        return answers

    def turn(self) -> None:
        """Fill the executor up to its depth, or sample what was forwarded; else take in the oldest
        step. Where there is none, as while a grammar is being built, wait a moment."""
        if self._forwarded:
            self._sample()
            return
        while self.scheduler.in_flight < self.executor.info.depth and not self._forwarded:
            plan = self._plan()
            if plan is None:
                break
            self._start(plan)
        if self._forwarded:
            return  # the device is busy: what came is for the caller first
        if self.scheduler.in_flight:
            self._complete()
        else:
            time.sleep(_WAITING_SECONDS)

    def _plan(self) -> StepPlan | None:
        self.scheduler.copies_ended(*self.executor.copies_ended())
        return self.scheduler.schedule(time.monotonic())

    def _start(self, plan: StepPlan) -> None:
        """Launch the newest step; under masks that await tokens, its forward alone."""
        if not self.scheduler.masked:
            self.executor.launch(plan)
            return
        self.executor.forward(plan)
        self._forwarded = True
        if not self.scheduler.masks_await_tokens:
            self._sample_now()

    def _sample(self) -> None:
        """The step that was forwarded, once its tokens have come; then what was planned by then."""
        ahead = self._plan()
        while self.scheduler.masks_await_tokens:
            self._complete()
        self._sample_now()
        if ahead is not None:
            self._start(ahead)

    def _sample_now(self) -> None:
        self._forwarded = False
        self.executor.sample(self.scheduler.fill_masks(self.executor.masks))

    def _complete(self) -> None:
        self.scheduler.complete(self.executor.collect())

    def close(self) -> None:
        self.executor.close()
        self._cleanup.close()


@contextmanager
def _other_ranks(settings: WorkerSettings, model_dir: Path) -> Iterator[Path]:
    """Processes of the other ranks, and the directory in which they meet rank 0."""
    with private_directory("radixgrove-engine-") as directory:
        Runtime(directory, settings, model_dir.resolve()).write()
        command = [sys.executable, "-m", "radixgrove.worker.engine.loop", str(directory)]
        others = range(1, Layout.of(settings).size)
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in others]
        try:
            yield directory
            for process in ranks:
                process.wait(timeout=30)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
