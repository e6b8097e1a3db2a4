"""Float8 kernels: inputs quantized with what comes before them, and products of float8 weights with
every ending, against their references."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from radixgrove.kernels.autotune import LinearTuner
from radixgrove.kernels.cublaslt import CublasLt
from radixgrove.kernels.float8 import FLOAT8, bits, to_page
from radixgrove.kernels.gemv import GemvConfig, gemv
from radixgrove.kernels.linear import ProductScales, linear_reference
from radixgrove.kernels.linear_candidates import Projection, candidates
from radixgrove.kernels.matmul import CUBLAS, SCALED, Choice
from radixgrove.kernels.norm import rms_norm_reference
from radixgrove.kernels.quantize import quantize, quantize_reference
from radixgrove.kernels.scaled import _padded, feed, library_takes, multiply_quantized
from radixgrove.kernels.skinny import SkinnyConfig, SkinnyWorkspace, skinny
from radixgrove.kernels.weight import QuantizedRows, Weight
from radixgrove.protocol.model.quantization import Activations
from tests.kernels.helpers import QuantizedInputs, assert_close

pytest.importorskip("triton")

SCHEMES = ["static", "token", "bounded token", "group", "kept", "kept, blocks"]


def weight_of(scheme: str, n: int, k: int, device: torch.device) -> Weight:
    """Random, with scales that differ from row to row and block to block."""
    blocks = scheme in ("group", "kept, blocks")
    block = (32, 32) if blocks else None
    shape = (-(-n // 32), -(-k // 32)) if blocks else (n,)
    kinds = {"static": Activations.STATIC, "group": Activations.GROUP}
    kept = Activations.KEPT if scheme.startswith("kept") else Activations.TOKEN
    return Weight(
        to_page(torch.randn(n, k, device=device) * 50, FLOAT8),
        torch.bfloat16,
        scales=torch.rand(shape, device=device) / 50 + 1e-3,
        block=block,
        activations=kinds.get(scheme, kept),
        activation_bound=1.5 if scheme.startswith("bounded") else None,
        input_scale=torch.full((1,), 0.01, device=device) if scheme == "static" else None,
    )


def same_float8(found: Tensor, expected: Tensor) -> None:
    """But for a few that lie between two: the kernel's norm rounds otherwise."""
    differ = bits(found) != bits(expected)
    assert differ.float().mean() < 0.02
    assert_close(found.float(), expected.float(), 2e-2)


@pytest.mark.parametrize("scheme", SCHEMES[:4])
@pytest.mark.parametrize("before", ["nothing", "norm", "added norm", "silu"])
@pytest.mark.parametrize(("tokens", "k"), [(1, 64), (3, 200), (2, 5000)])
def test_quantize(scheme: str, before: str, tokens: int, k: int, device: torch.device) -> None:
    weight = weight_of(scheme, 8, k, device)
    inputs = QuantizedInputs.random(before, tokens, k, device)
    values, scales = quantize(inputs.x, weight, **inputs.options)
    expected, expected_scales = quantize_reference(inputs.exact, weight)
    same_float8(values, expected)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-2, atol=0)
    if before == "added norm":
        assert torch.equal(inputs.options["residual"], inputs.total)


def test_quantize_keeps_nan_and_saturates(device: torch.device) -> None:
    x = torch.ones(3, 64, device=device).bfloat16()
    x[0, 5], x[1, 5] = float("nan"), 1e9
    values, _ = quantize(x, weight_of("static", 8, 64, device))
    assert values[0, 5].float().isnan()
    assert values[1, 5].float() == 448
    assert values[2].float().isfinite().all()
    zeros, scales = quantize(torch.zeros_like(x), weight_of("token", 8, 64, device))
    assert not zeros.float().any()
    assert (scales > 0).all()


