"""What the radix tree is made of."""

from __future__ import annotations

from typing import NamedTuple


class Scope(NamedTuple):
    """What two prompts must share, beside their tokens, to share pages."""

    namespace: str  # model, weight version, adapter, KV dtype
    domain: str  # "public" or a principal


class Node:
    """Pages [start, end) of every prompt that passes through here. A root holds no page."""

    __slots__ = (
        "children",
        "created",
        "fence",
        "hashes",
        "hits",
        "key",
        "locks",
        "pages",
        "parent",
        "priority",
        "scope",
        "start",
        "tail",
        "used",
    )

    def __init__(
        self, scope: Scope, parent: Node | None, key: bytes, pages: list[int], tail: bytes
    ) -> None:
        self.scope = scope
        self.parent = parent
        self.start: int = 0 if parent is None else parent.end
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.hashes = b""  # of the index blocks that end in this node's pages
        self.tail = tail  # hash of the last index block that ends at or before this node's end
        self.created = 0
        self.used = 0
        self.hits = 0
        self.priority = 0
        self.fence = 0  # the last step that may read these pages

    @property
    def end(self) -> int:
        return self.start + len(self.pages)
