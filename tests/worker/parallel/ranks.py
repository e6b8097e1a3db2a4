"""The ranks of a group as processes of their own: forks of one that has imported torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.engine.follower import run_follower
from radixgrove.worker.plan import Executor
from radixgrove.worker.runtime import Runtime
from tests.forks import Fork, Main
from tests.worker.execution.driver import Driver, greedy


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


def leading(directory: Path) -> Executor:
    """Of rank 0, once the others have joined it."""
    runtime = Runtime.load(directory)
    executor, _ = build_executor(
        runtime.settings, runtime.model_dir, lambda phase: None, runtime_dir=directory
    )
    return executor


def follow(arguments: list[str]) -> None:
    """Another rank's process: its number, then the directory of every group that it is in, one
    after the other."""
    rank, *directories = arguments
    sys.exit(max(run_follower(Path(directory), int(rank)) for directory in directories))


@contextmanager
def followers(
    directory: Path, ranks: int, *more: Path, main: Main = follow
) -> Iterator[list[Fork]]:
    """Ranks 1 and up, of the group in `directory` and then of `more`."""
    directories = [str(each) for each in (directory, *more)]
    processes = [
        Fork(main, [str(rank), *directories], directory / f"rank-{rank}.log")
        for rank in range(1, ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_group(
    directory: Path,
    ranks: int,
    lead: Main,
    *arguments: str,
    more: tuple[Path, ...] = (),
    others: Main = follow,
) -> str:
    """What rank 0 prints, which is `lead` of the directories and the arguments; all ranks must end
    well. (Rank 0 has a process, too: a process can be in one group only.)"""
    log = directory / "rank-0.log"
    with followers(directory, ranks, *more, main=others) as processes:
        leader = Fork(lead, [str(directory), *map(str, more), *arguments], log)
        try:
            assert leader.wait(240) == 0, log.read_text()
        finally:
            leader.kill()
        for process in processes:
            assert process.wait(30) == 0
    return log.read_text().rstrip().rpartition("\n")[2]


def generate(
    directory: Path,
    model_dir: Path,
    tp: int,
    prompts: list[list[int]],
    tokens: int = 24,
    *,
    masked: bool = False,
    **changes: object,
) -> str:
    """What a group of its own says, as `texts_of`."""
    directory.mkdir()
    group = settings(tp, **changes)
    Runtime(directory, group, model_dir).write()
    ranks = group.tp * group.pp
    if ranks == 1:
        return texts_of(leading(directory), prompts, tokens, masked)
    return run_group(directory, ranks, _print_texts, json.dumps([prompts, tokens, masked]))


def _print_texts(arguments: list[str]) -> None:
    directory, asked = arguments
    print(texts_of(leading(Path(directory)), *json.loads(asked)))


def texts_of(executor: Executor, prompts: list[list[int]], tokens: int, masked: bool) -> str:
    """Greedy answers; `masked`: and those of a second run, with every other row under masks."""
    results = Driver(executor).generate(prompts, greedy(tokens), chunk=20)
    texts = [result.tokens for result in results]
    if not masked:
        executor.close()
        return str(texts)
    apart = Driver(executor, apart=True).generate(prompts, greedy(tokens), chunk=20)
    odd_rows = frozenset(range(1, len(prompts), 2))
    others = Driver(executor, apart=True, masked=odd_rows).generate(prompts, greedy(tokens))
    executor.close()
    assert texts == [result.tokens for result in apart]
    for row, result in enumerate(others):
        assert all(token % 2 == 0 for token in result.tokens) or row not in odd_rows
    return f"{texts} {[result.tokens for result in others]}"
