"""The KV pool of a rank: groups of layers, each with a tensor, a layout and a memory of its own.

Page p of every group holds the same tokens: rows have one table of pages, which ownership, the tree
and copies go by. Groups with a window may have fewer pages, window pages, since they need a page's
part only while it is in some row's window: rows then have a second table, of these. What a group
keeps of a page is its own affair: all that others ask for is a tensor of
`[layers, parts, pages + 1, *entry]` and how many bytes a page takes. For keys and values `parts`
are K and V, and an entry is `[page_size, kv_heads, head_dim]`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.settings import KVDType


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that keep the same of a token for as long."""

    layers: tuple[int, ...]  # of the rank's stage, ascending
    kv_heads: int  # on the rank
    head_dim: int
    dtype: torch.dtype
    window: int = 0  # tokens that they attend to; 0: all

    @property
    def bytes_per_token(self) -> int:
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    def page_bytes(self, page_size: int) -> int:
        return page_size * self.bytes_per_token

    def allocate(self, num_pages: int, page_size: int, device: torch.device) -> Tensor:
        """One scratch page longer; zeroed, so that masked garbage is never NaN."""
        entry = page_size, self.kv_heads, self.head_dim
        shape = len(self.layers), 2, num_pages + 1, *entry
        if device.type == "cuda":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        # The kernel hands out zeroed memory as it is touched; filling gigabytes delays the start.
        memory = mmap.mmap(-1, (num_pages + 1) * self.page_bytes(page_size))
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class KvShape:
    """A pool's geometry on one rank."""

    groups: tuple[KvGroup, ...]
    page_size: int

    @property
    def dtype_name(self) -> str:
        """As the settings name it."""
        return " and ".join(dict.fromkeys(_name(group.dtype) for group in self.groups))

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def window_bytes_per_token(self) -> int:
        """Those of `bytes_per_token` that groups with a window take."""
        return sum(group.bytes_per_token for group in self.groups if group.window)

    @property
    def page_bytes(self) -> int:
        return sum(group.page_bytes(self.page_size) for group in self.groups)

    def pool_bytes(self, num_pages: int, num_window_pages: int = 0) -> int:
        """Of what a pool may hold: `num_pages`, and in groups with a window `num_window_pages` of
        them; 0: as many as in the others."""
        windowed = self.page_size * self.window_bytes_per_token
        others = self.page_bytes - windowed
        return num_pages * others + (num_window_pages or num_pages) * windowed

    def allocated_bytes(self, num_pages: int, num_window_pages: int = 0) -> int:
        """The same, scratch pages included."""
        return self.pool_bytes(num_pages, num_window_pages) + self.page_bytes

    def allocate(self, num_pages: int, device: torch.device, num_window_pages: int = 0) -> KvPool:
        counts = [(num_window_pages if group.window else 0) or num_pages for group in self.groups]
        tensors = [
            group.allocate(count, self.page_size, device)
            for group, count in zip(self.groups, counts, strict=True)
        ]
        return KvPool(self, tensors, num_pages, num_window_pages)


class KvPool:
    """The tensors of a shape's groups; the last page of each is scratch.

    Attributes:
        num_pages: without the scratch page.
        num_window_pages: the same in groups with a window, where these have pages of their own;
            0: they have those of the others, or the stage has no such groups.
        places: of each layer of the stage, its group and its place in that.
        pages: of each layer of the stage, `[parts, pages + 1, *entry]`.
    """

    def __init__(
        self, shape: KvShape, tensors: list[Tensor], num_pages: int, num_window_pages: int = 0
    ) -> None:
        self.shape = shape
        self.tensors = tensors
        self.num_pages = num_pages
        windowed = any(group.window for group in shape.groups)
        self.num_window_pages = num_window_pages if windowed else 0
        placed = {
            layer: (index, place)
            for index, group in enumerate(shape.groups)
            for place, layer in enumerate(group.layers)
        }
        self.places = [placed[layer] for layer in range(len(placed))]
        self.pages = [tensors[index][place] for index, place in self.places]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Pages as one piece of memory each, the groups side by side, seen group by group.

        Args:
            packed: [n, page_bytes] uint8, on any device.

        Returns:
            A view a group, `[n, layers, parts, *entry]`.
        """
        return list(self._unpack(packed))

    def _unpack(self, packed: Tensor) -> Iterator[Tensor]:
        begin = 0
        for group, tensor in zip(self.shape.groups, self.tensors, strict=True):
            end = begin + group.page_bytes(self.shape.page_size)
            layers, parts, _, *entry = tensor.shape
            yield packed[:, begin:end].view(tensor.dtype).view(len(packed), layers, parts, *entry)
            begin = end


def _name(dtype: torch.dtype) -> str:
    return KVDType.FP8_E4M3.value if dtype == FLOAT8 else str(dtype).removeprefix("torch.")
