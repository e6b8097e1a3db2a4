"""Rotary embeddings of parts of heads, with pairs that stand anywhere in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.rope import rotate_reference
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.config import ModelError, RopeConfig
from radixgrove.protocol.model.parse import parse_config
from radixgrove.worker.models.context import TensorPlacement
from radixgrove.worker.models.linear import Linear, Rows
from radixgrove.worker.models.rope import rotary_order, rotary_table
from radixgrove.worker.parallel.group import Shard, TensorParallel
from tests.worker.execution import tiny

CPU = torch.device("cpu")


def turned(x: Tensor, rope: RopeConfig, positions: Tensor) -> Tensor:
    """[T, D], each pair as a complex number times that of its angle."""
    rotated = rope.rotated(x.shape[1])
    halves = torch.arange(rotated).view(2, -1)
    if rope.interleaved:
        halves = torch.arange(rotated).view(-1, 2).T
    first, second = halves
    frequencies = rope.theta ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angles = torch.outer(positions.double(), frequencies)
    pairs = torch.complex(x[:, first], x[:, second]) * torch.polar(torch.ones_like(angles), angles)
    out = x.clone()
    out[:, first], out[:, second] = pairs.real, pairs.imag
    return out


@given(
    st.integers(1, 20).map(lambda half: 2 * half),
    st.floats(0.05, 1.0),
    st.booleans(),
    st.integers(0, 99),
)
def test_products_of_queries_and_keys_are_those_of_rotated_pairs(
    head_dim: int, share: float, interleaved: bool, seed: int
) -> None:
    share = max(2, int(head_dim * share) // 2 * 2) / head_dim + 1e-9
    rope = RopeConfig(theta=100.0, parameters={}, share=min(1.0, share), interleaved=interleaved)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 5, head_dim, dtype=torch.float64, generator=generator)
    positions = torch.tensor([0, 1, 7, 30, 63])
    expected = turned(q, rope, positions) @ turned(k, rope, positions).T
    order = rotary_order(rope, head_dim)
    if order is None:
        order = list(range(head_dim))
    assert sorted(order) == list(range(head_dim))
    table = rotary_table(rope, head_dim, 64, CPU)
    ours = [rotate_reference(x[:, None, order], table, positions)[:, 0] for x in (q, k)]
    torch.testing.assert_close(ours[0] @ ours[1].T, expected, atol=1e-4, rtol=1e-4)


def test_whole_heads_in_halves_stay_as_they_are() -> None:
    assert rotary_order(RopeConfig(theta=1e4, parameters={}), 64) is None


@pytest.mark.parametrize(
    ("factor", "complaint"),
    [
        (1.5, "partial_rotary_factor 1.5 is not supported"),
        (0, "partial_rotary_factor must be a positive number"),
        (0.2, "partial_rotary_factor 0.2 of head_dim 16 is not an even number"),
        (0.01, "not an even number"),
    ],
)
def test_a_share_that_pairs_cannot_have_is_refused(factor: float, complaint: str) -> None:
    raw = {**tiny._SIZES, "architectures": ["StableLmForCausalLM"]}
    with pytest.raises(ModelError, match=complaint):
        parse_config(raw | {"partial_rotary_factor": factor})


# ---- rows of a projection change places ---------------------------------------------------------

ORDER = torch.tensor([4, 5, 6, 7, 1, 0, 3, 2])


def projection(weight: Weight) -> Linear:
    """Of 8 outputs that have an order, and 4 behind them."""
    place = TensorPlacement(TensorParallel(Shard()), torch.float32, CPU)
    linear = Linear.column(place, 6, [Rows.own("x", 12)], bias=True)
    linear.weight, linear.bias = weight, torch.randn(12)
    return linear


@pytest.mark.parametrize("scales", ["none", "rows", "blocks"])
def test_rows_take_their_scales_and_biases_along(scales: str) -> None:
    payload = torch.randint(-8, 8, (12, 6)).float()
    weight, whole = Weight.plain(payload), payload.clone()
    if scales == "rows":
        of_rows = torch.rand(12)
        weight = replace(weight, payload=payload.to(FLOAT8), scales=of_rows.clone())
        whole *= of_rows[:, None]
    elif scales == "blocks":  # of four rows and three columns
        blocks = torch.rand(3, 2)
        weight = replace(weight, payload=payload.to(FLOAT8), scales=blocks.clone(), block=(4, 3))
        whole *= blocks.repeat_interleave(4, 0).repeat_interleave(3, 1)
    linear = projection(weight)
    assert linear.bias is not None
    bias = linear.bias.clone()
    linear.reorder_outputs(ORDER)
    got = linear.weight.payload.float()
    if scales == "rows" and linear.weight.scales is not None:
        got *= linear.weight.scales[:, None]
    elif linear.weight.scales is not None:
        got *= linear.weight.scales.repeat_interleave(4, 0).repeat_interleave(3, 1)
    every = torch.cat((ORDER, torch.arange(8, 12)))
    assert torch.equal(got, whole[every])
    assert torch.equal(linear.bias, bias[every])


def test_blocks_that_would_be_cut_are_refused() -> None:
    payload, scales = torch.zeros(12, 6).to(FLOAT8), torch.rand(3, 1)
    linear = projection(Weight(payload, torch.float32, scales=scales, block=(4, 6)))
    with pytest.raises(ModelError, match="blocks of 4 rows that share a scale would be cut"):
        linear.reorder_outputs(torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]))
    scales[1] = scales[0]  # two halves of one block of the checkpoint
    linear.reorder_outputs(torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]))
