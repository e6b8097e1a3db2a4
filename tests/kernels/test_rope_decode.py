"""Decode attention that begins with q/k norm, RoPE and the store of K and V: as those apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from radixgrove.kernels import decode, rope
from radixgrove.kernels.decode import MAX_PROGRAMS, DecodeConfig, DecodeWorkspace
from radixgrove.kernels.float8 import FLOAT8, FLOAT8_MAX, bits
from radixgrove.kernels.quantize import quantize_reference
from radixgrove.kernels.weight import QuantizedRows, Weight
from radixgrove.protocol.model.quantization import Activations
from tests.conftest import examples
from tests.kernels.helpers import PAGED_DTYPES, PagedKv, assert_close

EPS, SCALE = 1e-5, 0.3


class Case:
    """Rows with their newest K and V in the projection still: the places in the pages are NaN."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        norm: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        device: torch.device,
    ) -> None:
        self.kv = PagedKv.random(
            lengths,
            page_size=page_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=kv_dtype or dtype,
            device=device,
        )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.positions = self.kv.kv_lens.long() - 1
        own = self.kv.page_table[self.kv.rows.long(), self.positions // page_size].long()
        self.slots = own * page_size + self.positions % page_size
        self.kv.pages.view(2, -1, kv_heads, head_dim)[:, self.slots] = float("nan")
        width = (heads + 2 * kv_heads) * head_dim
        wider = torch.randn(len(lengths), width + 8, device=device).to(dtype)
        self.qkv = wider[:, :width]  # strided
        angles = torch.rand(max(lengths, default=1), head_dim // 2, device=device) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.norms: tuple[Tensor, ...] = ()
        if norm:
            self.norms = tuple((torch.rand(2, head_dim, device=device) + 0.5).to(dtype))

    def run(
        self, config: DecodeConfig | None = None, quantized: QuantizedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention, and the pages it leaves."""
        kv, pages, qkv = self.kv, self.kv.pages.clone(), self.qkv.clone()
        workspace = DecodeWorkspace(
            max(1, len(kv.rows)), self.heads, self.kv_heads, self.head_dim, pages.device
        )
        workspace.partials.fill_(float("nan"))
        workspace.stats.fill_(float("nan"))
        out = decode.rope_decode_attention(
            self.qkv,
            self.cos_sin,
            pages,
            kv.rows,
            kv.kv_lens,
            kv.page_table,
            SCALE,
            workspace,
            *self.norms,
            eps=EPS,
            config=config,
            quantized=quantized,
        )
        assert not workspace.counters.any(), "counters must be zero between launches"
        assert torch.equal(self.qkv, qkv), "the projection is only read"
        return out, pages

    def apart(self) -> tuple[Tensor, Tensor]:
        """The same by `rope_store`, then attention in float64."""
        kv, pages = self.kv, self.kv.pages.clone()
        q = rope.rope_store(
            self.qkv.clone(), self.cos_sin, self.positions, self.slots, pages, *self.norms, eps=EPS
        )
        out = decode.decode_attention_reference(
            q.double(), pages.double(), kv.rows, kv.kv_lens, kv.page_table, SCALE
        )
        return out, pages

    def check(self, config: DecodeConfig | None = None) -> None:
        (out, pages), (expected, stored) = self.run(config), self.apart()
        assert_close(out, expected)
        # On a GPU a norm's sum has another order, and a rotation other fused multiplications.
        tolerance = 1e-2 if pages.is_cuda else 0.0
        if pages.dtype == FLOAT8:  # a step of its 3 bits of mantissa, where rounding tips
            pages, stored, tolerance = pages.float(), stored.float(), tolerance and 0.125
        torch.testing.assert_close(pages, stored, rtol=tolerance, atol=tolerance, equal_nan=True)


LENGTHS = [1, 16, 17, 65, 130]  # a first token, and both sides of borders of pages and blocks


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norm"),
    [
        (2, 2, 64, True),
        (4, 2, 128, True),
        (9, 3, 64, False),
        (8, 2, 128, False),
        (7, 1, 128, False),
        (8, 1, 64, True),
        (6, 2, 24, True),
    ],
    ids=["mha", "gqa2", "gqa3", "gqa4", "gqa7", "gqa8", "odd-dim"],
)
def test_equals_rope_store_then_attention(
    heads: int, kv_heads: int, head_dim: int, norm: bool, device: torch.device
) -> None:
    Case(LENGTHS, heads, kv_heads, head_dim, norm=norm, device=device).check()


@pytest.mark.covering(2)
@PAGED_DTYPES
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_each_type(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, norm: bool, device: torch.device
) -> None:
    Case(LENGTHS, 4, 2, 64, norm=norm, dtype=dtype, kv_dtype=kv_dtype, device=device).check()


@pytest.mark.parametrize(
    "lengths", [LENGTHS, [70] * 12], ids=["shared programs", "a program a row"]
)
def test_the_result_may_be_quantized_by_heads(lengths: list[int], device: torch.device) -> None:
    """As a kernel of its own would: a product whose inputs have parts of 64 columns takes it."""
    case = Case(lengths, 4, 2, 64, device=device)
    count = len(lengths)
    rows = QuantizedRows.by_parts(count, 256, 64, device)
    case.run(quantized=rows)
    out, _ = case.run()
    weight = Weight(
        torch.zeros(8, 256, device=device).to(FLOAT8),
        torch.bfloat16,
        scales=torch.ones(1, 4, device=device),
        block=(64, 64),
        activations=Activations.GROUP,
    )
    values, scales = quantize_reference(out.flatten(1), weight)
    torch.testing.assert_close(rows.scales, scales, rtol=1e-6, atol=0)
    assert torch.equal(bits(rows.values), bits(values))


def test_float8_saturates(device: torch.device) -> None:
    case = Case([20, 3], 4, 2, 64, kv_dtype=FLOAT8, device=device)
    case.qkv[:, 4 * 64 :] *= 1e4
    out, pages = case.run()
    assert out.isfinite().all()
    newest = bits(pages).view(2, -1, 2, 64)[:, case.slots].view(FLOAT8).float()
    assert (newest.abs() == FLOAT8_MAX).float().mean() > 0.9


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [200]], ids=["first", "firsts", "long"])
def test_any_page_size(lengths: list[int], page_size: int, device: torch.device) -> None:
    Case(lengths, 6, 2, 32, page_size=page_size, norm=True, device=device).check()


@examples(20)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    kv_heads=st.integers(1, 2),
    config=st.builds(
        DecodeConfig,
        block_n=st.just(16),
        stages=st.just(2),
        warps=st.just(1),
        programs=st.integers(1, MAX_PROGRAMS),
        least=st.integers(1, 5),
    ),
)
def test_the_program_with_the_last_block_stores_first(
    lengths: list[int], kv_heads: int, config: DecodeConfig
) -> None:
    """However rows are cut up: reading a place before it is written would give NaN."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    Case(lengths, 2 * kv_heads, kv_heads, 16, norm=kv_heads > 1, device=device).check(config)


def test_a_program_for_each_of_many_rows(device: torch.device) -> None:
    lengths = [1 + 7 * index % 40 for index in range(3 * 4 * decode._multiprocessors(device))]
    Case(lengths, 2, 1, 16, norm=True, device=device).check()


def test_padding_rows_write_to_the_scratch_page_only(device: torch.device) -> None:
    """As in a captured step: rows past the batch are one row of one token on the last page."""
    case = Case([1, 40, 16], 4, 2, 32, norm=True, device=device)
    kv, scratch = case.kv, case.kv.pages.shape[1]
    expected, stored = case.run()
    kv.pages = torch.cat((kv.pages, torch.full_like(kv.pages[:, :1], float("nan"))), dim=1)
    dummy = kv.page_table.new_full((1, kv.page_table.shape[1]), scratch)
    kv.page_table = torch.cat((kv.page_table, dummy))
    padding = kv.rows.new_full((5,), len(kv.page_table) - 1)
    kv.rows = torch.cat((kv.rows, padding))
    kv.kv_lens = torch.cat((kv.kv_lens, torch.ones_like(padding)))
    case.qkv = torch.cat((case.qkv, torch.randn_like(case.qkv[:1]).expand(5, -1)))
    out, pages = case.run()
    assert torch.equal(out[:3].isfinite(), expected.isfinite())
    assert_close(out[:3], expected.double())
    assert torch.equal(pages[:, :scratch].nan_to_num(9.0), stored.nan_to_num(9.0))
    assert pages[:, scratch, 0].isfinite().all()
    assert pages[:, scratch, 1:].isnan().all()


def test_nothing_and_too_much(device: torch.device) -> None:
    empty = Case([], 2, 1, 16, device=device)
    assert empty.run()[0].shape == (0, 2, 16)
    case = Case([3, 3], 2, 1, 16, device=device)
    workspace = DecodeWorkspace(1, 2, 1, 16, device)
    kv = case.kv
    with pytest.raises(ValueError, match="batch 2 exceeds"):
        decode.rope_decode_attention(
            case.qkv,
            case.cos_sin,
            kv.pages,
            kv.rows,
            kv.kv_lens,
            kv.page_table,
            SCALE,
            workspace,
        )


def test_reference(device: torch.device) -> None:
    case = Case([1, 16, 17], 4, 2, 32, norm=True, dtype=torch.float32, device=device)
    kv, pages = case.kv, case.kv.pages.clone()
    out = decode.rope_decode_attention_reference(
        case.qkv,
        case.cos_sin,
        pages,
        kv.rows,
        kv.kv_lens,
        kv.page_table,
        SCALE,
        *case.norms,
        eps=EPS,
    )
    expected, stored = case.apart()
    assert_close(out, expected)
    torch.testing.assert_close(pages, stored, equal_nan=True)
