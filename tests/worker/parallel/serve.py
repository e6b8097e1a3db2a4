"""Requests through a scheduler and an executor, without HTTP: what a group and one process say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.messages import EngineState, Submit, TokenLogprobs, Tokens
from radixgrove.worker.plan import Executor
from radixgrove.worker.runtime import Runtime
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.scheduler import Scheduler
from tests.worker.execution import tiny
from tests.worker.parallel.ranks import follow, leading


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    cached_tokens: int | None = None
    end: str = ""


@dataclass
class Served:
    answers: dict[str, Answer] = field(default_factory=dict)
    preemptions: int = 0
    evicted_pages: int = 0
    loaded_pages: int = 0
    most_in_flight: int = 0
    pages: dict[str, int] = field(default_factory=dict)  # by the cached tokens up to their end


def serve(executor: Executor, settings: WorkerSettings, waves: list[list[Submit]]) -> Served:
    """Wave after wave to its end; the books are checked after every step."""
    config = SchedulerConfig.resolve(settings, executor.info, on_cpu=True)
    scheduler = Scheduler(config)
    served = Served()
    for wave in waves:
        for submit in wave:
            served.answers[submit.request_id] = Answer()
            scheduler.submit(submit, 0.0)
        _run(scheduler, executor, served)
    stats = scheduler.stats(EngineState.READY, 0, None)
    served.preemptions, served.evicted_pages = stats.preemptions, stats.evicted_pages
    served.loaded_pages = stats.loaded_pages
    served.pages = _cached_pages(scheduler)
    return served


def _cached_pages(scheduler: Scheduler) -> dict[str, int]:
    found = {}
    for node in scheduler.memory.tree.nodes():
        before, above = b"", node.parent
        while above is not None:
            before, above = above.key + before, above.parent
        each = len(node.key) // max(1, node.size)
        for index, page in enumerate(node.pages):
            found[(before + node.key[: (index + 1) * each]).hex()] = page
    return found


def _run(scheduler: Scheduler, executor: Executor, served: Served) -> None:
    while scheduler.has_work or scheduler.copies_in_flight:
        while scheduler.in_flight < executor.info.depth:
            scheduler.copies_ended(*executor.copies_ended())
            plan = scheduler.schedule(0.0)
            if plan is None:
                break
            executor.launch(plan)
            served.most_in_flight = max(served.most_in_flight, scheduler.in_flight)
        if scheduler.in_flight:
            scheduler.complete(executor.collect())
        scheduler.check()
        _take(scheduler, served)


def _take(scheduler: Scheduler, served: Served) -> None:
    for output in scheduler.take_outputs().get(0, []):
        answer = served.answers[output.request_id]
        if not isinstance(output, Tokens):
            answer.end = output.detail
            continue
        answer.tokens += output.token_ids
        answer.logprobs += [entry.logprob for entry in output.logprobs or []]
        answer.prompt_logprobs += [_value(entry) for entry in output.prompt_logprobs or []]
        if output.cached_tokens is not None:
            answer.cached_tokens = output.cached_tokens
        if output.finish is not None:
            answer.end = output.finish.value
        # What a client would do that has enough of it.
        if output.request_id.startswith("abort") and len(answer.tokens) >= 5:
            scheduler.abort(output.request_id)


def _value(entry: TokenLogprobs | None) -> float | None:
    return None if entry is None else entry.logprob


def submit(request_id: str, prompt: list[int], max_tokens: int = 12, **sampling: Any) -> Submit:
    params = {"seed": len(prompt), "temperature": 0.0, "logprobs": 0} | sampling
    return Submit(
        request_id=request_id,
        frontend=0,
        token_ids=np.array(prompt, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, **params),
        domain="public",
    )


def mixed() -> list[list[Submit]]:
    """Everything a request may ask for; then prefixes of the first wave again."""
    prompts = tiny.prompts()
    first = [submit(f"greedy-{i}", prompt) for i, prompt in enumerate(prompts)]
    first += [
        submit("seeded", prompts[3], seed=11, temperature=0.9),
        submit("n-0", prompts[5], seed=5, temperature=0.9, top_k=20),
        submit("n-1", prompts[5], seed=6, temperature=0.9, top_p=0.8),
        submit("penalties", prompts[4], repetition_penalty=1.3, frequency_penalty=0.5),
        submit("early", prompts[2], min_tokens=4, stop_token_ids=tuple(range(256))),
        submit("echo", prompts[6], prompt_logprobs=0),
        submit("abort", prompts[6], 200),
    ]
    again = [submit(f"again-{i}", [*prompt, 7, 7, 7]) for i, prompt in enumerate(prompts)]
    return [first, again]


def crowded() -> list[list[Submit]]:
    """More than the pool holds: rows are preempted, cached pages evicted; then the first again."""
    prompts = [[(31 * i + j) % tiny.VOCAB for j in range(40)] for i in range(10)]
    first = [submit(f"crowd-{i}", prompt, 60) for i, prompt in enumerate(prompts)]
    return [first, [submit(f"again-{i}", p) for i, p in enumerate(prompts)]]


def few() -> list[list[Submit]]:
    """Little of everything, for a model that takes its time."""
    prompts = tiny.prompts()
    first = [
        submit("chunked", prompts[6], 6, prompt_logprobs=0),
        submit("seeded", prompts[3], 6, seed=11, temperature=0.9),
        submit("penalties", prompts[4], 6, repetition_penalty=1.3, frequency_penalty=0.5),
    ]
    return [first, [submit("again", [*prompts[6], 7, 7], 6)]]


CASES = {"mixed": mixed, "crowded": crowded, "few": few}


def whole_pool(directory: Path, tp: int, pp: int) -> Tensor:
    """What the ranks of a group have left, put together."""
    pools = [torch.load(_pool_file(directory, rank)) for rank in range(tp * pp)]
    stages = [torch.cat(pools[first : first + tp], dim=-2) for first in range(0, len(pools), tp)]
    return torch.cat(stages)


def pages_of(runner: Runner) -> Tensor:
    """[layers, 2, pages, page_size, KV, D], of the stage's layers that keep all pages."""
    layers, count = runner._attention.pages, runner.info.num_pages + 1
    whole = [pages for pages in layers if pages.shape[1] == count]
    nothing = layers[0].new_empty(0, 2, count, *layers[0].shape[2:])
    return torch.stack(whole) if whole else nothing


