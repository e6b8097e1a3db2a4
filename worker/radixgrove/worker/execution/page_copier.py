"""The host tier: pages copied from the device's pool to host memory and back, beside the steps.

On CUDA saves and loads have a stream each. A copy goes through a staging buffer on the device: the
copy engine moves runs of adjacent host pages, a kernel moves between the buffer and the pool. A
load that a step waits for layer by layer is read from host memory by a kernel a layer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.kernels.pages import scatter_layer
from radixgrove.worker.attention.kv_pool import KvPool
from radixgrove.worker.execution.pinned import HostMemory
from radixgrove.worker.execution.transfer import to_device
from radixgrove.worker.plan import PageCopies, StepPlan

AwaitLayer = Callable[[int], None]
# Of a staging buffer: enough to hide that the copy engine rests while the kernel runs.
_STAGING_BYTES = 64 << 20
# Smaller loads are over before a launch a layer would be.
_BY_LAYER_BYTES = 32 << 20
_MEASURED_BYTES = 64 << 20
_WORD = torch.int32  # pages are whole words: K and V, and pairs of dimensions, of a byte at least
_CLOSE_SECONDS = 5.0


class PageCopier(ABC):
    """One rank's host pages and their copies.

    Attributes:
        host: [host pages, page_bytes] uint8; a page is one piece to copy, with what each group of
            layers keeps of it side by side.
        groups: views of `host`, a group each, `[host pages, layers, parts, *entry]`.
    """

    def __init__(self, pool: KvPool, memory: HostMemory) -> None:
        """
        Args:
            pool: the device's.
            memory: of whole pages; the tier closes it.
        """
        self.pool = pool
        self._memory = memory
        self._page_bytes = pool.shape.page_bytes
        self.host = memory.bytes.view(-1, self._page_bytes)
        self.groups = pool.unpack(self.host)

    def _gather(self, pages: Tensor, packed: Sequence[Tensor]) -> None:
        """Pages of the device to `packed`, views of whole pages by group."""
        for tensor, part in zip(self.pool.tensors, packed, strict=True):
            ops.gather_pages(tensor, pages, part[: len(pages)])

    def _scatter(self, pages: Tensor, packed: Sequence[Tensor]) -> None:
        """The inverse of `_gather`."""
        for tensor, part in zip(self.pool.tensors, packed, strict=True):
            ops.scatter_pages(tensor, pages, part[: len(pages)])

    @abstractmethod
    def launch(self, plan: StepPlan, by_layer: bool) -> AwaitLayer | None:
        """Start the plan's copies, after what it relies on; before its step is launched.

        Args:
            by_layer: whether the step can wait layer by layer.

        Returns:
            What the step has to call before a layer attends; None: the current stream waits for all
            that the step reads.
        """

    def stepped(self, step_id: int, done: torch.cuda.Event) -> None:  # noqa: B027
        """A step was launched, with `done` as its end; on a CPU it has ended by then."""

    @abstractmethod
    def ended(self) -> tuple[int, int]:
        """See `Executor.copies_ended`."""

    def measure(self) -> float:
        """Tokens a second of a second, warm, load; what pages hold is lost."""
        count = max(1, _MEASURED_BYTES // self._page_bytes)
        pages = np.arange(min(count, len(self.host), self.pool.num_pages))
        for _ in range(2):
            begin = time.perf_counter()
            self._load_now(pages)
            elapsed = time.perf_counter() - begin
        return len(pages) * self.pool.shape.page_size / elapsed

    @abstractmethod
    def _load_now(self, pages: NDArray[np.int64]) -> None:
        """Bring these pages from host pages of the same ids, and wait for them."""

    def close(self) -> None:
        """Give up what is in flight, and the memory. Nothing may be launched after it."""
        self._memory.close()


def page_copier(pool: KvPool, memory: HostMemory) -> PageCopier:
    if pool.device.type == "cuda":
        return CudaPageCopier(pool, memory)
    return CpuPageCopier(pool, memory)


class CpuPageCopier(PageCopier):
    """On a CPU a copy has ended when it is launched."""

    def __init__(self, pool: KvPool, memory: HostMemory) -> None:
        super().__init__(pool, memory)
        self._saved = self._loaded = 0

    def launch(self, plan: StepPlan, by_layer: bool) -> AwaitLayer | None:
        for copies in plan.saves:
            self._save(copies)
            self._saved = copies.copy_id
        for copies in plan.loads:
            self._load(np.array(copies.pages), np.array(copies.host_pages))
            self._loaded = copies.copy_id
        return None

    def _save(self, copies: PageCopies) -> None:
        packed = self.host.new_empty((len(copies.pages), self._page_bytes))
        self._gather(torch.tensor(copies.pages), self.pool.unpack(packed))
        host_pages = torch.tensor(copies.host_pages)
        self.host.view(_WORD).index_copy_(0, host_pages, packed.view(_WORD))

    def _load(self, pages: NDArray[np.int64], host_pages: NDArray[np.int64]) -> None:
        packed = self.host.index_select(0, torch.from_numpy(host_pages))
        self._scatter(torch.from_numpy(pages), self.pool.unpack(packed))

    def _load_now(self, pages: NDArray[np.int64]) -> None:
        self._load(pages, pages)

    def ended(self) -> tuple[int, int]:
        return self._saved, self._loaded


class _Events:
    """Events of what ends in the order of its ids, until it is known to have ended."""

    def __init__(self) -> None:
        self._flying: deque[tuple[int, torch.cuda.Event]] = deque()
        self._ended = 0

    def add(self, number: int, event: torch.cuda.Event) -> None:
        self._flying.append((number, event))

    def last(self, until: int) -> torch.cuda.Event | None:
        """The event that ends all up to `until`; None if they are known to have ended."""
        found = None
        for number, event in self._flying:
            if number > until:
                break
            found = event
        return found

    def forget(self, until: int) -> torch.cuda.Event | None:
        """As `last`, for one who makes everything that follows wait for it."""
        found = None
        while self._flying and self._flying[0][0] <= until:
            found = self._flying.popleft()[1]
        return found

    def ended(self) -> int:
        while self._flying and self._flying[0][1].query():  # type: ignore[no-untyped-call]
            self._ended = self._flying.popleft()[0]
        return self._ended


class CudaPageCopier(PageCopier):
    """Copies on streams of their own, ordered with the steps by events: the host never waits."""

    def __init__(
        self, pool: KvPool, memory: HostMemory, by_layer_bytes: int = _BY_LAYER_BYTES
    ) -> None:
        super().__init__(pool, memory)
        self._by_layer_pages = by_layer_bytes / self._page_bytes
        self._chunk = memory.chunk // self._page_bytes
        self._staged = _staging_pages(self._page_bytes)
        self._to_host, self._from_host = (
            torch.empty((self._staged, self._page_bytes), dtype=torch.uint8, device=pool.device)
            for _ in range(2)
        )
        self._gathered, self._scattered = map(pool.unpack, (self._to_host, self._from_host))
        self.save_stream, self.load_stream = (
            torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._steps, self._saves, self._loads = _Events(), _Events(), _Events()

    def launch(self, plan: StepPlan, by_layer: bool) -> AwaitLayer | None:
        self._follow(plan)
        if plan.saves:
            with torch.cuda.stream(self.save_stream):
                for copies in plan.saves:
                    self._save(*_by_host_page([copies]))
                    self._saves.add(copies.copy_id, _recorded())
        layers = None
        if plan.loads:
            with torch.cuda.stream(self.load_stream):
                layers = self._start_loads(plan, by_layer)
        if layers is not None:
            return lambda layer: layers[layer].wait()
        if (awaited := self._loads.last(plan.awaited)) is not None:
            awaited.wait()
        return None

    def _follow(self, plan: StepPlan) -> None:
        """Make all streams wait for the steps and copies that rank 0 had seen end at this plan."""
        events = (
            self._steps.forget(plan.collected),
            self._saves.forget(plan.saved),
            self._loads.forget(plan.loaded),
        )
        for event in events:
            if event is None or event.query():  # type: ignore[no-untyped-call]
                continue
            for stream in (torch.cuda.current_stream(), self.save_stream, self.load_stream):
                event.wait(stream)

    def _start_loads(self, plan: StepPlan, by_layer: bool) -> list[torch.cuda.Event] | None:
        """Enqueue a plan's loads on the load stream.

        Returns:
            An event for each layer of the loads that the step waits for, if it waits layer by
            layer; None if it waits for whole loads, or for none.
        """
        if (saved := self._saves.last(max(copies.after for copies in plan.loads))) is not None:
            saved.wait()
        whole, layers = plan.loads, None
        awaited = [copies for copies in plan.loads if copies.copy_id <= plan.awaited]
        if by_layer and sum(len(copies.pages) for copies in awaited) > self._by_layer_pages:
            whole = plan.loads[len(awaited) :]
            layers = self._load_layers(*_by_host_page(awaited))
            self._loads.add(awaited[-1].copy_id, layers[-1])
        for copies in whole:
            self._load(*_by_host_page([copies]))
            self._loads.add(copies.copy_id, _recorded())
        return layers

    def _save(self, pages: NDArray[np.int64], host_pages: NDArray[np.int64]) -> None:
        """On the current stream, as the two below; host pages ascend."""
        ids = to_device(pages, self.pool.device)
        for first in range(0, len(pages), self._staged):
            part = ids[first : first + self._staged]
            self._gather(part, self._gathered)
            for host, place in self._runs(host_pages[first : first + self._staged]):
                host.copy_(self._to_host[place], non_blocking=True)

    def _load(self, pages: NDArray[np.int64], host_pages: NDArray[np.int64]) -> None:
        ids = to_device(pages, self.pool.device)
        for first in range(0, len(pages), self._staged):
            part = ids[first : first + self._staged]
            for host, place in self._runs(host_pages[first : first + self._staged]):
                self._from_host[place].copy_(host, non_blocking=True)
            self._scatter(part, self._scattered)

    def _runs(self, host_pages: NDArray[np.int64]) -> Iterator[tuple[Tensor, slice]]:
        """Each run of adjacent host pages that one copy may move, and its place among them."""
        for begin, end in runs(host_pages, self._chunk):
            first = int(host_pages[begin])
            yield self.host[first : first + end - begin], slice(begin, end)

    def _load_layers(
        self, pages: NDArray[np.int64], host_pages: NDArray[np.int64]
    ) -> list[torch.cuda.Event]:
        ids, host_ids = (to_device(x, self.pool.device) for x in (pages, host_pages))
        events = []
        for group, place in self.pool.places:
            scatter_layer(self.pool.tensors[group], place, ids, self.groups[group], host_ids)
            events.append(_recorded())
        return events

    def stepped(self, step_id: int, done: torch.cuda.Event) -> None:
        self._steps.add(step_id, done)

    def ended(self) -> tuple[int, int]:
        return self._saves.ended(), self._loads.ended()

    @torch.inference_mode()
    def measure(self) -> float:
        first = np.zeros(1, dtype=np.int64)
        with torch.cuda.stream(self.load_stream):  # compiled now: no request waits for it later
            self._save(first, first)
            self._load_layers(first, first)
        return super().measure()

    def _load_now(self, pages: NDArray[np.int64]) -> None:
        with torch.cuda.stream(self.load_stream):
            self._load(pages, pages)
        self.load_stream.synchronize()

    def close(self) -> None:
        """See `HostTier.close`. Memory that a copy may still use stays until the process ends."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not (self.save_stream.query() and self.load_stream.query()):
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)
        super().close()


def _staging_pages(page_bytes: int) -> int:
    """Pages of one of the two staging buffers on the device."""
    return max(1, _STAGING_BYTES // page_bytes)


def staging_bytes(page_bytes: int) -> int:
    """What a tier takes of a CUDA device's memory."""
    return 2 * _staging_pages(page_bytes) * page_bytes


def runs(ids: NDArray[np.int64], block: int) -> list[tuple[int, int]]:
    """Where runs of adjacent ids begin and end, each within one block of `block` ids."""
    parted = (np.diff(ids) != 1) | (ids[1:] % block == 0)
    breaks = [0, *(np.flatnonzero(parted) + 1).tolist(), len(ids)]
    return list(pairwise(breaks))


def _by_host_page(operations: Sequence[PageCopies]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pages and host pages of copies, in the order of the host pages, for long runs."""
    pages = np.concatenate([np.array(copies.pages, dtype=np.int64) for copies in operations])
    hosts = np.concatenate([np.array(copies.host_pages, dtype=np.int64) for copies in operations])
    order = np.argsort(hosts)
    return pages[order], hosts[order]


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
