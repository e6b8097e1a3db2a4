"""Mixtures of experts: routing, sorting and both products against references in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import moe
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.moe import (
    GROUPED,
    ExpertChoice,
    ExpertPairs,
    ExpertTiles,
    ExpertWeights,
    PairsConfig,
    TileConfig,
)
from radixgrove.kernels.norm import rms_norm_reference
from radixgrove.kernels.quantize import widened
from radixgrove.kernels.routing import (
    Router,
    Routing,
    route,
    route_and_sort,
    route_reference,
    sort,
)
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.config import ClampedSwiGlu
from radixgrove.protocol.model.quantization import Activations
from tests.kernels.helpers import DTYPES, assert_close, sizes

# Of products of float8 in float32: tensor cores sum with about 14 bits, the interpreter exactly.
FLOAT8_SUMS = 8e-3 if torch.cuda.is_available() else 2e-3
# Rounding of `silu(gate) * up` between the products, where the reference rounds twice.
SLACK = 2.0
ROUTINGS = {
    "softmax": Routing(3),
    "renormalized": Routing(3, renormalize=True),
    "late": Routing(2, late=True),
    "sigmoid": Routing(3, sigmoid=True, renormalize=True, scale=2.5),
    "groups": Routing(3, groups=4, groups_kept=2),
    "groups-of-two": Routing(4, sigmoid=True, groups=2, groups_kept=1, group_top=2),
}
WAYS = {
    "pairs": ExpertChoice(
        pairs=ExpertPairs(PairsConfig(rows=32, block_k=32), PairsConfig(rows=32, block_k=16))
    ),
    "whole-pairs": ExpertChoice(
        pairs=ExpertPairs(PairsConfig(rows=16, block_k=128), PairsConfig(rows=32, block_k=64))
    ),
    "small-tiles": ExpertChoice(
        tiles=ExpertTiles(
            16, TileConfig(block_n=32, block_k=32), TileConfig(block_n=32, block_k=16)
        )
    ),
    "large-tiles": ExpertChoice(
        tiles=ExpertTiles(
            64,
            TileConfig(block_n=32, block_k=32, group=2),
            TileConfig(block_n=32, block_k=16, group=2),
        )
    ),
}


def tokens_for(way: str, tokens: int, device: torch.device) -> int:
    """Few in the interpreter, where a program takes milliseconds, for the way with many of them."""
    return tokens if device.type == "cuda" or "pairs" not in way else min(tokens, 10)


def random_logits(tokens: int, experts: int, device: torch.device) -> Tensor:
    """No two of a token's are equal: the order of equal scores is tested by itself."""
    ranks = torch.stack([torch.randperm(experts) for _ in range(tokens)]).float()
    return ((ranks - experts / 2) / experts * 4).contiguous().to(device)


@pytest.mark.covering(2)
@sizes([1, 5, 40], [3000])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("experts", [8, 60, 128, 512])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routes(kind: str, experts: int, bias: bool, tokens: int, device: torch.device) -> None:
    routing = ROUTINGS[kind]
    shifts = torch.randn(experts, device=device) * 0.1 if bias and not routing.late else None
    loads = [torch.full((experts,), 7, device=device) for _ in range(2)]
    logits = random_logits(tokens, experts, device)
    routed = route(logits, Router(routing, shifts, load=loads[0]))
    expected = route_reference(logits, Router(routing, shifts, load=loads[1]))
    assert torch.equal(routed.ids, expected.ids)
    torch.testing.assert_close(routed.weights, expected.weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(loads[0], loads[1])
    assert loads[0].sum() == 7 * experts + tokens * routing.top_k


def test_of_equal_scores_the_first_experts_goes_first(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]], device=device)
    router = Router(Routing(3))
    assert route(logits, router).ids.tolist() == [[1, 2, 0], [0, 1, 2]]
    assert route_reference(logits, router).ids.tolist() == [[1, 2, 0], [0, 1, 2]]


def test_renormalized_softmax_is_the_late_one(device: torch.device) -> None:
    logits = random_logits(9, 8, device)
    early = route(logits, Router(Routing(2, renormalize=True)))
    late = route(logits, Router(Routing(2, late=True)))
    assert torch.equal(early.ids, late.ids)
    torch.testing.assert_close(early.weights, late.weights)


