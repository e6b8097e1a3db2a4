"""Rank 0's executor when there are several ranks: it sends each plan on, then runs its own part."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.parallel.rendezvous import RankMissing, leave
from radixgrove.worker.plan import ExecutorInfo, StepPlan, StepResult

_ANSWER_SECONDS = 1.0  # for a rank to say why it failed


class Progress(msgspec.Struct, array_like=True):
    """A follower's answer to a step, or its last words."""

    rank: int
    step_id: int
    error: str | None = None


def plans_address(directory: Path, rank: int) -> str:
    return f"ipc://{directory}/plans-{rank}.sock"


def progress_address(directory: Path) -> str:
    return f"ipc://{directory}/progress.sock"


class PlanLinks:
    """Sockets from rank 0 to the others: plans out, progress in."""

    def __init__(self, directory: Path, size: int, depth: int, send_seconds: float) -> None:
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Progress)
        self._out = {rank: self._context.socket(zmq.PUSH) for rank in range(1, size)}
        for rank, socket in self._out.items():
            socket.set_hwm(depth + 1)
            socket.setsockopt(zmq.SNDTIMEO, int(send_seconds * 1000))
            socket.bind(plans_address(directory, rank))
        self._in = self._context.socket(zmq.PULL)
        self._in.bind(progress_address(directory))
        self.done = dict.fromkeys(self._out, -1)  # last step each rank answered
        self.errors: dict[int, str] = {}

    def send(self, plan: StepPlan | None) -> None:
        """Send a plan to every rank; None ends them.

        Raises:
            RankMissing: a rank does not take its plans any more.
        """
        frame = b"" if plan is None else self._encoder.encode(plan)
        for rank, socket in self._out.items():
            try:
                socket.send(frame)
            except zmq.Again:
                raise RankMissing(f"rank {rank} takes no more plans") from None

    def receive(self, seconds: float = 0.0) -> None:
        """Take what the ranks said; waits up to `seconds` for the first."""
        while self._in.poll(int(seconds * 1000)):
            progress = self._decoder.decode(self._in.recv())
            self.done[progress.rank] = max(self.done[progress.rank], progress.step_id)
            if progress.error is not None:
                self.errors[progress.rank] = progress.error
            seconds = 0.0

    def close(self) -> None:
        for socket in (*self._out.values(), self._in):
            socket.close(linger=1000)
        self._context.term()


class GroupExecutor:
    """An `Executor` over all ranks of a group; a step that fails names the rank to blame."""

    def __init__(self, runner: Runner, links: PlanLinks) -> None:
        self._runner = runner
        self._links = links
        self._collected = -1

    @property
    def info(self) -> ExecutorInfo:
        return self._runner.info

    def launch(self, plan: StepPlan) -> None:
        self._links.send(plan)
        try:
            self._runner.launch(plan)
        except RuntimeError as error:
            raise self._blame(error) from error

    def collect(self) -> StepResult:
        try:
            result = self._runner.collect()
        except RuntimeError as error:
            raise self._blame(error) from error
        self._collected = result.step_id
        self._links.receive()
        return result

    def _blame(self, error: RuntimeError) -> RankMissing:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not self._links.errors and (left := deadline - time.monotonic()) > 0:
            self._links.receive(left)
        if self._links.errors:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in self._links.errors.items())
            return RankMissing(f"a step failed on {told}")
        behind = [rank for rank, step in self._links.done.items() if step < self._collected]
        silent = behind or list(self._links.done)
        names = ", ".join(map(str, silent))
        return RankMissing(f"a step failed; rank {names} fell silent ({error})")

    def close(self) -> None:
        """End the other ranks, then this one's part."""
        with suppress(RankMissing):  # it is gone already
            self._links.send(None)
        self._links.close()
        self._runner.close()
        leave(self._runner.group)