def _pool_file(directory: Path, rank: int) -> Path:
    return directory / f"pool-{rank}.pt"


def _keep_pool(directory: Path, rank: int) -> None:
    """Let this process leave its pool in the directory when it closes its runner."""
    close = Runner.close

    def keep(runner: Runner) -> None:
        torch.save(pages_of(runner), _pool_file(directory, rank))
        close(runner)

    Runner.close = keep  # type: ignore[method-assign]


def follow_and_keep(arguments: list[str]) -> None:
    """As `follow`, of one group; it leaves its pool in the directory."""
    rank, directory = arguments
    _keep_pool(Path(directory), int(rank))
    follow(arguments)


def lead(arguments: list[str]) -> None:
    """Rank 0's process: prints what it served, and leaves its pool in the directory."""
    directory, case = arguments
    _keep_pool(Path(directory), 0)
    executor = leading(Path(directory))
    try:
        served = serve(executor, Runtime.load(Path(directory)).settings, CASES[case]())
    finally:
        executor.close()
    print(msgspec.json.encode(served).decode())


def alone(settings: WorkerSettings, model_dir: Path, case: str) -> tuple[Served, Tensor]:
    """What one process says, and its pool."""
    executor, _ = build_executor(settings, model_dir, lambda phase: None)
    assert isinstance(executor, Runner)
    try:
        return serve(executor, settings, CASES[case]()), pages_of(executor)
    finally:
        executor.close()
