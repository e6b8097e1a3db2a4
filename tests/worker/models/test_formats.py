"""Formats of quantized weights: what is read stands for what was written, on every rank; products
round inputs as the format asks; and what cannot be read is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.quantization import parse_quantization
from radixgrove.worker.models.formats.base import Format
from radixgrove.worker.models.formats.choose import choose_formats
from radixgrove.worker.models.ops import CpuOps, KernelOps, Ops, TorchOps
from radixgrove.worker.models.parts import Piece
from radixgrove.worker.models.weights import fill_random, load_safetensors
from tests.worker.models import quantized

CPU = torch.device("cpu")
BLOCK = 128
KINDS = quantized.kinds(BLOCK)
EVERY = pytest.mark.parametrize("name", list(KINDS))


def format_of(kind: quantized.Kind) -> Format:
    return choose_formats(parse_quantization(kind.config)).of("a")


def piece(prefix: str, shape: tuple[int, int], rows: slice, columns: slice) -> Piece:
    return Piece(prefix, shape, rows, columns)


def whole(prefix: str, shape: tuple[int, int]) -> Piece:
    return Piece(prefix, shape, slice(0, shape[0]), slice(0, shape[1]))


def read(
    directory: Path, layout: Format, pieces: list[Piece], tensors: dict[str, Tensor]
) -> Weight:
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, directory / "model.safetensors"
    )
    weight = layout.allocate(pieces, torch.float32, CPU)
    load_safetensors(layout.parts(weight, pieces), directory, lambda done: None)
    return weight


def multiply(ops: Ops, x: Tensor, weight: Weight) -> Tensor:
    prepared = ops.prepare(weight)
    return ops.linear(x, prepared, None, norm=None, eps=0.0, silu=False, residual=None)


@EVERY
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("shape", [(1, 8), (37, 131), (200, 300)])
def test_products_are_those_of_the_format(
    name: str, shape: tuple[int, int], tokens: int, tmp_path: Path
) -> None:
    kind = KINDS[name]
    tensors = kind.write("a", torch.randn(shape))
    weight = read(tmp_path, format_of(kind), [whole("a", shape)], tensors)
    x = torch.randn(tokens, shape[1]) * 3
    expected = kind.inputs(x) @ kind.stands_for("a", tensors).t()
    for ops in (TorchOps(), CpuOps(), KernelOps()):
        torch.testing.assert_close(multiply(ops, x, weight), expected, rtol=1e-4, atol=1e-4)
    rough = multiply(TorchOps(), x.bfloat16(), replace(weight, dtype=torch.bfloat16))
    assert rough.dtype == torch.bfloat16
    rounded = kind.inputs(x.bfloat16()) @ kind.stands_for("a", tensors).t()
    torch.testing.assert_close(rough.float(), rounded, rtol=1e-2, atol=1e-2)


@EVERY
@pytest.mark.parametrize("heights", [(256, 128, 128), (192, 64, 64), (130, 1, 37)])
def test_fused_projections_keep_their_own_scales(
    name: str, heights: tuple[int, ...], tmp_path: Path
) -> None:
    """Of blocks too, where one projection ends within a block and the next begins there."""
    kind = KINDS[name]
    tensors: dict[str, Tensor] = {}
    for index, height in enumerate(heights):
        tensors |= kind.write(f"p{index}", torch.randn(height, 256) * 10.0**index)
    pieces = [whole(f"p{index}", (height, 256)) for index, height in enumerate(heights)]
    weight = read(tmp_path, format_of(kind), pieces, tensors)
    expected = torch.cat([kind.stands_for(f"p{i}", tensors) for i in range(len(heights))])
    assert torch.equal(TorchOps().prepare(weight).payload, expected)


@EVERY
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_two_ranks_hold_the_halves(name: str, along: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    shape = 512, 256
    tensors = kind.write("a", torch.randn(shape))
    halves = []
    for rank in range(2):
        rows, columns = slice(0, shape[0]), slice(0, shape[1])
        if along == "rows":
            rows = slice(rank * 256, (rank + 1) * 256)
        else:
            columns = slice(rank * 128, (rank + 1) * 128)
        part = Piece("a", shape, rows, columns)
        weight = read(tmp_path, format_of(kind), [part], tensors)
        halves.append(TorchOps().prepare(weight).payload)
    found = torch.cat(halves, 0 if along == "rows" else 1)
    assert torch.equal(found, kind.stands_for("a", tensors))


@EVERY
def test_dummy_weights_stand_for_the_usual_numbers(name: str) -> None:
    layout = format_of(KINDS[name])
    pieces = [whole("a", (256, 256)), whole("b", (100, 256))]
    weight = layout.allocate(pieces, torch.float32, CPU)
    fill_random(layout.parts(weight, pieces), seed=0)
    wide = TorchOps().prepare(weight).payload
    assert wide.std().item() == pytest.approx(0.02, rel=0.05)
    assert wide.abs().max().item() > 0.06
    y = multiply(TorchOps(), torch.randn(3, 256), weight)
    assert y.isfinite().all()
    assert y.std().item() == pytest.approx(0.02 * 16, rel=0.3)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.integers])
def test_a_stack_of_experts_is_read_one_by_one(name: str, tmp_path: Path) -> None:
    kind, shape = KINDS[name], (128, 256)
    tensors: dict[str, Tensor] = {}
    for index in range(3):
        tensors |= kind.write(f"{index}", torch.randn(shape) * (index + 1))
    save_file({key: x.contiguous() for key, x in tensors.items()}, tmp_path / "model.safetensors")
    layout = format_of(kind)
    stack = layout.allocate([whole("0", shape)], torch.float32, CPU, (3,))
    for index in range(3):
        parts = layout.parts(stack[index], [whole(f"{index}", shape)])
        load_safetensors(parts, tmp_path, lambda done: None)
    for index in range(3):
        expected = kind.stands_for(f"{index}", tensors)
        assert torch.equal(TorchOps().prepare(stack[index]).payload, expected)


def test_the_largest_of_several_input_scales_is_taken(tmp_path: Path) -> None:
    kind = KINDS["fp8, tensor, static"]
    tensors = kind.write("a", torch.randn(4, 8)) | kind.write("b", torch.randn(4, 8))
    tensors["b.input_scale"] = torch.tensor(0.5)
    pieces = [whole("a", (4, 8)), whole("b", (4, 8))]
    weight = read(tmp_path, format_of(kind), pieces, tensors).settled()
    assert weight.input_scale is not None
    assert weight.input_scale.tolist() == [0.5]


@pytest.mark.parametrize("value", [1e9, float("nan")])
def test_inputs_saturate_and_nan_stays(value: float, tmp_path: Path) -> None:
    kind = KINDS["fp8, tensor, static"]
    tensors = kind.write("a", torch.eye(8))
    weight = read(tmp_path, format_of(kind), [whole("a", (8, 8))], tensors)
    x = torch.ones(2, 8)
    x[0, 3] = value
    y = multiply(TorchOps(), x, weight)
    if value == 1e9:
        assert y[0, 3].item() == pytest.approx(448 * 0.02, rel=1e-6)
    else:
        assert y[0].isnan().all()
    assert y[1].isfinite().all(), "another row's values change nothing"
    dynamic = KINDS["fp8, tensor, dynamic"]
    weight = read(
        tmp_path, format_of(dynamic), [whole("a", (8, 8))], dynamic.write("a", torch.eye(8))
    )
    y = multiply(TorchOps(), x, weight)
    assert y[0].isfinite().all() == (value == 1e9)
    assert y[1].isfinite().all()


class TestRefused:
    def refused(self, kind: quantized.Kind, directory: Path, **changes: Tensor | None) -> str:
        tensors = kind.write("a", torch.randn(256, 256))
        for name, tensor in changes.items():
            if tensor is None:
                del tensors[f"a.{name}"]
            else:
                tensors[f"a.{name}"] = tensor
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            read(directory, format_of(kind), [whole("a", (256, 256))], tensors)
        return str(raised.value)

    @EVERY
    def test_a_missing_scale(self, name: str, tmp_path: Path) -> None:
        kind = KINDS[name]
        said = self.refused(kind, tmp_path, **{kind.names[0]: None})
        missing, _, expects = said.partition(", which its format ")
        assert missing.startswith("checkpoint lacks a.weight_scale")
        assert f"a.{kind.names[0]}" in missing
        assert expects.startswith(parse_quantization(kind.config).method)

    @EVERY
    def test_a_scale_of_another_shape(self, name: str, tmp_path: Path) -> None:
        said = self.refused(KINDS[name], tmp_path, **{KINDS[name].names[0]: torch.ones(3, 5)})
        assert said.startswith(f"a.{KINDS[name].names[0]} has shape (3, 5), its format ")

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("name", ["compressed, channel", "fp8, blocks", "fp8, tensor, static"])
    def test_a_scale_that_is_none(self, name: str, value: float, tmp_path: Path) -> None:
        kind = KINDS[name]
        scale = kind.write("a", torch.ones(256, 256))[f"a.{kind.names[0]}"].clone()
        scale.view(-1)[-1] = value
        said = self.refused(kind, tmp_path, **{kind.names[0]: scale})
        assert (
            said == f"a.{kind.names[0]} holds a scale of {value}, where all are finite and above 0"
        )

    def test_an_input_scale_that_is_none(self, tmp_path: Path) -> None:
        said = self.refused(
            KINDS["fp8, tensor, static"], tmp_path, input_scale=torch.tensor(float("nan"))
        )
        assert "a.input_scale holds a scale of nan" in said

    @EVERY
    def test_a_weight_that_is_not_quantized(self, name: str, tmp_path: Path) -> None:
        said = self.refused(KINDS[name], tmp_path, weight=torch.randn(256, 256))
        asked = "I8" if KINDS[name].integers else "F8_E4M3"
        assert "a.weight is of type F32" in said
        assert f"asks for one of {asked}; name a projection that is not quantized among" in said

    def test_a_part_that_cuts_a_block(self) -> None:
        layout = format_of(KINDS["fp8, blocks"])
        part = Piece("a", (256, 256), slice(0, 64), slice(0, 256))
        with pytest.raises(ValueError, match=r"a: a rank's part of 256 would cut blocks of 128"):
            layout.allocate([part], torch.float32, CPU)
