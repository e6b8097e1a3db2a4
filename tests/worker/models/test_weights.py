"""Tensors of a checkpoint into parameters: slices of any dimension, other layouts, and what is said
of tensors that are not as expected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from radixgrove.protocol.model.config import ModelError
from radixgrove.worker.models.formats.base import UNQUANTIZED
from radixgrove.worker.models.parts import Piece, WeightPart
from radixgrove.worker.models.weights import fill_random, load_safetensors


def load(directory: Path, tensors: dict[str, torch.Tensor], *parts: WeightPart) -> None:
    save_file(tensors, directory / "model.safetensors")
    load_safetensors(parts, directory, lambda done: None)


@pytest.mark.parametrize(
    "window",
    [
        (),
        (slice(1, 3),),
        (slice(0, 4), slice(2, 4)),
        (slice(1, 2), slice(0, 6), slice(5, 8)),
        (slice(2, 2),),
    ],
)
def test_any_dimension_of_a_tensor_is_sliced(window: tuple[slice, ...], tmp_path: Path) -> None:
    whole = torch.randn(4, 6, 8)
    target = torch.empty_like(whole[window])
    load(tmp_path, {"experts": whole}, WeightPart("experts", target, whole.shape, window))
    assert torch.equal(target, whole[window])


def test_a_scalar_fills_its_target(tmp_path: Path) -> None:
    target = torch.empty(3)
    load(tmp_path, {"scale": torch.tensor(0.5)}, WeightPart("scale", target, ()))
    assert target.tolist() == [0.5] * 3


def test_a_tensor_may_be_stored_in_another_layout(tmp_path: Path) -> None:
    """As experts that a checkpoint has inputs first."""
    whole = torch.randn(2, 6, 4)
    target = torch.empty(2, 4, 3)

    def store(window: torch.Tensor) -> None:
        target.copy_(window.transpose(1, 2))

    window = slice(0, 2), slice(3, 6)
    load(tmp_path, {"up": whole}, WeightPart("up", target, (2, 6, 4), window, store))
    assert torch.equal(target, whole[:, 3:].transpose(1, 2))


def test_values_that_a_store_refuses_are_named(tmp_path: Path) -> None:
    def store(window: torch.Tensor) -> None:
        raise ValueError("holds a zero")

    part = WeightPart("scale", torch.empty(1), (1,), store=store)
    with pytest.raises(ModelError, match=r"^scale holds a zero$"):
        load(tmp_path, {"scale": torch.zeros(1)}, part)


def test_sizes_of_one_count_for_nothing_where_a_part_says_so(tmp_path: Path) -> None:
    target = torch.empty(2)
    part = WeightPart("scale", target, (4,), (slice(1, 3),), loose=True)
    load(tmp_path, {"scale": torch.arange(4.0)[:, None]}, part)
    assert target.tolist() == [1.0, 2.0]
    with pytest.raises(ModelError, match=r"scale has shape \(2, 2\), the config asks for \(4,\)"):
        load(tmp_path, {"scale": torch.zeros(2, 2)}, part)


def test_an_alias_is_read_where_the_name_is_absent(tmp_path: Path) -> None:
    target = torch.empty(1)
    part = WeightPart("scale", target, (1,), aliases=("other", "scale_inv"))
    load(tmp_path, {"scale_inv": torch.full((1,), 3.0)}, part)
    assert target.item() == 3.0
    load(tmp_path, {"scale_inv": torch.zeros(1), "scale": torch.full((1,), 4.0)}, part)
    assert target.item() == 4.0


def test_a_missing_tensor_says_which_format_expects_it(tmp_path: Path) -> None:
    parts = [
        WeightPart("a.weight", torch.empty(1), (1,), format="fp8"),
        WeightPart("a.scale", torch.empty(1), (1,), format="fp8"),
    ]
    with pytest.raises(ModelError, match=r"lacks a\.scale, which its format fp8 expects$"):
        load(tmp_path, {"a.weight": torch.zeros(1, dtype=torch.int8)}, *parts)
    said = r"lacks a\.scale, which its format fp8 expects; a\.weight is not quantized: name a proj"
    with pytest.raises(ModelError, match=said):
        load(tmp_path, {"a.weight": torch.zeros(1)}, *parts)
    with pytest.raises(ModelError, match=r"lacks norm$"):
        load(tmp_path, {"a.weight": torch.zeros(1)}, WeightPart("norm", torch.empty(1), (1,)))


def test_another_type_is_refused_instead_of_converted(tmp_path: Path) -> None:
    """A quantized tensor read as numbers, its scales ignored, would be another model."""
    for tensor in (torch.zeros(1, dtype=torch.int8), torch.zeros(1).to(torch.float8_e4m3fn)):
        with pytest.raises(ModelError, match=r"a is of type (I8|F8_E4M3), .*; only projections"):
            load(tmp_path, {"a": tensor}, WeightPart("a", torch.empty(1), (1,)))


def test_what_headers_say_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    target = torch.full((1,), 7.0)
    parts = [WeightPart("a", target, (1,)), WeightPart("b", torch.empty(2), (2,))]
    with pytest.raises(ModelError, match=r"b has shape \(3,\)"):
        load(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(3)}, *parts)
    assert target.item() == 7.0


def test_pieces_of_a_fused_weight_and_of_a_stack(tmp_path: Path) -> None:
    device = torch.device("cpu")
    tensors = {f"{i}.{name}.weight": torch.randn(4, 6) for i in range(3) for name in ("up", "down")}
    experts = [
        [Piece(f"{i}.{name}", (4, 6), slice(2, 4), slice(0, 6)) for name in ("up", "down")]
        for i in range(3)
    ]
    weight = UNQUANTIZED.allocate(experts[0], torch.float32, device, (3,))
    parts = [part for i in range(3) for part in UNQUANTIZED.parts(weight[i], experts[i])]
    load(tmp_path, tensors, *parts)
    assert weight.shape == (4, 6)
    for i in range(3):
        expected = torch.cat([tensors[f"{i}.up.weight"][2:], tensors[f"{i}.down.weight"][2:]])
        assert torch.equal(weight[i].payload, expected)


def test_random_weights_are_what_each_part_says() -> None:
    normal, ones = torch.empty(64, 64), torch.empty(5)
    parts = [
        WeightPart("a", normal, (64, 64), deviation=3.0),
        WeightPart("b", ones, (5,), dummy=1.0),
    ]
    fill_random(parts, seed=1)
    assert ones.tolist() == [1.0] * 5
    assert normal.std().item() == pytest.approx(3.0, rel=0.1)
