"""Collects what became matchable and what stopped being so, for the routers' index."""

from __future__ import annotations

from collections.abc import Iterator

from radixgrove.protocol.blocks import HASH_BYTES
from radixgrove.worker.messages import CacheEvent, Tier

_Kind = tuple[bool, Tier, str]  # stored (or removed), where, domain


class EventLog:
    """Events since the last `take`, in order; neighbours of a kind, tier and domain share an event.

    The tree reports each change in the order that keeps the closure of `CacheEvent`: parents are
    stored before children and removed after them.
    """

    def __init__(self) -> None:
        self._events: list[tuple[_Kind, list[bytes]]] = []

    def stored(self, tier: Tier, domain: str, hashes: bytes) -> None:
        self._append((True, tier, domain), hashes)

    def removed(self, tier: Tier, domain: str, hashes: bytes) -> None:
        """`hashes` come parents first, as the tree holds them; they are logged children first."""
        offsets = range(len(hashes) - HASH_BYTES, -1, -HASH_BYTES)
        backwards = b"".join(hashes[offset : offset + HASH_BYTES] for offset in offsets)
        self._append((False, tier, domain), backwards)

    def _append(self, kind: _Kind, hashes: bytes) -> None:
        if not hashes:
            return
        if self._events and self._events[-1][0] == kind:
            self._events[-1][1].append(hashes)
        else:
            self._events.append((kind, [hashes]))

    def take(self) -> list[CacheEvent]:
        events = [CacheEvent(*kind, b"".join(parts)) for kind, parts in self._events]
        self._events.clear()
        return events


def in_chunks(
    blocks: Iterator[tuple[Tier, str, bytes]], chunk_blocks: int
) -> Iterator[list[CacheEvent]]:
    """Cut (tier, domain, packed hashes) into lists of `stored` events of about `chunk_blocks`."""
    events: list[CacheEvent] = []
    room = chunk_blocks * HASH_BYTES
    for tier, domain, hashes in blocks:
        for offset in range(0, len(hashes), chunk_blocks * HASH_BYTES):
            part = hashes[offset : offset + chunk_blocks * HASH_BYTES]
            if len(part) > room:
                yield events
                events, room = [], chunk_blocks * HASH_BYTES
            events.append(CacheEvent(True, tier, domain, part))
            room -= len(part)
    if events:
        yield events
