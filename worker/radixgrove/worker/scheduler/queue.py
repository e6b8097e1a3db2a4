"""The waiting queue: bounded, ordered by a policy, with a deadline for everyone in it."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable

from radixgrove.protocol.settings import SchedulePolicy
from radixgrove.worker.cache.node import TreeNode
from radixgrove.worker.cache.tree import RadixTree
from radixgrove.worker.scheduler.request import Request, RequestState

# A level of priority is worth this many seconds of waiting; it also bounds how long requests
# without a cached prefix are passed over by those with one.
AGEING_SECONDS = 10.0

# Looking every waiting request up in the tree costs more than it wins beyond this many.
_MOST_LOOKED_UP = 128

# Requests that left may keep their deadlines until they outnumber the others by this.
_SLACK = 64


class WaitingQueue:
    """Requests that hold no row. Preempted ones come first: they were admitted before.

    `tokens` counts the prompt tokens of requests that never ran, less what the cache held when it
    was last looked at.
    """

    def __init__(self, policy: SchedulePolicy, tree: RadixTree) -> None:
        self._policy = policy
        self._tree = tree
        self._waiting: list[Request] = []  # by `_key`
        self._preempted: list[Request] = []  # by arrival
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; left requests stay in it
        self.tokens = 0
        self.prompt_tokens = 0  # of the same requests, whole
        self._key = _keys(policy)

    def __len__(self) -> int:
        """Requests that never ran; only these are bounded and expire."""
        return len(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting or self._preempted)

    def tokens_of_others(self, request: Request) -> int:
        """`tokens` without the request's own."""
        return self.tokens - (0 if request.ran else self._uncached(request))

    def requests(self) -> list[Request]:
        return self._preempted + self._waiting

    def add(self, request: Request) -> None:
        insort(self._waiting, request, key=self._key)
        heapq.heappush(self._deadlines, (request.deadline, request.order, request))
        self.tokens += self._uncached(request)
        self.prompt_tokens += request.prompt_len

    def put_back(self, request: Request) -> None:
        """A preempted request waits again."""
        insort(self._preempted, request, key=lambda other: other.order)

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request is not here."""
        if request.ran:
            self._preempted.remove(request)
            return
        index = bisect_left(self._waiting, self._key(request), key=self._key)
        del self._waiting[self._waiting.index(request, index)]
        self.tokens -= self._uncached(request)
        self.prompt_tokens -= request.prompt_len
        if len(self._deadlines) > 2 * len(self._waiting) + _SLACK:
            # Most of those with a deadline have left: let go of their prompts.
            still = {id(other) for other in self._waiting}
            self._deadlines = [entry for entry in self._deadlines if id(entry[2]) in still]
            heapq.heapify(self._deadlines)

    def expired(self, now: float) -> list[Request]:
        """Requests that waited beyond their deadline; the caller removes them."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.ran and request.state in (
                RequestState.WAITING,
                RequestState.AWAITING_GRAMMAR,
                RequestState.AWAITING_KV,
            ):
                late.append(request)
        return late

    def in_order(self, now: float) -> list[Request]:
        """All requests, the one to admit first first."""
        few = 1 < len(self._waiting) <= _MOST_LOOKED_UP
        if few and self._policy is SchedulePolicy.LPM:
            waiting = self._longest_match_first(now)
        elif few and self._policy is SchedulePolicy.DFS_WEIGHT:
            waiting = self._heaviest_subtree_first(now)
        else:
            waiting = self._waiting
        return self._preempted + waiting

    def look_up(self, request: Request) -> TreeNode | None:
        """See how much of the prompt is cached, and remember it as the request's hint.

        Returns:
            The deepest node on the device that it reaches.
        """
        limit = (request.length - 1) // self._tree.page_size
        node, depth = self._tree.peek(request.scope, request.prompt, limit)
        if node is not None:
            depth = self._tree.peek_below(node, depth, request.prompt, limit)
        counted = not request.ran
        if counted:
            self.tokens -= self._uncached(request)
        request.matched, request.matched_version = depth, self._tree.version
        if counted:
            self.tokens += self._uncached(request)
        return node

    def _uncached(self, request: Request) -> int:
        return request.prompt_len - request.matched * self._tree.page_size

    def _overdue(self, request: Request, now: float) -> bool:
        return now - request.arrived > AGEING_SECONDS

    def _longest_match_first(self, now: float) -> list[Request]:
        for request in self._waiting:
            if request.matched_version != self._tree.version and request.reads_cache:
                self.look_up(request)
        return sorted(
            self._waiting,
            key=lambda request: (
                (0, 0) if self._overdue(request, now) else (1, -request.matched),
                request.order,
            ),
        )

    def _heaviest_subtree_first(self, now: float) -> list[Request]:
        """Depth first through the tree, into the child with most waiting requests below it."""
        paths: dict[Request, list[TreeNode]] = {}
        weight: Counter[TreeNode] = Counter()
        for request in self._waiting:
            node = self.look_up(request) if request.reads_cache else None
            path: list[TreeNode] = []
            while node is not None:
                path.append(node)
                node = node.parent
            path.reverse()
            paths[request] = path
            weight.update(path)

        def key(request: Request) -> tuple[bool, list[tuple[int, int]], int]:
            if self._overdue(request, now):
                return False, [], request.order
            weights = [(-weight[node], node.created) for node in paths[request]]
            return True, weights, request.order

        return sorted(self._waiting, key=key)


def _keys(policy: SchedulePolicy) -> Callable[[Request], float]:
    """What the queue is sorted by while it grows; equal ones stay in order of arrival.

    Longest output first is the LPT rule (Graham 1969): when all requests are there at the start,
    none that has much to say is left over at the end, in steps that read the weights for a few.
    """
    if policy is SchedulePolicy.PRIORITY:
        return lambda request: request.arrived - request.submit.priority * AGEING_SECONDS
    if policy is SchedulePolicy.LONGEST_OUTPUT:
        return lambda request: -request.limit
    return lambda request: request.order
