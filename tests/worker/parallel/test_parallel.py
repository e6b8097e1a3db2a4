"""Tensor parallelism over real processes and Gloo: the same text as one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.parallel.crew import meet
from radixgrove.worker.parallel.rendezvous import RankMissing
from radixgrove.worker.runtime import Runtime
from tests.checkout import ROOT
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, greedy

_FOLLOW = (
    "import sys; from pathlib import Path\n"
    "from radixgrove.worker.engine.follower import run_follower\n"
    "sys.exit(run_follower(Path(sys.argv[1]), int(sys.argv[2])))"
)
# Rank 0 runs in a process too: a process can be in one group only.
_LEAD = (
    "import json, sys; from pathlib import Path\n"
    "from tests.worker.parallel.test_parallel import lead\n"
    "lead(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))"
)

_LEAD_AND_KILL = (
    "import os, signal, sys; from pathlib import Path\n"
    "from tests.worker.parallel.test_parallel import lead_then_kill\n"
    "lead_then_kill(Path(sys.argv[1]), int(sys.argv[2]))"
)


def lead(directory: Path, prompts: list[list[int]], tokens: int) -> None:
    """Rank 0's process: generate, print the text."""
    runtime = Runtime.load(directory)
    executor, _ = build_executor(
        runtime.settings, runtime.model_dir, lambda phase: None, runtime_dir=directory
    )
    results = Driver(executor).generate(prompts, greedy(tokens), chunk=20)
    apart = Driver(executor, apart=True).generate(prompts, greedy(tokens), chunk=20)
    odd_rows = frozenset(range(1, len(prompts), 2))
    masked = Driver(executor, apart=True, masked=odd_rows).generate(prompts, greedy(tokens))
    executor.close()
    texts = [result.tokens for result in results]
    assert texts == [result.tokens for result in apart]
    for row, result in enumerate(masked):
        assert all(token % 2 == 0 for token in result.tokens) or row not in odd_rows
    print(texts, [result.tokens for result in masked])


def settings(tp: int, **changes: object) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "device": Device.CPU,
            "dtype": DType.FLOAT32,
            "max_running": 8,
            "kv_tokens": 4096,
            "cpu_threads": 1,
            "tp": tp,
            **changes,
        }
    )


@contextmanager
def followers(directory: Path, ranks: int) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _FOLLOW, str(directory), str(rank)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def run_group(directory: Path, ranks: int, leader_script: str, *arguments: str) -> str:
    """What rank 0 prints, which runs the script on the directory; all ranks must end well."""
    with followers(directory, ranks) as processes:
        leader = subprocess.run(
            [sys.executable, "-c", leader_script, str(directory), *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert leader.returncode == 0, leader.stderr
        for process in processes:
            assert process.wait(30) == 0
    return leader.stdout


def generate(
    directory: Path, model_dir: Path, tp: int, prompts: list[list[int]], **changes: object
) -> str:
    directory.mkdir()
    group = settings(tp, **changes)
    Runtime(directory, group, model_dir).write()
    return run_group(directory, group.tp * group.pp, _LEAD, json.dumps(prompts), "24")


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [("llama", "auto"), ("qwen3", "auto"), ("llama-biased", "auto"), ("qwen3", "fp8_e4m3")],
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


def test_three_ranks_of_the_demo_model(
    demo_model_dir: Path, demo_prompts: list[list[int]], tmp_path: Path
) -> None:
    prompts = demo_prompts[:8]
    texts = [generate(tmp_path / f"tp{tp}", demo_model_dir, tp, prompts) for tp in (1, 3)]
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
    Runtime(directory, settings(2, step_timeout=1.0), tmp_path / "model").write()
    with followers(directory, 2) as processes:
        leader = subprocess.run(
            [sys.executable, "-c", _LEAD_AND_KILL, str(directory), str(processes[0].pid)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert leader.returncode == 1
    assert "RankMissing" in leader.stderr.splitlines()[-1]
    assert "rank 1" in leader.stderr.splitlines()[-1]


def lead_then_kill(directory: Path, victim: int) -> None:
    """Rank 0's process: one healthy request, then one after the other rank was killed."""
    runtime = Runtime.load(directory)
    executor, _ = build_executor(
        runtime.settings, runtime.model_dir, lambda phase: None, runtime_dir=directory
    )
    driver = Driver(executor)
    driver.generate([[1, 2, 3]], greedy(4))
    os.kill(victim, signal.SIGKILL)
    driver.generate([[1, 2, 3]], greedy(64))
