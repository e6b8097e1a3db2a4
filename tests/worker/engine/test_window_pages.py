"""Scheduler and execution together: layers that keep windows alone change no text."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.execution.assembly import LoadedModel
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.messages import Submit
from tests.worker.execution import tiny
from tests.worker.execution.driver import greedy
from tests.worker.parallel.serve import Served, serve
from tests.worker.scheduler.harness import pack


def waves() -> list[list[Submit]]:
    """Prompts with a few beginnings in common, more than the windows that are kept."""
    random = Random(1)
    beginnings = [[random.randrange(1, 60) for _ in range(120)] for _ in range(3)]
    submits = []
    for index in range(18):
        beginning = random.choice(beginnings)[: random.choice([40, 96, 120])]
        prompt = beginning + [random.randrange(1, 60) for _ in range(random.randint(1, 20))]
        sampling = greedy(random.choice([1, 8, 30]))
        submits.append(
            Submit(
                request_id=f"r{index}",
                frontend=0,
                token_ids=pack(prompt),
                sampling=sampling,
                domain="local",
            )
        )
    return [submits[begin : begin + 6] for begin in range(0, 18, 6)]


def serve_all(directory: Path) -> tuple[Served, int]:
    """What comes of all waves, and how many window pages there were."""
    settings = WorkerSettings(
        device=Device.CPU,
        dtype=DType.FLOAT32,
        max_running=3,
        kv_tokens=2048,
        page_size=8,
        max_step_tokens=32,
    )
    runner = build_rank(settings, directory, lambda phase: None)[0]
    return serve(runner, settings, waves()), runner.info.num_window_pages


@pytest.mark.parametrize("kind", ["gemma3", "gpt-oss"])
def test_texts_are_those_of_layers_that_keep_all_pages(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(kind, tmp_path)
    windowed, window_pages = serve_all(tmp_path)
    monkeypatch.setattr(LoadedModel, "windows", None)
    whole, none = serve_all(tmp_path)
    assert 0 < window_pages < 60
    assert none == 0
    texts = {name: answer.tokens for name, answer in windowed.answers.items()}
    assert texts == {name: answer.tokens for name, answer in whole.answers.items()}
    found, all_there = (
        sum(answer.cached_tokens or 0 for answer in served.answers.values())
        for served in (windowed, whole)
    )
    assert 0 < found <= all_there
