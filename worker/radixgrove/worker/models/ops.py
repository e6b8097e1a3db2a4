"""The decoder's arithmetic: fused kernels on CUDA, few cheap torch calls elsewhere.

On a CPU a small model's decode step is hundreds of tiny operations, so what counts here is how many
calls are made and what each allocates.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from radixgrove.kernels import moe
from radixgrove.kernels import ops as kernels
from radixgrove.kernels.float8 import bits, to_page
from radixgrove.kernels.moe import ExpertWeights
from radixgrove.kernels.quantize import rounded, widened
from radixgrove.kernels.weight import QuantizedRows, Weight

logger = logging.getLogger(__name__)

Rotation = tuple[Tensor, Tensor]
Inputs = Tensor | QuantizedRows  # of a product; quantized on CUDA alone
_MKLDNN = torch.ops.mkldnn
# Up to here a call costs more than the work it does.
_FEW_ELEMENTS = 8192


def choose_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest arithmetic on this device for a model of `dtype`."""
    if device.type == "cuda":
        return KernelOps()
    if CpuOps.supports(dtype):
        return CpuOps()
    name = str(dtype).removeprefix("torch.")
    logger.warning(
        "this processor has no fast %s: using the plain path; --dtype float32 may be faster", name
    )
    return TorchOps()


class Ops(Protocol):
    """Shapes: T tokens, H query heads, KV key/value heads of head dimension D."""

    def prepare(self, weight: Weight) -> Weight:
        """The form in which `linear` wants a loaded weight; it may be a copy."""
        ...

    def prepare_experts(self, weights: ExpertWeights) -> ExpertWeights:
        """The form in which `experts` wants loaded ones; it may be a copy."""
        ...

    def linear(
        self,
        x: Inputs,
        weight: Weight,
        bias: Tensor | None,
        *,
        norm: Tensor | None,
        eps: float,
        silu: bool,
        residual: Tensor | None,
        added_to: Tensor | None = None,
    ) -> Tensor:
        """`residual += silu_and_mul(rms_norm(x) @ weight.T + bias)`, each part optional.

        Args:
            x: [T, K]. weight: [N, K] ([2 N, K], gate first, with `silu`). bias: [N].
            residual: [T, N]; its memory may be used for the result.
            added_to: [T, K], to which x is added before the norm, in place.
        """
        ...

    def feed(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        feeds: Weight,
        *,
        norm: Tensor | None,
        eps: float,
        added_to: Tensor | None,
    ) -> Inputs:
        """`linear` with `silu`, as the product with the weight `feeds` takes it."""
        ...

    def room_for_heads(self, tokens: int, weight: Weight, head_dim: int) -> QuantizedRows | None:
        """Where attention is to leave its result, [T, heads * D], quantized for the product with
        `weight`, each head with a scale; None: it is not."""
        ...

    def wide_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """`x @ weight.T` in float32, [T, N], of a weight in its plain form."""
        ...

    def norm_for_experts(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weights: ExpertWeights,
        count: int,
        added_to: Tensor | None,
    ) -> tuple[Tensor, QuantizedRows | None]:
        """The norm of x, or of `added_to` after x has been added in place; and that quantized, if
        `experts` wants it, of which there are `count` on all ranks."""
        ...

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        weights: ExpertWeights,
        residual: Tensor | None,
        rows: QuantizedRows | None = None,
    ) -> Tensor:
        """`residual +=` what the experts that `logits` choose make of x; see `moe.experts`.

        Args:
            x: [T, K]. logits: [T, experts] float32. residual: [T, K]; its memory may be used.
            rows: x quantized, as of `norm_for_experts`.
        """
        ...

    def defers_residual(self, tokens: int, weight: Weight) -> bool:
        """Whether `linear` without its residual, then the next `linear` with `added_to`, is the
        faster way."""
        ...

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What `head` returns for a model of `dtype`."""
        ...

    def head(
        self, x: Tensor, weight: Weight, norm: Tensor | None, eps: float, out: Tensor | None
    ) -> Tensor:
        """`rms_norm(x) @ weight.T`, [T, N]; in `out`, if given, for a weight in its plain form.

        Args:
            norm: None: x is normed already.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight` over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x`, in place, then its `rms_norm`."""
        ...

    def embed(self, weight: Tensor, token_ids: Tensor, first: int) -> Tensor:
        """Rows of a table that holds ids from `first` on; zeros for ids outside."""
        ...

    def rotation(self, cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """What `rope_store` needs of a step's positions [T]; computed once a step.

        Args:
            cos_sin: [max_position, D] float32, cosines then sines.
        """
        ...

    def rope_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        slots: Tensor,
        pages: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Normalise q and k (Qwen3), rotate them, store k and v at `slots`; q as [T, H, D].

        Args:
            qkv: [T, (H + 2 KV) * D], query heads first, then keys, then values; overwritten, keys
                and values by what is stored, unless pages are float8.
            slots: [T] int64, `page * page_size + offset`.
            pages: [2, num_pages, page_size, KV, D], one layer of the pool; qkv's dtype or float8.
        """
        ...


