"""RMSNorm, SwiGLU, RoPE with KV store, gathers: kernels against references in float64."""

from __future__ import annotations

import pytest
import torch

from radixgrove.kernels import activation, gather, norm, rope
from tests.kernels.helpers import DTYPES, assert_close, sizes


@DTYPES
@sizes([0, 1, 5], [333])
@pytest.mark.parametrize("hidden", [96, 130])
def test_rms_norm(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    exact = norm.rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert_close(norm.rms_norm(x, weight, 1e-5), exact)


def test_rms_norm_reads_strided_rows(device: torch.device) -> None:
    wide = torch.randn(3, 200, device=device)
    weight = torch.ones(64, device=device)
    x = wide[:, 70:134]
    assert_close(norm.rms_norm(x, weight, 1e-6), norm.rms_norm_reference(x, weight, 1e-6))


@DTYPES
@sizes([0, 1, 5], [333])
def test_add_rms_norm_updates_the_residual(
    tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = (torch.randn(tokens, 96, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(96, device=device).to(dtype)
    total = x.double() + residual.double()
    out = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, total)  # the interpreter truncates to bfloat16, the GPU rounds
    exact = norm.rms_norm_reference(residual.double(), weight.double(), 1e-5)
    assert_close(out, exact)


@DTYPES
@sizes([0, 1, 3], [777])
@pytest.mark.parametrize("inner", [1, 100, 2049])
def test_silu_and_mul(tokens: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.randn(tokens, 2 * inner, device=device).to(dtype)
    exact = activation.silu_and_mul_reference(gate_up.double())
    assert_close(activation.silu_and_mul(gate_up), exact)


@pytest.mark.covering(2)
@DTYPES
@sizes([0, 1, 3, 70], [4099])
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (3, 3, 24)])
def test_rope_store(
    tokens: int,
    with_norm: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    page_size, num_pages = 16, -(-tokens // 16) + 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    cos_sin = torch.randn(128, head_dim, device=device)
    positions = torch.randint(0, 128, (tokens,), device=device)
    slots = torch.randperm(num_pages * page_size, device=device)[:tokens]
    untouched = torch.randn(2, num_pages, page_size, kv_heads, head_dim, device=device).to(dtype)
    pages, exact_pages = untouched.clone(), untouched.double()
    q_norm = k_norm = wide_q_norm = wide_k_norm = None
    if with_norm:
        q_norm, k_norm = torch.randn(2, head_dim, device=device).to(dtype)
        wide_q_norm, wide_k_norm = q_norm.double(), k_norm.double()
    exact = rope.rope_store_reference(
        qkv.double(), cos_sin, positions, slots, exact_pages, wide_q_norm, wide_k_norm
    )
    q = rope.rope_store(qkv, cos_sin, positions, slots, pages, q_norm, k_norm)
    kept = qkv.unflatten(-1, (-1, head_dim))[:, heads:]
    stored = pages.view(2, -1, kv_heads, head_dim)[:, slots].transpose(0, 1).flatten(1, 2)
    assert torch.equal(kept, stored), "what attention may read instead of the pages"
    assert_close(q, exact)
    assert_close(pages, exact_pages)
    others = torch.ones(num_pages * page_size, dtype=torch.bool, device=device)
    others[slots] = False
    flat, before = (p.flatten(1, 2)[:, others] for p in (pages, untouched))
    assert torch.equal(flat, before), "a place outside `slots` was written"


@DTYPES
@sizes([0, 1, 7], [1000])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_embed_gathers_its_shard_and_zeros(
    tokens: int, index_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    weight = torch.randn(50, 33, device=device).to(dtype)
    ids = torch.randint(0, 90, (tokens,), device=device).to(index_dtype)
    out = gather.embed(weight, ids, first=20)
    inside = (ids >= 20) & (ids < 70)
    assert torch.equal(out[inside], weight[(ids[inside] - 20).long()])
    assert torch.equal(out[~inside], torch.zeros_like(out[~inside]))
    assert torch.equal(gather.embed_reference(weight, ids, 20), out)
