"""Error measure, random paged KV and inputs to quantize, for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from radixgrove.kernels.activation import silu_and_mul_reference
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.norm import rms_norm_reference
from radixgrove.kernels.rope import rope_store_reference

# Relative Frobenius error that rounding inputs, sums and outputs to the type explains.
BOUNDS = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize(
    "dtype", list(BOUNDS), ids=[str(d).removeprefix("torch.") for d in BOUNDS]
)
# Pages of the dtype itself, and in float8, which is read without loss: the same bounds.
PAGED_DTYPES = pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(dtype, kind) for kind in (None, FLOAT8) for dtype in BOUNDS],
    ids=[str(dtype).removeprefix("torch.") + kind for kind in ("", "-float8") for dtype in BOUNDS],
)


def sizes(small: list[int], large: list[int]) -> pytest.MarkDecorator:
    """Token counts: `small` in the interpreter, `large` too where kernels are compiled."""
    return pytest.mark.parametrize("tokens", small + (large if torch.cuda.is_available() else []))


def assert_close(out: Tensor, reference: Tensor, bound: float | None = None) -> None:
    """Relative Frobenius error within the dtype's bound; NaN never passes."""
    assert out.shape == reference.shape
    if not out.numel():
        return
    wide, exact = out.double(), reference.double()
    error = ((wide - exact).norm() / exact.norm()).item()
    assert error <= (BOUNDS[out.dtype] if bound is None else bound), f"relative error {error:.2e}"


@dataclass
class PagedKv:
    """Rows with scattered pages in a pool; its unused places are NaN."""

    pages: Tensor  # [2, num_pages, page_size, KV, D]
    rows: Tensor
    kv_lens: Tensor
    page_table: Tensor

    @classmethod
    def random(
        cls,
        lengths: list[int],
        *,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedKv:
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3)
        pages = torch.full(
            (2, sum(counts) + 3, page_size, kv_heads, head_dim), float("nan"), dtype=dtype
        )
        table = torch.full((len(lengths) + 2, max(counts, default=0) + 2), -1, dtype=torch.int32)
        rows = torch.randperm(len(lengths) + 2)[: len(lengths)]
        used = 0
        for row, length, count in zip(rows.tolist(), lengths, counts, strict=True):
            own = order[used : used + count]
            used += count
            table[row, :count] = own.int()
            flat = pages.view(2, -1, kv_heads, head_dim)
            places = own.repeat_interleave(page_size) * page_size
            places = (places + torch.arange(page_size).repeat(count))[:length]
            flat[:, places] = torch.randn(2, length, kv_heads, head_dim).to(dtype)
        return cls(
            pages.to(device),
            rows.int().to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            table.to(device),
        )


@dataclass(frozen=True, slots=True)
class QuantizedInputs:
    """Inputs of a kernel that quantizes them behind what comes before, and what they come to."""

    x: Tensor
    options: dict[str, Any]  # of the kernel
    exact: Tensor  # what is quantized
    total: Tensor  # the residual with x, where that comes before

    @classmethod
    def random(cls, before: str, tokens: int, k: int, device: torch.device) -> QuantizedInputs:
        """`before`: "nothing", "norm", "added norm" or "silu"."""
        x = torch.randn(tokens, 2 * k if before == "silu" else k, device=device).bfloat16() * 3
        norm = torch.rand(k, device=device).bfloat16() + 0.5
        residual = torch.randn(tokens, k, device=device).bfloat16()
        options: dict[str, Any] = {}
        exact = x
        if before == "silu":
            options["silu"] = True
            exact = silu_and_mul_reference(x)
        if before == "added norm":
            options["residual"] = residual.clone()
            exact = x + residual
        total = exact
        if before.endswith("norm"):
            options |= {"norm": norm, "eps": 1e-5}
            exact = rms_norm_reference(exact, norm, 1e-5)
        return cls(x, options, exact, total)


def projected(kv: PagedKv, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A new token for each row: its qkv before rotation and the cosines and sines of positions;
    then what comes of them: q, and the pages with k and v stored."""
    device, (_, _, page, kv_heads, head_dim) = kv.pages.device, kv.pages.shape
    qkv = torch.randn(len(kv.rows), (heads + 2 * kv_heads) * head_dim, device=device)
    angles = torch.rand(int(kv.kv_lens.max()), head_dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = kv.kv_lens.long() - 1
    slots = kv.page_table[kv.rows.long(), positions // page].long() * page + positions % page
    stored = kv.pages.clone()
    q = rope_store_reference(qkv.clone(), cos_sin, positions, slots, stored)
    return qkv, cos_sin, q, stored