def random_weights(
    experts: int, hidden: int, inner: int, like: Tensor, **router: Any
) -> ExpertWeights:
    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape) / shape[-1] ** 0.5).to(like.device, like.dtype)

    router = {"routing": Routing(2)} | router
    matrices = random(experts, 2 * inner, hidden), random(experts, hidden, inner)
    return ExpertWeights(*map(Weight.plain, matrices), Router(**router))


def exact(x: Tensor, logits: Tensor, weights: ExpertWeights, residual: Tensor | None) -> Tensor:
    stacks = (
        Weight.plain(widened(weight).double() if weight.quantized else weight.payload.double())
        for weight in (weights.gate_up, weights.down)
    )
    biases = (
        None if bias is None else bias.double()
        for bias in (weights.gate_up_bias, weights.down_bias)
    )
    wide = ExpertWeights(*stacks, weights.router, *biases, weights.clamped)
    rest = None if residual is None else residual.double()
    return moe.experts_reference(x.double(), logits, wide, rest)


def check(
    x: Tensor, logits: Tensor, weights: ExpertWeights, choice: ExpertChoice, residual: bool
) -> None:
    rest = torch.randn(x.shape).to(x) if residual else None
    expected = exact(x, logits, weights, rest)
    out = moe.experts(x, logits, weights, rest, choice=choice)
    assert_close(out, expected, SLACK * {torch.float32: 3e-6}.get(x.dtype, 1e-2))
    if residual:
        assert out is rest, "the residual is updated in place"


