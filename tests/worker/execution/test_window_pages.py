"""Layers with a window keep the pages of windows alone, and texts are what they were.

Window pages are given in any order, and again to other rows as soon as a window has passed them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixgrove.protocol.settings import KVDType
from radixgrove.worker.execution.assembly import LoadedModel
from radixgrove.worker.execution.runner import Runner
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import Driver, Generated, cpu_runner, greedy
from tests.worker.execution.test_stage_graphs import Pipeline

HYBRIDS = ("gemma3", "gpt-oss", "qwen2-window")
PROMPTS = tiny.prompts()[2:]


def make_runner(directory: Path, **settings: object) -> Runner:
    runner = cpu_runner(directory, page_size=8, max_step_tokens=64, **settings)
    assert 0 < runner.info.num_window_pages < runner.info.num_pages // 2
    return runner


def assert_shared(driver: Driver) -> None:
    """Window pages of one row were another's before."""
    owners: dict[int, set[int]] = {}
    for row, _, page in driver.given:
        owners.setdefault(page, set()).add(row)
    assert max(map(len, owners.values())) > 1


def texts(results: list[Generated]) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_texts_and_logprobs_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny.save(kind, tmp_path)
    driver = Driver(make_runner(tmp_path))
    results = driver.generate(PROMPTS, greedy(24, logprobs=0), chunk=50)
    assert_shared(driver)
    assert sorted(driver.free_window_pages) == list(range(driver.executor.info.num_window_pages))
    for prompt, result in zip(PROMPTS, results, strict=True):
        rows = reference.logprobs(model, prompt + result.tokens)[len(prompt) - 1 : -1]
        assert result.tokens == rows.argmax(-1).tolist()
        got = torch.tensor([entry.logprob for entry in result.logprobs])
        torch.testing.assert_close(got, rows.amax(-1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_static_buffers_of_captured_steps_hold_both_tables(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    exact = Driver(make_runner(tmp_path)).generate(PROMPTS, greedy(24), chunk=6)
    runner = make_runner(tmp_path)
    graphs = runner.capture([4, 8], lambda text, done: None)
    mixed = runner.capture_mixed([16, 40, 64], lambda text, done: None)
    driver = Driver(runner)
    assert texts(driver.generate(PROMPTS, greedy(24), chunk=6)) == texts(exact)
    assert graphs.replays
    assert mixed.replays
    assert_shared(driver)


def test_a_cached_prefix_comes_with_the_pages_of_its_last_window(tmp_path: Path) -> None:
    model = tiny.save("gemma3", tmp_path)
    expected = reference.greedy(model, PROMPTS, 12)
    driver = Driver(make_runner(tmp_path))
    driver.generate(PROMPTS, greedy(1), reuse=True)
    driver.given.clear()
    results = driver.generate(PROMPTS, greedy(12), chunk=7, reuse=True)
    assert texts(results) == expected
    cached = sum(result.cached for result in results) // driver.page_size
    assert cached > len(driver.given), "most pages of the prefixes are behind their windows"


def test_float8_pages_are_given_up_as_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save("gpt-oss", tmp_path)
    few = Driver(make_runner(tmp_path, kv_dtype=KVDType.FP8_E4M3)).generate(PROMPTS, greedy(16))
    monkeypatch.setattr(LoadedModel, "windows", None)
    all_kept = cpu_runner(tmp_path, page_size=8, kv_dtype=KVDType.FP8_E4M3)
    assert all_kept.info.num_window_pages == 0
    assert all_kept.info.window == 20
    assert texts(few) == texts(Driver(all_kept).generate(PROMPTS, greedy(16)))


@pytest.mark.parametrize(
    ("kind", "layers", "tables"),
    [("gemma3", 3, [True, True]), ("qwen2-window", 2, [False, True])],
    ids=["a stage of both kinds of layers, and one with windows", "a stage without, and one with"],
)
def test_stages_take_the_same_plans(
    kind: str, layers: int, tables: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": layers}
    if layers == 2:
        sizes["layer_types"] = ["full_attention", "sliding_attention"]
    tiny.save(kind, tmp_path, **sizes)
    pipeline = Pipeline(tmp_path, by_mail=True)
    stages = pipeline.first, pipeline.last
    assert len({stage.info.num_window_pages for stage in stages} - {0}) == 1
    assert [stage._table.window_pages is not None for stage in stages] == tables
    for stage in stages:
        stage.capture([4, 8], lambda text, done: None)
        stage.capture_mixed([64], lambda text, done: None)
    driver = Driver(pipeline)
    results = driver.generate(PROMPTS, greedy(16), chunk=10)
    assert driver.given
    monkeypatch.setattr(LoadedModel, "windows", None)
    assert texts(results) == texts(Driver(cpu_runner(tmp_path)).generate(PROMPTS, greedy(16)))


def test_a_host_tier_and_layers_of_one_kind_keep_all_pages(tmp_path: Path) -> None:
    tiny.save("gemma3", tmp_path / "hybrid")
    tiny.save("mistral-window", tmp_path / "windowed")
    runner = cpu_runner(tmp_path / "hybrid", max_step_tokens=64, host_cache_gib=0.01)
    assert (runner.info.num_window_pages, runner.info.window) == (0, 20)
    runner.close()
    runner = cpu_runner(tmp_path / "windowed", max_step_tokens=64)
    assert (runner.info.num_window_pages, runner.info.window) == (0, 20)
