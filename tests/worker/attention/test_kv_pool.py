"""A pool of several groups, its sizes and its copies on the host, against plain dictionaries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.kernels.float8 import FLOAT8, bits
from radixgrove.protocol.settings import Device, WorkerSettings
from radixgrove.worker.attention.kv_pool import KvGroup, KvPool, KvShape
from radixgrove.worker.execution.memory import CudaUse, cuda_kv_tokens, host_tier_pages
from radixgrove.worker.execution.page_copier import CpuPageCopier
from radixgrove.worker.execution.pinned import HostMemory
from radixgrove.worker.plan import PageCopies, StepPlan

CPU = torch.device("cpu")
MIB = 1 << 20


@st.composite
def shapes(draw: st.DrawFn) -> KvShape:
    """Up to six layers dealt out to up to three groups of any geometry and dtype."""
    owners = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    groups = tuple(
        KvGroup(
            layers=tuple(layer for layer, own in enumerate(owners) if own == owner),
            kv_heads=draw(st.integers(1, 3)),
            head_dim=2 * draw(st.integers(1, 5)),
            dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, FLOAT8])),
            window=draw(st.sampled_from([0, 5])),
        )
        for owner in draw(st.permutations(sorted(set(owners))))
    )
    return KvShape(groups, page_size=draw(st.sampled_from([1, 4])))


def test_entries_of_a_page_lie_side_by_side() -> None:
    wide = KvGroup(layers=(1,), kv_heads=1, head_dim=2, dtype=torch.float32)
    narrow = KvGroup(layers=(0, 2), kv_heads=3, head_dim=2, dtype=FLOAT8, window=7)
    pool = KvShape((wide, narrow), page_size=4).allocate(5, CPU)
    assert pool.shape.page_bytes == 4 * (2 * 1 * 2 * 4 + 2 * 2 * 3 * 2)
    assert pool.shape.dtype_name == "float32 and fp8_e4m3"
    assert pool.places == [(1, 0), (0, 0), (1, 1)]
    assert [page.shape for page in pool.pages] == [
        (2, 6, 4, 3, 2),
        (2, 6, 4, 1, 2),
        (2, 6, 4, 3, 2),
    ]
    pool.tensors[1][1].fill_(1.0)
    assert pool.pages[2].float().eq(1.0).all()
    packed = torch.zeros(3, pool.shape.page_bytes, dtype=torch.uint8)
    first, second = pool.unpack(packed)
    assert (first.shape, second.shape) == ((3, 1, 2, 4, 1, 2), (3, 2, 2, 4, 3, 2))
    first[1], bits(second)[1] = 1.0, 0xFF
    assert packed[1].count_nonzero() == 64 // 2 + 96  # a float32 of 1 has two bytes of zeros
    assert not packed[[0, 2]].any()


def test_groups_with_a_window_may_have_fewer_pages() -> None:
    full = KvGroup(layers=(1,), kv_heads=1, head_dim=2, dtype=torch.float32)
    windowed = KvGroup(layers=(0, 2), kv_heads=3, head_dim=2, dtype=FLOAT8, window=7)
    shape = KvShape((full, windowed), page_size=4)
    pool = shape.allocate(9, CPU, 3)
    assert [page.shape[1] for page in pool.pages] == [3 + 1, 9 + 1, 3 + 1]
    assert (pool.num_pages, pool.num_window_pages) == (9, 3)
    assert shape.window_bytes_per_token == 2 * 2 * 3 * 2
    assert shape.pool_bytes(9, 3) == 4 * (9 * 2 * 1 * 2 * 4 + 3 * 2 * 2 * 3 * 2)
    assert sum(tensor.nbytes for tensor in pool.tensors) == shape.allocated_bytes(9, 3)
    # Of a pipeline, a stage with layers of one kind alone.
    whole = KvShape((replace(full, layers=(0,)),), 4).allocate(9, CPU, 3)
    assert (whole.pages[0].shape[1], whole.num_pages, whole.num_window_pages) == (10, 9, 0)
    narrow = KvShape((replace(windowed, layers=(0,)),), 4).allocate(9, CPU, 3)
    assert (narrow.pages[0].shape[1], narrow.num_pages, narrow.num_window_pages) == (4, 9, 3)


@given(shapes(), st.integers(1, 8), st.integers(0, 3 * MIB))
def test_a_pool_takes_what_the_arithmetic_says(shape: KvShape, pages: int, left: int) -> None:
    pool = shape.allocate(pages, CPU)
    assert sum(tensor.nbytes for tensor in pool.tensors) == shape.allocated_bytes(pages)
    assert shape.page_bytes == shape.page_size * shape.bytes_per_token
    # What the device has left is filled, and not exceeded.
    settings = WorkerSettings(device=Device.CPU, memory_fraction=0.5, host_cache_gib=0.001)
    use = CudaUse(total=1 << 40, weights=0, activations=0, graphs=0, other=0)
    budget = int(use.total * 0.5) - 256 * MIB
    tokens = cuda_kv_tokens(settings, shape, use, wanted=1 << 60)
    assert (
        tokens * shape.bytes_per_token
        <= budget
        < (tokens + shape.page_size) * shape.bytes_per_token
    )
    host = host_tier_pages(settings, shape, ranks=2)
    assert host * shape.page_bytes <= int(0.001 * (1 << 30)) // 2 < (host + 1) * shape.page_bytes


# ---- copies -------------------------------------------------------------------------------------

PAGES, HOST_PAGES = 6, 5


@dataclass
class Copy:
    """Of distinct pages to distinct host pages, or back."""

    saves: bool
    pages: list[int]
    host_pages: list[int]


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    count = draw(st.integers(1, 4))
    pages = draw(st.permutations(range(PAGES)))[:count]
    return Copy(draw(st.booleans()), pages, draw(st.permutations(range(HOST_PAGES)))[:count])


def fill(pool: KvPool, seed: int) -> dict[int, list[bytes]]:
    """Random pages, and of each the bytes of every layer."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in pool.tensors:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 120, raw.shape, dtype=torch.uint8, generator=generator))
    return contents(pool)


def contents(pool: KvPool) -> dict[int, list[bytes]]:
    def of(layer: torch.Tensor, page: int) -> bytes:
        return layer[:, page].contiguous().view(torch.uint8).numpy().tobytes()

    return {page: [of(layer, page) for layer in pool.pages] for page in range(pool.num_pages + 1)}


@given(shapes(), st.lists(copies(), max_size=6), st.integers(0, 99))
def test_copies_move_whole_pages_of_every_group(
    shape: KvShape, operations: list[Copy], seed: int
) -> None:
    pool = shape.allocate(PAGES, CPU)
    device: dict[int, list[bytes]] = fill(pool, seed)
    host: dict[int, Any] = {}
    unit = shape.page_bytes
    tier = CpuPageCopier(pool, HostMemory(HOST_PAGES * unit, unit, CPU))
    empty = [bytes(len(entry)) for entry in device[0]]
    for number, copy in enumerate(operations, 1):
        planned = [PageCopies(number, copy.pages, copy.host_pages)]
        if copy.saves:
            host |= {to: device[page] for page, to in zip(copy.pages, copy.host_pages, strict=True)}
            tier.launch(StepPlan(step_id=number, saves=planned), False)
        else:
            for page, origin in zip(copy.pages, copy.host_pages, strict=True):
                device[page] = host.get(origin, empty)
            tier.launch(StepPlan(step_id=number, loads=planned), False)
        assert contents(pool) == device
    tier.close()
