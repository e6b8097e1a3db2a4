"""Forward and sampling of a step, called apart: the same tokens as a launch, and room between."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.plan import PrefillChunk, StepPlan
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy
from tests.worker.execution.test_decode_graphs import SIZES, params


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny.save("llama", directory)
    return directory


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_in_two_parts_says_what_a_launch_says(model: Path, graphs: bool) -> None:
    texts = []
    for apart in (False, True):
        runner = cpu_runner(model)
        if graphs:
            runner.capture(SIZES, lambda text, done: None)
        results = Driver(runner, apart=apart).generate(tiny.prompts(), params, chunk=20)
        texts.append([result.tokens for result in results])
    assert texts[0] == texts[1]
    assert sum(map(len, texts[0])) == sum(params(i).max_tokens for i in range(8))


def started(model: Path, depth: int) -> tuple[Runner, StepPlan]:
    """A runner with one row prefilled, and the plan of its first decode."""
    runner = cpu_runner(model)
    runner._info = msgspec.structs.replace(runner.info, depth=depth)
    driver = Driver(runner)
    request = driver._enter([1, 2, 3], greedy(4), reuse=False)
    plan = StepPlan(step_id=1, new_rows=[driver._new_row(request)])
    driver._grow(request, 8, plan)
    plan.prefills.append(PrefillChunk(request.row, 0, 3, True))
    runner.launch(plan)
    return runner, StepPlan(step_id=2, decodes=[request.row])


def test_the_step_before_is_collected_between_the_parts(model: Path) -> None:
    runner, plan = started(model, depth=2)
    runner.forward(plan)
    first = runner.collect()
    assert first.step_id == 1
    runner.sample()
    second = runner.collect()
    assert (second.step_id, len(second.tokens)) == (2, 1)
    together, plan = started(model, depth=2)
    together.launch(plan)
    assert together.collect().tokens == first.tokens
    assert together.collect().tokens == second.tokens


def test_nothing_goes_on_before_a_step_is_sampled(model: Path) -> None:
    runner, plan = started(model, depth=2)
    runner.forward(plan)
    with pytest.raises(RuntimeError, match="step 2 is not sampled yet"):
        runner.forward(StepPlan(step_id=3, decodes=plan.decodes))
    runner.sample()
    with pytest.raises(RuntimeError, match="no step to sample"):
        runner.sample()
