"""Int8 kernels: inputs quantized with what comes before them, and products with every ending,
against their references."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixgrove.kernels.gemv import GemvConfig
from radixgrove.kernels.int8 import (
    Int8Config,
    config_for,
    int8_product,
    quantize_int8,
    quantize_int8_reference,
)
from radixgrove.kernels.linear import linear_reference
from radixgrove.kernels.matmul import CUBLAS, Choice
from radixgrove.kernels.norm import rms_norm_reference
from radixgrove.kernels.quantize import widened
from radixgrove.kernels.scaled import feed, library_takes, multiply_quantized
from radixgrove.kernels.skinny import SkinnyConfig
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.quantization import Activations
from tests.kernels.helpers import QuantizedInputs, assert_close

pytest.importorskip("triton")

SMALL = Int8Config(block_m=16, block_n=32, block_k=32, stages=2, warps=4)
SCHEMES = ["static", "token"]


def weight_of(scheme: str, n: int, k: int, device: torch.device) -> Weight:
    return Weight(
        torch.randint(-128, 128, (n, k), device=device, dtype=torch.int8),
        torch.bfloat16,
        scales=torch.rand(n, device=device) / 50 + 1e-3,
        activations=Activations(scheme),
        input_scale=torch.full((1,), 0.06, device=device) if scheme == "static" else None,
        input_dtype=torch.int8,
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("before", ["nothing", "norm", "added norm", "silu"])
@pytest.mark.parametrize(("tokens", "k"), [(1, 64), (3, 200)])
def test_quantize(scheme: str, before: str, tokens: int, k: int, device: torch.device) -> None:
    weight = weight_of(scheme, 8, k, device)
    inputs = QuantizedInputs.random(before, tokens, k, device)
    values, scales = quantize_int8(inputs.x, weight, **inputs.options)
    expected, expected_scales = quantize_int8_reference(inputs.exact, weight)
    # The kernel's norm rounds otherwise, which moves what lies between two by one.
    apart = (values.int() - expected.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.02
    torch.testing.assert_close(scales, expected_scales, rtol=1e-2, atol=0)
    if before == "added norm":
        assert torch.equal(inputs.options["residual"], inputs.total)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["kernel", "reference"])
def test_quantize_saturates_and_keeps_nan_visible(
    scheme: str, kind: str, device: torch.device
) -> None:
    x = torch.ones(4, 64, device=device).bfloat16()
    x[0, 5], x[1, 5], x[3] = float("nan"), 1e9, 0.0
    quantize = quantize_int8 if kind == "kernel" else quantize_int8_reference
    values, scales = quantize(x, weight_of(scheme, 8, 64, device))
    assert scales[0].isnan()
    assert values[1, 5] == 127
    assert scales[1:].isfinite().all()
    assert not values[3].any()
    infinite = torch.full((1, 64), float("inf"), device=device).bfloat16()
    values, scales = quantize(infinite, weight_of(scheme, 8, 64, device))
    assert (values == 127).all() if scheme == "static" else not scales.isfinite().any()


def test_ties_go_to_the_even_number(device: torch.device) -> None:
    weight = replace(weight_of("static", 8, 4, device), input_scale=torch.ones(1, device=device))
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5]], device=device)
    for quantize in (quantize_int8, quantize_int8_reference):
        assert quantize(x, weight)[0].tolist() == [[0, 2, 2, 0]]


@pytest.mark.covering(2)
@pytest.mark.parametrize("ending", ["plain", "bias", "residual", "float32"])
@pytest.mark.parametrize("tokens", [1, 17, 40])
@pytest.mark.parametrize(("n", "k"), [(33, 40), (64, 200)])
def test_product(ending: str, tokens: int, n: int, k: int, device: torch.device) -> None:
    weight = weight_of("token", n, k, device)
    x = torch.randn(tokens, k, device=device).bfloat16()
    values, inputs = quantize_int8(x, weight)
    expected = (values.double() * inputs) @ widened(weight).double().t()
    options: dict[str, Any] = {}
    if ending == "bias":
        options["bias"] = torch.randn(n, device=device).bfloat16()
        expected += options["bias"]
    if ending == "residual":
        options["residual"] = torch.randn(tokens, n, device=device).bfloat16()
        expected += options["residual"]
    if ending == "float32":
        options["out"] = torch.empty(tokens, n, device=device)
    y = int8_product(values, inputs, weight, config=SMALL, **options)
    assert_close(y, expected, 1e-6 if ending == "float32" else None)


def test_sums_are_exact_where_float32_would_round(device: torch.device) -> None:
    k = 4096
    weight = replace(weight_of("static", 2, k, device), scales=torch.ones(2, device=device))
    weight.payload.fill_(127)
    weight.payload[0, 0] = 126
    values = torch.full((1, k), 127, dtype=torch.int8, device=device)
    one, out = torch.ones(1, 1, device=device), torch.empty(1, 2, device=device)
    int8_product(values, one, weight, out=out, config=SMALL)
    total = k * 127 * 127
    assert torch.equal(out.cpu(), torch.tensor([[total - 127, total]]).float())


CHOICES = [
    CUBLAS,
    Choice(gemv=GemvConfig(rows=4, block_k=64)),
    Choice(skinny=SkinnyConfig(block_n=32, block_k=32, stages=2)),
]


@pytest.mark.parametrize("choice", CHOICES, ids=["int8", "gemv", "skinny"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("before", ["norm", "added norm", "quantized"])
@pytest.mark.parametrize("silu", [False, True])
def test_every_choice_multiplies_alike(
    choice: Choice, scheme: str, before: str, silu: bool, device: torch.device
) -> None:
    tokens, n, k = 1 if choice.gemv else 3, 40, 96
    weight = weight_of(scheme, 2 * n if silu else n, k, device)
    # Triton's interpreter makes no bfloat16 of int8.
    scales = torch.full_like(weight.scales, 1e-3)
    weight = replace(weight, dtype=torch.float16, scales=scales)
    x: Any = torch.randn(tokens, k, device=device).half()
    options: dict[str, Any] = {"silu": silu}
    exact = x
    if before == "quantized" and choice is CUBLAS:
        x = quantize_int8(x, weight)
    if before == "added norm":
        options["added_to"] = torch.randn_like(x)
        exact = exact + options["added_to"]
    norm = None
    if before != "quantized":
        norm = torch.rand(k, device=device).half() + 0.5
        exact = rms_norm_reference(exact, norm, 1e-6)
    residual = torch.randn(tokens, n, device=device).half()
    expected = linear_reference(exact.float(), weight, silu=silu, residual=residual.float())
    scratch: Any = SimpleNamespace(cublaslt=None, skinny=None)
    y = multiply_quantized(
        x, weight, choice=choice, scratch=scratch, norm=norm, residual=residual, **options
    )
    assert y is residual
    # Products of few tokens do not round their inputs.
    assert_close(y, expected, 6e-2 if scheme == "static" else 3e-2)


@pytest.mark.parametrize(("tokens", "quantizes"), [(4, False), (129, True)])
def test_many_tokens_are_quantized_with_their_silu(
    tokens: int, quantizes: bool, device: torch.device
) -> None:
    """Few are not: the product after it widens its weight."""
    weight, after = (weight_of("token", n, k, device) for n, k in ((64, 40), (40, 32)))
    x = torch.randn(tokens, 40, device=device).half()
    weight, after = (replace(each, dtype=torch.float16) for each in (weight, after))
    scratch: Any = SimpleNamespace(cublaslt=None, skinny=None)
    made = feed(x, weight, after, choice=CUBLAS, scratch=scratch)
    h = linear_reference(x, weight, silu=True)
    if not quantizes:
        assert isinstance(made, torch.Tensor)
        assert_close(made, h, 3e-2)
        return
    values, scales = quantize_int8_reference(h, after)
    assert_close(made[0].float() * made[1], values.float() * scales, 3e-2)


def test_torchs_float8_is_not_for_int8(device: torch.device) -> None:
    assert not library_takes(weight_of("token", 32, 64, device))


def test_small_steps_have_small_tiles() -> None:
    assert config_for(1).block_m == 16
    assert config_for(8192) == Int8Config()
