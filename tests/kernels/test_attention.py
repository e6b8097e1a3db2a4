"""Paged decode and extend attention against float64, and every backend against the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from radixgrove.kernels import attention, decode
from radixgrove.kernels.decode import MAX_PROGRAMS, DecodeConfig, DecodeWorkspace
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.rope import rope_store_reference
from radixgrove.worker.attention import decode as paged_decode
from radixgrove.worker.attention.base import AttentionBackend, AttentionBatch, PaddedBatch
from radixgrove.worker.attention.decode import PagedDecode
from tests.conftest import examples
from tests.kernels.helpers import PAGED_DTYPES, PagedKv, assert_close

GEOMETRIES = pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(6, 2, 32, 16), (7, 1, 24, 4), (3, 3, 16, 1)],
    ids=["gqa3", "gqa7", "mha-page1"],
)


def exact(q: Tensor, kv: PagedKv, indptr: Tensor, scale: float) -> Tensor:
    return attention.extend_attention_reference(
        q.double(), kv.pages.double(), kv.rows, indptr, kv.kv_lens, kv.page_table, scale
    )


@pytest.mark.covering(2)
@PAGED_DTYPES
@GEOMETRIES
@pytest.mark.parametrize("lengths", [[1], [1, 16, 17, 300, 129]], ids=["one", "mixed"])
def test_decode(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    kv = PagedKv.random(
        lengths,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=kv_dtype or dtype,
        device=device,
    )
    q = torch.randn(len(lengths), heads, head_dim, device=device).to(dtype)
    workspace = DecodeWorkspace(len(lengths), heads, kv_heads, head_dim, device)
    indptr = torch.arange(len(lengths) + 1)
    for _ in range(2):  # the second run finds the counters as the first left them
        out = decode.decode_attention(
            q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, 0.3, workspace
        )
        assert_close(out, exact(q, kv, indptr, 0.3))
        assert not workspace.counters.any(), "counters must be zero between launches"


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    config=st.builds(
        DecodeConfig,
        block_n=st.just(16),
        stages=st.just(2),
        warps=st.just(1),
        programs=st.integers(1, MAX_PROGRAMS),
        least=st.integers(1, 5),
    ),
)
def test_decode_deals_any_lengths_to_any_number_of_programs(
    lengths: list[int], kv_heads: int, config: DecodeConfig
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kv = PagedKv.random(
        lengths, page_size=16, kv_heads=kv_heads, head_dim=16, dtype=torch.float16, device=device
    )
    q = torch.randn(len(lengths), 2 * kv_heads, 16, device=device).half()
    workspace = DecodeWorkspace(len(lengths), 2 * kv_heads, kv_heads, 16, device)
    workspace.partials.fill_(float("nan"))
    workspace.stats.fill_(float("nan"))
    out = decode.decode_attention(
        q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, 0.3, workspace, config=config
    )
    assert_close(out, exact(q, kv, torch.arange(len(lengths) + 1), 0.3))
    assert not workspace.counters.any(), "counters must be zero between launches"


def test_decode_gives_each_of_many_rows_a_program(device: torch.device) -> None:
    lengths = [1 + 7 * index % 40 for index in range(3 * 4 * decode._multiprocessors(device))]
    kv = PagedKv.random(
        lengths, page_size=16, kv_heads=1, head_dim=16, dtype=torch.bfloat16, device=device
    )
    q = torch.randn(len(lengths), 2, 16, device=device).bfloat16()
    workspace = DecodeWorkspace(len(lengths), 2, 1, 16, device)
    workspace.stats.fill_(float("nan"))
    out = decode.decode_attention(q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, 0.3, workspace)
    assert_close(out, exact(q, kv, torch.arange(len(lengths) + 1), 0.3))
    assert workspace.stats.isnan().all(), "no row is shared"


def test_decode_merges_a_row_that_many_programs_share(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(decode, "_multiprocessors", lambda _device: 16)
    kv = PagedKv.random(
        [1000, 65, 64], page_size=16, kv_heads=2, head_dim=32, dtype=torch.float32, device=device
    )
    q = torch.randn(3, 4, 32, device=device)
    workspace = DecodeWorkspace(3, 4, 2, 32, device)
    workspace.stats.fill_(float("nan"))
    out = decode.decode_attention(q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, 0.3, workspace)
    assert_close(out, exact(q, kv, torch.arange(4), 0.3))
    parts = workspace.stats.view(-1, 2 * 2)[:, 0].isfinite().sum()
    assert parts > 2 * 8, "each KV head of the long row should reach into many shares"


@pytest.mark.parametrize("capacity", [4, 40], ids=["few", "whole-pairs"])
def test_decode_finds_queries_where_it_is_told(capacity: int, device: torch.device) -> None:
    lengths = [5, 70, 33]
    kv = PagedKv.random(
        lengths, page_size=16, kv_heads=2, head_dim=32, dtype=torch.float16, device=device
    )
    q = torch.randn(9, 4, 32, device=device).half()
    places = torch.tensor([7, 2, 8], device=device)

    def padded(values: Tensor, beyond: int) -> Tensor:
        return torch.nn.functional.pad(values.int(), (0, capacity - 3), value=beyond)

    out = torch.full_like(q, 5.0)
    decode.decode_attention(
        q,
        kv.pages,
        padded(kv.rows, 0),
        padded(kv.kv_lens, 0),
        kv.page_table,
        0.3,
        DecodeWorkspace(capacity, 4, 2, 32, device),
        tokens=padded(places, 0),
        out=out,
    )
    assert_close(out[places], exact(q[places], kv, torch.arange(4), 0.3))
    others = [0, 1, 3, 4, 5, 6]
    assert out[others].eq(5.0).all(), "only where a row has its query may anything be written"


def test_decode_of_nothing_and_of_too_much(device: torch.device) -> None:
    kv = PagedKv.random(
        [3, 3], page_size=16, kv_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    workspace = DecodeWorkspace(1, 2, 1, 16, device)
    empty = torch.zeros(0, 2, 16, device=device)
    arguments = (kv.pages, kv.rows, kv.kv_lens, kv.page_table, 1.0, workspace)
    assert decode.decode_attention(empty, *arguments).shape == (0, 2, 16)
    with pytest.raises(ValueError, match="batch 2 exceeds"):
        decode.decode_attention(torch.zeros(2, 2, 16, device=device), *arguments)


@pytest.mark.covering(2)
@PAGED_DTYPES
@GEOMETRIES
@pytest.mark.parametrize(
    ("prefixes", "chunks"),
    [([0], [1]), ([0, 16, 5], [17, 40, 3]), ([250, 0], [70, 129])],
    ids=["single", "short", "long"],
)
def test_extend(
    prefixes: list[int],
    chunks: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    lengths = [p + c for p, c in zip(prefixes, chunks, strict=True)]
    kv = PagedKv.random(
        lengths,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=kv_dtype or dtype,
        device=device,
    )
    indptr = torch.tensor([0, *chunks]).cumsum(0).int().to(device)
    q = torch.randn(sum(chunks), heads, head_dim, device=device).to(dtype)
    out = attention.extend_attention(
        q, kv.pages, kv.rows, indptr, kv.kv_lens, kv.page_table, 0.3, max(chunks)
    )
    assert_close(out, exact(q, kv, indptr, 0.3))


def test_decode_attends_as_the_prefill_of_the_same_text_does(device: torch.device) -> None:
    """Weights are rounded to powers of two alike, whatever blocks of KV a program takes at once."""
    heads, kv_heads, dim = 6, 2, 64
    kv = PagedKv.random(
        [300, 129, 70],
        page_size=16,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.bfloat16,
        device=device,
    )
    q = torch.randn(3, heads, dim, device=device).bfloat16()
    workspace = DecodeWorkspace(3, heads, kv_heads, dim, device)
    decoded = decode.decode_attention(
        q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, 0.3, workspace
    )
    config = attention.ExtendConfig(block_m=16, block_n=128, warps=4)
    extended = attention.extend_attention(
        q,
        kv.pages,
        kv.rows,
        torch.arange(4, dtype=torch.int32, device=device),
        kv.kv_lens,
        kv.page_table,
        0.3,
        1,
        config=config,
    )
    assert (decoded != extended).float().mean() < 0.01


@pytest.mark.parametrize("longest", [16, 64, 4096])
def test_extend_leaves_empty_chunks_and_padding_alone(longest: int, device: torch.device) -> None:
    prefixes, chunks = [20, 0, 7, 0, 3], [0, 33, 0, 5, 0]
    lengths = [p + c for p, c in zip(prefixes, chunks, strict=True)]
    kv = PagedKv.random(
        [max(1, n) for n in lengths],
        page_size=16,
        kv_heads=2,
        head_dim=16,
        dtype=torch.bfloat16,
        device=device,
    )
    indptr = torch.tensor([0, *chunks]).cumsum(0).int().to(device)
    q = torch.randn(38 + 10, 4, 16, device=device).bfloat16()
    out = torch.full_like(q, 5.0)
    attention.extend_attention(
        q, kv.pages, kv.rows, indptr, kv.kv_lens, kv.page_table, 0.3, longest, out=out
    )
    assert_close(out[:38], exact(q[:38], kv, indptr, 0.3))
    assert out[38:].eq(5.0).all()


# ---- backends: one suite over all of them ----------------------------------------------------


def make_backend(
    name: str, pool: Tensor, heads: int, dtype: torch.dtype | None = None
) -> AttentionBackend:
    from importlib import import_module

    kinds = {"torch": "TorchAttention", "triton": "TritonAttention"}
    kinds["flashinfer"] = "FlashInferAttention"
    module = import_module(f"radixgrove.worker.attention.{name}")
    kv_heads, head_dim = pool.shape[4:]
    backend: AttentionBackend = getattr(module, kinds[name])(
        pool,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=dtype,
    )
    return backend


def two_layers(kv: PagedKv) -> Tensor:
    """A pool of two layers like this one; what lies beyond its rows is NaN here, too."""
    return kv.pages.unsqueeze(0).repeat(2, 1, 1, 1, 1, 1)


def beside_pages(kv: Tensor, pool: Tensor) -> Tensor:
    """A step's K and V as `attend` gets them. Float8 pages alone have them rounded, so what stands
    beside these is not to be read: here it is NaN.
    """
    return kv.fill_(float("nan")) if pool.dtype == FLOAT8 else kv


class Step:
    """A step over paged rows; the backend still has to store their newest KV."""

    def __init__(
        self,
        kv: PagedKv,
        chunks: list[int],
        decodes: int,
        heads: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.kv = kv
        page_size, kv_heads, head_dim = kv.pages.shape[2:]
        lens = kv.kv_lens.tolist()
        q_lens = chunks + [1] * decodes
        device, dtype = kv.pages.device, dtype or kv.pages.dtype
        positions = torch.cat(
            [torch.arange(n - q, n) for n, q in zip(lens, q_lens, strict=True)]
        ).to(device)
        owner = kv.rows.long().repeat_interleave(torch.tensor(q_lens, device=device))
        slots = kv.page_table[owner, positions // page_size].long() * page_size
        slots += positions % page_size
        self.q = torch.randn(sum(q_lens), heads, head_dim, device=device).to(dtype)
        flat = kv.pages.view(2, -1, kv_heads, head_dim)
        self.k, self.v = flat[0][slots].to(dtype), flat[1][slots].to(dtype)
        self.indptr = torch.tensor([0, *q_lens]).cumsum(0).int().to(device)
        self.batch = AttentionBatch(
            num_prefills=len(chunks),
            num_decodes=decodes,
            num_prefill_tokens=sum(chunks),
            rows=kv.rows,
            qo_indptr=self.indptr,
            kv_lens=kv.kv_lens,
            page_table=kv.page_table.clamp(min=0),
            slots=slots,
            positions=positions,
            q_lens_host=chunks,
            kv_lens_host=lens,
        )

    def check(self, backend: AttentionBackend, pool: Tensor, *, captured: bool = False) -> None:
        expected = exact(self.q, self.kv, self.indptr, backend.scale)
        flat = pool[1].view(2, -1, *pool.shape[4:])
        flat[:, self.batch.slots] = 9.0  # planning must not keep what the pages hold
        if captured:
            backend.plan_captured(self.batch, len(self.kv.rows))
        else:
            backend.plan(self.batch)
        if backend.takes_qkv:
            self.check_qkv(backend, pool)
        flat[:, self.batch.slots] = torch.stack([self.k, self.v]).to(pool.dtype)
        kv = beside_pages(torch.cat((self.k, self.v), dim=1), pool)
        assert_close(backend.attend(1, self.q, kv), expected, self.bound())

    def check_padded(self, backend: AttentionBackend, pool: Tensor, padding: int) -> None:
        """In static buffers for 4 chunks and 6 decodes, with so many tokens of padding."""
        expected = exact(self.q, self.kv, self.indptr, backend.scale)
        batch, chunks = self.batch, self.batch.num_prefills
        free, idle = 4 - chunks, 6 - batch.num_decodes

        def padded(values: Tensor, count: int, beyond: int = 0) -> Tensor:
            return torch.nn.functional.pad(values, (0, count), value=beyond)

        buffers = PaddedBatch(
            chunk_rows=padded(batch.rows[:chunks], free),
            chunk_indptr=padded(self.indptr[: chunks + 1], free, batch.num_prefill_tokens),
            chunk_kv_lens=padded(batch.kv_lens[:chunks], free),
            decode_rows=padded(batch.rows[chunks:], idle),
            decode_kv_lens=padded(batch.kv_lens[chunks:], idle),
            decode_tokens=padded(self.indptr[chunks:-1], idle),
            page_table=batch.page_table,
        )
        backend.plan_padded(buffers, batch)
        q = torch.nn.functional.pad(self.q, (0, 0, 0, 0, 0, padding))
        kv = beside_pages(torch.cat((self.k, self.v), dim=1), pool)
        assert not backend.takes_qkv
        assert_close(backend.attend(1, q, kv)[: len(self.q)], expected, self.bound())

    def check_qkv(self, backend: AttentionBackend, pool: Tensor) -> None:
        """From the projection: against the same step, rotated and stored before."""
        head_dim = self.q.shape[2]
        angles = torch.rand(int(self.kv.kv_lens.max()), head_dim // 2, device=self.q.device) * 6
        rotation = torch.cat((angles.cos(), angles.sin()), dim=1), self.batch.positions
        heads = torch.cat((self.q, self.k, self.v), dim=1)
        norms = torch.rand(2, head_dim, device=self.q.device).to(self.q.dtype).unbind()
        fused = backend.attend_qkv(1, heads.flatten(1), rotation, *norms, 1e-6)
        stored = pool[1].clone()
        q = rope_store_reference(
            heads.flatten(1), *rotation, self.batch.slots, pool[1], *norms, 1e-6
        )
        self.check_stored(stored, pool[1])
        kv = beside_pages(heads[:, self.q.shape[1] :], pool)
        assert_close(backend.attend(1, q, kv), fused, self.bound())

    def check_stored(self, stored: Tensor, reference: Tensor) -> None:
        """The step's own places hold its K and V; every other one holds the bytes it held."""
        stored, reference = (pages.view(2, -1, *pages.shape[3:]) for pages in (stored, reference))
        slots = self.batch.slots
        bound = 4e-2 if stored.dtype == FLOAT8 else None
        assert_close(stored[:, slots], reference[:, slots], bound)
        others = torch.ones(stored.shape[1], dtype=torch.bool, device=stored.device)
        others[slots] = False
        stored, reference = (pages[:, others].view(torch.uint8) for pages in (stored, reference))
        assert torch.equal(stored, reference)

    def bound(self) -> float | None:
        # torch's attention on a CPU rounds its weights to bfloat16
        return 2e-2 if self.q.dtype == torch.bfloat16 else None