@pytest.mark.covering(2)
@DTYPES
@sizes([1, 3, 40], [600])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (33, 3), (8, 8)])
@pytest.mark.parametrize(("hidden", "inner"), [(48, 40), (33, 17)])
@pytest.mark.parametrize("way", WAYS)
def test_experts(
    way: str,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    residual: bool,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    tokens = tokens_for(way, tokens, device)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weights = random_weights(experts, hidden, inner, x, routing=Routing(top_k))
    check(x, random_logits(tokens, experts, device), weights, WAYS[way], residual)


# Some of gate and up are beyond the limit, on either side.
CLAMPED = ClampedSwiGlu(alpha=1.702, limit=0.7)


def with_biases(
    weights: ExpertWeights, *, of_down: bool = True, clamped: ClampedSwiGlu | None = CLAMPED
) -> ExpertWeights:
    """Random ones."""
    gate_up, down = weights.gate_up, weights.down

    def random(size: int) -> Tensor:
        return torch.randn(weights.count, size).to(gate_up.device, gate_up.dtype)

    return replace(
        weights,
        gate_up_bias=random(gate_up.shape[0]),
        down_bias=random(down.shape[0]) if of_down else None,
        clamped=clamped,
    )


@pytest.mark.covering(2)
@DTYPES
@sizes([1, 3, 40], [600])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "some-elsewhere"])
@pytest.mark.parametrize("of_down", [False, True], ids=["another-rank's", "own"])
@pytest.mark.parametrize("clamped", [None, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize(("hidden", "inner"), [(48, 40), (33, 17)])
@pytest.mark.parametrize("way", WAYS)
def test_experts_with_biases(
    way: str,
    hidden: int,
    inner: int,
    clamped: ClampedSwiGlu | None,
    of_down: bool,
    elsewhere: bool,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    tokens = tokens_for(way, tokens, device)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    places = torch.tensor([-1, 0, -1, 1, 2, -1], dtype=torch.int32, device=device)
    held = {"places": places} if elsewhere else {}
    routing = Routing(3, renormalize=True)
    weights = random_weights(3 if elsewhere else 6, hidden, inner, x, routing=routing, **held)
    weights = with_biases(weights, of_down=of_down, clamped=clamped)
    check(x, random_logits(tokens, 6, device), weights, WAYS[way], residual=True)


def test_experts_with_biases_are_what_gpt_oss_says(device: torch.device) -> None:
    """The reference, against its formula written out for one token."""
    x = torch.randn(1, 16, device=device, dtype=torch.float64)
    logits = torch.tensor([[0.0, 2.0, 1.0]], device=device)
    weights = with_biases(random_weights(3, 16, 8, x, routing=Routing(2, renormalize=True)))
    shares = torch.tensor([2.0, 1.0]).softmax(-1).tolist()
    expected = torch.zeros_like(x)
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    for expert, share in zip((1, 2), shares, strict=True):
        both = weights.gate_up.payload[expert] @ x[0] + weights.gate_up_bias[expert]
        gate, up = both[:8].clamp(max=0.7), both[8:].clamp(-0.7, 0.7)
        h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        expected += share * (weights.down.payload[expert] @ h + weights.down_bias[expert])
    torch.testing.assert_close(
        moe.experts_reference(x, logits, weights), expected, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("way", WAYS)
def test_clamped_nan_stays_nan(way: str, device: torch.device) -> None:
    tokens = tokens_for(way, 20, device)
    x = torch.randn(tokens, 32, device=device)
    weights = with_biases(random_weights(6, 32, 16, x, routing=Routing(2)))
    x[3, 5] = float("nan")
    out = moe.experts(x, random_logits(tokens, 6, device), weights, choice=WAYS[way])
    assert out[3].isnan().all()
    others = [row for row in range(tokens) if row != 3]
    assert out[others].isfinite().all()


def test_torchs_grouped_product_takes_no_biases(device: torch.device) -> None:
    x = torch.randn(4, 32, device=device).bfloat16()
    weights = with_biases(random_weights(6, 32, 16, x))
    assert not weights.can_be_grouped
    with pytest.raises(ValueError, match="grouped_mm does not take"):
        moe.experts(x, random_logits(4, 6, device), weights, choice=GROUPED)


@pytest.mark.parametrize("way", ["small-tiles", "large-tiles"])
def test_tiles_round_where_the_reference_does(way: str, device: torch.device) -> None:
    """But for numbers that lie between two: the order of a sum may decide those."""
    tokens = 20
    x = torch.randn(tokens, 64, device=device).bfloat16()
    weights = random_weights(6, 64, 48, x, routing=Routing(3, renormalize=True))
    logits = random_logits(tokens, 6, device)
    out = moe.experts(x, logits, weights, torch.zeros_like(x), choice=WAYS[way])
    expected = moe.experts_reference(x, logits, weights)
    assert (out != expected).float().mean() < 0.01


def float8(
    experts: int,
    rows: int,
    columns: int,
    block: tuple[int, int] | None,
    device: torch.device,
    **activations: Any,
) -> Weight:
    """Random numbers and scales, of rows or of blocks."""
    shape = (-(-rows // block[0]), -(-columns // block[1])) if block else (rows,)
    return Weight(
        torch.randn(experts, rows, columns).to(device, FLOAT8),
        torch.bfloat16,
        scales=(torch.rand(experts, *shape) / columns**0.5 + 0.01).to(device),
        block=block,
        **activations,
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "some-elsewhere"])
@pytest.mark.parametrize("block", [None, (16, 32), (8, 32)], ids=["rows", "blocks", "low-blocks"])
@pytest.mark.parametrize("way", WAYS)
def test_float8_experts_are_widened(
    way: str,
    block: tuple[int, int] | None,
    elsewhere: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """At sizes past a block."""
    hidden, inner, tokens = 72, 40, tokens_for(way, 20, device)
    weights = float8_experts(hidden, inner, block, device, elsewhere=elsewhere)
    x = torch.randn(tokens, hidden).to(device, dtype)
    check(x, random_logits(tokens, 6, device), weights, WAYS[way], residual=True)


def float8_experts(
    hidden: int,
    inner: int,
    block: tuple[int, int] | None,
    device: torch.device,
    *,
    elsewhere: bool = False,
    **activations: Any,
) -> ExpertWeights:
    """Six of them, or every other one."""
    places = [-1, 0, -1, 1, 2, -1] if elsewhere else None
    count = 3 if elsewhere else 6
    return ExpertWeights(
        float8(count, 2 * inner, hidden, block, device, **activations),
        float8(count, hidden, inner, block, device, **activations),
        Router(
            Routing(2),
            places=None if places is None else torch.tensor(places, device=device).int(),
        ),
    )


QUANTIZING_TILES = {
    "small-tiles": ExpertChoice(
        tiles=ExpertTiles(
            16, TileConfig(block_n=128, block_k=128), TileConfig(block_n=128, block_k=128)
        )
    ),
    "large-tiles": ExpertChoice(
        tiles=ExpertTiles(
            64,
            TileConfig(block_n=128, block_k=128, group=2),
            TileConfig(block_n=64, block_k=64, group=2),
        )
    ),
}
# Blocks of a weight are as high as its tiles, or lower; inputs have scales of tokens or parts.
QUANTIZED = {
    "rows": (None, Activations.TOKEN),
    "static": (None, Activations.STATIC),
    "blocks": ((128, 128), Activations.GROUP),
    "low-blocks": ((32, 128), Activations.GROUP),
    "blocks, tokens": ((128, 128), Activations.TOKEN),
}


def quantizing_reference(x: Tensor, logits: Tensor, weights: ExpertWeights) -> Tensor:
    """As tiles quantize: x by tokens or parts, and what comes between the products, rounded to the
    type of x, by parts."""
    parts = weights.gate_up.activations == Activations.GROUP
    gate_up = replace(
        weights.gate_up,
        payload=widened(weights.gate_up),
        scales=None,
        activations=Activations.GROUP if parts else Activations.TOKEN,
    )
    down = replace(
        weights.down,
        payload=widened(weights.down),
        scales=None,
        block=(1, moe.H_WIDTH),
        activations=Activations.GROUP,
    )
    return moe.experts_reference(x, logits, ExpertWeights(gate_up, down, weights.router))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "some-elsewhere"])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("hidden", "inner"), [(256, 256), (144, 208)])
@pytest.mark.parametrize("way", QUANTIZING_TILES)
def test_tiles_quantize_what_float8_experts_multiply(
    way: str,
    hidden: int,
    inner: int,
    kind: str,
    elsewhere: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """As their reference does, and so near to what the weights stand for as float8 lets be."""
    block, activations = QUANTIZED[kind]
    static = activations == Activations.STATIC
    weights = float8_experts(
        hidden,
        inner,
        block,
        device,
        elsewhere=elsewhere,
        activations=activations,
        activation_bound=1.5 if activations == Activations.TOKEN else None,
        input_scale=torch.ones(6, 1, device=device) if static else None,
    )
    x, logits = torch.randn(20, hidden).to(device, dtype), random_logits(20, 6, device)
    out = moe.experts(x, logits, weights, choice=QUANTIZING_TILES[way])
    # A sum that rounds otherwise may round an input to the next float8: rare.
    bound = FLOAT8_SUMS if x.dtype == torch.float32 else 1e-2
    assert_close(out, quantizing_reference(x, logits, weights), bound)
    if activations != Activations.TOKEN:  # whose bound cuts values
        assert_close(out, exact(x, logits, weights, None), 0.06)


@pytest.mark.parametrize("way", QUANTIZING_TILES)
def test_float8_experts_with_biases(way: str, device: torch.device) -> None:
    """As `quantize: fp8` makes them of gpt-oss."""
    weights = with_biases(float8_experts(256, 128, None, device, activations=Activations.TOKEN))
    x, logits = torch.randn(20, 256, device=device).bfloat16(), random_logits(20, 6, device)
    out = moe.experts(x, logits, weights, choice=QUANTIZING_TILES[way])
    assert_close(out, exact(x, logits, weights, None), 0.06)


@pytest.mark.parametrize("added", [False, True], ids=["norm", "added norm"])
@pytest.mark.parametrize("kind", ["rows", "blocks"])
def test_a_norm_quantizes_for_experts(kind: str, added: bool, device: torch.device) -> None:
    block, activations = QUANTIZED[kind]
    weights = float8_experts(256, 128, block, device, activations=activations)
    x, logits = torch.randn(20, 256, device=device).bfloat16(), random_logits(20, 6, device)
    norm = torch.rand(256, device=device).bfloat16() + 0.5
    rest = torch.randn_like(x) if added else None
    exact = rms_norm_reference(x if rest is None else x + rest, norm, 1e-6)
    choice = QUANTIZING_TILES["small-tiles"]
    normed, rows = moe.norm_for_experts(x, norm, 1e-6, weights, choice, rest)
    assert_close(normed, exact)
    assert rows is not None
    out = moe.experts(normed, logits, weights, rows=rows, choice=choice)
    assert torch.equal(out, moe.experts(normed, logits, weights, choice=choice))
    plain = moe.norm_for_experts(x, norm, 1e-6, weights, WAYS["pairs"])
    assert plain[1] is None
    assert_close(plain[0], rms_norm_reference(x, norm, 1e-6))


@pytest.mark.parametrize("kind", ["rows", "blocks"])
@pytest.mark.parametrize("way", QUANTIZING_TILES)
def test_what_has_no_scale_stays_with_its_token(way: str, kind: str, device: torch.device) -> None:
    """Zeros, NaN and infinity, in x and (of values that are large) between the products."""
    block, activations = QUANTIZED[kind]
    weights = float8_experts(256, 128, block, device, activations=activations)
    x, logits = torch.randn(20, 256, device=device), random_logits(20, 6, device)
    x[3] = 0.0
    x[5, 7], x[6, 9] = float("nan"), float("inf")
    x[8] *= 1e25  # `silu(gate) * up` is beyond float32
    out = moe.experts(x, logits, weights, choice=QUANTIZING_TILES[way])
    assert torch.equal(out[3], torch.zeros(256, device=device))
    assert out[5].isnan().all()
    assert out[6].isnan().all()
    assert not out[8].isfinite().any()
    others = [row for row in range(20) if row not in (3, 5, 6, 8)]
    assert_close(out[others], quantizing_reference(x, logits, weights)[others], FLOAT8_SUMS)


def test_tiles_that_quantize_are_as_wide_as_a_group(device: torch.device) -> None:
    weights = float8_experts(256, 128, None, device, activations=Activations.TOKEN)
    x, logits = torch.randn(20, 256, device=device), random_logits(20, 6, device)
    with pytest.raises(ValueError, match="tiles of 128, not 32"):
        moe.experts(x, logits, weights, choice=WAYS["small-tiles"])


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "some-elsewhere"])
def test_torchs_grouped_product_is_another_way(elsewhere: bool, device: torch.device) -> None:
    x = torch.randn(21, 32, device=device).bfloat16()
    places = torch.tensor([-1, 0, -1, 1, 2, -1], dtype=torch.int32, device=device)
    held = {"places": places} if elsewhere else {}
    weights = random_weights(3 if elsewhere else 6, 32, 16, x, routing=Routing(2), **held)
    check(x, random_logits(21, 6, device), weights, GROUPED, residual=True)


@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_on_one_expert_and_most_experts_unused(way: str, device: torch.device) -> None:
    tokens = tokens_for(way, 70, device)
    x = torch.randn(tokens, 32, device=device)
    logits = torch.zeros(tokens, 40, device=device)
    logits[:, 17] = 1.0
    weights = random_weights(40, 32, 16, x, routing=Routing(1))
    check(x, logits, weights, WAYS[way], residual=False)


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_some_of_the_experts_sum_to_all_of_them(
    way: str, residual: bool, device: torch.device
) -> None:
    """Also tokens of which a rank has no expert."""
    tokens = tokens_for(way, 20, device)
    x = torch.randn(tokens, 32, device=device)
    weights = random_weights(6, 32, 16, x, routing=Routing(2, renormalize=True))
    logits = random_logits(tokens, 6, device)
    rest = torch.randn_like(x) if residual else None
    expected = exact(x, logits, weights, rest)
    total = torch.zeros_like(x)
    for rank, held in enumerate(([4, 1], [0, 5], [3, 2])):
        places = torch.full((6,), -1, dtype=torch.int32, device=device)
        places[held] = torch.arange(2, dtype=torch.int32, device=device)
        own = ExpertWeights(
            Weight.plain(weights.gate_up.payload[held].contiguous()),
            Weight.plain(weights.down.payload[held].contiguous()),
            replace(weights.router, places=places),
        )
        first = rest.clone() if rest is not None and rank == 0 else None
        part = exact(x, logits, own, first)
        out = moe.experts(x, logits, own, first, choice=WAYS[way])
        assert_close(out, part, 1e-5)
        total += out
    assert_close(total, expected, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_token_with_nan_stays_alone_with_it(way: str, device: torch.device) -> None:
    tokens = tokens_for(way, 40, device)
    x = torch.randn(tokens, 32, device=device)
    weights = random_weights(8, 32, 16, x, routing=Routing(3, renormalize=True))
    logits = random_logits(tokens, 8, device)
    expected = exact(x, logits, weights, None)
    logits[7], x[7] = float("nan"), float("nan")
    logits[9, 3] = float("nan")
    out = moe.experts(x, logits, weights, choice=WAYS[way])
    assert out[7].isnan().all()
    assert out[9].isnan().all()
    others = [row for row in range(tokens) if row not in (7, 9)]
    assert_close(out[others], expected[others], 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_input_gives_the_same_bits(way: str, device: torch.device) -> None:
    tokens = tokens_for(way, 50, device)
    x = torch.randn(tokens, 32, device=device).bfloat16()
    weights = random_weights(8, 32, 16, x, routing=Routing(4))
    logits = random_logits(tokens, 8, device)
    first, second = (moe.experts(x, logits, weights, choice=WAYS[way]) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("block_m", [16, 64])
def test_sorts_pairs_by_expert_in_blocks_of_one(block_m: int, device: torch.device) -> None:
    """More pairs than a program takes, so that programs must agree on where theirs go."""
    tokens, experts, top_k = 150, 8, 3
    logits = random_logits(tokens, experts, device)
    routed = route(logits, Router(Routing(top_k)), places=experts)
    assert routed.counts is not None
    assert len(routed.counts) > 1
    made = sort(routed, block_m, counters=3000)
    ids = routed.ids.flatten()
    assert torch.equal(made.order.long(), ids.argsort(stable=True))
    assert torch.equal(made.order[made.positions.long()].long().cpu(), torch.arange(ids.numel()))
    assert not made.counters.any()
    counts = torch.bincount(ids, minlength=experts).tolist()
    blocks = [(expert, -(-count // block_m)) for expert, count in enumerate(counts)]
    assert made.num_blocks.item() == sum(count for _, count in blocks) <= made.most_blocks
    expected = [
        (expert, sum(counts[:expert]) + index * block_m)
        for expert, count in blocks
        for index in range(count)
    ]
    used = slice(made.num_blocks.item())  # type: ignore[misc]
    found = zip(made.block_expert[used].tolist(), made.block_start[used].tolist(), strict=True)
    assert list(found) == expected


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "some-elsewhere"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_few_tokens_are_routed_and_sorted_at_once(
    kind: str, elsewhere: bool, device: torch.device
) -> None:
    """As by the two kernels for many."""
    tokens, experts, block_m = 21, 24, 4
    count = experts // 2 if elsewhere else experts
    places = None
    if elsewhere:  # every other one
        places = torch.arange(experts, device=device).int() // 2
        places[1::2] = -1
    logits = random_logits(tokens, experts, device)
    routers = [
        Router(ROUTINGS[kind], places=places, load=torch.zeros(experts, device=device).long())
        for _ in range(2)
    ]
    routed, made = route_and_sort(logits, routers[0], count, block_m, counters=3000)
    assert routed.counts is None
    expected = route(logits, routers[1], places=count)
    apart = sort(expected, block_m, counters=1)
    assert torch.equal(routed.ids, expected.ids)
    assert torch.equal(routed.weights, expected.weights)
    assert torch.equal(routers[0].load, routers[1].load)  # type: ignore[arg-type]
    assert torch.equal(made.offsets, apart.offsets)
    assert torch.equal(made.positions, apart.positions)
    pairs, blocks = int(made.offsets[-1]), int(made.num_blocks)
    assert torch.equal(made.order[:pairs], apart.order[:pairs])
    assert blocks == int(apart.num_blocks)
    assert torch.equal(made.block_expert[:blocks], apart.block_expert[:blocks])
    assert torch.equal(made.block_start[:blocks], apart.block_start[:blocks])
    assert not made.counters.any()


def test_no_tokens(device: torch.device) -> None:
    weights = random_weights(4, 32, 16, torch.zeros(1, device=device))
    x = torch.empty(0, 32, device=device)
    for way in (*WAYS.values(), GROUPED):
        assert moe.experts(x, torch.empty(0, 4, device=device), weights, choice=way).shape == (
            0,
            32,
        )
