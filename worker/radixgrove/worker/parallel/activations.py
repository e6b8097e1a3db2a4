"""Activations on their way from a stage of a pipeline to the next."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from radixgrove.worker.parallel.group import Activity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SENDS = 2  # of activations under way: the next step computes while the last one's leave


@dataclass(frozen=True, slots=True)
class Link:
    """A neighbour, as torch counts ranks, and the group that carries what is sent to it."""

    peer: int
    group: ProcessGroup


class StageLinks(ABC):
    """A rank's links: from the stage before, if it is not in the first, and to the stage after."""

    def __init__(
        self, before: Link | None, after: Link | None, device: torch.device, activity: Activity
    ) -> None:
        """
        Args:
            activity: says when a neighbour is waited for.
        """
        self._before = before
        self._after = after
        self._device = device
        self._activity = activity

    @abstractmethod
    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """The stream after the stage before: [tokens, hidden], the caller's to overwrite."""

    @abstractmethod
    def send(self, x: Tensor) -> None:
        """The stream, [T, hidden], to the stage after; `x` must not change any more.

        Raises:
            RuntimeError: a neighbour is lost.
        """


class DirectLinks(StageLinks):
    """From device to device: NCCL between GPUs, Gloo between CPUs.

    NCCL sends on the stream of its group, beside what this stage computes next. No host waits for
    it: the stream of the steps waits, where it must.
    """

    def __init__(
        self, before: Link | None, after: Link | None, device: torch.device, activity: Activity
    ) -> None:
        super().__init__(before, after, device, activity)
        self._leaving: deque[tuple[Any, Tensor]] = deque()  # sends, and what they read

    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        assert self._before is not None, "the first stage receives nothing"
        x = torch.empty((tokens, hidden), dtype=dtype, device=self._device)
        with self._activity:
            distributed.recv(x, self._before.peer, group=self._before.group)
        return x

    def send(self, x: Tensor) -> None:
        assert self._after is not None, "the last stage sends nothing"
        x = x.contiguous()
        work = distributed.isend(x, self._after.peer, group=self._after.group)
        self._leaving.append((work, x))
        while len(self._leaving) > _SENDS:
            with self._activity:
                self._leaving.popleft()[0].wait()


class HostLinks(StageLinks):
    """Between GPUs through pinned host memory and Gloo: for ranks that share a GPU, which NCCL
    refuses.

    A thread sends what has come to the host, beside what this stage computes next.
    """

    def __init__(
        self, before: Link | None, after: Link | None, device: torch.device, activity: Activity
    ) -> None:
        super().__init__(before, after, device, activity)
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: SimpleQueue[tuple[torch.cuda.Event, Tensor]] = SimpleQueue()
        self._room = threading.Semaphore(_SENDS)
        self._failure: Exception | None = None
        if after is not None:
            threading.Thread(target=self._pass_on, args=(after,), daemon=True).start()

    def receive(self, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
        assert self._before is not None, "the first stage receives nothing"
        host = torch.empty((tokens, hidden), dtype=dtype, pin_memory=True)
        with self._activity:
            distributed.recv(host, self._before.peer, group=self._before.group)
        return host.to(self._device, non_blocking=True)

    def send(self, x: Tensor) -> None:
        with self._activity:
            self._room.acquire()
        if self._failure is not None:
            raise RuntimeError(f"activations were not sent: {self._failure}") from self._failure
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            host.copy_(x, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        x.record_stream(self._copies)
        self._leaving.put((copied, host))

    def _pass_on(self, after: Link) -> None:
        while self._failure is None:
            copied, host = self._leaving.get()
            try:
                copied.synchronize()
                distributed.send(host, after.peer, group=after.group)
            except Exception as error:  # the main thread raises it
                self._failure = error
            self._room.release()
