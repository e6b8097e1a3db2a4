"""The host tier: pages go to host memory and come back as they were, in the order plans say.

What is about streams and events is marked `gpu`: a long sleep before a copy would show a wait that
is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import AttentionChoice
from radixgrove.worker.attention.kv_pool import KvGroup, KvPool, KvShape
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.execution import page_copier, pinned
from radixgrove.worker.execution.graphs import DecodeGraphs
from radixgrove.worker.execution.memory import MemoryShortage, kv_shape
from radixgrove.worker.execution.page_copier import CpuPageCopier, CudaPageCopier, PageCopier, runs
from radixgrove.worker.execution.pinned import HostMemory
from radixgrove.worker.execution.prefill_graphs import MixedGraphs
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.execution.select_attention import select_attention
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.messages import TokenLogprobs
from radixgrove.worker.models.context import TensorPlacement
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.ops import choose_ops
from radixgrove.worker.models.weights import load_safetensors
from radixgrove.worker.parallel.group import Shard, TensorParallel
from radixgrove.worker.plan import (
    Executor,
    ExecutorInfo,
    NewRow,
    PageCopies,
    PrefillChunk,
    StepPlan,
)
from radixgrove.worker.runtime import Runtime
from tests.conftest import wait_until
from tests.worker.execution import tiny
from tests.worker.parallel.ranks import run_group, settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DEVICES = pytest.mark.parametrize(
    "device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str
)
LAYERS = KvGroup(layers=(0, 1, 2), kv_heads=2, head_dim=24, dtype=torch.float32)
SHAPE = KvShape((LAYERS,), page_size=16)
SLEEP = 300_000_000  # cycles of a GPU, some 0.2 s


def random_pool(shape: KvShape, pages: int, device: torch.device) -> KvPool:
    pool = shape.allocate(pages, device)
    generator = torch.Generator().manual_seed(1)
    for tensor in pool.tensors:
        values = torch.randint(0, 120, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        as_bytes(tensor).copy_(values.view((*tensor.shape[:-1], -1)))
    return pool


def as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def make_tier(pool: KvPool, host_pages: int) -> PageCopier:
    unit = pool.shape.page_bytes
    memory = HostMemory(host_pages * unit, unit, pool.device)
    memory.wait(lambda done: None)
    if pool.device.type == "cuda":
        return CudaPageCopier(pool, memory, 0)
    return CpuPageCopier(pool, memory)


def await_copies(tier: PageCopier | Executor, saved: int, loaded: int) -> None:
    ended = tier.ended if isinstance(tier, PageCopier) else tier.copies_ended
    wait_until(lambda: ended() == (saved, loaded), what="the copies' end")


@DEVICES
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8], ids=str)
def test_pages_come_back_as_they_were(
    dtype: torch.dtype, page_size: int, device: torch.device
) -> None:
    shape = KvShape((replace(LAYERS, dtype=dtype),), page_size)
    pool = random_pool(shape, 9, device)
    before = as_bytes(pool.tensors[0]).clone()
    tier = make_tier(pool, 12)
    tier.launch(StepPlan(step_id=1, saves=[PageCopies(1, [8, 0, 5, 1], [3, 10, 4, 11])]), False)
    await_copies(tier, 1, 0)
    for page, host_page in ((8, 3), (0, 10), (5, 4), (1, 11)):
        assert torch.equal(as_bytes(tier.groups[0][host_page]), before[:, :, page].cpu())
    untouched = [0, 1, 2, 5, 6, 7, 8, 9]
    assert not tier.host[untouched].any()

    loads = [PageCopies(1, [2, 3], [10, 3], after=1), PageCopies(2, [6, 8], [11, 4], after=1)]
    tier.launch(StepPlan(step_id=2, saved=1, loads=loads), False)
    await_copies(tier, 1, 2)
    expected = before.clone()
    expected[:, :, [2, 3, 6, 8]] = before[:, :, [0, 8, 1, 5]]
    assert torch.equal(as_bytes(pool.tensors[0]), expected)
    tier.close()


@DEVICES
def test_a_copy_may_be_larger_than_what_is_moved_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than the staging buffer, and than what CUDA knows as one block of memory."""
    monkeypatch.setattr(page_copier, "_STAGING_BYTES", 3 * SHAPE.page_bytes)
    monkeypatch.setattr(pinned, "_CHUNK", 4 * SHAPE.page_bytes)
    kv = random_pool(SHAPE, 11, device)
    (pool,) = kv.tensors
    before = pool.clone()
    tier = make_tier(kv, 11)
    pages, host_pages = [4, 9, 0, 7, 2, 10, 1, 8, 3, 6, 5], list(range(11))
    tier.launch(StepPlan(step_id=1, saves=[PageCopies(1, pages, host_pages)]), False)
    await_copies(tier, 1, 0)
    assert torch.equal(tier.groups[0], before[:, :, pages].movedim(2, 0).cpu())
    pool[:, :, :11] = 0
    tier.launch(StepPlan(step_id=2, loads=[PageCopies(1, pages, host_pages)]), False)
    await_copies(tier, 1, 1)
    assert torch.equal(pool, before)
    tier.close()


