"""Attention with a logit more for each head, which takes of the others' weight and has no value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from radixgrove.kernels import attention, decode
from radixgrove.kernels.decode import DecodeConfig, DecodeWorkspace
from radixgrove.worker.attention.base import AttentionBatch, GroupBackend, PaddedBatch
from radixgrove.worker.attention.flashinfer import FlashInferAttention
from radixgrove.worker.attention.flashinfer_kernels import FlashInferUnavailable
from radixgrove.worker.attention.torch import TorchAttention
from radixgrove.worker.attention.triton import TritonAttention
from tests.kernels.helpers import PagedKv, assert_close, projected
from tests.kernels.test_shared_prefix import SCALE as PREFIX_SCALE
from tests.kernels.test_shared_prefix import Case

pytest.importorskip("triton")

HEADS, KV_HEADS, HEAD_DIM, PAGE, SCALE = 6, 2, 32, 16, 0.3
LENGTHS = [1, 16, 20, 65, 130]
WINDOWS = pytest.mark.parametrize("window", [0, 20])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["wide", "narrow"])
# One that outweighs all scores, one without weight, and some between.
SINKS = (60.0, -60.0, 0.0, 1.5, -2.0, 3.0)


def paged(lengths: list[int], dtype: torch.dtype, device: torch.device) -> PagedKv:
    return PagedKv.random(
        lengths,
        page_size=PAGE,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=device,
    )


def sinks_on(device: torch.device) -> Tensor:
    return torch.tensor(SINKS, device=device)


def exact(q: Tensor, kv: PagedKv, indptr: Tensor, window: int) -> Tensor:
    """Query by query: the exponentials of its scores over their sum and the sink's."""
    rows = []
    sinks = torch.tensor(SINKS, dtype=torch.float64, device=q.device).view(KV_HEADS, -1, 1)
    for item, (row, kv_len) in enumerate(zip(kv.rows.tolist(), kv.kv_lens.tolist(), strict=True)):
        own = kv.page_table[row, : -(-kv_len // PAGE)].long()
        k, v = kv.pages[:, own].flatten(1, 2)[:, :kv_len].double()
        first, stop = int(indptr[item]), int(indptr[item + 1])
        for index, query in enumerate(q[first:stop].double()):
            end = kv_len - (stop - first) + index + 1
            seen = slice(max(0, end - window) if window else 0, end)
            heads = query.view(KV_HEADS, -1, HEAD_DIM)
            weights = (torch.einsum("kgd,nkd->kgn", heads, k[seen]) * SCALE).exp()
            weights /= weights.sum(-1, keepdim=True) + sinks.exp()
            rows.append(torch.einsum("kgn,nkd->kgd", weights, v[seen]).flatten(0, 1))
    return torch.stack(rows)


@WINDOWS
@DTYPES
def test_decode(window: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of rows that a program has whole, and of such that several share: a sink counts once."""
    kv = paged(LENGTHS, dtype, device)
    q = torch.randn(len(LENGTHS), HEADS, HEAD_DIM, device=device).to(dtype)
    workspace = DecodeWorkspace(len(LENGTHS), HEADS, KV_HEADS, HEAD_DIM, device)
    expected = exact(q, kv, torch.arange(len(LENGTHS) + 1), window)
    arguments = q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, SCALE
    split = DecodeConfig(block_n=16, stages=2, warps=1, programs=4, least=1)
    for config in (None, split):
        out = decode.decode_attention(
            *arguments, workspace, window=window, sinks=sinks_on(device), config=config
        )
        assert_close(out, expected)
    assert_close(decode.decode_attention_reference(*arguments, window, sinks_on(device)), expected)


@WINDOWS
def test_decode_gives_each_of_many_rows_a_program(
    window: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_WHOLE_PAIRS", 0)
    kv = paged(LENGTHS, torch.bfloat16, device)
    q = torch.randn(len(LENGTHS), HEADS, HEAD_DIM, device=device).bfloat16()
    workspace = DecodeWorkspace(len(LENGTHS), HEADS, KV_HEADS, HEAD_DIM, device)
    where = kv.pages, kv.rows, kv.kv_lens, kv.page_table
    out = decode.decode_attention(
        q, *where, SCALE, workspace, window=window, sinks=sinks_on(device)
    )
    assert_close(out, exact(q, kv, torch.arange(len(LENGTHS) + 1), window))


@WINDOWS
def test_decode_from_a_projection(window: int, device: torch.device) -> None:
    kv = paged(LENGTHS, torch.float32, device)
    qkv, cos_sin, q, stored = projected(kv, HEADS)
    out = decode.rope_decode_attention(
        qkv,
        cos_sin,
        kv.pages,
        kv.rows,
        kv.kv_lens,
        kv.page_table,
        SCALE,
        DecodeWorkspace(len(LENGTHS), HEADS, KV_HEADS, HEAD_DIM, device),
        window=window,
        sinks=sinks_on(device),
    )
    kv.pages = stored
    assert_close(out, exact(q, kv, torch.arange(len(LENGTHS) + 1), window), 1e-5)


@WINDOWS
@DTYPES
def test_extend(window: int, dtype: torch.dtype, device: torch.device) -> None:
    news = [1, 10, 20, 5, 70]
    kv = paged(LENGTHS, dtype, device)
    q = torch.randn(sum(news), HEADS, HEAD_DIM, device=device).to(dtype)
    indptr = torch.tensor([0, *news], device=device).cumsum(0).int()
    arguments = q, kv.pages, kv.rows, indptr, kv.kv_lens, kv.page_table, SCALE
    expected = exact(q, kv, indptr, window)
    for longest in (16, 130):
        out = attention.extend_attention(*arguments, longest, window=window, sinks=sinks_on(device))
        assert_close(out, expected)
    assert_close(
        attention.extend_attention_reference(*arguments, window, sinks_on(device)), expected
    )


def test_rows_with_a_prefix_in_common(device: torch.device) -> None:
    """What is left of the prefix has no sink: it counts where a row ends."""
    case = Case([100, 33, 40, 65], [(2, [0, 1, 3])], device=device)
    kv, sinks = case.kv, torch.tensor([2.0, -1.0, 0.0, 4.0], device=device)
    where = kv.pages, kv.rows, kv.kv_lens, kv.page_table, PREFIX_SCALE
    out = decode.decode_attention(
        case.q, *where, case.workspace, prefixes=case.prefixes, sinks=sinks
    )
    assert_close(out, decode.decode_attention_reference(case.q, *where, 0, sinks))


def test_flashinfer_is_not_used(device: torch.device) -> None:
    pool = torch.zeros(1, 2, 2, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    geometry = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    with pytest.raises(FlashInferUnavailable, match="not used for attention with sinks"):
        FlashInferAttention(pool, **geometry, scale=SCALE, sinks=True)


CHUNKS, DECODES = [20, 33], 3  # of the last rows
Q_LENS = [*CHUNKS, *[1] * DECODES]


def batch_of(kv: PagedKv, chunks: list[int] = CHUNKS) -> AttentionBatch:
    """Chunks of the first rows, decodes of the others."""
    device = kv.pages.device
    lens = kv.kv_lens.tolist()
    decodes = len(lens) - len(chunks)
    q_lens = [*chunks, *[1] * decodes]
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lens, q_lens, strict=True)])
    owner = kv.rows.long().repeat_interleave(torch.tensor(q_lens, device=device))
    pages = kv.page_table[owner, positions.to(device) // PAGE].long()
    return AttentionBatch(
        num_prefills=len(chunks),
        num_decodes=decodes,
        num_prefill_tokens=sum(chunks),
        rows=kv.rows,
        qo_indptr=torch.tensor([0, *q_lens], device=device).cumsum(0).int(),
        kv_lens=kv.kv_lens,
        page_table=kv.page_table.clamp(min=0),
        slots=pages * PAGE + positions.to(device) % PAGE,
        positions=positions.to(device),
        q_lens_host=chunks,
        kv_lens_host=lens,
    )


def padded(batch: AttentionBatch) -> PaddedBatch:
    chunks = batch.num_prefills
    return PaddedBatch(
        chunk_rows=batch.rows[:chunks],
        chunk_indptr=batch.qo_indptr[: chunks + 1],
        chunk_kv_lens=batch.kv_lens[:chunks],
        decode_rows=batch.rows[chunks:],
        decode_kv_lens=batch.kv_lens[chunks:],
        decode_tokens=batch.qo_indptr[chunks:-1],
        page_table=batch.page_table,
    )


@WINDOWS
@DTYPES
@pytest.mark.parametrize("kind", [TorchAttention, TritonAttention])
def test_backends(
    kind: type[GroupBackend], dtype: torch.dtype, window: int, device: torch.device
) -> None:
    """A chunk that begins its prompt, one behind a prefix, and decodes; eager and in buffers."""
    kv = paged([20, 65, 130, 1, 40], dtype, device)
    pool = kv.pages[None].nan_to_num()
    kv = replace(kv, pages=pool[0])
    geometry = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    backend = kind(pool, **geometry, scale=SCALE, window=window, sinks=True)
    batch = batch_of(kv)
    q = torch.randn(sum(Q_LENS), HEADS, HEAD_DIM, device=device).to(dtype)
    beside = pool[0].view(2, -1, KV_HEADS, HEAD_DIM)[:, batch.slots].transpose(0, 1).flatten(1, 2)
    expected = exact(q, kv, batch.qo_indptr, window)
    plans: list[Callable[[], None]] = [
        lambda: backend.plan(batch),
        lambda: backend.plan_padded(padded(batch), batch),
    ]
    for plan in plans:
        plan()
        out = backend.attend(0, q, beside, sinks_on(device))
        # torch's way rounds weights to the dtype.
        assert_close(out, expected, 2e-2 if dtype == torch.bfloat16 else None)


class _Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that operations give."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def torch_backend(pool: Tensor, window: int = 0) -> TorchAttention:
    geometry = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return TorchAttention(pool, **geometry, scale=SCALE, window=window, sinks=True)


@pytest.mark.parametrize(
    ("window", "most"), [(0, 1 << 24), (20, HEADS * 512 * 532)], ids=["whole", "window"]
)
def test_a_chunk_behind_a_long_prefix_holds_few_scores_at_once(
    window: int, most: int, device: torch.device
) -> None:
    kv = paged([6000], torch.float32, device)
    pool = kv.pages[None].nan_to_num()
    backend, batch = torch_backend(pool, window), batch_of(kv, [512])
    q = torch.randn(512, HEADS, HEAD_DIM, device=device)
    backend.plan(batch)
    with _Largest() as largest:
        out = backend.attend(0, q, pool, sinks_on(device))
    assert largest.numbers <= most + HEADS * 512, "scores, and one of each sink"
    assert_close(out, exact(q, replace(kv, pages=pool[0]), batch.qo_indptr, window))


def test_products_before_the_scale_may_lie_beyond_float16(device: torch.device) -> None:
    kv = paged([24, 24], torch.float16, device)
    pool = kv.pages[None].nan_to_num()
    pool[:, 0] = 60.0  # with such queries 115,200 for each key, which is scaled to 34,560
    backend, batch = torch_backend(pool), batch_of(kv, [24])
    backend.plan(batch)
    q = torch.full((25, HEADS, HEAD_DIM), 60.0, dtype=torch.float16, device=device)
    out = backend.attend(0, q, pool, sinks_on(device))
    for row, (begin, end) in enumerate([(0, 24), (24, 25)]):
        own = kv.page_table[kv.rows[row], :2].long()
        v = pool[0, 1, own].flatten(0, 1)[:24].double()
        means = v.cumsum(0) / torch.arange(1, 25, device=device)[:, None, None]
        expected = means[begin - end :].repeat_interleave(HEADS // KV_HEADS, 1)
        assert_close(out[begin:end], expected, 1e-2)
