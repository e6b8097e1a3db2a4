"""How much KV fits: budgets of host and device, and the arithmetic as text for people."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.fit import count_parameters
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service.machine import memory_limit
from radixgrove.worker.attention.kv_pool import KvGroup, KvShape
from radixgrove.worker.execution import host_room
from radixgrove.worker.execution.choices import Limits
from radixgrove.worker.execution.host_room import GIB
from radixgrove.worker.parallel.group import Shard

# Without `kv_tokens` a CPU engine takes no more than this: it shares its machine.
_CPU_POOL_BYTES = 2 * GIB
# Free memory left beside the pool on CUDA: allocator fragmentation and library workspaces.
_CUDA_MARGIN = GIB // 4
# Tokens of a cached prompt, beside its last window, for which that window is kept.
_CACHED_PROMPT = 1024
# Window pages are worth their while from this part of a pool's bytes on.
_LEAST_SAVED = 1 / 10


class MemoryShortage(ModelError):
    """The model or its KV pool does not fit; the message names the setting to change."""


def kv_shape(
    config: ModelConfig,
    page_size: int,
    dtype: torch.dtype,
    shard: Shard,
    layers: range | None = None,
) -> KvShape:
    """One rank's pool: groups by window, those with the longest memory first.

    Args:
        dtype: of keys and values as pages hold them.
        layers: of the rank's stage; None: all.
    """
    attention = config.attention
    windows = [attention.window_of(layer) for layer in layers or range(config.num_layers)]
    groups = [
        KvGroup(
            layers=tuple(place for place, own in enumerate(windows) if own == window),
            kv_heads=shard.split(attention.kv_heads)[1],
            head_dim=attention.head_dim,
            dtype=dtype,
            window=window,
        )
        for window in sorted(set(windows), key=lambda window: -(window or math.inf))
    ]
    return KvShape(tuple(groups), page_size)


@dataclass(frozen=True, slots=True)
class WindowSizing:
    """How many window pages a pool has beside its pages: of a whole model, whatever its stages.

    Attributes:
        window: tokens.
        running: window pages that running rows hold or wait for at most, whatever the cache holds:
            each those that its window touches and what it is given next, steps in flight those that
            they write.
        share: of a page's bytes, over all layers, what layers with a window take.
    """

    window: int
    running: int
    share: float

    @classmethod
    def of(
        cls, settings: WorkerSettings, config: ModelConfig, limits: Limits
    ) -> WindowSizing | None:
        """None: layers with a window keep all pages. Where there are none, or no others, that costs
        nothing; and a host tier holds whole pages."""
        attention, page_size = config.attention, settings.page_size
        windowed = len(attention.windowed)
        if settings.host_cache_gib or not 0 < windowed < config.num_layers:
            return None
        window, rows = attention.window, limits.max_running
        steps = -(-limits.max_step_tokens // page_size) + rows
        running = rows * (-(-window // page_size) + 2) + (limits.depth + 2) * steps
        return cls(window, running, windowed / config.num_layers)

    def most(self, num_pages: int) -> int:
        """Beside so many pages, whether it is worth it or not."""
        cached = num_pages * self.window // (self.window + _CACHED_PROMPT)
        return min(num_pages, self.running + cached)

    def beside(self, num_pages: int) -> int:
        """Beside so many pages; 0: layers with a window keep all of them, since fewer would save
        next to nothing."""
        window_pages = self.most(num_pages)
        saved = (num_pages - window_pages) * self.share
        return window_pages if saved >= _LEAST_SAVED * num_pages else 0


@dataclass(frozen=True, slots=True)
class CudaUse:
    """Measured on the device, in bytes."""

    total: int
    weights: int
    activations: int  # peak above the weights
    graphs: int
    other: int  # contexts, libraries, other processes, buffers of the host tier


def host_tier_pages(settings: WorkerSettings, shape: KvShape, ranks: int, local: int = 1) -> int:
    """Pages of each rank's host tier, before anything else is allocated; 0: there is none.

    Args:
        ranks: that share `host_cache_gib`.
        local: those of them that are on this machine.

    Raises:
        MemoryShortage: less than a page, or more than this machine has free.
    """
    if not settings.host_cache_gib:
        return 0
    asked = f"host_cache_gib {settings.host_cache_gib:g}"
    pages = int(settings.host_cache_gib * GIB) // ranks // shape.page_bytes
    if pages < 1:
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise MemoryShortage(
            f"{asked} is less than one page of {shape.page_bytes / (1 << 20):.2f} MiB{each}; "
            "raise it, or set 0"
        )
    if why := host_room.shortage(local * pages * shape.page_bytes):
        raise MemoryShortage(f"{asked} {why}")
    return pages


def cpu_kv_tokens(
    settings: WorkerSettings,
    shape: KvShape,
    wanted: int,
    ranks: int,
    host_pages: int = 0,
    windows: WindowSizing | None = None,
) -> int:
    """Tokens of a CPU pool, after the weights are loaded.

    Args:
        wanted: no pool needs more than this many tokens (all rows at full length).
        ranks: on this machine.
        host_pages: of the host tier, which will take its memory page by page.
        windows: what layers with a window keep; None: all.
    """
    used = psutil.Process().memory_info().rss
    within = int(memory_limit() * settings.memory_fraction) // ranks - used
    free = int(psutil.virtual_memory().available * settings.memory_fraction) // ranks
    budget = min(within, free) - host_pages * shape.page_bytes
    if settings.kv_tokens is not None:
        return _fixed(settings.kv_tokens, shape, budget, windows)
    return _pool_tokens(min(budget, _CPU_POOL_BYTES), shape, wanted, windows)


def cuda_kv_tokens(
    settings: WorkerSettings,
    shape: KvShape,
    use: CudaUse,
    wanted: int,
    ranks: int = 1,
    windows: WindowSizing | None = None,
) -> int:
    """Tokens of a CUDA pool: what `memory_fraction` leaves beside everything measured.

    Args:
        wanted: no pool needs more than this many tokens (all rows at full length).
        ranks: that share the device, of which each counts the others' weights as `use.other`.
        windows: what layers with a window keep; None: all.
    """
    own = use.activations + use.graphs + _CUDA_MARGIN
    taken = use.weights + use.other + ranks * own
    budget = (int(use.total * settings.memory_fraction) - taken) // ranks
    if settings.kv_tokens is not None:
        return _fixed(settings.kv_tokens, shape, (use.total - taken) // ranks, windows)
    if budget < shape.page_bytes:
        raise MemoryShortage(
            f"no memory left for KV: {settings.memory_fraction:.0%} of {_gib(use.total)} less "
            f"weights {_gib(use.weights)}, activations {_gib(use.activations)}, graphs "
            f"{_gib(use.graphs)}, other {_gib(use.other)}; raise memory_fraction, lower "
            "max_step_tokens or max_running, or spread the model with tp"
        )
    return _pool_tokens(budget, shape, wanted, windows)


def check_weights(
    config: ModelConfig, bytes_per_number: int, device: torch.device, ranks: int
) -> None:
    """Refuse weights that are larger than the device, before anything is allocated for them.

    Args:
        bytes_per_number: at least.
        ranks: that share the model.

    Raises:
        MemoryShortage: a rank's part does not fit, whatever else the device has to hold.
    """
    least = count_parameters(config) * bytes_per_number // ranks
    on_cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_cuda else memory_limit()
    if least > total:
        raise MemoryShortage(
            f"weights of {_gib(least)} on each of {ranks} ranks do not fit {_gib(total)} of "
            "memory; spread the model with tp or pp, or check the sizes in its config.json"
        )


def cuda_shortage(device: torch.device, doing: str) -> str:
    """What to tell when CUDA ran out of memory."""
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"out of memory {doing}: {_gib(total)} in all, {_gib(torch.cuda.memory_reserved(device))} "
        f"taken here, {_gib(free)} free; lower memory_fraction, max_step_tokens or max_running, or "
        "spread the model with tp"
    )


def _fixed(kv_tokens: int, shape: KvShape, budget: int, windows: WindowSizing | None) -> int:
    pages = kv_tokens // shape.page_size
    if pages < 1:
        raise MemoryShortage(f"kv_tokens {kv_tokens} is less than one page of {shape.page_size}")
    needed = shape.pool_bytes(pages, windows.beside(pages) if windows else 0)
    if needed > budget:
        raise MemoryShortage(
            f"kv_tokens {kv_tokens} needs {_gib(needed)}, but {_gib(max(budget, 0))} are free; "
            f"lower kv_tokens to {_fitting(budget, shape, windows, pages)}"
        )
    return pages * shape.page_size


def _fitting(budget: int, shape: KvShape, windows: WindowSizing | None, pages: int) -> int:
    """The most that `kv_tokens` can be below `pages`, which do not fit."""
    whole = max(budget, 0) // shape.bytes_per_token
    if windows is None or not windows.beside(pages):
        return whole  # fewer pages have no window pages beside them either
    most = _most_pages(budget, shape, windows)
    return most * shape.page_size if windows.beside(most) else whole


def _most_pages(budget: int, shape: KvShape, windows: WindowSizing | None) -> int:
    """That fit, with window pages beside them whether these are worth it or not."""
    whole = max(budget, 0) // shape.page_bytes
    if windows is None:
        return whole

    def needed(pages: int) -> int:
        return shape.pool_bytes(pages, windows.most(pages))

    # Of `needed` no less than the cache's part of each page.
    bound = (whole + 2) * (windows.window + _CACHED_PROMPT) // windows.window
    return bisect_right(range(bound + 1), max(budget, 0), key=needed) - 1


def _pool_tokens(budget: int, shape: KvShape, wanted: int, windows: WindowSizing | None) -> int:
    page = shape.page_size
    pages = min(_most_pages(budget, shape, windows), -(-wanted // page))
    if pages < 1:
        raise MemoryShortage(
            f"{_gib(max(budget, 0))} are free for KV, less than one page; free memory or raise "
            "memory_fraction"
        )
    return pages * page


def describe(
    weights: int,
    shape: KvShape,
    kv_tokens: int,
    max_model_len: int,
    ranks: int,
    host_pages: int = 0,
    experts: int = 0,
    quantized: Mapping[str, int] | None = None,
    window_pages: int = 0,
) -> str:
    """The memory arithmetic that a worker prints at start, per rank.

    Args:
        weights: bytes, of which `experts` are experts' that tokens choose from.
        quantized: bytes of projections by format.
        window_pages: 0: layers with a window keep all pages.
    """
    pool = shape.pool_bytes(kv_tokens // shape.page_size, window_pages)
    tier_tokens = host_pages * shape.page_size
    tier = f"; host tier {_gib(host_pages * shape.page_bytes)} = {tier_tokens:,} tokens"
    if len(shape.groups) > 1:
        tier += ", and for it layers with a window keep all pages"
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    most = "up to " if window_pages else ""
    named = {"experts": experts, **(quantized or {})}
    chosen = "".join(f", {name} {_gib(size)} of that" for name, size in named.items() if size)
    return (
        f"memory{each}: weights {_gib(weights)}{chosen}; KV {_gib(pool)} = {kv_tokens:,} tokens of "
        f"{most}{shape.bytes_per_token / 1024:.1f} KiB in pages of {shape.page_size} "
        f"({shape.dtype_name}{_by_group(shape, window_pages)}); "
        f"{kv_tokens / max_model_len:.1f} requests of {max_model_len:,} tokens at once"
        + (tier if host_pages else "")
    )


def _by_group(shape: KvShape, window_pages: int) -> str:
    """Which layers keep how much of a token, where they differ or do not attend to all of it."""
    if len(shape.groups) == 1 and not shape.groups[0].window:
        return ""
    kept = window_pages * shape.page_size
    return "; " + ", ".join(_group(group, kept) for group in shape.groups)


def _group(group: KvGroup, kept: int) -> str:
    """
    Args:
        kept: tokens that groups with a window have room for; 0: as many as others.
    """
    within = f" read within {group.window:,} tokens" if group.window else ""
    if group.window and kept:
        within += f" and kept of {kept:,}"
    return f"{len(group.layers)} layers {group.bytes_per_token / 1024:.1f} KiB{within}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
