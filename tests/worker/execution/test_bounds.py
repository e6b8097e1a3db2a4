"""Steps of several tokens a row on the CPU's runner, under the scheduler: what is proposed changes
how many tokens come at once, and never which.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.messages import Submit, TokenLogprobs, Tokens
from radixgrove.worker.plan import StepPlan
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.scheduler import Scheduler
from tests.worker.execution import tiny
from tests.worker.execution.driver import cpu_runner

K = 4
# Given a prompt, its whole text and how many tokens of both are known: what is proposed next.
Propose = Callable[[list[int], int], list[int]]


def params(i: int) -> SamplingParams:
    """Greedy, random, filtered, with a penalty, with a least length; each with logprobs or not."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "logprobs": 0},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 40},
        {"temperature": 0.7, "repetition_penalty": 1.3, "logprobs": 1},
        {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(256))},
        {"temperature": 0.8, "stop_token_ids": tuple(range(0, 512, 16))},
    ]
    return SamplingParams(max_tokens=24, seed=i, **kinds[i % len(kinds)])  # type: ignore[arg-type]


class Engine:
    """A scheduler and a runner of up to `k` tokens a row and step, one step at a time."""

    def __init__(self, directory: Path, k: int, propose: Propose | None = None) -> None:
        runner = cpu_runner(directory, max_model_len=160, cpu_threads=1)
        runner._info = msgspec.structs.replace(runner.info, max_row_tokens=k)
        self.runner, self._propose = runner, propose
        info = runner.info
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=info.num_pages,
                page_size=info.page_size,
                max_rows=info.max_rows,
                max_running=info.max_rows,
                max_model_len=info.max_model_len,
                max_step_tokens=64,
                vocab_size=info.vocab_size,
                max_row_tokens=info.max_row_tokens,
            )
        )
        self.steps = 0
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self._prompts: dict[bytes, int] = {}
        self._rows: dict[int, int] = {}  # row -> prompt

    def run(
        self,
        prompts: list[list[int]],
        sampling: Callable[[int], SamplingParams],
        texts: list[list[int]],
    ) -> list[list[int]]:
        """Each prompt's text. `texts` are what the proposals are made of."""
        for index, prompt in enumerate(prompts):
            token_ids = np.array(prompt, dtype="<i4").tobytes()
            self._prompts[token_ids] = index
            submit = Submit(
                request_id=str(index),
                frontend=0,
                token_ids=token_ids,
                sampling=sampling(index),
                domain="local",
            )
            self.scheduler.submit(submit, 0.0)
        while self.scheduler.has_work:
            plan = self.scheduler.schedule(0.0)
            assert plan is not None
            self._write_proposals(plan, prompts, texts)
            self.runner.launch(plan)
            self.scheduler.complete(self.runner.collect())
            self.scheduler.check()
            self.steps += 1
            for output in self.scheduler.take_outputs().get(0, []):
                assert isinstance(output, Tokens), output
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
        return [self.tokens[str(index)] for index in range(len(prompts))]

    def _write_proposals(
        self, plan: StepPlan, prompts: list[list[int]], texts: list[list[int]]
    ) -> None:
        self._rows.update((new.row, self._prompts[new.token_ids]) for new in plan.new_rows)
        if self._propose is None:
            return
        for row in plan.decodes:
            index = self._rows[row]
            known = int(self.runner._table.lens[row])
            proposed = self._propose(prompts[index] + texts[index], known)
            for place, token in enumerate(proposed[: K - 1]):
                self.runner._table.tokens[row, known + place] = token


def right(text: list[int], known: int) -> list[int]:
    return text[known : known + K - 1]


def often_wrong(text: list[int], known: int) -> list[int]:
    """The place of the first wrong token is another each time."""
    proposed = right(text, known)
    wrong = known % K
    return [token ^ 1 if place == wrong else token for place, token in enumerate(proposed)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny.save("qwen3", directory)
    return directory


@pytest.fixture(scope="module")
def plain(model: Path) -> Engine:
    """One token a row and step."""
    engine = Engine(model, 1)
    engine.run(tiny.prompts(), params, [])
    return engine


@pytest.mark.parametrize("propose", [None, often_wrong])
def test_the_text_is_that_of_one_token_a_step(
    model: Path, plain: Engine, propose: Propose | None
) -> None:
    prompts = tiny.prompts()
    texts = [plain.tokens[str(index)] for index in range(len(prompts))]
    engine = Engine(model, K, propose)
    assert engine.run(prompts, params, texts) == texts
    for request_id, entries in plain.logprobs.items():
        assert [entry.logprob for entry in engine.logprobs[request_id]] == pytest.approx(
            [entry.logprob for entry in entries], abs=1e-4
        )
        assert len(engine.logprobs[request_id]) in (0, len(engine.tokens[request_id]))


def test_right_proposals_save_steps(model: Path) -> None:
    prompts = [tiny.prompts()[3]]

    def greedy(_: int) -> SamplingParams:
        return SamplingParams(max_tokens=25, seed=0, temperature=0.0)

    slow = Engine(model, 1)
    texts = slow.run(prompts, greedy, [])
    assert slow.steps == 25
    fast = Engine(model, K, right)
    assert fast.run(prompts, greedy, texts) == texts
    assert fast.steps == 1 + 24 // K  # one token of the prefill, then four a step


def test_exact_lengths_are_needed_to_plan_attention(model: Path) -> None:
    runner = cpu_runner(model)
    info = msgspec.structs.replace(runner.info, max_row_tokens=2, depth=2)
    with pytest.raises(ValueError, match="exact lengths"):
        Runner(runner._model, runner._attention, runner._table, info, 1.0)
