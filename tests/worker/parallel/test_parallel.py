"""Tensor parallelism over real processes and Gloo: the same text as one rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from radixgrove.protocol.model.config import ModelError
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.parallel import peer_memory
from radixgrove.worker.parallel.crew import meet
from radixgrove.worker.parallel.rendezvous import RankMissing
from radixgrove.worker.plan import StepResult
from radixgrove.worker.runtime import Runtime
from tests.forks import Fork
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, greedy
from tests.worker.parallel.ranks import follow, followers, generate, leading, settings


def test_only_the_first_engine_of_a_process_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "_groups_ended", False)
    assert peer_memory.is_possible([])
    peer_memory.end_groups()
    assert not peer_memory.is_possible([])


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [
        *((kind, "auto") for kind in ("llama", "qwen3", "llama-biased", *tiny.PARTS, "gemma3")),
        ("qwen3", "fp8_e4m3"),
    ],
)
def test_two_ranks_say_what_one_says(kind: str, kv_dtype: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path / "model")
    prompts = tiny.prompts()
    texts = [
        generate(tmp_path / f"tp{tp}", tmp_path / "model", tp, prompts, kv_dtype=kv_dtype)
        for tp in (1, 2)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 8 * 24


def test_three_ranks_say_what_one_says(tmp_path: Path) -> None:
    """At the demo model's heads, nine on three of keys and values: one of these for each rank.
    Under masks, too."""
    model_dir, prompts = tmp_path / "model", tiny.prompts()
    tiny.save("llama", model_dir, **tiny.NINE_HEADS)
    texts = [generate(tmp_path / f"tp{tp}", model_dir, tp, prompts, masked=True) for tp in (1, 3)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_three_ranks_of_the_demo_model(
    demo_model_dir: Path, demo_prompts: list[list[int]], tmp_path: Path
) -> None:
    prompts = demo_prompts[:4]
    texts = [generate(tmp_path / f"tp{tp}", demo_model_dir, tp, prompts, 12) for tp in (1, 3)]
    assert texts[0] == texts[1]


def test_a_tp_that_does_not_divide_names_those_that_do(demo_model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"tp 2 does not divide .* possible: 1, 3$"):
        build_executor(settings(2), demo_model_dir, lambda phase: None)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "model")
    with pytest.raises(RankMissing, match=r"rank 1, rank 2 did not join within 0 s"):
        meet(settings(3), tmp_path / "model", tmp_path, 0, arrival=0.2)


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "model")
    directory = tmp_path / "run"
    directory.mkdir()
    log = directory / "rank-0.log"
    Runtime(directory, settings(2, step_timeout=1.0), tmp_path / "model").write()
    with followers(directory, 2) as (follower,):
        leader = Fork(lead_then_kill, [str(directory), str(follower.pid)], log)
        try:
            assert leader.wait(120) == 1
        finally:
            leader.kill()
    last = log.read_text().splitlines()[-1]
    assert "RankMissing" in last
    assert "rank 1" in last


def test_a_rank_that_draws_other_tokens_is_named_with_the_step(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "model")
    directory = tmp_path / "run"
    directory.mkdir()
    log = directory / "rank-0.log"
    Runtime(directory, settings(2, compare_ranks=True), tmp_path / "model").write()
    with followers(directory, 2, main=follow_at_odds):
        leader = Fork(lead_for_long, [str(directory)], log)
        try:
            assert leader.wait(120) == 1
        finally:
            leader.kill()
    assert "in step 3 rank 1 drew other tokens" in log.read_text().splitlines()[-1]


def follow_at_odds(arguments: list[str]) -> None:
    """Another rank's process; in one step its sampler is at odds with the others'."""
    collect = Runner.collect

    def at_odds(runner: Runner) -> StepResult:
        result = collect(runner)
        if result.step_id == 3:
            result.tokens[0] += 1
        return result

    Runner.collect = at_odds  # type: ignore[method-assign]
    follow(arguments)


def lead_for_long(arguments: list[str]) -> None:
    """Rank 0's process: more steps than it takes to find out."""
    driver = Driver(leading(Path(*arguments)))
    while True:
        driver.generate([[1, 2, 3]], greedy(64))


def lead_then_kill(arguments: list[str]) -> None:
    """Rank 0's process: one healthy request, then one after the other rank was killed."""
    directory, victim = arguments
    driver = Driver(leading(Path(directory)))
    driver.generate([[1, 2, 3]], greedy(4))
    os.kill(int(victim), signal.SIGKILL)
    driver.generate([[1, 2, 3]], greedy(64))
