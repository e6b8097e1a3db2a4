# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""SwiGLU's gate: SiLU of one half of a fused projection times the other half, or what gpt-oss has
in its place."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, gdc_launch_dependents, gdc_wait, jit, pdl, tl
from radixgrove.protocol.model.config import ClampedSwiGlu


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """See `silu_and_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).to(gate_up.dtype)


def clamped_swiglu_reference(gate_up: Tensor, clamped: ClampedSwiGlu) -> Tensor:
    """See `ClampedSwiGlu`; arguments and result as of `silu_and_mul`."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return ((up + 1) * gate * torch.sigmoid(gate * clamped.alpha)).to(gate_up.dtype)


@jit
def _silu_and_mul_kernel(
    gate_up_ptr, out_ptr, inner, gate_up_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    base = gate_up_ptr + row * gate_up_stride
    gate = tl.load(base + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(base + inner + columns, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * inner + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused gate/up projection, computed in float32.

    Args:
        gate_up: [T, 2 * inner], gate first; rows may be strided, a row contiguous.

    Returns:
        [T, inner] contiguous, gate_up's dtype.
    """
    tokens, width = gate_up.shape
    inner = width // 2
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = 2048
        _silu_and_mul_kernel[(tokens, cdiv(inner, block))](
            gate_up, out, inner, gate_up.stride(0), BLOCK=block, num_warps=8, **pdl(gate_up)
        )
    return out
