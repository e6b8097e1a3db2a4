"""Pool sizing: what fits, what is refused, and what the message says to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.fit import count_parameters
from radixgrove.protocol.model.parse import parse_config
from radixgrove.protocol.settings import Device, DType, LoadFormat, WorkerSettings
from radixgrove.service.machine import memory_limit
from radixgrove.worker.agent.progress import memory_arithmetic
from radixgrove.worker.attention.kv_pool import KvGroup, KvShape
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.execution import memory, trial
from radixgrove.worker.execution.choices import Limits, fit_length
from radixgrove.worker.execution.memory import (
    GIB,
    CudaUse,
    MemoryShortage,
    WindowSizing,
    check_weights,
    cpu_kv_tokens,
    cuda_kv_tokens,
    describe,
    host_tier_pages,
    kv_shape,
)
from radixgrove.worker.messages import EngineInfo, EngineState, PhaseReport
from radixgrove.worker.parallel.group import Shard
from radixgrove.worker.parallel.member import Member
from tests.worker.execution import tiny

# Llama-3.1-8B in bfloat16: 128 KiB a token.
LAYERS = KvGroup(layers=tuple(range(32)), kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SHAPE = KvShape((LAYERS,), page_size=16)
FLOAT8_SHAPE = replace(SHAPE, groups=(replace(LAYERS, dtype=FLOAT8),))
USE = CudaUse(total=80 * GIB, weights=15 * GIB, activations=2 * GIB, graphs=GIB, other=GIB)


def settings(**changes: Any) -> WorkerSettings:
    return WorkerSettings.model_validate({"device": Device.CPU, **changes})


def test_bytes_of_a_token_and_of_the_pool() -> None:
    assert SHAPE.bytes_per_token == 2 * 32 * 8 * 128 * 2
    group = KvGroup(layers=(0, 1), kv_heads=1, head_dim=8, dtype=torch.float32)
    small = KvShape((group,), page_size=4)
    (tensor,) = small.allocate(5, torch.device("cpu")).tensors
    assert tensor.shape == (2, 2, 6, 4, 1, 8)
    assert tensor.nbytes == small.allocated_bytes(5)


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    raw = {**tiny._SIZES, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 20}
    config = parse_config({**raw, "num_hidden_layers": 12, "head_dim": 16})
    shape = kv_shape(config, 4, torch.float32, Shard())
    full, windowed = shape.groups
    assert (full.layers, full.window) == ((5, 11), 0)
    assert (windowed.layers, windowed.window) == ((0, 1, 2, 3, 4, 6, 7, 8, 9, 10), 20)
    assert shape.bytes_per_token == 12 * 2 * 2 * 16 * 4
    text = describe(GIB, shape, 4096, 4096, ranks=1)
    by_group = "2 layers 0.5 KiB, 10 layers 2.5 KiB read within 20 tokens"
    assert f"3.0 KiB in pages of 4 (float32; {by_group});" in text
    (second,) = kv_shape(config, 4, torch.float32, Shard(), range(6, 11)).groups
    assert (second.layers, second.window) == ((0, 1, 2, 3, 4), 20)
    (rank,) = kv_shape(config, 4, torch.float32, Shard(1, 2), range(6, 11)).groups
    assert rank.kv_heads == 1


def test_a_pool_on_the_host_is_zero_and_takes_memory_only_as_it_is_used() -> None:
    before = psutil.Process().memory_info().rss
    (pool,) = SHAPE.allocate(256, torch.device("cpu")).tensors
    assert pool.nbytes > GIB // 2
    assert psutil.Process().memory_info().rss - before < pool.nbytes // 8
    assert pool.data_ptr() % 64 == 0
    assert not pool[-1, -1, -1].any()
    pool[3, 1, 5] = 1.0
    assert pool[3, 1, 4:7].sum().item() == 16 * 8 * 128


def test_a_float8_pool_is_half_as_large_and_begins_as_zeros() -> None:
    assert 2 * FLOAT8_SHAPE.bytes_per_token == SHAPE.bytes_per_token
    (pool,) = FLOAT8_SHAPE.allocate(5, torch.device("cpu")).tensors
    assert (pool.dtype, pool.nbytes) == (FLOAT8, FLOAT8_SHAPE.allocated_bytes(5))
    assert not pool.view(torch.uint8).any()
    budget = settings(memory_fraction=0.9)
    twice = cuda_kv_tokens(budget, FLOAT8_SHAPE, USE, wanted=1 << 30)
    assert twice == pytest.approx(2 * cuda_kv_tokens(budget, SHAPE, USE, wanted=1 << 30), abs=16)


@pytest.mark.parametrize("load_format", LoadFormat)
def test_weights_larger_than_the_machine_are_refused_before_they_are_allocated(
    load_format: LoadFormat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.save("llama", tmp_path)
    monkeypatch.setattr("radixgrove.worker.execution.memory.memory_limit", lambda: 1 << 19)
    with pytest.raises(MemoryShortage, match=r"on each of 1 ranks do not fit .* with tp or pp, or"):
        build_executor(settings(load_format=load_format), tmp_path, lambda phase: None)


def test_a_rank_holds_its_part_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({**tiny._SIZES, "architectures": ["LlamaForCausalLM"]})
    whole = 2 * count_parameters(config)
    monkeypatch.setattr("radixgrove.worker.execution.memory.memory_limit", lambda: whole // 2)
    check_weights(config, 2, torch.device("cpu"), ranks=2)
    check_weights(config, 1, torch.device("cpu"), ranks=1)
    with pytest.raises(MemoryShortage):
        check_weights(config, 2, torch.device("cpu"), ranks=1)


def test_cuda_pool_takes_what_the_fraction_leaves() -> None:
    tokens = cuda_kv_tokens(settings(memory_fraction=0.9), SHAPE, USE, wanted=1 << 30)
    left = int(80 * GIB * 0.9) - 19 * GIB
    assert left - GIB // 2 <= tokens * SHAPE.bytes_per_token <= left
    assert tokens % SHAPE.page_size == 0


def test_ranks_that_share_a_device_have_room_for_each_others_pools() -> None:
    beside = replace(USE, other=USE.other + USE.weights)  # of the other rank, whose own is as large
    alone = cuda_kv_tokens(settings(memory_fraction=0.9), SHAPE, USE, wanted=1 << 30)
    tokens = cuda_kv_tokens(settings(memory_fraction=0.9), SHAPE, beside, 1 << 30, ranks=2)
    pools = 2 * tokens * SHAPE.bytes_per_token
    both = 2 * (USE.weights + USE.activations + USE.graphs) + USE.other
    assert pools <= int(80 * GIB * 0.9) - both
    assert tokens < alone / 2
    with pytest.raises(MemoryShortage, match="are free"):
        cuda_kv_tokens(settings(kv_tokens=alone), SHAPE, beside, wanted=1 << 30, ranks=2)


def test_a_pool_is_no_larger_than_all_rows_at_full_length_need() -> None:
    assert cuda_kv_tokens(settings(), SHAPE, USE, wanted=1000) == 1008
    assert cpu_kv_tokens(settings(), SHAPE, 100, ranks=1) == 112


def test_too_large_a_model_names_numbers_and_settings() -> None:
    use = CudaUse(total=16 * GIB, weights=15 * GIB, activations=GIB, graphs=0, other=0)
    with pytest.raises(MemoryShortage, match=r"weights 15\.00 GiB.*memory_fraction.*tp"):
        cuda_kv_tokens(settings(), SHAPE, use, wanted=1 << 30)


def test_kv_tokens_wins_and_is_refused_when_it_does_not_fit() -> None:
    assert cuda_kv_tokens(settings(kv_tokens=1000), SHAPE, USE, wanted=1 << 30) == 992
    with pytest.raises(MemoryShortage, match=r"kv_tokens 10000000 needs .* lower kv_tokens to \d+"):
        cuda_kv_tokens(settings(kv_tokens=10_000_000), SHAPE, USE, wanted=1 << 30)
    wide = replace(SHAPE, page_size=64)
    with pytest.raises(MemoryShortage, match="less than one page of 64"):
        cpu_kv_tokens(settings(kv_tokens=32), wide, 1000, ranks=1)


def test_cpu_pool_respects_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_limit() > 0
    tokens = cpu_kv_tokens(settings(), SHAPE, 1 << 30, ranks=1)
    assert tokens * SHAPE.bytes_per_token <= 2 * GIB
    monkeypatch.setattr("radixgrove.worker.execution.memory.memory_limit", lambda: 1 << 20)
    with pytest.raises(MemoryShortage, match="less than one page"):
        cpu_kv_tokens(settings(), SHAPE, 1 << 30, ranks=1)


def test_the_host_tier_is_shared_evenly_by_the_ranks() -> None:
    assert host_tier_pages(settings(), SHAPE, ranks=1) == 0
    assert host_tier_pages(settings(host_cache_gib=1), SHAPE, ranks=1) == 512
    assert host_tier_pages(settings(host_cache_gib=1), SHAPE, ranks=3) == 170
    assert host_tier_pages(settings(host_cache_gib=0.002), SHAPE, ranks=1) == 1


def test_a_host_tier_that_does_not_fit_names_numbers_and_setting() -> None:
    with pytest.raises(MemoryShortage, match=r"0\.003 is less than one page of 2\.00 MiB on each"):
        host_tier_pages(settings(host_cache_gib=0.003), SHAPE, ranks=2)
    most = psutil.virtual_memory().total / GIB
    with pytest.raises(
        MemoryShortage, match=r"needs \d+\.00 GiB .* \d+\.\d\d GiB are free.* lower host_cache_gib"
    ):
        host_tier_pages(settings(host_cache_gib=int(most) + 1), SHAPE, ranks=1)


def test_a_cpu_pool_leaves_room_for_the_host_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    # Above what the tests before it have taken of this process.
    used = psutil.Process().memory_info().rss
    monkeypatch.setattr(
        "radixgrove.worker.execution.memory.memory_limit", lambda: int((used + 2.5 * GIB) / 0.9)
    )
    alone = cpu_kv_tokens(settings(), SHAPE, 1 << 30, ranks=1)
    beside = cpu_kv_tokens(settings(), SHAPE, 1 << 30, ranks=1, host_pages=512)
    assert alone > beside >= alone - 512 * SHAPE.page_size


# gpt-oss-20b in bfloat16: 24 KiB of a token in layers that attend to all, as much in the others.
ALL = KvGroup(layers=tuple(range(1, 24, 2)), kv_heads=8, head_dim=64, dtype=torch.bfloat16)
WINDOWED = replace(ALL, layers=tuple(range(0, 24, 2)), window=128)
HYBRID = KvShape((ALL, WINDOWED), page_size=16)
LIMITS = Limits(max_running=256, max_step_tokens=8192, depth=2, micro_batches=1, step_timeout=60.0)


def window_pages(layers: int = 24, windowed: int = 12, *, host_tier: bool = False) -> Any:
    attention = SimpleNamespace(window=128, windowed=frozenset(range(windowed)))
    config: Any = SimpleNamespace(attention=attention, num_layers=layers)
    settings = WorkerSettings(page_size=16, host_cache_gib=1.0 if host_tier else 0.0)
    return WindowSizing.of(settings, config, LIMITS)


def test_running_rows_and_the_cache_have_window_pages() -> None:
    """Of 256 rows each 8 pages of a window and two more, in four steps 512 pages of chunks and one
    of each row; and a ninth of the pages for what is cached."""
    windows = window_pages()
    assert windows.running == 256 * 10 + 4 * (512 + 256)
    assert windows.most(90_000) == 5632 + 10_000
    assert windows.most(5000) == 5000, "no more than there are pages"
    assert windows.beside(90_000) == 15_632
    # Half of each page that is given up must be a tenth of the whole: a fifth of the pages.
    assert (windows.beside(8170), windows.beside(8190)) == (0, 5632 + 910)
    none = window_pages(24, 0), window_pages(24, 24), window_pages(host_tier=True)
    assert none == (None, None, None), "nothing to give up, or nothing to gain"


def test_a_pool_holds_more_tokens_where_layers_keep_their_windows_alone() -> None:
    use = replace(USE, total=64 * GIB)
    budget = int(64 * GIB * 0.9) - (15 + 2 + 1 + 1) * GIB - GIB // 4
    windows = window_pages()
    sized = [
        cuda_kv_tokens(settings(memory_fraction=0.9), HYBRID, use, wanted=1 << 30, windows=which)
        for which in (None, windows)
    ]
    pages = sized[1] // 16
    assert HYBRID.pool_bytes(pages, windows.beside(pages)) <= budget
    assert HYBRID.pool_bytes(pages + 1, windows.most(pages + 1)) > budget
    assert sized[1] > 1.69 * sized[0]
    # Never fewer than if all were kept, and no more than are wanted.
    for left in (0, 1, HYBRID.page_bytes, 100 * HYBRID.page_bytes, 20_000 * HYBRID.page_bytes):
        most = memory._most_pages(left, HYBRID, windows)
        assert most >= left // HYBRID.page_bytes
        assert HYBRID.pool_bytes(most, windows.most(most)) <= left
    assert cuda_kv_tokens(settings(), HYBRID, use, wanted=1000, windows=windows) == 1008
    assert cpu_kv_tokens(settings(), HYBRID, 1000, ranks=1, windows=windows) == 1008


def test_stages_with_layers_of_one_kind_have_room_for_as_many_pages_as_they_say() -> None:
    windows, left = window_pages(), 4 * GIB
    for group in HYBRID.groups:
        shape = KvShape((group,), page_size=16)
        most = memory._most_pages(left, shape, windows)
        assert shape.pool_bytes(most, windows.most(most)) <= left
        if not group.window:
            assert most == left // shape.page_bytes
        else:
            assert shape.pool_bytes(most, windows.most(most) + 2) > left


@pytest.mark.parametrize("total", [18.5, 19.0, 19.5, 20.0, 24.0, 40.0])
def test_the_remedy_for_kv_tokens_that_do_not_fit_is_fewer(total: float) -> None:
    """Of few, layers with a window keep all pages, of more not: each has a remedy of its own."""
    windows, use = window_pages(), replace(USE, total=int(total * GIB))
    refused = 0
    for tokens in (1_000, 60_000, 118_400, 131_040, 200_000, 800_000):
        fixed = settings(kv_tokens=tokens)
        try:
            cuda_kv_tokens(fixed, HYBRID, use, wanted=1 << 30, windows=windows)
        except MemoryShortage as shortage:
            refused += 1
            named = int(str(shortage).rpartition(" ")[2])
            assert 0 <= named < tokens
            if named >= 16:
                fewer = settings(kv_tokens=named)
                cuda_kv_tokens(fewer, HYBRID, use, wanted=1 << 30, windows=windows)
    assert refused


def test_kv_tokens_are_kept_with_window_pages_beside_them() -> None:
    windows = window_pages()
    use = replace(USE, total=40 * GIB)  # 20.75 GiB for KV: 453,290 tokens if all are kept
    fixed = settings(kv_tokens=480_000)
    with pytest.raises(MemoryShortage, match=r"needs 21\.97 GiB.* lower kv_tokens to 453290$"):
        cuda_kv_tokens(fixed, HYBRID, use, wanted=1 << 30)
    assert cuda_kv_tokens(fixed, HYBRID, use, wanted=1 << 30, windows=windows) == 480_000
    with pytest.raises(MemoryShortage, match=r"lower kv_tokens to \d+$") as caught:
        cuda_kv_tokens(settings(kv_tokens=800_000), HYBRID, use, wanted=1 << 30, windows=windows)
    named = int(str(caught.value).rpartition(" ")[2])
    assert named > 700_000
    for tokens in (named, named + 16):
        fixed = settings(kv_tokens=tokens)
        if tokens == named:
            cuda_kv_tokens(fixed, HYBRID, use, wanted=1 << 30, windows=windows)
        else:
            with pytest.raises(MemoryShortage):
                cuda_kv_tokens(fixed, HYBRID, use, wanted=1 << 30, windows=windows)


def test_window_pages_in_words() -> None:
    text = describe(15 * GIB, HYBRID, 1_440_000, 8192, ranks=1, window_pages=15_632)
    assert "KV 38.68 GiB = 1,440,000 tokens of up to 48.0 KiB in pages of 16 (bfloat16; " in text
    assert (
        "12 layers 24.0 KiB, 12 layers 24.0 KiB read within 128 tokens and kept of 250,112)" in text
    )
    assert "175.8 requests of 8,192 tokens at once" in text
    text = describe(15 * GIB, HYBRID, 1_440_000, 8192, ranks=1, host_pages=512)
    assert "KV 65.92 GiB = 1,440,000 tokens of 48.0 KiB" in text
    assert text.endswith("0.38 GiB = 8,192 tokens, and for it layers with a window keep all pages")
    info = EngineInfo(
        page_size=16,
        max_model_len=8192,
        num_pages=90_000,
        max_running=256,
        kv_bytes_per_token=HYBRID.bytes_per_token,
        window_bytes_per_token=HYBRID.window_bytes_per_token,
        num_window_pages=15_632,
    )
    lines = memory_arithmetic(info)
    assert (
        "KV cache 38.7 GiB: 90000 pages of 16 tokens = 1440000 tokens, 48 KiB a token" in lines[1]
    )
    assert lines[1].endswith("24 KiB of it within windows alone, for 250112 tokens")
    assert "room for 175 requests of 8192 tokens at once, 256 of 1024" in lines[2]


@pytest.mark.parametrize(("limited", "expected"), [({}, 0), ({"kv_tokens": 4096}, 86)])
def test_an_engine_has_window_pages_where_they_make_room(
    limited: dict[str, int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `kv_tokens` all rows at full length fit the pool: nothing is to be gained."""
    tiny.save("gemma3", tmp_path)
    phases: list[PhaseReport] = []
    executor, info = build_executor(
        settings(max_running=10, max_step_tokens=64, **limited), tmp_path, phases.append
    )
    assert executor.info.window == 20
    assert (executor.info.num_window_pages, info.num_window_pages) == (expected, expected)
    assert info.window_bytes_per_token == info.kv_bytes_per_token * 2 // 3
    assert any("and kept of" in phase.message for phase in phases) == bool(expected)


