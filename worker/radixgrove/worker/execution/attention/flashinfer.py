"""Attention by FlashInfer's kernels (Ye et al. 2025): bfloat16 and float16, compiled on first use.

Prefill chunks take the paged prefill kernel (FA3 on Hopper), decode rows the tensor-core decode
path, which has every GQA group size and is the faster one with pages of 16. Plans are made once a
step from the host's mirrors; page lists are flattened on the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.worker.execution.attention.base import AttentionBackend, AttentionBatch, store_kv

log = logging.getLogger(__name__)

# Split-KV partial sums of one layer: what FlashInfer's own schedule needs for 128 query heads.
_FLOAT_WORKSPACE_BYTES = 384 << 20
_INT_WORKSPACE_BYTES = 8 << 20
_DTYPES = (torch.bfloat16, torch.float16)
Report = Callable[[str, float | None], None]


class FlashInferUnavailable(RuntimeError):
    """FlashInfer cannot serve here; the message says why in a line for people."""


def _import_flashinfer() -> ModuleType:
    try:
        import flashinfer
    except Exception as error:  # its imports fail in many ways, not only ImportError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FlashInferUnavailable(f"FlashInfer cannot be imported: {reason[0]}") from error
    return flashinfer  # type: ignore[no-any-return]


class _PlanSpace:
    """Where one role's plans live: an integer workspace on the device and pinned copies of it.

    A plan is written to pinned memory and copied asynchronously. With two steps in flight the copy
    of the step before may still be waiting, so consecutive plans take turns between two copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_buffer = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [
            torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._turn = 0

    def lend(self, wrapper: Any) -> None:
        """Make the next `plan` of `wrapper` use this space."""
        wrapper._int_workspace_buffer = self._device_buffer
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        self._turn ^= 1


class FlashInferAttention(AttentionBackend):
    """See the module.

    Raises:
        FlashInferUnavailable: not importable, or the pool's dtype has no kernels.
    """

    def __init__(
        self, pool: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float
    ) -> None:
        super().__init__(
            pool, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
        )
        if pool.dtype not in _DTYPES:
            name = str(pool.dtype).removeprefix("torch.")
            raise FlashInferUnavailable(f"FlashInfer has no kernels for {name}")
        self._flashinfer = _import_flashinfer()
        device = pool.device
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._prefill_kernel = "fa3" if hopper else "fa2"
        self._workspace = torch.empty(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill_space = _PlanSpace(device)
        self._decode_space = _PlanSpace(device)
        self._captured_space = _PlanSpace(device)
        self._prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=self._prefill_kernel
        )
        self._decode = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True
        )
        self._captured: dict[int, Any] = {}
        self._pages = [(layer[0], layer[1]) for layer in pool]

    # ---- compiling ---------------------------------------------------------------------------

    def warm_up(self, report: Report) -> None:
        """Compile what is not in FlashInfer's cache yet, and run each kernel once.

        The cache is a directory below `$FLASHINFER_WORKSPACE_BASE` (default: the home directory),
        named by FlashInfer's version and the architecture; its entries by dtype and head dimension.

        Raises:
            FlashInferUnavailable: compiling or the trial run failed.
        """
        kernels = dict.fromkeys((self._prefill_kernel, "fa2"))
        specs = {kernel: self._spec(kernel) for kernel in kernels}
        missing = {kernel: spec for kernel, spec in specs.items() if not spec.is_compiled}
        try:
            if missing:
                self._compile(missing, report)
            report("trying FlashInfer's kernels", None)
            self._try_out()
        except Exception as error:
            log.debug("FlashInfer failed", exc_info=True)
            raise FlashInferUnavailable(
                f"FlashInfer's kernels cannot be built or run here ({type(error).__name__})"
            ) from error

    def _spec(self, kernel: str) -> Any:
        dtype, dim = self.pool.dtype, self.head_dim
        no_position_encoding = 0
        return self._flashinfer.jit.gen_batch_prefill_module(
            kernel,
            dtype,
            dtype,
            dtype,
            torch.int32,
            dim,
            dim,
            no_position_encoding,
            False,  # sliding window
            False,  # soft cap
            False,  # fp16 reduction
        )

    def _compile(self, specs: dict[str, Any], report: Report) -> None:
        """Build side by side; each build is a process, so threads suffice."""
        begin = time.monotonic()
        with ThreadPoolExecutor(len(specs)) as pool:
            builds = {pool.submit(spec.build, False) for spec in specs.values()}
            pending = builds
            while pending:
                _, pending = wait(pending, timeout=2.0)
                seconds = time.monotonic() - begin
                report(
                    f"compiling FlashInfer {', '.join(specs)} (once for this version and head "
                    f"dimension): {seconds:.0f} s",
                    (len(builds) - len(pending)) / len(builds),
                )
            for build in builds:
                build.result()

    def _try_out(self) -> None:
        """A step of one 2-token prefill and one decode, on the scratch page."""
        device, scratch = self.pool.device, self.pool.shape[2] - 1
        q = torch.zeros(3, self.num_heads, self.head_dim, dtype=self.pool.dtype, device=device)
        indptr = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
        lens = torch.tensor([2, 1], dtype=torch.int32)
        slots = torch.full((3,), scratch * self.page_size, dtype=torch.int64, device=device)
        batch = AttentionBatch(
            num_prefills=1,
            num_decodes=1,
            num_prefill_tokens=2,
            rows=torch.zeros(2, dtype=torch.int32, device=device),
            qo_indptr=indptr,
            kv_lens=lens.to(device),
            page_table=torch.full((1, 2), scratch, dtype=torch.int32, device=device),
            slots=slots,
            positions=torch.zeros(3, dtype=torch.int64, device=device),
            q_lens_host=[2],
            kv_lens_host=[2, 1],
        )
        self.plan(batch)
        self.attend(0, q)
        torch.cuda.synchronize(device)

    # ---- planning ----------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._run_decode = self._decode
        prefills, rows = batch.num_prefills, batch.num_prefills + batch.num_decodes
        if prefills:
            self._plan_prefill(batch)
        if rows > prefills:
            lens = np.asarray(batch.kv_lens_host[prefills:rows], dtype=np.int32)
            indptr, last = self._page_bounds(lens)
            indices = self._flatten(batch, slice(prefills, rows), int(indptr[-1]))
            self._decode_space.lend(self._decode)
            self._decode.plan(indptr, indices, last, **self._decode_arguments())

    def _plan_prefill(self, batch: AttentionBatch) -> None:
        prefills = batch.num_prefills
        lens = np.asarray(batch.kv_lens_host[:prefills], dtype=np.int32)
        indptr, last = self._page_bounds(lens)
        indices = self._flatten(batch, slice(0, prefills), int(indptr[-1]))
        starts = np.zeros(prefills + 1, dtype=np.int32)
        np.cumsum(batch.q_lens_host, out=starts[1:])
        self._prefill_space.lend(self._prefill)
        self._prefill.plan(
            torch.from_numpy(starts),
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
            max_token_per_sequence=max(batch.q_lens_host),
        )

    def _decode_arguments(self) -> dict[str, Any]:
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "q_data_type": self.pool.dtype,
            "kv_data_type": self.pool.dtype,
            "sm_scale": self.scale,
        }

    def _page_bounds(self, lens: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        """Host `kv_indptr` [B + 1] and `last_page_len` [B], int32, of KV lengths [B]."""
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum((lens + self.page_size - 1) // self.page_size, out=indptr[1:])
        last = (lens - 1) % self.page_size + 1
        return torch.from_numpy(indptr), torch.from_numpy(last)

    def _flatten(self, batch: AttentionBatch, part: slice, total: int) -> Tensor:
        rows, lens = batch.rows[part], batch.kv_lens[part]
        indices = torch.empty(total, dtype=torch.int32, device=rows.device)
        indptr = torch.empty(len(rows) + 1, dtype=torch.int32, device=rows.device)
        last = torch.empty_like(lens)
        ops.kv_indices(rows, lens, batch.page_table, self.page_size, indptr, indices, last)
        return indices

    def prepare_capture(self, max_batch: int, max_pages: int) -> None:
        """Static page lists for up to `max_batch` rows of up to `max_pages` pages each."""
        device = self.pool.device
        self._indptr = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self._indices = torch.zeros(max_batch * max_pages, dtype=torch.int32, device=device)
        self._last = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._captured.clear()

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        self._batch = batch
        lens = np.ones(padded, dtype=np.int32)
        lens[: len(batch.kv_lens_host)] = batch.kv_lens_host
        indptr, last = self._page_bounds(lens)
        ops.kv_indices(
            batch.rows[:padded],
            batch.kv_lens[:padded],
            batch.page_table,
            self.page_size,
            self._indptr[: padded + 1],
            self._indices,
            self._last[:padded],
        )
        wrapper = self._captured.get(padded)
        if wrapper is None:
            wrapper = self._captured[padded] = self._make_captured(padded)
            self._captured_space.lend(wrapper)
            used = self._indices[: int(indptr[-1])]
            wrapper.plan(indptr, used, last, **self._decode_arguments())
        else:
            self._captured_space.lend(wrapper)
            # The page lists are in the wrapper's buffers already: only the schedule is remade.
            self._flashinfer.fast_decode_plan(
                wrapper,
                self._indptr[: padded + 1],
                self._indices,
                last,
                global_override_indptr_cpu=indptr,
                **self._decode_arguments(),
            )
        self._run_decode = wrapper

    def _make_captured(self, padded: int) -> Any:
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr[: padded + 1],
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last[:padded],
        )

    # ---- running -----------------------------------------------------------------------------

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store_kv(self.pool, layer, self._batch.slots, k, v)
        return self.attend(layer, q)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        tokens = self._batch.num_prefill_tokens
        out = torch.empty_like(q)
        if tokens:
            self._prefill.run(q[:tokens], self._pages[layer], out=out[:tokens])
        if q.shape[0] > tokens:
            self._run_decode.run(q[tokens:], self._pages[layer], out=out[tokens:])
        return out