@given(st.lists(st.integers(0, 40), min_size=1, unique=True).map(sorted), st.integers(1, 9))
def test_runs_are_as_long_as_blocks_let_them_be(ids: list[int], block: int) -> None:
    found = runs(np.array(ids), block)
    assert [i for begin, end in found for i in range(begin, end)] == list(range(len(ids)))
    for begin, end in found:
        assert ids[begin:end] == list(range(ids[begin], ids[begin] + end - begin))
        assert ids[begin] // block == ids[end - 1] // block
    for (_, end), (begin, _) in pairwise(found):
        adjacent = ids[end - 1] + 1 == ids[begin]
        assert not adjacent or ids[begin] % block == 0


@DEVICES
def test_its_speed_is_measured(device: torch.device) -> None:
    tier = make_tier(random_pool(SHAPE, 9, device), 12)
    assert tier.measure() > 0
    assert tier.ended() == (0, 0)
    tier.close()


# ---- steps that read what was loaded -----------------------------------------------------------

PAGE, PREFIX = 16, 64
PAGES, HOST_PAGES = list(range(4)), [9, 2, 3, 7]
OTHER = [10, 11, 12, 13]  # where they are loaded to
REST = 20  # tokens behind the prefix, in these pages
TAIL = [20, 21]


def make_runner(directory: Path, device: torch.device) -> Runner:
    config = load_config(directory)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    place = TensorPlacement(TensorParallel(Shard()), dtype, device)
    model = Decoder(config, place, choose_ops(device, dtype))
    load_safetensors(model.parts(), directory, lambda done: None)
    model.prepare()
    info = ExecutorInfo(
        num_pages=32,
        page_size=PAGE,
        max_rows=4,
        max_model_len=128,
        vocab_size=config.vocab_size,
        depth=2,
        num_host_pages=12,
    )
    pool = random_pool(kv_shape(config, PAGE, dtype, Shard()), info.num_pages, device)
    backend = AttentionChoice.TRITON if device.type == "cuda" else AttentionChoice.TORCH
    attention, _ = select_attention(backend, pool, config, Shard(), dtype, lambda phase: None)
    table = RequestTable(
        max_rows=info.max_rows,
        max_model_len=info.max_model_len,
        page_size=PAGE,
        scratch_page=info.num_pages,
        device=device,
    )
    tier = make_tier(pool, info.num_host_pages)
    tier.measure()  # compiles what would take longer than the sleeps below
    return Runner(model, attention, table, info, 30.0, tier)


def enter(row: int, length: int, pages: list[int]) -> NewRow:
    tokens = torch.randint(tiny.VOCAB, (length,), generator=torch.Generator().manual_seed(2))
    sampling = SamplingParams(max_tokens=4, seed=0, temperature=0.0, logprobs=5)
    return NewRow(
        row=row,
        token_ids=tokens.numpy().astype("<i4").tobytes(),
        prompt_len=length,
        pages=pages,
        sampling=sampling,
    )


def chunk_behind(pages: list[int], step_id: int, **copies: object) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        new_rows=[enter(1, PREFIX + REST, pages + TAIL)],
        prefills=[PrefillChunk(1, PREFIX, REST, True)],
        **copies,  # type: ignore[arg-type]
    )


def decode_behind(pages: list[int], step_id: int, **copies: object) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        new_rows=[enter(1, PREFIX + 1, pages + TAIL)],
        decodes=[1],
        **copies,  # type: ignore[arg-type]
    )


def step(executor: Executor, plan: StepPlan) -> tuple[list[int], dict[int, list[TokenLogprobs]]]:
    executor.launch(plan)
    result = executor.collect()
    return result.tokens, result.logprobs


def fill_prefix(executor: Executor) -> None:
    """Compute the prefix in `PAGES`, in step 1."""
    plan = StepPlan(
        step_id=1,
        new_rows=[enter(0, PREFIX + 1, [*PAGES, 30])],
        prefills=[PrefillChunk(0, 0, PREFIX, False)],
    )
    assert step(executor, plan) == ([], {})


