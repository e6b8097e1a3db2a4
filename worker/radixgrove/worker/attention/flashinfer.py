"""Attention with FlashInfer's kernels (Ye et al. 2025) in bfloat16 and float16.

Prefill chunks of eager steps take its prefill kernels (FA3 on Hopper), planned once a step from the
host's mirrors: the paged one behind a cached prefix, with page lists flattened on the device, and
the ragged one from a prompt's beginning, over the step's own K and V, which takes a sixth less.
Decode rows take our own kernel, which has every GQA group size and needs no plan. Layers with a
window have a backend of their own (`triton`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.worker.attention.base import AttentionBatch, Geometry
from radixgrove.worker.attention.decode import DecodingBackend
from radixgrove.worker.attention.flashinfer_kernels import (
    FlashInferUnavailable,
    compiling,
    find_toolkit,
    import_flashinfer,
    kernel_of,
    specification,
    wait_reporting,
)

log = logging.getLogger(__name__)

# Split-KV partial sums of one layer: what FlashInfer's own schedule needs for 128 query heads.
_FLOAT_WORKSPACE_BYTES = 384 << 20
_INT_WORKSPACE_BYTES = 8 << 20
Report = Callable[[str, float | None], None]


class _PlanSpace:
    """Where plans live: an integer workspace on the device and pinned copies of it.

    A plan is written to pinned memory and copied asynchronously. With steps in flight the copy of
    the step before may still be waiting, so consecutive plans take turns between two copies; where
    more steps are in flight, as in a pipeline, one waits for the step before the last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_buffer = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def lend(self, wrapper: Any) -> None:
        """Make the next `plan` of `wrapper` use this space."""
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record()
        self._copied[self._turn ^ 1] = before
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        wrapper._int_workspace_buffer = self._device_buffer
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        self._turn ^= 1


