"""What is compiled ahead is what a backend's steps will launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from radixgrove.kernels import attention, decode, rope
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.weight import QuantizedRows
from radixgrove.worker.attention.base import AttentionBatch, PaddedBatch
from radixgrove.worker.attention.precompile import AttentionShape, compile_jobs
from radixgrove.worker.attention.triton import TritonAttention
from radixgrove.worker.execution.prefixes import PrefixInputs
from radixgrove.worker.execution.table import RequestTable

KERNELS = [
    (attention, "_extend_kernel"),
    (decode, "decode_kernel"),
    (decode, "prefix_kernel"),
    (decode, "shared_decode_kernel"),
    (rope, "_rope_store_kernel"),
]
ROWS, PAGES, PAGE = 256, 48, 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 32
# Of positional arguments, by kernel: those that Triton does not specialise on.
_VARYING = {
    "decode_kernel": {12, 19},
    "_extend_kernel": {10},
    "prefix_kernel": {14, 15},
    "_rope_store_kernel": {9},
    "shared_decode_kernel": {12, 19, 25, 26},
}
Launches = set[tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernel, constants, types and specialised integers of what is launched; nothing runs."""
    seen: Launches = set()

    def describe(name: str, index: int, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype
        if isinstance(value, int) and index not in _VARYING.get(name, ()):
            return value == 1, value % 16 == 0
        return type(value)

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                signature = (describe(self.name, i, value) for i, value in enumerate(arguments))
                seen.add((self.name, *signature, *sorted(constants.items())))

            return launch

    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Recorder(name))
    monkeypatch.setattr(decode, "_multiprocessors", lambda device: 132)
    return seen


def launch_steps(
    kv_dtype: torch.dtype,
    norm: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    quantizes: bool,
) -> None:
    """Eager decodes beside chunks, decodes alone of every kind, chunks, and a padded step."""
    dtype = torch.bfloat16

    def zeros(*size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=kind)

    pool = zeros(1, 2, 1, PAGE, KV_HEADS, HEAD_DIM, kind=kv_dtype)
    backend = TritonAttention(
        pool, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=0.5, dtype=dtype
    )
    backend.prepare_capture(ROWS, PAGES)
    table = zeros(ROWS + 1, PAGES)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    requests = RequestTable(
        max_rows=ROWS, max_model_len=PAGE, page_size=PAGE, scratch_page=0, device=pool.device
    )
    prefixes = PrefixInputs(requests, ROWS, backend.prefix_tile_rows).tensors
    for rows in (1, 8, 9, 64, 65, 197, 198, ROWS):
        tokens = zeros(rows, kind=torch.int64)
        batch = AttentionBatch(
            num_prefills=0,
            num_decodes=rows,
            num_prefill_tokens=0,
            rows=zeros(rows),
            qo_indptr=zeros(rows + 1),
            kv_lens=zeros(rows),
            page_table=table,
            slots=tokens,
            positions=tokens,
        )
        qkv = zeros(rows, width, kind=dtype)
        angles = zeros(9, HEAD_DIM, kind=torch.float32)
        rope.rope_store(qkv, angles, tokens, tokens, pool[0], norm, norm)
        backend.plan(batch)
        if backend.takes_qkv:
            projected = 0, qkv, (angles, tokens), norm, norm, 1e-6
            backend.attend_qkv(*projected, sinks=sinks)
            if quantizes:
                into = QuantizedRows.by_parts(rows, HEADS * HEAD_DIM, HEAD_DIM, pool.device)
                backend.attend_qkv(*projected, quantized=into, sinks=sinks)
        # As beside chunks, however few they are.
        backend.attend(0, zeros(rows, HEADS, HEAD_DIM, kind=dtype), qkv, sinks)
        if rows > 1:
            backend.plan_captured(replace(batch, prefixes=prefixes), rows)
            backend.attend(0, zeros(rows, HEADS, HEAD_DIM, kind=dtype), qkv, sinks)
    for longest, count in ((16, 1), (17, 1), (64, 40), (65, 1), (300, 40), (2000, ROWS)):
        backend.plan(
            AttentionBatch(
                num_prefills=count,
                num_decodes=0,
                num_prefill_tokens=longest,
                rows=zeros(count),
                qo_indptr=zeros(count + 1),
                kv_lens=zeros(count),
                page_table=table,
                slots=tokens,
                positions=tokens,
                q_lens_host=[longest] * count,
                kv_lens_host=[longest] * count,
            )
        )
        backend.attend(0, zeros(longest, HEADS, HEAD_DIM, kind=dtype), qkv, sinks)
    chunks, decodes = zeros(33), zeros(ROWS)
    padded = PaddedBatch(
        chunk_rows=chunks[1:],
        chunk_indptr=chunks,
        chunk_kv_lens=chunks[1:],
        decode_rows=decodes,
        decode_kv_lens=decodes,
        decode_tokens=decodes,
        page_table=table,
    )
    backend.plan_padded(padded, batch)
    backend.attend(0, zeros(512, HEADS, HEAD_DIM, kind=dtype), qkv, sinks)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FLOAT8], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("quantizes", "sinks"),
    [(False, False), (True, False), (False, True)],
    ids=["plain", "quantizing", "sinks"],
)
def test_everything_that_steps_launch_is_compiled_ahead(
    quantizes: bool, sinks: bool, qk_norm: bool, kv_dtype: torch.dtype, launches: Launches
) -> None:
    norm = torch.ones(HEAD_DIM, dtype=torch.bfloat16) if qk_norm else None
    launch_steps(kv_dtype, norm, torch.zeros(HEADS) if sinks else None, quantizes=quantizes)
    wanted = set(launches)
    launches.clear()
    shape = AttentionShape(
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        ROWS,
        PAGES,
        qk_norm,
        torch.bfloat16,
        kv_dtype,
        extends=True,
        quantizes=quantizes,
        sinks=sinks,
    )
    for job in compile_jobs(shape, torch.device("cpu")):
        job()
    assert {name for name, *_ in wanted} == {name for _, name in KERNELS}
    assert wanted == launches
