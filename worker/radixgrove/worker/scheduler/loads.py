"""Prefixes on their way back from the host, and the requests that wait for them.

A load runs beside the steps, so others go on meanwhile; its request holds no row until it has
ended. It is only begun when it is predicted to take less time than computing the tokens anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixgrove.worker.cache.node import TreeNode
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.counters import Counters
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.request import Request, RequestState

_OVERHEAD_SECONDS = 0.001  # of a load, however short


@dataclass(frozen=True, slots=True)
class Hold:
    """What a waiting request keeps from being evicted until its load has ended."""

    node: TreeNode  # locked
    load: int


class HostLoads:
    """Owns the holds. `settle` ends those of loads that have ended."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory, counters: Counters) -> None:
        self._page_size = config.page_size
        self._prefill_rate = config.prefill_rate
        self._host_rate = config.host_rate
        self._memory = memory
        self._counters = counters
        self._holds: dict[Request, Hold] = {}
        self._under_way: dict[int, int] = {}  # pages of each load that has not ended

    def holds(self) -> list[tuple[Request, Hold]]:
        return list(self._holds.items())

    def settle(self) -> None:
        """Let go of what has arrived: the requests wait for a row again, and find it cached."""
        ended = self._memory.timeline.loads_ended
        for load in [load for load in self._under_way if load <= ended]:
            del self._under_way[load]
        for request, hold in self.holds():
            if hold.load <= ended:
                self.release(request)
                request.become(RequestState.PREEMPTED if request.ran else RequestState.WAITING)

    def release(self, request: Request) -> None:
        """The request waits no longer, or not for this; a load under way goes on."""
        hold = self._holds.pop(request, None)
        if hold is not None:
            self._memory.tree.residency.unlock(hold.node)

    def worth(self, pages: int, backlog: int) -> bool:
        """Whether bringing so many pages back beats computing them.

        A load waits for those under way, a prefill for the `backlog` of tokens that others, running
        or waiting, have yet to compute.
        """
        if not self._host_rate or not self._prefill_rate:
            return pages > 0
        moved = (pages + sum(self._under_way.values())) * self._page_size
        computed = pages * self._page_size + backlog
        load = moved / self._host_rate + _OVERHEAD_SECONDS
        return pages > 0 and load < computed / self._prefill_rate

    def begin(self, request: Request, tokens: bytes, limit: int) -> bool:
        """Load what the host has of a waiting request's prefix, and make the request wait for it.

        Returns:
            False, with nothing taken, when the pages are held back behind a fence.
        """
        memory, tree = self._memory, self._memory.tree
        node = tree.match(request.scope, tokens, limit)
        below = tree.match_host(node, tokens, limit)
        tree.residency.lock(below)
        count = below.end - node.end
        if not memory.ensure_free(count):
            tree.residency.unlock(below)
            return False
        load = tree.residency.load(node, below, memory.pool.allocate(count))
        self.began(load, count)
        self._holds[request] = Hold(below, load)
        request.become(RequestState.AWAITING_KV)
        request.fetched = True
        return True

    def began(self, load: int, pages: int) -> None:
        """A load of so many pages goes out with the next plan."""
        self._under_way[load] = pages
        self._counters.host_cached_tokens += pages * self._page_size