BACKENDS = [
    "torch",
    "triton",
    pytest.param("flashinfer", marks=pytest.mark.gpu),
]
FLOAT8_BACKENDS = BACKENDS[:2]
BACKENDS_AND_PAGES = pytest.mark.parametrize(
    ("backend_name", "kv_dtype"),
    [
        ("torch", torch.bfloat16),
        ("triton", torch.bfloat16),
        pytest.param("flashinfer", torch.bfloat16, marks=pytest.mark.gpu),
        ("torch", FLOAT8),
        ("triton", FLOAT8),
    ],
    ids=["torch", "triton", "flashinfer", "torch-float8", "triton-float8"],
)


STEPS = pytest.mark.parametrize(
    ("chunks", "prefixes", "decodes"),
    [
        ([20, 31], [0, 0], []),
        ([], [], [1, 16, 33]),
        ([9, 40], [16, 3], [47, 2]),
        ([9, 40, 17], [16, 0, 0], [2]),
        ([5, 40, 17], [0, 16, 0], []),
    ],
    ids=["prefill", "decode", "mixed", "prefix-first", "prefix-between"],
)


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@STEPS
def test_backends_agree(
    backend_name: str,
    group: int,
    dtype: torch.dtype,
    chunks: list[int],
    prefixes: list[int],
    decodes: list[int],
    device: torch.device,
) -> None:
    if backend_name == "flashinfer" and dtype == torch.float32:
        pytest.skip("FlashInfer has no float32 kernels")
    check_backend(backend_name, group, dtype, dtype, chunks, prefixes, decodes, device)


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend_name", FLOAT8_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@STEPS
def test_backends_agree_on_float8_pages(
    backend_name: str,
    dtype: torch.dtype,
    chunks: list[int],
    prefixes: list[int],
    decodes: list[int],
    device: torch.device,
) -> None:
    check_backend(backend_name, 3, dtype, FLOAT8, chunks, prefixes, decodes, device)


