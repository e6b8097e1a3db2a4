"""One product of the model by the kernel chosen for it: cuBLAS, a cuBLASLt algorithm, or ours."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.kernels.activation import silu_and_mul
from radixgrove.kernels.cublaslt import CublasLt, CublasLtConfig, CublasLtError
from radixgrove.kernels.gemv import GemvConfig, gemv
from radixgrove.kernels.norm import rms_norm
from radixgrove.kernels.skinny import SkinnyConfig, SkinnyWorkspace, skinny
from radixgrove.kernels.weight import Weight

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of one shape; what torch takes of cuBLAS when none is set, which widens quantized
    weights first.

    `scaled`: torch's product of quantized weights.
    `deferred`: the product is faster without the residual, to which the norm after it adds it.
    """

    gemv: GemvConfig | None = None
    skinny: SkinnyConfig | None = None
    cublaslt: CublasLtConfig | None = None
    deferred: bool = False
    scaled: bool = False


CUBLAS = Choice()
SCALED = Choice(scaled=True)


class Scratch:
    """What the kernels of one device need beside operands; used by one thread and stream at a time.

    Made outside graph capture, before the first product that needs it.
    """

    def __init__(self, device: torch.device) -> None:
        self.skinny = SkinnyWorkspace(device)
        self.cublaslt = CublasLt.open(device)


def multiply(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    choice: Choice,
    scratch: Scratch,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """On CUDA, as `ops.linear`, by the kernel of `choice`."""
    if choice.gemv is not None:
        return gemv(
            x,
            weight.payload,
            bias,
            norm=norm,
            eps=eps,
            silu=silu,
            residual=residual,
            config=choice.gemv,
            out=out,
        )
    if norm is not None:
        x = rms_norm(x, norm, eps)
    if choice.skinny is not None:
        return skinny(
            x,
            weight.payload,
            bias,
            silu=silu,
            residual=residual,
            config=choice.skinny,
            workspace=scratch.skinny,
            out=out,
        )
    if not silu:
        return _plain(x, weight.payload, bias, choice, scratch, residual, out)
    y = silu_and_mul(_plain(x, weight.payload, bias, choice, scratch, None, None))
    return y if residual is None else residual.add_(y)


def _plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    choice: Choice,
    scratch: Scratch,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if bias is not None:
        y = torch.nn.functional.linear(x, weight, bias)
        if residual is not None:
            return residual.add_(y)
        return y if out is None else out.copy_(y)
    if choice.cublaslt is not None and scratch.cublaslt is not None:
        try:
            return scratch.cublaslt.matmul(x, weight, choice.cublaslt, residual=residual, out=out)
        except CublasLtError as error:  # this token count is not what the algorithm was chosen at
            log.debug("%dx%d for %d tokens: %s", *weight.shape, x.shape[0], error)
    if residual is not None:
        return torch.addmm(residual, x, weight.t(), out=residual)
    if out is not None and out.dtype != x.dtype:
        return torch.mm(x, weight.t(), out.dtype, out=out)
    return torch.mm(x, weight.t(), out=out)
