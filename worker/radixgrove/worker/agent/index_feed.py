"""What the routers' index still lacks: an engine's cache events, or its whole tree.

Nothing here talks to Redis: the publisher takes batches, and says when Redis lost the thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from radixgrove.protocol import index
from radixgrove.protocol.blocks import HASH_BYTES, MEMBER_BYTES, BlockHasher, members
from radixgrove.service.complaints import Complaints
from radixgrove.worker.messages import CacheEvent, CacheEvents, CacheSnapshot

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT = 30.0  # from the request to the last chunk; then it is asked for again
MAX_BUFFERED_MEMBERS = 1 << 18  # of events; beyond it they are dropped and a snapshot replaces them
MAX_SNAPSHOT_MEMBERS = 1 << 22
PIPELINE_BATCHES = 16
MOST_DOMAINS = 1024  # with remembered numbers: a salt makes a domain of its own

Operation = tuple[bytes, bytes]  # b"+gpu", packed members


@dataclass(slots=True)
class Snapshot:
    """The engine's tree on its way from the engine to Redis."""

    deadline: float  # monotonic
    sequence: int = 0
    operations: list[Operation] = field(default_factory=list)
    members: int = 0
    complete: bool = False

    def chunks(self) -> list[tuple[bytes, bytes]]:
        """Tier and packed members of every part of it that is sent at a time."""
        size = index.SNAPSHOT_CHUNK_MEMBERS * MEMBER_BYTES
        return [
            (kind[1:], packed[offset : offset + size])
            for kind, packed in self.operations
            for offset in range(0, len(packed), size)
        ]


class IndexFeed:
    """Events in the engine's order, until they have to give way to a snapshot.

    `request_snapshot` is called whenever the engine must send its whole tree; it must not block.
    """

    def __init__(self, hasher: BlockHasher, request_snapshot: Callable[[], None]) -> None:
        self._request_snapshot = request_snapshot
        self._complaints = Complaints(logger, logging.WARNING)
        self._domain64 = lru_cache(MOST_DOMAINS)(hasher.domain64)
        self._events: deque[tuple[int, list[Operation]]] = deque()  # engine sequence, operations
        self._engine_sequence: int | None = None
        self._snapshot: Snapshot | None = None
        self._snapshots_due = 0  # requested of the engine and not yet answered whole
        self.synchronised = False  # what is buffered follows on what Redis has
        self.buffered = 0  # members
        self.resyncs = 0
        self.dropped = 0  # members

    # ---- what the engine says --------------------------------------------------------------

    def take_events(self, message: CacheEvents) -> None:
        expected = self._engine_sequence
        self._engine_sequence = message.sequence
        if expected is not None and message.sequence != expected + 1:
            self.lose_track("events of the engine are missing")
        operations = self._operations(message.events)
        self._events.append((message.sequence, operations))
        self.buffered += _count(operations)
        if self.buffered > MAX_BUFFERED_MEMBERS:
            self.lose_track("the event buffer is full")

    def take_snapshot(self, message: CacheSnapshot) -> None:
        if self._snapshots_due != 1:  # the answer to a request that was given up
            self._snapshots_due -= message.last and self._snapshots_due > 0
            return
        self._snapshots_due -= message.last
        snapshot = self._snapshot
        if snapshot is None:
            return
        snapshot.sequence = message.sequence
        snapshot.operations.extend(self._operations(message.events))
        snapshot.members += sum(len(event.hashes) // HASH_BYTES for event in message.events)
        snapshot.complete = message.last
        if snapshot.members > MAX_SNAPSHOT_MEMBERS:
            logger.error("the engine's cache has too many blocks for the index")
            snapshot.operations.clear()
            snapshot.complete = False

    def _operations(self, events: Sequence[CacheEvent]) -> list[Operation]:
        operations = []
        for event in events:
            if event.hashes:
                sign = b"+" if event.stored else b"-"
                packed = members(event.hashes, self._domain64(event.domain))
                operations.append((sign + event.tier.encode(), packed))
        return operations

    # ---- what is to be sent to Redis -------------------------------------------------------

    def lose_track(self, why: str) -> None:
        """Forgets buffered events; a snapshot will replace them."""
        if self.synchronised:
            self._complaints.say(why, f"prefix index out of step: {why}; sending a snapshot")
            self.resyncs += 1
        self.dropped += self.buffered
        self._events.clear()
        self.buffered = 0
        self.synchronised = False
        self._snapshot = None

    def snapshot(self) -> Snapshot | None:
        """The engine's whole tree, once it has come; asks the engine for it where that is due."""
        now = time.monotonic()
        snapshot = self._snapshot
        if snapshot is None or now > snapshot.deadline:
            # After a timeout the unanswered request counts as lost.
            self._snapshots_due = self._snapshots_due + 1 if snapshot is None else 1
            self._snapshot = Snapshot(deadline=now + SNAPSHOT_TIMEOUT)
            self._request_snapshot()
            return None
        return snapshot if snapshot.complete else None

    def follows(self, snapshot: Snapshot) -> bool:
        """Redis has the snapshot: events go on from there. False when a gap opened meanwhile."""
        if self._snapshot is not snapshot:
            return False
        while self._events and self._events[0][0] <= snapshot.sequence:
            self.buffered -= _count(self._events.popleft()[1])
        self._snapshot = None
        self.synchronised = True
        return True

    def cut_batches(self) -> list[list[Operation]]:
        """Takes up to `PIPELINE_BATCHES` batches off the buffer, order kept."""
        batches: list[list[Operation]] = []
        batch: list[Operation] = []
        room = index.BATCH_MEMBERS
        while self._events and len(batches) < PIPELINE_BATCHES:
            _, operations = self._events.popleft()
            self.buffered -= _count(operations)
            for kind, packed in operations:
                while packed:
                    part, packed = packed[: room * MEMBER_BYTES], packed[room * MEMBER_BYTES :]
                    room -= len(part) // MEMBER_BYTES
                    if batch and batch[-1][0] == kind:
                        batch[-1] = (kind, batch[-1][1] + part)
                    else:
                        batch.append((kind, part))
                    if room == 0:
                        batches.append(batch)
                        batch, room = [], index.BATCH_MEMBERS
        if batch:
            batches.append(batch)
        return batches

    @property
    def pending(self) -> bool:
        """Whether there are events that can be sent to Redis now."""
        return self.synchronised and bool(self._events)


def _count(operations: Sequence[Operation]) -> int:
    return sum(len(packed) // MEMBER_BYTES for _, packed in operations)
