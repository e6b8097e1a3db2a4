"""Runs a scheduler on the fake executor, one call at a time, and checks its books after each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from llguidance import LLTokenizer

from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.messages import (
    CacheMode,
    EngineState,
    Refused,
    Stats,
    Submit,
    TokenRules,
    Tokens,
)
from radixgrove.worker.plan import ExecutorInfo, StepPlan
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.scheduler import Scheduler
from tests import grammars
from tests.worker.scheduler.fake_executor import FakeExecutor, expected_output

VOCAB = 50

DEFAULTS = SchedulerConfig(
    num_pages=64,
    page_size=4,
    max_rows=8,
    max_running=8,
    max_model_len=128,
    max_step_tokens=16,
    vocab_size=VOCAB,
)


def pack(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def unpack(token_ids: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(token_ids, dtype="<i4")]


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 4,
    *,
    domain: str = "public",
    priority: int = 0,
    cache: CacheMode = CacheMode.USE,
    queue_timeout: float | None = None,
    frontend: int = 0,
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    lockstep: bool = False,
    rules: TokenRules | None = None,
) -> Submit:
    return Submit(
        request_id=request_id,
        frontend=frontend,
        token_ids=pack(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            seed=7,
            stop_token_ids=stop,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        domain=domain,
        priority=priority,
        cache=cache,
        queue_timeout=queue_timeout,
        lockstep=lockstep,
        rules=rules,
    )


class Harness:
    """`depth` steps in flight; time stands still unless a test moves `now`.

    `count` says how many tokens a row gets in a step, of its bound; None: all.
    """

    def __init__(
        self,
        depth: int = 1,
        count: Callable[[int], int] | None = None,
        load: Callable[[], LLTokenizer] = grammars.tokenizer,
        **changes: object,
    ) -> None:
        self.config = replace(DEFAULTS, **changes)  # type: ignore[arg-type]
        config = self.config
        self.executor = FakeExecutor(
            ExecutorInfo(
                num_pages=config.num_pages,
                page_size=config.page_size,
                max_rows=config.max_rows,
                max_model_len=config.max_model_len,
                vocab_size=config.vocab_size,
                depth=depth,
                max_row_tokens=config.max_row_tokens,
                micro_batches=config.micro_batches,
                run_ahead=config.run_ahead,
                num_host_pages=config.num_host_pages,
                num_window_pages=config.num_window_pages,
                window=config.window,
            ),
            count,
        )
        self.hasher = BlockHasher(b"secret", config.namespace, 2 * config.page_size)
        self.scheduler = Scheduler(config, lambda _: self.hasher, load)
        self.now = 1000.0
        self._collected = False  # while a step was launched
        self.plans: deque[StepPlan] = deque(maxlen=10_000)
        self.submitted: dict[str, Submit] = {}
        self.tokens: dict[str, list[int]] = {}
        self.messages: dict[str, list[Tokens | Refused]] = {}
        self.ended: dict[str, Tokens | Refused] = {}

    def submit(self, submit: Submit) -> None:
        self.submitted[submit.request_id] = submit
        self.scheduler.submit(submit, self.now)
        self._settle()

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self._settle()

    def launch(self) -> bool:
        """Plan and launch one step if there is room and something to do."""
        if self.scheduler.in_flight >= self.executor.info.depth:
            return False
        self.scheduler.copies_ended(*self.executor.copies_ended())
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            assert plan.num_tokens <= self.config.max_step_tokens
            self.plans.append(plan)
            self._check_lockstep(plan)
            active = self.scheduler._batch.active.values()
            self.executor.running = {running.row for running in active}
            if self.scheduler.masked:
                self._launch_in_two(plan)
            else:
                self.executor.launch(plan)
        self._settle()
        return plan is not None

    def _launch_in_two(self, plan: StepPlan) -> None:
        """As the engine does it."""
        self.executor.forward(plan)
        while self.scheduler.masks_await_tokens:
            self.scheduler.complete(self.executor.collect())
            self._collected = True
        self.executor.sample(self.scheduler.fill_masks(self.executor.masks))

    def _check_lockstep(self, plan: StepPlan) -> None:
        """Of who waits for its tokens none is in flight."""
        for active in self.scheduler._batch.active.values():
            if active.request.submit.lockstep and active.row in plan.decodes:
                assert not self.executor.samples(active.row), f"row {active.row} did not wait"

    def collect(self) -> bool:
        if not self.scheduler.in_flight:
            return False
        self.scheduler.complete(self.executor.collect())
        self._settle()
        return True

    def step(self) -> bool:
        """One turn of the engine's loop; False when it did nothing."""
        launched = self._collected = False
        while not self._collected and self.launch():
            launched = True
        if self._collected:
            return True
        return self.collect() or launched

    def run(self, most_steps: int = 5000) -> None:
        """Until every request has ended, and every copy."""
        for _ in range(most_steps):
            if not self.step() and not self.end_copies():
                break
        assert not self.scheduler.has_work, "requests are left, but no step is possible"

    def end_copies(self) -> bool:
        """One save and one load end; False when there was none."""
        copying = self.executor.has_copies
        self.executor.end_save()
        self.executor.end_load()
        return copying

    def _settle(self) -> None:
        self.scheduler.check()
        for frontend, outputs in self.scheduler.take_outputs().items():
            for output in outputs:
                self._receive(frontend, output)

    def _receive(self, frontend: int, output: Tokens | Refused) -> None:
        request_id = output.request_id
        assert self.submitted[request_id].frontend == frontend
        assert request_id not in self.ended, f"{request_id} ended twice, or spoke after its end"
        messages = self.messages.setdefault(request_id, [])
        messages.append(output)
        if isinstance(output, Refused):
            self.ended[request_id] = output
            return
        first = len(messages) == 1 and output.finish != "abort"
        assert (output.cached_tokens is not None) == first
        self.tokens.setdefault(request_id, []).extend(output.token_ids)
        if output.finish is not None:
            self.ended[request_id] = output

    def expected(self, request_id: str) -> list[int]:
        submit = self.submitted[request_id]
        return expected_output(unpack(submit.token_ids), submit.sampling, self.config.vocab_size)

    def stats(self) -> Stats:
        return self.scheduler.stats(EngineState.READY, 0, None)

    def cached_tokens(self, request_id: str) -> int:
        first = self.messages[request_id][0]
        assert isinstance(first, Tokens)
        assert first.cached_tokens is not None
        return first.cached_tokens
