"""Stages of a pipeline that replay graphs say what one process says.

Both stages are in this process, and what one sends lies in a queue until the other takes it. On a
CPU a graph's replay is a call of what would be captured, over the same static buffers.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from radixgrove.kernels.sample import History
from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.parallel.activations import StageLinks
from radixgrove.worker.parallel.group import Activity
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.parallel.member import Member
from radixgrove.worker.parallel.peer_memory import PeerMail
from radixgrove.worker.plan import NewRow, PrefillChunk, StepPlan, StepResult
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy
from tests.worker.execution.test_decode_graphs import params

ROWS = 8


class QueueLinks(StageLinks):
    """All stages of this process, one behind the other."""

    def __init__(self) -> None:
        super().__init__(None, None, torch.device("cpu"), Activity())
        self.sent: deque[Tensor] = deque()

    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        x = self.sent.popleft()
        assert (x.shape, x.dtype) == ((tokens, hidden), dtype)
        return x

    def send(self, x: Tensor) -> None:
        self.sent.append(x)


class QueueMail(PeerMail):
    """Of one stage; both have the same letters."""

    def __init__(self, letters: dict[int, tuple[Tensor, Tensor]]) -> None:
        self._letters = letters
        self._step = 0
        self.started = False  # both stages: before, the first waits in vain for the last

    def post(self, step: int, rows: Tensor, tokens: Tensor) -> None:
        self._letters[step] = rows.clone(), tokens.clone()

    def take(self, step: int, count: int, history: History) -> None:
        if not self.started and step not in self._letters:
            return
        rows, tokens = self._letters.pop(step)
        assert len(rows) == count
        history.tokens[rows, history.lens[rows].long()] = tokens.int()
        history.lens[rows] += 1


class Pipeline:
    """An executor over two stages: of one step in flight, or, where samples come by mail, of as
    many as a pipeline has."""

    def __init__(self, model_dir: Path, *, by_mail: bool = False) -> None:
        self.links = QueueLinks()
        self._letters: dict[int, tuple[Tensor, Tensor]] = {}
        self._by_mail = by_mail
        self.first, self.last = (self._stage(model_dir, rank) for rank in range(2))
        for stage in (self.first, self.last) if by_mail else ():
            assert isinstance(stage.member.mail, QueueMail)
            stage.member.mail.started = True
        self.info = self.first.info
        assert self.info.run_ahead == by_mail
        if not by_mail:
            self.info = msgspec.structs.replace(self.info, depth=1)
        self._rows: list[int] = []

    def _stage(self, model_dir: Path, rank: int) -> Runner:
        settings = WorkerSettings(
            device=Device.CPU,
            dtype=DType.FLOAT32,
            max_running=10,
            max_step_tokens=64,
            kv_tokens=4096,
            pp=2,
        )
        member = Member(Layout(pp=2), rank, links=self.links)
        if self._by_mail:
            member.mail = QueueMail(self._letters)
        return build_rank(settings, model_dir, lambda phase: None, rank, lambda _: member)[0]

    def launch(self, plan: StepPlan) -> None:
        self.first.launch(plan)
        self.last.launch(plan)
        self._rows = plan.sampled_rows()

    def collect(self) -> StepResult:
        self.first.collect()
        result = self.last.collect()
        if not self._by_mail:
            self.first.take_back(self._rows, result.tokens)
        return result


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_stages_with_graphs_say_what_one_process_says(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    prompts = tiny.prompts()[-5:]
    expected = Driver(cpu_runner(tmp_path)).generate(prompts, params, chunk=50)
    pipeline = Pipeline(tmp_path)
    captured = []
    for stage in (pipeline.first, pipeline.last):
        captured.append(stage.capture([1, 4, ROWS], lambda text, done: None))
        captured.append(stage.capture_mixed([64, 256], lambda text, done: None))
    driver = Driver(pipeline)  # type: ignore[arg-type]
    for _ in range(2):  # once more in rows that held others
        results = driver.generate(prompts, params, chunk=50)
        assert [result.tokens for result in results] == [result.tokens for result in expected]
    decodes, mixed = captured[0].replays, captured[1].replays
    assert decodes > 8
    assert mixed > 2
    assert [graphs.replays for graphs in captured[2:]] == [decodes, mixed]


@pytest.mark.parametrize("graphs", [False, True])
def test_stages_run_ahead_of_what_the_host_has_seen(graphs: bool, tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path)
    prompts = tiny.prompts()[-5:]
    expected = Driver(cpu_runner(tmp_path)).generate(prompts, params, chunk=50)
    pipeline = Pipeline(tmp_path, by_mail=True)
    for stage in (pipeline.first, pipeline.last) if graphs else ():
        stage.capture([1, 4, ROWS], lambda text, done: None)
    driver = Driver(pipeline)  # type: ignore[arg-type]
    assert driver.executor.info.depth == 3
    for _ in range(2):  # once more in rows that held others
        results = driver.generate(prompts, params, chunk=50)
        assert [result.tokens for result in results] == [result.tokens for result in expected]


@pytest.mark.parametrize("graphs", [False, True])
def test_what_was_sent_does_not_change_with_the_next_step(graphs: bool, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    pipeline = Pipeline(tmp_path)
    if graphs:
        pipeline.first.capture([ROWS], lambda text, done: None)
        pipeline.first.capture_mixed([64], lambda text, done: None)
    sent = []
    for plan in _plans():
        pipeline.first.launch(plan)
        sent.append(pipeline.links.sent[-1].clone())
        pipeline.first.collect()
    assert all(map(torch.equal, pipeline.links.sent, sent))
    assert not torch.equal(sent[0], sent[1])
    assert not torch.equal(sent[2], sent[3])


def _plans() -> list[StepPlan]:
    """Two that prefill a row each, and two that decode one of them."""
    chunks = []
    for row in range(2):
        ids = torch.arange(4, dtype=torch.int32) * (row + 1) + 1
        entered = NewRow(
            row=row,
            token_ids=ids.numpy().tobytes(),
            prompt_len=4,
            pages=[row],
            sampling=greedy(8),
        )
        chunk = PrefillChunk(row, 0, 4, True)
        chunks.append(StepPlan(step_id=row, new_rows=[entered], prefills=[chunk]))
    return chunks + [StepPlan(step_id=2 + row, decodes=[row]) for row in range(2)]