def check_backend(
    name: str,
    group: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    chunks: list[int],
    prefixes: list[int],
    decodes: list[int],
    device: torch.device,
) -> None:
    kv_heads, head_dim, page_size = 2, 128, 16
    lengths = [p + c for p, c in zip(prefixes, chunks, strict=True)] + decodes
    kv = PagedKv.random(
        lengths,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=kv_dtype,
        device=device,
    )
    pool = two_layers(kv)
    backend = make_backend(name, pool, group * kv_heads, dtype)
    Step(kv, chunks, len(decodes), group * kv_heads, dtype).check(backend, pool)


class Replanning:
    """One backend that plans steps of some of four rows, one after the other."""

    def __init__(
        self, backend_name: str, kv_dtype: torch.dtype, max_batch: int, device: torch.device
    ) -> None:
        self.kv = PagedKv.random(
            [5, 70, 33, 200], page_size=16, kv_heads=2, head_dim=128, dtype=kv_dtype, device=device
        )
        self.pool = two_layers(self.kv)
        self.backend = make_backend(backend_name, self.pool, 4, torch.bfloat16)
        self.backend.prepare_capture(max_batch, self.kv.page_table.shape[1])

    def step(self, rows: list[int], chunks: list[int], decodes: int) -> Step:
        kv = self.kv
        chosen = PagedKv(kv.pages, kv.rows[rows], kv.kv_lens[rows], kv.page_table)
        return Step(chosen, chunks, decodes, 4, torch.bfloat16)


