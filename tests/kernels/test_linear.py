"""Products of decode batches, with every ending, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.kernels.gemv import GemvConfig, gemv
from radixgrove.kernels.linear import linear_reference
from radixgrove.kernels.skinny import SkinnyConfig, SkinnyWorkspace, skinny
from radixgrove.kernels.weight import Weight
from tests.kernels.helpers import DTYPES, assert_close, sizes

PRODUCTS: dict[str, Callable[..., Tensor]] = {"gemv": gemv, "skinny": skinny}
ENDINGS = pytest.mark.parametrize("ending", ["plain", "bias", "silu", "residual"])
# The reference's norm or gate may round where the kernel does not; a product's terms cancel.
SLACK = 2.0


class Case:
    """Random operands of one product."""

    def __init__(self, tokens: int, n: int, k: int, ending: str, norm: bool, like: Tensor) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=like.device).to(like.dtype)

        self.silu = ending == "silu"
        self.x = random(tokens, k)
        self.weight = random(2 * n if self.silu else n, k) / k**0.5
        self.bias = random(n) if ending == "bias" else None
        self.residual = random(tokens, n) if ending == "residual" else None
        self.norm = random(k) if norm else None

    def options(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        def cast(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.clone() if dtype is None else t.to(dtype)

        options: dict[str, Any] = {"silu": self.silu, "residual": cast(self.residual)}
        if self.norm is not None:
            options |= {"norm": cast(self.norm), "eps": 1e-5}
        return options

    def exact(self) -> Tensor:
        wide = torch.float64
        bias = None if self.bias is None else self.bias.to(wide)
        return linear_reference(self.x.to(wide), self.weight.to(wide), bias, **self.options(wide))


@pytest.mark.covering(3)
@DTYPES
@ENDINGS
@pytest.mark.parametrize("norm", [False, True], ids=["raw", "norm"])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (37, 200), (64, 1030)])
def test_gemv(
    n: int, k: int, ending: str, norm: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(1, n, k, ending, norm, torch.zeros((), dtype=dtype, device=device))
    options = case.options()
    config = GemvConfig(rows=4, block_k=256)
    out = gemv(case.x, case.weight, case.bias, **options, config=config)
    assert_close(out, case.exact(), SLACK * {torch.float32: 3e-6}.get(dtype, 1e-2))
    if case.residual is not None:
        assert out is options["residual"], "the residual is updated in place"


@pytest.mark.covering(3)
@DTYPES
@ENDINGS
@sizes([1, 3, 33], [64, 128])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("n", "k"), [(40, 96), (70, 300)])
def test_skinny(
    tokens: int,
    splits: int,
    n: int,
    k: int,
    ending: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    case = Case(tokens, n, k, ending, False, torch.zeros((), dtype=dtype, device=device))
    workspace = SkinnyWorkspace(device, partials=1 << 20)
    config = SkinnyConfig(block_n=32, block_k=32, splits=splits, stages=2)
    for _ in range(2):  # the second run finds the counters as the first left them
        out = skinny(
            case.x,
            case.weight,
            case.bias,
            **case.options(),
            config=config,
            workspace=workspace,
        )
        assert_close(out, case.exact(), SLACK * {torch.float32: 3e-6}.get(dtype, 1e-2))
        assert not workspace.counters.any(), "counters must be zero between launches"


@pytest.mark.parametrize("kernel", ["gemv", "skinny", "any"])
def test_a_float32_output_keeps_the_whole_sum(kernel: str, device: torch.device) -> None:
    tokens = 1 if kernel == "gemv" else 3
    like = torch.zeros((), dtype=torch.bfloat16, device=device)
    case = Case(tokens, 40, 96, "plain", False, like)
    out = torch.empty(tokens, 40, device=device)
    if kernel == "any":
        assert ops.linear(case.x, Weight.plain(case.weight), out=out) is out
    else:
        assert PRODUCTS[kernel](case.x, case.weight, out=out) is out
    assert_close(out, case.exact(), 1e-6)


@pytest.mark.parametrize("kernel", ["gemv", "skinny"])
def test_a_product_is_rounded_before_it_is_added(kernel: str, device: torch.device) -> None:
    like = torch.zeros((), dtype=torch.bfloat16, device=device)
    case = Case(1, 40, 96, "residual", False, like)
    assert case.residual is not None
    separate = case.residual + PRODUCTS[kernel](case.x, case.weight)
    PRODUCTS[kernel](case.x, case.weight, residual=case.residual)
    assert torch.equal(case.residual, separate)


def test_skinny_refuses_what_it_cannot_do(device: torch.device) -> None:
    weight = torch.zeros(64, 64, device=device)
    with pytest.raises(ValueError, match="129 tokens"):
        skinny(torch.zeros(129, 64, device=device), weight)
    with pytest.raises(ValueError, match="workspace"):
        skinny(torch.zeros(2, 64, device=device), weight, config=SkinnyConfig(splits=2))
