"""Drives an executor without a scheduler: rows and pages are handed out in order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.messages import TokenLogprobs
from radixgrove.worker.plan import Executor, NewRow, PrefillChunk, StepPlan

EVEN = 0x55555555  # of a mask's word


def cpu_runner(directory: Path, **settings: object) -> Runner:
    """The runner of a model directory, in float32 by default."""
    options = {"dtype": DType.FLOAT32, "max_running": 10, "kv_tokens": 4096} | settings
    worker = WorkerSettings(device=Device.CPU, **options)  # type: ignore[arg-type]
    return build_rank(worker, directory, lambda phase: None)[0]


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **changes)  # type: ignore[arg-type]


@dataclass
class Generated:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    chunks: int = 0
    cached: int = 0


@dataclass
class _Request:
    row: int
    prompt: list[int]
    sampling: SamplingParams
    pages: list[int]
    computed: int
    result: Generated
    reuse: bool
    window_pages: dict[int, int]  # by their places in `pages`

    @property
    def prefilled(self) -> bool:
        return self.computed >= len(self.prompt)

    @property
    def done(self) -> bool:
        return len(self.result.tokens) >= self.sampling.max_tokens


class Driver:
    """Runs prompts to `max_tokens` (stop tokens do not end them), all of them at once.

    Steps follow the contract with `depth` of them in flight: a decode is planned before the
    previous step's token is known. With `apart`, each step's two parts are called one by one, and
    rows in `masked` sample under a mask of even tokens.

    Where the executor has window pages, a row has those that its next step writes or reads; what
    lies behind its window others get at once, in any order.
    """

    def __init__(
        self, executor: Executor, *, apart: bool = False, masked: frozenset[int] = frozenset()
    ) -> None:
        self.executor = executor
        self._apart = apart
        self._masked = masked
        self.page_size = executor.info.page_size
        self.free_rows = list(range(executor.info.max_rows))
        self.free_pages = list(range(executor.info.num_pages))
        self.step_id = 0
        self.cached: dict[tuple[int, ...], int] = {}  # prefix that ends with a page -> the page
        self.free_window_pages = list(range(executor.info.num_window_pages))
        random.Random(0).shuffle(self.free_window_pages)
        self.kept: dict[int, int] = {}  # window pages of pages of prompts, which may be reused
        self.given: list[tuple[int, int, int]] = []  # as in plans

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Callable[[int], SamplingParams],
        *,
        chunk: int = 1 << 30,
        reuse: bool = False,
    ) -> list[Generated]:
        """Results in the order of `prompts`; `reuse` takes whole pages of earlier prompts."""
        requests = [
            self._enter(list(prompt), sampling(i) if callable(sampling) else sampling, reuse)
            for i, prompt in enumerate(prompts)
        ]
        new = [self._new_row(request) for request in requests]
        flying: list[tuple[StepPlan, list[_Request], list[int]]] = []
        planned = {request.row: 0 for request in requests}
        while True:
            while len(flying) < self.executor.info.depth:
                step = self._plan(requests, planned, chunk, new)
                if step is None:
                    break
                new = []
                self._launch(step[0])
                flying.append(step)
            if not flying:
                break
            _, sampled, passed = flying.pop(0)
            self._collect(sampled, {request.row: request for request in requests})
            self.free_window_pages += passed
        self._leave(requests, reuse)
        return [request.result for request in requests]

    def _launch(self, plan: StepPlan) -> None:
        if not self._apart:
            self.executor.launch(plan)
            return
        self.executor.forward(plan)
        positions = [i for i, row in enumerate(plan.sampled_rows()) if row in self._masked]
        if positions:
            words = -(-self.executor.info.vocab_size // 32)
            self.executor.masks(len(positions), words)[:] = EVEN
        self.executor.sample(positions)

    def _enter(self, prompt: list[int], sampling: SamplingParams, reuse: bool) -> _Request:
        pages: list[int] = []
        if reuse:
            for end in range(self.page_size, len(prompt), self.page_size):
                page = self.cached.get(tuple(prompt[:end]))
                if page is None:
                    break
                pages.append(page)
        computed = len(pages) * self.page_size
        result = Generated(cached=computed)
        row = self.free_rows.pop(0)
        return _Request(row, prompt, sampling, pages, computed, result, reuse, {})

    def _new_row(self, request: _Request) -> NewRow:
        return NewRow(
            row=request.row,
            token_ids=np.array(request.prompt, dtype="<i4").tobytes(),
            prompt_len=len(request.prompt),
            pages=list(request.pages),
            sampling=request.sampling,
        )

    def _plan(
        self, requests: list[_Request], planned: dict[int, int], chunk: int, new: list[NewRow]
    ) -> tuple[StepPlan, list[_Request], list[int]] | None:
        plan = StepPlan(step_id=self.step_id, new_rows=new)
        sampled = []
        passed: list[int] = []
        for request in requests:
            if not request.prefilled:
                length = min(chunk, len(request.prompt) - request.computed)
                self._grow(request, request.computed + length, plan)
                passed += self._slide(request, request.computed, length, plan)
                last = request.computed + length == len(request.prompt)
                plan.prefills.append(PrefillChunk(request.row, request.computed, length, last))
                request.computed += length
                request.result.chunks += 1
                if last:
                    sampled.append(request)
                    planned[request.row] = 1
        by_row = {request.row: request for request in sampled}
        for request in requests:
            started = request.prefilled and request.row not in by_row
            if started and planned[request.row] < request.sampling.max_tokens:
                known = len(request.prompt) + planned[request.row]
                self._grow(request, known, plan)
                passed += self._slide(request, known - 1, 1, plan)
                plan.decodes.append(request.row)
                planned[request.row] += 1
                sampled.append(request)
        if not plan.prefills and not plan.decodes:
            return None
        self.step_id += 1
        return plan, sampled, passed

    def _grow(self, request: _Request, tokens: int, plan: StepPlan) -> None:
        while len(request.pages) * self.page_size < tokens:
            page = self.free_pages.pop(0)
            request.pages.append(page)
            plan.appended_pages.append((request.row, page))

    def _slide(self, request: _Request, start: int, length: int, plan: StepPlan) -> list[int]:
        """Window pages for a step of `length` tokens from `start` on; those that its row passes."""
        info = self.executor.info
        if not info.num_window_pages:
            return []
        first = max(0, start + 1 - info.window) // self.page_size
        passed = []
        for index in [index for index in request.window_pages if index < first]:
            passed += self._give_up(request, index)
        for index in range(first, -(-(start + length) // self.page_size)):
            if index not in request.window_pages:
                page = self.kept.get(request.pages[index])
                page = self.free_window_pages.pop() if page is None else page
                request.window_pages[index] = page
                plan.window_pages.append((request.row, index, page))
                self.given.append(plan.window_pages[-1])
        return passed

    def _give_up(self, request: _Request, index: int) -> list[int]:
        """The window page, unless it is kept for other requests."""
        window_page, page = request.window_pages.pop(index), request.pages[index]
        if request.reuse and index < len(request.prompt) // self.page_size:
            self.kept.setdefault(page, window_page)
        return [] if self.kept.get(page) == window_page else [window_page]

    def _collect(self, sampled: list[_Request], by_row: dict[int, _Request]) -> None:
        result = self.executor.collect()
        for request, token in zip(sampled, result.tokens, strict=True):
            request.result.tokens.append(token)
        for row, logprobs in result.logprobs.items():
            by_row[row].result.logprobs.extend(logprobs)
        for row, logprobs in result.prompt_logprobs.items():
            by_row[row].result.prompt_logprobs.extend(logprobs)

    def _leave(self, requests: list[_Request], reuse: bool) -> None:
        for request in requests:
            self.free_rows.append(request.row)
            for index in list(request.window_pages):
                self.free_window_pages += self._give_up(request, index)
            full = len(request.prompt) // self.page_size if reuse else 0
            for i, page in enumerate(request.pages):
                prefix = tuple(request.prompt[: (i + 1) * self.page_size])
                if i < full and self.cached.setdefault(prefix, page) == page:
                    continue
                if page not in self.cached.values():
                    self.free_pages.append(page)
                    if page in self.kept:
                        self.free_window_pages.append(self.kept.pop(page))
