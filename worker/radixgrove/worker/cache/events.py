"""Collects what became matchable and what stopped being so, for the routers' index."""

from __future__ import annotations

from collections.abc import Iterator

from radixgrove.protocol.blocks import HASH_BYTES
from radixgrove.worker.messages import CacheEvent, Tier


class EventLog:
    """Events since the last `take`, in order; neighbours of one kind and domain share an event.

    The tree reports each change in the order that keeps the closure of `CacheEvent`: parents are
    stored before children and removed after them.
    """

    def __init__(self) -> None:
        self._events: list[tuple[bool, str, list[bytes]]] = []

    def stored(self, domain: str, hashes: bytes) -> None:
        self._append(True, domain, hashes)

    def removed(self, domain: str, hashes: bytes) -> None:
        """`hashes` come parents first, as the tree holds them; they are logged children first."""
        offsets = range(len(hashes) - HASH_BYTES, -1, -HASH_BYTES)
        backwards = b"".join(hashes[offset : offset + HASH_BYTES] for offset in offsets)
        self._append(False, domain, backwards)

    def _append(self, stored: bool, domain: str, hashes: bytes) -> None:
        if not hashes:
            return
        if self._events:
            last_stored, last_domain, parts = self._events[-1]
            if last_stored == stored and last_domain == domain:
                parts.append(hashes)
                return
        self._events.append((stored, domain, [hashes]))

    def take(self) -> list[CacheEvent]:
        events = [
            CacheEvent(stored, Tier.GPU, domain, b"".join(parts))
            for stored, domain, parts in self._events
        ]
        self._events.clear()
        return events


def in_chunks(blocks: Iterator[tuple[str, bytes]], chunk_blocks: int) -> Iterator[list[CacheEvent]]:
    """Cut (domain, packed hashes) pairs into lists of `stored` events of about `chunk_blocks`."""
    events: list[CacheEvent] = []
    room = chunk_blocks * HASH_BYTES
    for domain, hashes in blocks:
        for offset in range(0, len(hashes), chunk_blocks * HASH_BYTES):
            part = hashes[offset : offset + chunk_blocks * HASH_BYTES]
            if len(part) > room:
                yield events
                events, room = [], chunk_blocks * HASH_BYTES
            events.append(CacheEvent(True, Tier.GPU, domain, part))
            room -= len(part)
    if events:
        yield events
