"""Pipelines over real processes and Gloo: the same answers as one process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from radixgrove.worker.runtime import Runtime
from tests.worker.execution import tiny
from tests.worker.parallel.ranks import run_group, settings
from tests.worker.parallel.serve import Answer, Served, alone, follow_and_keep, lead, whole_pool

# A pool of so few tokens that ten requests of 100 do not fit, and a chunk's worth a step.
CROWDED = {"kv_tokens": 512, "max_step_tokens": 48, "max_model_len": 256}


def group(directory: Path, model_dir: Path, case: str, **changes: object) -> Served:
    directory.mkdir()
    group_settings = settings(**changes)  # type: ignore[arg-type]
    Runtime(directory, group_settings, model_dir).write()
    ranks = group_settings.tp * group_settings.pp
    printed = run_group(directory, ranks, lead, case, others=follow_and_keep)
    return msgspec.json.decode(printed, type=Served)


def assert_same(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert answers.keys() == expected.keys()
    for request_id, answer in answers.items():
        other = expected[request_id]
        assert answer.tokens == other.tokens, request_id
        assert (answer.end, answer.cached_tokens) == (other.end, other.cached_tokens), request_id
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4), request_id
        assert answer.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "tp", "pp"),
    [
        ("llama", 1, 2),
        ("llama3-rope", 1, 3),
        ("qwen3", 2, 2),
        ("qwen2", 1, 2),
        ("gemma3", 1, 2),
    ],
)
def test_stages_say_what_one_process_says(kind: str, tp: int, pp: int, tmp_path: Path) -> None:
    """Untied and tied, with and without norms of q and k; one layer a stage with three; a stage
    with two groups of layers before one with a window in all of its layers."""
    tiny.save(kind, tmp_path / "model")
    limits = {"max_step_tokens": 64, "compare_ranks": True}
    expected, pool = alone(settings(1, **limits), tmp_path / "model", "mixed")
    served = group(tmp_path / "run", tmp_path / "model", "mixed", tp=tp, pp=pp, **limits)
    assert_same(served.answers, expected.answers)
    assert served.most_in_flight == pp + 1
    assert any(answer.cached_tokens for answer in served.answers.values())
    # What is cached is the same, page by page, put together over the ranks.
    cached = served.pages.keys() & expected.pages.keys()
    assert len(cached) > 0.9 * len(expected.pages)
    whole = whole_pool(tmp_path / "run", tp, pp)
    for chain in cached:
        page, other = served.pages[chain], expected.pages[chain]
        torch.testing.assert_close(whole[:, :, page], pool[:, :, other], atol=1e-5, rtol=0)


def test_six_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    """At the demo model's heads, nine on three of keys and values."""
    tiny.save("llama", tmp_path / "model", **tiny.NINE_HEADS)
    assert_six_ranks_say_the_same(tmp_path / "model", tmp_path / "run")


@pytest.mark.slow
def test_six_ranks_of_the_demo_model_say_what_one_process_says(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    assert_six_ranks_say_the_same(demo_model_dir, tmp_path / "run")


def assert_six_ranks_say_the_same(model_dir: Path, directory: Path) -> None:
    """Three of each of two stages."""
    limits = {"max_step_tokens": 64, "max_model_len": 256}
    expected, _ = alone(settings(1, **limits), model_dir, "few")
    served = group(directory, model_dir, "few", tp=3, pp=2, **limits)
    assert_same(served.answers, expected.answers)
    assert any(answer.cached_tokens for answer in served.answers.values())


@pytest.mark.parametrize(("kind", "host_cache_gib"), [("llama", 0), ("gemma3", 0.01)])
def test_a_small_pool_preempts_and_evicts_and_says_the_same(
    kind: str, host_cache_gib: float, tmp_path: Path
) -> None:
    tiny.save(kind, tmp_path / "model")
    limits = {**CROWDED, "host_cache_gib": host_cache_gib}
    expected, _ = alone(settings(1, **limits), tmp_path / "model", "crowded")
    served = group(tmp_path / "run", tmp_path / "model", "crowded", tp=1, pp=2, **limits)
    for request_id, answer in served.answers.items():
        assert answer.tokens == expected.answers[request_id].tokens, request_id
    assert served.preemptions > 0
    assert served.evicted_pages > 0
    assert bool(served.loaded_pages) == (host_cache_gib > 0)
