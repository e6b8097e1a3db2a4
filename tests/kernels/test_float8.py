"""Pages in float8: what is stored is the nearest one, saturated; and is read without loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import pages as page_kernels
from radixgrove.kernels import rope
from radixgrove.kernels.float8 import FLOAT8, FLOAT8_MAX, bits, to_page
from radixgrove.worker.models.ops import TorchOps
from tests.kernels.helpers import DTYPES, assert_close

INFINITY, NAN = math.inf, math.nan


def every_float8() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FLOAT8)


@DTYPES
def test_every_float8_survives_being_read_and_stored(dtype: torch.dtype) -> None:
    wide = every_float8().to(dtype)
    assert torch.equal(wide.isnan(), every_float8().isnan())
    assert wide.isnan().sum() == 2
    numbers = ~wide.isnan()
    again = to_page(wide, FLOAT8)
    assert again[~numbers].isnan().all()
    assert torch.equal(bits(again)[numbers], bits(every_float8())[numbers])


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (0.3, 0.3125),
        (17.0, 16.0),  # half way between 16 and 18: to the even one
        (19.0, 20.0),
        (2.0**-9, 2.0**-9),  # the smallest
        (2.0**-10, 0.0),
        (2.0**-10 * 1.01, 2.0**-9),
        (FLOAT8_MAX, FLOAT8_MAX),
        (449.0, FLOAT8_MAX),
        (1e30, FLOAT8_MAX),
        (INFINITY, FLOAT8_MAX),
        (NAN, NAN),
    ],
)
def test_nearest_and_saturated(value: float, nearest: float) -> None:
    both = to_page(torch.tensor([value, -value]), FLOAT8).tolist()
    assert both == pytest.approx([nearest, -nearest], rel=0.0, nan_ok=True)


def test_a_page_of_the_same_dtype_is_left_alone() -> None:
    x = torch.tensor([1e30, NAN])
    assert to_page(x, torch.float32) is x


class Projection:
    """Of T tokens, and where its K and V go."""

    heads, kv_heads, head_dim = 4, 2, 32

    def __init__(self, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = torch.randn(tokens, width, device=device).to(dtype)
        self.cos_sin = torch.randn(64, self.head_dim, device=device)
        self.positions = torch.randint(0, 64, (tokens,), device=device)
        self.slots = torch.randperm(3 * 16, device=device)[:tokens]
        self.norms = torch.rand(2, self.head_dim, device=device).to(dtype).unbind()

    def store(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """q, and what the pages hold of K and V: [T, 2, KV, D]."""
        device = self.qkv.device
        shape = (2, 3, 16, self.kv_heads, self.head_dim)
        pages = torch.full(shape, 7.0, device=device).to(dtype)
        qkv = self.qkv.clone()
        q = rope.rope_store(qkv, self.cos_sin, self.positions, self.slots, pages, *self.norms)
        flat = bits(pages).view(2, -1, self.kv_heads, self.head_dim)
        others = torch.ones(3 * 16, dtype=torch.bool, device=device)
        others[self.slots] = False
        untouched = flat[:, others].view(dtype).float()
        assert (untouched == 7.0).all(), "a place outside `slots` was written"
        return q, flat[:, self.slots].view(dtype).transpose(0, 1)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_rope_store_rounds_what_it_stores(
    tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = Projection(tokens, dtype, device)
    q, exact = case.store(dtype)
    same_q, stored = case.store(FLOAT8)
    assert_close(same_q, q)  # each is compiled for its pages, and may contract other products
    assert torch.equal(bits(stored.contiguous()), bits(to_page(exact, FLOAT8).contiguous()))
    assert_close(stored.float(), exact, 4e-2)


@DTYPES
def test_rope_store_saturates(dtype: torch.dtype, device: torch.device) -> None:
    case = Projection(4, dtype, device)
    extreme = torch.tensor([6e4, -6e4, INFINITY, -INFINITY, NAN, 449.0], device=device).to(dtype)
    values = case.qkv.view(4, -1, case.head_dim)[:, case.heads + case.kv_heads :]
    values[..., :6] = extreme
    case.norms[1].mul_(1e4)
    _, stored = case.store(FLOAT8)
    expected = [FLOAT8_MAX, -FLOAT8_MAX, FLOAT8_MAX, -FLOAT8_MAX, NAN, FLOAT8_MAX]
    found = stored[:, 1, :, :6].float().cpu()
    torch.testing.assert_close(found, torch.tensor(expected).expand_as(found), equal_nan=True)
    keys = stored[:, 0].float()
    assert keys.isfinite().all()
    assert (keys.abs() == FLOAT8_MAX).float().mean() > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpus_way_stores_the_same(dtype: torch.dtype) -> None:
    case = Projection(5, dtype, torch.device("cpu"))
    pages = torch.zeros(2, 3, 16, case.kv_heads, case.head_dim).to(FLOAT8)
    expected = pages.clone()
    ours, theirs = case.qkv.clone(), case.qkv.clone()
    ops = TorchOps()
    rotation = ops.rotation(case.cos_sin, case.positions, dtype)
    ops.rope_store(ours, rotation, case.slots, pages, None, None, 1e-6)
    rope.rope_store_reference(theirs, case.cos_sin, case.positions, case.slots, expected)
    assert_close(pages.float(), expected.float(), 1e-2)  # its angles are rounded to the dtype


@pytest.mark.parametrize("ids", [[3], [8, 0, 5]])
def test_pages_are_copied_byte_by_byte(ids: list[int], device: torch.device) -> None:
    codes = every_float8().to(device)
    places = torch.randint(0, 256, (3, 2, 9, 16, 2, 24), device=device)
    pool = bits(codes)[places].view(FLOAT8)
    index = torch.tensor(ids, dtype=torch.int64, device=device)
    for gather, scatter in (
        (page_kernels.gather_pages, page_kernels.scatter_pages),
        (page_kernels.gather_pages_reference, page_kernels.scatter_pages_reference),
    ):
        packed = torch.zeros(len(ids), 3, 2, 16, 2, 24, device=device).to(FLOAT8)
        gather(pool, index, packed)
        assert torch.equal(bits(packed), bits(pool)[:, :, ids].movedim(2, 0))
        other = torch.zeros_like(pool)
        scatter(other, index, packed)
        assert torch.equal(bits(other)[:, :, ids], bits(pool)[:, :, ids])
        assert other.float().count_nonzero() == pool[:, :, ids].float().count_nonzero()