class FlashInferAttention(DecodingBackend):
    """See the module.

    Raises:
        FlashInferUnavailable: not importable, or no kernels for the pool's dtype, for a window or
            for sinks.
            (Those for float8 pages and bfloat16 queries are not used: with them a model's
            log-probabilities were NaN on an H100, version 0.6.13.)
    """

    def __init__(self, pool: Tensor, **geometry: Unpack[Geometry]) -> None:
        super().__init__(pool, **geometry)
        if self.window:
            raise FlashInferUnavailable(
                "FlashInfer's kernels are not used for layers with a window"
            )
        if self.sinks:
            raise FlashInferUnavailable(
                "FlashInfer's kernels are not used for attention with sinks"
            )
        dtype = str(pool.dtype).removeprefix("torch.")
        device = pool.device
        major, _ = torch.cuda.get_device_capability(device)
        kernel = kernel_of(major, dtype, self.head_dim)
        if kernel is None:
            raise FlashInferUnavailable(
                f"FlashInfer has no kernels here for {dtype} KV of head dimension {self.head_dim}"
            )
        flashinfer = import_flashinfer()
        self._kernel = kernel
        self._workspace = torch.empty(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans = _PlanSpace(device)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=kernel.generation
        )
        self._fresh_plans = _PlanSpace(device)
        self._fresh = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace, "NHD", backend=kernel.generation
        )
        self._prefixed_tokens = 0  # of the planned step's prefill tokens, those of the paged kernel
        self._sides = [(layer[0], layer[1]) for layer in pool]

    # ---- compiling ---------------------------------------------------------------------------

    def warm_up(self, report: Report) -> None:
        """Compile the prefill kernel if it is not there, and run a step once.

        Without one beside its package FlashInfer looks into a directory below
        `$FLASHINFER_WORKSPACE_BASE` (default: the home directory), named by its version and the
        architecture. It asks for the toolkit there, too, before it takes what lies in it.

        Raises:
            FlashInferUnavailable: there is no kernel and no toolkit, compiling or the trial run
                failed.
        """
        try:
            self._make_ready(report)
        except FlashInferUnavailable:
            raise
        except Exception as error:
            log.debug("FlashInfer failed", exc_info=True)
            raise FlashInferUnavailable(
                f"FlashInfer's kernels cannot be built or run here ({type(error).__name__})"
            ) from error

    def _make_ready(self, report: Report) -> None:
        spec = specification(self._kernel)
        if spec.is_aot:
            self.about = f"prefill {self._kernel}: compiled before the start"
            self._try_out(report)
            return
        toolkit = find_toolkit()
        if toolkit is None:
            raise FlashInferUnavailable(
                f"no prefill kernel is compiled ({self._kernel}) and no nvcc is here; "
                "`radixgrove doctor` says how to get one"
            )
        self.about = f"prefill {self._kernel}: by the nvcc of {toolkit.home}"
        with compiling(toolkit, spec.build_dir.parent / "links"):
            if not spec.is_compiled:
                self._compile(spec, report)
            self._try_out(report)

    def _compile(self, spec: Any, report: Report) -> None:
        """Build, and say now and then how long it has taken."""
        text = "compiling FlashInfer's prefill (once for this version, dtype and head dimension)"
        wait_reporting(
            lambda: spec.build(False), lambda seconds: report(f"{text}: {seconds:.0f} s", None)
        )

    def _try_out(self, report: Report) -> None:
        """A step with each kind of row, on the scratch page."""
        report("trying FlashInfer's kernels", None)
        device, scratch = self.pool.device, self.pool.shape[2] - 1
        q = torch.zeros(5, self.num_heads, self.head_dim, dtype=self.pool.dtype, device=device)
        indptr = torch.tensor([0, 2, 4, 5], dtype=torch.int32, device=device)
        lens = [3, 2, 1]
        batch = AttentionBatch(
            num_prefills=2,
            num_decodes=1,
            num_prefill_tokens=4,
            rows=torch.zeros(3, dtype=torch.int32, device=device),
            qo_indptr=indptr,
            kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            # As wide as tables whose rows are aligned, for which kernels are compiled already.
            page_table=torch.full((1, 16), scratch, dtype=torch.int32, device=device),
            slots=torch.full((5,), scratch * self.page_size, dtype=torch.int64, device=device),
            positions=torch.zeros(5, dtype=torch.int64, device=device),
            q_lens_host=[2, 2],
            kv_lens_host=lens,
        )
        kv = q.new_zeros(5, 2 * self.num_kv_heads, self.head_dim)
        self.plan(batch)
        self.attend(0, q, kv)
        torch.cuda.synchronize(device)

    # ---- planning ----------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        prefixed = count_prefixed(batch)
        self._prefixed_tokens = sum(batch.q_lens_host[:prefixed])
        if prefixed:
            self._plan_prefixed(batch, prefixed)
        if prefixed < batch.num_prefills:
            self._plan_fresh(batch.q_lens_host[prefixed:])

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        super().plan_captured(batch, padded)
        self._prefixed_tokens = 0

    def _plan_prefixed(self, batch: AttentionBatch, chunks: int) -> None:
        """The first `chunks` prefill chunks, over pages."""
        lens = np.asarray(batch.kv_lens_host[:chunks], dtype=np.int32)
        indptr, last = self._page_bounds(lens)
        indices = self._flatten(batch, chunks, int(indptr[-1]))
        q_lens = batch.q_lens_host[:chunks]
        self._plans.lend(self._prefill)
        self._prefill.plan(
            _starts(q_lens),
            indptr,
            indices,
            last,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.page_size,
            causal=True,
            sm_scale=self.scale,
            q_data_type=self.pool.dtype,
            kv_data_type=self.pool.dtype,
            max_token_per_sequence=max(q_lens),
        )

    def _plan_fresh(self, lengths: list[int]) -> None:
        """Chunks that begin their prompts, over the step's own K and V."""
        starts = _starts(lengths)
        self._fresh_plans.lend(self._fresh)
        self._fresh.plan(
            starts,
            starts,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            causal=True,
            sm_scale=self.scale,
            q_data_type=self.pool.dtype,
            kv_data_type=self.pool.dtype,
        )

    def _page_bounds(self, lens: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        """Host `kv_indptr` [B + 1] and `last_page_len` [B], int32, of KV lengths [B]."""
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum((lens + self.page_size - 1) // self.page_size, out=indptr[1:])
        last = (lens - 1) % self.page_size + 1
        return torch.from_numpy(indptr), torch.from_numpy(last)

    def _flatten(self, batch: AttentionBatch, chunks: int, total: int) -> Tensor:
        """The pages of the first `chunks` rows, one after the other: [total] int32."""
        rows, lens = batch.rows[:chunks], batch.kv_lens[:chunks]
        indices = torch.empty(total, dtype=torch.int32, device=rows.device)
        indptr = torch.empty(len(rows) + 1, dtype=torch.int32, device=rows.device)
        ops.kv_indices(
            rows, lens, batch.page_table, self.page_size, indptr, indices, torch.empty_like(lens)
        )
        return indices

    # ---- running -----------------------------------------------------------------------------

    def attend_eager(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        tokens = self._batch.num_prefill_tokens
        out = torch.empty_like(q)
        self._attend_chunks(layer, q, kv, out)
        if q.shape[0] > tokens:
            self._decode.run(layer, q[tokens:], self._batch, out[tokens:], sinks)
        return out

    def _attend_chunks(self, layer: int, q: Tensor, kv: Tensor, out: Tensor) -> None:
        prefixed, tokens = self._prefixed_tokens, self._batch.num_prefill_tokens
        if prefixed:
            self._prefill.run(q[:prefixed], self._sides[layer], out=out[:prefixed])
        if prefixed < tokens:
            k, v = kv[prefixed:tokens].chunk(2, dim=1)
            self._fresh.run(q[prefixed:tokens], k, v, out=out[prefixed:tokens])


def count_prefixed(batch: AttentionBatch) -> int:
    """Prefill chunks up to the last one with a prefix; all behind it begin their prompts."""
    chunks = zip(batch.q_lens_host, batch.kv_lens_host, strict=False)  # decodes have KV lengths too
    with_prefix = [index for index, (new, known) in enumerate(chunks) if known > new]
    return with_prefix[-1] + 1 if with_prefix else 0


def _starts(lengths: list[int]) -> Tensor:
    """[B + 1] int32 on the host: where each of B runs begins, and the end."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return torch.from_numpy(starts)
