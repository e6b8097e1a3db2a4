"""Steps before the first request: they meet what requests will, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.execution.warmup import exercise, measure_prefill, rehearse_decodes
from radixgrove.worker.plan import StepPlan
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy


def make_runner(directory: Path, **changes: int) -> Runner:
    return cpu_runner(directory, **({"max_running": 12, "kv_tokens": 1024} | changes))


def plans_of_rehearsal(
    runner: Runner, max_step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> list[StepPlan]:
    plans: list[StepPlan] = []
    launch = runner.launch

    def noting(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    monkeypatch.setattr(runner, "launch", noting)
    rehearse_decodes(runner, max_step_tokens)
    monkeypatch.undo()
    return plans


@pytest.mark.parametrize("page_size", [1, 16])
def test_decodes_beside_a_chunk_behind_a_prefix_and_alone(
    page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save("qwen3", tmp_path)
    runner = make_runner(tmp_path, page_size=page_size)
    plans = plans_of_rehearsal(runner, 512, monkeypatch)
    for first, mixed, alone in zip(*(iter(plans),) * 3, strict=True):
        (chunk,) = mixed.prefills
        assert chunk.start == page_size
        assert not alone.prefills
        assert mixed.decodes == alone.decodes
        pages = [page for row in first.new_rows for page in row.pages]
        assert len(set(pages)) == len(pages)
        assert max(pages) < runner.info.num_pages

    prompts = tiny.prompts()[-3:]
    results = [Driver(r).generate(prompts, greedy(8)) for r in (runner, make_runner(tmp_path))]
    assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]]


def test_warm_up_writes_to_window_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token that it computes has a place that it may be written to."""
    tiny.save("gemma3", tmp_path)
    runner = make_runner(tmp_path, kv_tokens=4096, max_step_tokens=64)
    info = runner.info
    assert 0 < info.num_window_pages < info.num_pages
    written: list[StepPlan] = []
    monkeypatch.setattr(runner, "launch", written.append)
    monkeypatch.setattr(runner, "collect", lambda: None)
    exercise(runner, 64)
    measure_prefill(runner, 64, torch.device("cpu"))
    monkeypatch.undo()
    plans = [*written, *plans_of_rehearsal(runner, 64, monkeypatch)[:3]]
    held: dict[int, dict[int, int]] = {}
    for plan in plans:
        held |= {new.row: {} for new in plan.new_rows}
        for row, index, page in plan.window_pages:
            held[row][index] = page
        taken = [page for pages in held.values() for page in pages.values()]
        assert set(taken) <= set(range(info.num_window_pages))
        for chunk in plan.prefills:
            last = (chunk.start + chunk.length - 1) // info.page_size
            assert set(range(last + 1)) <= held[chunk.row].keys()
        assert all(held[row] for row in plan.decodes)


@pytest.mark.parametrize(
    ("rows", "decodes"), [(2, [1]), (12, [1, 11]), (65, [1, 16, 64]), (80, [1, 16, 64, 79])]
)
def test_decodes_of_few_rows_and_of_as_many_as_there_may_be(
    rows: int, decodes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that takes the projection of few rows only has to be compiled both ways."""
    tiny.save("llama", tmp_path)
    plans = plans_of_rehearsal(
        make_runner(tmp_path, max_running=rows, kv_tokens=2048), 512, monkeypatch
    )
    assert [len(plan.decodes) for plan in plans if not plan.prefills] == decodes
    assert [len(plan.decodes) for plan in plans if plan.prefills and plan.decodes] == decodes


@pytest.mark.parametrize(
    ("options", "max_step_tokens"),
    [({"max_running": 1}, 512), ({"kv_tokens": 32, "max_model_len": 32}, 512), ({}, 16)],
    ids=["one row", "two pages", "few tokens"],
)
def test_nothing_where_there_is_no_room(
    options: dict[str, int],
    max_step_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny.save("llama", tmp_path)
    runner = make_runner(tmp_path, **options)
    assert plans_of_rehearsal(runner, max_step_tokens, monkeypatch) == []
