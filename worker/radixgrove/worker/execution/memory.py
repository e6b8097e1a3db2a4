"""How much KV fits: budgets of host and device, and the arithmetic as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.fit import count_parameters
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service.machine import memory_limit
from radixgrove.worker.attention.kv_pool import KvGroup, KvShape
from radixgrove.worker.parallel.group import Shard

GIB = 1 << 30
# Without `kv_tokens` a CPU engine takes no more than this: it shares its machine.
_CPU_POOL_BYTES = 2 * GIB
# Of the host memory that is free, what a host tier may take: the process itself grows yet.
_HOST_TIER_SHARE = 0.95
# Free memory left beside the pool on CUDA: allocator fragmentation and library workspaces.
_CUDA_MARGIN = GIB // 4


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
    unused = memory_limit() - psutil.Process().memory_info().rss
    free = min(unused, psutil.virtual_memory().available)
    needed = local * pages * shape.page_bytes
    if needed > free * _HOST_TIER_SHARE:
        raise MemoryShortage(
            f"{asked} needs {_gib(needed)} of host memory, but {_gib(max(free, 0))} are free, of "
            f"which a host tier may take {_HOST_TIER_SHARE:.0%}; lower host_cache_gib"
        )
    return pages


def cpu_kv_tokens(
    settings: WorkerSettings, shape: KvShape, wanted: int, ranks: int, host_pages: int = 0
) -> int:
    """Tokens of a CPU pool, after the weights are loaded.

    Args:
        wanted: no pool needs more than this many tokens (all rows at full length).
        ranks: on this machine.
        host_pages: of the host tier, which will take its memory page by page.
    """
    used = psutil.Process().memory_info().rss
    within = int(memory_limit() * settings.memory_fraction) // ranks - used
    free = int(psutil.virtual_memory().available * settings.memory_fraction) // ranks
    budget = min(within, free) - host_pages * shape.page_bytes
    if settings.kv_tokens is not None:
        return _fixed(settings.kv_tokens, shape, budget)
    return _pool_tokens(min(budget, _CPU_POOL_BYTES), shape, wanted)


def cuda_kv_tokens(
    settings: WorkerSettings, shape: KvShape, use: CudaUse, wanted: int, ranks: int = 1
) -> int:
    """Tokens of a CUDA pool: what `memory_fraction` leaves beside everything measured.

    Args:
        wanted: no pool needs more than this many tokens (all rows at full length).
        ranks: that share the device, of which each counts the others' weights as `use.other`.
    """
    own = use.activations + use.graphs + _CUDA_MARGIN
    taken = use.weights + use.other + ranks * own
    budget = (int(use.total * settings.memory_fraction) - taken) // ranks
    if settings.kv_tokens is not None:
        return _fixed(settings.kv_tokens, shape, (use.total - taken) // ranks)
    if budget < shape.page_bytes:
        raise MemoryShortage(
            f"no memory left for KV: {settings.memory_fraction:.0%} of {_gib(use.total)} less "
            f"weights {_gib(use.weights)}, activations {_gib(use.activations)}, graphs "
            f"{_gib(use.graphs)}, other {_gib(use.other)}; raise memory_fraction, lower "
            "max_step_tokens or max_running, or spread the model with tp"
        )
    return _pool_tokens(budget, shape, wanted)


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


def _fixed(kv_tokens: int, shape: KvShape, budget: int) -> int:
    pages = kv_tokens // shape.page_size
    if pages < 1:
        raise MemoryShortage(f"kv_tokens {kv_tokens} is less than one page of {shape.page_size}")
    needed = pages * shape.page_bytes
    if needed > budget:
        raise MemoryShortage(
            f"kv_tokens {kv_tokens} needs {_gib(needed)}, but {_gib(max(budget, 0))} are free; "
            f"lower kv_tokens to {max(budget, 0) // shape.bytes_per_token} or less"
        )
    return pages * shape.page_size


def _pool_tokens(budget: int, shape: KvShape, wanted: int) -> int:
    page = shape.page_size
    pages = min(budget // shape.page_bytes, -(-wanted // page))
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
) -> str:
    """The memory arithmetic that a worker prints at start, per rank.

    Args:
        weights: bytes, of which `experts` are experts' that tokens choose from.
        quantized: bytes of projections by format.
    """
    pool = kv_tokens * shape.bytes_per_token
    tier_tokens = host_pages * shape.page_size
    tier = f"; host tier {_gib(host_pages * shape.page_bytes)} = {tier_tokens:,} tokens"
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    named = {"experts": experts, **(quantized or {})}
    chosen = "".join(f", {name} {_gib(size)} of that" for name, size in named.items() if size)
    return (
        f"memory{each}: weights {_gib(weights)}{chosen}; KV {_gib(pool)} = {kv_tokens:,} tokens of "
        f"{shape.bytes_per_token / 1024:.1f} KiB in pages of {shape.page_size} "
        f"({shape.dtype_name}{_by_group(shape)}); "
        f"{kv_tokens / max_model_len:.1f} requests of {max_model_len:,} tokens at once"
        + (tier if host_pages else "")
    )


def _by_group(shape: KvShape) -> str:
    """Which layers keep how much of a token, where they differ or do not attend to all of it."""
    if len(shape.groups) == 1 and not shape.groups[0].window:
        return ""
    return "; " + ", ".join(map(_group, shape.groups))


def _group(group: KvGroup) -> str:
    within = f" read within {group.window:,} tokens" if group.window else ""
    return f"{len(group.layers)} layers {group.bytes_per_token / 1024:.1f} KiB{within}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
