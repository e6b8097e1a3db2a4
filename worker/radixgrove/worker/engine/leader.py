"""Rank 0's executor when there are several ranks: it sends each order on, then runs its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.parallel.rendezvous import RankMissing, leave
from radixgrove.worker.plan import ExecutorInfo, StepPlan, StepResult

_ANSWER_SECONDS = 1.0  # for a rank to say why it failed


class Launch(msgspec.Struct, array_like=True, tag=True):
    plan: StepPlan


class Forward(msgspec.Struct, array_like=True, tag=True):
    """Up to the logits; a `Sample` follows."""

    plan: StepPlan


class Sample(msgspec.Struct, array_like=True, tag=True):
    """The rest of the step that was forwarded last, under rank 0's masks."""

    masked: list[int] = []
    masks: bytes = b""  # int32, as many words for each of `masked`


Order = Launch | Forward | Sample


class Progress(msgspec.Struct, array_like=True):
    """A follower carried out the orders up to this one, counted from 1, or its last words."""

    rank: int
    order: int
    error: str | None = None


def plans_address(directory: Path, rank: int) -> str:
    return f"ipc://{directory}/plans-{rank}.sock"


def progress_address(directory: Path) -> str:
    return f"ipc://{directory}/progress.sock"


class PlanLinks:
    """Sockets from rank 0 to the others: orders out, progress in."""

    def __init__(self, directory: Path, size: int, depth: int, send_seconds: float) -> None:
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Progress)
        self._out = {rank: self._context.socket(zmq.PUSH) for rank in range(1, size)}
        for rank, socket in self._out.items():
            socket.set_hwm(2 * (depth + 1))
            socket.setsockopt(zmq.SNDTIMEO, int(send_seconds * 1000))
            socket.bind(plans_address(directory, rank))
        self._in = self._context.socket(zmq.PULL)
        self._in.bind(progress_address(directory))
        self._sent = 0  # orders
        self._done = dict.fromkeys(self._out, 0)  # orders that each rank has carried out
        self.errors: dict[int, str] = {}

    def send(self, order: Order | None) -> None:
        """Send an order to every rank; None ends them.

        Raises:
            RankMissing: a rank does not take its plans any more.
        """
        frame = b"" if order is None else self._encoder.encode(order)
        self._sent += 1
        for rank, socket in self._out.items():
            try:
                socket.send(frame)
            except zmq.Again:
                raise RankMissing(f"rank {rank} takes no more plans") from None

    def receive(self, seconds: float = 0.0) -> None:
        """Take what the ranks said; waits up to `seconds` for the first."""
        while self._in.poll(max(0, int(seconds * 1000))):
            progress = self._decoder.decode(self._in.recv())
            self._done[progress.rank] = max(self._done[progress.rank], progress.order)
            if progress.error is not None:
                self.errors[progress.rank] = progress.error
            seconds = 0.0

    def silent(self) -> list[int]:
        """Ranks that have not said anything about the last order."""
        return [
            rank
            for rank, order in self._done.items()
            if order < self._sent and rank not in self.errors
        ]

    def close(self) -> None:
        for socket in (*self._out.values(), self._in):
            socket.close(linger=1000)
        self._context.term()


class GroupExecutor:
    """An `Executor` over all ranks of a group; a step that fails names the rank to blame."""

    def __init__(self, runner: Runner, links: PlanLinks) -> None:
        self._runner = runner
        self._links = links
        self._masks: NDArray[np.int32] | None = None  # of the step that is yet to be sampled

    @property
    def info(self) -> ExecutorInfo:
        return self._runner.info

    def launch(self, plan: StepPlan) -> None:
        self._links.send(Launch(plan))
        with self._blaming():
            self._runner.launch(plan)

    def forward(self, plan: StepPlan) -> None:
        self._links.send(Forward(plan))
        with self._blaming():
            self._runner.forward(plan)

    def masks(self, count: int, words: int) -> NDArray[np.int32]:
        self._masks = self._runner.masks(count, words)
        return self._masks

    def sample(self, masked: Sequence[int] = ()) -> None:
        masks = self._masks.tobytes() if masked and self._masks is not None else b""
        self._links.send(Sample(list(masked), masks))
        with self._blaming():
            self._runner.sample(masked)

    def collect(self) -> StepResult:
        with self._blaming():
            result = self._runner.collect()
        self._links.receive()
        return result

    def copies_ended(self) -> tuple[int, int]:
        return self._runner.copies_ended()

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._blame(error) from error

    def _blame(self, error: RuntimeError) -> RankMissing:
        """Name the ranks that neither took the last order nor said why not, else what was said.

        When a rank dies, the others' collectives fail too: theirs are symptoms.
        """
        links, deadline = self._links, time.monotonic() + _ANSWER_SECONDS
        while (silent := links.silent()) and time.monotonic() < deadline:
            links.receive(deadline - time.monotonic())
        if silent:
            names = ", ".join(map(str, silent))
            return RankMissing(f"a step failed; rank {names} fell silent ({error})")
        errors = [f"rank {rank}: {text}" for rank, text in links.errors.items()]
        return RankMissing(f"a step failed on {'; '.join(errors) or f'rank 0: {error}'}")

    def close(self) -> None:
        """End the other ranks, then this one's part."""
        with suppress(RankMissing):  # it is gone already
            self._links.send(None)
        self._links.close()
        self._runner.close()
        leave(self._runner.group)