class TorchOps:
    """Plain torch, for every device.

    Quantized weights are widened to float32 once, and multiplied with inputs that have been rounded
    as the weight asks.
    """

    def prepare(self, weight: Weight) -> Weight:
        if not weight.quantized:
            return weight
        weight = weight.settled()
        return replace(weight, payload=widened(weight), scales=None)

    def prepare_experts(self, weights: ExpertWeights) -> ExpertWeights:
        gate_up, down = map(TorchOps().prepare, (weights.gate_up, weights.down))
        return replace(weights, gate_up=gate_up, down=down)

    def linear(
        self,
        x: Inputs,
        weight: Weight,
        bias: Tensor | None,
        *,
        norm: Tensor | None,
        eps: float,
        silu: bool,
        residual: Tensor | None,
        added_to: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor)
        if added_to is not None:
            x = added_to.add_(x)
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        y = self._product(x, weight, bias)
        if silu:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate).mul_(up)
        return y if residual is None else residual.add_(y)

    def feed(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        feeds: Weight,
        *,
        norm: Tensor | None,
        eps: float,
        added_to: Tensor | None,
    ) -> Inputs:
        return self.linear(
            x, weight, bias, norm=norm, eps=eps, silu=True, residual=None, added_to=added_to
        )

    def _product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if not self._is_wide(weight):
            return self._multiply(x, weight.payload, bias)
        wide = None if bias is None else bias.float()
        return self._multiply(rounded(x, weight), weight.payload, wide).to(x.dtype)

    def _multiply(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, matrix, bias)

    @staticmethod
    def _is_wide(weight: Weight) -> bool:
        """Whether it was quantized: its payload may be wider than what it is multiplied with."""
        return weight.quantized or weight.payload.dtype != weight.dtype

    def room_for_heads(self, tokens: int, weight: Weight, head_dim: int) -> QuantizedRows | None:
        return None

    def wide_linear(self, x: Tensor, weight: Weight) -> Tensor:
        return F.linear(x.float(), weight.payload.float())

    def norm_for_experts(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weights: ExpertWeights,
        count: int,
        added_to: Tensor | None,
    ) -> tuple[Tensor, QuantizedRows | None]:
        if added_to is not None:
            x = added_to.add_(x)
        return self.rms_norm(x, norm, eps), None

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        weights: ExpertWeights,
        residual: Tensor | None,
        rows: QuantizedRows | None = None,
    ) -> Tensor:
        return moe.experts_reference(x, logits, weights, residual)

    def defers_residual(self, tokens: int, weight: Weight) -> bool:
        return False

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def head(
        self, x: Tensor, weight: Weight, norm: Tensor | None, eps: float, out: Tensor | None
    ) -> Tensor:
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        if out is None:
            return self._product(x, weight, None)
        return torch.mm(x, weight.payload.t(), out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        if x.numel() <= _FEW_ELEMENTS:
            # Of x beside -x the mean is 0 and the variance the mean square, which makes of
            # `layer_norm`, one call and in float32, an RMSNorm.
            normed = torch.layer_norm(torch.cat((x, -x), -1), (2 * size,), eps=eps)
            return (normed[..., :size] * weight).to(x.dtype)
        # Fewer and cheaper calls than `F.rms_norm`; the sum is in float32 for every dtype.
        norm: Tensor = torch.linalg.vector_norm(x, 2, -1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().mul_(1 / size).add_(eps).rsqrt_()
        return (x * scale).to(x.dtype).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def embed(self, weight: Tensor, token_ids: Tensor, first: int) -> Tensor:
        local = token_ids - first
        inside = (local >= 0) & (local < weight.shape[0])
        return weight.index_select(0, local * inside).mul_(inside[:, None])

    def rotation(self, cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines [T, 1, 1, D/2] and (-sines, sines) [T, 1, 2, D/2]."""
        cos, sin = cos_sin.index_select(0, positions).to(dtype).chunk(2, dim=-1)
        return cos[:, None, None], torch.stack([-sin, sin], dim=1)[:, None]

    def rope_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        slots: Tensor,
        pages: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        tokens = qkv.shape[0]
        _, _, _, kv_heads, head_dim = pages.shape
        heads = qkv.view(tokens, -1, head_dim)
        num_heads = heads.shape[1] - 2 * kv_heads
        rotated = heads[:, : num_heads + kv_heads]
        if q_norm is not None and k_norm is not None:
            rotated[:, :num_heads] = self.rms_norm(rotated[:, :num_heads], q_norm, eps)
            rotated[:, num_heads:] = self.rms_norm(rotated[:, num_heads:], k_norm, eps)
        cos, signed_sin = rotation
        halves = rotated.view(tokens, -1, 2, head_dim // 2)
        swapped = halves.flip(-2)
        halves.mul_(cos).addcmul_(swapped, signed_sin)
        own = heads[:, num_heads:].view(tokens, 2, kv_heads, head_dim)
        kept = to_page(own, pages.dtype)
        flat = bits(pages).view(2, -1, kv_heads, head_dim)
        flat.index_copy_(1, slots, bits(kept).transpose(0, 1))
        return heads[:, :num_heads]


class CpuOps(TorchOps):
    """oneDNN with weights in its own blocked layout.

    A product with few rows is bound by reading the weights, which this does at twice the bandwidth
    of the plain layout on the machines measured; with many rows it is never slower, and in float32
    on AMD's processors twice as fast.
    """

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether oneDNN multiplies in `dtype` on this processor."""
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        if dtype == torch.bfloat16:
            return bool(_MKLDNN._is_mkldnn_bf16_supported())
        if dtype == torch.float16:
            return bool(_MKLDNN._is_mkldnn_fp16_supported())
        return True

    def prepare(self, weight: Weight) -> Weight:
        weight = super().prepare(weight)
        return replace(weight, payload=_MKLDNN._reorder_linear_weight(weight.payload, None))

    def _multiply(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return _MKLDNN._linear_pointwise(x, matrix, bias, "none", [], "")  # type: ignore[no-any-return]


class KernelOps:
    """`radixgrove.kernels`: Triton on CUDA."""

    def prepare(self, weight: Weight) -> Weight:
        return weight.settled() if weight.quantized else weight

    def prepare_experts(self, weights: ExpertWeights) -> ExpertWeights:
        gate_up, down = map(self.prepare, (weights.gate_up, weights.down))
        return replace(weights, gate_up=gate_up, down=down)

    def linear(
        self,
        x: Inputs,
        weight: Weight,
        bias: Tensor | None,
        *,
        norm: Tensor | None,
        eps: float,
        silu: bool,
        residual: Tensor | None,
        added_to: Tensor | None = None,
    ) -> Tensor:
        before: dict[str, Any] = {"norm": norm, "eps": eps}
        if added_to is not None:
            before["added_to"] = added_to
        if silu and bias is not None:
            y = kernels.silu_and_mul(kernels.linear(x, weight, bias, **before))
            return y if residual is None else residual.add_(y)
        return kernels.linear(x, weight, bias, silu=silu, residual=residual, **before)

    def feed(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        feeds: Weight,
        *,
        norm: Tensor | None,
        eps: float,
        added_to: Tensor | None,
    ) -> Inputs:
        return kernels.feed(x, weight, feeds, bias, norm=norm, eps=eps, added_to=added_to)

    def room_for_heads(self, tokens: int, weight: Weight, head_dim: int) -> QuantizedRows | None:
        return kernels.room_for_heads(tokens, weight, head_dim)

    def wide_linear(self, x: Tensor, weight: Weight) -> Tensor:
        out = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
        return kernels.linear(x, weight, out=out)

    def norm_for_experts(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weights: ExpertWeights,
        count: int,
        added_to: Tensor | None,
    ) -> tuple[Tensor, QuantizedRows | None]:
        return kernels.norm_for_experts(x, norm, eps, weights, count, added_to)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        weights: ExpertWeights,
        residual: Tensor | None,
        rows: QuantizedRows | None = None,
    ) -> Tensor:
        return kernels.experts(x, logits, weights, residual, rows)

    def defers_residual(self, tokens: int, weight: Weight) -> bool:
        return kernels.defers_residual(tokens, weight)

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32: two logits of 16 differ by a whole eighth in bfloat16, which alone would set
        decoding apart from scoring by a KL of 1e-3.
        """
        return torch.float32

    def head(
        self, x: Tensor, weight: Weight, norm: Tensor | None, eps: float, out: Tensor | None
    ) -> Tensor:
        if out is None:
            out = x.new_empty((x.shape[0], weight.shape[0]), dtype=self.logits_dtype(x.dtype))
        return kernels.linear(x, weight, norm=norm, eps=eps, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernels.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernels.add_rms_norm(x, residual, weight, eps)

    def embed(self, weight: Tensor, token_ids: Tensor, first: int) -> Tensor:
        return kernels.embed(weight, token_ids, first)

    def rotation(self, cos_sin: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return cos_sin, positions

    def rope_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        slots: Tensor,
        pages: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        return kernels.rope_store(qkv, *rotation, slots, pages, q_norm, k_norm, eps)