def save_prefix(executor: Executor) -> None:
    """A plan that only copies, step 2 after step 1."""
    plan = StepPlan(step_id=2, collected=1, saves=[PageCopies(1, PAGES, HOST_PAGES)])
    assert step(executor, plan) == ([], {})
    await_copies(executor, 1, 0)


def loading() -> dict[str, object]:
    load = PageCopies(1, OTHER, HOST_PAGES, after=1)
    return {"collected": 2, "saved": 1, "loads": [load], "awaited": 1}


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("behind", [chunk_behind, decode_behind])
@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("llama", CPU),
        ("gemma3", CPU),
        pytest.param("qwen3", CUDA, marks=pytest.mark.gpu),
        pytest.param("gemma3", CUDA, marks=pytest.mark.gpu),
    ],
)
def test_a_step_reads_loaded_pages_as_if_it_had_computed_them(
    kind: str,
    behind: Callable[..., StepPlan],
    replayed: bool,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny.save(kind, tmp_path)
    runner = make_runner(tmp_path, device)
    by_layer = count_calls(monkeypatch, page_copier, "scatter_layer")
    graphs: list[DecodeGraphs | MixedGraphs] = []
    if replayed:
        graphs.append(runner.capture([1, 4], lambda text, done: None))
        graphs.append(runner.capture_mixed([32], lambda text, done: None))
    fill_prefix(runner)
    expected = step(runner, behind(PAGES, 1))
    assert step(runner, behind(OTHER, 1)) != expected, "the prefix does not matter"
    save_prefix(runner)
    replays = sum(graph.replays for graph in graphs)
    if device.type == "cuda":
        delay_loads(runner)
    runner.launch(behind(OTHER, 3, **loading()))
    on_gpu = device.type == "cuda"
    assert runner.copies_ended() == (1, 0 if on_gpu else 1), (
        "too late to show that a wait is missing"
    )
    result = runner.collect()
    assert (result.tokens, result.logprobs) == expected
    assert runner.copies_ended() == (1, 1)
    assert len(by_layer) == (3 if on_gpu and not replayed else 0)
    assert sum(graph.replays for graph in graphs) == replays + replayed
    runner.close()


def delay_loads(runner: Runner) -> None:
    assert isinstance(runner._host, CudaPageCopier)
    sleep(runner._host.load_stream)


def count_calls(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[None]:
    calls: list[None] = []
    function = getattr(module, name)

    def counting(*args: object) -> None:
        calls.append(None)
        function(*args)

    monkeypatch.setattr(module, name, counting)
    return calls


# ---- every rank follows what rank 0 had seen the end of ----------------------------------------


@pytest.fixture
def cuda_tier() -> Iterator[CudaPageCopier]:
    """Of nine pages on the device and twelve on the host, of other random bytes."""
    tier = make_tier(SHAPE.allocate(9, CUDA), 12)
    assert isinstance(tier, CudaPageCopier)
    tier.measure()
    for pages in (tier.pool.tensors[0], tier.groups[0]):
        pages.copy_(torch.randn(pages.shape))
    yield tier
    torch.cuda.synchronize()
    tier.close()


def run_step(tier: CudaPageCopier, step_id: int) -> None:
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    tier.stepped(step_id, done)


def sleep(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]


@pytest.mark.gpu
def test_copies_come_after_collected_steps(cuda_tier: CudaPageCopier) -> None:
    (pool,), (host,) = cuda_tier.pool.tensors, cuda_tier.groups
    loaded = host[6].clone()
    sleep(torch.cuda.current_stream())
    pool[:, :, 3] = 1.0
    read = pool[:, :, 4].clone()
    run_step(cuda_tier, 7)
    saves, loads = [PageCopies(1, [3], [5])], [PageCopies(1, [4], [6])]
    cuda_tier.launch(StepPlan(step_id=8, collected=7, saves=saves, loads=loads), False)
    assert cuda_tier.ended() == (0, 0)
    await_copies(cuda_tier, 1, 1)
    assert (host[5] == 1).all()
    assert torch.equal(pool[:, :, 4].cpu(), loaded)
    assert not torch.equal(read, pool[:, :, 4])


@pytest.mark.gpu
def test_steps_and_loads_come_after_saves_that_have_ended(cuda_tier: CudaPageCopier) -> None:
    (pool,), (host,) = cuda_tier.pool.tensors, cuda_tier.groups
    before = pool.clone().cpu()
    sleep(cuda_tier.save_stream)
    cuda_tier.launch(StepPlan(step_id=1, saves=[PageCopies(1, [3, 4], [1, 2])]), False)
    cuda_tier.launch(StepPlan(step_id=2, saved=1, loads=[PageCopies(1, [4], [6])]), False)
    pool[:, :, 3] = 1.0
    torch.cuda.synchronize()
    assert torch.equal(host[1:3], before[:, :, 3:5].movedim(2, 0))


@pytest.mark.gpu
def test_steps_and_saves_come_after_loads_that_have_ended(cuda_tier: CudaPageCopier) -> None:
    (pool,), (host,) = cuda_tier.pool.tensors, cuda_tier.groups
    before = host.clone()
    sleep(cuda_tier.load_stream)
    cuda_tier.launch(StepPlan(step_id=1, loads=[PageCopies(1, [3, 4], [1, 2])]), False)
    cuda_tier.launch(StepPlan(step_id=2, loaded=1, saves=[PageCopies(1, [5], [2])]), False)
    read = pool[:, :, 3].clone()
    torch.cuda.synchronize()
    assert torch.equal(read.cpu(), before[1])
    assert torch.equal(pool[:, :, 4].cpu(), before[2])


@pytest.mark.gpu
@pytest.mark.parametrize("awaited", [0, 1])
def test_a_load_comes_after_the_save_that_wrote_its_pages(
    awaited: int, cuda_tier: CudaPageCopier
) -> None:
    (pool,) = cuda_tier.pool.tensors
    before = pool[:, :, 3].clone()
    sleep(cuda_tier.save_stream)
    copies = {"saves": [PageCopies(1, [3], [5])], "loads": [PageCopies(1, [4], [5], after=1)]}
    await_layer = cuda_tier.launch(StepPlan(step_id=1, awaited=awaited, **copies), True)  # type: ignore[arg-type]
    assert (await_layer is not None) == (awaited == 1)
    await_copies(cuda_tier, 1, 1)
    assert torch.equal(pool[:, :, 4], before)


@pytest.mark.gpu
def test_a_later_step_may_wait_for_an_earlier_load(cuda_tier: CudaPageCopier) -> None:
    sleep(cuda_tier.load_stream)
    cuda_tier.launch(StepPlan(step_id=1, loads=[PageCopies(1, [3], [1])]), True)
    assert cuda_tier.launch(StepPlan(step_id=2, awaited=1), True) is None
    (pool,), (host,) = cuda_tier.pool.tensors, cuda_tier.groups
    assert torch.equal(pool[:, :, 3].cpu(), host[1])


@pytest.mark.gpu
def test_memory_is_locked_in_chunks_that_part_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_CHUNK", 3 << 20)
    memory = HostMemory(1000 * 36_864, 36_864, CUDA)
    assert memory.chunk % 36_864 == 0
    assert 2 << 20 < memory.chunk <= 3 << 20
    memory.wait(lambda done: None)
    assert memory.bytes.is_pinned()
    assert not memory.bytes.any()
    memory.close()
    assert not memory.bytes.is_pinned()


def test_memory_that_cannot_be_had_names_the_setting() -> None:
    with pytest.raises(MemoryShortage, match=r"1073741824\.00 GiB .* lower host_cache_gib"):
        HostMemory(1 << 60, 4096, CPU)


# ---- whole workers -----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "tp"), [("llama", 1), ("gemma3", 2)])
def test_every_rank_copies_its_heads(kind: str, tp: int, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path / "model")
    Runtime(tmp_path, settings(tp, host_cache_gib=0.001), tmp_path / "model").write()
    run_group(tmp_path, tp, lead)


def lead(arguments: list[str]) -> None:
    """Rank 0's process: a step behind a computed prefix, and one behind a loaded one."""
    directory = Path(*arguments)
    runtime = Runtime.load(directory)
    executor, info = build_executor(
        runtime.settings, runtime.model_dir, lambda phase: None, runtime_dir=directory
    )
    assert executor.info.num_host_pages == info.host_pages > 12
    assert info.host_tokens_per_second > 0
    fill_prefix(executor)
    expected = step(executor, chunk_behind(PAGES, 1))
    save_prefix(executor)
    assert step(executor, chunk_behind(OTHER, 3)) != expected
    assert step(executor, chunk_behind(OTHER, 4, **loading())) == expected
    assert executor.copies_ended() == (1, 1)
    executor.close()