@BACKENDS_AND_PAGES
def test_backends_replan_padded_steps(
    backend_name: str, kv_dtype: torch.dtype, device: torch.device
) -> None:
    case = Replanning(backend_name, kv_dtype, 6, device)
    for rows, chunks, decodes in (([1, 0, 2, 3], [60, 5], 2), ([3, 1, 2], [17, 70, 1], 0)):
        case.step(rows, chunks, decodes).check_padded(case.backend, case.pool, padding=11)
        case.step(rows, chunks, decodes).check(case.backend, case.pool)


@BACKENDS_AND_PAGES
def test_backends_replan_captured_decodes(
    backend_name: str, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """The same padded size twice with other rows: static buffers must not keep the old ones."""
    case = Replanning(backend_name, kv_dtype, 4, device)
    # Nor may they keep anything of an eager step's plan.
    case.step([0, 1, 2, 3], [3, 60, 30], 1).check(case.backend, case.pool)
    for rows in ([0, 1], [3, 2]):
        case.step(rows, [], 2).check(case.backend, case.pool, captured=True)


@pytest.mark.parametrize("backend_name", BACKENDS[1:])
def test_our_decode_takes_projections_where_nothing_is_prefilled(
    backend_name: str, device: torch.device
) -> None:
    kv = PagedKv.random(
        [20, 9], page_size=16, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device
    )
    pool = two_layers(kv)
    decodes, mixed = Step(kv, [], 2, 4), Step(kv, [3], 1, 4)
    backend = make_backend(backend_name, pool, 4)
    backend.prepare_capture(2, kv.page_table.shape[1])
    for step, takes in ((decodes, True), (mixed, False), (decodes, True)):
        backend.plan(step.batch)
        assert backend.takes_qkv is takes
    backend.plan(mixed.batch)
    backend.plan_captured(decodes.batch, 2)
    assert backend.takes_qkv


@pytest.mark.parametrize("backend_name", BACKENDS[1:])
@pytest.mark.parametrize(("rows", "takes"), [(9, True), (10, False)])
def test_our_decode_takes_projections_of_few_rows(
    backend_name: str,
    rows: int,
    takes: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_decode, "FUSED_ROWS", 9)
    lengths = [1 + 5 * index % 37 for index in range(rows)]
    kv = PagedKv.random(
        lengths, page_size=16, kv_heads=1, head_dim=64, dtype=torch.bfloat16, device=device
    )
    pool = two_layers(kv)
    backend = make_backend(backend_name, pool, 2)
    backend.prepare_capture(rows, kv.page_table.shape[1])
    step = Step(kv, [], rows, 2)
    for captured in (False, True):
        step.check(backend, pool, captured=captured)
        assert backend.takes_qkv is takes
    two = PagedKv(kv.pages, kv.rows[:2], kv.kv_lens[:2], kv.page_table)
    backend.plan_captured(Step(two, [], 2, 2).batch, rows)
    assert backend.takes_qkv is takes, "a graph's size decides, not how many of its rows are real"


def test_eager_steps_take_the_workspace_of_captured_ones(device: torch.device) -> None:
    """A kernel is compiled for a workspace's size: another one would have requests wait for it."""
    paged = PagedDecode(torch.zeros(1, 2, 2, 16, 2, 32, device=device), 4, 0.3)
    paged.plan(200)
    before_capture = paged._workspace
    paged.plan(1)
    assert paged._workspace is before_capture
    paged.prepare_capture(300)
    paged.plan_captured()
    captured = paged._workspace
    assert captured.block_b == 512
    for decodes in (1, 300):
        paged.plan(decodes)
        assert paged._workspace is captured
    paged.plan(301)
    assert paged._workspace.max_batch == 512
    assert paged._workspace is not captured
    paged.plan_captured()
    assert paged._workspace is captured, "graphs hold its addresses"


@pytest.mark.parametrize(
    ("prefixes", "count"), [([], 0), ([0, 0], 0), ([3, 0], 1), ([0, 3, 0], 2), ([0, 3], 2)]
)
def test_chunks_behind_the_last_prefix_need_no_pages(prefixes: list[int], count: int) -> None:
    from radixgrove.worker.attention.flashinfer import count_prefixed

    nothing = torch.empty(0)
    batch = AttentionBatch(
        num_prefills=len(prefixes),
        num_decodes=1,
        num_prefill_tokens=4 * len(prefixes),
        rows=nothing,
        qo_indptr=nothing,
        kv_lens=nothing,
        page_table=nothing,
        slots=nothing,
        positions=nothing,
        q_lens_host=[4] * len(prefixes),
        kv_lens_host=[prefix + 4 for prefix in prefixes] + [9],
    )
    assert count_prefixed(batch) == count
