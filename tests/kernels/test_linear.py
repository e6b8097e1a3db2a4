"""Products of decode batches, with every ending, against float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixgrove.kernels import linear, ops
from radixgrove.kernels.linear import GemvConfig, SkinnyConfig, SkinnyWorkspace

from .helpers import DTYPES, assert_close, sizes

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
        return linear.linear_reference(
            self.x.to(wide), self.weight.to(wide), bias, **self.options(wide)
        )


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
    out = linear.gemv(case.x, case.weight, case.bias, **options, config=config)
    assert_close(out, case.exact(), SLACK * {torch.float32: 3e-6}.get(dtype, 1e-2))
    if case.residual is not None:
        assert out is options["residual"], "the residual is updated in place"


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
        out = linear.skinny(
            case.x,
            case.weight,
            case.bias,
            **case.options(),
            config=config,
            workspace=workspace,
        )
        assert_close(out, case.exact(), SLACK * {torch.float32: 3e-6}.get(dtype, 1e-2))
        assert not workspace.counters.any(), "counters must be zero between launches"


@DTYPES
@ENDINGS
@sizes([2, 33], [16, 64, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_skinny_takes_the_norm_before(
    tokens: int, splits: int, ending: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Of rows of different lengths: each token has a scale of its own."""
    case = Case(tokens, 70, 300, ending, True, torch.zeros((), dtype=dtype, device=device))
    case.x *= torch.linspace(0.01, 30, tokens, device=device)[:, None].to(dtype)
    workspace = SkinnyWorkspace(device, partials=1 << 20)
    config = SkinnyConfig(block_n=32, block_k=32, splits=splits, stages=2)
    for ahead in (False, True):
        options = case.options() | {"config": config, "workspace": workspace, "ahead": ahead}
        out = linear.skinny(case.x, case.weight, case.bias, **options)
        assert_close(out, case.exact(), SLACK * {torch.float32: 3e-6}.get(dtype, 1e-2))
        assert case.residual is None or out is options["residual"]
        assert not workspace.counters.any(), "counters must be zero between launches"


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the interpreter")
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("n", "k", "splits", "warps"), [(40, 96, 1, 1), (70, 328, 3, 4)])
def test_all_weights_are_asked_for_once(
    n: int, k: int, splits: int, warps: int, silu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole pieces of 16 bytes; rows past the end stand for the first, as they are loaded."""
    asked: Counter[int] = Counter()

    def note(places: Any, sizes: Any) -> None:
        pairs = np.broadcast_arrays(places.handle.data, sizes.handle.data)
        for place, size in zip(*(part.flat for part in pairs), strict=True):
            assert place % 16 == size % 16 == 0
            asked.update(range(place, place + size, 16))

    monkeypatch.setattr(linear, "prefetch", note)
    monkeypatch.setattr(linear, "pdl", lambda x: {"PDL": True})
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(linear, name, lambda: None)
    case = Case(3, n, k, "silu" if silu else "plain", False, torch.zeros(()).bfloat16())
    config = SkinnyConfig(block_n=32, block_k=32, splits=splits, stages=2, warps=warps)
    workspace = SkinnyWorkspace(torch.device("cpu"), partials=1 << 20)
    out = linear.skinny(
        case.x, case.weight, silu=silu, config=config, workspace=workspace, ahead=True
    )
    assert_close(out, case.exact(), 2e-2)
    first, row = case.weight.data_ptr(), 2 * k
    padding = -n % 32
    expected = Counter(range(first, first + case.weight.nbytes, 16))
    for half in range(2 if silu else 1):
        begin = first + half * n * row
        for place in range(begin, begin + row, 16):
            expected[place] += padding
    assert asked == expected


@pytest.mark.parametrize("splits", [1, 4])
def test_skinny_rounds_before_the_scale_and_only_there(splits: int, device: torch.device) -> None:
    case = Case(5, 40, 320, "plain", True, torch.zeros((), dtype=torch.bfloat16, device=device))
    assert case.norm is not None
    wide = case.x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    rounded = (case.x.float() * case.norm.float()).bfloat16()
    expected = rounded.double() @ case.weight.double().t() * scale
    out = torch.empty(5, 40, device=device)
    config = SkinnyConfig(block_n=16, block_k=64, splits=splits, stages=2)
    workspace = SkinnyWorkspace(device, partials=1 << 18)
    options: dict[str, Any] = {"norm": case.norm, "eps": 1e-5, "out": out, "config": config}
    linear.skinny(case.x, case.weight, **options, workspace=workspace)
    assert_close(out, expected, 2e-6)


def test_a_workspace_has_room_for_the_norms_squares(device: torch.device) -> None:
    config = SkinnyConfig(block_n=32, splits=2)
    exact = SkinnyWorkspace(device, partials=2 * 2 * (32 + 1) * 16)
    assert exact.fits(config, 3, 64, silu=False)
    assert not SkinnyWorkspace(device, partials=2 * 2 * (32 + 1) * 16 - 1).fits(
        config, 3, 64, silu=False
    )


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_float32_stream_is_read_and_added_to_as_it_is(
    tokens: int, splits: int, device: torch.device
) -> None:
    """A product of it is the weights' dtype, and what is added to is rounded to float32 only."""
    like = torch.zeros((), dtype=torch.bfloat16, device=device)
    case = Case(tokens, 40, 96, "plain", True, like)
    assert case.norm is not None
    config = SkinnyConfig(block_n=16, block_k=32, splits=splits, stages=2)
    workspace = SkinnyWorkspace(device, partials=1 << 18)
    if tokens == 1:
        kernel = linear.gemv
        options: dict[str, Any] = {}
    else:
        kernel = linear.skinny
        options = {"config": config, "workspace": workspace}

    stream = case.x.float() * 1.0017  # what bfloat16 does not hold
    case.x = stream
    y = kernel(stream, case.weight, norm=case.norm, eps=1e-5, **options)
    assert y.dtype == torch.bfloat16
    assert_close(y, case.exact())

    x = torch.randn(tokens, 96, device=device).bfloat16()
    residual = 1000 + torch.randn(tokens, 40, device=device)
    expected = residual.double() + x.double() @ case.weight.double().t()
    assert kernel(x, case.weight, residual=residual, **options) is residual
    assert_close(residual, expected, 1e-6)


@pytest.mark.parametrize("kernel", ["gemv", "skinny", "any"])
def test_a_float32_output_keeps_the_whole_sum(kernel: str, device: torch.device) -> None:
    tokens = 1 if kernel == "gemv" else 3
    like = torch.zeros((), dtype=torch.bfloat16, device=device)
    case = Case(tokens, 40, 96, "plain", False, like)
    out = torch.empty(tokens, 40, device=device)
    if kernel == "any":
        assert ops.linear(case.x, case.weight, out=out) is out
    else:
        assert getattr(linear, kernel)(case.x, case.weight, out=out) is out
    assert_close(out, case.exact(), 1e-6)


def test_skinny_refuses_what_it_cannot_do(device: torch.device) -> None:
    weight = torch.zeros(64, 64, device=device)
    with pytest.raises(ValueError, match="129 tokens"):
        linear.skinny(torch.zeros(129, 64, device=device), weight)
    with pytest.raises(ValueError, match="workspace"):
        linear.skinny(torch.zeros(2, 64, device=device), weight, config=SkinnyConfig(splits=2))