def test_ranks_with_room_for_fewer_window_pages_bind_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CPU_POOL_BYTES", 1 << 23)
    tiny.save("gemma3", tmp_path, max_position_embeddings=4096)

    def built(agree: Callable[[int], int]) -> tuple[int, int]:
        monkeypatch.setattr(Member, "least", lambda _, value: (agree(value), 0))
        wanted = settings(max_running=10, max_step_tokens=64)
        info = build_executor(wanted, tmp_path, lambda phase: None)[0].info
        return info.num_pages, info.num_window_pages

    alone = built(lambda value: value)
    all_kept = (1 << 23) // (3 * 2 * 2 * 32 * 4 * 16)
    assert alone[0] > 2 * all_kept
    assert alone[1] < all_kept
    assert built(lambda value: min(value, 40 * 16)) == (40, 0)


@pytest.mark.parametrize(("sizes", "expected"), [([8], 90), ([4, 8], 100), ([1, 2, 4, 8], 120)])
def test_graphs_are_counted_with_their_static_buffers(
    sizes: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of 60 bytes, a largest graph of 30 and others of 10, of which two are captured."""
    free = 1000

    def capture(chosen: list[int], report: Callable[[str, float], None]) -> None:
        nonlocal free
        assert chosen == sizes[-2:]
        free -= 60
        for index in range(len(chosen)):
            report("", 0.0)
            free -= 10 if index else 30

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2000))
    assert trial._graph_bytes(capture, sizes, torch.device("cuda", 0)) == expected


def test_default_length_shrinks_to_the_pool_but_an_explicit_one_is_refused() -> None:
    assert fit_length(None, 4096, 1000) == 1000
    assert fit_length(512, 512, 1000) == 512
    with pytest.raises(ModelError, match=r"max_model_len 2048 does not fit the KV pool of 1000"):
        fit_length(2048, 2048, 1000)


def test_arithmetic_in_words() -> None:
    text = describe(15 * GIB, SHAPE, 40_960, 8192, ranks=1)
    assert "weights 15.00 GiB" in text
    assert "KV 5.00 GiB = 40,960 tokens of 128.0 KiB in pages of 16 (bfloat16);" in text
    assert "5.0 requests of 8,192 tokens at once" in text
    text = describe(15 * GIB, FLOAT8_SHAPE, 40_960, 8192, ranks=1)
    assert "KV 2.50 GiB = 40,960 tokens of 64.0 KiB in pages of 16 (fp8_e4m3);" in text
    assert "host tier" not in text
    text = describe(15 * GIB, SHAPE, 40_960, 8192, ranks=1, host_pages=512)
    assert text.endswith("at once; host tier 1.00 GiB = 8,192 tokens")
    text = describe(
        15 * GIB, SHAPE, 40_960, 8192, ranks=1, quantized={"float8": 7 * GIB, "int8": 0}
    )
    assert "weights 15.00 GiB, float8 7.00 GiB of that; KV" in text


def test_a_built_engine_reports_what_it_has(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    phases: list[PhaseReport] = []
    executor, info = build_executor(
        settings(dtype=DType.BFLOAT16, kv_tokens=1000, max_running=3, max_model_len=200),
        tmp_path,
        phases.append,
    )
    assert (info.num_pages, info.page_size, info.max_running) == (62, 16, 3)
    assert (info.max_model_len, info.vocab_size, info.dtype) == (200, tiny.VOCAB, "bfloat16")
    assert info.attention_backend == "torch"
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert info.prefill_tokens_per_second > 0
    assert (executor.info.max_rows, executor.info.depth) == (3, 1)
    assert phases[0].state == EngineState.LOADING
    assert any("requests of 200 tokens at once" in phase.message for phase in phases)
    assert any("attention backend torch" in phase.message for phase in phases)


def test_a_pool_that_shortens_requests_is_told(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    phases: list[PhaseReport] = []
    _, info = build_executor(settings(kv_tokens=160), tmp_path, phases.append)
    assert info.max_model_len == 160
    reason = "max_model_len 160: the KV pool holds no more; the model's is 256"
    assert reason in [phase.message for phase in phases]


def test_a_length_beyond_the_models_is_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    with pytest.raises(ModelError, match="max_model_len 300 exceeds the model's 256"):
        build_executor(settings(max_model_len=300), tmp_path, lambda phase: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_backends_for_cuda_are_refused_where_no_gpu_is_found(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    wanted = settings(device=Device.AUTO, attention_backend="triton")
    with pytest.raises(ModelError, match="attention backend triton needs CUDA"):
        build_executor(wanted, tmp_path, lambda phase: None)
