"""Rank 0's executor when there are several ranks: it sends each order on, then runs its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from radixgrove.worker.engine.agreement import plan_digest, samples_digest
from radixgrove.worker.engine.group_links import LeaderLinks
from radixgrove.worker.engine.orders import Compared, Forward, Launch, Returned, Sample
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.parallel.member import leave
from radixgrove.worker.parallel.rendezvous import RankMissing
from radixgrove.worker.plan import ExecutorInfo, StepPlan, StepResult


class GroupExecutor:
    """An `Executor` over all ranks of a group; a step that fails names the rank to blame.

    In a pipeline the last stage has the results. Unless it sends what it sampled to the stages
    itself, that goes out with the next order: no row is decoded again before its token has been
    collected here.
    """

    def __init__(
        self,
        runner: Runner,
        links: LeaderLinks,
        allowance: Callable[[int], float],
        *,
        compare: bool = False,
    ) -> None:
        """
        Args:
            allowance: seconds that a step of so many tokens may take.
            compare: with what other ranks run and draw.
        """
        self._runner = runner
        self._links = links
        self._allowance = allowance
        self._in_pipeline = runner.member.stages > 1
        self._masks: NDArray[np.int32] | None = None  # of the step that is yet to be sampled
        self._sampled_rows: deque[list[int]] = deque()  # of steps in a pipeline
        self._returned: list[Returned] = []
        self._plans: deque[bytes] | None = deque() if compare else None  # digests, of steps
        warmed_up = runner.steps_ended
        links.steps_ended = lambda: runner.steps_ended - warmed_up
        links.serving = True

    @property
    def info(self) -> ExecutorInfo:
        return self._runner.info

    def launch(self, plan: StepPlan) -> None:
        self._start(Launch(plan, self._take_returned()), self._runner.launch)

    def forward(self, plan: StepPlan) -> None:
        self._start(Forward(plan, self._take_returned()), self._runner.forward)

    def _start(self, order: Launch | Forward, run: Callable[[StepPlan], None]) -> None:
        plan = order.plan
        self._links.launched(self._allowance(plan.num_tokens))
        self._links.send(order)  # first of all: the other ranks begin beside this one
        with self._blaming():
            for each in order.returned:
                self._runner.take_back(each.rows, each.tokens)
            run(plan)
        if self._in_pipeline:
            self._sampled_rows.append(plan.sampled_rows())
        if self._plans is not None:
            self._plans.append(plan_digest(plan))

    def masks(self, count: int, words: int) -> NDArray[np.int32]:
        self._masks = self._runner.masks(count, words)
        return self._masks

    def sample(self, masked: Sequence[int] = ()) -> None:
        masks = self._masks.tobytes() if masked and self._masks is not None else b""
        self._links.send(Sample(list(masked), masks))
        with self._blaming():
            self._runner.sample(masked)

    def _take_returned(self) -> list[Returned]:
        """Tokens that stages before the last are to know from here on."""
        returned, self._returned = self._returned, []
        return returned

    def collect(self) -> StepResult:
        try:
            result = self._runner.collect()
        except RuntimeError as error:
            raise self._links.blame(error) from error
        if self._in_pipeline:
            rows = self._sampled_rows.popleft()
            result = self._links.await_result()
            if rows and not self._runner.info.run_ahead:
                self._returned.append(Returned(rows, result.tokens))
        if self._plans is not None:
            self._compare(self._plans.popleft(), result)
        self._links.collected()
        return result

    def _compare(self, plan: bytes, result: StepResult) -> None:
        agreement = self._links.agreement
        agreement.expect(Compared(result.step_id, plan, samples_digest(result.tokens)))
        if agreement.difference is not None:
            raise RankMissing(agreement.difference)

    def copies_ended(self) -> tuple[int, int]:
        return self._runner.copies_ended()

    def expert_tokens(self) -> NDArray[np.int64] | None:
        return self._runner.expert_tokens()

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._links.blame(error) from error
        self._links.carried_out()

    def close(self) -> None:
        """End the other ranks, then this one's part."""
        self._links.close()
        self._runner.close()
        leave()
