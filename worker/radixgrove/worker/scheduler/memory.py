"""What a running request holds on the device, its row and its pages: taken and released here."""

from __future__ import annotations

from collections.abc import Callable

from radixgrove.protocol.blocks import BlockHasher
from radixgrove.worker.cache.host_tier import HostTier
from radixgrove.worker.cache.node import TreeNode
from radixgrove.worker.cache.pool import Owner, PagePool
from radixgrove.worker.cache.timeline import Fence, Timeline
from radixgrove.worker.cache.tree import RadixTree
from radixgrove.worker.cache.windows import WindowPages
from radixgrove.worker.plan import PageCopies
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.request import Request, RunningRequest
from radixgrove.worker.scheduler.row_windows import RowWindows


class RowTable:
    """Rows of the device's request table. A released row is reusable behind its fence."""

    def __init__(self, max_rows: int, timeline: Timeline) -> None:
        self._clock = timeline
        self._free = list(range(max_rows - 1, -1, -1))
        self._retired: dict[int, list[int]] = {}  # fence step -> rows

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release(self, row: int) -> None:
        fence = self._clock.launched
        if fence <= self._clock.collected:
            self._free.append(row)
        else:
            self._retired.setdefault(fence, []).append(row)

    def collect(self, step_id: int) -> None:
        self._free += self._retired.pop(step_id, [])


class KVMemory:
    """Page pools, radix tree, host tier and row table of one device, on one clock."""

    def __init__(
        self, config: SchedulerConfig, hasher: Callable[[str], BlockHasher] | None
    ) -> None:
        self.timeline = Timeline()
        self.windows: WindowPages | None = None
        if config.num_window_pages:
            self.windows = WindowPages(
                config.num_pages,
                config.num_window_pages,
                config.window,
                config.page_size,
                self.timeline,
            )
        drop = None if self.windows is None else self.windows.drop
        self.pool = PagePool(config.num_pages, self.timeline, on_release=drop)
        self.host: HostTier | None = None
        if config.num_host_pages:
            self.host = HostTier(
                config.num_host_pages,
                self.timeline,
                config.host_write_policy,
                config.eviction_policy,
            )
        self.tree = RadixTree(
            self.pool,
            self.timeline,
            config.page_size,
            config.eviction_policy,
            hasher,
            self.host,
            self.windows,
        )
        self.row_windows = RowWindows(self.windows, config.page_size)
        self.rows = RowTable(config.max_rows, self.timeline)
        self.page_size = config.page_size
        self._caching = config.prefix_cache

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def ensure_free(self, count: int) -> bool:
        """Evict until `count` pages are free; False when fences or locks keep too many back."""
        short = count - self.pool.free - self.pool.retired  # what is retired comes by itself
        if short > 0:
            self.tree.residency.evict(short)
        return self.pool.free >= count

    def find_prefix(self, request: Request, tokens: bytes, limit: int) -> TreeNode | None:
        """The node of the longest cached prefix to use; None when the cache is bypassed."""
        if not (self._caching and request.writes_cache):
            return None
        if not request.reads_cache:
            return self.tree.root(request.scope)
        return self.tree.match(request.scope, tokens, limit)

    def allocate_row(
        self,
        request: Request,
        tokens: bytes,
        length: int,
        node: TreeNode | None,
        below: TreeNode | None = None,
    ) -> RunningRequest | None:
        """Give a request a row and pages for all its known tokens, the first of them from `node`.

        Args:
            below: what the host has beyond `node`, to load for this row; its first step must await
                the load.

        Returns:
            None, with nothing taken, when the pages are held back behind a fence.
        """
        prefix = below if below is not None else node
        if prefix is not None:
            self.tree.residency.lock(prefix)
        fresh = self.pages_for(length) - (0 if node is None else node.end)
        if not self.ensure_free(fresh):
            if prefix is not None:
                self.tree.residency.unlock(prefix)
            return None
        pages = self.pool.allocate(fresh)
        cached = 0
        if prefix is not None and node is not None:
            cached = prefix.end
            count = cached - node.end
            if count:
                self.tree.residency.load(node, prefix, pages[:count])
            self.tree.residency.record_hit(prefix, request.submit.priority)
            pages = self.tree.path_pages(prefix) + pages[count:]
        computed = cached * self.page_size
        active = RunningRequest(
            request=request,
            row=self.rows.take(),
            tokens=tokens,
            length=length,
            node=prefix,
            pages=pages,
            announced=cached,
            launched=computed,
            prefilled=computed,
            capacity=len(pages) * self.page_size,
            tokens_left=request.limit - len(request.output),
            matched=cached,
        )
        self.row_windows.enter(active, cached)
        return active

    def publish(self, active: RunningRequest) -> None:
        """Let others match the full pages that a row in prefill has computed."""
        if active.node is not None:
            active.node = self.tree.extend(
                active.node,
                active.tokens,
                active.pages,
                active.computed // self.page_size,
                active.request.submit.priority,
            )

    def trim(self, active: RunningRequest) -> None:
        """Take back the pages that nothing in flight can fill."""
        keep = self.pages_for(active.launched)
        surplus = active.pages[keep:]
        if surplus:
            self.row_windows.cut(active, keep)
            del active.pages[keep:]
            active.capacity = keep * self.page_size
            active.announced = min(active.announced, keep)
            self.pool.release(surplus, Owner.REQUEST, Fence(self.timeline.launched))

    def release(self, active: RunningRequest) -> None:
        """The only way out of a row: cache what is computed and new, retire the rest."""
        active.live = False
        self.row_windows.leave(active)
        pages, node = active.pages, active.node
        if node is not None:
            full = node.end if active.spoiled else active.computed // self.page_size
            duplicates = self.tree.insert(
                node,
                active.request.tokens(),
                pages,
                full,
                active.request.submit.priority,
            )
            pages = pages[full:] + duplicates
            active.node = None
            if active.spoiled:
                clean = (active.request.cached_tokens or 0) // self.page_size
                self.tree.residency.drop_spoiled(node, clean)
        self.pool.release(pages, Owner.REQUEST, Fence(self.timeline.launched))
        self.rows.release(active.row)

    def collect(self, step_id: int) -> None:
        self.timeline.collected = step_id
        self.pool.reclaim()
        if self.windows is not None:
            self.windows.reclaim()
        self.rows.collect(step_id)

    def take_copies(self) -> tuple[list[PageCopies], list[PageCopies]]:
        """Saves and loads for the next plan, which must launch them."""
        return ([], []) if self.host is None else self.host.take()

    def copies_ended(self, save: int, load: int) -> None:
        """Saves and loads up to these have ended."""
        timeline = self.timeline
        if (save, load) == (timeline.saves_ended, timeline.loads_ended):
            return
        if load != timeline.loads_ended:
            self.tree.loads_ended()
        timeline.saves_ended, timeline.loads_ended = save, load
        self.pool.reclaim()
        if self.host is not None:
            self.host.pool.reclaim()
