"""What was sent to a replica, as a guess at what it caches.

Used for replicas that publish no events, and for all of them while Redis is away.
"""

from __future__ import annotations

from collections import OrderedDict

from radixgrove.protocol.blocks import MEMBER_BYTES

DEFAULT_CAPACITY = 1 << 16


class SentIndex:
    """Blocks of one replica, least recently sent first out.

    A block is always younger than those behind it, so that what is left is closed under "parent of"
    and a prefix can be bisected.
    """

    __slots__ = ("_blocks", "capacity")

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self.capacity = capacity

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, members: bytes) -> int:
        """How many leading blocks of a packed path were sent there."""
        blocks = self._blocks
        low, high = 0, len(members) // MEMBER_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            if members[(middle - 1) * MEMBER_BYTES : middle * MEMBER_BYTES] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, members: bytes) -> None:
        blocks = self._blocks
        count = min(len(members) // MEMBER_BYTES, self.capacity)
        for offset in range((count - 1) * MEMBER_BYTES, -1, -MEMBER_BYTES):
            block = members[offset : offset + MEMBER_BYTES]
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
