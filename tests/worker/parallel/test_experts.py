"""Experts over real processes and Gloo: a part of each on every rank, or whole ones on each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixgrove.protocol.model.config import ModelError
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.parallel.experts import ExpertPlacement
from radixgrove.worker.parallel.group import Shard
from radixgrove.worker.runtime import Runtime
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import Driver, greedy
from tests.worker.models import mxfp4
from tests.worker.parallel.ranks import leading, run_group, settings

# Long and short ones; each is cut into chunks, and all are decoded together.
PROMPTS = tiny.prompts()[2:6]
TOKENS = 12


def lead(directories: list[str]) -> None:
    """Rank 0's process: prints what the group of each directory says, one after the other."""
    texts = []
    for directory in directories:
        executor = leading(Path(directory))
        results = Driver(executor).generate(PROMPTS, greedy(TOKENS), chunk=20)
        texts.append([result.tokens for result in results])
        executor.close()
    print(json.dumps(texts))


def test_two_ranks_say_what_transformers_says(tmp_path: Path) -> None:
    """Every family, with its experts' width and with whole experts on each rank; one pair of
    processes for all of them, since their start takes longer than all else."""
    expected, directories = [], []
    for kind in tiny.MIXTURES:
        model = tiny.save(kind, tmp_path / kind)
        for ep in (1, 2):
            directory = tmp_path / f"{kind}-{ep}"
            directory.mkdir()
            Runtime(directory, settings(2, ep=ep), tmp_path / kind).write()
            directories.append(directory)
            expected.append(reference.greedy(model, PROMPTS, TOKENS))
    # Two ranks may share the width of experts in four bits where that leaves each whole blocks.
    model = tiny.save("gpt-oss", tmp_path / "mxfp4", intermediate_size=128)
    mxfp4.quantize(tmp_path / "mxfp4", model)
    for ep in (1, 2):
        directory = tmp_path / f"mxfp4-{ep}"
        directory.mkdir()
        Runtime(directory, settings(2, ep=ep), tmp_path / "mxfp4").write()
        directories.append(directory)
        expected.append(reference.greedy(model, PROMPTS, TOKENS))
    first, *more = directories
    answers = json.loads(run_group(first, 2, lead, more=tuple(more)))
    for directory, texts, wanted in zip(directories, answers, expected, strict=True):
        assert texts == wanted, directory


@pytest.mark.parametrize(
    ("kind", "tp", "ep", "named"),
    [
        ("qwen3-moe", 2, 3, r"ep 3 does not divide the group's tp 2 and the model's 8 experts; "),
        ("qwen3-moe", 1, 2, r"possible: 1$"),
        ("llama", 2, 2, "ep 2 is for models with experts, and this one has none"),
        (
            "mixtral",
            4,
            1,
            r"tp 4 does not divide .* 2 KV heads and expert width 96; possible: 1, 2",
        ),
    ],
)
def test_what_does_not_divide_names_what_does(
    kind: str, tp: int, ep: int, named: str, tmp_path: Path
) -> None:
    tiny.save(kind, tmp_path)
    with pytest.raises(ModelError, match=named):
        build_executor(settings(tp, ep=ep), tmp_path, lambda phase: None)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (4, 2), (4, 4), (8, 2)])
def test_every_expert_is_computed_once_whole(tp: int, ep: int) -> None:
    experts, width = 8, 16
    placement = ExpertPlacement.even(experts, ep)
    computed: dict[int, list[int]] = {expert: [] for expert in range(experts)}
    for rank in range(tp):
        group, shard = placement.group_of(Shard(rank, tp))
        start, length = shard.split(width)
        held = placement.held(group)
        for expert, place in enumerate(placement.places(group)):
            if place >= 0:
                assert held[place] == expert
                computed[expert] += range(start, start + length)
    assert all(sorted(columns) == list(range(width)) for columns in computed.values())


def test_of_a_redundant_copy_one_is_computed() -> None:
    """Experts 0 to 2, and a copy of 1, over two groups."""
    placement = ExpertPlacement((0, 1, 1, 2), groups=2)
    assert [placement.held(group) for group in (0, 1)] == [(0, 1), (1, 2)]
    assert [placement.places(group) for group in (0, 1)] == [[0, 1, -1], [-1, -1, 1]]
