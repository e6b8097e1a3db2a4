"""What the radix tree is made of."""

from __future__ import annotations

from typing import NamedTuple


class CacheScope(NamedTuple):
    """What two prompts must share, beside their tokens, to share pages."""

    namespace: str  # model, weight version, dtypes of weights and KV: `cache_namespace`
    domain: str  # "public" or a principal


class TreeNode:
    """Pages [start, end) of every prompt that passes through here. A root holds no page.

    All of them are on the device, on the host, or on both: `pages` and `host` are each empty or
    complete. Whatever is on the device has its parent there, unless that is a root.
    """

    __slots__ = (
        "children",
        "created",
        "device_children",
        "fence",
        "hashes",
        "hits",
        "host",
        "host_children",
        "key",
        "loaded_by",
        "pages",
        "parent",
        "priority",
        "ref_count",
        "saved_by",
        "scope",
        "size",
        "spoiled",
        "start",
        "tail",
        "used",
    )

    def __init__(
        self, scope: CacheScope, parent: TreeNode | None, key: bytes, pages: list[int], tail: bytes
    ) -> None:
        self.scope = scope
        self.parent = parent
        self.start: int = 0 if parent is None else parent.end
        self.key = key
        self.size = len(pages)
        self.pages = pages  # of the device
        self.host: list[int] = []  # pages of the host
        self.saved_by = 0  # the save that fills `host`
        self.loaded_by = 0  # the load that fills `pages`, if they came from the host
        self.device_children = 0  # how many of the children are on the device
        self.host_children = 0
        self.children: dict[bytes, TreeNode] = {}
        self.ref_count = 0
        self.hashes = b""  # of the index blocks that end in this node's pages
        self.tail = tail  # hash of the last index block that ends at or before this node's end
        self.created = 0
        self.used = 0
        self.hits = 0
        self.priority = 0
        self.spoiled = False  # holds NaN, and goes once it is unlocked
        self.fence = 0  # the last step that may read `pages`

    @property
    def end(self) -> int:
        return self.start + self.size