class Case:
    """Operands of one product, and what it comes to in float64."""

    def __init__(self, scheme: str, tokens: int, n: int, k: int, ending: str, on: torch.device):
        self.silu = ending == "silu"
        self.weight = weight_of(scheme, 2 * n if self.silu else n, k, on)
        x = torch.randn(tokens, k, device=on).bfloat16()
        self.x, inputs = x, None
        if self.weight.activations != Activations.KEPT:
            self.x, inputs = quantize_reference(x, self.weight)
        assert self.weight.scales is not None
        self.scales = ProductScales(self.weight.scales, self.weight.block, inputs)
        self.bias = torch.randn(n, device=on).bfloat16() if ending == "bias" else None
        self.residual = (
            torch.randn(tokens, n, device=on).bfloat16() if ending == "residual" else None
        )
        self.exact = linear_reference(
            x.float(),
            self.weight,
            None if self.bias is None else self.bias.float(),
            silu=self.silu,
            residual=None if self.residual is None else self.residual.float(),
        )

    def options(self) -> dict[str, Any]:
        residual = None if self.residual is None else self.residual.clone()
        return {
            "bias": self.bias,
            "silu": self.silu,
            "residual": residual,
            "scales": self.scales,
            "dtype": torch.bfloat16,
        }


ENDINGS = pytest.mark.parametrize("ending", ["plain", "bias", "silu", "residual"])


@pytest.mark.covering(2)
@pytest.mark.parametrize("scheme", SCHEMES)
@ENDINGS
@pytest.mark.parametrize(("n", "k"), [(1, 8), (37, 200), (64, 600)])
@pytest.mark.parametrize("rows", [4, 64], ids=["within a block", "over blocks"])
def test_gemv(scheme: str, ending: str, n: int, k: int, rows: int, device: torch.device) -> None:
    case = Case(scheme, 1, n, k, ending, device)
    config = GemvConfig(rows=rows, block_k=128)
    out = gemv(case.x, case.weight.payload, config=config, **case.options())
    assert out.dtype == torch.bfloat16
    assert_close(out, case.exact, 2e-2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("scheme", SCHEMES)
@ENDINGS
@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("step", [16, 32, 64], ids=["in a block", "a block", "two blocks"])
@pytest.mark.parametrize(("n", "k"), [(40, 96), (70, 300)])
def test_skinny(
    scheme: str,
    ending: str,
    tokens: int,
    splits: int,
    step: int,
    n: int,
    k: int,
    device: torch.device,
) -> None:
    if step < 32 and device.type == "cuda" and not scheme.startswith("kept"):
        pytest.skip("tensor cores multiply float8 in steps of 32 columns or more")
    case = Case(scheme, tokens, n, k, ending, device)
    out = skinny(
        case.x,
        case.weight.payload,
        config=SkinnyConfig(block_n=32, block_k=step, splits=splits, stages=2),
        workspace=SkinnyWorkspace(device, partials=1 << 20),
        **case.options(),
    )
    assert_close(out, case.exact, 2e-2)


CHOICES = [
    CUBLAS,
    Choice(gemv=GemvConfig(rows=4, block_k=64)),
    Choice(skinny=SkinnyConfig(block_n=32, block_k=32, stages=2)),
]


@pytest.mark.parametrize("choice", CHOICES, ids=["widened", "gemv", "skinny"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("before", ["norm", "added norm", "quantized"])
def test_every_choice_multiplies_alike(
    choice: Choice, scheme: str, before: str, device: torch.device
) -> None:
    """With all that comes before the product and after it."""
    tokens, n, k = 1 if choice.gemv else 3, 40, 96
    weight = weight_of(scheme, n, k, device)
    x: Any = torch.randn(tokens, k, device=device).bfloat16()
    options: dict[str, Any] = {}
    exact = x
    if before == "quantized" and weight.activations != Activations.KEPT:
        x = quantize(x, weight)
    if before == "added norm":
        options["added_to"] = torch.randn_like(x)
        exact = exact + options["added_to"]
    norm = None
    if before != "quantized":
        norm = torch.rand(k, device=device).bfloat16() + 0.5
        exact = rms_norm_reference(exact, norm, 1e-6)
    residual = torch.randn(tokens, n, device=device).bfloat16()
    expected = linear_reference(exact.float(), weight, residual=residual.float())
    scratch: Any = SimpleNamespace(cublaslt=None, skinny=None)
    y = multiply_quantized(
        x, weight, choice=choice, scratch=scratch, norm=norm, residual=residual, **options
    )
    assert y is residual
    assert_close(y, expected, 3e-2)


FEEDING = [*CHOICES, Choice(skinny=SkinnyConfig(block_n=32, block_k=32, splits=2, stages=2))]


@pytest.mark.parametrize("choice", FEEDING, ids=["widened", "gemv", "skinny", "split"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("added", [False, True], ids=["norm", "added norm"])
def test_a_product_feeds_the_next_one(
    choice: Choice, scheme: str, added: bool, device: torch.device
) -> None:
    """What it leaves is multiplied as SiLU-and-multiply in a kernel of its own would be."""
    tokens, k, inner = 1 if choice.gemv else 5, 96, 64
    weight, after = weight_of(scheme, 2 * inner, k, device), weight_of(scheme, 40, inner, device)
    x = torch.randn(tokens, k, device=device).bfloat16()
    norm = torch.rand(k, device=device).bfloat16() + 0.5
    rest = torch.randn_like(x) if added else None
    exact = rms_norm_reference(x if rest is None else x + rest, norm, 1e-6)
    h = linear_reference(exact, weight, silu=True)
    scratch: Any = SimpleNamespace(cublaslt=None, skinny=SkinnyWorkspace(device, partials=1 << 18))
    where: dict[str, Any] = {"choice": choice, "scratch": scratch}
    made = feed(x, weight, after, norm=norm, added_to=rest, **where)
    assert made.shape == (tokens, inner)
    if after.activations == Activations.KEPT:
        assert isinstance(made, Tensor)
        assert_close(made, h, 3e-2)
    else:
        assert isinstance(made, QuantizedRows)
        expected_values, expected_scales = quantize_reference(h, after)
        assert made.scales.shape == expected_scales.shape
        torch.testing.assert_close(made.scales, expected_scales, rtol=2e-2, atol=0)
        assert_close(made.values.float(), expected_values.float(), 3e-2)
    y = multiply_quantized(made, after, choice=CUBLAS, scratch=scratch)
    assert_close(y, linear_reference(h.float(), after), 4e-2)


def test_which_weights_torch_multiplies(device: torch.device) -> None:
    for scheme, n, k, takes in (
        ("token", 32, 64, True),
        ("token", 33, 64, False),
        ("token", 32, 72, False),
        ("static", 32, 64, True),
        ("kept", 32, 64, False),
        ("group", 32, 64, False),  # whose blocks are of 32
    ):
        assert library_takes(weight_of(scheme, n, k, device)) == takes, (scheme, n, k)
    blocks = replace(weight_of("group", 256, 256, device), block=(128, 128))
    assert library_takes(blocks)
    half = replace(weight_of("token", 32, 64, device), dtype=torch.float16)
    assert not library_takes(half)
    assert library_takes(replace(half, uniform=True))


@pytest.mark.parametrize(("tokens", "rows"), [(1, 4), (4, 4), (5, 8)])
def test_rows_are_filled_up_for_the_library(tokens: int, rows: int, device: torch.device) -> None:
    values, scales = quantize_reference(
        torch.randn(tokens, 64, device=device), weight_of("group", 8, 64, device)
    )
    padded, padded_scales = _padded(values, scales)
    assert (padded.shape, padded_scales.shape) == ((rows, 64), (rows, 2))
    assert torch.equal(bits(padded[:tokens]), bits(values))
    assert torch.equal(padded_scales[:tokens], scales)
    assert not padded[tokens:].float().any()


# Rows of a tile, its columns, and how many are on their way.
TILES = [(64, 256, 3), (64, 256, 4), (64, 128, 6), (128, 128, 3), (128, 128, 4)]


class TestTuner:
    def test_formats_have_choices_of_their_own(self, device: torch.device) -> None:
        tuner = LinearTuner()
        formats = [weight_of(scheme, 32, 64, device) for scheme in ("static", "token", "group")]
        formats.append(Weight.plain(torch.zeros(32, 64, dtype=torch.bfloat16, device=device)))
        assert len({weight.format for weight in formats}) == 4
        chosen = Choice(skinny=SkinnyConfig())
        tuner._choices[torch.bfloat16, (formats[1].format, 16, 32, 64, False)] = chosen
        found = [tuner.choose(9, weight, silu=False) for weight in formats]
        assert found == [SCALED, chosen, CUBLAS, CUBLAS]

    def test_candidates(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        chip = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
        scratch: Any = SimpleNamespace(cublaslt=None, skinny=SkinnyWorkspace(device))

        def found(scheme: str, bucket: int, block: int = 0, **options: Any) -> list[Choice]:
            weight = weight_of(scheme, 256, 256, device)
            weight = replace(weight, block=(block, block)) if block else weight
            return candidates(bucket, Projection([weight], **options), scratch)

        steps = [choice.gemv.block_k for choice in found("token", 1)[2:] if choice.gemv]
        assert steps, "and none far past the end of a row"
        assert max(steps) <= 2048
        assert found("kept", 512) == [CUBLAS]
        own = [choice.skinny for choice in found("token", 32)[2:]]
        steps = [(c.block_n, c.block_k, c.stages, c.splits) for c in own if c]
        assert steps == [(*tile, ways) for tile in TILES for ways in (4, 1)]
        own = [choice.skinny for choice in found("token", 128)[2:]]
        assert {c.block_n for c in own if c} == {64}, "sums of high tiles have no room"
        own = [choice.skinny for choice in found("group", 32, 128)[2:]]
        assert {c.block_k for c in own if c} == {128, 256}
        own = [choice.skinny for choice in found("group", 32, 64)[2:]]
        assert {c.block_k for c in own if c} == {128}, "a step along K is two blocks at most"
        assert found("group", 32, 16) == [CUBLAS], "no step along K is within such a block"
        deferred = [choice for choice in found("token", 512, residual=True) if choice.deferred]
        assert [choice.scaled for choice in deferred] == [False, True]
        after = replace(weight_of("group", 256, 128, device), block=(128, 128))
        own = [choice.skinny for choice in found("group", 64, 128, silu=True, feeds=after)]
        tiles = {(c.block_n, c.block_k, c.stages) for c in own if c}
        assert tiles == {(64, 256, 3), (64, 256, 4), (64, 128, 6), (128, 128, 3), (128, 128, 4)}


@pytest.mark.gpu
class TestOnDevice:
    """torch's own products, which nothing but a GPU has."""

    @pytest.mark.parametrize("scheme", ["static", "token"])
    @pytest.mark.parametrize("ending", ["plain", "silu", "residual", "wide out"])
    def test_algorithms(self, scheme: str, ending: str, device: torch.device) -> None:
        n, k, tokens, silu = 256, 512, 64, ending == "silu"
        weight = weight_of(scheme, n, k, device)
        assert weight.scales is not None
        library = CublasLt(device)
        scratch: Any = SimpleNamespace(cublaslt=library, skinny=None)
        x = torch.randn(tokens, k, device=device).bfloat16()
        residual = (
            torch.randn(tokens, n, device=device).bfloat16() if ending == "residual" else None
        )
        exact = linear_reference(
            x.float(), weight, silu=silu, residual=None if residual is None else residual.float()
        )
        dtype = torch.float32 if ending == "wide out" else torch.bfloat16
        configs = library.candidates(tokens, weight.payload, dtype)
        assert configs
        for config in configs:
            y = multiply_quantized(
                x,
                weight,
                choice=Choice(cublaslt=config),
                scratch=scratch,
                silu=silu,
                residual=None if residual is None else residual.clone(),
                out=torch.empty(tokens, n, device=device) if ending == "wide out" else None,
            )
            assert y.dtype == dtype
            assert_close(y, exact, 2e-2)

    @pytest.mark.parametrize("scheme", ["static", "uniform", "token", "group"])
    @pytest.mark.parametrize("tokens", [1, 5, 64, 300])
    def test_library(self, scheme: str, tokens: int, device: torch.device) -> None:
        name = "token" if scheme == "uniform" else scheme
        weight = weight_of(name, 256, 512, device)
        assert weight.scales is not None
        if scheme in ("uniform", "static"):
            weight = replace(weight, scales=weight.scales[:1].expand(256).clone(), uniform=True)
        if scheme == "group":
            scales = torch.rand(2, 4, device=device) / 50 + 1e-3
            weight = replace(weight, block=(128, 128), scales=scales)
        x = torch.randn(tokens, 512, device=device).bfloat16()
        scratch: Any = SimpleNamespace(cublaslt=None, skinny=None)
        y = multiply_quantized(x, weight, choice=SCALED, scratch=scratch)
        assert_close(y, linear_reference(x.float(), weight), 2e-2)


def test_steps_that_cross_blocks_are_refused(device: torch.device) -> None:
    case = Case("group", 2, 32, 128, "plain", device)
    with pytest.raises(ValueError, match="steps of 128 are neither within blocks of 32 nor two"):
        skinny(case.x, case.weight.payload, scales=case.scales, config=SkinnyConfig(block_k=128))
